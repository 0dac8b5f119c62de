//! `xtrain tokenize`.

use crate::cli::{RowArgs, TokenizeArgs};
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Bar, TextBar};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use xtrain_data::chat::{PreviewedRow, preview};
use xtrain_data::{
    ChatOptions, DataError, Dataset, InputOptions, LearnProgress, PrepareOptions, SpecialTokens, Split, Take,
    TextFiles, TokenStream, Tokenizer, VocabularyKind, holds_conversations, learn_for_dataset, prepare,
    shell_quoted,
};
use xtrain_report::metrics;
use xtrain_train::error::RunError;
use xtrain_train::growth::{grow, in_words};
use xtrain_train::paths::today;
use xtrain_train::source::load_tokenizer;
use xtrain_train::texts;

pub(crate) fn run(args: &TokenizeArgs) -> Result<ExitCode, Failure> {
    terminal::use_threads(args.cpu.threads)?;
    let stop = Stop::on_signals()?;
    if args.out.is_none() && args.chat.show.is_none() {
        return verify_folders(&args.inputs, &stop);
    }
    let listing = texts::list(&args.inputs, args.split.unwrap_or(Take::OfFolders(Split::Train)))?;
    if let (Some(splits), None) = (&listing.several_splits, args.split) {
        return Err(Failure::user(format!(
            "files of several splits are named: {splits}; read one with --split train (or validation, or test), or all \
             with --split all"
        )));
    }
    texts::log(&listing);
    let options = InputOptions {
        whole_rows: false,
        field: args.text_field.clone().unwrap_or_else(|| InputOptions::default().field),
        separator: args.separator.clone(),
        skip_bad_rows: args.skip_bad_rows,
    };
    let texts = TextFiles { inputs: listing.files, options };
    let is_chat = args.chat.chat || args.text_field.is_none() && holds_conversations(&texts.inputs)?;
    let chat = is_chat.then(|| chat_options(&args.chat)).transpose()?;
    if let Some(rows) = args.chat.show {
        return show(args, &texts, chat.unwrap_or_default(), rows).map(|()| ExitCode::SUCCESS);
    }
    let Some(out) = &args.out else { return Ok(ExitCode::SUCCESS) };
    let mut bar = TextBar::default();
    let tokenizer = tokenizer(args, out, &texts, &mut |vocabulary, progress| {
        bar.learning(vocabulary, progress);
        stop.check()
    });
    let tokenizer = match tokenizer {
        Err(RunError::Data(DataError::Interrupted)) => return say_stopped(),
        tokenizer => tokenizer?,
    };
    let tokenizer = tokenizer.with_begin_of_document(args.begin_of_document)?;
    let tokenizer = with_markers(args, tokenizer, chat.as_ref())?;
    let options = PrepareOptions { input: texts.options, chat, shard_tokens: args.shard_tokens.0 };
    let shown = terminal::shown_path(out);
    let dataset = prepare(&texts.inputs, &tokenizer, &options, out, &mut |progress| {
        bar.tokenizing(&shown, progress);
        stop.check()
    });
    let made = bar.take();
    let Some(dataset) = unless_stopped(dataset)? else { return say_stopped() };
    let totals = terminal::totals(dataset.token_count(), dataset.document_count());
    let skipped = match dataset.skipped_rows() {
        0 => String::new(),
        1 => ", 1 bad row skipped".to_owned(),
        rows => format!(", {} bad rows skipped", metrics::format::grouped(rows)),
    };
    let text = dataset
        .text_bytes()
        .map_or(String::new(), |bytes| format!(", {} of text", metrics::format::bytes(bytes)));
    let said = match made {
        Some(p) => {
            let read = metrics::format::bytes(p.bytes_done);
            format!("{shown}: {totals}{text}{skipped}; {read} of files read at {:.1} MB/s\n", p.mb_per_s())
        }
        None => format!("{shown}: already complete: {totals}{text}{skipped}\n"),
    };
    let rows = dataset.chat().map_or(String::new(), |record| format!("{shown}: {}\n", record.summary()));
    if terminal::print(&(said + &rows))?.is_break() {
        return Ok(ExitCode::SUCCESS);
    }
    let verified = args.verify.then(|| verify(&dataset, &shown, &stop)).transpose()?;
    Ok(verified.and_then(ControlFlow::break_value).unwrap_or(ExitCode::SUCCESS))
}

