//! Encoder of texts that are longer than the `tokenizers` crate encodes at a time.
//!
//! The crate stores strings and offsets for each word of a text, some 300 bytes for each of its bytes. Here
//! the first steps of a pre-tokenizer split the text without storing its words, and the crate applies the
//! other steps and the model to short groups of them. Each step sees the text that it sees in the crate, so
//! the tokens are those of the whole text, whatever the expression looks at around a match.

use std::ops::Range;

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    SplitDelimiterBehavior, normalizer,
};

use super::MAX_HF_BYTES;
use super::words::GPT2;
use crate::catch_panic::catch_panic;

/// Text whose words are in memory at a time, unless a word is longer.
const GROUP_BYTES: usize = 1 << 20;

type Found<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The steps of a pre-tokenizer, the first of which can split long texts.
#[derive(Debug)]
pub(super) struct LongText {
    steps: Vec<PreTokenizerWrapper>,
    levels: Vec<Level>,
    group_bytes: usize,
}

/// A step that splits long texts, and the steps after it.
#[derive(Debug)]
struct Level {
    splitter: Splitter,
    rest: Vec<PreTokenizerWrapper>,
}

/// Splits as the step of this name in the `tokenizers` crate does.
#[derive(Debug)]
enum Splitter {
    /// Around the matches of an expression.
    Expression(Split),
    /// Around single characters.
    Characters { is_match: Characters, behavior: SplitDelimiterBehavior },
}

#[derive(Debug, Clone, Copy)]
enum Characters {
    Numeric,
    WhiteSpace,
    Only(char),
}

impl LongText {
    /// The steps of `tokenizer`; `None` if its first step cannot split long texts.
    pub(super) fn from_tokenizer(tokenizer: &tokenizers::Tokenizer) -> Option<LongText> {
        let mut steps = Vec::new();
        flatten(tokenizer.get_pre_tokenizer()?, &mut steps);
        // This step asks where in the document its text is.
        let asks_place = |step: &PreTokenizerWrapper| match step {
            PreTokenizerWrapper::Metaspace(step) => step.prepend_scheme == PrependScheme::First,
            _ => false,
        };
        if steps.iter().any(asks_place) {
            return None;
        }
        let mut levels = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            let mut rest = steps[number + 1..].to_vec();
            let splitter = match step {
                PreTokenizerWrapper::Split(split) => Splitter::Expression(split.clone()),
                PreTokenizerWrapper::ByteLevel(bytes) if bytes.use_regex && !bytes.add_prefix_space => {
                    rest.insert(0, ByteLevel::new(false, bytes.trim_offsets, false).into());
                    let words = SplitPattern::Regex(GPT2.to_owned());
                    Splitter::Expression(Split::new(words, SplitDelimiterBehavior::Isolated, false).ok()?)
                }
                PreTokenizerWrapper::Digits(digits) => Splitter::Characters {
                    is_match: Characters::Numeric,
                    behavior: match digits.individual_digits {
                        true => SplitDelimiterBehavior::Isolated,
                        false => SplitDelimiterBehavior::Contiguous,
                    },
                },
                PreTokenizerWrapper::WhitespaceSplit(_) => Splitter::removing(Characters::WhiteSpace),
                PreTokenizerWrapper::Delimiter(step) => Splitter::removing(Characters::Only(step.delimiter)),
                _ => break,
            };
            levels.push(Level { splitter, rest });
            // The text after it is another one.
            if matches!(step, PreTokenizerWrapper::ByteLevel(_)) {
                break;
            }
        }
        (!levels.is_empty()).then_some(LongText { steps, levels, group_bytes: GROUP_BYTES })
    }

    /// Encodes `text` with the other parts of `tokenizer`. The error is the problem, for a message.
    pub(super) fn encode(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, String> {
        let mut encoder = Encoder { long: self, tokenizer, ids: Vec::with_capacity(text.len() / 3) };
        let has_added = !tokenizer.get_added_vocabulary().is_empty();
        catch_panic(|| {
            if tokenizer.get_normalizer().is_none() && !has_added {
                return encoder.split(text, 0);
            }
            let normalizer = tokenizer.get_normalizer();
            let parts = tokenizer.get_added_vocabulary().extract_and_normalize(normalizer, text);
            for (part, _, tokens) in parts.get_splits(OffsetReferential::Normalized, OffsetType::None) {
                match tokens {
                    Some(tokens) => encoder.ids.extend(tokens.iter().map(|token| token.id)),
                    None => encoder.split(part, 0)?,
                }
            }
            Ok(())
        })?;
        Ok(encoder.ids)
    }
}

