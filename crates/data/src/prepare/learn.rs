//! Vocabularies learned from text, stored in a folder and reused for equal input and options.
//!
//! The folder holds the tokenizer and a record with the hashes of the tokenizer and of its input. The record
//! is written first, so a folder in which a process was killed is never mistaken for a complete one.

use std::cell::RefCell;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use xtrain_checkpoint::temporary_target;

use super::file_names::LEARNED_FILE;
use super::progress::LearnProgress;
use super::text_files::{TextFileReader, TextFiles, sample};
use super::{discard_unfinished, lock_or_fail, other_dataset, refuse_foreign_files, unfinished};
use crate::error::Result;
use crate::files;
use crate::shard::INDEX_FILE;
use crate::tokenizer::{CutRule, Tokenizer};

/// Maximum size of the text that a BPE vocabulary is learned from. More text changes it little and takes more
/// memory.
const BPE_SAMPLE_BYTES: u64 = 128 << 20;
/// Version of the learning algorithm; it changes when equal text gives another vocabulary.
const VERSION: u32 = 1;

/// Kind of a vocabulary learned from text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VocabularyKind {
    /// Byte-level BPE.
    Bpe {
        /// Maximum number of tokens.
        size: usize,
    },
    /// One token per character of the text.
    Chars,
}

/// Learns the vocabulary for a dataset and stores it in the dataset's folder, so that a repeated command
/// continues with the same vocabulary. `on_progress` is called a few times a second; [`ControlFlow::Break`]
/// stops the work and discards it.
///
/// # Errors
/// Damaged input, with file and location; input without text; a folder with another dataset or other files;
/// [`crate::DataError::Interrupted`].
pub fn learn_for_dataset(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    folder: &Path,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    learn_in(folder, lock_or_fail, learned_from(texts, vocabulary)?, texts, vocabulary, on_progress)
}

pub(super) fn learn_in(
    folder: &Path,
    lock: fn(&Path) -> Result<File>,
    learned_from: String,
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    if let Some(tokenizer) = load_learned(folder, &learned_from) {
        return Ok(tokenizer);
    }
    // Fail before the slow part.
    if folder.exists() {
        let _lock = lock(folder)?;
        // Another process may have finished it while this one waited.
        if let Some(tokenizer) = load_learned(folder, &learned_from) {
            return Ok(tokenizer);
        }
        clear_for_vocabulary(folder)?;
    }
    let tokenizer = learn(texts, vocabulary, on_progress)?;
    files::create_folder(folder)?;
    let _lock = lock(folder)?;
    // The folder was not locked while learning, which takes minutes; it may be a finished dataset by now.
    if let Some(tokenizer) = load_learned(folder, &learned_from) {
        return Ok(tokenizer);
    }
    clear_for_vocabulary(folder)?;
    let learned = VocabularyRecord { learned_from, tokenizer: tokenizer.hash_hex() };
    files::write_json(&folder.join(LEARNED_FILE), &learned)?;
    tokenizer.save(folder)?;
    Ok(tokenizer)
}

/// Prepares `folder` for a vocabulary: removes an unfinished run without shards, and refuses any other
/// content.
fn clear_for_vocabulary(folder: &Path) -> Result<()> {
    if folder.join(INDEX_FILE).exists() {
        return Err(other_dataset(folder));
    }
    discard_unfinished(folder)?;
    refuse_foreign_files(folder)
}

/// Learns a vocabulary from `texts` without storing it.
///
/// # Errors
/// Damaged input; input without text; [`crate::DataError::Interrupted`] if `on_progress` returns
/// [`ControlFlow::Break`].
pub fn learn(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    // Shared by the reader and the merging, which report in turn.
    let on_progress = RefCell::new(on_progress);
    let report = |learning| (on_progress.borrow_mut())(learning);
    match vocabulary {
        VocabularyKind::Chars => Tokenizer::chars(TextFileReader::new(texts, CutRule::Anywhere, &report)),
        VocabularyKind::Bpe { size } => {
            let reader = TextFileReader::new(texts, CutRule::BetweenWords, &report);
            let mut on_merge = |done, total| report(LearnProgress::Merging { done, total });
            Tokenizer::train_bpe(sample(texts, reader, BPE_SAMPLE_BYTES), size, &mut on_merge)
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VocabularyRecord {
    /// Hash of the input and options.
    learned_from: String,
    /// Hash of the tokenizer.
    tokenizer: String,
}

/// The tokenizer in `folder`, if it is complete and was learned from equal input and options.
pub(super) fn load_learned(folder: &Path, learned_from: &str) -> Option<Tokenizer> {
    let bytes = fs::read(folder.join(LEARNED_FILE)).ok()?;
    let learned: VocabularyRecord = serde_json::from_slice(&bytes).ok()?;
    let tokenizer = Tokenizer::load(folder).ok().filter(|_| learned.learned_from == learned_from)?;
    (tokenizer.hash_hex() == learned.tokenizer).then_some(tokenizer)
}

/// Removes the record of another vocabulary than `tokenizer`, which is about to replace it.
pub(super) fn remove_stale_record(folder: &Path, tokenizer: &Tokenizer) -> Result<()> {
    let path = folder.join(LEARNED_FILE);
    let learned =
        fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<VocabularyRecord>(&bytes).ok());
    match learned.is_some_and(|learned| learned.tokenizer == tokenizer.hash_hex()) {
        true => Ok(()),
        false => files::remove(&path),
    }
}

/// True if the file `name` in `folder` belongs to a vocabulary learned there. The record is written first, so
/// without it a tokenizer is the user's, and only a temporary of the record is ours.
pub(super) fn belongs_to_vocabulary(folder: &Path, name: &str) -> bool {
    let final_name = temporary_target(name).unwrap_or(name);
    final_name == LEARNED_FILE
        || ["tokenizer.json", "tokenizer_config.json"].contains(&final_name)
            && folder.join(LEARNED_FILE).exists()
}

/// Hash of all that determines a vocabulary: its kind, and options, names, sizes and times of the input
/// files.
pub(super) fn learned_from(texts: &[TextFiles], vocabulary: VocabularyKind) -> Result<String> {
    let mut sources = Vec::with_capacity(texts.len());
    for TextFiles { inputs, options } in texts {
        let mut source =
            vec![unfinished::input_identities(inputs)?, json!(options.field), json!(options.separator)];
        // Left out otherwise, so that vocabularies of versions without the option are found.
        source.extend(Some(json!(options.skip_bad_rows)).filter(|_| options.skip_bad_rows > 0));
        sources.push(source);
    }
    let kind = match vocabulary {
        VocabularyKind::Bpe { size } => json!({"bpe": size, "sample_bytes": BPE_SAMPLE_BYTES}),
        VocabularyKind::Chars => json!("chars"),
    };
    let everything = json!({"version": VERSION, "vocabulary": kind, "sources": sources});
    Ok(files::hex(&Sha256::digest(everything.to_string())))
}
