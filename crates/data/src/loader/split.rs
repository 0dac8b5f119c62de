//! The split of a source into training and held-out ranges, and of ranges into windows; the windows of all
//! sources, of ranges or of whole documents.

use std::ops::Range;

use super::LoaderOptions;
use super::bins::{Bins, TokenCounts};
use super::documents::Document;
use crate::error::{DataError, Result};

/// Ranges of token positions, ascending and disjoint.
type Ranges = Vec<Range<u64>>;

/// Maximum number of held-out blocks.
const MAX_BLOCKS: u64 = 16;
/// Minimum number of sequences between two blocks. Each block cuts off an incomplete sequence before it.
const SEQUENCES_A_BLOCK: u64 = 32;

/// The training and held-out ranges of a source of `tokens` tokens.
///
/// # Errors
/// A fraction that holds out nothing or everything; too few tokens for a sequence. The advice is tried first.
pub(super) fn train_and_held_out(
    name: &str,
    tokens: u64,
    options: &LoaderOptions,
) -> Result<(Ranges, Ranges)> {
    let LoaderOptions { seq_len, held_out, .. } = *options;
    if let Some(fraction) = held_out.filter(|&fraction| !(fraction > 0.0 && fraction < 1.0)) {
        return Err(DataError::invalid(
            format!("a fraction of {fraction} cannot be held out"),
            "hold out a fraction between 0 and 1",
        ));
    }
    let split = |seq_len: usize, held_out: Option<f64>| match held_out {
        Some(fraction) => split(fraction, tokens, seq_len),
        None => Some((std::iter::once(0..tokens).collect(), Vec::new())),
    };
    let longest = |(train, _): &(Ranges, Ranges)| train.iter().map(|range| range.end - range.start).max();
    let found = split(seq_len, held_out);
    let contiguous = found.as_ref().and_then(longest);
    let (found, problem) = match (found, contiguous, held_out) {
        (Some(found), Some(contiguous), _) if contiguous > seq_len as u64 => return Ok(found),
        (None, _, Some(fraction)) if tokens > seq_len as u64 => {
            (None, format!("{tokens} tokens, too few to hold out a fraction of {fraction}"))
        }
        (found, contiguous, _) => {
            let tokens =
                contiguous.map_or(format!("{tokens} tokens"), |n| format!("{n} contiguous training tokens"));
            (found, format!("{tokens}, too few for one sequence of {seq_len} and its targets"))
        }
    };
    let works = |seq_len: usize, held_out: Option<f64>| {
        split(seq_len, held_out).as_ref().and_then(longest) > Some(seq_len as u64)
    };
    let mut advice = Vec::new();
    let halved = |&seq_len: &usize| Some(seq_len / 2).filter(|&seq_len| seq_len > 0);
    let shorter = |longest: u64| {
        let first = usize::try_from(longest.saturating_sub(1)).ok().filter(|&seq_len| seq_len > 0);
        std::iter::successors(first, halved)
    };
    if let Some(seq_len) =
        found.as_ref().and_then(longest).into_iter().flat_map(shorter).find(|&n| works(n, held_out))
    {
        advice.push(format!("a shorter sequence (data.seq_len = {seq_len})"));
    }
    if let Some(fraction) = held_out.filter(|_| tokens > seq_len as u64) {
        let larger = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].into_iter().filter(|&larger| larger > fraction);
        if let Some(larger) =
            larger.into_iter().find(|&larger| found.is_none() && works(seq_len, Some(larger)))
        {
            advice.push(format!("data.held_out = {larger}"));
        }
        advice.push("data.held_out = 0 with eval.every = 0".to_owned());
    } else if let Some(seq_len) = shorter(tokens).next().filter(|_| advice.is_empty()) {
        advice.push(format!("data.seq_len = {seq_len} with data.held_out = 0 and eval.every = 0"));
    }
    let more = format!("use more text (at least {} tokens)", seq_len + 1);
    advice.insert(0, if tokens > seq_len as u64 { "use more text".to_owned() } else { more });
    Err(DataError::invalid(format!("{name} has {problem}"), advice.join(", or ")))
}

/// Splits a source of `tokens` tokens into training and validation ranges; `None` if the `fraction` is too
/// little of it. The fraction is taken from the ends of equal parts of the source, because its documents may
/// be sorted. The split does not depend on seed and weights, so held-out tokens stay held out if those
/// change.
fn split(fraction: f64, tokens: u64, seq_len: usize) -> Option<(Ranges, Ranges)> {
    let held = (tokens as f64 * fraction).round() as u64;
    if held < 2 || held >= tokens {
        return None;
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
    Some((train, valid))
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

/// The training or held-out windows of a source.
#[derive(Debug, Clone)]
pub(super) enum Windows {
    /// Parts of the stream of tokens.
    Ranges(RangeWindows),
    /// Whole documents.
    Bins(Bins),
}

/// Content of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowContent<'w> {
    /// Consecutive tokens: the position of the first one, and the number of targets.
    Range {
        /// Position of the first token in the source.
        start: u64,
        /// Number of targets, at most S.
        targets: usize,
    },
    /// Whole documents, with S inputs at most.
    Documents(&'w [Document]),
}

impl WindowContent<'_> {
    /// Position of the first token in the source.
    pub(super) fn position(&self) -> u64 {
        match self {
            WindowContent::Range { start, .. } => *start,
            WindowContent::Documents(documents) => documents[0].start,
        }
    }
}

impl Windows {
    /// Number of windows.
    pub(super) fn count(&self) -> u64 {
        match self {
            Windows::Ranges(ranges) => ranges.count,
            Windows::Bins(bins) => bins.count(),
        }
    }

    /// Content of window number `window`.
    pub(super) fn locate(&self, window: u64) -> WindowContent<'_> {
        match self {
            Windows::Ranges(ranges) => {
                let (start, targets) = ranges.locate(window);
                WindowContent::Range { start, targets }
            }
            Windows::Bins(bins) => WindowContent::Documents(bins.documents(window)),
        }
    }

    /// Inputs and trained targets of window number `window`.
    pub(super) fn counts(&self, window: u64) -> TokenCounts {
        match self {
            Windows::Ranges(ranges) => {
                let targets = ranges.locate(window).1 as u64;
                TokenCounts::full(targets)
            }
            Windows::Bins(bins) => bins.counts(window),
        }
    }

    /// Hash of the bins; `None` for parts of the stream, which follow from their number.
    pub(super) fn hash(&self) -> Option<u64> {
        match self {
            Windows::Ranges(_) => None,
            Windows::Bins(bins) => Some(bins.hash()),
        }
    }
}

