//! The rule for splitting long documents so that the pieces, encoded one by one, give the tokens of the
//! document.
//!
//! "Between words" is after a single newline between two characters that are not white space, or before a
//! single space between two letters. At these positions every word pattern of this crate ends a word,
//! regardless of the text that follows. A vocabulary without words may be cut there if none of its tokens
//! spans such a position. Tests compare pieces and documents on random text.

use super::words::{CharClass, char_class};

/// Positions at which a document may be split. Input readers split long documents by this rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutRule {
    /// Between any two characters.
    Anywhere,
    /// Only at certain boundaries of words.
    BetweenWords,
    /// Only before a single space between two letters.
    BeforeSpaces,
    /// Nowhere: each document is encoded as a whole.
    Never,
}

impl CutRule {
    /// The last safe cut in `text` at a byte offset in `1..=limit`, with text left on both sides.
    pub fn last_cut(self, text: &str, limit: usize) -> Option<usize> {
        let limit = text.floor_char_boundary(limit.min(text.len().checked_sub(1)?));
        match self {
            CutRule::Anywhere => (limit > 0).then_some(limit),
            CutRule::BetweenWords | CutRule::BeforeSpaces => {
                let mut end = limit;
                while let Some(at) = text[..end].rfind(self.marks()) {
                    // The cut is after a newline or before a space.
                    if let Some(cut) = cut_at(text, at) {
                        return Some(cut);
                    }
                    end = at;
                }
                None
            }
            CutRule::Never => None,
        }
    }

    /// The first safe cut in `text` at a byte offset of at least `from`, with text left on both sides.
    pub fn first_cut(self, text: &str, from: usize) -> Option<usize> {
        if from >= text.len() {
            return None;
        }
        match self {
            CutRule::Anywhere => Some(text.ceil_char_boundary(from.max(1))).filter(|&at| at < text.len()),
            CutRule::BetweenWords | CutRule::BeforeSpaces => {
                // A newline just before `from` gives a cut at `from`.
                let start = text.floor_char_boundary(from.saturating_sub(1));
                let mut marks = text[start..].match_indices(self.marks());
                marks.find_map(|(at, _)| cut_at(text, start + at).filter(|&cut| cut >= from))
            }
            CutRule::Never => None,
        }
    }

    /// Characters at which a cut is possible.
    fn marks(self) -> &'static [char] {
        if self == CutRule::BeforeSpaces { &[' '] } else { &[' ', '\n'] }
    }
}

/// The safe cut at the space or newline at byte `at`, if any.
fn cut_at(text: &str, at: usize) -> Option<usize> {
    let before = text[..at].chars().next_back().map(char_class)?;
    let after = text[at + 1..].chars().next().map(char_class)?;
    match text.as_bytes()[at] {
        b'\n' if before != CharClass::Space && after != CharClass::Space => Some(at + 1),
        b' ' if before == CharClass::Letter && after == CharClass::Letter => Some(at),
        _ => None,
    }
}
