//! What is made of texts and kept for the next run: tokens and vocabularies.
//!
//! An entry is a folder whose name is a hash of everything that decides it, and in which `source.json` says of what it
//! was made. When a text has changed, entries of what it was before can be of no use again, and go.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::learn::{VocabularyKind, learn_in, learned_from};
use super::progress::{LearnProgress, Progress};
use super::{
    PrepareOptions, TextFiles, finished, lock_in_turn, open_lock, prepare_locked, refuse_empty, unfinished,
};
use crate::error::{DataError, Result};
use crate::files;
use crate::input::InputFile;
use crate::shard::Dataset;
use crate::tokenizer::Tokenizer;

/// [`prepare()`](super::prepare()) in a folder under `cache` that is found again for equal input, tokenizer and options.
/// Processes that ask for the same at once wait for the first.
///
/// # Errors
/// Those of [`prepare()`](super::prepare()).
pub fn prepare_cached(
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    cache: &Path,
    on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Dataset> {
    let made_from = unfinished::made_from(inputs, tokenizer, options)?;
    let folder = entry_folder(cache, &made_from);
    // What is finished is only read, so that a cache may be someone else's.
    let remedy = |error| match error {
        DataError::Corrupt { path, problem, .. } => {
            let advice = format!(
                "delete {}, which only keeps what is made of the text, and run again",
                folder.display()
            );
            DataError::Corrupt { path, problem, advice }
        }
        other => other,
    };
    if let Some(dataset) = finished(&folder, &made_from).map_err(remedy)? {
        return Ok(dataset);
    }
    refuse_empty(inputs)?;
    files::create_folder(&folder)?;
    let _lock = lock_in_turn(&folder)?;
    let made = format!("tokens, with the tokenizer {}", tokenizer.hash_hex());
    let source = Provenance::new(made, inputs)?;
    source.save(&folder)?;
    source.remove_outdated(cache);
    prepare_locked(inputs, tokenizer, options, &folder, on_progress)
}

/// The vocabulary of `texts`, from a folder under `cache` where it was made before. `on_progress` is called a few times
/// a second; [`ControlFlow::Break`] stops the making, of which nothing is kept.
///
/// # Errors
/// Broken input, by file and place; no text at all; a folder that cannot be written; [`DataError::Interrupted`].
pub fn learn_cached(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    cache: &Path,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    let learned_from = learned_from(texts, vocabulary)?;
    let folder = entry_folder(cache, &learned_from);
    let tokenizer = learn_in(&folder, lock_in_turn, learned_from, texts, vocabulary, on_progress)?;
    if !folder.join(SOURCE_FILE).exists() {
        let made = match vocabulary {
            VocabularyKind::Bpe { size } => format!("a vocabulary of at most {size} tokens"),
            VocabularyKind::Chars => "a vocabulary of characters".to_owned(),
        };
        let inputs: Vec<InputFile> = texts.iter().flat_map(|texts| texts.inputs.iter().cloned()).collect();
        let source = Provenance::new(made, &inputs)?;
        source.save(&folder)?;
        source.remove_outdated(cache);
    }
    Ok(tokenizer)
}

fn entry_folder(cache: &Path, hash: &str) -> PathBuf {
    cache.join(&hash[..16])
}

const SOURCE_FILE: &str = "source.json";

/// What an entry was made of.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Provenance {
    made: String,
    inputs: Vec<ProvenanceFile>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvenanceFile {
    path: String,
    bytes: u64,
    modified_ns: u64,
}

impl Provenance {
    fn new(made: String, inputs: &[InputFile]) -> Result<Provenance> {
        let mut files = Vec::with_capacity(inputs.len());
        for InputFile { path, bytes, modified_ns, .. } in inputs {
            let path = fs::canonicalize(path).map_err(DataError::io(path, "open the input"))?;
            files.push(ProvenanceFile {
                path: path.to_string_lossy().into_owned(),
                bytes: *bytes,
                modified_ns: *modified_ns,
            });
        }
        Ok(Provenance { made, inputs: files })
    }

    fn load(folder: &Path) -> Option<Provenance> {
        serde_json::from_slice(&fs::read(folder.join(SOURCE_FILE)).ok()?).ok()
    }

    fn save(&self, folder: &Path) -> Result<()> {
        files::write_json(&folder.join(SOURCE_FILE), self)
    }

    /// Removes the entries in `cache` that were made of a file of this one before it changed. What cannot be removed,
    /// or is just being made, stays: it costs nothing but its place.
    fn remove_outdated(&self, cache: &Path) {
        for folder in fs::read_dir(cache).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let is_outdated = Provenance::load(&folder).is_some_and(|other| other.is_outdated_by(self));
            let Some(lock) = is_outdated.then(|| open_lock(&folder).ok()).flatten() else { continue };
            if lock.try_lock().is_ok() {
                // First what says that it is complete, so that a process killed here leaves no half dataset.
                let is_removed = files::remove(&folder.join(crate::shard::INDEX_FILE)).is_ok()
                    && fs::remove_dir_all(&folder).is_ok();
                tracing::debug!("{} is of text that has changed; removed: {is_removed}", folder.display());
            }
        }
    }

    /// Whether a file of this source is in `now` as another.
    fn is_outdated_by(&self, now: &Provenance) -> bool {
        self.inputs.iter().any(|was| {
            let state = |file: &ProvenanceFile| (file.bytes, file.modified_ns);
            now.inputs.iter().any(|is| is.path == was.path && state(is) != state(was))
        })
    }
}

/// Whether `folder` is an entry of a cache, in which a file of this name says so.
pub(super) fn belongs_to_cache(folder: &Path, name: &str) -> bool {
    name.strip_suffix(".tmp").unwrap_or(name) == SOURCE_FILE
        && (name != SOURCE_FILE || Provenance::load(folder).is_some())
}