/// Windows over ranges of a token stream. Window w of a range that starts at p has the inputs `p + w S .. p +
/// (w+1) S` and the targets shifted by one, so each token of a range except the first is a target once.
#[derive(Debug, Clone)]
pub(super) struct RangeWindows {
    ranges: Ranges,
    /// Index of each range's first window.
    first: Vec<u64>,
    count: u64,
    seq_len: u64,
}

impl RangeWindows {
    pub(super) fn new(ranges: Ranges, seq_len: usize, last: Remainder) -> RangeWindows {
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
        RangeWindows { ranges, first, count, seq_len }
    }

    /// Position of the window's first token, and its number of targets.
    fn locate(&self, window: u64) -> (u64, usize) {
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
    use crate::loader::DocumentMask;

    fn options(seq_len: usize, held_out: Option<f64>) -> LoaderOptions {
        LoaderOptions { seq_len, seed: 0, document_mask: DocumentMask::Off, held_out }
    }

    #[test]
    fn the_advice_for_a_short_source_works() {
        let message = |tokens, seq_len, held_out| {
            train_and_held_out("a.txt", tokens, &options(seq_len, held_out)).unwrap_err().to_string()
        };
        assert_eq!(
            message(7, 1024, Some(0.005)),
            "a.txt has 7 tokens, too few for one sequence of 1024 and its targets; use more text (at least 1025 tokens), \
             or data.seq_len = 6 with data.held_out = 0 and eval.every = 0"
        );
        assert_eq!(
            message(7, 16, None),
            "a.txt has 7 contiguous training tokens, too few for one sequence of 16 and its targets; use more text (at \
             least 17 tokens), or a shorter sequence (data.seq_len = 6)"
        );
        assert_eq!(
            message(100, 16, Some(0.005)),
            "a.txt has 100 tokens, too few to hold out a fraction of 0.005; use more text, or data.held_out = 0.02, or \
             data.held_out = 0 with eval.every = 0"
        );
        assert_eq!(
            message(100, 98, Some(0.05)),
            "a.txt has 95 contiguous training tokens, too few for one sequence of 98 and its targets; use more text, or a \
             shorter sequence (data.seq_len = 94), or data.held_out = 0 with eval.every = 0"
        );
    }

    proptest! {
        #[test]
        fn every_advice_for_a_short_source_works(
            tokens in 2_u64..3000, seq_len in 1_usize..3000, held_out in prop::option::of(0.001_f64..0.9),
        ) {
            let Err(error) = train_and_held_out("a", tokens, &options(seq_len, held_out)) else { return Ok(()) };
            let error = error.to_string();
            let (_, advice) = error.split_once("; use more text").unwrap();
            for advice in advice.split(", or ").skip(1) {
                let value = |key: &str| {
                    let (_, rest) = advice.split_once(&format!("{key} = "))?;
                    rest.split([' ', ')']).next()?.parse::<f64>().ok()
                };
                let seq_len = value("data.seq_len").map_or(seq_len, |value| value as usize);
                let held_out = value("data.held_out").or(held_out).filter(|&fraction| fraction > 0.0);
                prop_assert!(train_and_held_out("a", tokens, &options(seq_len, held_out)).is_ok(), "{}: {}", error, advice);
            }
        }

        #[test]
        fn every_position_is_either_training_or_validation(
            tokens in 200_u64..50_000, fraction in 0.1_f64..0.9, seq_len in 1_usize..400,
        ) {
            let (train, valid) = split(fraction, tokens, seq_len).unwrap();
            let held: u64 = valid.iter().map(|range| range.end - range.start).sum();
            prop_assert_eq!(held, (tokens as f64 * fraction).round() as u64);
            prop_assert_eq!(valid.len() as u64, blocks(tokens, held, seq_len));
            let mut all: Vec<u64> = train.into_iter().chain(valid).flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..tokens).collect::<Vec<_>>());
        }

        #[test]
        fn blocks_leave_few_tokens_unused(tokens in 1_000_u64..1_000_000, seq_len in 16_usize..10_000) {
            let (train, valid) = split(0.005, tokens, seq_len).unwrap();
            let windows = RangeWindows::new(train, seq_len, Remainder::Drop);
            let held: u64 = valid.iter().map(|range| range.end - range.start).sum();
            let unused = tokens - held - windows.count * seq_len as u64;
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
            let windows = RangeWindows::new(ranges.clone(), seq_len, Remainder::ShortWindow);
            let targets = |windows: &RangeWindows| -> Vec<u64> {
                (0..windows.count).map(|w| windows.locate(w)).flat_map(|(p, n)| p + 1..p + 1 + n as u64).collect()
            };
            prop_assert_eq!(targets(&windows), expected);
            let full = RangeWindows::new(ranges, seq_len, Remainder::Drop);
            prop_assert!((0..full.count).all(|w| full.locate(w).1 == seq_len));
        }
    }
}
