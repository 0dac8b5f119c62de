//! Shapes of the programs that score sequences.

/// Most tokens whose logits exist at one time.
pub(crate) const CHUNK_TOKENS: usize = 1024;

/// Lengths of rows are multiples of this many tokens.
const LENGTH_MULTIPLE: usize = 16;

/// The lengths of a sequence to score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoredLength {
    /// Tokens that are read: all but the last one. At least 1.
    pub inputs: usize,
    /// Tokens that are scored: the last ones. At least 1, at most `inputs`.
    pub targets: usize,
}

/// The shape of a sequence in the program that scores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScoredShape {
    /// Tokens that are read, with padding.
    pub seq_len: usize,
    /// Rows of the head.
    pub rows: usize,
}

impl ScoredShape {
    /// The shortest that the sequence fits in, of four lengths in each octave. Few targets, up to an eighth
    /// of the row, have a head of as many rows.
    pub fn of(length: ScoredLength) -> ScoredShape {
        let step = (length.inputs.next_power_of_two() / 8).max(LENGTH_MULTIPLE);
        let seq_len = length.inputs.next_multiple_of(step);
        let few = seq_len / 8;
        ScoredShape { seq_len, rows: if length.targets <= few { few } else { seq_len } }
    }

    /// Sequences of a batch of about `tokens` tokens.
    pub fn sequences(self, tokens: usize) -> usize {
        (tokens / self.seq_len).max(1)
    }

    /// The rows of the head of so many sequences, in chunks.
    pub(crate) fn chunks(self, sequences: usize) -> Vec<usize> {
        let all = sequences * self.rows;
        (0..all).step_by(CHUNK_TOKENS).map(|first| CHUNK_TOKENS.min(all - first)).collect()
    }
}
