//! Training of a byte-level BPE vocabulary (Sennrich et al. 2016; on bytes, Radford et al. 2019).
//!
//! The result is deterministic: words are counted in a hash map and then sorted; the most frequent pair is
//! merged first, among equally frequent ones the pair with the smaller ids. A pair that would form an
//! existing token is not merged, so every token has exactly one merge. Memory use grows with the distinct
//! words of the sample, whose size is limited.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::hash::BuildHasherDefault;
use std::ops::ControlFlow;

use rayon::prelude::*;

use super::merge::{FastMap, WordHasher};
use super::words::WordPattern;
use crate::error::{DataError, Result};

/// Minimum frequency of a merged pair.
const MIN_COUNT: i64 = 2;
/// Maximum length of a counted word. Longer ones are mostly encoded files.
const MAX_WORD_BYTES: usize = 1024;

type Pair = (u32, u32);

/// Frequencies of words in the text so far.
#[derive(Debug, Default)]
pub(super) struct WordCounts {
    counts: FastMap<Box<[u8]>, u64>,
}

impl WordCounts {
    /// Counts the words of `texts`, in parallel.
    pub(super) fn feed(&mut self, texts: &[String]) {
        let parts: Vec<FastMap<&[u8], u64>> = texts.par_iter().map(|text| count_words(text)).collect();
        for (word, count) in parts.into_iter().flatten() {
            match self.counts.get_mut(word) {
                Some(total) => *total += count,
                None => {
                    self.counts.insert(word.into(), count);
                }
            }
        }
    }

    /// Learns at most `max_merges` merges. The i-th merge forms token 256 + i; ids below 256 are bytes.
    /// `on_merge` is called before each merge and can stop the training.
    pub(super) fn learn_merges(
        self,
        max_merges: usize,
        on_merge: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Vec<Pair>> {
        // Sorted, so that the result does not depend on the order of the hash map.
        let sorted: BTreeMap<_, _> = self.counts.into_iter().collect();
        let mut words: Vec<Word> = sorted
            .into_iter()
            .map(|(word, count)| Word {
                symbols: word.iter().map(|&b| u32::from(b)).collect(),
                count: count as i64,
            })
            .collect();
        let mut pairs = PairTable::new(&words);
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|b| vec![b]).collect();
        let mut known: HashSet<Vec<u8>> = tokens.iter().cloned().collect();
        let mut merges = Vec::new();
        while merges.len() < max_merges {
            if on_merge(merges.len(), max_merges).is_break() {
                return Err(DataError::Interrupted);
            }
            let Some(pair) = pairs.pop_most_frequent() else { break };
            let bytes = [tokens[pair.0 as usize].as_slice(), &tokens[pair.1 as usize]].concat();
            if !known.insert(bytes.clone()) {
                continue;
            }
            pairs.merge(pair, tokens.len() as u32, &mut words);
            tokens.push(bytes);
            merges.push(pair);
        }
        Ok(merges)
    }
}

fn count_words(text: &str) -> FastMap<&[u8], u64> {
    let mut counts = FastMap::default();
    WordPattern::Qwen.each(text, &mut |word| {
        if word.len() <= MAX_WORD_BYTES {
            *counts.entry(word.as_bytes()).or_default() += 1;
        }
    });
    counts
}

struct Word {
    symbols: Vec<u32>,
    count: i64,
}

/// Adjacent pairs, with their frequencies, the words that contain them, and a queue by frequency.
struct PairTable {
    counts: FastMap<Pair, i64>,
    /// Words that contain the pair or did so earlier; may repeat.
    words: FastMap<Pair, Vec<u32>>,
    /// Counts may be outdated; they are updated when popped.
    queue: BinaryHeap<(i64, Reverse<Pair>)>,
}

impl PairTable {
    fn new(words: &[Word]) -> PairTable {
        let mut table =
            PairTable { counts: FastMap::default(), words: FastMap::default(), queue: BinaryHeap::new() };
        for (at, word) in words.iter().enumerate() {
            for pair in word.symbols.windows(2) {
                let pair = (pair[0], pair[1]);
                *table.counts.entry(pair).or_default() += word.count;
                let locations = table.words.entry(pair).or_default();
                if locations.last() != Some(&(at as u32)) {
                    locations.push(at as u32);
                }
            }
        }
        table.queue = table.counts.iter().map(|(&pair, &count)| (count, Reverse(pair))).collect();
        table
    }

