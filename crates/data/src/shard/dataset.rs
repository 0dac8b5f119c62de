//! A dataset folder: shards, their index and their tokenizer.

use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::header::{MASKED_SHARD_VERSION, SHARD_VERSION};
use super::reader::Shard;
use crate::chat::ChatRecord;
use crate::error::{DataError, Result};
use crate::files;
use crate::stream::{TokenStream, past_the_end};
use crate::tokenizer::Tokenizer;

/// File name of the index. It is written last, so a folder with an index is complete.
pub(crate) const INDEX_FILE: &str = "dataset.json";
const ADVICE: &str = "restore the folder, or delete it and tokenize again";

/// Content of `dataset.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DatasetIndex {
    /// Version of the shard format.
    pub(crate) version: u32,
    /// SHA-256 of the canonical `tokenizer.json`, in hexadecimal.
    pub(crate) tokenizer: String,
    pub(crate) vocab_size: u32,
    pub(crate) end_of_document: u32,
    /// Tokens at the start of each document, usually none or one.
    #[serde(default)]
    pub(crate) begin_of_document: Vec<u32>,
    pub(crate) tokens: u64,
    pub(crate) documents: u64,
    pub(crate) text_bytes: u64,
    /// Rows of the input that could not be read and were skipped.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) skipped_rows: u64,
    /// How rows of conversations became documents; in version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) chat: Option<ChatRecord>,
    /// Hash of tokenizer, input files (names, sizes, times) and options. Equal hashes mean equal datasets.
    pub(crate) made_from: String,
    pub(crate) shards: Vec<ShardEntry>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A shard in the index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardEntry {
    pub(crate) file: String,
    pub(crate) tokens: u64,
    pub(crate) documents: u64,
    pub(crate) text_bytes: u64,
    /// Checksum of the shard's header, in hexadecimal. It covers the whole content.
    pub(crate) checksum: String,
}

impl ShardEntry {
    /// The entry of an open shard.
    pub(crate) fn from_shard(file: String, shard: &Shard) -> ShardEntry {
        let header = shard.header();
        ShardEntry {
            file,
            tokens: header.token_count,
            documents: header.document_count,
            text_bytes: header.text_bytes,
            checksum: format!("{:016x}", header.checksum()),
        }
    }
}

/// An open dataset: the tokens of its shards as one sequence.
#[derive(Debug)]
pub struct Dataset {
    folder: PathBuf,
    name: String,
    index: DatasetIndex,
    shards: Vec<Shard>,
    /// Position of each shard's first token in the sequence.
    starts: Vec<u64>,
    fingerprint: u64,
}

