//! The data of a run: tokenizer, training samples and validation data.

pub(crate) mod chat;
mod recorded;
mod vocabulary;

pub(crate) use recorded::RecordedText;

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::growth;
use crate::paths::{NamedSource, Sources};
use crate::source::{OWN_TOKENIZERS, load_tokenizer};
use crate::texts;
use std::collections::HashSet;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xtrain_checkpoint::CheckpointError;
use xtrain_config::{Config, DataSource, DataSources, TokenizerChoice};
use xtrain_data::{
    ChatOptions, DataError, Dataset, DocumentMask, Growth, InputFile, InputOptions, LearnProgress, Listing,
    Loader, LoaderOptions, Mixture, MixtureSource, Packing, PrepareOptions, Progress, Split, Take, TextFiles,
    TokenStream, Tokenizer, Validation, VocabularyKind, find_learned, find_prepared, learn_cached,
    prepare_cached,
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
    /// True if some of the data are conversations.
    pub has_chat: bool,
    /// The tokens that conversations added to the tokenizer's; empty for a run that is resumed.
    pub(crate) growth: Growth,
    /// The texts, with the cache entries that hold their tokens.
    pub(crate) texts: Vec<RecordedText>,
}

impl Corpus {
    /// Opens everything that `[data]` names, and tokenizes text that is not in the cache yet. A `run` that is
    /// resumed keeps its tokenizer; texts that are gone are read from the cache.
    pub fn open(
        sources: &Sources<'_>,
        run: Option<&RunFolder>,
        notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
    ) -> Result<Self, RunError> {
        Opening::new(sources, run, Missing::Prepare(notice))?.corpus()
    }

    /// As [`Corpus::open`], if all of it is tokens already: shards, or texts in the cache. Writes nothing.
    pub(crate) fn if_tokenized(sources: &Sources<'_>) -> Result<Option<Self>, RunError> {
        match Opening::new(sources, None, Missing::Stop)?.corpus() {
            Err(RunError::Data(DataError::Interrupted)) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// The data of a `run` for a verb that examines it and takes other text with `--data`.
    pub fn of_run(
        config: &Config,
        run: &RunFolder,
        notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
    ) -> Result<Self, RunError> {
        let sources = Sources::resolve(config);
        let opening = Opening::new(&sources, Some(run), Missing::Prepare(notice))?;
        Opening { examines: true, ..opening }.corpus()
    }

    /// As [`Corpus::of_run`], with `texts` in place of the training data; their tokens are cached in `cache`.
    pub fn of_texts(
        config: &Config,
        run: &RunFolder,
        texts: &[PathBuf],
        cache: &Path,
        notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
    ) -> Result<Self, RunError> {
        let text = |path: &Path| match path.to_str() {
            Some(path) => Ok(path.to_owned()),
            None => Err(RunError::Refused(format!("{} is not valid UTF-8; rename it", path.display()))),
        };
        let sources = texts.iter().map(|path| Ok(DataSource::new(text(path)?)));
        let mut config = config.clone();
        config.train.started_in = None;
        config.data.train = DataSources(sources.collect::<Result<_, RunError>>()?);
        config.data.valid = None;
        config.data.held_out = Some(0.0);
        config.data.cache_dir = text(cache)?;
        Corpus::of_run(&config, run, notice)
    }
}

/// The validation data of a `run` that has some of its own (`data.valid`); nothing else is opened.
pub fn validation_of_run(
    config: &Config,
    run: &RunFolder,
    notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
) -> Result<Option<Validation>, RunError> {
    let sources = Sources::resolve(config);
    let Some(valid) = &sources.valid else { return Ok(None) };
    let opening = Opening::new(&sources, Some(run), Missing::Prepare(notice))?;
    let mut opening = Opening { examines: true, ..opening };
    let inputs = opening.inputs(DataKey::Valid, valid)?;
    inputs.iter().for_each(Input::log);
    let (tokenizer, _) = opening.tokenizer(&[], &[])?;
    let streams = opening.streams(inputs, &tokenizer)?;
    let document_mask = config.data.document_mask.unwrap_or(streams.iter().any(is_chat));
    validation(streams, config.data.seq_len, document_mask.into()).map(Some)
}

/// The opening of a run's data.
struct Opening<'a> {
    sources: &'a Sources<'a>,
    config: &'a Config,
    /// The run, if it has begun.
    run: Option<&'a RunFolder>,
    /// The texts of the run when it was last started.
    recorded: Vec<RecordedText>,
    missing: Missing<'a>,
    /// True for a verb that examines the run.
    examines: bool,
    /// The texts that were opened.
    texts: Vec<RecordedText>,
}

impl<'a> Opening<'a> {
    fn new(
        sources: &'a Sources<'a>,
        run: Option<&'a RunFolder>,
        missing: Missing<'a>,
    ) -> Result<Self, RunError> {
        let recorded = run.map_or(Ok(Vec::new()), RecordedText::all_of)?;
        let config = sources.config;
        Ok(Opening { sources, config, run, recorded, missing, examines: false, texts: Vec::new() })
    }

