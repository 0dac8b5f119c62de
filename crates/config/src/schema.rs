//! The sections and keys as data, read from the JSON schema that is derived from the structs.
//!
//! Checks, error messages and the reference all use this data. A schema form that is not understood here is a
//! bug and panics in every test.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::Value as Json;
use xtrain_checkpoint::suggest::{listing, plain};

use super::Config;
use super::elsewhere::aliases;
use super::print::toml_value;

/// A section of the run file.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) name: String,
    pub(super) doc: String,
    /// Names of the section in other programs.
    pub(super) aliases: Vec<&'static str>,
    pub(super) keys: Vec<Key>,
}

/// A key of a section, or of a table inside one.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) name: String,
    pub(super) doc: String,
    pub(super) kind: Kind,
    /// The default in Markdown: TOML in code ticks, or words if it is computed.
    pub(super) default: String,
    pub(super) unit: Option<String>,
    pub(super) required: bool,
    aliases: Vec<&'static str>,
    example: Option<String>,
}

/// Type of a key's value.
#[derive(Debug)]
pub(super) enum Kind {
    Bool,
    Integer {
        min: i128,
        max: i128,
        /// True for a number of tokens or bytes, which may be a string with a unit.
        has_unit: bool,
    },
    Number(Interval),
    Text {
        format: Format,
        non_empty: bool,
    },
    Choice(Vec<KeyWord>),
    List {
        item: Box<Kind>,
        min: usize,
        max: usize,
    },
    Table(Vec<Key>),
    /// A table of any names and values.
    AnyTable,
    /// A table whose `type` chooses its other keys.
    Tagged(Vec<(String, Vec<Key>)>),
    Either(Vec<Kind>),
}

/// A word that is a value of a key.
#[derive(Debug)]
pub(super) struct KeyWord {
    pub(super) name: String,
    pub(super) doc: String,
    /// Names of the value in other programs.
    pub(super) aliases: Vec<&'static str>,
}

/// Format of a string value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Plain,
    Path,
    Time,
    Date,
    Tokenizer,
}

/// A range of finite numbers; each end says if it is included.
#[derive(Debug)]
pub(super) struct Interval {
    pub(super) low: Option<(f64, bool)>,
    pub(super) high: Option<(f64, bool)>,
}

/// All sections, in the order of the file.
pub(super) fn sections() -> &'static [Section] {
    static SECTIONS: LazyLock<Vec<Section>> = LazyLock::new(|| {
        let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
        let schema = settings.into_generator().into_root_schema_for::<Config>();
        properties(schema.as_value())
            .map(|(name, schema)| Section {
                name: name.clone(),
                doc: text(schema, "description"),
                aliases: aliases(name).collect(),
                keys: keys(schema, name),
            })
            .collect()
    });
    &SECTIONS
}

impl Key {
    /// True if `name` is the key's name, here or in another program, without regard to case, `-` and `_`.
    pub(super) fn is_called(&self, name: &str) -> bool {
        let name = plain(name);
        self.aliases.iter().copied().chain([self.name.as_str()]).any(|own| plain(own) == name)
    }

    /// Names of the key in other programs.
    #[cfg(test)]
    pub(super) fn aliases(&self) -> impl Iterator<Item = &'static str> {
        self.aliases.iter().copied()
    }

    /// `; for example `lr = 0.0003``, if an example is known.
    pub(super) fn for_example(&self) -> String {
        match &self.example {
            Some(value) => format!("; for example `{} = {value}`", self.name),
            None => String::new(),
        }
    }
}

impl Interval {
    pub(super) fn contains(&self, number: f64) -> bool {
        let above = self.low.is_none_or(|(low, closed)| number > low || (closed && number == low));
        let below = self.high.is_none_or(|(high, closed)| number < high || (closed && number == high));
        number.is_finite() && above && below
    }
}

impl Kind {
    /// Description of the allowed values, as the object of "must be".
    pub(super) fn describe(&self) -> String {
        match self {
            Kind::Bool => "true or false".to_owned(),
            Kind::Integer { min, max, .. } if *max >= i64::MAX.into() => {
                format!("a whole number of at least {min}")
            }
            Kind::Integer { min, max, .. } => format!("a whole number from {min} to {max}"),
            Kind::Number(interval) => interval.describe(),
            Kind::Text { format: Format::Path, .. } => "a path".to_owned(),
            Kind::Text { format: Format::Time, .. } => "a time such as \"2h30m\"".to_owned(),
            Kind::Text { format: Format::Date, .. } => "a date such as \"2026-11-29\"".to_owned(),
            Kind::Text { format: Format::Tokenizer, .. } => {
                "\"bpe\", \"bytes\", \"chars\" or a path".to_owned()
            }
            Kind::Text { non_empty: true, .. } => "a string that is not empty".to_owned(),
            Kind::Text { .. } => "a string".to_owned(),
            Kind::Choice(words) => listing(words.iter().map(|word| word.name.as_str()), "\"", "or"),
            Kind::List { item, min, max } if min == max => {
                format!("a list of {min}, each {}", item.describe())
            }
            Kind::List { item, min: 0, .. } => format!("a list, each entry {}", item.describe()),
            Kind::List { item, .. } => format!("a list that is not empty, each entry {}", item.describe()),
            Kind::Table(keys) => format!("a table of {}", key_names(keys)),
            Kind::AnyTable => "a table".to_owned(),
            Kind::Tagged(variants) => {
                format!(
                    "a table whose `type` is {}",
                    listing(variants.iter().map(|(tag, _)| tag.as_str()), "\"", "or")
                )
            }
            Kind::Either(kinds) => kinds.iter().map(Kind::describe).collect::<Vec<_>>().join(", or "),
        }
    }
}

