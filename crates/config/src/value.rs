//! Checks one value against the kind of its key.
//!
//! An invalid value gets a message with the allowed ones, and with what to write if another program's value
//! was meant.

use serde_json::{Map, Value as Json};

use super::argument::with_arguments;
use super::elsewhere::{Answer, answer};
use super::error::{Origin, Report, one_line};
use super::print::toml_value;
use super::quantity::{COUNT_UNITS, parse_count};
use super::schema::{Format, Key, KeyWord, Kind, key_names};
use super::section::TokenizerChoice;
use super::time_limit::TimeLimit;
use super::tree::{Node, Value};
use xtrain_checkpoint::suggest::{listing, nearest, plain};
use xtrain_data::{Date, string_literal};

/// A key of a section while its value is checked.
pub(super) struct KeyPlace<'a> {
    pub(super) section: &'a str,
    pub(super) key: &'a Key,
    pub(super) report: &'a mut Report,
}

impl KeyPlace<'_> {
    /// `node` as JSON if it is of `kind`; `path` names it: `train[1].weight`.
    pub(super) fn value(&mut self, kind: &Kind, node: &Node, path: &str) -> Option<Json> {
        self.value_among(kind, kind, node, path)
    }

    /// As [`KeyPlace::value`], of one of the kinds that are `allowed`, which an error names.
    fn value_among(&mut self, allowed: &Kind, kind: &Kind, node: &Node, path: &str) -> Option<Json> {
        match (kind, &node.value) {
            (Kind::Bool, Value::Bool(flag)) => Some(Json::from(*flag)),
            (Kind::Integer { min, max, .. }, Value::Integer(integer)) if (min..=max).contains(&integer) => {
                i64::try_from(*integer).ok().map(Json::from)
            }
            (Kind::Integer { has_unit: true, .. }, Value::Text(text)) => match parse_count(text) {
                Some(count) => {
                    let node = Node { value: Value::Integer(count.into()), origin: node.origin.clone() };
                    self.value_among(allowed, kind, &node, path)
                }
                None => self.mismatch(allowed, kind, node, path),
            },
            (Kind::Number(interval), Value::Integer(integer)) if interval.contains(*integer as f64) => {
                Some(Json::from(*integer as f64))
            }
            (Kind::Number(interval), Value::Float(float)) if interval.contains(*float) => {
                Some(Json::from(*float))
            }
            (Kind::Text { format, non_empty }, Value::Text(text)) if !(*non_empty && text.is_empty()) => {
                self.text(*format, text, node, path)
            }
            // A date may be written without quotes, as TOML has it.
            (Kind::Text { format: Format::Date, .. }, Value::Datetime(date)) => {
                self.text(Format::Date, date, node, path)
            }
            (Kind::Choice(choices), Value::Text(text)) if choices.iter().any(|word| word.name == *text) => {
                Some(Json::from(text.as_str()))
            }
            (Kind::List { item, min, max }, Value::List(nodes)) if (min..=max).contains(&&nodes.len()) => {
                let path = |index| format!("{path}[{index}]");
                let values =
                    nodes.iter().enumerate().map(|(index, node)| self.value(item, node, &path(index)));
                let values: Vec<Option<Json>> = values.collect();
                values.into_iter().collect::<Option<Vec<Json>>>().map(Json::from)
            }
            (Kind::Table(keys), Value::Table(entries)) => self.table(keys, None, entries, &node.origin, path),
            (Kind::AnyTable, value @ Value::Table(_)) => match json(value) {
                Some(json) => Some(json),
                None => {
                    self.fail(&node.origin, format!("`{path}` holds a date, or a number that is not finite"))
                }
            },
            (Kind::Tagged(variants), Value::Table(entries)) => {
                self.tagged(variants, entries, &node.origin, path)
            }
            // A word that is none of the choices may have been meant for a number.
            (Kind::Either(kinds), value) => match kinds.iter().find(|kind| could_be(kind, value)) {
                // A number out of range may be replaced by a word, and a list not by its entry.
                Some(one) => {
                    let has_words = kinds.iter().any(|kind| matches!(kind, Kind::Choice(_)));
                    self.value_among(if has_words { kind } else { one }, one, node, path)
                }
                None => self.mismatch(kind, kind, node, path),
            },
            _ => self.mismatch(allowed, kind, node, path),
        }
    }

    fn text(&mut self, format: Format, text: &str, node: &Node, path: &str) -> Option<Json> {
        let problem = match format {
            // A path is written with a slash or a point if such a word is meant as one.
            _ if let Some(Meant::Nothing(why)) = self.meant(&Kind::Bool, &node.value, path) => {
                Some(why.to_owned())
            }
            Format::Time => text.parse::<TimeLimit>().err().map(|error| error.to_string()),
            Format::Date if text.parse::<Date>().is_err() => {
                Some("no date of the form 2026-11-29".to_owned())
            }
            Format::Tokenizer if !text.contains(['/', '.']) && !TokenizerChoice::WORDS.contains(&text) => {
                nearest(text, TokenizerChoice::WORDS).map(|word| {
                    format!(
                        "did you mean \"{word}\"? A folder of that name is written \"./{}\"",
                        one_line(text)
                    )
                })
            }
            _ if text.contains('\0') => Some("there is a NUL character in it".to_owned()),
            _ => None,
        };
        match problem {
            None => Some(Json::from(text)),
            Some(problem) => {
                self.fail(&node.origin, format!("`{path}` is {}; {problem}", shown(&node.value)))
            }
        }
    }

    /// A table with the given keys. `tag` is a further key that is already checked.
    fn table(
        &mut self,
        keys: &[Key],
        tag: Option<&str>,
        entries: &[(String, Node)],
        origin: &Origin,
        path: &str,
    ) -> Option<Json> {
        let mut json = Map::new();
        let mut right = true;
        for (name, node) in entries.iter().filter(|(name, _)| tag != Some(name)) {
            let value = match keys.iter().find(|key| key.name == *name) {
                Some(key) => self.value(&key.kind, node, &format!("{path}.{name}")),
                None => {
                    let advice = match nearest(name, keys.iter().map(|key| key.name.as_str())) {
                        Some(near) => format!("did you mean `{near}`?"),
                        None => format!("its keys are {}", key_names(keys)),
                    };
                    self.fail(&node.origin, format!("unknown key `{}` in `{path}`; {advice}", one_line(name)))
                }
            };
            right &= value.is_some();
            json.extend(value.map(|value| (name.clone(), value)));
        }
        for key in
            keys.iter().filter(|key| key.required && !entries.iter().any(|(name, _)| *name == key.name))
        {
            self.fail(origin, format!("`{path}` needs `{}`{}", key.name, key.for_example()));
            right = false;
        }
        right.then_some(Json::Object(json))
    }

    fn tagged(
        &mut self,
        variants: &[(String, Vec<Key>)],
        entries: &[(String, Node)],
        origin: &Origin,
        path: &str,
    ) -> Option<Json> {
        let tags = || variants.iter().map(|(tag, _)| tag.as_str());
        let allowed = listing(tags(), "\"", "or");
        let Some((_, tag)) = entries.iter().find(|(name, _)| name == "type") else {
            return self.fail(
                origin,
                format!("`{path}` needs `type`, which is {allowed}{}", self.key.for_example()),
            );
        };
        let written = if let Value::Text(text) = &tag.value { text.as_str() } else { "" };
        let Some((name, keys)) = variants.iter().find(|(name, _)| name == written) else {
            let advice =
                nearest(written, tags()).map_or(String::new(), |near| format!("; did you mean \"{near}\"?"));
            return self.fail(
                &tag.origin,
                format!("`{path}.type` must be {allowed}, not {}{advice}", shown(&tag.value)),
            );
        };
        let mut json = self.table(keys, Some("type"), entries, origin, path)?;
        json["type"] = Json::from(name.as_str());
        Some(json)
    }

    /// Reports the allowed and the actual value at `path`, which is meant for `kind`.
    fn mismatch(&mut self, allowed: &Kind, kind: &Kind, node: &Node, path: &str) -> Option<Json> {
        let advice = match (self.meant(kind, &node.value, path), kind, &node.value) {
            (Some(Meant::Nothing(why)), ..) => format!("; {why}"),
            (Some(Meant::Value(ours)), ..) => format!("; did you mean {ours}?"),
            (None, Kind::Choice(choices), Value::Text(text)) => {
                let near = nearest(text, choices.iter().map(|word| word.name.as_str()));
                near.map_or(String::new(), |near| format!("; did you mean \"{near}\"?"))
            }
            (None, Kind::Integer { has_unit: true, .. }, Value::Text(_)) => {
                format!("; with a unit it is a string such as \"64K\" or \"64Ki\" ({COUNT_UNITS})")
            }
            (None, Kind::Integer { min, max, .. }, Value::Float(float))
                if float.fract() == 0.0 && (*min as f64..=*max as f64).contains(float) =>
            {
                format!("; write {float:.0}, without point and exponent")
            }
            (
                None,
                Kind::Text { .. } | Kind::Choice(_),
                Value::Bool(_) | Value::Integer(_) | Value::Float(_) | Value::Datetime(_),
            ) => {
                format!("; put it in quotes{}", self.key.for_example())
            }
            _ if path == self.key.name => self.key.for_example(),
            _ => String::new(),
        };
        let must = match (allowed, &node.value) {
            // An upper bound that is TOML's own is mentioned only if it is exceeded.
            (Kind::Integer { min, max, .. }, Value::Integer(given)) if given > max => {
                format!("a whole number from {min} to {max}")
            }
            _ => allowed.describe(),
        };
        self.fail(&node.origin, format!("`{path}` must be {must}, not {}{advice}", shown(&node.value)))
    }

    /// The value that another program's `value` of the key corresponds to; `None` inside a list or a table.
    fn meant(&self, kind: &Kind, value: &Value, path: &str) -> Option<Meant> {
        if path == self.key.name { meant(self.section, self.key, kind, value) } else { None }
    }

    fn fail(&mut self, origin: &Origin, message: String) -> Option<Json> {
        let is_argument = matches!(origin, Origin::Argument { .. });
        let message = if is_argument { with_arguments(&message) } else { message };
        self.report.add_at(origin, Some(self.section), message);
        None
    }
}

