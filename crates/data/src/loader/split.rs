//! The split of a source into training and held-out ranges, and of ranges into windows.

use std::ops::Range;

use crate::error::{DataError, Result};

/// Ranges of token positions, ascending and disjoint.
type Ranges = Vec<Range<u64>>;

/// Maximum number of held-out blocks.
const MAX_BLOCKS: u64 = 16;
/// Minimum number of sequences between two blocks. Each block cuts off an incomplete sequence before it.
const SEQUENCES_A_BLOCK: u64 = 32;

/// Splits a source of `tokens` tokens into training and validation ranges. The held-out `fraction` is taken
/// from the ends of equal parts of the source, because its documents may be sorted. The split does not depend
/// on seed and weights, so held-out tokens stay held out if those change.
///
/// # Errors
/// A fraction that holds out nothing or everything.
pub(super) fn split(fraction: f64, tokens: u64, seq_len: usize, name: &str) -> Result<(Ranges, Ranges)> {
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(DataError::invalid(
            format!("a fraction of {fraction} cannot be held out"),
            "hold out a fraction between 0 and 1",
        ));
    }
    let held = (tokens as f64 * fraction).round() as u64;
    if held < 2 || held >= tokens {
        return Err(DataError::invalid(
            format!("{name} has {tokens} tokens, too few to hold out a fraction of {fraction}"),
            "use more text, a larger data.held_out, or data.held_out = 0",
        ));
    }
    let blocks = blocks(tokens, held, seq_len);
    let (mut train, mut valid) = (Ranges::new(), Ranges::new());
    // A count times a block index may exceed 64 bits.
    let part = |count: u64, block: u64| (u128::from(count) * u128::from(block) / u128::from(blocks)) as u64;
    for block in 0..blocks {
        let (start, end) = (part(tokens, block), part(tokens, block + 1));
        let cut = end - (part(held, block + 1) - part(held, block));
        train.push(start..cut);
        valid.push(cut..end);
    }
    Ok((train, valid))
}

/// Number of blocks for `held` held-out tokens. It is limited so that few training tokens are outside a full
/// sequence, and each block has at least one target.
fn blocks(tokens: u64, held: u64, seq_len: usize) -> u64 {
    MAX_BLOCKS.min(tokens / (SEQUENCES_A_BLOCK * seq_len as u64)).min(held / 2).max(1)
}

/// Treatment of the tokens after a range's last full window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remainder {
    /// They are not used.
    Drop,
    /// They form a shorter window.
    ShortWindow,
}

/// Windows over ranges of a token stream. Window w of a range that starts at p has the inputs `p + w S .. p +
/// (w+1) S` and the targets shifted by one, so each token of a range except the first is a target once.
#[derive(Debug, Clone)]
pub(super) struct Windows {
    ranges: Ranges,
    /// Index of each range's first window.
    first: Vec<u64>,
    count: u64,
    seq_len: u64,
}

impl Windows {
    pub(super) fn new(ranges: Ranges, seq_len: usize, last: Remainder) -> Windows {
        let seq_len = seq_len as u64;
        let mut count = 0;
        let mut first = Vec::with_capacity(ranges.len());
        for range in &ranges {
            first.push(count);
            let targets = (range.end - range.start).saturating_sub(1);
            count += match last {
                Remainder::Drop => targets / seq_len,
                Remainder::ShortWindow => targets.div_ceil(seq_len),
            };
        }
        Windows { ranges, first, count, seq_len }
    }

    /// Number of windows.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Number of tokens in the longest range.
    pub(super) fn longest(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).max().unwrap_or(0)
    }

    /// Position of the window's first token, and its number of targets.
    pub(super) fn locate(&self, window: u64) -> (u64, usize) {
        let number = self.first.partition_point(|&first| first <= window) - 1;
        let range = &self.ranges[number];
        let start = range.start + (window - self.first[number]) * self.seq_len;
        (start, self.seq_len.min(range.end - 1 - start) as usize)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_position_is_either_training_or_validation(
            tokens in 200_u64..50_000, fraction in 0.1_f64..0.9, seq_len in 1_usize..400,
        ) {
            let (train, valid) = split(fraction, tokens, seq_len, "test").unwrap();
            let held: u64 = valid.iter().map(|range| range.end - range.start).sum();
            prop_assert_eq!(held, (tokens as f64 * fraction).round() as u64);
            prop_assert_eq!(valid.len() as u64, blocks(tokens, held, seq_len));
            let mut all: Vec<u64> = train.into_iter().chain(valid).flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..tokens).collect::<Vec<_>>());
        }

        #[test]
        fn blocks_leave_few_tokens_unused(tokens in 1_000_u64..1_000_000, seq_len in 16_usize..10_000) {
            let (train, valid) = split(0.005, tokens, seq_len, "test").unwrap();
            let windows = Windows::new(train, seq_len, Remainder::Drop);
            let held: u64 = valid.iter().map(|range| range.end - range.start).sum();
            let unused = tokens - held - windows.count() * seq_len as u64;
            // An unsplit text loses up to one sequence; blocks lose at most one sequence in 32.
            prop_assert!(unused <= (seq_len as u64).max(tokens / 32 + 16), "{unused} of {tokens}");
        }

        #[test]
        fn each_token_but_the_first_is_a_target_once(
            lengths in prop::collection::vec(0_u64..40, 1..5), seq_len in 1_usize..12,
        ) {
            let mut at = 0;
            let ranges: Ranges = lengths.iter().map(|length| { at += length + 3; at - length..at }).collect();
            let expected: Vec<u64> = ranges.iter().flat_map(|range| range.clone().skip(1)).collect();
            let windows = Windows::new(ranges.clone(), seq_len, Remainder::ShortWindow);
            let targets = |windows: &Windows| -> Vec<u64> {
                (0..windows.count()).map(|w| windows.locate(w)).flat_map(|(p, n)| p + 1..p + 1 + n as u64).collect()
            };
            prop_assert_eq!(targets(&windows), expected);
            let full = Windows::new(ranges, seq_len, Remainder::Drop);
            prop_assert!((0..full.count()).all(|w| full.locate(w).1 == seq_len));
        }
    }
}
