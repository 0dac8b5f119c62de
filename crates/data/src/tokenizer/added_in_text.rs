//! Added tokens that are recognised in documents: all but special ones.
//!
//! The `tokenizers` crate looks for the names of some in the text, and for the normalized names of others in
//! the normalized text. A fast path encodes only text in which none occurs.

use aho_corasick::AhoCorasick;
use tokenizers::{AddedToken, NormalizedString, Normalizer, NormalizerWrapper};

use super::cut_rule::{CutRule, NewlineCuts};
use super::words::{CharClass, char_class};
use crate::catch_panic::catch_panic;

/// The added tokens that are recognised in documents.
#[derive(Debug)]
pub(super) struct AddedInText {
    tokens: Vec<Recognised>,
    /// Search for names in the text, and in the normalized text.
    in_text: AhoCorasick,
    in_normalized: AhoCorasick,
    /// Special tokens. One that overlaps another token hides it, if both are looked for in the same text.
    hiding: Vec<Recognised>,
    /// True if normalization may change the characters around a token.
    changes_neighbours: bool,
}

/// An added token, with the text that is looked for.
#[derive(Debug)]
struct Recognised {
    name: String,
    token: AddedToken,
}

impl AddedInText {
    /// Those of `tokenizer`. The error is the problem, for a message.
    pub(super) fn from_tokenizer(tokenizer: &tokenizers::Tokenizer) -> Result<AddedInText, String> {
        let normalizer = tokenizer.get_normalizer();
        let mut all = recognised(tokenizer)?;
        let order = |one: &Recognised| (one.token.normalized, one.name.clone(), one.token.content.clone());
        all.sort_by_cached_key(order);
        if let Some([one, other]) = all.array_windows().find(|[one, other]| are_one(one, other)) {
            return Err(format!(
                "has the added tokens {:?} and {:?}, which are one after normalization, so that either may be found; remove \
                 one, or write \"normalized\": false in it",
                one.token.content, other.token.content
            ));
        }
        let (mut hiding, tokens): (Vec<_>, Vec<_>) = all.into_iter().partition(|token| token.token.special);
        hiding.retain(|one| tokens.iter().any(|other| one.token.normalized == other.token.normalized));
        let names = |normalized: bool| {
            let names = tokens.iter().filter(|token| token.token.normalized == normalized);
            AhoCorasick::new(names.map(|token| &token.name))
                .map_err(|e| format!("has too many added tokens: {e}"))
        };
        Ok(AddedInText {
            in_text: names(false)?,
            in_normalized: names(true)?,
            tokens,
            hiding,
            changes_neighbours: !matches!(normalizer, None | Some(NormalizerWrapper::NFC(_))),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// True if a token occurs in the text before normalization.
    pub(super) fn occurs_in(&self, text: &str) -> bool {
        self.in_text.is_match(text)
    }

    /// True if a token occurs in the normalized text.
    pub(super) fn occurs_in_normalized(&self, text: &str) -> bool {
        self.in_normalized.is_match(text)
    }

    /// True if a token that splits the text before normalization may end at a cut before a space, or begin
    /// there or after the space.
    pub(super) fn splits_at_spaces(&self) -> bool {
        let is_there = |name: &str| {
            let after_space = name.strip_prefix(' ').unwrap_or(name);
            after_space.is_empty() || after_space.starts_with(is_letter) || name.ends_with(is_letter)
        };
        self.tokens.iter().any(|token| !token.token.normalized && is_there(&token.name))
    }

    /// The cuts of `rule` that change no token. `space` is what a space is after normalization.
    pub(super) fn limit(&self, rule: CutRule, space: char) -> CutRule {
        if self.is_empty() {
            return rule;
        }
        let is_white = |c: char| char_class(c) == CharClass::Space || c == space;
        let is_simple = |Recognised { name, token }: &Recognised| {
            let has_flag = !token.special && (token.lstrip || token.rstrip || token.single_word);
            !token.normalized || !(has_flag || name.contains(is_white))
        };
        let looked_for = self.tokens.iter().chain(&self.hiding);
        if rule == CutRule::Anywhere || self.changes_neighbours && !looked_for.clone().all(is_simple) {
            return CutRule::Never;
        }
        let spans = |is_cut: &dyn Fn(char, char) -> bool| {
            let pairs = |name: &str| name.chars().zip(name.chars().skip(1)).any(|(a, b)| is_cut(a, b));
            looked_for.clone().any(|token| pairs(&token.name))
        };
        // A cut before a space is after a letter. A token may take the space, or need it as a word's end.
        let breaks_space = |Recognised { name, token }: &Recognised| {
            let may_end_there = !name.ends_with(|c: char| c.is_ascii_punctuation());
            token.rstrip && may_end_there || token.single_word && name.starts_with(is_white)
        };
        let spaces = rule.cuts_spaces()
            && !spans(&|before, after| !is_white(before) && is_white(after))
            && !self.tokens.iter().any(breaks_space);
        // A token after the newline may take it, or one that ends with it may need what follows.
        let breaks_newline = |starts_there: fn(char) -> bool| {
            move |Recognised { name, token }: &Recognised| {
                token.lstrip && name.starts_with(starts_there) || token.single_word && name.ends_with('\n')
            }
        };
        let newlines = match rule.newline_cuts() {
            _ if spans(&|before, after| before == '\n' && !is_white(after)) => NewlineCuts::None,
            NewlineCuts::None => NewlineCuts::None,
            NewlineCuts::BeforeAny if !self.tokens.iter().any(breaks_newline(|_| true)) => {
                NewlineCuts::BeforeAny
            }
            _ if !self.tokens.iter().any(breaks_newline(is_letter)) => NewlineCuts::BeforeLetters,
            _ => NewlineCuts::None,
        };
        CutRule::new(spaces, newlines)
    }
}

/// Fails if a search for the added tokens of `tokenizer` would not end. The error is the problem, for a
/// message.
pub(super) fn check_names(tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
    recognised(tokenizer).map(drop)
}

/// All added tokens of `tokenizer`. The error is the problem, for a message.
fn recognised(tokenizer: &tokenizers::Tokenizer) -> Result<Vec<Recognised>, String> {
    let named = |token: AddedToken| {
        let mut name = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = tokenizer.get_normalizer().filter(|_| token.normalized) {
            catch_panic(|| normalizer.normalize(&mut name))?;
        }
        match name.get() {
            "" => Err(format!(
                "has the added token {:?}, of which its normalizer leaves nothing, so that a search for it does not end; \
                 remove the token, or write \"normalized\": false in it",
                token.content
            )),
            name => Ok(Recognised { name: name.to_owned(), token }),
        }
    };
    tokenizer.get_added_tokens_decoder().into_values().map(named).collect()
}

/// True for two tokens of which the `tokenizers` crate finds either, by the order of a hash table with a
/// random seed.
fn are_one(one: &Recognised, other: &Recognised) -> bool {
    one.token.normalized && other.token.normalized && one.name == other.name
}

fn is_letter(c: char) -> bool {
    char_class(c) == CharClass::Letter
}
