//! `xtrain tokenize`.

use crate::cli::TokenizeArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, TextBar};
use std::ops::ControlFlow;
use xtrain_data::{
    DataError, InputOptions, LearnProgress, PrepareOptions, TextFiles, TokenStream, Tokenizer,
    VocabularyKind, learn_for_dataset, list_inputs, prepare,
};
use xtrain_report::metrics;

pub(crate) fn run(args: &TokenizeArgs) -> Result<(), Failure> {
    terminal::use_threads(args.cpu.threads)?;
    let stop = Stop::on_signals()?;
    let inputs = list_inputs(&args.inputs)?;
    let options = InputOptions { field: args.text_field.clone(), separator: args.separator.clone() };
    let texts = TextFiles { inputs, options };
    let mut bar = TextBar::default();
    let tokenizer = tokenizer(args, &texts, &mut |vocabulary, progress| {
        bar.learning(vocabulary, progress);
        stop.go_on()
    });
    let Some(tokenizer) = unless_stopped(tokenizer)? else { return say_stopped() };
    let tokenizer = tokenizer.with_begin_of_document(args.begin_of_document)?;
    let options = PrepareOptions { input: texts.options, shard_tokens: args.shard_tokens.0 };
    let shown = args.out.display().to_string();
    let dataset = prepare(&texts.inputs, &tokenizer, &options, &args.out, &mut |progress| {
        bar.tokenizing(&shown, progress);
        stop.go_on()
    });
    let made = bar.take();
    let Some(dataset) = unless_stopped(dataset)? else { return say_stopped() };
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

/// The result, or `None` if the user stopped it.
fn unless_stopped<T>(made: Result<T, DataError>) -> Result<Option<T>, Failure> {
    match made {
        Err(DataError::Interrupted) => Ok(None),
        made => Ok(Some(made?)),
    }
}

/// Reports the stop. As in a run, it is no failure: complete shards stay.
fn say_stopped() -> Result<(), Failure> {
    let said = "stopped before the end; complete shards are kept, run the same command again to continue\n";
    terminal::print(said).map(|_| ())
}

fn tokenizer(
    args: &TokenizeArgs,
    texts: &TextFiles,
    on_progress: &mut dyn FnMut(VocabularyKind, LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer, DataError> {
    let t = &args.tokenizer;
    let vocabulary = match (&t.tokenizer, t.bpe_vocab_size, t.chars) {
        (Some(path), ..) => return Tokenizer::load(path),
        (_, Some(size), _) => VocabularyKind::Bpe { size },
        (_, _, true) => VocabularyKind::Chars,
        _ => return Ok(Tokenizer::bytes()),
    };
    let texts = std::slice::from_ref(texts);
    learn_for_dataset(texts, vocabulary, &args.out, &mut |progress| on_progress(vocabulary, progress))
}
