//! The rule for splitting long documents so that the pieces, encoded one by one, give the tokens of the
//! document.
//!
//! Two kinds of positions are used: after a single newline between two characters that are not white space,
//! and before a single space between two letters. At these positions the word patterns of this crate end a
//! word, regardless of the text that follows; for other pre-tokenizers it is proven ([`super::cuts`]). A
//! vocabulary without words may be cut there if none of its tokens spans such a position. Tests compare
//! pieces and documents on random text.

use super::words::{CharClass, char_class};

/// Positions at which a document may be split. Input readers split long documents by this rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutRule {
    /// Between any two characters.
    Anywhere,
    /// After single newlines, and before single spaces between letters.
    BetweenWords,
    /// After single newlines before a letter, and before single spaces between letters.
    BetweenLetters,
    /// Only before single spaces between letters.
    BeforeSpaces,
    /// Only after single newlines.
    AfterNewlines,
    /// Nowhere: the encoder splits long documents itself.
    InEncoder,
    /// Nowhere: each document is encoded as a whole.
    Never,
}

/// Newlines after which a document may be split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NewlineCuts {
    /// None.
    None,
    /// Those before a letter.
    BeforeLetters,
    /// Those before any character other than white space.
    BeforeAny,
}

impl CutRule {
    /// The rule with cuts before spaces, and after newlines.
    pub(super) fn new(spaces: bool, newlines: NewlineCuts) -> CutRule {
        match (spaces, newlines) {
            (true, NewlineCuts::BeforeAny) => CutRule::BetweenWords,
            (true, NewlineCuts::BeforeLetters) => CutRule::BetweenLetters,
            (true, NewlineCuts::None) => CutRule::BeforeSpaces,
            (false, NewlineCuts::BeforeAny) => CutRule::AfterNewlines,
            (false, NewlineCuts::BeforeLetters | NewlineCuts::None) => CutRule::Never,
        }
    }

    /// True if there are cuts before spaces.
    pub(super) fn cuts_spaces(self) -> bool {
        matches!(self, CutRule::BetweenWords | CutRule::BetweenLetters | CutRule::BeforeSpaces)
    }

    /// The newlines after which there are cuts.
    pub(super) fn newline_cuts(self) -> NewlineCuts {
        match self {
            CutRule::Anywhere | CutRule::BetweenWords | CutRule::AfterNewlines => NewlineCuts::BeforeAny,
            CutRule::BetweenLetters => NewlineCuts::BeforeLetters,
            CutRule::BeforeSpaces | CutRule::InEncoder | CutRule::Never => NewlineCuts::None,
        }
    }

    /// The last safe cut in `text` at a byte offset in `1..=limit`, with text left on both sides.
    pub fn last_cut(self, text: &str, limit: usize) -> Option<usize> {
        let limit = text.floor_char_boundary(limit.min(text.len().checked_sub(1)?));
        if self == CutRule::Anywhere {
            return (limit > 0).then_some(limit);
        }
        let mut end = limit;
        while let Some(at) = text[..end].rfind(self.marks()) {
            // The cut is after a newline or before a space.
            if let Some(cut) = self.cut_at(text, at) {
                return Some(cut);
            }
            end = at;
        }
        None
    }

    /// The first safe cut in `text` at a byte offset of at least `from`, with text left on both sides.
    pub fn first_cut(self, text: &str, from: usize) -> Option<usize> {
        if from >= text.len() {
            return None;
        }
        if self == CutRule::Anywhere {
            return Some(text.ceil_char_boundary(from.max(1))).filter(|&at| at < text.len());
        }
        // A newline just before `from` gives a cut at `from`.
        let start = text.floor_char_boundary(from.saturating_sub(1));
        let mut marks = text[start..].match_indices(self.marks());
        marks.find_map(|(at, _)| self.cut_at(text, start + at).filter(|&cut| cut >= from))
    }

    /// Characters at which a cut is possible.
    fn marks(self) -> &'static [char] {
        match (self.cuts_spaces(), self.newline_cuts()) {
            (true, NewlineCuts::None) => &[' '],
            (true, _) => &[' ', '\n'],
            (false, NewlineCuts::None) => &[],
            (false, _) => &['\n'],
        }
    }

    /// The safe cut at the space or newline at byte `at`, if any.
    fn cut_at(self, text: &str, at: usize) -> Option<usize> {
        let before = text[..at].chars().next_back()?;
        let after = text[at + 1..].chars().next()?;
        let is_space = |c: char| char_class(c) == CharClass::Space;
        match text.as_bytes()[at] {
            b'\n' if !is_space(before) && !is_space(after) => {
                (self.newline_cuts() == NewlineCuts::BeforeAny || is_cut_letter(after)).then_some(at + 1)
            }
            b' ' => (is_cut_letter(before) && is_cut_letter(after)).then_some(at),
            _ => None,
        }
    }
}

/// True for letters beside which a cut is possible: those whose compatibility decomposition begins with a
/// letter and ends with a letter or mark.
pub(super) fn is_cut_letter(c: char) -> bool {
    let decomposes = matches!(
        c as u32,
        0x13F | 0x140 | 0x37A | 0xE33 | 0xEB3 | 0xFC5E..=0xFC63 | 0xFE70..=0xFE7F | 0xFF9E | 0xFF9F
    );
    !decomposes && char_class(c) == CharClass::Letter
}
