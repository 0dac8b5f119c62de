//! Data on which `xtrain eval` measures a loss: given texts and token shards, or the validation data of the
//! model's run.
//!
//! Text is tokenized to disk, in parallel and in bounded memory, as in training. Several compared models read
//! it from there, one after the other.

mod text;

pub use text::{EvalProgress, TextLoss, TextOptions, text};

use crate::corpus::{Corpus, Notice, validation_of_run};
use crate::error::RunError;
use crate::open_model::{OpenedModel, RunOrigin};
use crate::process_group::ProcessGroup;
use crate::texts;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use xtrain_data::{
    ChatOptions, DataError, Dataset, InputOptions, Packing, PrepareOptions, TokenStream, Tokenizer,
    Validation, holds_conversations, prepare_cached,
};
use xtrain_evaluation::loss::{Evaluator, Tally};
use xtrain_model::decoder::Batch;

/// Tokens whose logits exist at one time.
const LOSS_CHUNK: usize = 1024;

/// Default context in tokens, if neither the caller nor the model's run sets one.
const SEQ_LEN: usize = 1024;

/// Tokens that models are evaluated on.
pub struct HeldOut {
    validation: Validation,
    text_bytes: Option<u64>,
    seq_len: usize,
    document_mask: bool,
    /// Removed when the tokens in it are no longer read.
    _temporary: Option<TempDir>,
}

