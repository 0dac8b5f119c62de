//! The writer of a shard: streams tokens to a temporary file, writes the header last, then syncs and renames
//! the file.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xtrain_checkpoint::Temporary;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::header::{CHUNK_BYTES, HEADER_BYTES, ShardHeader, TokenWidth};
use crate::error::{DataError, Result};
use crate::stream::outside_vocabulary;
use crate::tokenizer::Tokenizer;

/// A shard that is being written. Dropping it before [`ShardWriter::finish`] removes the file.
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    temporary: Temporary,
    file: BufWriter<File>,
    header: ShardHeader,
    /// One bit for each token, if the shard has them: true for trained tokens.
    trained: Option<BitVec>,
    /// Position after each document's last token.
    ends: Vec<u64>,
    /// The hash of each document's question, if documents have one.
    questions: Vec<u64>,
    sums: ChunkSums,
}

impl ShardWriter {
    /// Creates the temporary file of the shard `path`, whose tokens are all trained.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path, tokenizer: &Tokenizer) -> Result<ShardWriter> {
        ShardWriter::create_with(path, tokenizer, None)
    }

    /// Creates the temporary file of the shard `path`, with a bit for each token that says whether it is
    /// trained.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create_masked(path: &Path, tokenizer: &Tokenizer) -> Result<ShardWriter> {
        ShardWriter::create_with(path, tokenizer, Some(BitVec::default()))
    }

    fn create_with(path: &Path, tokenizer: &Tokenizer, trained: Option<BitVec>) -> Result<ShardWriter> {
        let temporary = Temporary::file(path)?;
        let file = temporary.handle().try_clone().map_err(DataError::io(path, "create the shard"))?;
        let header = ShardHeader {
            width: TokenWidth::for_vocab(tokenizer.vocab_size()),
            tokenizer_hash: tokenizer.hash(),
            vocab_size: tokenizer.vocab_size() as u32,
            end_of_document: tokenizer.end_of_document(),
            largest_token: 0,
            token_count: 0,
            document_count: 0,
            text_bytes: 0,
            trained_count: trained.as_ref().map(|_| 0),
            has_questions: false,
            table_checksum: 0,
        };
        let mut writer = ShardWriter {
            path: path.to_path_buf(),
            temporary,
            file: BufWriter::with_capacity(1 << 20, file),
            header,
            trained,
            ends: Vec::new(),
            questions: Vec::new(),
            sums: ChunkSums::default(),
        };
        writer.write_raw(&[0; HEADER_BYTES])?;
        Ok(writer)
    }

    /// Appends tokens of the current document, which encode `text_bytes` bytes of text. All are trained.
    ///
    /// # Errors
    /// A token outside the vocabulary; a full disk.
    pub fn push(&mut self, tokens: &[u32], text_bytes: u64) -> Result<()> {
        self.push_tokens(tokens, text_bytes)?;
        if let Some(bits) = &mut self.trained {
            tokens.iter().for_each(|_| bits.push(true));
        }
        Ok(())
    }

    /// Appends a whole document without an end-of-document token: `trained` says which of its tokens are
    /// trained. The first one is no target, so its bit has another meaning: it is set if the document belongs
    /// to the conversation of the document before. `question` is a hash of the first message of a user in the
    /// conversation; all documents of a shard have one, or none has.
    ///
    /// # Errors
    /// A token outside the vocabulary; a full disk; a shard whose tokens are all trained; other lengths.
    pub fn push_document(
        &mut self,
        tokens: &[u32],
        trained: &[bool],
        question: Option<u64>,
        text_bytes: u64,
    ) -> Result<()> {
        self.questions.extend(question);
        if self.questions.len() as u64 != question.map_or(0, |_| self.header.document_count + 1) {
            return Err(DataError::Internal("some documents of a shard have no question".to_owned()));
        }
        if self.trained.is_none() || tokens.len() != trained.len() {
            let (tokens, bits, has) = (tokens.len(), trained.len(), self.trained.is_some());
            return Err(DataError::Internal(format!(
                "a document of {tokens} tokens with {bits} bits; the shard has bits: {has}"
            )));
        }
        self.push_tokens(tokens, text_bytes)?;
        if let Some(bits) = &mut self.trained {
            trained.iter().for_each(|&bit| bits.push(bit));
        }
        self.record_end();
        Ok(())
    }

    fn push_tokens(&mut self, tokens: &[u32], text_bytes: u64) -> Result<()> {
        let Some(&largest) = tokens.iter().max() else { return Ok(()) };
        if largest >= self.header.vocab_size {
            let at = self.header.token_count;
            let name = self.path.display().to_string();
            return Err(outside_vocabulary(&name, largest, at, self.header.vocab_size as usize));
        }
        let bytes: Vec<u8> = match self.header.width {
            TokenWidth::U16 => tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect(),
            TokenWidth::U32 => tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
        };
        self.write_data(&bytes)?;
        self.header.largest_token = self.header.largest_token.max(largest);
        self.header.token_count += tokens.len() as u64;
        self.header.text_bytes += text_bytes;
        Ok(())
    }

    /// Ends the current document: writes the end-of-document token and records the position.
    ///
    /// # Errors
    /// A full disk.
    pub fn end_document(&mut self) -> Result<()> {
        self.push(&[self.header.end_of_document], 0)?;
        self.record_end();
        Ok(())
    }

    fn record_end(&mut self) {
        self.header.document_count += 1;
        self.ends.push(self.header.token_count);
    }

    /// Number of tokens so far.
    pub fn token_count(&self) -> u64 {
        self.header.token_count
    }

    /// Number of documents ended so far.
    pub fn document_count(&self) -> u64 {
        self.header.document_count
    }

    /// Completes the shard, syncs it and renames it to its final name.
    ///
    /// # Errors
    /// A full disk; no file has the final name then.
    pub fn finish(mut self) -> Result<ShardHeader> {
        let tokens_bytes = self.header.token_count as usize * self.header.width.bytes();
        self.write_data(&[0; 8][..tokens_bytes.next_multiple_of(8) - tokens_bytes])?;
        if let Some(bits) = self.trained.take() {
            self.header.trained_count = Some(bits.ones);
            self.write_data(&bits.bytes)?;
            self.write_data(&[0; 8][..bits.bytes.len().next_multiple_of(8) - bits.bytes.len()])?;
        }
        let ends: Vec<u8> = std::mem::take(&mut self.ends).into_iter().flat_map(u64::to_le_bytes).collect();
        self.write_data(&ends)?;
        self.header.has_questions = !self.questions.is_empty();
        let questions: Vec<u8> = self.questions.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        self.write_data(&questions)?;
        let table: Vec<u8> =
            std::mem::take(&mut self.sums).finish().into_iter().flat_map(u64::to_le_bytes).collect();
        self.header.table_checksum = xxh3_64(&table);
        self.write_raw(&table)?;
        let header = self.header.to_bytes();
        self.file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.write_all(&header))
            .and_then(|()| self.file.flush())
            .map_err(DataError::io(&self.path, "write the shard"))?;
        self.temporary.publish(&self.path)?;
        Ok(self.header)
    }

    fn write_data(&mut self, bytes: &[u8]) -> Result<()> {
        self.sums.update(bytes);
        self.write_raw(bytes)
    }

    fn write_raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(DataError::io(&self.path, "write the shard"))
    }
}