/// The settings of conversations.
fn chat_options(args: &RowArgs) -> Result<ChatOptions, Failure> {
    let options = ChatOptions {
        today: today(),
        train_on: args.train_on,
        bad_rows: args.bad_rows,
        ..ChatOptions::default()
    };
    args.template.over(options)
}

/// The tokenizer with the tokens that conversations need.
fn with_markers(
    args: &TokenizeArgs,
    tokenizer: Tokenizer,
    chat: Option<&ChatOptions>,
) -> Result<Tokenizer, Failure> {
    let chats: Vec<ChatOptions> = chat.into_iter().cloned().collect();
    let (tokenizer, growth) = grow(tokenizer, [], &chats, args.chat.reserved_tokens.as_deref())?;
    if let Some(growth) = in_words(&growth, None) {
        tracing::info!("the vocabulary {growth}");
    }
    Ok(tokenizer)
}

/// Shows the samples of the first rows.
fn show(args: &TokenizeArgs, texts: &TextFiles, chat: ChatOptions, rows: usize) -> Result<(), Failure> {
    let Some(path) = &args.tokenizer.tokenizer else {
        return Err(Failure::user("no tokenizer is named; --show needs --tokenizer PATH"));
    };
    let tokenizer = load_tokenizer(path, args.end_of_document.as_deref(), "--tokenizer PATH")?;
    let tokenizer = tokenizer.with_begin_of_document(args.begin_of_document)?;
    let tokenizer = with_markers(args, tokenizer, Some(&chat))?;
    for row in preview(&texts.inputs, &texts.options, &tokenizer, &chat, rows)? {
        let parts = match &row.dropped {
            Some(why) => vec![(format!("{}: dropped: {why}\n", row.place), false)],
            None => shown_row(&row, &tokenizer)?,
        };
        if terminal::print_marked(&parts)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// The samples of a row: their text, in parts that are trained or not, and their ids.
fn shown_row(row: &PreviewedRow, tokenizer: &Tokenizer) -> Result<Vec<(String, bool)>, Failure> {
    let method = row.method.map_or(String::new(), |method| format!(", answers are found {method}"));
    let mut parts = Vec::new();
    for sample in &row.samples {
        let trained = sample.iter().filter(|(_, trained)| *trained).count();
        let heading = format!("{}: {} tokens, {trained} of them trained{method}\n", row.place, sample.len());
        parts.push((heading, false));
        let ids: Vec<u32> = sample.iter().map(|(id, _)| *id).collect();
        let mut decoder = tokenizer.stream_decoder(&[], SpecialTokens::Show)?;
        for part in sample.chunk_by(|one, other| one.1 == other.1) {
            let mut text = String::new();
            for (id, _) in part {
                text += &decoder.push(*id)?;
            }
            parts.push((text, part[0].1));
        }
        let trained = trained_positions(sample);
        parts.push((format!("{}\nids {ids:?}\ntrained positions {trained}\n\n", decoder.finish()?), false));
    }
    Ok(parts)
}

/// The positions of the trained tokens of a sample, counted from 0, as `3 to 7, 12`.
fn trained_positions(sample: &[(u32, bool)]) -> String {
    let mut begin = 0;
    let mut ranges = Vec::new();
    for part in sample.chunk_by(|one, other| one.1 == other.1) {
        let end = begin + part.len();
        match part {
            [(_, true)] => ranges.push(begin.to_string()),
            [(_, true), ..] => ranges.push(format!("{begin} to {}", end - 1)),
            _ => {}
        }
        begin = end;
    }
    ranges.join(", ")
}

/// Compares the checksums of whole data sets.
fn verify_folders(folders: &[PathBuf], stop: &Stop) -> Result<ExitCode, Failure> {
    for folder in folders {
        let shown = terminal::shown_path(folder);
        if !folder.is_dir() {
            return Err(Failure::user(format!(
                "{shown} is not a folder of token shards; name one to verify it, or add --out FOLDER to tokenize text"
            )));
        }
        let dataset = Dataset::open(folder)?;
        dataset.tokenizer()?;
        if let ControlFlow::Break(exit_code) = verify(&dataset, &shown, stop)? {
            return Ok(exit_code);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Compares the checksums of a data set; breaks if the user stopped it, or reads no more output.
fn verify(dataset: &Dataset, shown: &str, stop: &Stop) -> Result<ControlFlow<ExitCode>, Failure> {
    let mut bar = Bar::default();
    let verified = dataset.verify_with_progress(&mut |done, total| {
        bar.show(&format!("verifying {shown}"), done, total);
        stop.check()
    });
    bar.clear();
    if unless_stopped(verified)?.is_none() {
        return Ok(ControlFlow::Break(terminal::stopped()));
    }
    let totals = terminal::totals(dataset.token_count(), dataset.document_count());
    let printed = terminal::print(&format!("{shown}: all checksums match: {totals}\n"))?;
    Ok(printed.map_break(|()| ExitCode::SUCCESS))
}

/// The result, or `None` if the user stopped it.
fn unless_stopped<T>(made: Result<T, DataError>) -> Result<Option<T>, Failure> {
    match made {
        Err(DataError::Interrupted) => Ok(None),
        made => Ok(Some(made?)),
    }
}

/// Reports the stop. As in a run, it is no failure: complete shards stay.
fn say_stopped() -> Result<ExitCode, Failure> {
    let said = "stopped before the end; complete shards are kept, run the same command again to continue\n";
    terminal::print(said).map(|_| ExitCode::SUCCESS)
}

fn tokenizer(
    args: &TokenizeArgs,
    out: &Path,
    texts: &TextFiles,
    on_progress: &mut dyn FnMut(VocabularyKind, LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer, RunError> {
    const OWN: &str = "--bpe-vocab-size TOKENS, --bytes or --chars";
    let t = &args.tokenizer;
    let end = args.end_of_document.as_deref();
    let vocabulary = match (&t.tokenizer, t.bpe_vocab_size, t.chars, t.bytes) {
        (Some(path), ..) => {
            return match option_of_word(path).filter(|_| !path.exists()) {
                Some(option) => Err(refused_word(path, option)),
                None => load_tokenizer(path, end, OWN),
            };
        }
        (_, Some(size), ..) => Some(VocabularyKind::Bpe { size }),
        (_, _, true, _) => Some(VocabularyKind::Chars),
        (_, _, _, true) => None,
        _ => {
            return Err(RunError::Refused(format!("no tokenizer is named; use --tokenizer PATH, {OWN}")));
        }
    };
    let texts = std::slice::from_ref(texts);
    let tokenizer = match vocabulary {
        Some(kind) => learn_for_dataset(texts, kind, out, &mut |progress| on_progress(kind, progress))?,
        None => Tokenizer::bytes(),
    };
    Ok(match end {
        Some(name) => tokenizer.with_end_of_document(name)?,
        None => tokenizer,
    })
}

/// The option for a value of `data.tokenizer` in a run file that is no path.
fn option_of_word(word: &Path) -> Option<&'static str> {
    match word.to_str()? {
        "bpe" => Some("--bpe-vocab-size 32Ki"),
        "bytes" => Some("--bytes"),
        "chars" => Some("--chars"),
        _ => None,
    }
}

/// The error for a word of run files in place of a path, with the command that is meant.
fn refused_word(word: &Path, option: &str) -> RunError {
    let word = word.to_string_lossy();
    let mut command = vec!["xtrain".to_owned()];
    let mut arguments = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--tokenizer" => {
                arguments.next();
                command.push(option.to_owned());
            }
            joined if joined.starts_with("--tokenizer=") => command.push(option.to_owned()),
            other => command.push(shell_quoted(other)),
        }
    }
    RunError::Refused(format!(
        "--tokenizer names a tokenizer.json or its folder, and there is no {word}; for the tokenizer {word:?} of run \
         files write: {}",
        command.join(" ")
    ))
}
