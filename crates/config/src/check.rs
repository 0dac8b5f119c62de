//! Checks the tree against the schema: unknown names, wrong types, values out of range, keys missing from a
//! table.
//!
//! Valid values stay in the tree, so that the rules between keys can use them; an invalid value is reported
//! and replaced by its default.

use serde_json::{Map, Value as Json};

use super::Config;
use super::error::{Origin, Report};
use super::schema::{Section, sections};
use super::tree::{Node, Tree, Value};
use super::unknown;
use super::value::KeyPlace;

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
                let why = unknown::section_as_key(name, &node.value);
                let why = why.map_or(String::new(), |why| format!("; {why}"));
                report.add_at(
                    &node.origin,
                    None,
                    format!("`{name}` is a section; write it as [{name}], its keys below{why}"),
                );
            }
            (None, Value::Table(entries)) => unknown_section(name, entries, node, report),
            (None, Value::List(items)) if items.iter().any(|item| matches!(item.value, Value::Table(_))) => {
                unknown_section(name, &[], node, report);
            }
            (None, _) => report.add_at(&node.origin, None, unknown::outside(name, node)),
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

/// Reports a section that does not exist, and those of its keys that would not be right in the section that
/// is meant. Of `--set`, which names one key, the message about the key is enough.
fn unknown_section(name: &str, entries: &[(String, Node)], node: &Node, report: &mut Report) {
    let (message, meant) = unknown::section(name);
    meant.into_iter().for_each(|section| doubt_all(section, report));
    let is_right = |key: &str| meant.is_some_and(|meant| meant.keys.iter().any(|own| own.name == key));
    let wrong = entries.iter().filter(|(key, _)| !is_right(key));
    let wrong: Vec<_> = wrong
        .filter_map(|(key, node)| Some((node, unknown::key_of_unknown_section(name, meant, key, node)?)))
        .collect();
    let is_said = wrong.len() == entries.len()
        && wrong.iter().all(|(node, _)| matches!(node.origin, Origin::Argument { .. }));
    if wrong.is_empty() || !is_said {
        report.add_at(&node.origin, None, message);
    }
    for (node, (message, keys)) in wrong {
        report.add_at(&node.origin, Some(name), message);
        keys.into_iter().for_each(|key| report.doubt(key));
    }
}

fn section(section: &'static Section, entries: &[(String, Node)], report: &mut Report) -> Json {
    let mut json = Map::new();
    for (name, node) in entries {
        let Some(key) = section.keys.iter().find(|key| key.name == *name) else {
            let (message, meant) = unknown::key(section, name, node);
            report.add_at(&node.origin, Some(&section.name), message);
            meant.into_iter().for_each(|key| report.doubt(key));
            continue;
        };
        let mut place = KeyPlace { section: &section.name, key, report };
        match place.value(&key.kind, node, name) {
            Some(value) => {
                json.insert(name.clone(), value);
            }
            None => report.doubt(format!("{}.{name}", section.name)),
        }
    }
    Json::Object(json)
}
