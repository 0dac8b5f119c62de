//! The header of a shard, its first 256 bytes, and the byte ranges of the parts after it.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"XTRSHARD";
/// Version of a shard whose tokens are all trained.
pub const SHARD_VERSION: u32 = 1;
/// Version of a shard with one bit for each token that says whether it is trained.
pub const MASKED_SHARD_VERSION: u32 = 2;
/// The flag of a shard with a bit for each token.
const HAS_TRAINED_BITS: u64 = 1;
/// The flag of a shard with the hash of a question for each document.
const HAS_QUESTIONS: u64 = 2;
/// Size of a header; the tokens follow it.
pub(super) const HEADER_BYTES: usize = 256;
/// Bytes that one checksum covers.
pub(super) const CHUNK_BYTES: u64 = 4 << 20;

/// Number of bytes per stored token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes: vocabularies of at most 65,536.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// The smallest width for a vocabulary.
    pub fn for_vocab(vocab_size: usize) -> TokenWidth {
        if vocab_size <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 }
    }

    /// Bytes per token.
    pub fn bytes(self) -> usize {
        match self {
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }
}

/// Header of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardHeader {
    /// Width of a token.
    pub width: TokenWidth,
    /// [`Tokenizer::hash`](crate::Tokenizer::hash) of the tokenizer.
    pub tokenizer_hash: [u8; 32],
    /// Exclusive upper bound of token ids.
    pub vocab_size: u32,
    /// The token that ends each document.
    pub end_of_document: u32,
    /// The largest token in the shard.
    pub largest_token: u32,
    /// Tokens in the shard, including end-of-document tokens.
    pub token_count: u64,
    /// Documents that end in the shard.
    pub document_count: u64,
    /// Bytes of text that the tokens encode.
    pub text_bytes: u64,
    /// Number of trained tokens, if the shard has a bit for each token; `None` if all are trained.
    pub trained_count: Option<u64>,
    /// True if the shard has, for each document, the hash of the first message of a user. Only shards with
    /// bits have; those of earlier versions do not.
    pub has_questions: bool,
    /// Checksum of the table of checksums, which makes the header's checksum cover the whole content.
    pub(super) table_checksum: u64,
}

impl ShardHeader {
    /// The header's bytes, which end with its own checksum.
    pub(super) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(MAGIC);
        put(&self.version().to_le_bytes());
        put(&(self.width.bytes() as u32).to_le_bytes());
        put(&self.tokenizer_hash);
        for field in [self.vocab_size, self.end_of_document, self.largest_token, 0] {
            put(&field.to_le_bytes());
        }
        let [tokens, documents, text] = [self.token_count, self.document_count, self.text_bytes];
        for field in [tokens, documents, text, CHUNK_BYTES, self.table_checksum] {
            put(&field.to_le_bytes());
        }
        if let Some(trained) = self.trained_count {
            let questions = if self.has_questions { HAS_QUESTIONS } else { 0 };
            put(&(HAS_TRAINED_BITS | questions).to_le_bytes());
            put(&trained.to_le_bytes());
        }
        let sum = xxh3_64(&bytes[..HEADER_BYTES - 8]);
        bytes[HEADER_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Parses a header. The error is the problem, without the path.
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<ShardHeader, String> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if &bytes[..8] != MAGIC {
            return Err("it does not start with the magic bytes of a token shard".to_owned());
        }
        let version = u32_at(8);
        if version != SHARD_VERSION && version != MASKED_SHARD_VERSION {
            return Err(format!(
                "its version is {version}, but this program reads versions {SHARD_VERSION} and \
                 {MASKED_SHARD_VERSION}"
            ));
        }
        if xxh3_64(&bytes[..HEADER_BYTES - 8]) != u64_at(HEADER_BYTES - 8) {
            return Err("the checksum of its header (bytes 0 to 255) is wrong".to_owned());
        }
        let width = match u32_at(12) {
            2 => TokenWidth::U16,
            4 => TokenWidth::U32,
            other => return Err(format!("it has tokens of {other} bytes")),
        };
        if u64_at(88) != CHUNK_BYTES {
            return Err(format!("it has checksums over {} bytes", u64_at(88)));
        }
        const BOTH: u64 = HAS_TRAINED_BITS | HAS_QUESTIONS;
        let (trained_count, has_questions) = match (version, u64_at(104)) {
            (SHARD_VERSION, _) => (None, false),
            (_, flags @ (HAS_TRAINED_BITS | BOTH)) => (Some(u64_at(112)), flags == BOTH),
            (_, other) => return Err(format!("it has flags {other}, which this program does not know")),
        };
        let mut tokenizer_hash = [0; 32];
        tokenizer_hash.copy_from_slice(&bytes[16..48]);
        let header = ShardHeader {
            width,
            tokenizer_hash,
            vocab_size: u32_at(48),
            end_of_document: u32_at(52),
            largest_token: u32_at(56),
            token_count: u64_at(64),
            document_count: u64_at(72),
            text_bytes: u64_at(80),
            trained_count,
            has_questions,
            table_checksum: u64_at(96),
        };
        if header.token_count > 0 && header.largest_token >= header.vocab_size {
            return Err(format!(
                "its largest token {} is outside its vocabulary of {}",
                header.largest_token, header.vocab_size
            ));
        }
        if header.trained_count > Some(header.token_count) {
            return Err("it counts more trained tokens than tokens".to_owned());
        }
        Ok(header)
    }

