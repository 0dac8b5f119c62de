//! The rendering of the first messages of a conversation, compared with that of all without a copy of it.

use std::borrow::Cow;
use std::ops::Range;

use crate::template::Rendering;

/// A rendering that begins with bytes of the rendering of all messages.
#[derive(Debug, Default)]
pub(super) struct Beginning {
    /// Number of bytes of the rendering of all messages.
    pub(super) shared: usize,
    /// The text after them.
    pub(super) rest: String,
    /// Byte ranges of names of special tokens that are text, ascending.
    pub(super) literals: Vec<Range<usize>>,
}

impl From<Rendering> for Beginning {
    fn from(Rendering { text, literals, .. }: Rendering) -> Beginning {
        Beginning { shared: 0, rest: text, literals }
    }
}

impl Beginning {
    /// Size of the text.
    pub(super) fn len(&self) -> usize {
        self.shared + self.rest.len()
    }

    /// The text from a byte on.
    pub(super) fn text<'t>(&'t self, whole: &'t str, from: usize) -> Cow<'t, str> {
        match self.parts(whole, from) {
            ["", rest] => Cow::Borrowed(rest),
            [shared, ""] => Cow::Borrowed(shared),
            parts => Cow::Owned(parts.concat()),
        }
    }

    /// The text as that of a sample.
    pub(super) fn into_text(self, whole: &str) -> String {
        match self.shared {
            0 => self.rest,
            shared => whole[..shared].to_owned() + &self.rest,
        }
    }

    /// True if the text begins with that of `other`.
    pub(super) fn starts_with(&self, other: &Beginning, whole: &str) -> bool {
        let from = self.shared.min(other.shared);
        let [first, second] = other.parts(whole, from).map(str::as_bytes);
        let text = self.text(whole, from);
        text.as_bytes().strip_prefix(first).is_some_and(|rest| rest.starts_with(second))
    }

    /// True if the first `len` bytes begin the rendering of all messages.
    pub(super) fn begins(&self, whole: &str, len: usize) -> bool {
        let rest = self.rest.as_bytes().get(..len.saturating_sub(self.shared)).unwrap_or_default();
        whole.as_bytes()[self.shared..].starts_with(rest)
    }

    fn parts<'t>(&'t self, whole: &'t str, from: usize) -> [&'t str; 2] {
        [&whole[from.min(self.shared)..self.shared], &self.rest[from.saturating_sub(self.shared)..]]
    }
}