fn flatten(step: &PreTokenizerWrapper, steps: &mut Vec<PreTokenizerWrapper>) {
    match step {
        PreTokenizerWrapper::Sequence(sequence) => {
            sequence.as_ref().iter().for_each(|step| flatten(step, steps));
        }
        step => steps.push(step.clone()),
    }
}

struct Encoder<'t> {
    long: &'t LongText,
    tokenizer: &'t tokenizers::Tokenizer,
    ids: Vec<u32>,
}

impl Encoder<'_> {
    /// Encodes a text that the steps before `level` have split off.
    fn split(&mut self, text: &str, level: usize) -> Found<()> {
        let long = self.long;
        let is_last = level == long.levels.len();
        if text.len() <= long.group_bytes || is_last && text.len() <= MAX_HF_BYTES {
            let steps = level.checked_sub(1).map_or(&long.steps, |level| &long.levels[level].rest);
            return self.encode(text, std::slice::from_ref(&(0..text.len())), steps);
        }
        let Some(Level { splitter, rest }) = long.levels.get(level) else {
            let (words, most) = (text.len().div_ceil(1 << 20), MAX_HF_BYTES >> 20);
            return Err(format!("a word takes {words} MiB, and words are encoded up to {most} MiB").into());
        };
        let mut group: Vec<Range<usize>> = Vec::new();
        splitter.each(text, &mut |piece| {
            let start = group.first().map_or(piece.start, |first| first.start);
            if piece.end - start > long.group_bytes {
                self.encode(text, &std::mem::take(&mut group), rest)?;
            }
            if piece.len() > long.group_bytes {
                return self.split(&text[piece], level + 1);
            }
            group.push(piece);
            Ok(())
        })?;
        self.encode(text, &group, rest)
    }

    /// Encodes pieces of `text`, which are in order, with the `steps` that come next.
    fn encode(&mut self, text: &str, pieces: &[Range<usize>], steps: &[PreTokenizerWrapper]) -> Found<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Ok(()) };
        let start = first.start;
        let mut words = PreTokenizedString::from(&text[start..last.end]);
        words.split(|_, text| {
            let slice = |piece: &Range<usize>| {
                text.slice(normalizer::Range::Normalized(piece.start - start..piece.end - start))
            };
            let slices: Option<Vec<_>> = pieces.iter().map(slice).collect();
            slices.ok_or_else(|| "a match ends within a character".into())
        })?;
        for step in steps {
            step.pre_tokenize(&mut words)?;
        }
        self.tokenizer.get_model().tokenize_in_pretokenized(&mut words, None)?;
        let encoding = words.into_encoding(None, 0, OffsetType::None)?;
        self.ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

impl Splitter {
    fn removing(is_match: Characters) -> Splitter {
        Splitter::Characters { is_match, behavior: SplitDelimiterBehavior::Removed }
    }

    /// Calls `each` with the pieces of `text`, in order.
    fn each(&self, text: &str, each: &mut dyn FnMut(Range<usize>) -> Found<()>) -> Found<()> {
        match self {
            Splitter::Expression(split) => {
                let matches = split.regex.find_iter(text);
                join(stretches(matches, text.len()), split.behavior, split.invert, each)
            }
            Splitter::Characters { is_match, behavior } => {
                let is_match = |c: char| match is_match {
                    Characters::Numeric => c.is_numeric(),
                    Characters::WhiteSpace => c.is_whitespace(),
                    Characters::Only(only) => c == *only,
                };
                let matches = text.char_indices().filter(|&(_, c)| is_match(c));
                let matches = matches.map(|(at, c)| (at, at + c.len_utf8()));
                join(stretches(matches, text.len()), *behavior, false, each)
            }
        }
    }
}

/// The matches in a text of `len` bytes, with `true`, and the text between them.
fn stretches(
    matches: impl Iterator<Item = (usize, usize)>,
    len: usize,
) -> impl Iterator<Item = (Range<usize>, bool)> {
    let mut at = 0;
    matches.map(Some).chain([None]).flat_map(move |found| {
        let (start, end) = found.unwrap_or((len, len));
        let between = (at != start).then_some((at..start, false));
        at = end;
        between.into_iter().chain(found.map(|_| (start..end, true)))
    })
}