    fn corpus(mut self) -> Result<Corpus, RunError> {
        let data = &self.config.data;
        let train = self.inputs(DataKey::Train, &self.sources.train)?;
        let valid =
            self.sources.valid.as_ref().map(|valid| self.inputs(DataKey::Valid, valid)).transpose()?;
        if let Missing::Prepare(_) = self.missing {
            [Some(&train), valid.as_ref()].into_iter().flatten().flatten().for_each(Input::log);
        }
        refuse_repeated_paths("data.train", &train)?;
        refuse_repeated_paths("data.valid", valid.as_deref().unwrap_or_default())?;
        refuse_shared_paths(&train, valid.as_deref().unwrap_or_default())?;
        let (tokenizer, growth) = self.tokenizer(&train, valid.as_deref().unwrap_or_default())?;
        let streams = self.streams(train, &tokenizer)?;
        let valid = valid.map(|valid| self.streams(valid, &tokenizer)).transpose()?;
        refuse_shared_tokens(&streams, valid.as_deref().unwrap_or_default())?;
        // The tokens say so, also where their text is gone.
        let has_chat = streams.iter().chain(valid.iter().flatten()).any(is_chat);
        let seq_len = data.seq_len;
        let document_mask = data.document_mask.unwrap_or(has_chat).into();
        let explicit = valid.map(|valid| validation(valid, seq_len, document_mask)).transpose()?;
        let held_out = Some(data.held_out()).filter(|&fraction| fraction > 0.0);
        let options = LoaderOptions { seq_len, seed: self.config.train.seed, document_mask, held_out };
        let loader = Loader::new(streams, options)?;
        let validation = explicit.or_else(|| loader.validation());
        Ok(Corpus { tokenizer, loader, validation, has_chat, growth, texts: self.texts })
    }