impl Dataset {
    /// Opens a folder and checks index, headers and sizes. The content is checked block by block when it is
    /// first read; [`Dataset::verify`] checks all of it.
    ///
    /// # Errors
    /// A folder without a dataset or with an unfinished one; a shard that is missing, damaged or not the one
    /// in the index.
    pub fn open(folder: impl AsRef<Path>) -> Result<Dataset> {
        let folder = folder.as_ref();
        let index_path = folder.join(INDEX_FILE);
        if !index_path.exists() {
            return Err(DataError::corrupt(
                folder,
                format!("it has no {INDEX_FILE}, so it is not a dataset or not a finished one"),
                "name the folder that `tokenize` wrote, or run the same `tokenize` again to finish it",
            ));
        }
        let index: DatasetIndex = files::read_json(&index_path, ADVICE)?;
        let corrupt = |problem: String| DataError::corrupt(&index_path, problem, ADVICE);
        let version = index.version;
        if ![SHARD_VERSION, MASKED_SHARD_VERSION].contains(&version) {
            return Err(corrupt(format!(
                "its version is {version}, but this program reads the versions {SHARD_VERSION} and {MASKED_SHARD_VERSION}"
            )));
        }
        let mut shards = Vec::with_capacity(index.shards.len());
        let mut starts = Vec::with_capacity(index.shards.len());
        let (mut tokens, mut documents, mut text_bytes) = (0_u64, 0_u64, 0_u64);
        let mut checksums = Vec::new();
        for entry in &index.shards {
            // The index may only name files in its own folder.
            if Path::new(&entry.file).components().count() != 1 || entry.file.starts_with("..") {
                return Err(corrupt(format!("it names a shard {:?} outside its folder", entry.file)));
            }
            let path = folder.join(&entry.file);
            let shard = Shard::open(&path)?;
            let header = shard.header();
            let same = ShardEntry::from_shard(entry.file.clone(), &shard) == *entry
                && files::hex(&header.tokenizer_hash) == index.tokenizer
                && header.version() == version
                && header.vocab_size == index.vocab_size
                && header.end_of_document == index.end_of_document;
            if !same {
                return Err(DataError::corrupt(
                    &path,
                    format!("it is not the shard that {INDEX_FILE} describes"),
                    ADVICE,
                ));
            }
            checksums.extend(header.checksum().to_le_bytes());
            starts.push(tokens);
            tokens += header.token_count;
            documents += header.document_count;
            text_bytes += header.text_bytes;
            shards.push(shard);
        }
        let counted = (tokens, documents, text_bytes);
        if counted != (index.tokens, index.documents, index.text_bytes) || tokens == 0 {
            return Err(corrupt(format!(
                "it counts {} tokens of {} bytes of text in {} documents, but its shards {tokens} of {text_bytes} in {documents}",
                index.tokens, index.text_bytes, index.documents
            )));
        }
        Ok(Dataset {
            folder: folder.to_path_buf(),
            name: folder.display().to_string(),
            index,
            shards,
            starts,
            fingerprint: xxhash_rust::xxh3::xxh3_64(&checksums),
        })
    }

