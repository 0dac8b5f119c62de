//! A number, or `"auto"` if the run chooses it.

use schemars::{Schema, json_schema};
use serde::{Deserialize, Serialize};

/// A number, or the word `"auto"` for one that is chosen when the run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WrittenOrAuto", into = "WrittenOrAuto")]
pub enum OrAuto {
    /// Chosen when the run begins; its configuration then holds the number.
    Auto,
    /// Set by the user, or chosen.
    Is(usize),
}

impl OrAuto {
    /// The number, if it is given or chosen.
    pub fn number(self) -> Option<usize> {
        match self {
            OrAuto::Auto => None,
            OrAuto::Is(number) => Some(number),
        }
    }

    /// The schema of a number of `unit` in this range or `"auto"`, which `meaning` describes.
    pub(crate) fn schema(unit: &str, min: usize, max: usize, meaning: &str) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "integer", "minimum": min, "maximum": max, "x-unit": unit },
                { "oneOf": [{ "const": "auto", "description": meaning }] },
            ]
        })
    }
}

/// Its form in files.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenOrAuto {
    Number(usize),
    Word(Word),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Auto,
}

impl From<WrittenOrAuto> for OrAuto {
    fn from(written: WrittenOrAuto) -> Self {
        match written {
            WrittenOrAuto::Number(number) => OrAuto::Is(number),
            WrittenOrAuto::Word(Word::Auto) => OrAuto::Auto,
        }
    }
}

impl From<OrAuto> for WrittenOrAuto {
    fn from(value: OrAuto) -> Self {
        match value {
            OrAuto::Is(number) => WrittenOrAuto::Number(number),
            OrAuto::Auto => WrittenOrAuto::Word(Word::Auto),
        }
    }
}
