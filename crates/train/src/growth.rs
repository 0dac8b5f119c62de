//! Growth of a vocabulary by the markers of chat templates, and of the embedding and the head with it.

use crate::error::RunError;
use crate::paths::Sources;
use crate::source::{OWN_TOKENIZERS, load_tokenizer};
use std::path::Path;
use xtrain_checkpoint::first_few;
use xtrain_config::TokenizerChoice;
use xtrain_data::{ChatOptions, Dataset, Growth, Tokenizer, chat};
use xtrain_model::Description;
use xtrain_report::metrics::format::grouped;

/// Rows of a grown embedding are a multiple of this.
const ROW_MULTIPLE: usize = 128;

/// Number of tokens that a message lists.
const SHOWN: usize = 16;

/// The tokenizer with the tokens that conversations need: those of `shards`, if they were written with this
/// tokenizer and more tokens, and the markers of the templates of `chats`.
///
/// # Errors
/// Too few tokens with names like `reserved`; a tokenizer that cannot take new tokens.
pub fn grow<'d>(
    tokenizer: Tokenizer,
    shards: impl IntoIterator<Item = &'d Dataset>,
    chats: &[ChatOptions],
    reserved: Option<&str>,
) -> Result<(Tokenizer, Growth), RunError> {
    let (mut tokenizer, mut growth) = (tokenizer, Growth::default());
    for dataset in shards.into_iter().filter(|dataset| dataset.chat().is_some()) {
        let (grown, by_shards) = tokenizer.grown_as(&dataset.tokenizer()?)?;
        (tokenizer, growth) = (grown, growth.then(by_shards));
    }
    if chats.is_empty() {
        return Ok((tokenizer, growth));
    }
    let (tokenizer, by_templates) = chat::with_markers(tokenizer, chats, reserved)?;
    Ok((tokenizer, growth.then(by_templates)))
}

/// The grown tokenizer of a run that has conversations, before its data is opened. `None` if it has none, or
/// if its tokenizer is not there yet.
///
/// # Errors
/// Those of [`grow`].
pub(crate) fn planned(sources: &Sources<'_>) -> Result<Option<(Tokenizer, Growth)>, RunError> {
    let (mut chats, mut shards) = (Vec::new(), Vec::new());
    for source in sources.chat_sources() {
        match source.is_shards {
            true => shards.push(Dataset::open(&source.path)?),
            false => chats.push(sources.chat_options(&source.named)?),
        }
    }
    if chats.is_empty() && shards.is_empty() {
        return Ok(None);
    }
    let Some(tokenizer) = known_tokenizer(sources, shards.first())? else { return Ok(None) };
    let data = &sources.config.data;
    grow(tokenizer, &shards, &chats, data.reserved_tokens.as_deref()).map(Some)
}

/// The tokenizer of a run before its data is opened, without the tokens that conversations need. `None` if it
/// is learned from the text, or not there yet. `shards` is the first source of tokens, if there is one.
pub(crate) fn known_tokenizer(
    sources: &Sources<'_>,
    shards: Option<&Dataset>,
) -> Result<Option<Tokenizer>, RunError> {
    let end = sources.config.data.end_of_document.as_deref();
    match &sources.tokenizer {
        TokenizerChoice::Bytes => Ok(Some(Tokenizer::bytes())),
        // If it cannot be loaded, the run says so.
        TokenizerChoice::Path(path) => Ok(load_tokenizer(Path::new(path), end, OWN_TOKENIZERS).ok()),
        TokenizerChoice::Bpe | TokenizerChoice::Chars => Ok(shards.map(Dataset::tokenizer).transpose()?),
    }
}

/// The model of a folder after `growth`. One that had too few rows for its tokenizer before stays as it is.
pub(crate) fn grown_model(model: Description, growth: &Growth) -> Description {
    if growth.is_empty() || growth.from > model.vocab_size {
        return model;
    }
    with_rows_for(model, growth.to)
}

/// The model of the folder that a run began from, whose tokenizer this is, as the run grew it.
pub(crate) fn resumed_model(model: Description, tokenizer: &Tokenizer) -> Description {
    with_rows_for(model, tokenizer.vocab_size())
}

fn with_rows_for(model: Description, tokens: usize) -> Description {
    match tokens > model.vocab_size {
        true => Description { vocab_size: tokens.next_multiple_of(ROW_MULTIPLE), ..model },
        false => model,
    }
}

/// The growth in words that follow "the vocabulary", with the rows of the folder's model, if there is one;
/// `None` if nothing grows.
pub fn in_words(growth: &Growth, init: Option<&Description>) -> Option<String> {
    let listed = |names: &[String]| first_few(names.iter(), SHOWN);
    let mut said = Vec::new();
    if !growth.added.is_empty() {
        let (from, to) = (grouped(growth.from as u64), grouped(growth.to as u64));
        said.push(format!("grows from {from} to {to} tokens ({})", listed(&growth.added)));
    }
    if !growth.renamed.is_empty() {
        let renamed: Vec<String> =
            growth.renamed.iter().map(|(old, new)| format!("{old} is now {new}")).collect();
        said.push(format!("has new names for reserved tokens ({})", listed(&renamed)));
    }
    if !growth.made_special.is_empty() {
        said.push(format!("has new special tokens among its tokens ({})", listed(&growth.made_special)));
    }
    let (first, rest) = said.split_first()?;
    let said = rest.iter().fold(first.clone(), |said, more| format!("{said} and {more}"));
    let Some(init) = init.filter(|_| !growth.added.is_empty()) else { return Some(said) };
    let what = if init.tie_embeddings { "embedding" } else { "embedding and head" };
    let before = init.vocab_size;
    Some(match grown_model(*init, growth).vocab_size {
        after if after == before => {
            format!("{said}, which the {} rows of {what} can hold", grouped(before as u64))
        }
        after => format!("{said}, {what} from {} to {} rows", grouped(before as u64), grouped(after as u64)),
    })
}