    /// Sets the name for messages; a dataset in a cache is named for its text.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Dataset {
        self.name = name.into();
        self
    }

    /// Reads all shards and compares all checksums, and the first document's begin tokens with the index.
    ///
    /// # Errors
    /// The first damaged shard and byte range; begin tokens that differ from the index.
    pub fn verify(&self) -> Result<()> {
        self.verify_with_progress(&mut |_, _| ControlFlow::Continue(()))
    }

    /// As [`Dataset::verify`]. `on_progress` gets the number of blocks of 4 MiB that are verified and the
    /// total before each block; [`ControlFlow::Break`] stops the work.
    ///
    /// # Errors
    /// Those of [`Dataset::verify`]; [`DataError::Interrupted`].
    pub fn verify_with_progress(
        &self,
        on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<()> {
        let total: usize = self.shards.iter().map(Shard::block_count).sum();
        let blocks = self.shards.iter().flat_map(|shard| (0..shard.block_count()).map(move |n| (shard, n)));
        for (done, (shard, block)) in blocks.enumerate() {
            if on_progress(done as u64, total as u64).is_break() {
                return Err(DataError::Interrupted);
            }
            shard.verify_block(block)?;
        }
        let expected = self.begin_of_document();
        let mut begin = vec![0; expected.len()];
        let is_whole = expected.len() as u64 <= self.index.tokens;
        if is_whole {
            self.read(0, &mut begin)?;
        }
        if !is_whole || begin.iter().zip(expected).any(|(&token, &expected)| token as u32 != expected) {
            return Err(DataError::corrupt(
                &self.folder.join(INDEX_FILE),
                format!("it says that documents begin with {expected:?}, but the first one does not"),
                ADVICE,
            ));
        }
        Ok(())
    }

    /// Loads the tokenizer in the folder.
    ///
    /// # Errors
    /// A tokenizer that cannot be loaded or is not that of the shards.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::load(&self.folder)?;
        if files::hex(&tokenizer.hash()) != self.index.tokenizer {
            return Err(DataError::corrupt(
                &self.folder,
                "its tokenizer.json is not the tokenizer of its shards",
                ADVICE,
            ));
        }
        let tokenizer = tokenizer.with_end_of_document_id(self.index.end_of_document)?;
        Ok(tokenizer.with_document_begin(self.index.begin_of_document.clone()))
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// SHA-256 of the tokenizer, in hexadecimal.
    pub fn tokenizer_hash(&self) -> &str {
        &self.index.tokenizer
    }

    /// Number of documents.
    pub fn document_count(&self) -> u64 {
        self.index.documents
    }

    /// Number of rows of the input that were skipped, because they could not be read.
    pub fn skipped_rows(&self) -> u64 {
        self.index.skipped_rows
    }

    /// How rows of conversations became documents, if they are that.
    pub fn chat(&self) -> Option<&ChatRecord> {
        self.index.chat.as_ref()
    }

    /// The token that ends each document.
    pub fn end_of_document(&self) -> u32 {
        self.index.end_of_document
    }

    /// The tokens at the start of each document, usually none or one.
    pub fn begin_of_document(&self) -> &[u32] {
        &self.index.begin_of_document
    }

    /// Hash of the input, tokenizer and options; see [`mod@crate::prepare`].
    pub(crate) fn inputs(&self) -> &str {
        &self.index.made_from
    }

    /// Reads `out.len()` values at position `start`, shard by shard.
    fn read_by_shard<T>(
        &self,
        start: u64,
        out: &mut [T],
        read: impl Fn(&Shard, u64, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        if start.checked_add(out.len() as u64).is_none_or(|end| end > self.index.tokens) {
            return Err(past_the_end(self, start, out.len()));
        }
        let (mut at, mut out) = (start, out);
        while !out.is_empty() {
            let number = self.shard_at(at);
            let shard = &self.shards[number];
            let inside = at - self.starts[number];
            let in_shard = (shard.header().token_count - inside).min(out.len() as u64);
            let (now, later) = out.split_at_mut(in_shard as usize);
            read(shard, inside, now)?;
            at += in_shard;
            out = later;
        }
        Ok(())
    }

    /// Index of the shard that holds position `at`.
    fn shard_at(&self, at: u64) -> usize {
        self.starts.partition_point(|&start| start <= at).saturating_sub(1)
    }
}

impl TokenStream for Dataset {
    fn name(&self) -> &str {
        &self.name
    }

    fn token_count(&self) -> u64 {
        self.index.tokens
    }

    fn text_bytes(&self) -> Option<u64> {
        (!self.has_untrained()).then_some(self.index.text_bytes)
    }

    fn vocab_size(&self) -> usize {
        self.index.vocab_size as usize
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn read(&self, start: u64, out: &mut [i32]) -> Result<()> {
        self.read_by_shard(start, out, Shard::read)
    }

    fn trained(&self, start: u64, out: &mut [bool]) -> Result<()> {
        self.read_by_shard(start, out, Shard::trained)
    }

    fn has_untrained(&self) -> bool {
        self.shards.iter().any(|shard| shard.header().trained_count.is_some())
    }

    fn chat(&self) -> Option<&ChatRecord> {
        Dataset::chat(self)
    }

    fn questions(&self) -> Result<Option<Vec<u64>>> {
        if !self.shards.iter().all(|shard| shard.header().has_questions) {
            return Ok(None);
        }
        let mut hashes = Vec::with_capacity(self.index.documents as usize);
        for shard in &self.shards {
            hashes.extend(shard.questions()?);
        }
        Ok(Some(hashes))
    }

    fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        // A document that ends with a shard ends at the first position of the next one, so start one position
        // earlier.
        let first = self.shard_at(range.start.saturating_sub(1));
        for (shard, &base) in self.shards[first..].iter().zip(&self.starts[first..]) {
            if base >= range.end {
                break;
            }
            let before = out.len();
            shard.document_ends(range.start.saturating_sub(base)..range.end - base, out)?;
            out[before..].iter_mut().for_each(|end| *end += base);
        }
        Ok(())
    }
}
