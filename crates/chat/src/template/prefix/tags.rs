//! The tags of a template's source.

use std::ops::Range;

use crate::template::scan::{TagKind, TemplateToken, tokens};

/// A tag of the source: `{{ }}`, `{% %}` or a comment.
pub(super) struct Tag {
    pub(super) range: Range<usize>,
    /// Inside of the tag, without minus or plus.
    pub(super) inside: Range<usize>,
    /// Tokens other than white space, each with its place in the source.
    pub(super) tokens: Vec<(TemplateToken, Range<usize>)>,
    pub(super) is_statement: bool,
}

impl Tag {
    pub(super) fn name(&self) -> &str {
        self.tokens.first().filter(|_| self.is_statement).map_or("", |(token, _)| token.text.as_str())
    }

    /// True if the token at `at` is that name or operator.
    pub(super) fn is(&self, at: usize, text: &str) -> bool {
        self.tokens.get(at).is_some_and(|(token, _)| token.is(text))
    }

    /// True if the token at `at` is a name, and no attribute.
    pub(super) fn is_variable(&self, at: usize) -> bool {
        self.tokens[at].0.kind == TagKind::Name && !(at > 0 && self.is(at - 1, "."))
    }

    /// Minus or plus before the end of the tag, with that end.
    pub(super) fn close<'s>(&self, source: &'s str) -> &'s str {
        &source[self.inside.end..self.range.end]
    }

    /// The block that the tag opens.
    pub(super) fn opens(&self) -> Option<&str> {
        let is_operator = |text: &str| self.tokens.iter().position(|(token, _)| token.is(text));
        let is_block = match self.name() {
            "for" | "if" | "macro" | "call" | "filter" | "with" => true,
            // A set block has a filter before an equals sign, if it has one.
            "set" => match (is_operator("="), is_operator("|")) {
                (Some(equals), Some(filter)) => filter < equals,
                (equals, _) => equals.is_none(),
            },
            _ => false,
        };
        is_block.then(|| self.name())
    }
}

/// The tags of a source, unless it has raw blocks.
pub(super) fn tags(source: &str) -> Option<Vec<Tag>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = source[at..].find('{').map(|open| at + open) {
        at = start + 1;
        let is_statement = match source.as_bytes().get(at) {
            Some(b'#') => {
                at = start + source[start..].find("#}")? + 2;
                continue;
            }
            Some(b'%') => true,
            Some(b'{') => false,
            _ => continue,
        };
        let inside = start + 2 + usize::from(source[start + 2..].starts_with(['-', '+']));
        let close = if is_statement { "%}" } else { "}}" };
        let (scanned, len) = tokens(&source[inside..], close, 1).ok()?;
        at = inside + len + source[inside + len..].find(close)? + close.len();
        let mut place = inside;
        let placed = scanned.into_iter().map(|token| {
            let range = place..place + token.text.len();
            place = range.end;
            (token, range)
        });
        let tokens = placed.filter(|(token, _)| token.kind != TagKind::Space).collect();
        let tag = Tag { range: start..at, inside: inside..inside + len, tokens, is_statement };
        if tag.name() == "raw" {
            return None;
        }
        found.push(tag);
    }
    Some(found)
}
