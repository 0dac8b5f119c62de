//! A batch of packed sequences.

use super::bins::{Packing, TokenCounts};
use super::documents::Document;
use super::split::WindowContent;
use crate::error::{DataError, Result};
use crate::stream::TokenStream;

/// Target of a position without a target.
pub const IGNORED_TARGET: i32 = -100;

/// B sequences of S tokens, flattened in rows: element `b * S + t` is position t of sequence b.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// B.
    pub batch_size: usize,
    /// S.
    pub seq_len: usize,
    /// `[B*S]` input tokens.
    pub tokens: Vec<i32>,
    /// `[B*S]` the next token of each input, or [`IGNORED_TARGET`].
    pub targets: Vec<i32>,
    /// `[B*S]` positions for RoPE, from 0 in each sequence and, with a document mask, in each document.
    pub positions: Vec<i32>,
    /// `[B*S]` start of each token's document within its sequence; 0 without a document mask. The token at t
    /// attends to `doc_start[t]..=t`. The first document of a sequence starts at 0, because its earlier part
    /// is not visible. After whole documents, each position of the padding starts at itself.
    pub doc_start: Vec<i32>,
    /// Number of targets that are not ignored.
    pub valid_targets: usize,
    /// Number of positions of each sequence with an input token; those after them are padding.
    pub row_inputs: Vec<usize>,
}

/// Restriction of attention and positions to documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DocumentMask {
    /// None: a sequence is one context.
    #[default]
    Off,
    /// Tokens attend only to their own document.
    On,
}

impl DocumentMask {
    /// Refuses several whole documents in one window without a mask: they would attend to each other.
    pub(super) fn check(self, packing: Packing, stream: &dyn TokenStream) -> Result<()> {
        if matches!(packing, Packing::Whole(_)) && self == DocumentMask::Off {
            return Err(DataError::invalid(
                format!("{}: whole documents are packed into windows without a document mask", stream.name()),
                "set data.document_mask = true",
            ));
        }
        Ok(())
    }
}

impl From<bool> for DocumentMask {
    /// `data.document_mask` of a run file.
    fn from(is_on: bool) -> DocumentMask {
        if is_on { DocumentMask::On } else { DocumentMask::Off }
    }
}

impl Batch {
    pub(super) fn with_capacity(batch_size: usize, seq_len: usize) -> Batch {
        let column = || Vec::with_capacity(batch_size * seq_len);
        Batch {
            batch_size: 0,
            seq_len,
            tokens: column(),
            targets: column(),
            positions: column(),
            doc_start: column(),
            valid_targets: 0,
            row_inputs: Vec::with_capacity(batch_size),
        }
    }

    /// The numbers of its inputs and trained targets.
    pub fn counts(&self) -> TokenCounts {
        let inputs = self.row_inputs.iter().sum::<usize>();
        TokenCounts { inputs: inputs as u64, trained: self.valid_targets as u64 }
    }

    /// Appends a window of `stream`, padded to S with token 0 and ignored targets.
    pub(super) fn push(
        &mut self,
        stream: &dyn TokenStream,
        window: WindowContent<'_>,
        mask: DocumentMask,
    ) -> Result<()> {
        match window {
            WindowContent::Range { start, targets } => self.push_range(stream, start, targets, mask),
            WindowContent::Documents(documents) => self.push_documents(stream, documents),
        }
    }

    fn push_range(
        &mut self,
        stream: &dyn TokenStream,
        start: u64,
        targets: usize,
        mask: DocumentMask,
    ) -> Result<()> {
        let mut window = vec![0; targets + 1];
        stream.read(start, &mut window)?;
        let padding = self.seq_len - targets;
        self.tokens.extend_from_slice(&window[..targets]);
        self.tokens.extend(std::iter::repeat_n(0, padding));
        self.targets.extend_from_slice(&window[1..]);
        self.targets.extend(std::iter::repeat_n(IGNORED_TARGET, padding));
        self.valid_targets += targets;
        self.row_inputs.push(targets);
        let mut document_starts = Vec::new();
        if mask == DocumentMask::On {
            stream.document_ends(start + 1..start + targets as u64, &mut document_starts)?;
        }
        let mut next = document_starts.iter().map(|&position| (position - start) as i32).peekable();
        let mut begin = 0;
        for t in 0..self.seq_len as i32 {
            if let Some(at) = next.next_if(|&at| at == t) {
                begin = at;
            }
            self.positions.push(t - begin);
            self.doc_start.push(begin);
        }
        self.batch_size += 1;
        Ok(())
    }

    /// Appends a sequence of whole documents. Each position of the padding after them is a document of its
    /// own, so that attention spends nothing on it.
    fn push_documents(&mut self, stream: &dyn TokenStream, documents: &[Document]) -> Result<()> {
        let row = self.tokens.len();
        let (mut tokens, mut trained) = (Vec::new(), Vec::new());
        for document in documents {
            tokens.resize(document.tokens as usize, 0);
            trained.resize(document.tokens as usize, false);
            stream.read(document.start, &mut tokens)?;
            stream.trained(document.start, &mut trained)?;
            let begin = (self.tokens.len() - row) as i32;
            self.tokens.extend_from_slice(&tokens[..document.inputs()]);
            let targets = tokens[1..].iter().zip(&trained[1..]);
            self.targets.extend(targets.map(|(&token, &bit)| if bit { token } else { IGNORED_TARGET }));
            self.valid_targets += trained[1..].iter().filter(|&&bit| bit).count();
            self.positions.extend(0..document.inputs() as i32);
            self.doc_start.extend(std::iter::repeat_n(begin, document.inputs()));
        }
        let inputs = self.tokens.len() - row;
        self.row_inputs.push(inputs);
        self.push_positions_without_input(inputs);
        self.batch_size += 1;
        Ok(())
    }

    /// Fills the current sequence from position `from` on with padding.
    fn push_positions_without_input(&mut self, from: usize) {
        let padding = self.seq_len - from;
        self.tokens.extend(std::iter::repeat_n(0, padding));
        self.targets.extend(std::iter::repeat_n(IGNORED_TARGET, padding));
        self.positions.extend(std::iter::repeat_n(0, padding));
        self.doc_start.extend(from as i32..self.seq_len as i32);
    }

    /// Appends a sequence without targets.
    pub(super) fn push_padding(&mut self) {
        self.tokens.extend(std::iter::repeat_n(0, self.seq_len));
        self.targets.extend(std::iter::repeat_n(IGNORED_TARGET, self.seq_len));
        self.positions.extend(0..self.seq_len as i32);
        self.doc_start.extend(std::iter::repeat_n(0, self.seq_len));
        self.row_inputs.push(0);
        self.batch_size += 1;
    }
}
