//! Cuts of the normalized text, as the steps of a pre-tokenizer see them.
//!
//! Each step splits the pieces of the step before it. If a step splits every text at a cut, later steps see
//! pieces on one side of it. Steps before that must split both parts as they split the whole.

use serde_json::Value;
use tokenizers::PreTokenizerWrapper;

use super::crossings::{Crossings, CutContext};
use super::normalizer::{Seam, pattern};
use crate::tokenizer::words::GPT2;

/// Effect of a step on a text that is cut.
enum Effect {
    /// The step may split the parts in another way than the whole text.
    Unsafe,
    /// The parts are split like the whole text, except that a piece of it may span the cut.
    Joined,
    /// Every whole text is split at the cut.
    Split,
}

/// A step of a pre-tokenizer.
enum SplitStep {
    /// Splits around the matches of an expression.
    Expression { crossings: Crossings, behavior: String, inverted: bool },
    /// Removes white space.
    WhiteSpace,
    /// Splits around white space, and between words and other characters.
    Words,
    /// Splits around characters that are neither letters, marks nor white space.
    Characters,
    /// Removes a character.
    Delimiter(char),
    /// Replaces spaces by ▁, before which it may split.
    Metaspace { splits: bool, prepends: bool, only_first: bool },
    /// Represents bytes by characters, after splitting with GPT-2's expression.
    ByteLevel { crossings: Option<Crossings>, prepends: bool },
    /// Splits in another way, or is not understood.
    Other,
}

/// The steps of a pre-tokenizer.
pub(super) struct Steps(Vec<SplitStep>);

impl Steps {
    /// The steps of `pre_tokenizer`, in the form in which the `tokenizers` crate writes it.
    pub(super) fn from_pre_tokenizer(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Steps {
        let mut steps = Vec::new();
        if let Some(pre_tokenizer) = pre_tokenizer {
            collect(&serde_json::to_value(pre_tokenizer).unwrap_or_default(), &mut steps);
        }
        Steps(steps)
    }

    /// True if every text is split at a cut whose normalized text is `seam`.
    pub(super) fn split_at(&self, seam: Seam) -> bool {
        let is_newline = match seam {
            Seam::Unknown => return false,
            Seam::WhiteSpace => true,
            Seam::As(context) => matches!(context, CutContext::Newline(_)),
        };
        // A later part starts at 0 too, and has the prefix of a text unless it starts with a space.
        let prefixes_first = |step: &SplitStep| matches!(step, SplitStep::Metaspace { only_first: true, .. });
        let maps_bytes = |step: &SplitStep| matches!(step, SplitStep::ByteLevel { .. });
        if self.0.iter().any(prefixes_first) && (is_newline || self.0.iter().any(maps_bytes)) {
            return false;
        }
        for step in &self.0 {
            match step.effect(seam) {
                Effect::Split => return true,
                Effect::Unsafe => return false,
                // The space is no longer one after these steps.
                Effect::Joined
                    if matches!(step, SplitStep::Metaspace { .. } | SplitStep::ByteLevel { .. }) =>
                {
                    return false;
                }
                Effect::Joined => {}
            }
        }
        false
    }
}

impl SplitStep {
    fn effect(&self, seam: Seam) -> Effect {
        let context = match seam {
            Seam::Unknown => return Effect::Unsafe,
            Seam::As(context) => context,
            Seam::WhiteSpace => {
                return match self {
                    SplitStep::WhiteSpace | SplitStep::Words => Effect::Split,
                    SplitStep::Characters => Effect::Joined,
                    _ => Effect::Unsafe,
                };
            }
        };
        let is_space = matches!(context, CutContext::Space { .. });
        match self {
            SplitStep::Expression { crossings, behavior, inverted } => {
                let Some(matches) = crossings.find(context) else { return Effect::Unsafe };
                let splits = match (behavior.as_str(), inverted) {
                    ("Isolated" | "Removed", _) => matches.end || matches.start,
                    ("MergedWithPrevious", false) => matches.end,
                    ("MergedWithNext", false) => matches.start,
                    _ => false,
                };
                if splits { Effect::Split } else { Effect::Joined }
            }
            SplitStep::WhiteSpace | SplitStep::Words => Effect::Split,
            SplitStep::Characters => Effect::Joined,
            SplitStep::Delimiter(delimiter) => match (delimiter, context) {
                (' ', CutContext::Space { .. }) | ('\n', CutContext::Newline(_)) => Effect::Split,
                _ => Effect::Joined,
            },
            SplitStep::Metaspace { splits: true, .. } if is_space => Effect::Split,
            SplitStep::Metaspace { prepends: false, .. } => Effect::Joined,
            SplitStep::Metaspace { .. } => {
                if is_space {
                    Effect::Joined
                } else {
                    Effect::Unsafe
                }
            }
            // Every piece without a space at its start gets one.
            SplitStep::ByteLevel { prepends: true, .. } if !is_space => Effect::Unsafe,
            SplitStep::ByteLevel { crossings: Some(crossings), .. } => match crossings.find(context) {
                Some(matches) if matches.end => Effect::Split,
                _ => Effect::Unsafe,
            },
            SplitStep::ByteLevel { crossings: None, .. } => Effect::Joined,
            SplitStep::Other => Effect::Unsafe,
        }
    }
}

fn collect(json: &Value, steps: &mut Vec<SplitStep>) {
    let flag = |key: &str| json.get(key).and_then(Value::as_bool);
    let text = |key: &str| json.get(key).and_then(Value::as_str).unwrap_or_default();
    steps.push(match text("type") {
        "Sequence" => {
            let inner = json.get("pretokenizers").and_then(Value::as_array);
            inner.into_iter().flatten().for_each(|step| collect(step, steps));
            return;
        }
        "Split" => match pattern(json) {
            Some(crossings) => SplitStep::Expression {
                crossings,
                behavior: text("behavior").to_owned(),
                inverted: flag("invert").unwrap_or(false),
            },
            None => SplitStep::Other,
        },
        "ByteLevel" => SplitStep::ByteLevel {
            crossings: flag("use_regex").unwrap_or(true).then(|| Crossings::of_regex(GPT2)).flatten(),
            prepends: flag("add_prefix_space").unwrap_or(true),
        },
        "WhitespaceSplit" | "BertPreTokenizer" => SplitStep::WhiteSpace,
        "Whitespace" => SplitStep::Words,
        "Digits" | "Punctuation" => SplitStep::Characters,
        "CharDelimiterSplit" => {
            text("delimiter").chars().next().map_or(SplitStep::Other, SplitStep::Delimiter)
        }
        "Metaspace" if text("replacement") == "▁" => SplitStep::Metaspace {
            splits: flag("split").unwrap_or(true),
            prepends: text("prepend_scheme") != "never",
            only_first: text("prepend_scheme") == "first",
        },
        _ => SplitStep::Other,
    });
}
