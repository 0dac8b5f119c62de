//! Words of a template's source, and texts of a row without any others.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::OnceLock;

use aho_corasick::AhoCorasick;

use super::data::Texts;
use super::marks::Literals;
use super::scan::{TagKind, TemplateToken};

/// Names, strings and texts of a template's source.
#[derive(Debug, Default)]
pub(super) struct SourceWords {
    pub(super) names: BTreeSet<String>,
    pub(super) strings: BTreeSet<String>,
    /// Texts outside of tags.
    pub(super) texts: BTreeSet<String>,
    /// True if the source cuts one of its strings, or puts other text into it.
    pub(super) is_cutting: bool,
    /// Strings that stay in a row, for the first special tokens that were asked for.
    kept: OnceLock<(Literals, Option<AhoCorasick>)>,
    /// True if the template composes names, for the first special tokens that were asked for.
    composes: OnceLock<(Literals, bool)>,
}

impl SourceWords {
    /// Replaces the texts of a row, but for strings of the source that are no part of a name.
    pub(super) fn replacement(&self, literals: &Literals) -> Replacement<'_> {
        let is_kept = |text: &&String| !text.trim().is_empty() && !literals.touch(text);
        let build = || AhoCorasick::new(self.strings.iter().filter(is_kept)).ok();
        Replacement { words: self, kept: once(&self.kept, literals, build) }
    }

    /// True if the template may write the beginning of a name before text of a row, and its end after that.
    pub(super) fn compose(&self, literals: &Literals) -> bool {
        let build = || {
            let texts = self.texts.iter().flat_map(|text| [text.as_str(), text.trim()]);
            let pieces: Vec<&str> = self.strings.iter().map(String::as_str).chain(texts).collect();
            self.is_cutting || literals.enclose(&pieces)
        };
        once(&self.composes, literals, build)
    }

    /// Notes what the tokens of a tag tell.
    pub(super) fn add(&mut self, tokens: &[TemplateToken]) {
        let tokens: Vec<&TemplateToken> =
            tokens.iter().filter(|token| token.kind != TagKind::Space).collect();
        for (at, token) in tokens.iter().enumerate() {
            let after = tokens.get(at + 1);
            match &token.kind {
                TagKind::Text(value) => {
                    self.strings.insert(value.clone());
                    self.is_cutting |= after.is_some_and(|next| [".", "[", "|"].iter().any(|c| next.is(c)));
                }
                TagKind::Name => {
                    self.names.insert(token.text.clone());
                    let is_plain = |token: &&&TemplateToken| {
                        matches!(token.kind, TagKind::Text(_) | TagKind::Number)
                            || token.is(",")
                            || token.is("(")
                    };
                    let mut arguments = tokens[at + 1..].iter().skip_while(is_plain);
                    self.is_cutting |= match token.text.as_str() {
                        "replace" => !arguments.next().is_some_and(|end| end.is(")")),
                        "format" => true,
                        _ => false,
                    };
                }
                _ => {}
            }
        }
    }
}

/// The value for `literals`, kept for the first ones.
fn once<T: Clone>(kept: &OnceLock<(Literals, T)>, literals: &Literals, build: impl Fn() -> T) -> T {
    let (first, value) = kept.get_or_init(|| (literals.clone(), build()));
    if first.is(literals) { value.clone() } else { build() }
}

/// Replaces characters of a row.
pub(super) struct Replacement<'w> {
    words: &'w SourceWords,
    kept: Option<AhoCorasick>,
}

impl Texts for Replacement<'_> {
    fn string<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut is_kept = vec![false; text.len()];
        for found in self.kept.iter().flat_map(|kept| kept.find_overlapping_iter(text)) {
            is_kept[found.range()].fill(true);
        }
        let replaced = |(at, c): (usize, char)| if c.is_whitespace() || is_kept[at] { c } else { other(c) };
        text.char_indices().map(replaced).collect()
    }

    fn key<'t>(&self, key: &'t str) -> Cow<'t, str> {
        match self.words.names.contains(key) || self.words.strings.contains(key) {
            true => Cow::Borrowed(key),
            false => self.string(key),
        }
    }
}

/// A character of a plane that `c` is not in: of the plane for private use, as a rule.
fn other(c: char) -> char {
    let plane = if u32::from(c) >> 16 == 0xF { 0x3_0000 } else { 0xF_0000 };
    char::from_u32(plane | (u32::from(c) & 0xFFFF)).unwrap_or(char::REPLACEMENT_CHARACTER)
}
