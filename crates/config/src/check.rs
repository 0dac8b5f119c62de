//! Checks the tree against the schema: unknown names, wrong types, values out of range, keys missing from a
//! table.
//!
//! Valid values stay in the tree, so that the rules between keys can use them; an invalid value is reported
//! and replaced by its default.

use serde_json::{Map, Value as Json};

use super::Config;
use super::error::{Origin, Report, one_line};
use super::keys::{MEANS_ANYTHING, absent};
use super::print::{quoted, toml_value};
use super::quantity::{COUNT_UNITS, parse_count};
use super::schema::{Format, Key, Kind, Section, key_names, sections};
use super::section::TokenizerChoice;
use super::suggest::{listing, nearest};
use super::time_limit::TimeLimit;
use super::tree::{Node, Tree, Value};

/// The configuration in `tree`; invalid values keep their defaults and are added to `report`.
pub(super) fn config(tree: &Tree, report: &mut Report) -> Config {
    let mut json = Map::new();
    for (name, node) in &tree.root {
        match (sections().iter().find(|section| section.name == *name), &node.value) {
            (Some(section), Value::Table(entries)) => {
                json.insert(name.clone(), self::section(section, entries, report));
            }
            (Some(section), _) => {
                doubt_all(section, report);
                report.at(
                    &node.origin,
                    None,
                    format!("`{name}` is a section; write it as [{name}], its keys below"),
                );
            }
            (None, Value::Table(_) | Value::List(_)) => {
                let (message, meant) = unknown_section(name);
                report.at(&node.origin, None, message);
                meant.into_iter().for_each(|section| doubt_all(section, report));
            }
            (None, _) => report.at(&node.origin, None, outside(name)),
        }
    }
    serde_json::from_value(Json::Object(json)).unwrap_or_else(|error| {
        report.about(&[], format!("{error} (this check is a bug of xtrain; please report it with the file)"));
        Config::default()
    })
}

fn doubt_all(section: &Section, report: &mut Report) {
    section.keys.iter().for_each(|key| report.doubt(format!("{}.{}", section.name, key.name)));
}

fn section(section: &Section, entries: &[(String, Node)], report: &mut Report) -> Json {
    let mut json = Map::new();
    for (name, node) in entries {
        let Some(key) = section.keys.iter().find(|key| key.name == *name) else {
            let (message, meant) = unknown_key(section, name);
            report.at(&node.origin, Some(&section.name), message);
            meant.into_iter().for_each(|key| report.doubt(key));
            continue;
        };
        let mut place = Place { section: &section.name, key, report };
        match place.value(&key.kind, node, name) {
            Some(value) => {
                json.insert(name.clone(), value);
            }
            None => report.doubt(format!("{}.{name}", section.name)),
        }
    }
    Json::Object(json)
}

/// A key of a section while its value is checked.
struct Place<'a> {
    section: &'a str,
    key: &'a Key,
    report: &'a mut Report,
}

impl Place<'_> {
    /// `node` as JSON if it is of `kind`; `path` names it: `train[1].weight`.
    fn value(&mut self, kind: &Kind, node: &Node, path: &str) -> Option<Json> {
        match (kind, &node.value) {
            (Kind::Bool, Value::Bool(flag)) => Some(Json::from(*flag)),
            (Kind::Integer { min, max, .. }, Value::Integer(integer)) if (min..=max).contains(&integer) => {
                i64::try_from(*integer).ok().map(Json::from)
            }
            (Kind::Integer { has_unit: true, .. }, Value::Text(text)) => match parse_count(text) {
                Some(count) => {
                    let node = Node { value: Value::Integer(count.into()), origin: node.origin.clone() };
                    self.value(kind, &node, path)
                }
                None => self.mismatch(kind, node, path),
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
            (Kind::Tagged(variants), Value::Table(entries)) => {
                self.tagged(variants, entries, &node.origin, path)
            }
            // A word that is none of the choices may have been meant for a number.
            (Kind::Either(kinds), value) => match kinds.iter().find(|kind| could_be(kind, value)) {
                Some(kind) => self.value(kind, node, path),
                None => self.mismatch(kind, node, path),
            },
            _ => self.mismatch(kind, node, path),
        }
    }

    fn text(&mut self, format: Format, text: &str, node: &Node, path: &str) -> Option<Json> {
        let problem = match format {
            Format::Time => text.parse::<TimeLimit>().err().map(|error| error.to_string()),
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

    /// Reports the allowed and the actual value at `path`.
    fn mismatch(&mut self, kind: &Kind, node: &Node, path: &str) -> Option<Json> {
        let advice = match (kind, &node.value) {
            (Kind::Choice(choices), Value::Text(text)) => {
                let called = choices.iter().find(|word| word.aliases.contains(text));
                let near = called
                    .map(|word| word.name.as_str())
                    .or_else(|| nearest(text, choices.iter().map(|word| word.name.as_str())));
                match choices.iter().flat_map(|word| &word.absent).find(|absent| absent.is_named(text)) {
                    Some(absent) => format!("; {}", absent.why),
                    None => near.map_or(String::new(), |near| format!("; did you mean \"{near}\"?")),
                }
            }
            (Kind::Integer { has_unit: true, .. }, Value::Text(_)) => {
                format!("; with a unit it is a string such as \"64K\" or \"64Ki\" ({COUNT_UNITS})")
            }
            (Kind::Integer { min, max, .. }, Value::Float(float))
                if float.fract() == 0.0 && (*min as f64..=*max as f64).contains(float) =>
            {
                format!("; write {float:.0}, without point and exponent")
            }
            (
                Kind::Text { .. } | Kind::Choice(_),
                Value::Bool(_) | Value::Integer(_) | Value::Float(_) | Value::Datetime(_),
            ) => {
                format!("; put it in quotes{}", self.key.for_example())
            }
            _ if path == self.key.name => self.key.for_example(),
            _ => String::new(),
        };
        let must = match (kind, &node.value) {
            // An upper bound that is TOML's own is mentioned only if it is exceeded.
            (Kind::Integer { min, max, .. }, Value::Integer(given)) if given > max => {
                format!("a whole number from {min} to {max}")
            }
            _ => kind.describe(),
        };
        self.fail(&node.origin, format!("`{path}` must be {must}, not {}{advice}", shown(&node.value)))
    }

    fn fail(&mut self, origin: &Origin, message: String) -> Option<Json> {
        self.report.at(origin, Some(self.section), message);
        None
    }
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
        | (Kind::Table(_) | Kind::Tagged(_), Value::Table(_)) => true,
        _ => false,
    }
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
        Value::Text(text) => format!("the string {}", quoted(&one_line(text))),
        Value::Datetime(time) => format!("the date {time}"),
        Value::List(items) => format!("a list of {}", items.len()),
        Value::Table(_) => "a table".to_owned(),
    }
}

