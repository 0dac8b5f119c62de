//! Plans a run from its file, and from the files that it names as far as a plan needs them.

use crate::adapter_folder;
use crate::corpus::{self, Corpus};
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::growth::{self, grown_model};
use crate::paths::Sources;
use crate::questions;
use crate::source::{OWN_TOKENIZERS, init, load_tokenizer, shards};
use crate::static_scales;
use crate::tasks;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_checkpoint::CheckpointError;
use xtrain_config::{Facts, Parsed, TokenizerChoice};
use xtrain_data::{DataError, Split, Take, TextFiles, TokenStream, Tokenizer, learn, list};
use xtrain_planner::planned::{Planned, planned_for};
use xtrain_rank::Rank;
use xtrain_step::engine::Target;

/// Resolves a run file without tokenizing its text, for `xtrain plan`. Of the data it opens only the part
/// that determines the size of the vocabulary: the index of token shards, or the text whose characters are
/// counted. An unknown size is planned at its upper bound.
pub fn plan(parsed: &Parsed) -> Result<Planned, RunError> {
    plan_on(parsed, Target::for_device(parsed.config.train.device))
}

/// As [`plan`], for this target.
pub fn plan_on(parsed: &Parsed, target: Target) -> Result<Planned, RunError> {
    plan_for(parsed, target, Rank::ALONE)
}

/// As [`plan_on`], for one of the processes that share the run.
pub fn plan_for(parsed: &Parsed, target: Target, rank: Rank) -> Result<Planned, RunError> {
    plan_sources(parsed, &Sources::resolve(&parsed.config), target, rank)
}

/// As [`plan_for`], with the paths of `parsed`.
pub(crate) fn plan_sources(
    parsed: &Parsed,
    sources: &Sources<'_>,
    target: Target,
    rank: Rank,
) -> Result<Planned, RunError> {
    let config = sources.config;
    corpus::check(sources)?;
    let init = init(sources)?;
    let shards = shards(sources)?;
    if shards.is_none() && !matches!(sources.tokenizer, TokenizerChoice::Path(_)) {
        // Those that are created here have no token for it, like that of bytes.
        Tokenizer::bytes().with_begin_of_document(config.data.begin_of_document)?;
    }
    let grown = growth::planned(sources)?;
    if let Some((tokenizer, _)) = &grown {
        corpus::chat::check_few_rows(sources, tokenizer)?;
    }
    let vocabulary = match (&config.model, &shards, &sources.tokenizer) {
        _ if let Some((tokenizer, _)) = &grown
            && config.model.vocab_size.is_none()
            && config.model.init_from.is_none() =>
        {
            VocabularySize::from_tokenizer(tokenizer)
        }
        (_, _, TokenizerChoice::Bytes) => VocabularySize::from_tokenizer(&Tokenizer::bytes()),
        // A plan reads no file that it does not need.
        (m, ..) if m.vocab_size.is_some() || m.init_from.is_some() => VocabularySize::default(),
        (_, _, TokenizerChoice::Path(path)) => {
            let end = config.data.end_of_document.as_deref();
            VocabularySize::from_tokenizer(&load_tokenizer(Path::new(path), end, OWN_TOKENIZERS)?)
        }
        (_, Some(dataset), _) => VocabularySize { size: Some(dataset.vocab_size()), bound: None },
        (_, None, TokenizerChoice::Chars) => characters(sources)?,
        (_, None, TokenizerChoice::Bpe) => {
            VocabularySize { size: None, bound: Some("a short text yields fewer".into()) }
        }
    };
    let model = init.as_ref().map(|hf| hf.model);
    // A run keeps what its conversations added, which may be gone.
    let saved = (model.is_some() && config.data.today.is_some()).then(|| saved_tokenizer(parsed)).flatten();
    let asks = !(config.eval.chats.is_empty() && config.eval.tasks.is_empty());
    let own = (saved.is_none() && asks).then(|| saved_tokenizer(parsed)).flatten();
    let known = saved.as_ref().or(own.as_ref()).or(grown.as_ref().map(|(tokenizer, _)| tokenizer));
    let asked = questions::planned(sources, known, shards.as_ref())?;
    let growth = grown.as_ref().map(|(_, growth)| growth.clone()).unwrap_or_default();
    let facts = Facts {
        init: model.map(|model| match &saved {
            Some(tokenizer) => growth::resumed_model(model, tokenizer),
            None => grown_model(model, &growth),
        }),
        init_balance_loss: init.as_ref().and_then(|hf| hf.balance_loss),
        init_adapter: adapter_folder::settings(sources, model.as_ref())?,
        tokenizer_vocab_size: vocabulary.size,
        shards: shards.as_ref().map(|dataset| dataset.name().to_owned()),
        recipe: Some(target.recipe()),
        epoch_tokens: config.train.epochs.and_then(|_| known_epoch_tokens(sources)),
        world_size: Some(rank.world_size),
        static_scales: static_scales::of_file(sources)?,
        chat_date: sources.chat_date()?,
    };
    let planned = planned_for(parsed.resolve(&facts)?, rank)?;
    let context = planned.spec.model.context();
    questions::check_lengths(asked.iter().map(Vec::len), context)?;
    let planned = planned.with_scored(tasks::planned(sources, known, shards.as_ref(), context)?);
    let growth = growth::in_words(&growth, model.as_ref());
    Ok(Planned { vocabulary_bound: vocabulary.bound, growth, ..planned })
}

/// The tokenizer in the run folder whose configuration this is.
fn saved_tokenizer(parsed: &Parsed) -> Option<Tokenizer> {
    Tokenizer::load(RunFolder::of_config(parsed.file())?.tokenizer()).ok()
}

/// Tokens of one pass over the training data, if all of it is tokens already.
fn known_epoch_tokens(sources: &Sources<'_>) -> Option<u64> {
    Some(Corpus::if_tokenized(sources).ok()??.loader.epoch_tokens())
}

/// Size of the vocabulary, as far as a plan knows it.
#[derive(Default)]
struct VocabularySize {
    size: Option<usize>,
    /// Reason why it may turn out smaller.
    bound: Option<String>,
}

impl VocabularySize {
    fn from_tokenizer(tokenizer: &Tokenizer) -> Self {
        VocabularySize { size: Some(tokenizer.vocab_size()), bound: None }
    }
}

/// The number of characters in the training text, or in Unicode if the text is missing.
fn characters(sources: &Sources<'_>) -> Result<VocabularySize, RunError> {
    let mut texts = Vec::new();
    for source in &sources.train {
        let options = corpus::input_options(sources.config, &source.named);
        match list(&[&source.path], Take::OfFolders(Split::Train)) {
            Ok(listing) => texts.push(TextFiles { inputs: listing.files, options }),
            Err(DataError::File(CheckpointError::Io { source: error, .. }))
                if error.kind() == ErrorKind::NotFound =>
            {
                let why =
                    format!("{} does not exist, so all characters of Unicode are counted", source.named.path);
                // Plus the end-of-document token.
                return Ok(VocabularySize { size: Some(UNICODE_CHARACTERS + 1), bound: Some(why) });
            }
            Err(other) => return Err(other.into()),
        }
    }
    let tokenizer = learn(&texts, xtrain_data::VocabularyKind::Chars, &mut |_| ControlFlow::Continue(()))?;
    Ok(VocabularySize::from_tokenizer(&tokenizer))
}

/// Code points that are characters: all but the surrogates.
const UNICODE_CHARACTERS: usize = 0x11_0000 - 0x800;
