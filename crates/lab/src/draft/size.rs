//! Sizes of first models, and lengths of first runs.

use super::found::Found;

/// A model and its batches.
#[derive(Debug)]
pub(super) struct Size {
    pub(super) dim: u64,
    pub(super) layers: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) seq_len: u64,
    pub(super) batch_size: u64,
    pub(super) lr: f64,
}

/// The sizes, smallest first. Learning rates fall and batches grow with the model, as in published runs.
pub(super) const SIZES: [Size; 8] = [
    size([128, 4, 4, 2], [128, 16], 3e-3),
    size([192, 4, 6, 2], [256, 16], 2e-3),
    size([256, 6, 4, 2], [256, 16], 2e-3),
    size([384, 8, 6, 2], [512, 16], 1.5e-3),
    size([512, 8, 8, 4], [512, 32], 1e-3),
    size([768, 12, 12, 4], [1024, 64], 6e-4),
    size([1024, 24, 16, 8], [1024, 128], 4e-4),
    size([2048, 20, 16, 8], [2048, 256], 3e-4),
];

const fn size([dim, layers, heads, kv_heads]: [u64; 4], [seq_len, batch_size]: [u64; 2], lr: f64) -> Size {
    Size { dim, layers, heads, kv_heads, seq_len, batch_size, lr }
}

/// Training tokens per parameter ("Training Compute-Optimal Large Language Models", arXiv 2203.15556).
const TOKENS_A_PARAMETER: u64 = 20;

/// Maximum number of passes over a short text; further ones teach little ("Scaling Data-Constrained Language
/// Models", arXiv 2305.16264).
const PASSES: u64 = 10;

/// Training tokens of the shortest run.
const LEAST_TOKENS: u64 = 200_000;

/// Training tokens if the size of the data is unknown.
const UNKNOWN: u64 = 10_000_000;

impl Size {
    /// Approximate number of parameters in the blocks, without the embedding.
    pub(super) fn block_parameters(&self) -> u64 {
        12 * self.layers * self.dim * self.dim
    }

    /// Sequence length; less than usual for a very short text.
    pub(super) fn seq_len(&self, found: &Found) -> u64 {
        shortened(self.seq_len, found)
    }
}

/// `seq_len`, or for a short text the largest power of two of which it has several sequences.
pub(super) fn shortened(seq_len: u64, found: &Found) -> u64 {
    let most = found.tokens.map_or(seq_len, |tokens| (tokens / 8).max(8));
    if most >= seq_len { seq_len } else { 1 << most.ilog2() }
}

/// Passes of a model over conversations.
pub(super) const CHAT_PASSES: u64 = 2;

/// Training tokens, rounded to two digits: as many as suit this number of parameters, limited by the text. A
/// model that is trained further sees its text once, and conversations twice.
pub(super) fn run_tokens(found: &Found, parameters: Option<u64>) -> u64 {
    let wanted = parameters.map_or(UNKNOWN, |parameters| TOKENS_A_PARAMETER * parameters);
    let tokens = match (&found.model, found.tokens) {
        (Some(_), Some(tokens)) if found.chat.is_some() => CHAT_PASSES * tokens,
        (Some(_), tokens) => tokens.unwrap_or(UNKNOWN),
        (None, Some(tokens)) => wanted.min(PASSES * tokens).max(LEAST_TOKENS),
        (None, None) => wanted,
    };
    rounded(tokens.max(1))
}

/// A share of a run's tokens, rounded, but not below the shortest run.
pub(super) fn shorter(run_tokens: u64, share: f64) -> u64 {
    rounded(((run_tokens as f64 * share) as u64).max(LEAST_TOKENS.min(run_tokens)))
}

/// The smallest of 1, 2, 5, 10, 20, ... that is at least `number`.
pub(super) fn interval(number: u64) -> u64 {
    let unit = 10_u64.pow(number.max(1).ilog10());
    [1, 2, 5].map(|digit| digit * unit).into_iter().find(|next| *next >= number).unwrap_or(10 * unit)
}

/// `number` rounded down to two significant digits.
fn rounded(number: u64) -> u64 {
    let unit = 10_u64.pow(number.max(1).ilog10().saturating_sub(1));
    number / unit * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_intervals_are_round() {
        for (number, round) in [(1, 1), (17, 17), (999, 990), (123_456, 120_000)] {
            assert_eq!(rounded(number), round);
        }
        for (number, next) in [(0, 1), (1, 1), (3, 5), (9, 10), (10, 10), (11, 20), (1269, 2000)] {
            assert_eq!(interval(number), next);
        }
        assert_eq!(shorter(26_000_000, 0.5), 13_000_000);
        assert_eq!(shorter(100_000, 0.5), 100_000);
    }

    #[test]
    fn sizes_grow() {
        for pair in SIZES.windows(2) {
            assert!(pair[0].block_parameters() < pair[1].block_parameters() && pair[0].lr >= pair[1].lr);
            assert!(
                pair[1].heads.is_multiple_of(pair[1].kv_heads) && pair[1].dim.is_multiple_of(pair[1].heads)
            );
        }
    }
}