impl Interval {
    fn describe(&self) -> String {
        let low =
            self.low.map(
                |(low, closed)| {
                    if closed { format!("of at least {low}") } else { format!("greater than {low}") }
                },
            );
        let high =
            self.high.map(
                |(high, closed)| {
                    if closed { format!("of at most {high}") } else { format!("less than {high}") }
                },
            );
        match (low, high, self.low, self.high) {
            (_, _, Some((low, true)), Some((high, true))) => format!("a number from {low} to {high}"),
            (Some(low), Some(high), ..) => format!("a number {low} and {}", high.trim_start_matches("of ")),
            (Some(end), None, ..) | (None, Some(end), ..) => format!("a number {end}"),
            (None, None, ..) => "a finite number".to_owned(),
        }
    }
}

/// The names of `keys`, for a sentence.
pub(super) fn key_names(keys: &[Key]) -> String {
    listing(keys.iter().map(|key| key.name.as_str()), "`", "and")
}

/// The keys of a table at `path`, as `section` or `section.key`.
fn keys(schema: &Json, path: &str) -> Vec<Key> {
    let required: Vec<&str> = strings(schema, "required").collect();
    properties(schema)
        .filter(|(_, schema)| !schema["const"].is_string())
        .map(|(name, schema)| {
            let fixed = Some(&schema["default"]).filter(|value| !value.is_null()).map(toml_value);
            let words = schema["x-default"].as_str().map(str::to_owned);
            let example = Some(&schema["x-example"]).filter(|value| !value.is_null()).map(toml_value);
            let required = required.contains(&name.as_str());
            let path = format!("{path}.{name}");
            let unset = if required { "required" } else { "none" };
            Key {
                name: name.clone(),
                doc: text(schema, "description"),
                kind: kind(schema, &path),
                default: words
                    .or(fixed.as_ref().map(|value| format!("`{value}`")))
                    .unwrap_or(unset.to_owned()),
                unit: schema["x-unit"].as_str().map(str::to_owned),
                aliases: aliases(&path).collect(),
                required,
                example: example.or(fixed),
            }
        })
        .collect()
}

/// The type of the key at `path`, `section.key`.
fn kind(schema: &Json, path: &str) -> Kind {
    if let Some(kinds) = schema.get("anyOf").and_then(Json::as_array) {
        let kinds = kinds.iter().filter(|schema| schema["type"] != "null");
        let mut kinds: Vec<Kind> = kinds.map(|schema| kind(schema, path)).collect();
        return if kinds.len() == 1 { kinds.remove(0) } else { Kind::Either(kinds) };
    }
    if let Some(variants) = schema.get("oneOf").and_then(Json::as_array) {
        return match variants.first() {
            Some(first) if first["type"] == "object" => Kind::Tagged(
                variants
                    .iter()
                    .map(|schema| (text(&schema["properties"]["type"], "const"), keys(schema, path)))
                    .collect(),
            ),
            _ => {
                let word = |schema| {
                    let name = text(schema, "const");
                    let aliases = aliases(&format!("{path}={name}")).collect();
                    KeyWord { name, doc: text(schema, "description"), aliases }
                };
                Kind::Choice(variants.iter().map(word).collect())
            }
        };
    }
    let name = match &schema["type"] {
        Json::String(name) => name.as_str(),
        Json::Array(names) => {
            names.iter().filter_map(Json::as_str).find(|name| *name != "null").unwrap_or("")
        }
        _ => "",
    };
    let length = |name: &str, missing: usize| schema[name].as_u64().map_or(missing, |length| length as usize);
    match name {
        "boolean" => Kind::Bool,
        "integer" => Kind::Integer {
            min: schema["minimum"].as_i64().unwrap_or(i64::MIN).into(),
            max: schema["maximum"].as_i64().unwrap_or(i64::MAX).into(),
            has_unit: matches!(schema["x-unit"].as_str(), Some("tokens" | "bytes")),
        },
        "number" => Kind::Number(Interval {
            low: end(schema, "minimum", "exclusiveMinimum"),
            high: end(schema, "maximum", "exclusiveMaximum"),
        }),
        "string" => Kind::Text {
            non_empty: length("minLength", 0) > 0,
            format: match schema["format"].as_str() {
                Some("path") => Format::Path,
                Some("time") => Format::Time,
                Some("date") => Format::Date,
                Some("tokenizer") => Format::Tokenizer,
                _ => Format::Plain,
            },
        },
        "array" => Kind::List {
            item: Box::new(kind(&schema["items"], path)),
            min: length("minItems", 0),
            max: length("maxItems", usize::MAX),
        },
        "object" if schema["properties"].is_null() => Kind::AnyTable,
        "object" => Kind::Table(keys(schema, path)),
        _ => panic!("the schema of a configuration key has a form that is not understood: {schema}"),
    }
}

fn end(schema: &Json, closed: &str, open: &str) -> Option<(f64, bool)> {
    let closed = schema[closed].as_f64().map(|end| (end, true));
    closed.or_else(|| schema[open].as_f64().map(|end| (end, false)))
}

fn properties(schema: &Json) -> impl Iterator<Item = (&String, &Json)> {
    schema["properties"].as_object().into_iter().flatten()
}

fn strings<'a>(schema: &'a Json, name: &str) -> impl Iterator<Item = &'a str> {
    schema[name].as_array().into_iter().flatten().filter_map(Json::as_str)
}

fn text(schema: &Json, name: &str) -> String {
    schema[name].as_str().unwrap_or_default().replace('\n', " ")
}