/// Calls `each` with the pieces that `behavior` forms of `stretches`.
fn join(
    stretches: impl Iterator<Item = (Range<usize>, bool)>,
    behavior: SplitDelimiterBehavior,
    inverted: bool,
    each: &mut dyn FnMut(Range<usize>) -> Found<()>,
) -> Found<()> {
    let joins = |before: bool, is_match: bool| match behavior {
        SplitDelimiterBehavior::Isolated | SplitDelimiterBehavior::Removed => false,
        SplitDelimiterBehavior::Contiguous => before == is_match,
        SplitDelimiterBehavior::MergedWithPrevious => !before && is_match,
        SplitDelimiterBehavior::MergedWithNext => before && !is_match,
    };
    let is_removed = |is_match: bool| is_match && behavior == SplitDelimiterBehavior::Removed;
    let mut each_piece =
        |(piece, is_match): (Range<usize>, bool)| match piece.is_empty() || is_removed(is_match) {
            true => Ok(()),
            false => each(piece),
        };
    let mut waiting: Option<(Range<usize>, bool)> = None;
    for (stretch, is_match) in stretches {
        let is_match = is_match != inverted;
        waiting = match waiting {
            Some((piece, before)) if joins(before, is_match) => Some((piece.start..stretch.end, is_match)),
            piece => {
                piece.map_or(Ok(()), &mut each_piece)?;
                Some((stretch, is_match))
            }
        };
    }
    waiting.map_or(Ok(()), each_piece)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tokenizers::Tokenizer;

    use super::LongText;

    const BEHAVIORS: [&str; 5] =
        ["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"];
    const EXPRESSIONS: [&str; 10] = [
        r"\w+|\s+(?!\S)|\s+|[^\s\w]",
        r"^a|b$",
        r"(?<=a)\w|\n",
        r"\b\w+",
        "a*",
        " ",
        "[ab]+",
        r"\p{N}{1,2}+",
        r"(?=b)|1",
        r"\G\w",
    ];

    /// A model whose tokens show where a text is split: pairs of characters from the left.
    fn tokenizer(normalizer: &Value, steps: &[Value]) -> Tokenizer {
        let characters: Vec<char> = "ab1é. \nĠĊ\u{301}".chars().collect();
        let mut vocab = serde_json::Map::new();
        let mut merges = Vec::new();
        for c in &characters {
            vocab.insert(c.to_string(), vocab.len().into());
        }
        for (a, b) in characters.iter().flat_map(|a| characters.iter().map(move |b| (a, b))) {
            vocab.insert(format!("{a}{b}"), vocab.len().into());
            merges.push(json!([a, b]));
        }
        let added = |id: usize, content: &str, normalized: bool| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": true, "rstrip": false,
                "normalized": normalized, "special": false,
            })
        };
        let added = [added(vocab.len(), "a1b", false), added(vocab.len() + 1, "é1", true)];
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "."},
        });
        Tokenizer::from_bytes(file.to_string()).unwrap()
    }

    fn metaspace(scheme: &str) -> Value {
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true})
    }

    fn split() -> impl Strategy<Value = Value> {
        (prop::sample::select(&EXPRESSIONS[..]), prop::sample::select(&BEHAVIORS[..]), any::<bool>()).prop_map(
            |(regex, behavior, invert)| {
                json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert})
            },
        )
    }

    fn step() -> impl Strategy<Value = Value> {
        let bytes = |(add_prefix_space, use_regex): (bool, bool)| {
            json!({
                "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex,
            })
        };
        prop_oneof![
            6 => split(),
            1 => any::<bool>().prop_map(|alone| json!({"type": "Digits", "individual_digits": alone})),
            1 => Just(json!({"type": "WhitespaceSplit"})),
            1 => Just(json!({"type": "CharDelimiterSplit", "delimiter": "1"})),
            1 => Just(json!({"type": "Punctuation", "behavior": "Contiguous"})),
            1 => Just(metaspace("always")),
            1 => Just(metaspace("never")),
            2 => any::<(bool, bool)>().prop_map(bytes),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn groups_of_words_have_the_tokens_of_the_whole_text(
            steps in prop::collection::vec(step(), 1..4),
            normalizer in prop::sample::select(vec![json!(null), json!({"type": "NFC"}), json!({"type": "Lowercase"})]),
            group_bytes in 1_usize..12,
            texts in prop::collection::vec("[ab1é. \n\u{301}]{0,40}", 8),
        ) {
            let tokenizer = tokenizer(&normalizer, &steps);
            let Some(mut long) = LongText::from_tokenizer(&tokenizer) else { return Ok(()) };
            long.group_bytes = group_bytes;
            for text in texts {
                let expected = tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
                prop_assert_eq!(long.encode(&tokenizer, &text).unwrap(), expected, "{:?}", text);
            }
        }
    }

    #[test]
    fn a_step_that_asks_for_the_place_of_its_text_needs_the_whole_text() {
        let steps = |scheme: &str| {
            let steps = [json!({"type": "WhitespaceSplit"}), metaspace(scheme)];
            LongText::from_tokenizer(&tokenizer(&Value::Null, &steps)).is_some()
        };
        assert_eq!(["always", "never", "first"].map(steps), [true, true, false]);
    }
}
