//! Messages for sections and keys that do not exist, each with the one that is meant.

use xtrain_checkpoint::suggest::nearest;

use super::argument::with_arguments;
use super::elsewhere::{Answer, answer};
use super::error::{Origin, one_line};
use super::fit::{Fit, switch, toml};
use super::hint::{By, Hint, Proposal, answer_for_value, hint, left_out, section_called, without};
use super::rules::{Beside, beside};
use super::schema::{Section, key_names, sections};
use super::tree::{Node, Value};

/// The message for a section that does not exist, and the section that is probably meant.
pub(super) fn section(name: &str) -> (String, Option<&'static Section>) {
    let shown = one_line(name);
    let named = |name: &str| sections().iter().find(|section| section.name == name);
    let why = match answer(name) {
        Some(Answer::Why(why)) => Some((*why).to_owned()),
        Some(Answer::Write(setting)) => Some(format!("did you mean {}?", below(setting))),
        None => None,
    };
    let near = || nearest(name, section_names()).and_then(named);
    match section_called(name).or_else(|| if why.is_none() { near() } else { None }) {
        Some(near) => (format!("unknown section [{shown}]; did you mean [{}]?", near.name), Some(near)),
        None => {
            let why = why.map_or(String::new(), |why| format!("{why}; "));
            let known = bracketed(section_names(), "and");
            (format!("unknown section [{shown}]; {why}the sections are {known}"), None)
        }
    }
}

/// The message for a key above all sections.
pub(super) fn outside(name: &str, node: &Node) -> String {
    let shown = one_line(name);
    let outside = format!("`{shown}` stands outside any section");
    match hint(None, name, Some(&node.value)) {
        Some(Hint::Keys(keys, By::Name)) => {
            format!("{outside}; write it below {}", bracketed(sections_of(&keys), "or"))
        }
        Some(Hint::Keys(keys, By::Alias)) => {
            let keys: Vec<String> = keys.iter().map(|key| format!("`{}`", key.path())).collect();
            format!("{outside}; did you mean {}?", keys.join(" or "))
        }
        Some(Hint::Setting { setting, .. }) => format!("{outside}; did you mean {}?", below(setting)),
        Some(Hint::Nothing { why, .. }) => format!("unknown key `{shown}`; {why}"),
        Some(Hint::Keys(_, By::Likeness)) | None => format!(
            "unknown key `{shown}` outside any section; the sections are {}",
            bracketed(section_names(), "and")
        ),
    }
}

/// The reason why a section is no key with this value, if other programs have such a key.
pub(super) fn section_as_key(name: &str, value: &Value) -> Option<&'static str> {
    match answer_for_value(name, Some(value)).or_else(|| answer(name)) {
        Some(Answer::Why(why)) => Some(why),
        _ => None,
    }
}

/// The message for a key that `section` does not have, and the keys that are probably meant (`model.layers`).
pub(super) fn key(section: &'static Section, name: &str, node: &Node) -> (String, Vec<String>) {
    let (name, node) = last(name, node);
    match hint(Some(&section.name), name, written_value(node)) {
        Some(found) => answer_with(&section.name, Some(section), name, node, found),
        None => (
            format!(
                "unknown key `{}`; the keys of [{}] are {}",
                one_line(name),
                section.name,
                key_names(&section.keys)
            ),
            Vec::new(),
        ),
    }
}

/// As [`key`], for the section `written`, which does not exist and probably means `meant`; `None` if nothing
/// is known about the name.
pub(super) fn key_of_unknown_section(
    written: &str,
    meant: Option<&'static Section>,
    name: &str,
    node: &Node,
) -> Option<(String, Vec<String>)> {
    let (name, node) = last(name, node);
    let found = hint(Some(written), name, written_value(node))?;
    let is_guess = meant.is_none() && matches!(found, Hint::Keys(_, By::Likeness));
    // The message about the section gives its own reason.
    let is_the_sections = section_called(written).is_none() && answer(written).is_some();
    let is_known = !is_guess && (!is_the_sections || matches!(node.origin, Origin::Argument { .. }));
    is_known.then(|| answer_with(written, meant, name, node, found))
}

/// The key that an argument names: `lr` in `optimizer.params.lr=1e-4`.
fn last<'a>(name: &'a str, node: &'a Node) -> (&'a str, &'a Node) {
    match (&node.value, &node.origin) {
        (Value::Table(entries), Origin::Argument { .. }) => match entries.as_slice() {
            [(inner, value)] => last(inner, value),
            _ => (name, node),
        },
        _ => (name, node),
    }
}

/// The value of a node; `None` for that of `--set section.key=`, which removes a key.
fn written_value(node: &Node) -> Option<&Value> {
    Some(&node.value).filter(|value| !matches!(value, Value::Text(text) if text.is_empty()))
}

