//! BPE merging of the symbols of one word, and the cache of merged words.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// Maximum number of words in a cache. A full cache is cleared.
const CACHED_WORDS: usize = 1 << 16;
/// Maximum length of a cached word, in bytes.
const CACHED_WORD_BYTES: usize = 64;
/// Maximum number of symbols for which scanning for the best pair is faster than a heap.
const SCANNED_SYMBOLS: usize = 32;

/// Hash map with [`WordHasher`].
pub(super) type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<WordHasher>>;

/// Rank and merged id by pair of ids.
pub(super) type Merges = FastMap<(u32, u32), (u32, u32)>;

/// The merges of a model as pairs of tokens, by rank.
pub(super) fn parse_merges(model: &Value) -> Option<Vec<(&str, &str)>> {
    let merges = model.get("merges")?.as_array()?.iter();
    merges
        .map(|merge| match merge {
            Value::String(pair) => pair.split_once(' '),
            Value::Array(pair) => Some((pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
            _ => None,
        })
        .collect()
}

/// Merges by ids; `None` if a token is missing from the vocabulary.
pub(super) fn rank_merges(listed: &[(&str, &str)], id_of: impl Fn(&str) -> Option<u32>) -> Option<Merges> {
    let ranked = listed.iter().enumerate().map(|(rank, (left, right))| {
        let merged = id_of(&format!("{left}{right}"))?;
        Some(((id_of(left)?, id_of(right)?), (rank as u32, merged)))
    });
    ranked.collect()
}

/// True if each of these settings of the model is absent or turned off.
pub(super) fn are_all_off(model: &Value, keys: &[&str]) -> bool {
    keys.iter().all(|key| match model.get(key) {
        None | Some(Value::Null | Value::Bool(false)) => true,
        Some(Value::String(text)) => text.is_empty(),
        _ => false,
    })
}

/// Merges the symbols of one word.
pub(super) fn merge(ids: Vec<u32>, merges: &Merges) -> Vec<u32> {
    if ids.len() <= SCANNED_SYMBOLS { merge_by_scan(ids, merges) } else { merge_by_heap(ids, merges) }
}

/// Merges the pair of lowest rank, leftmost first, until none is left.
fn merge_by_scan(mut ids: Vec<u32>, merges: &Merges) -> Vec<u32> {
    loop {
        let best = ids
            .windows(2)
            .enumerate()
            .filter_map(|(at, pair)| merges.get(&(pair[0], pair[1])).map(|&(rank, id)| (rank, at, id)))
            .min();
        let Some((_, at, id)) = best else { return ids };
        ids[at] = id;
        ids.remove(at + 1);
    }
}

/// [`merge_by_scan`] in n log n, with a linked list of symbols and a heap of candidate pairs.
fn merge_by_heap(mut ids: Vec<u32>, merges: &Merges) -> Vec<u32> {
    const NONE: usize = usize::MAX;
    let len = ids.len();
    let mut next: Vec<usize> = (1..len).chain([NONE]).collect();
    let mut previous: Vec<usize> = [NONE].into_iter().chain(0..len - 1).collect();
    let mut alive = vec![true; len];
    let candidate = |ids: &[u32], left: usize, right: usize| {
        let pair = (ids[left], ids[right]);
        merges.get(&pair).map(|&(rank, id)| Reverse((rank, left, pair, id)))
    };
    let mut heap: BinaryHeap<_> = (1..len).filter_map(|right| candidate(&ids, right - 1, right)).collect();
    while let Some(Reverse((_, left, pair, id))) = heap.pop() {
        let right = next[left];
        if !alive[left] || right == NONE || (ids[left], ids[right]) != pair {
            continue;
        }
        ids[left] = id;
        alive[right] = false;
        let after = next[right];
        next[left] = after;
        if after != NONE {
            previous[after] = left;
            heap.extend(candidate(&ids, left, after));
        }
        if previous[left] != NONE {
            heap.extend(candidate(&ids, previous[left], left));
        }
    }
    ids.into_iter().zip(alive).filter_map(|(id, alive)| alive.then_some(id)).collect()
}

/// A pool of caches, one per thread that is encoding.
#[derive(Debug, Default)]
pub(super) struct Caches(Mutex<Vec<WordCache>>);

impl Caches {
    /// Runs `work` with an exclusive cache, so that threads do not wait for each other.
    pub(super) fn with(&self, work: impl FnOnce(&mut WordCache)) {
        let mut cache = self.lock().pop().unwrap_or_default();
        work(&mut cache);
        self.lock().push(cache);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<WordCache>> {
        // Nothing panics while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tokens of words seen before.
#[derive(Debug, Default)]
pub(super) struct WordCache {
    spans: FastMap<Box<[u8]>, (u32, u32)>,
    ids: Vec<u32>,
}

impl WordCache {
    /// Appends the tokens of `word`, computed by `merge` if they are not cached.
    pub(super) fn encode(&mut self, word: &[u8], out: &mut Vec<u32>, merge: impl FnOnce() -> Vec<u32>) {
        if word.len() > CACHED_WORD_BYTES {
            out.extend(merge());
        } else if let Some(ids) = self.get(word) {
            out.extend_from_slice(ids);
        } else {
            let ids = merge();
            out.extend_from_slice(&ids);
            self.insert(word, &ids);
        }
    }

    fn get(&self, word: &[u8]) -> Option<&[u32]> {
        self.spans.get(word).map(|&(start, end)| &self.ids[start as usize..end as usize])
    }

    fn insert(&mut self, word: &[u8], ids: &[u32]) {
        if self.spans.len() >= CACHED_WORDS {
            self.spans.clear();
            self.ids.clear();
        }
        let start = self.ids.len() as u32;
        self.ids.extend_from_slice(ids);
        self.spans.insert(word.into(), (start, self.ids.len() as u32));
    }
}

/// A short multiplicative hash for words and pairs of ids. It does not resist adversarial keys, which could
/// only slow down a run.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct WordHasher(u64);

impl WordHasher {
    fn mix(&mut self, value: u64) {
        let product = u128::from(self.0.rotate_left(23) ^ value) * u128::from(0x9E37_79B9_7F4A_7C15_u64);
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut chunks = bytes.chunks_exact(8);
        for chunk in &mut chunks {
            self.mix(u64::from_le_bytes(chunk.try_into().expect("eight bytes")));
        }
        let mut last = [0; 8];
        last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
        self.mix(u64::from_le_bytes(last) ^ ((bytes.len() as u64) << 56));
    }

    fn write_u32(&mut self, value: u32) {
        self.mix(u64::from(value) + 1);
    }

    fn write_usize(&mut self, value: usize) {
        self.mix(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
