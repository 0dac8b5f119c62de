//! `xtrain generate`: the text alone goes to standard output, as it is made.

use super::open_model;
use crate::cli::GenerateArgs;
use crate::failure::Failure;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use xtrain_data::SpecialTokens;
use xtrain_train::generate::{Generator, Sampling};

pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        return Err(Failure::user(format!("--temperature is {}; it must be 0 or more", args.temperature)));
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        return Err(Failure::user(format!("--top-p is {}; it must be above 0 and at most 1", args.top_p)));
    }
    let mut opened = open_model(&args.model)?;
    let prompt = prompt(&args.prompt)?;
    let tokens = opened.tokenizer.encode_prompt(&prompt)?;
    if tokens.is_empty() {
        return Err(Failure::user(
            "the prompt is empty, and this tokenizer has no token that begins a text; give --prompt some text",
        ));
    }
    let vocab_size = opened.weights.model().vocab_size;
    if let Some(bad) = tokens.iter().find(|&&t| t as usize >= vocab_size) {
        return Err(Failure::user(format!(
            "the prompt has token {bad}, but the model's vocabulary has {vocab_size}: the tokenizer is another model's"
        )));
    }
    let limit = opened.weights.model().max_position_embeddings;
    if tokens.len() + args.max_tokens > limit {
        eprintln!(
            "note: prompt and --max-tokens together exceed the {limit} tokens of context that the model is meant for"
        );
    }
    let sampling =
        Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    let stop = opened.tokenizer.stop_tokens().to_vec();
    let mut generator = Generator::new(&mut opened.weights, tokens.len() + args.max_tokens)?;
    let mut decoder = opened.tokenizer.stream_decoder(SpecialTokens::Hide);
    let mut out = std::io::stdout().lock();
    let mut failed = None;
    generator.generate(&mut opened.weights, &tokens, args.max_tokens, sampling, &stop, &mut |token| {
        let shown = decoder.push(token).map_err(Failure::from).and_then(|text| {
            let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            written.map_err(|e| Failure::user(format!("cannot write to standard output: {e}")))
        });
        match shown {
            Ok(()) => ControlFlow::Continue(()),
            Err(failure) => {
                failed = Some(failure);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let rest = decoder.finish()?;
    writeln!(out, "{rest}").map_err(|e| Failure::user(format!("cannot write to standard output: {e}")))
}

fn prompt(given: &str) -> Result<String, Failure> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|e| Failure::user(format!("cannot read the prompt from standard input: {e}")))?;
    Ok(text)
}