impl HeldOut {
    /// The tokens of `data` (files and folders of text, and folders of token shards), read with the settings
    /// of `opened`. `on_progress` is called often with the progress; if it breaks, the result is `None`.
    ///
    /// # Errors
    /// Input that cannot be read or encoded, with file and place; shards of another tokenizer; a tokenizer
    /// that is not the model's; too little disk space.
    pub fn of_texts(
        opened: &OpenedModel,
        data: &[PathBuf],
        options: &TextOptions,
        on_progress: &mut dyn FnMut(EvalProgress<'_>) -> ControlFlow<()>,
    ) -> Result<Option<HeldOut>, RunError> {
        let model = opened.weights.model();
        let limit = model.max_position_embeddings;
        let asked = options.seq_len.or(opened.seq_len).unwrap_or(SEQ_LEN.min(model.context()));
        if let Some(window) = model.window.filter(|window| asked > *window) {
            return Err(RunError::Refused(format!(
                "sequences of {asked} tokens exceed the sliding window of the model, and attention within windows is not \
                 supported; take sequences of at most {window} tokens"
            )));
        }
        if asked > limit {
            tracing::warn!("sequences of {asked} exceed the model's context of {limit} tokens");
        }
        // Shards need no tokenizer.
        let temporary = match options.cache {
            None if !data.iter().all(|path| is_dataset(path)) => {
                Some(tempfile::tempdir().map_err(RunError::io(&std::env::temp_dir(), "make a folder in"))?)
            }
            _ => None,
        };
        let cache = temporary.as_ref().map(TempDir::path);
        let cache = options.cache.as_deref().or(cache).unwrap_or(Path::new(""));
        // Conversations are rendered as in the model's run.
        let chat = opened.chat_options()?;
        let (mut streams, mut text_bytes, mut has_chat) = (Vec::new(), Some(0), false);
        for path in data {
            let dataset = match dataset(path, &opened.tokenizer, &chat, options, cache, on_progress) {
                Err(RunError::Data(DataError::Interrupted)) => return Ok(None),
                dataset => dataset?,
            };
            text_bytes = text_bytes.zip(dataset.text_bytes()).map(|(sum, bytes)| sum + bytes);
            has_chat |= dataset.chat().is_some();
            streams.push(Arc::new(dataset) as Arc<dyn TokenStream>);
        }
        if let Some(wide) = streams.iter().find(|s| s.vocab_size() > model.vocab_size) {
            return Err(RunError::Refused(format!(
                "{} has a vocabulary of {}, the model's has {}: it was written with another tokenizer",
                wide.name(),
                wide.vocab_size(),
                model.vocab_size
            )));
        }
        // Sequences longer than the data would only waste memory.
        let longest = streams.iter().map(|s| s.token_count().saturating_sub(1)).max().unwrap_or(0);
        let seq_len = usize::try_from(longest).map_or(asked, |longest| asked.min(longest.max(1)));
        let document_mask = options.document_mask.unwrap_or(opened.document_mask || has_chat);
        let streams = streams.into_iter().map(Packing::with_stream).collect();
        let validation = Validation::new(streams, seq_len, document_mask.into())?;
        Ok(Some(HeldOut { validation, text_bytes, seq_len, document_mask, _temporary: temporary }))
    }

    /// The validation data of the run of `opened`, as much of it as an evaluation of that run used.
    ///
    /// # Errors
    /// A model that is not from a run; a run without validation; data that is missing or has changed since
    /// the run read it; the errors of [`HeldOut::of_texts`].
    pub fn of_run(
        opened: &OpenedModel,
        on_progress: &mut dyn FnMut(EvalProgress<'_>) -> ControlFlow<()>,
    ) -> Result<Option<HeldOut>, RunError> {
        let Some(of_run) = &opened.run else {
            return Err(RunError::Refused(
                "a Hugging Face folder has no validation text of its own; name a text with --data".into(),
            ));
        };
        let config = &of_run.config;
        let mut notice = |notice| match notice {
            Notice::Tokenizing { path, progress } => {
                on_progress(EvalProgress::Tokenizing(Path::new(&path), &progress))
            }
            Notice::Learning { .. } => ControlFlow::Continue(()),
        };
        let validation = match validation(of_run, &mut notice) {
            Err(RunError::Data(DataError::Interrupted)) => return Ok(None),
            validation => validation?,
        };
        let Some(validation) = validation else {
            return Err(RunError::Refused(
                "the run had no validation data (data.valid, data.held_out); name a text with --data".into(),
            ));
        };
        let seq_len = config.data.seq_len;
        let validation = validation.at_most(config.eval.sequences(seq_len));
        let text_bytes = validation.text_bytes()?.map(|bytes| bytes.round() as u64);
        let document_mask = config.data.document_mask();
        Ok(Some(HeldOut { validation, text_bytes, seq_len, document_mask, _temporary: None }))
    }

    /// The loss of `opened` on these tokens, with `batch_size` sequences at once; `None` if `on_progress`
    /// breaks.
    ///
    /// # Errors
    /// Too little memory; shards that were damaged meanwhile.
    pub fn loss(
        &self,
        opened: &mut OpenedModel,
        batch_size: usize,
        on_progress: &mut dyn FnMut(EvalProgress<'_>) -> ControlFlow<()>,
    ) -> Result<Option<TextLoss>, RunError> {
        let HeldOut { validation, text_bytes, seq_len, document_mask, .. } = self;
        let (seq_len, document_mask) = (*seq_len, *document_mask);
        // Batches larger than the data would only waste memory.
        let all = validation.window_count();
        let sequences = all.min(batch_size.max(1) as u64) as usize;
        let shape = Batch { sequences, seq_len };
        let evaluator = Evaluator::new(&mut opened.weights, shape, document_mask, LOSS_CHUNK, 1)
            .map_err(|e| e.advising("take shorter sequences, or fewer of them at once"))?;
        let (mut tally, mut begun) = (Tally::default(), 0);
        let mut next = || {
            let done = all.min(begun);
            begun += sequences as u64;
            on_progress(EvalProgress::Evaluating(done, all))
        };
        if evaluator
            .add(&mut opened.weights, validation, &mut tally, &ProcessGroup::alone(), &mut next)?
            .is_break()
        {
            return Ok(None);
        }
        let (tokens, text_bytes) = (tally.targets, *text_bytes);
        let (loss, token_accuracy) = (tally.mean(), tally.token_accuracy());
        Ok(Some(TextLoss { loss, token_accuracy, tokens, text_bytes, seq_len, document_mask }))
    }
}

/// The validation data of a run, all of it; none if the run has none. Only what is validated on is opened.
fn validation(
    run: &RunOrigin,
    notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
) -> Result<Option<Validation>, RunError> {
    let RunOrigin { config, folder, loader, .. } = run;
    if config.data.valid.is_some() {
        return validation_of_run(config, folder, notice);
    }
    if config.data.held_out() == 0.0 {
        return Ok(None);
    }
    let corpus = Corpus::of_run(config, folder, notice)?;
    // Of other data another part would be held out, some of which was trained on.
    corpus.loader.resume(loader)?;
    Ok(corpus.validation)
}

/// Opens the shards at `path`, or tokenizes the text there to `cache`.
fn dataset(
    path: &Path,
    tokenizer: &Tokenizer,
    chat: &ChatOptions,
    options: &TextOptions,
    cache: &Path,
    on_progress: &mut dyn FnMut(EvalProgress<'_>) -> ControlFlow<()>,
) -> Result<Dataset, RunError> {
    if is_dataset(path) {
        let dataset = Dataset::open(path)?;
        if dataset.tokenizer_hash() != tokenizer.hash_hex() {
            return Err(RunError::Refused(format!(
                "the shards in {} were written with another tokenizer than the model's; name the text, or tokenize it again",
                path.display()
            )));
        }
        if dataset.end_of_document() != tokenizer.end_of_document() {
            return Err(RunError::Refused(format!(
                "the documents in {} end with token {}, those of the model with {}; name the text, or tokenize it again",
                path.display(),
                dataset.end_of_document(),
                tokenizer.end_of_document()
            )));
        }
        if dataset.begin_of_document() != tokenizer.document_begin() {
            return Err(RunError::Refused(format!(
                "the documents in {} begin with tokens {:?}, those of the model with {:?}; name the text, or tokenize it again",
                path.display(),
                dataset.begin_of_document(),
                tokenizer.document_begin()
            )));
        }
        return Ok(dataset);
    }
    let listing = texts::list(&[path], options.take)?;
    texts::log(&listing);
    let names_field = options.input.field != InputOptions::default().field;
    let is_chat = !names_field && holds_conversations(&listing.files)?;
    let chat = is_chat.then(|| chat.clone());
    let options = PrepareOptions { input: options.input.clone(), chat, ..PrepareOptions::default() };
    let made = prepare_cached(&listing.files, tokenizer, &options, cache, &mut |progress| {
        on_progress(EvalProgress::Tokenizing(path, progress))
    })?;
    Ok(made.with_name(path.display().to_string()))
}

fn is_dataset(path: &Path) -> bool {
    path.join("dataset.json").is_file()
}
