//! One batch of packed sequences.

use crate::error::Result;
use crate::stream::TokenStream;

/// The label of a position that has no target.
pub const IGNORED_TARGET: i32 = -100;

/// B sequences of S tokens, flattened row by row: element `b * S + t` is position t of sequence b.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// B.
    pub batch_size: usize,
    /// S.
    pub seq_len: usize,
    /// `[B*S]` inputs.
    pub tokens: Vec<i32>,
    /// `[B*S]` the token after each input, or [`IGNORED_TARGET`].
    pub targets: Vec<i32>,
    /// `[B*S]` for RoPE: counts from 0 in each sequence and, with a document mask, in each document.
    pub positions: Vec<i32>,
    /// `[B*S]` where, within its sequence, the document of each token begins; 0 without a document mask. Attention
    /// at t may look at `doc_start[t]..=t`. The first document of a sequence begins at 0, as no earlier part of it
    /// can be seen.
    pub doc_start: Vec<i32>,
    /// Targets that are not ignored.
    pub valid_targets: usize,
}

/// Whether attention and positions stay inside documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DocumentMask {
    /// A sequence is one context, whatever documents it holds.
    #[default]
    Off,
    /// A document sees nothing of the one before it.
    On,
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
        }
    }

    /// Appends the sequence whose first token is at `start` and which has `targets` targets; what is missing to S
    /// is filled with token 0 and ignored.
    pub(super) fn push(
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

    /// Appends a sequence without any target.
    pub(super) fn push_padding(&mut self) {
        self.tokens.extend(std::iter::repeat_n(0, self.seq_len));
        self.targets.extend(std::iter::repeat_n(IGNORED_TARGET, self.seq_len));
        self.positions.extend(0..self.seq_len as i32);
        self.doc_start.extend(std::iter::repeat_n(0, self.seq_len));
        self.batch_size += 1;
    }
}