    /// The tokenizer of the run, or that of the configuration with the tokens that conversations need.
    fn tokenizer(&mut self, train: &[Input], valid: &[Input]) -> Result<(Tokenizer, Growth), RunError> {
        let data = &self.config.data;
        let end = data.end_of_document.as_deref();
        let saved = self.run.map(RunFolder::tokenizer).filter(|folder| folder.is_dir());
        let tokenizer = match &saved {
            Some(folder) => load_tokenizer(folder, end, OWN_TOKENIZERS)?,
            None => self.chosen_tokenizer(train)?,
        };
        let tokenizer = match end {
            Some(name) => tokenizer.with_end_of_document(name)?,
            None => tokenizer,
        };
        let tokenizer = tokenizer.with_begin_of_document(data.begin_of_document)?;
        if saved.is_some() {
            return Ok((tokenizer, Growth::default()));
        }
        let inputs = || train.iter().chain(valid).map(|input| &input.data);
        let shards = inputs().filter_map(InputData::shards);
        let chats: Vec<ChatOptions> = inputs().filter_map(InputData::chat).cloned().collect();
        growth::grow(tokenizer, shards, &chats, data.reserved_tokens.as_deref())
    }
}

/// True if the tokens of a source are conversations.
fn is_chat(source: &MixtureSource) -> bool {
    source.packing != Packing::Stream
}

/// All of these tokens as validation data.
fn validation(
    sources: Vec<MixtureSource>,
    seq_len: usize,
    document_mask: DocumentMask,
) -> Result<Validation, RunError> {
    let packed = sources.into_iter().map(|source| (source.stream, source.packing)).collect();
    Ok(Validation::new(packed, seq_len, document_mask)?)
}

/// The treatment of a text that is not tokenized yet, or of a vocabulary that is not learned.
enum Missing<'a> {
    /// It is tokenized or learned, and the progress is reported.
    Prepare(&'a mut dyn FnMut(Notice) -> ControlFlow<()>),
    /// The work ends in [`DataError::Interrupted`].
    Stop,
}

/// Refuses what [`Corpus::open`] would refuse and needs no data to be seen: a weight that is next to nothing,
/// and a text that is both trained and validated on. What is not there is skipped.
pub(crate) fn check(sources: &Sources<'_>) -> Result<(), RunError> {
    for all in [Some(&sources.train), sources.valid.as_ref()].into_iter().flatten() {
        let weights: Option<Vec<f64>> = all.iter().map(|source| source.named.weight).collect();
        if let Some(weights) = weights.filter(|weights| !weights.is_empty()) {
            Mixture::new(&weights)?;
        }
    }
    let Some(valid) = &sources.valid else { return Ok(()) };
    let opening = Opening::new(sources, None, Missing::Stop)?;
    match (opening.inputs(DataKey::Train, &sources.train), opening.inputs(DataKey::Valid, valid)) {
        (Ok(train), Ok(valid)) => refuse_shared_paths(&train, &valid),
        _ => Ok(()),
    }
}

/// The keys that name data.
#[derive(Clone, Copy)]
enum DataKey {
    Train,
    Valid,
}

impl DataKey {
    fn name(self) -> &'static str {
        match self {
            DataKey::Train => "data.train",
            DataKey::Valid => "data.valid",
        }
    }

    /// The split that is read of folders and patterns with several.
    fn split(self) -> Split {
        match self {
            DataKey::Train => Split::Train,
            DataKey::Valid => Split::Validation,
        }
    }
}

/// An input that becomes a stream of tokens: a source of the configuration, or several that count as one
/// text.
struct Input {
    /// Name for messages.
    name: String,
    weight: Option<f64>,
    data: InputData,
    /// The files that were chosen of a text.
    listing: Listing,
}

impl Input {
    /// Logs which files are read and which are not.
    fn log(&self) {
        texts::log(&self.listing);
    }
}

/// Data of an input.
enum InputData {
    Shards(Dataset),
    /// With the settings of conversations, if its rows are that.
    Text(TextFiles, Option<ChatOptions>, RecordedText),
    /// Cached tokens of a text that no longer exists.
    Cached(Dataset, RecordedText),
}