/// The counterpart of another program's value.
pub(super) enum Meant {
    /// A value of ours, in TOML.
    Value(String),
    /// None, for this reason.
    Nothing(&'static str),
}

/// The counterpart of `value`, of another program, among the values of `kind` that `key` may have.
pub(super) fn meant(section: &str, key: &Key, kind: &Kind, value: &Value) -> Option<Meant> {
    let word = value.word()?;
    match answer(&format!("{section}.{}={word}", key.name)) {
        Some(Answer::Why(why)) => return Some(Meant::Nothing(why)),
        Some(Answer::Write(setting)) => {
            return setting.split_once(" = ").map(|(_, value)| Meant::Value(value.to_owned()));
        }
        None => {}
    }
    let Kind::Choice(words) = kind else { return None };
    let is_called = |own: &&KeyWord| {
        own.aliases.iter().copied().chain([own.name.as_str()]).any(|name| plain(name) == plain(&word))
    };
    words.iter().find(is_called).map(|own| Meant::Value(string_literal(&own.name)))
}

/// True for the kind, of those that a key may have, that `value` was meant for.
fn could_be(kind: &Kind, value: &Value) -> bool {
    match (kind, value) {
        (Kind::Integer { has_unit: true, .. }, Value::Text(text)) => parse_count(text).is_some(),
        (Kind::Choice(words), value) => words.iter().any(|word| value.is_text(&word.name)),
        (Kind::Bool, Value::Bool(_))
        | (Kind::Integer { .. }, Value::Integer(_))
        | (Kind::Number(_), Value::Integer(_) | Value::Float(_))
        | (Kind::Text { .. }, Value::Text(_))
        | (Kind::List { .. }, Value::List(_))
        | (Kind::Table(_) | Kind::AnyTable | Kind::Tagged(_), Value::Table(_)) => true,
        _ => false,
    }
}

/// Any value as JSON; `None` for dates, and for numbers that JSON lacks.
fn json(value: &Value) -> Option<Json> {
    Some(match value {
        Value::Bool(flag) => Json::from(*flag),
        Value::Integer(integer) => Json::from(i64::try_from(*integer).ok()?),
        Value::Float(float) => Json::Number(serde_json::Number::from_f64(*float)?),
        Value::Text(text) => Json::from(text.as_str()),
        Value::Datetime(_) => return None,
        Value::List(nodes) => nodes.iter().map(|node| json(&node.value)).collect::<Option<Vec<_>>>()?.into(),
        Value::Table(entries) => {
            let entries = entries.iter().map(|(name, node)| Some((name.clone(), json(&node.value)?)));
            Json::Object(entries.collect::<Option<_>>()?)
        }
    })
}

impl Value {
    fn is_text(&self, text: &str) -> bool {
        matches!(self, Value::Text(own) if own == text)
    }
}

/// A value as a message names it.
fn shown(value: &Value) -> String {
    match value {
        Value::Bool(flag) => flag.to_string(),
        Value::Integer(integer) => integer.to_string(),
        Value::Float(float) => {
            if float.is_finite() {
                toml_value(&Json::from(*float))
            } else {
                float.to_string()
            }
        }
        Value::Text(text) => format!("the string {}", string_literal(&one_line(text))),
        Value::Datetime(time) => format!("the date {time}"),
        Value::List(items) => format!("a list of {}", items.len()),
        Value::Table(_) => "a table".to_owned(),
    }
}
