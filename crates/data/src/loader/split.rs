//! Which part of a source is held out for validation, and where its windows begin.

use std::ops::Range;

use crate::error::{DataError, Result};

/// How much is held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeldOutAmount {
    /// This part of every source's tokens, between 0 and 1.
    Fraction(f64),
    /// About this many tokens of all sources together, from each in proportion to its size.
    Tokens(u64),
}

/// What is held out for validation. It depends on nothing but the tokens of a source: not on the seed, the sequence
/// length or the weights, so that it stays held out when those change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOut {
    /// How much.
    pub amount: HeldOutAmount,
    /// In how many blocks. One is the end of the source; n are the ends of n equal parts of it, which represents a
    /// source better whose documents are sorted.
    pub blocks: u32,
}

/// Ranges of token positions, ascending and disjoint.
type Ranges = Vec<Range<u64>>;

/// Splits a source of `tokens` tokens, of `all_tokens` in all sources, into training and validation.
///
/// # Errors
/// Nothing or everything would be held out.
pub(super) fn split(
    held_out: &HeldOut,
    tokens: u64,
    all_tokens: u64,
    name: &str,
) -> Result<(Ranges, Ranges)> {
    let refuse = |what: String| {
        Err(DataError::invalid(what, "hold out a fraction between 0 and 1, or fewer tokens than there are"))
    };
    let fraction = match held_out.amount {
        HeldOutAmount::Fraction(fraction) => fraction,
        HeldOutAmount::Tokens(tokens) => tokens as f64 / all_tokens.max(1) as f64,
    };
    if !(fraction > 0.0 && fraction < 1.0) {
        return refuse(format!("{:?} cannot be held out of {all_tokens} tokens", held_out.amount));
    }
    let held = (tokens as f64 * fraction).round() as u64;
    let blocks = u64::from(held_out.blocks);
    if blocks == 0 || held < 2 * blocks || held >= tokens {
        return Err(DataError::invalid(
            format!("{name} has {tokens} tokens, too few to hold out {held} of them in {blocks} blocks"),
            "use more text, hold out another part of it, or nothing",
        ));
    }
    let (mut train, mut valid) = (Ranges::new(), Ranges::new());
    // Products of counts and block numbers may exceed 64 bits.
    let part = |count: u64, block: u64| (u128::from(count) * u128::from(block) / u128::from(blocks)) as u64;
    for block in 0..blocks {
        let (start, end) = (part(tokens, block), part(tokens, block + 1));
        let cut = end - (part(held, block + 1) - part(held, block));
        train.push(start..cut);
        valid.push(cut..end);
    }
    Ok((train, valid))
}

/// What happens to the tokens behind a range's last full window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastWindow {
    /// They are not used.
    Full,
    /// They make a shorter window.
    Short,
}

/// Windows over ranges of a token stream. Window w of a range that begins at position p has the inputs
/// `p + w S .. p + (w+1) S` and the targets one further, so each token but a range's first is a target once.
#[derive(Debug, Clone)]
pub(super) struct Windows {
    ranges: Ranges,
    /// Number of each range's first window.
    first: Vec<u64>,
    count: u64,
    seq_len: u64,
}

impl Windows {
    pub(super) fn new(ranges: Ranges, seq_len: usize, last: LastWindow) -> Windows {
        let seq_len = seq_len as u64;
        let mut count = 0;
        let mut first = Vec::with_capacity(ranges.len());
        for range in &ranges {
            first.push(count);
            let targets = (range.end - range.start).saturating_sub(1);
            count += match last {
                LastWindow::Full => targets / seq_len,
                LastWindow::Short => targets.div_ceil(seq_len),
            };
        }
        Windows { ranges, first, count, seq_len }
    }

    /// How many windows there are.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// How many tokens the ranges hold.
    pub(super) fn token_count(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Where the window's first token is, and how many targets it has.
    pub(super) fn at(&self, window: u64) -> (u64, usize) {
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
            tokens in 200_u64..5000, fraction in 0.1_f64..0.9, blocks in 1_u32..8,
        ) {
            let held_out = HeldOut { amount: HeldOutAmount::Fraction(fraction), blocks };
            let (train, valid) = split(&held_out, tokens, tokens, "test").unwrap();
            let mut all: Vec<u64> = train.into_iter().chain(valid.clone()).flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..tokens).collect::<Vec<_>>());
            let held: u64 = valid.iter().map(|range| range.end - range.start).sum();
            prop_assert_eq!(held, (tokens as f64 * fraction).round() as u64);
        }

        #[test]
        fn each_token_but_the_first_is_a_target_once(
            lengths in prop::collection::vec(0_u64..40, 1..5), seq_len in 1_usize..12,
        ) {
            let mut at = 0;
            let ranges: Ranges = lengths.iter().map(|length| { at += length + 3; at - length..at }).collect();
            let expected: Vec<u64> = ranges.iter().flat_map(|range| range.clone().skip(1)).collect();
            let windows = Windows::new(ranges.clone(), seq_len, LastWindow::Short);
            let targets = |windows: &Windows| -> Vec<u64> {
                (0..windows.count()).map(|w| windows.at(w)).flat_map(|(p, n)| p + 1..p + 1 + n as u64).collect()
            };
            prop_assert_eq!(targets(&windows), expected);
            let full = Windows::new(ranges, seq_len, LastWindow::Full);
            prop_assert!((0..full.count()).all(|w| full.at(w).1 == seq_len));
        }
    }
}