impl Opening<'_> {
    /// Opens `sources`, the value of `key`. Neighbouring texts that have no weight and are read with the same
    /// options are one input, like the files of a folder: each may be shorter than a sequence.
    fn inputs(&self, key: DataKey, sources: &[NamedSource]) -> Result<Vec<Input>, RunError> {
        let options = |source: &NamedSource| input_options(self.config, &source.named);
        let chat = |source: &NamedSource| {
            let is_chat = !source.is_shards && self.sources.is_chat(source, key.split());
            is_chat.then(|| self.sources.chat_options(&source.named)).transpose()
        };
        let chats = sources.iter().map(chat).collect::<Result<Vec<_>, _>>()?;
        let chat_of = |source: &NamedSource| {
            let at = sources.iter().position(|other| std::ptr::eq(other, source));
            at.and_then(|at| chats[at].clone())
        };
        let are_one = |a: &NamedSource, b: &NamedSource| {
            let is_mixed_by_size = |source: &NamedSource| source.named.weight.is_none() && !source.is_shards;
            let are_alike = options(a) == options(b) && chat_of(a) == chat_of(b);
            is_mixed_by_size(a) && is_mixed_by_size(b) && are_alike
        };
        let groups = sources.chunk_by(are_one);
        groups
            .map(|group| {
                let first = &group[0];
                // Long paths are not shortened: readers of metrics find the losses of a source by its name.
                let name = match group.len() {
                    1 => first.named.path.clone(),
                    all => format!("{} and {} more", first.named.path, all - 1),
                };
                let (data, listing) = match first.is_shards {
                    true => {
                        let dataset = Dataset::open(&first.path)?;
                        (InputData::Shards(dataset.with_name(&name)), Listing::default())
                    }
                    false => self.text(key, &name, group, options(first), chat_of(first))?,
                };
                Ok(Input { name, weight: first.named.weight, data, listing })
            })
            .collect()
    }

    /// The text of `sources`, or its cached tokens if it no longer exists.
    fn text(
        &self,
        key: DataKey,
        name: &str,
        sources: &[NamedSource],
        options: InputOptions,
        chat: Option<ChatOptions>,
    ) -> Result<(InputData, Listing), RunError> {
        let record = RecordedText::new(sources, &options, key.split());
        let paths: Vec<&Path> = sources.iter().map(|source| source.path.as_path()).collect();
        let error = match texts::list(&paths, Take::OfFolders(key.split())) {
            Ok(mut listing) => {
                if let Some(splits) = &listing.several_splits {
                    let key = key.name();
                    listing
                        .warnings
                        .push(format!("{key} names files of several splits, and all are read: {splits}"));
                }
                let inputs = std::mem::take(&mut listing.files);
                return Ok((InputData::Text(TextFiles { inputs, options }, chat, record), listing));
            }
            Err(error) => error,
        };
        match self.recorded.iter().find(|recorded| recorded.is_of(&record)) {
            Some(recorded) if let Some(dataset) = recorded.tokens(&self.sources.cache) => {
                tracing::info!(
                    "{name} does not exist; using its cached tokens in {}",
                    dataset.folder().display()
                );
                Ok((InputData::Cached(dataset.with_name(name), recorded.clone()), Listing::default()))
            }
            _ => Err(self.not_there(key, error)),
        }
    }

    /// The error for a text of `key` that cannot be listed. It names the places where a missing path was
    /// looked for, and the option for another text.
    fn not_there(&self, key: DataKey, error: RunError) -> RunError {
        let other = match self.examines {
            true => "--data FILE names another text".to_owned(),
            false => format!("--set {}=FILE names another text", key.name()),
        };
        match &error {
            RunError::Data(DataError::File(CheckpointError::Io { path, source, .. }))
                if source.kind() == ErrorKind::NotFound && path.is_relative() =>
            {
                let places = self.sources.places();
                RunError::Refused(format!("{error} ({places} the current folder); {other}"))
            }
            _ if self.examines => RunError::Refused(format!("{error}; {other}")),
            _ => error,
        }
    }
}

impl InputData {
    /// Resolved paths of the files, without the extensions of compressions, or of the folder. A path that
    /// cannot be resolved fails when it is read.
    fn paths(&self) -> Vec<PathBuf> {
        match self {
            InputData::Shards(dataset) | InputData::Cached(dataset, _) => {
                dataset.folder().canonicalize().into_iter().collect()
            }
            InputData::Text(texts, ..) => {
                texts.inputs.iter().filter_map(InputFile::uncompressed_path).collect()
            }
        }
    }