/// The message for a section that does not exist, and the section that is probably meant.
fn unknown_section(name: &str) -> (String, Option<&'static Section>) {
    let shown = one_line(name);
    let named = |name: &str| sections().iter().find(|section| section.name == name);
    let alias = sections().iter().find(|section| section.aliases.iter().any(|alias| alias == name));
    match alias.or_else(|| nearest(name, section_names()).and_then(named)) {
        Some(near) => (format!("unknown section [{shown}]; did you mean [{}]?", near.name), Some(near)),
        None => {
            let why = absent(name).map_or(String::new(), |why| format!("{why}; "));
            let known = bracketed(section_names(), "and");
            (format!("unknown section [{shown}]; {why}the sections are {known}"), None)
        }
    }
}

/// The message for a key above all sections.
fn outside(name: &str) -> String {
    let shown = one_line(name);
    let owners = sections().iter().filter(|section| section.keys.iter().any(|key| key.is_called(name)));
    let owners: Vec<&str> = owners.map(|section| section.name.as_str()).collect();
    match owners.as_slice() {
        [] => format!(
            "unknown key `{shown}` outside any section; the sections are {}",
            bracketed(section_names(), "and")
        ),
        _ => format!("`{shown}` stands outside any section; write it below {}", bracketed(owners, "or")),
    }
}

fn section_names() -> impl Iterator<Item = &'static str> {
    sections().iter().map(|section| section.name.as_str())
}

/// The message for a key that `section` does not have, and the key that is probably meant (`model.layers`).
fn unknown_key(section: &Section, name: &str) -> (String, Option<String>) {
    let unknown = format!("unknown key `{}`", one_line(name));
    let here = section.keys.iter().find(|key| key.is_called(name)).map(|key| key.name.as_str());
    let elsewhere = || sections().iter().filter(|other| other.name != section.name);
    let named =
        |key: &str| (format!("{unknown}; did you mean `{key}`?"), Some(format!("{}.{key}", section.name)));

    if let Some(key) = here {
        return named(key);
    }
    if let Some(why) = section.why_absent(name) {
        return (
            format!("{unknown}; {why}; the keys of [{}] are {}", section.name, key_names(&section.keys)),
            None,
        );
    }
    let owners: Vec<&str> = elsewhere()
        .filter(|other| other.keys.iter().any(|key| key.name == name))
        .map(|other| other.name.as_str())
        .collect();
    if !owners.is_empty() {
        let meant = (owners.len() == 1).then(|| format!("{}.{name}", owners[0]));
        return (format!("{unknown}; it belongs in {}", bracketed(owners, "or")), meant);
    }
    if let Some(key) = nearest(name, section.keys.iter().map(|key| key.name.as_str())) {
        return named(key);
    }
    let pairs = || elsewhere().flat_map(|other| other.keys.iter().map(move |key| (other, key)));
    let alias = pairs().find(|(_, key)| key.is_called(name) && !MEANS_ANYTHING.contains(&name));
    if let (None, Some(why)) = (alias, absent(name)) {
        return (format!("{unknown}; {why}"), None);
    }
    let near = || {
        let near = nearest(name, pairs().map(|(_, key)| key.name.as_str()))?;
        pairs().find(|(_, key)| key.name == near)
    };
    match alias.or_else(near) {
        Some((other, key)) => {
            let meant = format!("{}.{}", other.name, key.name);
            (format!("{unknown}; did you mean `{}` in [{}]?", key.name, other.name), Some(meant))
        }
        None => (format!("{unknown}; the keys of [{}] are {}", section.name, key_names(&section.keys)), None),
    }
}

fn bracketed<'a>(names: impl IntoIterator<Item = &'a str>, last: &str) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("[{name}]")).collect();
    match names.as_slice() {
        [rest @ .., end] if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => names.concat(),
    }
}
