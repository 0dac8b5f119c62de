//! `xtrain tokenize`.

use crate::cli::TokenizeArgs;
use crate::failure::Failure;
use crate::terminal::{self, TokenizeBar};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xtrain_data::{InputFile, InputOptions, PrepareOptions, Tokenizer, list_inputs, prepare, sample_texts};

/// How much text a vocabulary is learned from at most.
const BPE_SAMPLE_BYTES: u64 = 128 << 20;

pub(crate) fn run(args: &TokenizeArgs) -> Result<(), Failure> {
    let inputs = list_inputs(&args.inputs)?;
    let input = InputOptions { field: args.field.clone(), separator: args.separator.clone() };
    let tokenizer = tokenizer(args, &inputs, &input)?;
    let options = PrepareOptions { input, shard_tokens: args.shard_tokens };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let registered = signal_hook::flag::register(signal, stop.clone());
        registered.map_err(|e| Failure::user(format!("cannot watch for signals: {e}")))?;
    }
    let shown = args.out.display().to_string();
    let mut bar = TokenizeBar::default();
    let dataset = prepare(&inputs, &tokenizer, &options, &args.out, &mut |progress| {
        bar.show(&shown, progress);
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    bar.finish();
    if args.verify {
        dataset.verify()?;
        return terminal::print(&format!("{shown}: all checksums agree\n")).map(|_| ());
    }
    Ok(())
}

fn tokenizer(args: &TokenizeArgs, inputs: &[InputFile], input: &InputOptions) -> Result<Tokenizer, Failure> {
    let t = &args.tokenizer;
    Ok(match (&t.tokenizer, t.bpe, t.chars) {
        (Some(path), ..) => Tokenizer::load(path)?,
        (_, Some(size), _) => Tokenizer::train_bpe(sample_texts(inputs, input, BPE_SAMPLE_BYTES), size)?,
        (_, _, true) => Tokenizer::chars(xtrain_data::prepare::read_texts(inputs, input))?,
        _ => Tokenizer::bytes(),
    })
}
