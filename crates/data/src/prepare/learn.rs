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

use super::texts::{Reader, Texts, sample};
use super::{discard_unfinished, lock_at_once, other_dataset, refuse_foreign_files, resume};
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
pub enum Vocabulary {
    /// Byte-level BPE.
    Bpe {
        /// Tokens that it has at most.
        size: usize,
    },
    /// The characters that occur.
    Chars,
}

/// How far the making of a vocabulary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learning {
    /// The text is read.
    Reading {
        /// Bytes of the input files, as they lie on the disk, that are done.
        bytes_done: u64,
        /// Bytes of all input files.
        bytes_total: u64,
    },
    /// The most frequent pairs of tokens are merged.
    Merging {
        /// Merges that are found.
        done: usize,
        /// Merges that are found at most.
        total: usize,
    },
}

/// The vocabulary of `texts` in the folder of a dataset that is to be made with it: who runs the same command again goes
/// on with the vocabulary that it had. `on_progress` is called a few times a second; [`ControlFlow::Break`] stops the
/// making, of which nothing is kept.
///
/// # Errors
/// Broken input, by file and place; no text at all; [`crate::DataError::Interrupted`]; a folder that holds another dataset, or anything else.
pub fn learn_for_dataset(
    texts: &[Texts],
    vocabulary: Vocabulary,
    folder: &Path,
    on_progress: &mut dyn FnMut(Learning) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    learn_in(folder, lock_at_once, learned_from(texts, vocabulary)?, texts, vocabulary, on_progress)
}

pub(super) fn learn_in(
    folder: &Path,
    lock: fn(&Path) -> Result<File>,
    learned_from: String,
    texts: &[Texts],
    vocabulary: Vocabulary,
    on_progress: &mut dyn FnMut(Learning) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    if let Some(tokenizer) = kept(folder, &learned_from) {
        return Ok(tokenizer);
    }
    // What refuses does so before anything is learned.
    if folder.exists() {
        let _lock = lock(folder)?;
        make_room(folder)?;
    }
    let tokenizer = learn(texts, vocabulary, on_progress)?;
    files::create_folder(folder)?;
    let _lock = lock(folder)?;
    // Nobody was kept out meanwhile: learning takes minutes, and the folder may be a finished dataset by now.
    if let Some(tokenizer) = kept(folder, &learned_from) {
        return Ok(tokenizer);
    }
    make_room(folder)?;
    let learned = Learned { learned_from, tokenizer: tokenizer.hash_hex() };
    files::write_json(&folder.join(LEARNED_FILE), &learned)?;
    tokenizer.save(folder)?;
    Ok(tokenizer)
}

/// Sees to it that a vocabulary can be kept in `folder`: that nothing is there but what nobody misses.
fn make_room(folder: &Path) -> Result<()> {
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
    texts: &[Texts],
    vocabulary: Vocabulary,
    on_progress: &mut dyn FnMut(Learning) -> ControlFlow<()>,
) -> Result<Tokenizer> {
    // The reader and the merging tell of their progress in turn.
    let on_progress = RefCell::new(on_progress);
    let tell = |learning| (on_progress.borrow_mut())(learning);
    match vocabulary {
        Vocabulary::Chars => Tokenizer::chars(Reader::new(texts, CutRule::Anywhere, &tell)),
        Vocabulary::Bpe { size } => {
            let reader = Reader::new(texts, CutRule::BetweenWords, &tell);
            let mut on_merge = |done, total| tell(Learning::Merging { done, total });
            Tokenizer::train_bpe(sample(texts, reader, BPE_SAMPLE_BYTES), size, &mut on_merge)
        }
    }
}

/// The record beside a tokenizer that was made of the text.
pub(super) const LEARNED_FILE: &str = "learned.json";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Learned {
    /// A hash of what decides it.
    learned_from: String,
    /// The hash of the tokenizer.
    tokenizer: String,
}

/// The tokenizer in `folder`, if it is whole and was learned from just that.
fn kept(folder: &Path, learned_from: &str) -> Option<Tokenizer> {
    let bytes = fs::read(folder.join(LEARNED_FILE)).ok()?;
    let learned: Learned = serde_json::from_slice(&bytes).ok()?;
    let tokenizer = Tokenizer::load(folder).ok().filter(|_| learned.learned_from == learned_from)?;
    (tokenizer.hash_hex() == learned.tokenizer).then_some(tokenizer)
}

/// Removes the record of a vocabulary that `tokenizer` is about to replace.
pub(super) fn forget_other(folder: &Path, tokenizer: &Tokenizer) -> Result<()> {
    let path = folder.join(LEARNED_FILE);
    let learned = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Learned>(&bytes).ok());
    match learned.is_some_and(|learned| learned.tokenizer == tokenizer.hash_hex()) {
        true => Ok(()),
        false => files::remove(&path),
    }
}

/// Whether a file of this name in `folder` is of a vocabulary that was learned there. The record is written first: without it a
/// tokenizer is someone else's, and what is left of writing the record is all that can be there.
pub(super) fn is_of_learned(folder: &Path, name: &str) -> bool {
    let whole = name.strip_suffix(".tmp").unwrap_or(name);
    whole == LEARNED_FILE
        || ["tokenizer.json", "tokenizer_config.json"].contains(&whole) && folder.join(LEARNED_FILE).exists()
}

/// A hash of everything that decides a vocabulary, and of the sizes and times of the input files.
pub(super) fn learned_from(texts: &[Texts], vocabulary: Vocabulary) -> Result<String> {
    let mut sources = Vec::with_capacity(texts.len());
    for Texts { inputs, options } in texts {
        sources.push(json!([resume::listed(inputs)?, options.field, options.separator]));
    }
    let kind = match vocabulary {
        Vocabulary::Bpe { size } => json!({"bpe": size, "sample_bytes": BPE_SAMPLE_BYTES}),
        Vocabulary::Chars => json!("chars"),
    };
    let everything = json!({"version": VERSION, "vocabulary": kind, "sources": sources});
    Ok(files::hex(&Sha256::digest(everything.to_string())))
}
