//! BPE over characters with marked spaces: the fast path for Llama 2, Mistral and other vocabularies from
//! SentencePiece.
//!
//! Such a tokenizer replaces each space by ▁, puts one before the text, and merges the characters of the
//! whole text. Unknown characters are encoded as bytes. There are no words, but two adjacent characters that
//! are adjacent in no token are never merged, nor is anything across them. The text is therefore split there
//! into runs, mostly words with the space before them, and merging the runs one by one gives the tokens of
//! the whole text.

use std::collections::HashSet;
use std::hash::BuildHasherDefault;

use serde_json::Value;

use super::merge::{self, Caches, FastMap, Merges, WordCache, WordHasher};

/// Replacement of a space.
const MARK: char = '▁';

/// A vocabulary of characters, bytes for unknown characters, and ranked merges.
#[derive(Debug)]
pub(super) struct SpaceBpe {
    chars: FastMap<char, u32>,
    byte_ids: [u32; 256],
    merges: Merges,
    neighbours: Neighbours,
    prefix: Prefix,
    /// True if the normalizer replaces spaces; otherwise the pre-tokenizer does.
    normalizes: bool,
    caches: Caches,
}

/// Prefix that is added to a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    /// None.
    None,
    /// A mark.
    Mark,
    /// A mark, unless the text starts with one.
    MarkOnce,
}

impl SpaceBpe {
    /// Reads the vocabulary from a parsed `tokenizer.json`; `None` if it is of another kind.
    pub(super) fn from_json(json: &Value) -> Option<SpaceBpe> {
        let model = json.get("model")?;
        let others = ["continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"];
        let falls_back = model.get("byte_fallback").is_some_and(|fallback| fallback == true);
        if model.get("type").is_some_and(|t| t != "BPE") || !falls_back || !merge::are_all_off(model, &others)
        {
            return None;
        }
        let Spaces { prefix, splits, normalizes } =
            spaces(json.get("normalizer"), json.get("pre_tokenizer"))?;
        let vocab = model.get("vocab")?.as_object()?;
        let id_of = |token: &str| vocab.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut byte_ids = [0; 256];
        for (byte, id) in byte_ids.iter_mut().enumerate() {
            *id = id_of(&format!("<0x{byte:02X}>"))?;
        }
        let mut chars = FastMap::default();
        for token in vocab.keys() {
            let mut characters = token.chars();
            if let (Some(only), None) = (characters.next(), characters.next()) {
                chars.insert(only, id_of(token)?);
            }
        }
        let listed = merge::parse_merges(model)?;
        let merges = merge::rank_merges(&listed, id_of)?;
        // Merges of byte tokens could span the boundaries of runs.
        let is_byte = |id: &u32| byte_ids.contains(id);
        if merges.iter().any(|((left, right), (_, merged))| [left, right, merged].into_iter().any(is_byte)) {
            return None;
        }
        let mut neighbours = Neighbours::default();
        for (left, right) in listed {
            let mut before = None;
            for c in left.chars().chain(right.chars()) {
                // If the file splits before marks, no merge spans that position.
                if let Some(before) = before.filter(|_| !(splits && c == MARK)) {
                    neighbours.insert(before, c);
                }
                before = Some(c);
            }
        }
        Some(SpaceBpe { chars, byte_ids, merges, neighbours, prefix, normalizes, caches: Caches::default() })
    }

    /// The prefix of a text.
    pub(super) fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// True if a token may span the position before a space.
    pub(super) fn joins_before_spaces(&self) -> bool {
        self.neighbours.any(|before, after| before != MARK && after == MARK)
    }

    /// True if a token may span a side of a newline.
    pub(super) fn joins_newlines(&self) -> bool {
        self.neighbours.any(|before, after| before == '\n' || after == '\n')
    }

    /// True if the normalizer replaces spaces, so that the normalized text is [`SpaceBpe::mark`]'s.
    pub(super) fn normalizes(&self) -> bool {
        self.normalizes
    }

    /// `text` with its spaces replaced. Only the start of a document gets the prefix.
    pub(super) fn mark(&self, text: &str, begins_document: bool) -> String {
        let mut marked = String::with_capacity(text.len() + text.len() / 2);
        let is_marked = text.starts_with([' ', MARK]);
        let wants_mark = match self.prefix {
            Prefix::None => false,
            Prefix::Mark => true,
            Prefix::MarkOnce => !is_marked,
        };
        if begins_document && wants_mark && !text.is_empty() {
            marked.push(MARK);
        }
        marked.extend(text.chars().map(|c| if c == ' ' { MARK } else { c }));
        marked
    }