    /// The tokens, if it is that.
    fn shards(&self) -> Option<&Dataset> {
        match self {
            InputData::Shards(dataset) | InputData::Cached(dataset, _) => Some(dataset),
            InputData::Text(..) => None,
        }
    }

    /// The settings of conversations, if it is a text with these.
    fn chat(&self) -> Option<&ChatOptions> {
        match self {
            InputData::Text(_, chat, _) => chat.as_ref(),
            InputData::Shards(_) | InputData::Cached(..) => None,
        }
    }

    /// Options for reading its documents; `None` if it is tokens.
    fn options(&self) -> Option<&InputOptions> {
        match self {
            InputData::Shards(_) | InputData::Cached(..) => None,
            InputData::Text(texts, ..) => Some(&texts.options),
        }
    }
}

/// Options for reading the documents of `source`.
pub(crate) fn input_options(config: &Config, source: &DataSource) -> InputOptions {
    InputOptions {
        field: config.data.text_field(source).to_owned(),
        separator: config.data.separator(source).map(str::to_owned),
        skip_bad_rows: config.data.skip_bad_rows,
        whole_rows: false,
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
                    "{key} names {} twice, in {:?} and in {:?}; name it once, with the sum of the weights",
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
fn refuse_shared_tokens(train: &[MixtureSource], valid: &[MixtureSource]) -> Result<(), RunError> {
    let is_trained = |valid: &MixtureSource| {
        train.iter().any(|source| source.stream.fingerprint() == valid.stream.fingerprint())
    };
    match valid.iter().find(|source| is_trained(source)) {
        Some(MixtureSource { stream, .. }) => {
            Err(trained_on(&format!("data.valid = {:?}", stream.name()), "contains text that is"))
        }
        None => Ok(()),
    }
}

fn trained_on(what: &str, is: &str) -> RunError {
    RunError::Refused(format!(
        "{what} {is} also in data.train; validate on other text, or remove data.valid to hold out a part of data.train"
    ))
}

impl Opening<'_> {
    /// The tokenizer of the configuration. If it would be learned from the text but there are token shards,
    /// theirs is used.
    fn chosen_tokenizer(&mut self, train: &[Input]) -> Result<Tokenizer, RunError> {
        let shards = train.iter().find_map(|input| input.data.shards());
        if let (Some(dataset), TokenizerChoice::Bpe | TokenizerChoice::Chars) =
            (shards, &self.sources.tokenizer)
        {
            return Ok(dataset.tokenizer()?);
        }
        let vocabulary = match &self.sources.tokenizer {
            TokenizerChoice::Path(path) => {
                let end = self.config.data.end_of_document.as_deref();
                let path = Path::new(path);
                let tokenizer = load_tokenizer(path, end, OWN_TOKENIZERS)?;
                vocabulary::check(self.sources, path, &tokenizer)?;
                return Ok(tokenizer);
            }
            TokenizerChoice::Bytes => return Ok(Tokenizer::bytes()),
            TokenizerChoice::Chars => VocabularyKind::Chars,
            TokenizerChoice::Bpe => VocabularyKind::Bpe { size: self.config.data.bpe_vocab_size() },
        };
        if let Some(chat) = train.iter().find(|input| input.data.chat().is_some()) {
            return Err(RunError::Refused(format!(
                "{} holds conversations, which no vocabulary is learned from; name a tokenizer with a chat template, or a \
                 model to start from (data.tokenizer, model.init_from), or read the rows as text with data.format = \
                 \"text\"",
                chat.name
            )));
        }
        let texts: Vec<TextFiles> = train
            .iter()
            .filter_map(|input| match &input.data {
                InputData::Text(texts, ..) => Some(texts.clone()),
                InputData::Shards(_) | InputData::Cached(..) => None,
            })
            .collect();
        match &mut self.missing {
            Missing::Prepare(notice) => {
                Ok(learn_cached(&texts, vocabulary, &self.sources.cache, &mut |progress| {
                    notice(Notice::Learning { vocabulary, progress })
                })?)
            }
            Missing::Stop => {
                Ok(find_learned(&texts, vocabulary, &self.sources.cache)?.ok_or(DataError::Interrupted)?)
            }
        }
    }

    fn streams(&mut self, inputs: Vec<Input>, tokenizer: &Tokenizer) -> Result<Vec<MixtureSource>, RunError> {
        let mut out = Vec::new();
        for Input { name, weight, data, .. } in inputs {
            let dataset = match data {
                InputData::Shards(dataset) => dataset,
                InputData::Cached(dataset, record) => {
                    self.texts.push(record);
                    dataset
                }
                InputData::Text(texts, chat, record) => {
                    let dataset = self.tokens(&name, texts, chat, tokenizer)?;
                    self.texts.push(record.with_tokens(&dataset));
                    dataset
                }
            };
            if dataset.tokenizer_hash() != tokenizer.hash_hex() {
                let remedy = match &self.config.model.init_from {
                    // Pre-trained weights know only the tokenizer of their own folder.
                    Some(folder) => format!("tokenize the text again with --tokenizer {folder}"),
                    None => format!("set data.tokenizer = \"{name}\", or tokenize the text again"),
                };
                return Err(RunError::Refused(format!(
                    "the shards in {name} were written with a tokenizer that is not this run's; {remedy}"
                )));
            }
            if dataset.end_of_document() != tokenizer.end_of_document() {
                return Err(other_end(&name, &dataset, tokenizer));
            }
            if dataset.begin_of_document() != tokenizer.document_begin() {
                return Err(other_beginning(&name, &dataset, tokenizer));
            }
            let packing = match dataset.chat() {
                Some(record) => {
                    if let Missing::Prepare(_) = self.missing {
                        tracing::info!("{name}: {}", record.summary());
                    }
                    chat::packing(self.config)
                }
                None => Packing::Stream,
            };
            let stream: Arc<dyn TokenStream> = Arc::new(dataset);
            // Without weights, sources are mixed by size.
            let weight = weight.unwrap_or(stream.token_count() as f64);
            out.push(MixtureSource { stream, weight, packing });
        }
        Ok(out)
    }

    /// The tokens of `texts`, prepared if need be.
    fn tokens(
        &mut self,
        name: &str,
        texts: TextFiles,
        chat: Option<ChatOptions>,
        tokenizer: &Tokenizer,
    ) -> Result<Dataset, RunError> {
        let TextFiles { inputs, options } = texts;
        let options = PrepareOptions { input: options, chat, ..PrepareOptions::default() };
        let prepared = match &mut self.missing {
            Missing::Prepare(notice) => {
                prepare_cached(&inputs, tokenizer, &options, &self.sources.cache, &mut |progress| {
                    notice(Notice::Tokenizing { path: name.to_owned(), progress: *progress })
                })?
            }
            Missing::Stop => find_prepared(&inputs, tokenizer, &options, &self.sources.cache)?
                .ok_or(DataError::Interrupted)?,
        };
        // Messages name the text, not a folder of the cache.
        Ok(prepared.with_name(name))
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
        "the documents of the shards in {path} end with the token {theirs}, but those of this run with {}; set \
         data.end_of_document = {theirs}, or tokenize the text again",
        name(tokenizer)
    ))
}

/// The error for shards whose documents begin with other tokens than the run's.
fn other_beginning(path: &str, dataset: &Dataset, tokenizer: &Tokenizer) -> RunError {
    let shown = |tokens: &[u32]| match tokens {
        [] => "without a begin token".to_owned(),
        tokens => format!("with token {}", tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    };
    RunError::Refused(format!(
        "the documents of the shards in {path} begin {}, but those of this run {}; set data.begin_of_document = {}, or tokenize the text again",
        shown(dataset.begin_of_document()),
        shown(tokenizer.document_begin()),
        !dataset.begin_of_document().is_empty()
    ))
}
