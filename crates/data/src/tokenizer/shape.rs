//! Bounds of a `tokenizer.json`, checked before it is parsed.
//!
//! Parsing takes memory for each token and merge several times over. A first pass reads the file without
//! storing anything and refuses what no tokenizer has.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Maximum size of the file. The largest published ones have some 70 MB.
pub(super) const MAX_FILE_BYTES: u64 = 256 << 20;
/// Maximum number of tokens. The largest published vocabulary has 901,629.
const MAX_TOKENS: u64 = 1 << 20;
/// Maximum number of merges.
const MAX_MERGES: u64 = 4 << 20;
/// Maximum length of a token in bytes.
const MAX_TOKEN_BYTES: usize = 64 << 10;
/// Maximum number of added tokens. An automaton with a state for each of their bytes finds them.
const MAX_ADDED: u64 = 1 << 18;
/// Maximum size of all names of added tokens.
const MAX_ADDED_BYTES: u64 = 16 << 20;
/// Maximum size of any other entry of the file.
const MAX_OTHER_BYTES: u64 = 16 << 20;
/// Maximum size of an expression, and of all of them. Published ones have at most 1 KiB; the engine compiles
/// some in quadratic time.
const MAX_EXPRESSION_BYTES: usize = 8 << 10;
const MAX_EXPRESSIONS_BYTES: usize = 64 << 10;
/// Maximum number of tokens of several characters that a model without merges may have.
const MAX_UNREACHED: u64 = 100_000;

/// Refuses a file that is not JSON, or is out of proportion. The error is the problem, for a message.
pub(super) fn check(json: &[u8]) -> Result<(), String> {
    let mut parser = serde_json::Deserializer::from_slice(json);
    let checked = FileShape.deserialize(&mut parser).and_then(|problem| parser.end().map(|()| problem));
    match checked {
        Ok(None) => Ok(()),
        Ok(Some(problem)) => Err(problem),
        Err(error) => Err(format!("is not JSON: {error}")),
    }
}

/// Number of tokens, and the sizes of their names.
#[derive(Default)]
struct Counted {
    entries: u64,
    bytes: u64,
    longest: usize,
    /// Names of several characters that are not those of bytes.
    multiple: u64,
}

impl Counted {
    fn add(&mut self, name: &str) {
        self.entries += 1;
        self.bytes += name.len() as u64;
        self.longest = self.longest.max(name.len());
        let is_byte = name.len() == 6 && name.starts_with("<0x");
        self.multiple += u64::from(name.chars().nth(1).is_some() && !is_byte);
    }
}

/// The whole file: visits its entries and returns the first problem.
struct FileShape;

impl<'de> DeserializeSeed<'de> for FileShape {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, file: D) -> Result<Self::Value, D::Error> {
        file.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FileShape {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut file: A) -> Result<Self::Value, A::Error> {
        let mut problem = None;
        while let Some(key) = file.next_key::<String>()? {
            let found = match key.as_str() {
                "model" => file.next_value_seed(Model)?,
                "added_tokens" => {
                    let mut added = Weight::default();
                    file.next_value_seed(&mut added)?;
                    if added.items > MAX_ADDED {
                        Some(format!("has {} added tokens, more than {MAX_ADDED}", added.items))
                    } else {
                        too_large("added_tokens", added.bytes, MAX_ADDED_BYTES)
                    }
                }
                _ => {
                    let mut other = Weight::default();
                    file.next_value_seed(&mut other)?;
                    too_large(&key, other.bytes, MAX_OTHER_BYTES)
                }
            };
            problem = problem.or(found);
        }
        Ok(problem)
    }
}

fn too_large(key: &str, bytes: u64, most: u64) -> Option<String> {
    let name: String = key.chars().take(40).collect();
    (bytes > most).then(|| format!("has {} MiB under {name:?}, more than {} MiB", bytes >> 20, most >> 20))
}

/// The entry `model`.
struct Model;

impl<'de> DeserializeSeed<'de> for Model {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, model: D) -> Result<Self::Value, D::Error> {
        model.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Model {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object under \"model\"")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut model: A) -> Result<Self::Value, A::Error> {
        let (mut tokens, mut merges, mut other) = (Counted::default(), None, Weight::default());
        let (mut is_bpe, mut ignores_merges) = (true, false);
        while let Some(key) = model.next_key::<String>()? {
            match key.as_str() {
                "vocab" => model.next_value_seed(Vocabulary(&mut tokens))?,
                "merges" => {
                    let mut list = Weight::default();
                    model.next_value_seed(&mut list)?;
                    merges = Some(list.items);
                }
                "type" => is_bpe = model.next_value::<Value>()? == "BPE",
                "ignore_merges" => ignores_merges = model.next_value::<Value>()? == true,
                _ => model.next_value_seed(&mut other)?,
            }
        }
        let problem = if tokens.entries > MAX_TOKENS {
            Some(format!("has {} tokens, more than the {MAX_TOKENS} that xtrain reads", tokens.entries))
        } else if tokens.longest > MAX_TOKEN_BYTES {
            Some(format!(
                "has a token of {} KiB, more than {} KiB",
                tokens.longest >> 10,
                MAX_TOKEN_BYTES >> 10
            ))
        } else if merges > Some(MAX_MERGES) {
            Some(format!("has {} merges, more than {MAX_MERGES}", merges.unwrap_or(0)))
        } else if is_bpe && merges == Some(0) && !ignores_merges && tokens.multiple > MAX_UNREACHED {
            Some(format!(
                "has no merges, so that no text has its {} tokens of several characters",
                tokens.multiple
            ))
        } else {
            too_large("model", other.bytes, MAX_OTHER_BYTES)
        };
        Ok(problem)
    }
}

