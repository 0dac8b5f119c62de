//! An in-memory token stream, the reference for shards and datasets; files of text, and
//! datasets made from them.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

pub mod datasets;
pub mod files;

use std::ops::Range;
use xtrain_data::{Result, TokenStream};

/// Tokens in memory.
#[derive(Debug, Clone)]
pub struct MemoryTokens {
    name: String,
    tokens: Vec<i32>,
    /// Empty if all tokens are trained.
    trained: Vec<bool>,
    ends: Vec<u64>,
    questions: Option<Vec<u64>>,
    vocab_size: usize,
    text_bytes: Option<u64>,
    fingerprint: u64,
}

impl MemoryTokens {
    /// Packs documents: the tokens of each, then `end_of_document`.
    pub fn from_documents<D: AsRef<[u32]>>(
        name: impl Into<String>,
        documents: impl IntoIterator<Item = D>,
        end_of_document: u32,
        vocab_size: usize,
    ) -> MemoryTokens {
        let mut packed = MemoryTokens {
            name: name.into(),
            tokens: Vec::new(),
            trained: Vec::new(),
            ends: Vec::new(),
            questions: None,
            vocab_size,
            text_bytes: None,
            fingerprint: 0,
        };
        for document in documents {
            for &token in document.as_ref().iter().chain([&end_of_document]) {
                packed.tokens.push(token as i32);
            }
            packed.ends.push(packed.token_count());
        }
        let tokens_hash = xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(&packed.tokens));
        packed.fingerprint =
            xxhash_rust::xxh3::xxh3_64_with_seed(bytemuck::cast_slice(&packed.ends), tokens_hash);
        packed
    }

    /// Documents without end tokens, with a bit for each token.
    pub fn masked(name: &str, documents: &[(Vec<u32>, Vec<bool>)], vocab_size: usize) -> MemoryTokens {
        let mut packed = MemoryTokens::from_documents(name, Vec::<Vec<u32>>::new(), 0, vocab_size);
        for (tokens, trained) in documents {
            packed.tokens.extend(tokens.iter().map(|&token| token as i32));
            packed.trained.extend(trained);
            packed.ends.push(packed.token_count());
        }
        let bits: Vec<u8> = packed.trained.iter().map(|&bit| bit.into()).collect();
        packed.fingerprint =
            [bytemuck::cast_slice(&packed.tokens), &bits, bytemuck::cast_slice(&packed.ends)]
                .into_iter()
                .fold(0, |seed, bytes| xxhash_rust::xxh3::xxh3_64_with_seed(bytes, seed));
        packed
    }

    /// Sets the hash of each document's question.
    #[must_use]
    pub fn with_questions(self, questions: Vec<u64>) -> MemoryTokens {
        MemoryTokens { questions: Some(questions), ..self }
    }

    /// Sets the size of the text.
    #[must_use]
    pub fn with_text_bytes(self, text_bytes: u64) -> MemoryTokens {
        MemoryTokens { text_bytes: Some(text_bytes), ..self }
    }
}

impl TokenStream for MemoryTokens {
    fn name(&self) -> &str {
        &self.name
    }

    fn token_count(&self) -> u64 {
        self.tokens.len() as u64
    }

    fn text_bytes(&self) -> Option<u64> {
        self.text_bytes
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn questions(&self) -> Result<Option<Vec<u64>>> {
        Ok(self.questions.clone())
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn read(&self, start: u64, out: &mut [i32]) -> Result<()> {
        let range = usize::try_from(start).ok().and_then(|start| Some(start..start.checked_add(out.len())?));
        let tokens = range.and_then(|range| self.tokens.get(range));
        out.copy_from_slice(tokens.expect("a read within the stream"));
        Ok(())
    }

    fn trained(&self, start: u64, out: &mut [bool]) -> Result<()> {
        let start = start as usize;
        match self.trained.get(start..start + out.len()) {
            Some(trained) => out.copy_from_slice(trained),
            None => out.fill(true),
        }
        Ok(())
    }

    fn has_untrained(&self) -> bool {
        !self.trained.is_empty()
    }

    fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        let first = self.ends.partition_point(|&end| end < range.start);
        out.extend(self.ends[first..].iter().take_while(|&&end| end < range.end));
        Ok(())
    }
}
