//! `xtrain tokenize`.

use crate::cli::TokenizeArgs;
use crate::failure::Failure;
use crate::terminal::{self, TextBar};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xtrain_data::{
    InputOptions, Learning, PrepareOptions, Texts, TokenStream, Tokenizer, Vocabulary, learn_for_dataset,
    list_inputs, prepare,
};
use xtrain_train::metrics;

pub(crate) fn run(args: &TokenizeArgs) -> Result<(), Failure> {
    terminal::use_threads(args.threads)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let registered = signal_hook::flag::register(signal, stop.clone());
        registered.map_err(|e| Failure::user(format!("cannot watch for signals: {e}")))?;
    }
    let go_on =
        || if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let inputs = list_inputs(&args.inputs)?;
    let options = InputOptions { field: args.text_field.clone(), separator: args.separator.clone() };
    let texts = Texts { inputs, options };
    let mut bar = TextBar::default();
    let tokenizer = tokenizer(args, &texts, &mut |vocabulary, progress| {
        bar.learning(vocabulary, progress);
        go_on()
    })?;
    let tokenizer = tokenizer.with_begin_of_document(args.begin_of_document)?;
    let options = PrepareOptions { input: texts.options, shard_tokens: args.shard_tokens.0 };
    let shown = args.out.display().to_string();
    let dataset = prepare(&texts.inputs, &tokenizer, &options, &args.out, &mut |progress| {
        bar.tokenizing(&shown, progress);
        go_on()
    })?;
    let made = bar.take();
    let totals = terminal::totals(dataset.token_count(), dataset.document_count());
    let text = metrics::format::bytes(dataset.text_bytes().unwrap_or_default());
    let said = match made {
        Some(p) => {
            let read = metrics::format::bytes(p.bytes_done);
            format!("{shown}: {totals}, {text} of text; {read} of files read at {:.1} MB/s\n", p.mb_per_s())
        }
        None => format!("{shown}: already complete: {totals}, {text} of text\n"),
    };
    if terminal::print(&said)?.is_break() {
        return Ok(());
    }
    if args.verify {
        dataset.verify()?;
        return terminal::print(&format!("{shown}: all checksums agree\n")).map(|_| ());
    }
    Ok(())
}

fn tokenizer(
    args: &TokenizeArgs,
    texts: &Texts,
    on_progress: &mut dyn FnMut(Vocabulary, Learning) -> ControlFlow<()>,
) -> Result<Tokenizer, Failure> {
    let t = &args.tokenizer;
    let vocabulary = match (&t.tokenizer, t.bpe_vocab_size, t.chars) {
        (Some(path), ..) => return Ok(Tokenizer::load(path)?),
        (_, Some(size), _) => Vocabulary::Bpe { size },
        (_, _, true) => Vocabulary::Chars,
        _ => return Ok(Tokenizer::bytes()),
    };
    let texts = std::slice::from_ref(texts);
    Ok(learn_for_dataset(texts, vocabulary, &args.out, &mut |progress| on_progress(vocabulary, progress))?)
}
