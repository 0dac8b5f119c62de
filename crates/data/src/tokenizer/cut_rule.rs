//! Where a long document may be cut so that its pieces, encoded one by one, give the tokens of the whole.
//!
//! Between words means: after a newline that stands alone between two characters that are no white space, or
//! before a single space between two letters. At those places every word pattern of this crate ends a word
//! whatever follows, and the piece before ends as it would inside the whole. A vocabulary without words may be cut
//! there if none of its tokens reaches over such a place. Tests compare both ways on random text.

use super::words::{CharClass, char_class};

/// Where a document may be cut. The reader of long text files cuts by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutRule {
    /// Between any two characters.
    Anywhere,
    /// Only where one word surely ends and the next begins.
    BetweenWords,
    /// Only before a single space between two letters.
    BeforeSpaces,
    /// Nowhere: each document is encoded in one go.
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
                    // A newline is cut behind, a space before; a newline that ends at the limit still counts.
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
                // The newline just before `from` is cut at `from`.
                let start = text.floor_char_boundary(from.saturating_sub(1));
                let mut marks = text[start..].match_indices(self.marks());
                marks.find_map(|(at, _)| cut_at(text, start + at).filter(|&cut| cut >= from))
            }
            CutRule::Never => None,
        }
    }

    /// The characters at which there may be a cut.
    fn marks(self) -> &'static [char] {
        if self == CutRule::BeforeSpaces { &[' '] } else { &[' ', '\n'] }
    }
}

/// The cut that belongs to the space or newline at byte `at`, if it is a safe one.
fn cut_at(text: &str, at: usize) -> Option<usize> {
    let before = text[..at].chars().next_back().map(char_class)?;
    let after = text[at + 1..].chars().next().map(char_class)?;
    match text.as_bytes()[at] {
        b'\n' if before != CharClass::Space && after != CharClass::Space => Some(at + 1),
        b' ' if before == CharClass::Letter && after == CharClass::Letter => Some(at),
        _ => None,
    }
}
