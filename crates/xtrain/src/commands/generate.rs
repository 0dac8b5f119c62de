//! `xtrain generate`: only the text goes to standard output, while it is generated, with escapes for control
//! characters on a terminal; with `--json`, one object at the end. The speed goes to standard error.
//! `--chats` is in `generate_chats`.

use super::answers::{FOREIGN, refuse_unknown};
use super::speed::Speed;
use super::transcript::Transcript;
use super::{generate_chats, open_model};
use crate::cli::{GenerateArgs, ModelArgs, PromptArgs};
use crate::failure::Failure;
use crate::terminal;
use std::io::Read;
use std::ops::ControlFlow;
use std::sync::Arc;
use xtrain_data::{SpecialTokens, Tokenizer};
use xtrain_model::Architecture;
use xtrain_step::generate::{GeneratedToken, Generator};
use xtrain_step::weights::Weights;
use xtrain_train::open_model::open_without_tokenizer;

pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let sampling = args.sampling.sampling()?;
    if let Some(file) = &args.prompt.chats {
        return generate_chats::run(args, file, sampling);
    }
    if let Some(option) = args.template.given() {
        return Err(Failure::user(format!("{option} is for conversations; it needs --chats FILE")));
    }
    let Model { mut weights, tokenizer, stop } = open(args)?;
    let tokens = prompt_tokens(&args.prompt, tokenizer.as_deref())?;
    check_prompt(args, &tokens, weights.model())?;
    let mut generator = Generator::new(&mut weights, tokens.len() + args.max_tokens)?;
    let decoder =
        tokenizer.as_deref().map(|tokenizer| tokenizer.stream_decoder(&tokens, SpecialTokens::Hide));
    let mut decoder = decoder.transpose()?;
    let mut shown_ids = 0;
    let mut transcript = Transcript::new(args.logprobs);
    let mut text = String::new();
    let mut failed = None;
    let mut each = |made: GeneratedToken<'_>| {
        let piece = match &mut decoder {
            Some(decoder) => decoder.push(made.token).map_err(Failure::from),
            None if args.json => Ok(String::new()),
            // Without a tokenizer the ids are shown, as --tokens takes them.
            None => Ok(format!("{}{}", if shown_ids > 0 { "," } else { "" }, made.token)),
        };
        shown_ids += 1;
        let shown = piece.and_then(|piece| {
            if args.json {
                transcript.push(made);
                text.push_str(&piece);
                return Ok(ControlFlow::Continue(()));
            }
            terminal::print_generated(&piece)
        });
        match shown {
            Ok(go_on) => go_on,
            Err(failure) => {
                failed = Some(failure);
                ControlFlow::Break(())
            }
        }
    };
    let made = generator.generate(&mut weights, &tokens, args.max_tokens, sampling, &stop, &mut each)?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let rest = decoder.map(|decoder| decoder.finish()).transpose()?.unwrap_or_default();
    let speed = Speed { pace: generator.pace(), bandwidth: weights.engine().memory_bandwidth() };
    if args.json {
        text.push_str(&rest);
        let mut answer = transcript.finish(&tokens, &made, &text, args.max_tokens);
        answer["speed"] = speed.json();
        let _ = terminal::print_json(&answer)?;
    } else {
        let _ = terminal::print_generated(&format!("{rest}\n"))?;
    }
    if let Some(line) = speed.line() {
        tracing::info!("{line}");
    }
    Ok(())
}

/// Refuses a prompt that the model cannot take, and notes if its context will be full.
fn check_prompt(args: &GenerateArgs, tokens: &[u32], model: &Architecture) -> Result<(), Failure> {
    let vocab_size = model.vocab_size;
    let of_ids = format!("--tokens takes ids from 0 to {}", vocab_size - 1);
    let cause = if args.prompt.tokens.is_some() { &of_ids } else { FOREIGN };
    refuse_unknown(tokens, vocab_size, cause)?;
    let limit = model.context();
    let is_window = model.window == Some(limit);
    if tokens.len() > limit {
        let what = match is_window {
            true => "sliding window, beyond which attention is not supported,",
            false => "context",
        };
        return Err(Failure::user(format!(
            "the prompt has {} tokens, but the model's {what} has {limit}; give a shorter prompt",
            tokens.len()
        )));
    }
    if is_window && tokens.len() + args.max_tokens > limit + 1 {
        tracing::warn!(
            "the model's sliding window has {limit} tokens, and attention beyond it is not supported: generation ends when it is full"
        );
    } else if tokens.len() + args.max_tokens > limit {
        tracing::info!(
            "prompt and --max-tokens exceed the model's context of {limit} tokens: whenever it is full, the older half is dropped"
        );
    }
    Ok(())
}

/// A model to generate with.
struct Model {
    weights: Weights,
    /// Nothing where ids are given and the folder has none.
    tokenizer: Option<Arc<Tokenizer>>,
    /// The tokens that end a text.
    stop: Vec<u32>,
}

fn open(args: &GenerateArgs) -> Result<Model, Failure> {
    let ModelArgs { model: folder, checkpoint, adapter, .. } = &args.model;
    let (device, precision) = (args.compute.on.device, args.compute.precision);
    let has = |name: &str| folder.join(name).is_file();
    let is_named = checkpoint.step.is_some() || checkpoint.best;
    let is_without = has("config.json") && !has("tokenizer.json") && !is_named;
    if args.prompt.tokens.is_some() && is_without {
        terminal::use_threads(args.model.cpu.threads)?;
        let (weights, stop) = open_without_tokenizer(folder, adapter.as_deref(), device, precision)?;
        return Ok(Model { weights, tokenizer: None, stop });
    }
    let opened = open_model(&args.model, device, precision)?;
    let stop = opened.tokenizer.stop_tokens().to_vec();
    Ok(Model { weights: opened.weights, tokenizer: Some(opened.tokenizer), stop })
}

/// The tokens to continue, at least one.
fn prompt_tokens(args: &PromptArgs, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>, Failure> {
    let (None, Some(tokenizer)) = (&args.tokens, tokenizer) else {
        return Ok(args.tokens.clone().unwrap_or_default());
    };
    let given = args.prompt.as_deref().unwrap_or_default();
    let tokens = tokenizer.encode_prompt(&text(given)?)?;
    if tokens.is_empty() {
        return Err(Failure::user(
            "the prompt is empty, and this tokenizer has no token that begins a text; give --prompt some text",
        ));
    }
    Ok(tokens)
}

fn text(given: &str) -> Result<String, Failure> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|e| Failure::user(format!("cannot read the prompt from standard input: {e}")))?;
    Ok(text)
}
