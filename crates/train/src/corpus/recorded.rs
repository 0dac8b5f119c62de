//! The texts of a run with the cache entries that hold their tokens, recorded in its folder: a run whose text
//! is gone goes on from the cache.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::paths::NamedSource;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::Path;
use xtrain_config::files;
use xtrain_data::{Dataset, InputOptions, Split};

const MAX_BYTES: u64 = 64 << 20;

/// Texts that are read as one, and the folder in the cache that holds their tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordedText {
    /// As the configuration names them.
    paths: Vec<String>,
    text_field: String,
    separator: Option<String>,
    /// The split that is read of folders and patterns with several. Records of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    split: Option<String>,
    /// Name of the cache entry.
    tokens: String,
}

impl RecordedText {
    /// A record whose tokens are not known yet.
    pub(super) fn new(sources: &[NamedSource], options: &InputOptions, split: Split) -> Self {
        RecordedText {
            paths: sources.iter().map(|source| source.named.path.clone()).collect(),
            text_field: options.field.clone(),
            separator: options.separator.clone(),
            split: Some(split.name().to_owned()),
            tokens: String::new(),
        }
    }

    pub(super) fn with_tokens(mut self, dataset: &Dataset) -> Self {
        let name = dataset.folder().file_name().unwrap_or_default();
        self.tokens = name.to_string_lossy().into_owned();
        self
    }

    /// True if both are of the same texts, read with the same options.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        let of = |text: &Self| (text.paths.clone(), text.text_field.clone(), text.separator.clone());
        let is_same_split = self.split.is_none() || other.split.is_none() || self.split == other.split;
        of(self) == of(other) && is_same_split
    }

    /// The tokens, if `cache` still holds them.
    pub(super) fn tokens(&self, cache: &Path) -> Option<Dataset> {
        // The name of an entry is a hash; anything else could lead out of the cache.
        let is_entry = !self.tokens.is_empty() && self.tokens.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_entry.then(|| Dataset::open(cache.join(&self.tokens)).ok()).flatten()
    }

    /// The texts of the run in `folder`; none if it recorded none.
    pub(super) fn all_of(folder: &RunFolder) -> Result<Vec<Self>, RunError> {
        let path = folder.texts();
        let bytes = match files::read(&path, MAX_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            bytes => bytes.map_err(RunError::io(&path, "read"))?,
        };
        Ok(serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            tracing::warn!(
                "{}: damaged ({error}), so texts that no longer exist are not found in the cache",
                path.display()
            );
            Vec::new()
        }))
    }

    /// Records the `texts` of the run in `folder`.
    pub(crate) fn save(texts: &[Self], folder: &RunFolder) -> Result<(), RunError> {
        if RecordedText::all_of(folder)? == texts {
            return Ok(());
        }
        let text =
            serde_json::to_string_pretty(texts).map_err(|error| RunError::Refused(error.to_string()))?;
        folder.write("texts.json", &(text + "\n"))
    }
}
