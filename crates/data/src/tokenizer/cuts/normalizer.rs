//! Cuts of the raw text, as they appear after normalization.
//!
//! A normalizer is understood if the normalized parts of a cut text are the normalized text, and if the
//! characters at the cut are known. Normalizers are compared in the form in which the `tokenizers` crate
//! writes them.

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use super::crossings::{Crossings, CutContext, Following};
use crate::catch_panic::catch_panic;
use crate::tokenizer::cut_rule::is_cut_letter;

/// Cuts after normalization.
#[derive(Debug, Clone, Copy)]
pub(super) struct Normalized {
    pub(super) space: Seam,
    pub(super) newline: Seam,
    pub(super) newline_before_letter: Seam,
}

/// The normalized text at a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seam {
    /// Normalizing the parts differs from normalizing the whole, or nothing is known.
    Unknown,
    /// White space, on the side of the cut on which the raw text has it.
    WhiteSpace,
    /// As the context says.
    As(CutContext),
}

impl Normalized {
    /// The cuts after normalization by `normalizer`, or without one.
    pub(super) fn by(normalizer: Option<&NormalizerWrapper>) -> Normalized {
        let mut seams = Normalized {
            space: Seam::As(CutContext::Space { marks: false }),
            newline: Seam::As(CutContext::Newline(Following::Any)),
            newline_before_letter: Seam::As(CutContext::Newline(Following::Letters)),
        };
        if let Some(normalizer) = normalizer {
            seams.apply(normalizer);
        }
        seams
    }

    fn apply(&mut self, normalizer: &NormalizerWrapper) {
        let marks = |seam: Seam| match seam {
            Seam::As(CutContext::Space { .. }) => Seam::As(CutContext::Space { marks: true }),
            other => other,
        };
        match normalizer {
            NormalizerWrapper::Sequence(sequence) => {
                sequence.as_ref().iter().for_each(|normalizer| self.apply(normalizer));
            }
            // A space and a newline neither compose nor reorder.
            NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) | NormalizerWrapper::Lowercase(_) => {
                self.space = marks(self.space);
            }
            // Spacing accents decompose into a space and a mark. No letter at a cut does.
            NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) => {
                self.space = marks(self.space);
                self.space_may_follow_newline();
            }
            // Marks beside the newline are removed, and spaces may be before and after them.
            NormalizerWrapper::StripAccents(_) => {
                self.space_may_follow_newline();
                if self.newline_before_letter != Seam::WhiteSpace {
                    self.newline_before_letter = Seam::Unknown;
                }
            }
            NormalizerWrapper::StripNormalizer(strip) => {
                if strip.strip_left {
                    self.space = Seam::Unknown;
                }
                if strip.strip_right {
                    (self.newline, self.newline_before_letter) = (Seam::Unknown, Seam::Unknown);
                }
            }
            // A newline becomes a space.
            NormalizerWrapper::Nmt(_) => self.newlines_become_spaces(),
            // It puts spaces around ideographs, and makes all white space a space.
            NormalizerWrapper::BertNormalizer(_) => {
                self.newlines_become_spaces();
                if self.space != Seam::Unknown {
                    self.space = Seam::WhiteSpace;
                }
            }
            NormalizerWrapper::Replace(_) => self.replace(normalizer),
            NormalizerWrapper::Precompiled(_) => self.map(normalizer),
            NormalizerWrapper::Prepend(_) | NormalizerWrapper::ByteLevel(_) => {
                (self.space, self.newline) = (Seam::Unknown, Seam::Unknown);
                self.newline_before_letter = Seam::Unknown;
            }
        }
    }

    fn each(&mut self) -> [&mut Seam; 3] {
        [&mut self.space, &mut self.newline, &mut self.newline_before_letter]
    }

    fn space_may_follow_newline(&mut self) {
        if self.newline != Seam::WhiteSpace {
            self.newline = Seam::Unknown;
        }
    }

    fn newlines_become_spaces(&mut self) {
        for seam in [&mut self.newline, &mut self.newline_before_letter] {
            if *seam != Seam::Unknown {
                *seam = Seam::WhiteSpace;
            }
        }
    }

    fn replace(&mut self, normalizer: &NormalizerWrapper) {
        let json = serde_json::to_value(normalizer).unwrap_or_default();
        let content = json.get("content").and_then(Value::as_str).unwrap_or_default();
        let crossings = pattern(&json);
        for seam in self.each() {
            let keeps = match (*seam, &crossings) {
                (Seam::As(context), Some(crossings)) => crossings.may_be_replaced(content, context),
                _ => false,
            };
            if !keeps {
                *seam = Seam::Unknown;
            }
        }
    }

    /// A table that maps clusters of characters. A newline is a cluster of its own.
    fn map(&mut self, normalizer: &NormalizerWrapper) {
        let normalized = |text: &str| {
            let mut normalized = NormalizedString::from(text);
            catch_panic(|| normalizer.normalize(&mut normalized)).ok().map(|()| normalized.get().to_owned())
        };
        let is_white = |text: Option<String>| {
            text.is_some_and(|text| !text.is_empty() && text.chars().all(char::is_whitespace))
        };
        if is_white(normalized("\n")) {
            self.newlines_become_spaces();
        } else {
            (self.newline, self.newline_before_letter) = (Seam::Unknown, Seam::Unknown);
        }
        let mut text = String::new();
        let mut commutes = |c: char| {
            text.clear();
            text.push(c);
            let alone = normalized(&text)?;
            text.push(' ');
            let with_space = normalized(&text)?;
            (with_space.strip_prefix(&*alone)? == " " && alone.chars().next().is_none_or(is_cut_letter))
                .then_some(alone.chars().next_back().is_some_and(is_cut_letter))
        };
        let mut ends_with_letters = true;
        for c in ('\0'..=char::MAX).filter(|&c| is_cut_letter(c)) {
            match commutes(c) {
                Some(is_letter) => ends_with_letters &= is_letter,
                None => {
                    self.space = Seam::Unknown;
                    return;
                }
            }
        }
        if self.space != Seam::Unknown && !ends_with_letters {
            self.space = Seam::WhiteSpace;
        }
    }
}

/// The expression of a `Replace` or `Split` in its written form.
pub(super) fn pattern(step: &Value) -> Option<Crossings> {
    let pattern = step.get("pattern")?;
    match (pattern.get("String"), pattern.get("Regex")) {
        (Some(text), None) => Crossings::of_text(text.as_str()?),
        (None, Some(regex)) => Crossings::of_regex(regex.as_str()?),
        _ => None,
    }
}
