//! Vocabularies that are made of the text: learned once, kept, and found again for equal input and options.
//!
//! A folder keeps one together with a record of what it was learned from. The record is written first and names the
//! tokenizer by its hash, so that a folder in which a process was killed is never taken for more than it is.

use std::cell::RefCell;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::progress::LearnProgress;
use super::text_files::{TextFileReader, TextFiles, sample};
use super::{discard_unfinished, lock_at_once, other_dataset, refuse_foreign_files, unfinished};
use crate::error::Result;
use crate::files;
use crate::shard::INDEX_FILE;
use crate::tokenizer::{CutRule, Tokenizer};

/// How much text a BPE vocabulary is learned from at most: more does not change it much, and memory grows with it.
const BPE_SAMPLE_BYTES: u64 = 128 << 20;
/// Changes when the same text would give another vocabulary.
const VERSION: u32 = 1;

/// A vocabulary that is made of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VocabularyKind {
    /// Byte-level BPE.
    Bpe {
        /// Tokens that it has at most.
        size: usize,
    },
    /// The characters that occur.
    Chars,
}

/// The vocabulary of `texts` in the folder of a dataset that is to be made with it: who runs the same command again goes
/// on with the vocabulary that it had. `on_progress` is called a few times a second; [`ControlFlow::Break`] stops the
/// making, of which nothing is kept.
///
/// # Errors
/// Broken input, by file and place; no text at all; [`crate::DataError::Interrupted`]; a folder that holds another dataset, or anything else.
pub fn learn_for_dataset(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    folder: &Path,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    learn_in(folder, lock_at_once, learned_from(texts, vocabulary)?, texts, vocabulary, on_progress)
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
    // What refuses does so before anything is learned.
    if folder.exists() {
        let _lock = lock(folder)?;
        clear_for_vocabulary(folder)?;
    }
    let tokenizer = learn(texts, vocabulary, on_progress)?;
    files::create_folder(folder)?;
    let _lock = lock(folder)?;
    // Nobody was kept out meanwhile: learning takes minutes, and the folder may be a finished dataset by now.
    if let Some(tokenizer) = load_learned(folder, &learned_from) {
        return Ok(tokenizer);
    }
    clear_for_vocabulary(folder)?;
    let learned = VocabularyRecord { learned_from, tokenizer: tokenizer.hash_hex() };
    files::write_json(&folder.join(LEARNED_FILE), &learned)?;
    tokenizer.save(folder)?;
    Ok(tokenizer)
}

/// Sees to it that a vocabulary can be kept in `folder`: that nothing is there but what nobody misses.
fn clear_for_vocabulary(folder: &Path) -> Result<()> {
    if folder.join(INDEX_FILE).exists() {
        return Err(other_dataset(folder));
    }
    discard_unfinished(folder)?;
    refuse_foreign_files(folder)
}

/// A tokenizer made of `texts`, kept nowhere.
///
/// # Errors
/// Texts that cannot be read or hold nothing; [`crate::DataError::Interrupted`] where `on_progress` breaks off.
pub fn learn(
    texts: &[TextFiles],
    vocabulary: VocabularyKind,
    on_progress: &mut dyn FnMut(LearnProgress) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    // The reader and the merging tell of their progress in turn.
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

/// The record beside a tokenizer that was made of the text.
pub(super) const LEARNED_FILE: &str = "learned.json";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VocabularyRecord {
    /// A hash of what decides it.
    learned_from: String,
    /// The hash of the tokenizer.
    tokenizer: String,
}

/// The tokenizer in `folder`, if it is whole and was learned from just that.
fn load_learned(folder: &Path, learned_from: &str) -> Option<Tokenizer> {
    let bytes = fs::read(folder.join(LEARNED_FILE)).ok()?;
    let learned: VocabularyRecord = serde_json::from_slice(&bytes).ok()?;
    let tokenizer = Tokenizer::load(folder).ok().filter(|_| learned.learned_from == learned_from)?;
    (tokenizer.hash_hex() == learned.tokenizer).then_some(tokenizer)
}

/// Removes the record of a vocabulary that `tokenizer` is about to replace.
pub(super) fn remove_stale_record(folder: &Path, tokenizer: &Tokenizer) -> Result<()> {
    let path = folder.join(LEARNED_FILE);
    let learned =
        fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<VocabularyRecord>(&bytes).ok());
    match learned.is_some_and(|learned| learned.tokenizer == tokenizer.hash_hex()) {
        true => Ok(()),
        false => files::remove(&path),
    }
}

/// Whether a file of this name in `folder` is of a vocabulary that was learned there. The record is written first: without it a
/// tokenizer is someone else's, and what is left of writing the record is all that can be there.
pub(super) fn belongs_to_vocabulary(folder: &Path, name: &str) -> bool {
    let whole = name.strip_suffix(".tmp").unwrap_or(name);
    whole == LEARNED_FILE
        || ["tokenizer.json", "tokenizer_config.json"].contains(&whole) && folder.join(LEARNED_FILE).exists()
}

/// A hash of everything that decides a vocabulary, and of the sizes and times of the input files.
pub(super) fn learned_from(texts: &[TextFiles], vocabulary: VocabularyKind) -> Result<String> {
    let mut sources = Vec::with_capacity(texts.len());
    for TextFiles { inputs, options } in texts {
        sources.push(json!([unfinished::input_identities(inputs)?, options.field, options.separator]));
    }
    let kind = match vocabulary {
        VocabularyKind::Bpe { size } => json!({"bpe": size, "sample_bytes": BPE_SAMPLE_BYTES}),
        VocabularyKind::Chars => json!("chars"),
    };
    let everything = json!({"version": VERSION, "vocabulary": kind, "sources": sources});
    Ok(files::hex(&Sha256::digest(everything.to_string())))
}