/// The message that `found` gives for the key `name`, and the keys that are meant.
fn answer_with(
    written: &str,
    own: Option<&'static Section>,
    name: &str,
    node: &Node,
    found: Hint,
) -> (String, Vec<String>) {
    let unknown = format!("unknown key `{}`", one_line(name));
    let is_argument = matches!(node.origin, Origin::Argument { .. });
    let shown = |setting: &str| if is_argument { format!("`{setting}`") } else { below(setting) };
    // Switched off, a setting that does not exist is as asked for.
    let off = node.value.word().and_then(|word| switch(&word)) == Some(false);
    let one = |keys: &[Proposal]| if let [one] = keys { vec![one.path()] } else { Vec::new() };
    let (message, keys) = match found {
        Hint::Nothing { why, is_for_value: false } if off => {
            (format!("{unknown}; {}", left_out(why)), Vec::new())
        }
        Hint::Nothing { why, .. } => (format!("{unknown}; {why}"), Vec::new()),
        Hint::Setting { setting, is_for_value: false } if off => {
            let turned_on = format!("{} turns it on", shown(setting));
            (format!("{unknown}; {}", left_out(&turned_on)), Vec::new())
        }
        Hint::Setting { setting, .. } => {
            let key = setting.split(" = ").next().unwrap_or_default().to_owned();
            (format!("{unknown}; did you mean {}?", shown(setting)), vec![key])
        }
        Hint::Keys(keys, By::Name) if keys.iter().all(|key| matches!(key.fit, Fit::AsWritten)) => {
            (format!("{unknown}; it belongs in {}", bracketed(sections_of(&keys), "or")), one(&keys))
        }
        Hint::Keys(keys, _) => {
            let is_written = |section: &Section| own.is_some() && section.name == written;
            let proposals = keys.iter().map(|key| match (&key.fit, is_argument) {
                (Fit::Other(toml), true) => format!("`{} = {toml}`", key.path()),
                (Fit::AsWritten, true) if !is_written(key.section) || beside(&key.path()).is_some() => {
                    match toml(&node.value) {
                        Some(toml) => format!("`{} = {toml}`", key.path()),
                        None => format!("`{}`", key.path()),
                    }
                }
                _ => proposal(key, own.is_some_and(|own| own.name == key.section.name)),
            });
            let proposals: Vec<String> = proposals.collect();
            let wrong = keys.iter().find_map(|key| match &key.fit {
                Fit::Wrong(why) if !why.is_empty() => Some(format!(" {why}")),
                _ => None,
            });
            let also = match keys.as_slice() {
                [one] => beside(&one.path()).filter(|_| wrong.is_none()),
                _ => None,
            };
            // Arguments follow each other; in a file, the other setting may be in another section.
            let (with, more) = match also {
                Some(Beside::Needs(setting)) if is_argument => (format!(" `{setting}`"), String::new()),
                Some(Beside::Needs(setting)) => (String::new(), format!(" It needs {}", below(setting))),
                Some(Beside::Replaces(keys)) if is_argument => (without(keys), String::new()),
                Some(Beside::Replaces(keys)) => {
                    (String::new(), format!(" It takes the place of `{}`", keys.join("` or `")))
                }
                None => (String::new(), String::new()),
            };
            let wrong = wrong.unwrap_or_default();
            let meant = format!("did you mean {}{with}?{wrong}{more}", proposals.join(" or "));
            (format!("{unknown}; {meant}"), one(&keys))
        }
    };
    (if is_argument { with_arguments(&message) } else { message }, keys)
}

/// `` `lr` ``, with a value if it is another than the one written, and with the section if that is another.
fn proposal(proposal: &Proposal, is_own: bool) -> String {
    let name = &proposal.key.name;
    let place = if is_own { String::new() } else { format!(" in [{}]", proposal.section.name) };
    match &proposal.fit {
        Fit::Other(value) => format!("`{name} = {value}`{place}"),
        Fit::AsWritten | Fit::Wrong(_) | Fit::Unknown => format!("`{name}`{place}"),
    }
}

/// `section.key = value` as it is written below its section.
fn below(setting: &str) -> String {
    match setting.split_once('.') {
        Some((section, setting)) => format!("`{setting}` in [{section}]"),
        None => format!("`{setting}`"),
    }
}

fn sections_of(keys: &[Proposal]) -> Vec<&'static str> {
    keys.iter().map(|key| key.section.name.as_str()).collect()
}

fn section_names() -> impl Iterator<Item = &'static str> {
    sections().iter().map(|section| section.name.as_str())
}

fn bracketed<'a>(names: impl IntoIterator<Item = &'a str>, last: &str) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("[{name}]")).collect();
    match names.as_slice() {
        [rest @ .., end] if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => names.concat(),
    }
}