/// A vocabulary: an object of ids, or a list of tokens, alone or with scores.
struct Vocabulary<'c>(&'c mut Counted);

impl<'de> DeserializeSeed<'de> for Vocabulary<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Vocabulary<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut tokens: A) -> Result<(), A::Error> {
        while tokens.next_key_seed(Name(self.0))?.is_some() {
            tokens.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut tokens: A) -> Result<(), A::Error> {
        while tokens.next_element_seed(Name(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// A token of a vocabulary, possibly in a list with its score.
struct Name<'c>(&'c mut Counted);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, name: D) -> Result<(), D::Error> {
        name.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Name<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E>(self, name: &str) -> Result<(), E> {
        self.0.add(name);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<(), A::Error> {
        pair.next_element_seed(Name(self.0))?;
        while pair.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

/// Size of any value: the bytes of its texts, and some for each item.
#[derive(Default)]
struct Weight {
    bytes: u64,
    /// Number of items of the value itself.
    items: u64,
}

impl Weight {
    /// Bytes for a number, or for the structure of a list or an object.
    const ITEM: u64 = 16;

    fn add<'de, A: SeqAccess<'de>>(&mut self, items: &mut A) -> Result<bool, A::Error> {
        let mut item = Weight::default();
        let found = items.next_element_seed(&mut item)?.is_some();
        self.bytes += item.bytes;
        self.items += u64::from(found);
        Ok(found)
    }
}

impl<'de> DeserializeSeed<'de> for &mut Weight {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        self.bytes += Weight::ITEM;
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Weight {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.bytes += text.len() as u64;
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while self.add(&mut items)? {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        loop {
            let mut key = Weight::default();
            if entries.next_key_seed(&mut key)?.is_none() {
                return Ok(());
            }
            let mut value = Weight::default();
            entries.next_value_seed(&mut value)?;
            self.bytes += key.bytes + value.bytes;
            self.items += 1;
        }
    }
}

/// Refuses expressions out of proportion, in all parts of a parsed file but the model.
pub(super) fn check_expressions(file: &Value) -> Result<(), String> {
    fn add(value: &Value, total: &mut usize) -> Result<(), String> {
        let pattern = value.get("pattern").and_then(Value::as_object);
        for text in pattern.into_iter().flatten().filter_map(|(_, text)| text.as_str()) {
            *total += text.len();
            if text.len() > MAX_EXPRESSION_BYTES {
                let (len, most) = (text.len() >> 10, MAX_EXPRESSION_BYTES >> 10);
                return Err(format!("has a pattern of {len} KiB, more than {most} KiB"));
            }
        }
        match value {
            Value::Object(entries) => entries.values().try_for_each(|value| add(value, total)),
            Value::Array(items) => items.iter().try_for_each(|value| add(value, total)),
            _ => Ok(()),
        }
    }
    let mut total = 0;
    let parts = file.as_object().into_iter().flatten().filter(|(key, _)| *key != "model");
    parts.map(|(_, part)| part).try_for_each(|part| add(part, &mut total))?;
    match total > MAX_EXPRESSIONS_BYTES {
        true => {
            Err(format!("has patterns of {} KiB, more than {} KiB", total >> 10, MAX_EXPRESSIONS_BYTES >> 10))
        }
        false => Ok(()),
    }
}

/// Refuses character maps that declare a larger size than they have. The `tokenizers` crate allocates the
/// declared size, and an allocation that is too large ends the process.
pub(super) fn check_charsmaps(normalizer: &Value) -> std::result::Result<(), String> {
    const KEY: &str = "precompiled_charsmap";
    if let Some(map) = normalizer.get(KEY).and_then(Value::as_str)
        && let Some(declared) = charsmap_bytes(map)
        && declared as usize > map.len()
    {
        return Err(format!("its {KEY} declares {declared} bytes, more than it has"));
    }
    match normalizer {
        Value::Object(entries) => entries.values().try_for_each(check_charsmaps),
        Value::Array(items) => items.iter().try_for_each(check_charsmaps),
        _ => Ok(()),
    }
}

/// The declared size at the start of a character map, a little-endian number in base64; `None` if it is
/// invalid.
fn charsmap_bytes(base64: &str) -> Option<u32> {
    let head = base64.get(..8).or_else(|| base64.get(..6))?;
    decoded(head).first_chunk().map(|size| u32::from_le_bytes(*size))
}

/// Bytes of the longest text that a character map puts in place of another; `None` if it is invalid. After
/// the size of a trie and the trie, in bytes, come the texts, each ended by a zero.
pub(super) fn longest_of_charsmap(base64: &str) -> Option<u64> {
    let map = decoded(base64);
    let (size, rest) = map.split_first_chunk()?;
    let texts = rest.get(u32::from_le_bytes(*size) as usize..)?;
    texts.split(|&byte| byte == 0).map(|text| text.len() as u64).max()
}

/// The bytes that text in base64 stands for, up to its first other character.
fn decoded(base64: &str) -> Vec<u8> {
    let sixth = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = base64.bytes().map_while(sixth).collect();
    let bytes_of = |digits: &[u8]| {
        let bits = digits.iter().fold(0u32, |bits, &digit| bits << 6 | u32::from(digit));
        // Each byte takes 8 of 6 bits a digit.
        let [_, bytes @ ..] = (bits << (6 * (4 - digits.len()))).to_be_bytes();
        bytes.into_iter().take(digits.len() * 6 / 8)
    };
    digits.chunks(4).flat_map(bytes_of).collect()
}
