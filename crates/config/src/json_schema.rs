//! docs/run-file.schema.json, with which editors complete and check run files.
//!
//! It is written from the same types as the checks, in plain JSON Schema: what only our own checks know
//! (names in other programs, rules between keys) is not in it.

use serde_json::{Map, Value as Json, json};

use super::schema::{Format, Interval, Key, KeyWord, Kind, Section, sections};

/// A number with a unit of counts, or without one.
pub(super) const COUNT: &str = "^([0-9]+(\\.0+)?|[0-9]+(\\.[0-9]+)?(K|M|G|B|T|Ki|Mi|Gi|Ti))$";

/// A date such as `2026-11-29`.
const DATE: &str = "^[0-9]{4}-[0-9]{2}-[0-9]{2}$";

/// A time such as `2h30m`.
const TIME: &str = "^([0-9]+(d|h|m|s|ms))*[0-9]+(\\.[0-9]+)?(d|h|m|s|ms)$";

/// The JSON schema of run files (draft 7, the newest that editors of TOML agree on), pretty-printed.
pub fn run_file_schema() -> String {
    let sections: Map<String, Json> =
        sections().iter().map(|section| (section.name.clone(), self::section(section))).collect();
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "xtrain run file",
        "description": "Generated from the types in crates/config/src; docs/configuration.md is the same for people.",
        "type": "object",
        "additionalProperties": false,
        "properties": sections,
    });
    format!("{schema:#}\n")
}

fn section(section: &Section) -> Json {
    described(table(&section.keys, None), &section.doc)
}

/// A table of `keys`; `tag` is the name of a variant, which its key `type` must hold.
fn table(keys: &[Key], tag: Option<&str>) -> Json {
    let mut properties: Map<String, Json> =
        tag.iter().map(|tag| ("type".into(), json!({ "const": tag }))).collect();
    properties.extend(keys.iter().map(|key| (key.name.clone(), self::key(key))));
    let mut table = json!({ "type": "object", "additionalProperties": false, "properties": properties });
    let required: Vec<&str> = tag
        .iter()
        .map(|_| "type")
        .chain(keys.iter().filter(|key| key.required).map(|key| key.name.as_str()))
        .collect();
    if !required.is_empty() {
        table["required"] = json!(required);
    }
    table
}

fn key(key: &Key) -> Json {
    let unit = key.unit.as_ref().map_or(String::new(), |unit| format!(" In {unit}."));
    described(value(&key.kind), &format!("{}{unit} Default: {}.", key.doc, key.default))
}

fn described(mut schema: Json, doc: &str) -> Json {
    schema["description"] = json!(doc);
    schema
}

fn value(kind: &Kind) -> Json {
    match kind {
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Integer { min, max, has_unit } => {
            let number = integer(*min, *max);
            match has_unit {
                true => json!({ "anyOf": [number, { "type": "string", "pattern": COUNT }] }),
                false => number,
            }
        }
        Kind::Number(interval) => number(interval),
        Kind::Text { format: Format::Time, .. } => json!({ "type": "string", "pattern": TIME }),
        Kind::Text { format: Format::Date, .. } => json!({ "type": "string", "pattern": DATE }),
        Kind::Text { non_empty: true, .. } => json!({ "type": "string", "minLength": 1 }),
        Kind::Text { .. } => json!({ "type": "string" }),
        Kind::Choice(words) => {
            let word = |word: &KeyWord| described(json!({ "const": word.name }), &word.doc);
            json!({ "oneOf": words.iter().map(word).collect::<Vec<_>>() })
        }
        Kind::List { item, min, max } => {
            let mut list = json!({ "type": "array", "items": value(item) });
            if *min > 0 {
                list["minItems"] = json!(min);
            }
            if *max < usize::MAX {
                list["maxItems"] = json!(max);
            }
            list
        }
        Kind::Table(keys) => table(keys, None),
        Kind::AnyTable => json!({ "type": "object" }),
        Kind::Tagged(variants) => {
            let variant = |(tag, keys): &(String, Vec<Key>)| table(keys, Some(tag));
            json!({ "oneOf": variants.iter().map(variant).collect::<Vec<_>>() })
        }
        Kind::Either(kinds) => json!({ "anyOf": kinds.iter().map(value).collect::<Vec<_>>() }),
    }
}

/// A whole number. Ends that are TOML's own are left out.
fn integer(min: i128, max: i128) -> Json {
    let mut schema = json!({ "type": "integer" });
    for (name, end, own) in [("minimum", min, i64::MIN), ("maximum", max, i64::MAX)] {
        if let Ok(end) = i64::try_from(end)
            && end != own
        {
            schema[name] = json!(end);
        }
    }
    schema
}

fn number(interval: &Interval) -> Json {
    let mut schema = json!({ "type": "number" });
    for (end, closed, open) in
        [(interval.low, "minimum", "exclusiveMinimum"), (interval.high, "maximum", "exclusiveMaximum")]
    {
        if let Some((end, is_closed)) = end {
            schema[if is_closed { closed } else { open }] = json!(end);
        }
    }
    schema
}