    /// Appends the tokens of a text whose spaces are replaced.
    pub(super) fn encode_marked(&self, marked: &str, out: &mut Vec<u32>) {
        self.caches.with(|cache| {
            let mut start = 0;
            let mut before = None;
            for (at, c) in marked.char_indices() {
                if before.is_some_and(|before| !self.neighbours.contains(before, c)) {
                    self.encode_run(&marked[start..at], cache, out);
                    start = at;
                }
                before = Some(c);
            }
            self.encode_run(&marked[start..], cache, out);
        });
    }

    fn encode_run(&self, run: &str, cache: &mut WordCache, out: &mut Vec<u32>) {
        let mut chars = run.chars();
        match (chars.next(), chars.next()) {
            (None, _) => {}
            (Some(only), None) => self.push_char(only, out),
            _ => cache.encode(run.as_bytes(), out, || {
                let mut ids = Vec::with_capacity(run.len());
                run.chars().for_each(|c| self.push_char(c, &mut ids));
                merge::merge(ids, &self.merges)
            }),
        }
    }

    fn push_char(&self, c: char, out: &mut Vec<u32>) {
        match self.chars.get(&c) {
            Some(&id) => out.push(id),
            None => out.extend(c.encode_utf8(&mut [0; 4]).bytes().map(|b| self.byte_ids[b as usize])),
        }
    }
}

/// Treatment of spaces.
struct Spaces {
    prefix: Prefix,
    /// True if the text is split before each mark.
    splits: bool,
    normalizes: bool,
}

/// The treatment of spaces; `None` if the file processes text in another way.
fn spaces(normalizer: Option<&Value>, pre_tokenizer: Option<&Value>) -> Option<Spaces> {
    let is_absent = |value: Option<&Value>| value.is_none_or(Value::is_null);
    let is = |value: &Value, kind: &str| value.get("type").is_some_and(|t| t == kind);
    let is_space = |step: &Value| step.get("pattern").and_then(|p| p.get("String")).is_some_and(|p| p == " ");
    let mark = MARK.to_string();
    // Gemma's step splits at spaces, of which the normalizer leaves none.
    if is_absent(pre_tokenizer) || pre_tokenizer.is_some_and(|step| is(step, "Split") && is_space(step)) {
        let normalizer = normalizer?;
        let steps = match normalizer.get("normalizers") {
            Some(steps) if is(normalizer, "Sequence") => steps.as_array()?.as_slice(),
            _ => std::slice::from_ref(normalizer),
        };
        let prepends = |step: &Value| is(step, "Prepend") && step.get("prepend").is_some_and(|p| *p == mark);
        let replaces = |step: &Value| {
            is(step, "Replace") && is_space(step) && step.get("content").is_some_and(|c| *c == mark)
        };
        let prefix = match steps {
            [only] if replaces(only) => Prefix::None,
            [first, second] if prepends(first) && replaces(second) => Prefix::Mark,
            _ => return None,
        };
        return Some(Spaces { prefix, splits: false, normalizes: true });
    }
    let space = pre_tokenizer.filter(|step| is_absent(normalizer) && is(step, "Metaspace"))?;
    if space.get("replacement").is_none_or(|r| *r != mark) {
        return None;
    }
    let prefix = match space.get("prepend_scheme").and_then(Value::as_str) {
        _ if space.get("add_prefix_space").is_some_and(|add| add == false) => Prefix::None,
        Some("never") => Prefix::None,
        Some("first" | "always") | None => Prefix::MarkOnce,
        Some(_) => return None,
    };
    let splits = space.get("split").and_then(Value::as_bool).unwrap_or(true);
    Some(Spaces { prefix, splits, normalizes: false })
}

/// Pairs of characters that are adjacent in some token.
#[derive(Debug)]
struct Neighbours {
    pairs: HashSet<(char, char), BuildHasherDefault<WordHasher>>,
    /// Bit table for pairs of ASCII characters and the mark, which are the most frequent.
    common: Vec<bool>,
}

/// Number of characters in the table of common pairs.
const SLOTS: usize = 129;

impl Default for Neighbours {
    fn default() -> Self {
        Neighbours { pairs: HashSet::default(), common: vec![false; SLOTS * SLOTS] }
    }
}

impl Neighbours {
    fn insert(&mut self, before: char, after: char) {
        self.pairs.insert((before, after));
        if let Some(slot) = common_slot(before, after) {
            self.common[slot] = true;
        }
    }

    fn contains(&self, before: char, after: char) -> bool {
        match common_slot(before, after) {
            Some(slot) => self.common[slot],
            None => self.pairs.contains(&(before, after)),
        }
    }

    fn any(&self, mut is: impl FnMut(char, char) -> bool) -> bool {
        self.pairs.iter().any(|&(before, after)| is(before, after))
    }
}

fn common_slot(before: char, after: char) -> Option<usize> {
    let slot = |c: char| match c {
        MARK => Some(SLOTS - 1),
        c => c.is_ascii().then_some(c as usize),
    };
    Some(slot(before)? * SLOTS + slot(after)?)
}
