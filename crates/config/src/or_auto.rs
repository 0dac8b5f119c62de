//! A number, or `"auto"` if the run chooses it.

use schemars::{Schema, json_schema};
use serde::{Deserialize, Serialize};

/// A number, or the word `"auto"` for one that is chosen when the run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WrittenOrAuto<T>", into = "WrittenOrAuto<T>")]
#[serde(bound(serialize = "T: Clone + Serialize", deserialize = "T: Deserialize<'de>"))]
pub enum OrAuto<T = usize> {
    /// Chosen when the run begins; its configuration then holds the number.
    Auto,
    /// Set by the user, or chosen.
    Is(T),
}

impl<T> OrAuto<T> {
    /// The number, if it is given or chosen.
    pub fn number(self) -> Option<T> {
        match self {
            OrAuto::Auto => None,
            OrAuto::Is(number) => Some(number),
        }
    }
}

impl OrAuto {
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
enum WrittenOrAuto<T> {
    Number(T),
    Word(Word),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Auto,
}

impl<T> From<WrittenOrAuto<T>> for OrAuto<T> {
    fn from(written: WrittenOrAuto<T>) -> Self {
        match written {
            WrittenOrAuto::Number(number) => OrAuto::Is(number),
            WrittenOrAuto::Word(Word::Auto) => OrAuto::Auto,
        }
    }
}

impl<T> From<OrAuto<T>> for WrittenOrAuto<T> {
    fn from(value: OrAuto<T>) -> Self {
        match value {
            OrAuto::Is(number) => WrittenOrAuto::Number(number),
            OrAuto::Auto => WrittenOrAuto::Word(Word::Auto),
        }
    }
}
