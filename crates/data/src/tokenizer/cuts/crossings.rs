//! Splits of an expression on both sides of a cut.
//!
//! A search reads characters from left to right. If no part of an expression can read the character after a
//! cut once another part has read the one before it, every attempt that starts before the cut goes on as at
//! the end of the text, and so gives the matches of the text before the cut. Attempts that start at the cut
//! or after it do not depend on the text before it.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use tokenizers::utils::SysRegex;

use super::expression::{CharacterTest, Edge, Expression};
use crate::catch_panic::catch_panic;
use crate::tokenizer::words::{CharClass, char_class};

/// A kind of cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CutContext {
    /// After a letter, before a single space and a letter.
    Space {
        /// True if a mark may be before the space, because normalization decomposes the letter.
        marks: bool,
    },
    /// After a single newline that follows a character other than white space, before one of these.
    Newline(Following),
}

/// The characters after a newline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Following {
    /// All but white space.
    Any,
    /// Letters.
    Letters,
}

/// The matches at a cut, in every text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Matches {
    /// A match ends at the cut.
    pub(super) end: bool,
    /// A match starts at the cut.
    pub(super) start: bool,
}

/// All characters other than white space.
struct Alphabet {
    letters: String,
    marks: String,
    others: String,
}

static ALPHABET: LazyLock<Alphabet> = LazyLock::new(|| {
    let of_class = |wanted: CharClass| ('\0'..=char::MAX).filter(move |&c| char_class(c) == wanted);
    let marks = SysRegex::new(r"\p{M}").expect("a constant expression compiles");
    let is_mark = |c: &char| marks.find_iter(c.encode_utf8(&mut [0; 4])).next().is_some();
    let (marks, others): (String, String) = of_class(CharClass::Other).partition(is_mark);
    let others = others + &of_class(CharClass::Number).collect::<String>();
    Alphabet { letters: of_class(CharClass::Letter).collect(), marks, others }
});

/// An expression with the sets of characters that its parts match.
pub(super) struct Crossings {
    expression: Expression,
    source: SysRegex,
    parts: Vec<PatternPart>,
}

/// The characters that a part can match.
#[derive(Clone, Copy)]
struct PatternPart {
    letter: bool,
    letter_or_mark: bool,
    non_space: bool,
    space: bool,
    newline: bool,
}

impl PatternPart {
    fn new(source: &str) -> Option<PatternPart> {
        let regex = SysRegex::new(source).ok()?;
        let matches = |text: &str| {
            catch_panic(|| Ok::<_, String>(regex.find_iter(text).any(|(start, end)| start < end))).ok()
        };
        let letter = matches(&ALPHABET.letters)?;
        let letter_or_mark = letter || matches(&ALPHABET.marks)?;
        let non_space = letter_or_mark || matches(&ALPHABET.others)?;
        Some(PatternPart { letter, letter_or_mark, non_space, space: matches(" ")?, newline: matches("\n")? })
    }

    fn follows_newline(self, following: Following) -> bool {
        match following {
            Following::Any => self.non_space,
            Following::Letters => self.letter,
        }
    }
}

impl Crossings {
    /// The crossings of an expression; `None` if it is not understood.
    pub(super) fn of_regex(source: &str) -> Option<Crossings> {
        Crossings::new(Expression::parse(source)?, SysRegex::new(source).ok()?)
    }

    /// The crossings of a literal text.
    pub(super) fn of_text(text: &str) -> Option<Crossings> {
        Crossings::new(Expression::literal(text)?, SysRegex::new(&super::expression::escape(text)).ok()?)
    }

    fn new(expression: Expression, source: SysRegex) -> Option<Crossings> {
        let mut known: BTreeMap<&str, PatternPart> = BTreeMap::new();
        for source in &expression.parts {
            if !known.contains_key(source.as_str()) {
                known.insert(source, PatternPart::new(source)?);
            }
        }
        let parts = expression.parts.iter().map(|source| known[source.as_str()]).collect();
        Some(Crossings { expression, source, parts })
    }

    /// The matches at a cut. `None` if the parts of a text may have other matches than the text.
    pub(super) fn find(&self, context: CutContext) -> Option<Matches> {
        if self.expression.is_nullable {
            return None;
        }
        match context {
            CutContext::Space { marks } => self.at_space(marks),
            CutContext::Newline(following) => self.at_newline(following),
        }
    }

    fn at_space(&self, marks: bool) -> Option<Matches> {
        let ends_before_space = |part: usize| {
            let part = self.parts[part];
            if marks { part.letter_or_mark } else { part.letter }
        };
        let crosses = |edge: &Edge| match (edge.from, edge.to) {
            (None, _) => false,
            (Some(from), CharacterTest::Part { part, .. }) => {
                ends_before_space(from) && self.parts[part].space
            }
            (Some(from), CharacterTest::End) => ends_before_space(from),
        };
        if self.expression.edges.iter().any(crosses) {
            return None;
        }
        // The text before the cut ends with a match if the last letter is one alone: either an earlier match
        // contains it, or the attempt that starts at it succeeds, as at the end of a text.
        let end =
            self.each_is_a_match(&ALPHABET.letters) && (!marks || self.each_is_a_match(&ALPHABET.marks));
        Some(Matches { end, start: self.has_alternative(" ") })
    }

