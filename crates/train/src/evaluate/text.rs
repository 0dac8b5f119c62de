//! The loss of a model on texts and token shards that someone names: what `xtrain eval` does.
//!
//! Text is turned into tokens on the disk, in parallel and in bounded memory, as in training; then it is read from there.

use super::{Evaluator, Tally};
use crate::opened::OpenedModel;
use crate::run::RunError;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xtrain_data::{
    DataError, Dataset, DocumentMask, InputOptions, PrepareOptions, TokenStream, Tokenizer, Validation,
    list_inputs, prepare_cached,
};
use xtrain_model::decoder::Batch;

/// Tokens whose logits exist at one time.
const LOSS_CHUNK: usize = 1024;

/// Context where neither the caller nor the model's run says one, in tokens.
const SEQ_LEN: usize = 1024;

/// How texts are evaluated.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// Tokens of context; else those of the model's run, else 1024 or what the model allows.
    pub seq_len: Option<usize>,
    /// Sequences at once, at least 1.
    pub batch_size: usize,
    /// Whether attention stays within documents; else as the model's run did.
    pub document_mask: Option<bool>,
    /// How documents lie in the files.
    pub input: InputOptions,
    /// A folder that keeps the tokens for the next time; else they go to a temporary one that is removed.
    pub cache: Option<PathBuf>,
}

impl Default for TextOptions {
    fn default() -> Self {
        TextOptions {
            seq_len: None,
            batch_size: 8,
            document_mask: None,
            input: InputOptions::default(),
            cache: None,
        }
    }
}

/// What an evaluation of texts found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextLoss {
    /// Mean cross-entropy of the targets, in nats a token.
    pub loss: f64,
    /// How many targets: all tokens but the first of each part of the data.
    pub tokens: usize,
    /// Bytes of the text behind the tokens.
    pub text_bytes: u64,
    /// Tokens of context that were used: no more than the data fills.
    pub seq_len: usize,
    /// Whether attention stayed within documents.
    pub document_mask: bool,
}

impl TextLoss {
    /// Cross-entropy in bits a byte of text: comparable between tokenizers.
    pub fn bits_per_byte(&self) -> f64 {
        self.loss * self.tokens as f64 / std::f64::consts::LN_2 / self.text_bytes.max(1) as f64
    }
}

/// The loss of `opened` on `data`: files and folders of text, and folders of token shards. `go_on` is asked often;
/// [`ControlFlow::Break`] ends it without a result, and what is temporary is removed.
///
/// # Errors
/// Input that cannot be read or encoded, by file and place; shards of another tokenizer; a tokenizer that is not the model's; too
/// little memory or disk.
pub fn text(
    opened: &mut OpenedModel,
    data: &[PathBuf],
    options: &TextOptions,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Option<TextLoss>, RunError> {
    let limit = opened.weights.model().max_position_embeddings;
    let asked = options.seq_len.or(opened.seq_len).unwrap_or(SEQ_LEN.min(limit));
    if asked > limit {
        tracing::warn!(
            "sequences of {asked} exceed the {limit} tokens of context that the model is meant for"
        );
    }
    // Lives as long as the datasets in it are read; shards need none.
    let temporary = match options.cache {
        None if !data.iter().all(|path| is_dataset(path)) => {
            Some(tempfile::tempdir().map_err(RunError::io(&std::env::temp_dir(), "make a folder in"))?)
        }
        _ => None,
    };
    let temporary = temporary.as_ref().map(|folder| folder.path());
    let cache = options.cache.as_deref().or(temporary).unwrap_or(Path::new(""));
    let (mut streams, mut text_bytes) = (Vec::new(), 0);
    for path in data {
        let dataset = match dataset(path, &opened.tokenizer, &options.input, cache, go_on) {
            Err(RunError::Data(DataError::Interrupted)) => return Ok(None),
            dataset => dataset?,
        };
        text_bytes += dataset.text_bytes().unwrap_or_default();
        streams.push(Arc::new(dataset) as Arc<dyn TokenStream>);
    }
    let vocab_size = opened.weights.model().vocab_size;
    if let Some(wide) = streams.iter().find(|s| s.vocab_size() > vocab_size) {
        return Err(RunError::Refused(format!(
            "{} has a vocabulary of {}, the model's has {vocab_size}: it was made with another tokenizer",
            wide.name(),
            wide.vocab_size()
        )));
    }
    // Longer sequences and larger batches than the data fills would only take memory.
    let longest = streams.iter().map(|s| s.token_count().saturating_sub(1)).max().unwrap_or(0);
    let seq_len = usize::try_from(longest).map_or(asked, |longest| asked.min(longest.max(1)));
    let document_mask = options.document_mask.unwrap_or(opened.document_mask);
    let mask = if document_mask { DocumentMask::On } else { DocumentMask::Off };
    let validation = Validation::of(streams, seq_len, mask)?;
    let sequences = validation.window_count().min(options.batch_size.max(1) as u64) as usize;
    let shape = Batch { sequences, seq_len };
    let evaluator = Evaluator::new(&mut opened.weights, shape, document_mask, LOSS_CHUNK)
        .map_err(|e| e.advising("take shorter sequences, or fewer of them at once"))?;
    let mut tally = Tally::default();
    if evaluator.add(&mut opened.weights, &validation, &mut tally, go_on)?.is_break() {
        return Ok(None);
    }
    Ok(Some(TextLoss { loss: tally.mean(), tokens: tally.targets, text_bytes, seq_len, document_mask }))
}

/// The shards at `path`, or those of the text there, made in `cache`.
fn dataset(
    path: &Path,
    tokenizer: &Tokenizer,
    input: &InputOptions,
    cache: &Path,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Dataset, RunError> {
    if is_dataset(path) {
        let dataset = Dataset::open(path)?;
        if dataset.tokenizer_hash() != tokenizer.hash_hex() {
            return Err(RunError::Refused(format!(
                "the shards in {} were made with another tokenizer than the model's; name the text, or tokenize it again",
                path.display()
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
    let files = list_inputs(&[path])?;
    let options = PrepareOptions { input: input.clone(), ..PrepareOptions::default() };
    let made = prepare_cached(&files, tokenizer, &options, cache, &mut |_| go_on())?;
    Ok(made.with_name(path.display().to_string()))
}

fn is_dataset(path: &Path) -> bool {
    path.join("dataset.json").is_file()
}
