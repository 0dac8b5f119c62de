//! Advice about settings that users try as options: `--lr`, `--batch-size`, `--training.local_batch_size`.

use super::argument::{is_key, set, with_arguments};
use super::fit::{Fit, fit, switch};
use super::hint::{By, Hint, Proposal, hint, left_out, without};
use super::rules::{Beside, beside};
use super::schema::sections;
use super::tree::Value;
use xtrain_data::shell_quoted;

/// Advice about an option that means a setting of the run file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The setting to write, or the reason why there is none.
    pub text: String,
    /// The arguments that set it, `--set section.key=value`; none if the run file has no such setting.
    pub sets: Vec<String>,
    /// True if the text names keys, so that it is for commands that take them.
    pub names_keys: bool,
    /// True if the name is known, here or in another program; false if it is only similar to a known one.
    pub exact: bool,
}

/// Advice about the option `name`, without its dashes: `lr`, `training.steps`. `value` is the text after it.
pub fn advice(name: &str, value: Option<&str>) -> Option<Advice> {
    let read = value.map(Value::of_argument);
    let read = read.as_ref();
    let (section, name) = match name.split_once('.') {
        Some((section, rest)) => (Some(section), rest.rsplit('.').next().unwrap_or(rest)),
        None => (None, name),
    };
    let off = value.and_then(switch) == Some(false);
    Some(match hint(section, name, read)? {
        Hint::Nothing { why, is_for_value } => {
            let text = if off && !is_for_value { left_out(why) } else { why.to_owned() };
            let names_keys = why
                .split('`')
                .skip(1)
                .step_by(2)
                .any(|part| is_key(part.split(" = ").next().unwrap_or(part)));
            Advice { text: with_arguments(&text), sets: Vec::new(), names_keys, exact: true }
        }
        Hint::Setting { setting, is_for_value } => {
            let set = with_arguments(&format!("`{setting}`"));
            let text = match off && !is_for_value {
                true => left_out(&format!("{set} turns it on")),
                false => format!("write {set}"),
            };
            Advice { text, sets: vec![set], names_keys: true, exact: true }
        }
        Hint::Keys(keys, by) => of_keys(&keys, value, by != By::Likeness),
    })
}

/// The arguments that `--set key=value` without a section means, or the reason why there are none.
pub(super) fn without_section(argument: &str) -> Option<String> {
    let (key, value) = argument.split_once('=')?;
    let is_name = !key.trim().is_empty() && !key.contains('.');
    // A message is one line.
    let is_plain = is_name && !argument.contains(char::is_control);
    let meant = is_plain.then(|| advice(key.trim(), Some(value))).flatten()?;
    Some(match meant.sets.is_empty() {
        true => format!("expected section.key=value; {}", meant.text),
        false => format!("expected section.key=value: {}", meant.sets.join(" or ")),
    })
}

/// Advice to set the key `path` (`train.steps`) to the value of an option called `name`.
pub fn advice_for(path: &str, name: &str, value: Option<&str>) -> Option<Advice> {
    let read = value.map(Value::of_argument);
    let (section, key) = path.split_once('.')?;
    let section = sections().iter().find(|own| own.name == section)?;
    let key = section.keys.iter().find(|own| own.name == key)?;
    let fit = fit(section, key, name, read.as_ref());
    Some(of_keys(&[Proposal { section, key, fit }], value, true))
}

fn of_keys(keys: &[Proposal], value: Option<&str>, exact: bool) -> Advice {
    let arguments = keys.iter().map(|proposal| {
        let path = proposal.path();
        let own = match (&proposal.fit, value) {
            (Fit::AsWritten, Some(text)) => format!("--set {}", shell_quoted(&format!("{path}={text}"))),
            (Fit::Other(toml), _) => set(&path, toml),
            _ => format!("--set {path}=VALUE"),
        };
        match beside(&path) {
            Some(Beside::Needs(setting)) => format!("{own} {}", with_arguments(&format!("`{setting}`"))),
            Some(Beside::Replaces(keys)) => format!("{own}{}", without(keys)),
            None => own,
        }
    });
    let sets: Vec<String> = arguments.collect();
    let wrong = keys.iter().find_map(|proposal| match &proposal.fit {
        Fit::Wrong(why) if !why.is_empty() => Some(format!("; {}", with_arguments(why))),
        _ => None,
    });
    let text =
        format!("keys of the run file are set with {}{}", sets.join(" or "), wrong.unwrap_or_default());
    Advice { text, sets, names_keys: true, exact }
}