    /// True if every character of `text` is a match if it is the whole text.
    fn each_is_a_match(&self, text: &str) -> bool {
        // Characters that the same parts match have the same matches. Each part has a bit.
        let mut kinds = vec![0_u128; text.len()];
        for (number, source) in self.expression.parts.iter().enumerate() {
            let Ok(run) = SysRegex::new(&format!("(?:{source})+")) else { return false };
            let runs = catch_panic(|| Ok::<_, String>(run.find_iter(text).collect::<Vec<_>>()));
            let Ok(runs) = runs else { return false };
            runs.into_iter().flat_map(|(start, end)| start..end).for_each(|at| kinds[at] |= 1 << number);
        }
        let samples: BTreeMap<u128, char> = text.char_indices().map(|(at, c)| (kinds[at], c)).collect();
        let is_match = |c: char| first_match(&self.source, c.encode_utf8(&mut [0; 4])) == Some(c.len_utf8());
        samples.into_values().all(is_match)
    }

    fn at_newline(&self, following: Following) -> Option<Matches> {
        // An attempt that starts at the newline matches it alone if it succeeds. With an alternative that
        // asserts nothing it does succeed, so assertions of others about the next character do not matter.
        let end = self.has_alternative("\n");
        let starts_match = |part: usize| {
            end && self.expression.edges.iter().all(|edge| match (edge.from, edge.to) {
                (Some(from), CharacterTest::Part { part: to, .. }) if to == part => {
                    !self.parts[from].non_space
                }
                _ => true,
            })
        };
        let crosses = |edge: &Edge| {
            let Some(from) = edge.from.filter(|&from| self.parts[from].newline) else { return false };
            match edge.to {
                CharacterTest::Part { part, ahead } => {
                    self.parts[part].follows_newline(following) && !(ahead && starts_match(from))
                }
                CharacterTest::End => !starts_match(from),
            }
        };
        let is_crossed = self.expression.edges.iter().any(crosses);
        (!is_crossed).then_some(Matches { end, start: false })
    }

    /// True if an alternative matches `text` whatever follows.
    fn has_alternative(&self, text: &str) -> bool {
        self.expression.plain_alternatives.iter().any(|source| {
            SysRegex::new(source).is_ok_and(|regex| first_match(&regex, text) == Some(text.len()))
        })
    }

    /// True if replacing the matches by `content` commutes with the cut, and leaves the characters at it as
    /// they are described by the context.
    pub(super) fn may_be_replaced(&self, content: &str, context: CutContext) -> bool {
        if self.find(context).is_none() {
            return false;
        }
        let starts = |edge: &Edge| match (edge.from, edge.to) {
            (None, CharacterTest::Part { part, .. }) => Some(part),
            _ => None,
        };
        let first: Vec<usize> = self.expression.edges.iter().filter_map(starts).collect();
        let is_letter = |c: Option<char>| c.is_some_and(|c| char_class(c) == CharClass::Letter);
        match context {
            CutContext::Space { .. } => {
                let ends_with_letter =
                    self.expression.last.iter().any(|&part| self.parts[part].letter_or_mark);
                let matches_space = first.iter().filter(|&&part| self.parts[part].space).any(|&part| {
                    let goes_on = |edge: &Edge| match edge.to {
                        CharacterTest::Part { part: to, ahead } => ahead || self.parts[to].letter,
                        CharacterTest::End => true,
                    };
                    let from_it = |edge: &&Edge| edge.from == Some(part);
                    self.expression.last.contains(&part)
                        || self.expression.edges.iter().filter(from_it).any(goes_on)
                });
                !matches_space && (!ends_with_letter || is_letter(content.chars().next_back()))
            }
            CutContext::Newline(following) => {
                let changes_next = first.iter().any(|&part| self.parts[part].follows_newline(following));
                let changes_last = self.expression.last.iter().any(|&part| self.parts[part].non_space);
                let is_no_space = |c: Option<char>| c.is_some_and(|c| char_class(c) != CharClass::Space);
                let (next, last) = (content.chars().next(), content.chars().next_back());
                let is_next = match following {
                    Following::Any => is_no_space(next),
                    Following::Letters => is_letter(next),
                };
                self.parts.iter().all(|part| !part.newline)
                    && (!changes_next || is_next)
                    && (!changes_last || is_no_space(last))
            }
        }
    }
}

/// Length of the match at the start of `text`.
fn first_match(regex: &SysRegex, text: &str) -> Option<usize> {
    let first = catch_panic(|| Ok::<_, String>(regex.find_iter(text).next())).ok()??;
    (first.0 == 0).then_some(first.1)
}
