//! The data of a run: tokenizer, training samples and validation data.

use crate::error::RunError;
use crate::source::{OWN_TOKENIZERS, are_shards, load_tokenizer};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xtrain_config::{Config, DataSource, DataSources, TokenizerChoice};
use xtrain_data::{
    DataError, Dataset, DocumentMask, InputOptions, LearnProgress, Loader, LoaderOptions, Mixture,
    PrepareOptions, Progress, TextFiles, TokenStream, Tokenizer, Validation, VocabularyKind, find_learned,
    find_prepared, learn_cached, list_inputs, prepare_cached,
};

/// Something that a run does before its first step.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A vocabulary is learned from the training text.
    Learning {
        /// The vocabulary.
        vocabulary: VocabularyKind,
        /// Its progress.
        progress: LearnProgress,
    },
    /// A text is turned into tokens.
    Tokenizing {
        /// The source.
        path: String,
        /// Its progress.
        progress: Progress,
    },
}

/// The data of a run.
pub struct Corpus {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The training samples.
    pub loader: Loader,
    /// The validation data, all of it.
    pub validation: Option<Validation>,
}

impl Corpus {
    /// Opens everything that `[data]` names, and tokenizes text that is not in the cache yet. `saved` is the
    /// tokenizer in the run folder, if a run is resumed.
    pub fn open(
        config: &Config,
        saved: Option<&Path>,
        notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
    ) -> Result<Self, RunError> {
        Corpus::opened(config, saved, Missing::Prepare(notice))
    }

