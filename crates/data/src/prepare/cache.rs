//! The cache of datasets and vocabularies on disk.
//!
//! An entry is a folder named by a hash of all that determines its content; its `source.json` lists the input
//! files. Entries of a file that has changed are removed, because they can never be used again.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xtrain_checkpoint::temporary_target;

use super::file_names::SOURCE_FILE;
use super::learn::{VocabularyKind, learn_in, learned_from, load_learned};
use super::progress::{LearnProgress, Progress};
use super::{
    PrepareOptions, TextFiles, leftovers, lock_or_wait, open_finished, open_lock, prepare_locked,
    refuse_empty, unfinished, warn_of_skipped_rows,
};
use crate::error::{DataError, Result};
use crate::files;
use crate::input::InputFile;
use crate::shard::Dataset;
use crate::tokenizer::Tokenizer;

/// Cached [`prepare()`](super::prepare()): equal input, tokenizer and options return the dataset of an
/// earlier call. If several processes prepare the same dataset, one does and the others wait.
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
    let made_from = inputs_hash(inputs, tokenizer, options)?;
    let folder = entry_folder(cache, &made_from);
    // A finished entry is only read, so the cache may be read-only.
    let remedy = |error| match error {
        DataError::Corrupt { path, problem, .. } => {
            let advice =
                format!("delete {}, which contains only cached data, and run again", folder.display());
            DataError::Corrupt { path, problem, advice }
        }
        other => other,
    };
    if let Some(dataset) = open_finished(&folder, &made_from).map_err(remedy)? {
        if leftovers::may_exist(&folder)
            && let Ok(lock) = open_lock(&folder)
            && lock.try_lock().is_ok()
        {
            leftovers::remove(&folder);
        }
        warn_of_skipped_rows(&dataset, inputs);
        return Ok(dataset);
    }
    refuse_empty(inputs)?;
    files::create_folder(&folder)?;
    let _lock = lock_or_wait(&folder)?;
    let description = format!("tokens, with the tokenizer {}", tokenizer.hash_hex());
    let source = Provenance::new(description, inputs)?;
    source.save(&folder)?;
    source.remove_outdated(cache);
    prepare_locked(inputs, tokenizer, options, &folder, on_progress)
}

/// Cached [`learn()`](super::learn()): equal texts and options return the vocabulary of an earlier call.
/// `on_progress` is called a few times a second; [`ControlFlow::Break`] stops the work and discards it.
///
/// # Errors
/// Damaged input, with file and location; input without text; a folder that cannot be written;
/// [`DataError::Interrupted`].
pub fn learn_cached(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    cache: &Path,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    let learned_from = learned_from(texts, vocabulary)?;
    let folder = entry_folder(cache, &learned_from);
    let tokenizer = learn_in(&folder, lock_or_wait, learned_from, texts, vocabulary, on_progress)?;
    let has_source = || folder.join(SOURCE_FILE).exists();
    if has_source() && !leftovers::may_exist(&folder) {
        return Ok(tokenizer);
    }
    let lock = lock_or_wait(&folder);
    // A finished entry is only read, so the cache may be read-only.
    let _lock = match lock {
        Err(_) if has_source() => return Ok(tokenizer),
        lock => lock?,
    };
    leftovers::remove(&folder);
    if !has_source() {
        let description = match vocabulary {
            VocabularyKind::Bpe { size } => format!("a vocabulary of at most {size} tokens"),
            VocabularyKind::Chars => "a vocabulary of characters".to_owned(),
        };
        let inputs: Vec<InputFile> = texts.iter().flat_map(|texts| texts.inputs.iter().cloned()).collect();
        let source = Provenance::new(description, &inputs)?;
        source.save(&folder)?;
        source.remove_outdated(cache);
    }
    Ok(tokenizer)
}

/// The dataset that [`prepare_cached`] returns, if an earlier call made it. Writes nothing.
///
/// # Errors
/// Those of a damaged cache.
pub fn find_prepared(
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    cache: &Path,
) -> Result<Option<Dataset>> {
    let made_from = inputs_hash(inputs, tokenizer, options)?;
    open_finished(&entry_folder(cache, &made_from), &made_from)
}

/// The vocabulary that [`learn_cached`] returns, if an earlier call learned it. Writes nothing.
///
/// # Errors
/// Texts that cannot be looked up.
pub fn find_learned(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    cache: &Path,
) -> Result<Option<Tokenizer>> {
    let learned_from = learned_from(texts, vocabulary)?;
    Ok(load_learned(&entry_folder(cache, &learned_from), &learned_from))
}

/// Hash of all that determines a dataset.
fn inputs_hash(inputs: &[InputFile], tokenizer: &Tokenizer, options: &PrepareOptions) -> Result<String> {
    unfinished::describe_inputs(inputs, tokenizer, options, options.encoder(tokenizer)?.as_ref())
}

fn entry_folder(cache: &Path, hash: &str) -> PathBuf {
    cache.join(&hash[..16])
}

/// Content of `source.json`: the description and the input files of an entry.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Provenance {
    #[serde(rename = "made")]
    description: String,
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
    fn new(description: String, inputs: &[InputFile]) -> Result<Provenance> {
        let mut files = Vec::with_capacity(inputs.len());
        for InputFile { path, bytes, modified_ns, .. } in inputs {
            let path = fs::canonicalize(path).map_err(DataError::io(path, "open the input"))?;
            files.push(ProvenanceFile {
                path: path.to_string_lossy().into_owned(),
                bytes: *bytes,
                modified_ns: *modified_ns,
            });
        }
        Ok(Provenance { description, inputs: files })
    }

    fn load(folder: &Path) -> Option<Provenance> {
        serde_json::from_slice(&fs::read(folder.join(SOURCE_FILE)).ok()?).ok()
    }

    fn save(&self, folder: &Path) -> Result<()> {
        files::write_json(&folder.join(SOURCE_FILE), self)
    }

    /// Removes entries of `cache` with an older state of a file in this one. Entries that cannot be removed
    /// or are being written stay; they only take space.
    fn remove_outdated(&self, cache: &Path) {
        for folder in fs::read_dir(cache).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let is_outdated = Provenance::load(&folder).is_some_and(|other| other.is_outdated_by(self));
            let Some(lock) = is_outdated.then(|| open_lock(&folder).ok()).flatten() else { continue };
            if lock.try_lock().is_ok() {
                // The index goes first, so that a kill here leaves no folder that looks complete.
                let is_removed = files::remove(&folder.join(crate::shard::INDEX_FILE)).is_ok()
                    && fs::remove_dir_all(&folder).is_ok();
                tracing::debug!(
                    "{} belongs to text that has changed; removed: {is_removed}",
                    folder.display()
                );
            }
        }
    }

    /// True if `now` contains a file of this entry in another state.
    fn is_outdated_by(&self, now: &Provenance) -> bool {
        self.inputs.iter().any(|was| {
            let state = |file: &ProvenanceFile| (file.bytes, file.modified_ns);
            now.inputs.iter().any(|is| is.path == was.path && state(is) != state(was))
        })
    }
}

/// True if `name` is the record of a cache entry, `source.json`, in `folder`.
pub(super) fn belongs_to_cache(folder: &Path, name: &str) -> bool {
    temporary_target(name).unwrap_or(name) == SOURCE_FILE
        && (name != SOURCE_FILE || Provenance::load(folder).is_some())
}