/// Bits in bytes, the lowest bit of a byte first.
#[derive(Debug, Default)]
struct BitVec {
    bytes: Vec<u8>,
    count: u64,
    ones: u64,
}

impl BitVec {
    fn push(&mut self, bit: bool) {
        if self.count.is_multiple_of(8) {
            self.bytes.push(0);
        }
        if let Some(last) = self.bytes.last_mut() {
            *last |= u8::from(bit) << (self.count % 8);
        }
        self.count += 1;
        self.ones += u64::from(bit);
    }
}

/// xxh3 of every [`CHUNK_BYTES`] of a stream.
#[derive(Default)]
struct ChunkSums {
    current: Xxh3,
    filled: u64,
    done: Vec<u64>,
}

impl ChunkSums {
    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (CHUNK_BYTES - self.filled) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.current.update(now);
            self.filled += now.len() as u64;
            bytes = later;
            if self.filled == CHUNK_BYTES {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        self.done.push(self.current.digest());
        self.current.reset();
        self.filled = 0;
    }

    fn finish(mut self) -> Vec<u64> {
        if self.filled > 0 {
            self.close();
        }
        self.done
    }
}

impl std::fmt::Debug for ChunkSums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChunkSums").field("filled", &self.filled).field("done", &self.done.len()).finish()
    }
}