    /// As [`Corpus::open`], if all of it is tokens already: shards, or texts in the cache. Writes nothing.
    pub fn if_tokenized(config: &Config) -> Result<Option<Self>, RunError> {
        match Corpus::opened(config, None, Missing::Stop) {
            Err(RunError::Data(DataError::Interrupted)) => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn opened(config: &Config, saved: Option<&Path>, mut missing: Missing<'_>) -> Result<Self, RunError> {
        let data = &config.data;
        let train = open_inputs(config, "data.train", &data.train)?;
        let valid = data.valid.as_ref().map(|valid| open_inputs(config, "data.valid", valid)).transpose()?;
        refuse_repeated_paths("data.train", &train)?;
        refuse_repeated_paths("data.valid", valid.as_deref().unwrap_or_default())?;
        refuse_shared_paths(&train, valid.as_deref().unwrap_or_default())?;
        let end = data.end_of_document.as_deref();
        let tokenizer = match saved {
            Some(folder) => load_tokenizer(folder, end, OWN_TOKENIZERS)?,
            None => tokenizer(config, &train, &mut missing)?,
        };
        let tokenizer = match end {
            Some(name) => tokenizer.with_end_of_document(name)?,
            None => tokenizer,
        };
        let tokenizer = tokenizer.with_begin_of_document(data.begin_of_document)?;
        let mut cache = Cache { config, tokenizer: &tokenizer, missing: &mut missing };
        let streams = cache.streams(train)?;
        let mask = if data.document_mask { DocumentMask::On } else { DocumentMask::Off };
        let explicit = match valid {
            Some(valid) => {
                let valid: Vec<_> = cache.streams(valid)?.into_iter().map(|s| s.stream).collect();
                refuse_shared_tokens(&streams, &valid)?;
                Some(Validation::new(valid, data.seq_len, mask)?)
            }
            None => None,
        };
        let held_out = Some(data.held_out()).filter(|&fraction| fraction > 0.0);
        let options =
            LoaderOptions { seq_len: data.seq_len, seed: config.train.seed, document_mask: mask, held_out };
        let loader = Loader::new(streams, options)?;
        let validation = explicit.or_else(|| loader.validation());
        Ok(Corpus { tokenizer, loader, validation })
    }
}

/// The treatment of a text that is not tokenized yet, or of a vocabulary that is not learned.
enum Missing<'a> {
    /// It is tokenized or learned, and the progress is reported.
    Prepare(&'a mut dyn FnMut(Notice) -> ControlFlow<()>),
    /// The work ends in [`DataError::Interrupted`].
    Stop,
}

/// Refuses what [`Corpus::open`] would refuse and needs no data to be seen: a weight that is next to nothing,
/// and a text that is both trained and validated on. Passes over what is not there.
pub fn check(config: &Config) -> Result<(), RunError> {
    let data = &config.data;
    for sources in [Some(&data.train), data.valid.as_ref()].into_iter().flatten() {
        let weights: Option<Vec<f64>> = sources.0.iter().map(|source| source.weight).collect();
        if let Some(weights) = weights.filter(|weights| !weights.is_empty()) {
            Mixture::new(&weights)?;
        }
    }
    let Some(valid) = &data.valid else { return Ok(()) };
    let opened = (open_inputs(config, "data.train", &data.train), open_inputs(config, "data.valid", valid));
    match opened {
        (Ok(train), Ok(valid)) => refuse_shared_paths(&train, &valid),
        _ => Ok(()),
    }
}

/// An input that becomes a stream of tokens: a source of the configuration, or several that count as one
/// text.
struct Input {
    /// Name for messages.
    name: String,
    weight: Option<f64>,
    data: InputData,
}

/// Data of an input.
enum InputData {
    Shards(Dataset),
    Text(TextFiles),
}

/// Opens `sources`, the value of `key`. Neighbouring texts without a weight that are read with the same
/// options become one input, like the files of a folder: each may be shorter than a sequence.
fn open_inputs(config: &Config, key: &str, sources: &DataSources) -> Result<Vec<Input>, RunError> {
    let options = |source: &DataSource| InputOptions {
        field: config.data.text_field(source).to_owned(),
        separator: config.data.separator(source).map(str::to_owned),
    };
    let are_one = |a: &DataSource, b: &DataSource| {
        let is_mixed_by_size = |source: &DataSource| source.weight.is_none() && !are_shards(source);
        is_mixed_by_size(a) && is_mixed_by_size(b) && options(a) == options(b)
    };
    let groups = sources.0.chunk_by(are_one);
    groups
        .map(|group| {
            let first = &group[0];
            let paths: Vec<&str> = group.iter().map(|source| source.path.as_str()).collect();
            let name = match paths.as_slice() {
                [only] => (*only).to_owned(),
                [first, others @ ..] => format!("{first} and {} more", others.len()),
                [] => String::new(),
            };
            let data = match are_shards(first) {
                true => InputData::Shards(Dataset::open(&first.path)?),
                false => InputData::Text(TextFiles {
                    inputs: list_inputs(&paths).map_err(|error| not_there(key, error))?,
                    options: options(first),
                }),
            };
            Ok(Input { name, weight: first.weight, data })
        })
        .collect()
}

/// The error for a text of `key` that does not exist. It shows how the path was resolved.
fn not_there(key: &str, error: DataError) -> RunError {
    match &error {
        DataError::Io { path, source, .. } if source.kind() == ErrorKind::NotFound && path.is_relative() => {
            RunError::Refused(format!(
                "{error} (paths are relative to the current folder); --set {key}=FILE names another text"
            ))
        }
        _ => error.into(),
    }
}

impl InputData {
    /// Resolved paths of the files or of the folder. A path that cannot be resolved fails when it is read.
    fn paths(&self) -> Vec<PathBuf> {
        let paths = match self {
            InputData::Shards(dataset) => vec![dataset.folder()],
            InputData::Text(texts) => texts.inputs.iter().map(|file| file.path.as_path()).collect(),
        };
        paths.into_iter().filter_map(|path| path.canonicalize().ok()).collect()
    }

    /// Options for reading its documents; `None` if it is tokens.
    fn options(&self) -> Option<&InputOptions> {
        match self {
            InputData::Shards(_) => None,
            InputData::Text(texts) => Some(&texts.options),
        }
    }
}

/// Refuses a path that two sources of `key` read with the same options: its weight would silently be the sum
/// of both. Two fields of one file are two texts.
fn refuse_repeated_paths(key: &str, inputs: &[Input]) -> Result<(), RunError> {
    let mut seen: Vec<(PathBuf, &Input)> = Vec::new();
    for input in inputs {
        for path in input.data.paths() {
            let is_repeated =
                |(other, by): &(PathBuf, &Input)| *other == path && by.data.options() == input.data.options();
            if let Some((_, by)) = seen.iter().find(|seen| is_repeated(seen)) {
                return Err(RunError::Refused(format!(
                    "{key} names {} twice, in {:?} and in {:?}; name it once, with the sum of their weights",
                    path.display(),
                    by.name,
                    input.name
                )));
            }
            seen.push((path, input));
        }
    }
    Ok(())
}

/// Refuses files and datasets that are used for both training and validation: the validation loss would be
/// that of memorised text.
fn refuse_shared_paths(train: &[Input], valid: &[Input]) -> Result<(), RunError> {
    let trained: HashSet<PathBuf> = train.iter().flat_map(|input| input.data.paths()).collect();
    for input in valid {
        if let Some(shared) = input.data.paths().into_iter().find(|path| trained.contains(path)) {
            let name = shared.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Err(trained_on(&format!("{name} of data.valid = {:?}", input.name), "is"));
        }
    }
    Ok(())
}

/// Refuses validation tokens that are also trained on, for copied texts and texts that were tokenized before.
fn refuse_shared_tokens(
    train: &[xtrain_data::MixtureSource],
    valid: &[Arc<dyn TokenStream>],
) -> Result<(), RunError> {
    let is_trained = |stream: &Arc<dyn TokenStream>| {
        train.iter().any(|source| source.stream.fingerprint() == stream.fingerprint())
    };
    match valid.iter().find(|stream| is_trained(stream)) {
        Some(stream) => Err(trained_on(&format!("data.valid = {:?}", stream.name()), "holds what is")),
        None => Ok(()),
    }
}

fn trained_on(what: &str, is: &str) -> RunError {
    RunError::Refused(format!(
        "{what} {is} in data.train too; validate on other text, or remove data.valid to hold out a part of data.train"
    ))
}

/// The tokenizer of the configuration. If it would be learned from the text but there are token shards,
/// theirs is used.
fn tokenizer(config: &Config, train: &[Input], missing: &mut Missing<'_>) -> Result<Tokenizer, RunError> {
    let choice = config.tokenizer();
    let shards = train.iter().find_map(|input| match &input.data {
        InputData::Shards(dataset) => Some(dataset),
        InputData::Text(_) => None,
    });
    if let (Some(dataset), TokenizerChoice::Bpe | TokenizerChoice::Chars) = (shards, &choice) {
        return Ok(dataset.tokenizer()?);
    }
    let vocabulary = match choice {
        TokenizerChoice::Path(path) => {
            let end = config.data.end_of_document.as_deref();
            return load_tokenizer(Path::new(&path), end, OWN_TOKENIZERS);
        }
        TokenizerChoice::Bytes => return Ok(Tokenizer::bytes()),
        TokenizerChoice::Chars => VocabularyKind::Chars,
        TokenizerChoice::Bpe => VocabularyKind::Bpe { size: config.data.bpe_vocab_size() },
    };
    let texts: Vec<TextFiles> = train
        .iter()
        .filter_map(|input| match &input.data {
            InputData::Text(texts) => Some(texts.clone()),
            InputData::Shards(_) => None,
        })
        .collect();
    let cache = Path::new(&config.data.cache_dir);
    match missing {
        Missing::Prepare(notice) => Ok(learn_cached(&texts, vocabulary, cache, &mut |progress| {
            notice(Notice::Learning { vocabulary, progress })
        })?),
        Missing::Stop => Ok(find_learned(&texts, vocabulary, cache)?.ok_or(DataError::Interrupted)?),
    }
}

struct Cache<'a, 'n> {
    config: &'a Config,
    tokenizer: &'a Tokenizer,
    missing: &'a mut Missing<'n>,
}

impl Cache<'_, '_> {
    fn streams(&mut self, inputs: Vec<Input>) -> Result<Vec<xtrain_data::MixtureSource>, RunError> {
        let mut out = Vec::new();
        for Input { name, weight, data } in inputs {
            let dataset = match data {
                InputData::Shards(dataset) => dataset,
                InputData::Text(TextFiles { inputs, options }) => {
                    let options = PrepareOptions { input: options, ..PrepareOptions::default() };
                    let cache = Path::new(&self.config.data.cache_dir);
                    let prepared = match &mut *self.missing {
                        Missing::Prepare(notice) => {
                            prepare_cached(&inputs, self.tokenizer, &options, cache, &mut |progress| {
                                notice(Notice::Tokenizing { path: name.clone(), progress: *progress })
                            })?
                        }
                        Missing::Stop => find_prepared(&inputs, self.tokenizer, &options, cache)?
                            .ok_or(DataError::Interrupted)?,
                    };
                    // Messages name the text, not a folder of the cache.
                    prepared.with_name(&name)
                }
            };
            if dataset.tokenizer_hash() != self.tokenizer.hash_hex() {
                let remedy = match &self.config.model.init_from {
                    // Pre-trained weights know only the tokenizer of their own folder.
                    Some(folder) => format!("tokenize the text again with --tokenizer {folder}"),
                    None => format!("set data.tokenizer = \"{name}\", or tokenize the text again"),
                };
                return Err(RunError::Refused(format!(
                    "the shards in {name} were written with another tokenizer than this run's; {remedy}"
                )));
            }
            if dataset.end_of_document() != self.tokenizer.end_of_document() {
                return Err(other_end(&name, &dataset, self.tokenizer));
            }
            if dataset.begin_of_document() != self.tokenizer.document_begin() {
                return Err(other_beginning(&name, &dataset, self.tokenizer));
            }
            let stream: Arc<dyn TokenStream> = Arc::new(dataset);
            // Without weights, sources are mixed by size.
            let weight = weight.unwrap_or(stream.token_count() as f64);
            out.push(xtrain_data::MixtureSource { stream, weight });
        }
        Ok(out)
    }
}

/// The error for shards whose documents end with another token than the run's.
fn other_end(path: &str, dataset: &Dataset, tokenizer: &Tokenizer) -> RunError {
    let name = |tokenizer: &Tokenizer| format!("{:?}", tokenizer.end_of_document_name().unwrap_or_default());
    let theirs = match dataset.tokenizer() {
        Ok(tokenizer) => name(&tokenizer),
        Err(error) => return error.into(),
    };
    RunError::Refused(format!(
        "the documents of the shards in {path} end with the token {theirs}, those of this run with {}; set \
         data.end_of_document = {theirs}, or tokenize the text again",
        name(tokenizer)
    ))
}

/// The error for shards whose documents begin with other tokens than the run's.
fn other_beginning(path: &str, dataset: &Dataset, tokenizer: &Tokenizer) -> RunError {
    let shown = |tokens: &[u32]| match tokens {
        [] => "with no token of their own".to_owned(),
        tokens => format!("with token {}", tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    };
    RunError::Refused(format!(
        "the documents of the shards in {path} begin {}, those of this run {}; set data.begin_of_document = {}, or tokenize the text again",
        shown(dataset.begin_of_document()),
        shown(tokenizer.document_begin()),
        !dataset.begin_of_document().is_empty()
    ))
}
