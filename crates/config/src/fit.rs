//! Values of other programs in the form that a key takes.
//!
//! `True`, `full_shard auto_wrap` and `3600` (seconds) become `true`, `"weights"` and `"1h"`. A converted
//! value is proposed, never used.

use std::path::Path;

use super::error::{Origin, Origins, Report};
use super::print::toml_value;
use super::schema::{Format, Key, Kind, Section};
use super::tree::{Node, Value};
use super::value::{KeyPlace, Meant, meant};
use xtrain_checkpoint::suggest::plain;
use xtrain_data::string_literal;

/// The fate of a value that was written for a key under another name.
pub(super) enum Fit {
    /// No value was written, and none is implied.
    Unknown,
    /// The key takes the value unchanged.
    AsWritten,
    /// The key takes this one, in TOML.
    Other(String),
    /// The key takes none like it, for this reason.
    Wrong(String),
}

/// The form of `value` that `key` takes. `called` is the name under which it was written, which may say the
/// unit; without a value, an option is a switch.
pub(super) fn fit(section: &Section, key: &Key, called: &str, value: Option<&Value>) -> Fit {
    let yes = Value::Bool(true);
    let Some(written) = value else {
        let implied = converted(section, key, &key.kind, called, &yes);
        return implied.map_or(Fit::Unknown, Fit::Other);
    };
    let wrong = match check(section, key, written) {
        Ok(()) => return Fit::AsWritten,
        Err(wrong) => wrong,
    };
    converted(section, key, &key.kind, called, written).map_or(Fit::Wrong(wrong), Fit::Other)
}

/// `value` in a form that `key` takes, in TOML, if there is one.
fn converted(section: &Section, key: &Key, kind: &Kind, called: &str, value: &Value) -> Option<String> {
    let candidate = match (kind, value) {
        (_, value) if check(section, key, value).is_ok() => Some(toml(value)?),
        (Kind::Either(kinds), value) => {
            kinds.iter().find_map(|kind| converted(section, key, kind, called, value))
        }
        (Kind::Bool, value) => switch(&value.word()?).map(|on| on.to_string()),
        (Kind::Choice(_), value) => {
            let text = value.word()?;
            // FSDP's options are one string: `full_shard auto_wrap`.
            let words = [text.as_str()].into_iter().chain(text.split([' ', ',']));
            let mut meant =
                words.filter_map(|word| meant(&section.name, key, kind, &Value::Text(word.into())));
            meant.find_map(|meant| match meant {
                Meant::Value(ours) => Some(ours),
                Meant::Nothing(_) => None,
            })
        }
        (Kind::Text { format: Format::Time, .. }, value) => time(called, value.word()?.parse().ok()?),
        (Kind::Integer { .. } | Kind::Number(_), Value::Text(text)) => {
            let number: f64 = text.replace('_', "").parse().ok()?;
            Some(if number.fract() == 0.0 { format!("{number:.0}") } else { number.to_string() })
        }
        (Kind::Integer { .. }, Value::Float(float)) if float.fract() == 0.0 => Some(format!("{float:.0}")),
        (Kind::List { .. }, Value::Text(text)) => Some(format!("[{}]", string_literal(text))),
        _ => None,
    }?;
    check(section, key, &Value::of_argument(&candidate)).is_ok().then_some(candidate)
}

/// The words with which programs turn a switch on and off.
pub(super) fn switch(word: &str) -> Option<bool> {
    match plain(word).as_str() {
        "true" | "yes" | "on" | "1" | "enabled" | "enable" => Some(true),
        "false" | "no" | "off" | "0" | "none" | "null" | "never" | "disabled" | "disable" | "" => Some(false),
        _ => None,
    }
}

/// A number of the unit that the name says, seconds if it says none, as a time.
fn time(called: &str, number: f64) -> Option<String> {
    let called = plain(called);
    let unit = match () {
        () if called.contains("hour") => 3600.0,
        () if called.contains("minute") || called.ends_with("mins") => 60.0,
        () => 1.0,
    };
    let seconds = (number * unit).round();
    let seconds = (1.0..1e9).contains(&seconds).then_some(seconds as u64)?;
    let parts = [(seconds / 3600, 'h'), (seconds / 60 % 60, 'm'), (seconds % 60, 's')];
    let parts = parts.into_iter().filter(|(count, _)| *count > 0);
    Some(string_literal(&parts.map(|(count, unit)| format!("{count}{unit}")).collect::<String>()))
}

/// Checks `value` as the run file's is checked; the error is that message.
fn check(section: &Section, key: &Key, value: &Value) -> Result<(), String> {
    let origin = Origin::File { file: Path::new("").into() };
    let mut report = Report::new(Path::new("").into(), Origins::new(), Vec::new());
    let node = Node { value: value.clone(), origin };
    let mut place = KeyPlace { section: &section.name, key, report: &mut report };
    let valid = place.value(&key.kind, &node, &key.name).is_some();
    match report.finish() {
        Ok(()) if valid => Ok(()),
        Ok(()) => Err(String::new()),
        Err(errors) => Err(errors.errors()[0].message.clone()),
    }
}

/// A value as TOML; `None` for a table.
pub(super) fn toml(value: &Value) -> Option<String> {
    Some(match value {
        Value::Text(text) => string_literal(text),
        Value::Float(float) => toml_value(&serde_json::Value::from(*float)),
        Value::List(items) => {
            let items: Option<Vec<String>> = items.iter().map(|item| toml(&item.value)).collect();
            format!("[{}]", items?.join(", "))
        }
        value => value.word()?,
    })
}
