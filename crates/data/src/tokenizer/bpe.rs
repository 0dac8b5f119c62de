//! Byte-level BPE: the fast path for the vocabularies of GPT-2, Qwen 2/3, Llama 3 and those trained here.
//!
//! The same ids as the tokenizers crate gives, without its bookkeeping of offsets: scan a word, look it up in a
//! cache, merge it where it is new. A file that asks for anything more (dropout, unknown tokens, another regular
//! expression) is not recognised here and stays with that crate.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Mutex;

use serde_json::Value;

use super::words::WordPattern;

/// Words a cache holds before it starts again.
const CACHED_WORDS: usize = 1 << 16;
/// Words longer than this many bytes are merged anew each time.
const CACHED_WORD_BYTES: usize = 64;
/// Up to this length a scan for the best pair beats a heap.
const SCANNED_SYMBOLS: usize = 32;

type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<WordHasher>>;

/// A byte-level BPE vocabulary: 256 byte tokens and ranked merges.
#[derive(Debug)]
pub(super) struct ByteBpe {
    byte_ids: [u32; 256],
    merges: Merges,
    /// Whole words that skip the merges, for vocabularies that say `ignore_merges`.
    whole_words: Option<FastMap<Box<[u8]>, u32>>,
    words: Option<WordPattern>,
    caches: Mutex<Vec<WordCache>>,
}

impl ByteBpe {
    /// Reads the vocabulary from a parsed `tokenizer.json`, or `None` where it is not of this kind.
    pub(super) fn recognise(json: &Value) -> Option<ByteBpe> {
        let model = json.get("model")?;
        let plain = |key: &str| match model.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::String(text)) => text.is_empty(),
            _ => false,
        };
        let is_bpe = model.get("type").is_none_or(|t| t == "BPE");
        let needs_nothing_else =
            ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"]
                .into_iter()
                .all(plain);
        if !is_bpe || !needs_nothing_else {
            return None;
        }
        let vocab = model.get("vocab")?.as_object()?;
        let id_of = |token: &str| vocab.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut byte_ids = [0; 256];
        for byte in 0..=255_u8 {
            byte_ids[byte as usize] = id_of(byte_char(byte).encode_utf8(&mut [0; 4]))?;
        }
        let mut merges = Merges::default();
        for (rank, merge) in model.get("merges")?.as_array()?.iter().enumerate() {
            let (left, right) = match merge {
                Value::String(pair) => pair.split_once(' ')?,
                Value::Array(pair) => (pair.first()?.as_str()?, pair.get(1)?.as_str()?),
                _ => return None,
            };
            let merged = id_of(&format!("{left}{right}"))?;
            merges.insert((id_of(left)?, id_of(right)?), (rank as u32, merged));
        }
        let words = word_pattern(json.get("pre_tokenizer")?)?;
        if words.is_none() && !merges.is_empty() {
            return None;
        }
        let ignore_merges = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
        let whole_words = ignore_merges.then(|| {
            vocab.keys().filter_map(|token| Some((token_bytes(token)?.into(), id_of(token)?))).collect()
        });
        Some(ByteBpe { byte_ids, merges, whole_words, words, caches: Mutex::default() })
    }

    /// True when merges never cross a byte, so that text may be cut anywhere.
    pub(super) fn is_bytes_only(&self) -> bool {
        self.words.is_none()
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let Some(pattern) = self.words else {
            out.extend(text.bytes().map(|b| self.byte_ids[b as usize]));
            return;
        };
        // A thread takes a cache for the length of one text, so that threads never wait for each other inside.
        let mut cache = self.lock_caches().pop().unwrap_or_default();
        let mut rest = text;
        while !rest.is_empty() {
            let (word, after) = rest.split_at(pattern.word_len(rest));
            self.encode_word(word.as_bytes(), &mut cache, out);
            rest = after;
        }
        self.lock_caches().push(cache);
    }

    fn lock_caches(&self) -> std::sync::MutexGuard<'_, Vec<WordCache>> {
        // Nothing can panic while the lock is held, and a cache is only ever a copy of what can be recomputed.
        self.caches.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn encode_word(&self, word: &[u8], cache: &mut WordCache, out: &mut Vec<u32>) {
        if let Some(&id) = self.whole_words.as_ref().and_then(|words| words.get(word)) {
            out.push(id);
        } else if let [byte] = word {
            out.push(self.byte_ids[*byte as usize]);
        } else if word.len() > CACHED_WORD_BYTES {
            out.extend(self.merge(word));
        } else if let Some(ids) = cache.get(word) {
            out.extend_from_slice(ids);
        } else {
            let ids = self.merge(word);
            out.extend_from_slice(&ids);
            cache.insert(word, &ids);
        }
    }

    fn merge(&self, word: &[u8]) -> Vec<u32> {
        let ids: Vec<u32> = word.iter().map(|&b| self.byte_ids[b as usize]).collect();
        if ids.len() <= SCANNED_SYMBOLS {
            merge_by_scan(ids, &self.merges)
        } else {
            merge_by_heap(ids, &self.merges)
        }
    }
}

/// Pair of ids to (rank, merged id).
type Merges = FastMap<(u32, u32), (u32, u32)>;

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

/// The same in n log n, for words of any length: a linked list of symbols and a heap of candidate pairs.
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

/// The word pattern of a `pre_tokenizer` entry: `Some(None)` is byte-level without words, `None` is unknown.
fn word_pattern(pre_tokenizer: &Value) -> Option<Option<WordPattern>> {
    let byte_level = |step: &Value| {
        (step.get("type")? == "ByteLevel" && step.get("add_prefix_space")? == false)
            .then(|| step.get("use_regex").and_then(Value::as_bool).unwrap_or(true))
    };
    if let Some(use_regex) = byte_level(pre_tokenizer) {
        return Some(use_regex.then_some(WordPattern::Gpt2));
    }
    let [split, bytes] = pre_tokenizer.get("pretokenizers")?.as_array()?.as_slice() else { return None };
    let isolated = split.get("type")? == "Split"
        && split.get("behavior")? == "Isolated"
        && split.get("invert").is_none_or(|invert| invert == false);
    if !isolated || byte_level(bytes)? {
        return None;
    }
    WordPattern::of_regex(split.get("pattern")?.get("Regex")?.as_str()?).map(Some)
}

/// The printable character that stands for a byte in byte-level vocabularies (Radford et al. 2019, GPT-2).
pub(super) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return byte as char;
    }
    let earlier = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + earlier).expect("256 to 511 are characters")
}

/// The bytes behind a token's printable characters; `None` where a character stands for no byte.
fn token_bytes(token: &str) -> Option<Vec<u8>> {
    static BYTES: std::sync::LazyLock<HashMap<char, u8>> =
        std::sync::LazyLock::new(|| (0..=255).map(|b| (byte_char(b), b)).collect());
    token.chars().map(|c| BYTES.get(&c).copied()).collect()
}

/// Words met before and their tokens.
#[derive(Debug, Default)]
struct WordCache {
    spans: FastMap<Box<[u8]>, (u32, u32)>,
    ids: Vec<u32>,
}

impl WordCache {
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

/// A short multiplicative hash: keys are words and pairs of ids, and none of them comes from an enemy who gains
/// anything but a slower run.
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
