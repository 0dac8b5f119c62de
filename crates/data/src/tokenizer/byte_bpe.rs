//! Byte-level BPE: the fast path for the vocabularies of GPT-2, SmolLM, Qwen 2/3, Llama 3 and those trained
//! here.
//!
//! It gives the tokens of the `tokenizers` crate without tracking offsets: scan a word, look it up in a
//! cache, and merge it if it is new. Files with other features (unknown tokens, other regular expressions)
//! are left to that crate.

use std::collections::HashMap;

use serde_json::Value;

use super::merge::{self, Caches, FastMap, Merges, WordCache};
use super::words::{Digits, WordPattern, Words};

/// A byte-level BPE vocabulary: byte tokens and ranked merges.
#[derive(Debug)]
pub(super) struct ByteBpe {
    /// The tokens of bytes. That of a byte without one is never read.
    byte_ids: [u32; 256],
    /// Bytes without a token: some vocabularies lack control characters (SmolLM2).
    missing: Option<Box<[bool; 256]>>,
    merges: Merges,
    /// Words that are tokens and skip the merges, for vocabularies with `ignore_merges`.
    whole_words: Option<FastMap<Box<[u8]>, u32>>,
    words: Option<Words>,
    caches: Caches,
}

impl ByteBpe {
    /// Reads the vocabulary from a parsed `tokenizer.json`; `None` if it is of another kind.
    pub(super) fn from_json(json: &Value) -> Option<ByteBpe> {
        let model = json.get("model")?;
        let is_bpe = model.get("type").is_none_or(|t| t == "BPE");
        let others = ["unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"];
        if !is_bpe || !merge::are_all_off(model, &others) {
            return None;
        }
        let vocab = model.get("vocab")?.as_object()?;
        let id_of = |token: &str| vocab.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let (mut byte_ids, mut missing) = ([0; 256], [false; 256]);
        for byte in 0..=255_u8 {
            match id_of(byte_char(byte).encode_utf8(&mut [0; 4])) {
                Some(id) => byte_ids[byte as usize] = id,
                None => missing[byte as usize] = true,
            }
        }
        let missing = missing.contains(&true).then(|| Box::new(missing));
        let merges = merge::rank_merges(&merge::parse_merges(model)?, id_of)?;
        let words = words(json.get("pre_tokenizer")?)?;
        if words.is_none() && !merges.is_empty() {
            return None;
        }
        let ignore_merges = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
        let whole_words = ignore_merges.then(|| {
            vocab.keys().filter_map(|token| Some((token_bytes(token)?.into(), id_of(token)?))).collect()
        });
        Some(ByteBpe { byte_ids, missing, merges, whole_words, words, caches: Caches::default() })
    }

    /// True if there are no merges, so that text may be split anywhere.
    pub(super) fn is_bytes_only(&self) -> bool {
        self.words.is_none()
    }

    /// True if a byte of `text` has no token, so that the `tokenizers` crate must encode it.
    pub(super) fn lacks_byte_of(&self, text: &str) -> bool {
        self.missing.as_ref().is_some_and(|missing| text.bytes().any(|byte| missing[byte as usize]))
    }

    /// Appends the tokens of `text`, whose bytes all have one.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let Some(words) = self.words else {
            out.extend(text.bytes().map(|b| self.byte_ids[b as usize]));
            return;
        };
        self.caches.with(|cache| words.each(text, |word| self.encode_word(word.as_bytes(), cache, out)));
    }

    fn encode_word(&self, word: &[u8], cache: &mut WordCache, out: &mut Vec<u32>) {
        if let Some(&id) = self.whole_words.as_ref().and_then(|words| words.get(word)) {
            out.push(id);
        } else if let [byte] = word {
            out.push(self.byte_ids[*byte as usize]);
        } else {
            cache.encode(word, out, || {
                let ids = word.iter().map(|&b| self.byte_ids[b as usize]).collect();
                merge::merge(ids, &self.merges)
            });
        }
    }
}

/// The word splitting of a `pre_tokenizer` entry; `Some(None)` for bytes without words, `None` for an unknown
/// entry.
fn words(pre_tokenizer: &Value) -> Option<Option<Words>> {
    let byte_level = |step: &Value| {
        (step.get("type")? == "ByteLevel" && step.get("add_prefix_space")? == false)
            .then(|| step.get("use_regex").and_then(Value::as_bool).unwrap_or(true))
    };
    let gpt2 = |digits| Words { pattern: WordPattern::Gpt2, digits };
    if let Some(use_regex) = byte_level(pre_tokenizer) {
        return Some(use_regex.then_some(gpt2(Digits::InWords)));
    }
    let [first, bytes] = pre_tokenizer.get("pretokenizers")?.as_array()?.as_slice() else { return None };
    let use_regex = byte_level(bytes)?;
    match first.get("type")?.as_str()? {
        "Digits" if use_regex => {
            let alone = first.get("individual_digits").and_then(Value::as_bool).unwrap_or(false);
            Some(Some(gpt2(if alone { Digits::Alone } else { Digits::Together })))
        }
        "Split" if !use_regex => {
            let isolated = first.get("behavior")? == "Isolated"
                && first.get("invert").is_none_or(|invert| invert == false);
            let pattern = WordPattern::from_regex(first.get("pattern")?.get("Regex")?.as_str()?)?;
            isolated.then_some(Some(Words { pattern, digits: Digits::InWords }))
        }
        _ => None,
    }
}

/// The printable character that represents a byte in byte-level vocabularies (Radford et al. 2019, GPT-2).
pub(super) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return byte as char;
    }
    let earlier = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + earlier).expect("256 to 511 are characters")
}

/// The bytes that a token's printable characters represent; `None` if a character represents none.
fn token_bytes(token: &str) -> Option<Vec<u8>> {
    static BYTES: std::sync::LazyLock<HashMap<char, u8>> =
        std::sync::LazyLock::new(|| (0..=255).map(|b| (byte_char(b), b)).collect());
    token.chars().map(|c| BYTES.get(&c).copied()).collect()
}