    /// Version of the format that holds this shard.
    pub(super) fn version(&self) -> u32 {
        if self.trained_count.is_some() { MASKED_SHARD_VERSION } else { SHARD_VERSION }
    }

    /// The header's own checksum, which covers the whole content through the table of checksums.
    pub(super) fn checksum(&self) -> u64 {
        xxh3_64(&self.to_bytes()[..HEADER_BYTES - 8])
    }

    /// Byte ranges of the parts of the file; `None` if the counts are impossible.
    pub(super) fn layout(&self) -> Option<FileLayout> {
        let start = HEADER_BYTES as u64;
        let tokens_end = self.token_count.checked_mul(self.width.bytes() as u64)?.checked_add(start)?;
        let bits_start = tokens_end.checked_next_multiple_of(8)?;
        let bits = if self.trained_count.is_some() { self.token_count.div_ceil(8) } else { 0 };
        let bits_end = bits_start.checked_add(bits)?;
        let ends_start = bits_end.checked_next_multiple_of(8)?;
        let ends_end = self.document_count.checked_mul(8)?.checked_add(ends_start)?;
        let questions = if self.has_questions { self.document_count.checked_mul(8)? } else { 0 };
        let data_end = ends_end.checked_add(questions)?;
        let chunk_count = (data_end - start).div_ceil(CHUNK_BYTES);
        let file_bytes = data_end.checked_add(chunk_count * 8)?;
        Some(FileLayout {
            tokens: start..tokens_end,
            trained: bits_start..bits_end,
            ends: ends_start..ends_end,
            questions: ends_end..data_end,
            data: start..data_end,
            table: data_end..file_bytes,
        })
    }
}

/// Byte ranges of a shard file.
#[derive(Debug, Clone)]
pub(super) struct FileLayout {
    /// The tokens.
    pub(super) tokens: Range<u64>,
    /// One bit for each token, the lowest bit of a byte first; empty if all tokens are trained.
    pub(super) trained: Range<u64>,
    /// Positions after each document's last token, counted from the shard's first token.
    pub(super) ends: Range<u64>,
    /// The hash of each document's question; empty if the shard has none.
    pub(super) questions: Range<u64>,
    /// Tokens, bits, padding, ends and questions, which the checksums cover.
    pub(super) data: Range<u64>,
    /// The checksums, up to the end of the file.
    pub(super) table: Range<u64>,
}