    fn pop_most_frequent(&mut self) -> Option<Pair> {
        while let Some((count, Reverse(pair))) = self.queue.pop() {
            let now = self.counts.get(&pair).copied().unwrap_or(0);
            if now < MIN_COUNT {
                continue;
            }
            if now == count {
                return Some(pair);
            }
            self.queue.push((now, Reverse(pair)));
        }
        None
    }

    fn merge(&mut self, pair: Pair, merged: u32, words: &mut [Word]) {
        let mut grown: HashSet<Pair, BuildHasherDefault<WordHasher>> = HashSet::default();
        for at in self.words.remove(&pair).unwrap_or_default() {
            let word = &mut words[at as usize];
            let before = std::mem::take(&mut word.symbols);
            word.symbols = merge_pair(&before, pair, merged);
            if word.symbols.len() == before.len() {
                continue;
            }
            for old in before.windows(2) {
                *self.counts.entry((old[0], old[1])).or_default() -= word.count;
            }
            for new in word.symbols.windows(2) {
                let new = (new[0], new[1]);
                *self.counts.entry(new).or_default() += word.count;
                if new.0 == merged || new.1 == merged {
                    grown.insert(new);
                    let locations = self.words.entry(new).or_default();
                    if locations.last() != Some(&at) {
                        locations.push(at);
                    }
                }
            }
        }
        self.counts.remove(&pair);
        self.queue.extend(grown.into_iter().map(|pair| (self.counts[&pair], Reverse(pair))));
    }
}

fn merge_pair(symbols: &[u32], pair: Pair, merged: u32) -> Vec<u32> {
    let mut out = Vec::with_capacity(symbols.len());
    let mut at = 0;
    while at < symbols.len() {
        if at + 1 < symbols.len() && (symbols[at], symbols[at + 1]) == pair {
            out.push(merged);
            at += 2;
        } else {
            out.push(symbols[at]);
            at += 1;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference implementation: recounts everything before every merge.
    fn naive_merges(text: &str, max_merges: usize) -> Vec<Pair> {
        let mut words: Vec<(Vec<u32>, u64)> = count_words(text)
            .into_iter()
            .map(|(word, count)| (word.iter().map(|&b| u32::from(b)).collect(), count))
            .collect();
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|b| vec![b]).collect();
        let mut refused = HashSet::new();
        let mut merges = Vec::new();
        while merges.len() < max_merges {
            let mut counts: BTreeMap<Pair, u64> = BTreeMap::new();
            for (word, count) in &words {
                for pair in word.windows(2) {
                    *counts.entry((pair[0], pair[1])).or_default() += count;
                }
            }
            let best = counts
                .into_iter()
                .filter(|(pair, count)| *count >= MIN_COUNT as u64 && !refused.contains(pair))
                .max_by_key(|&(pair, count)| (count, Reverse(pair)));
            let Some((pair, _)) = best else { break };
            let bytes = [tokens[pair.0 as usize].clone(), tokens[pair.1 as usize].clone()].concat();
            if tokens.contains(&bytes) {
                refused.insert(pair);
                continue;
            }
            for (word, _) in &mut words {
                *word = merge_pair(word, pair, tokens.len() as u32);
            }
            tokens.push(bytes);
            merges.push(pair);
        }
        merges
    }

    fn learn(counts: WordCounts, merges: usize) -> Vec<Pair> {
        counts.learn_merges(merges, &mut |_, _| ControlFlow::Continue(())).unwrap()
    }

    proptest! {
        #[test]
        fn incremental_counts_learn_the_merges_of_the_reference(text in "[ab c\n1]{0,400}", merges in 0_usize..60) {
            let mut counts = WordCounts::default();
            counts.feed(std::slice::from_ref(&text));
            prop_assert_eq!(learn(counts, merges), naive_merges(&text, merges));
        }

        #[test]
        fn batching_of_the_text_changes_nothing(parts in prop::collection::vec("[a-d ]{0,40}", 0..20)) {
            let mut together = WordCounts::default();
            together.feed(&parts);
            let mut one_by_one = WordCounts::default();
            for part in &parts {
                one_by_one.feed(std::slice::from_ref(part));
            }
            prop_assert_eq!(learn(together, 50), learn(one_by_one, 50));
        }
    }
}
