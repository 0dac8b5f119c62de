//! The setting that a name means which the run file does not have: a name of another program, or a misspelt
//! one.

use xtrain_checkpoint::suggest::{nearest, plain};

use super::elsewhere::{Answer, answer};
use super::fit::{Fit, fit, switch};
use super::schema::{Key, Section, sections};
use super::tree::Value;

/// Arguments that take keys out of a run file.
pub(super) fn without(keys: &[&str]) -> String {
    keys.iter().map(|key| format!(" --set {key}=")).collect()
}

/// Names that say nothing without their section.
const MEANS_ANYTHING: [&str; 4] = ["name", "type", "path", "enable"];

/// Beginnings that other programs put before a name that is known without them.
const PREFIXES: [&str; 9] = [
    "use",
    "enable",
    "fsdpconfig",
    "fsdp",
    "megatronlm",
    "parallelismconfig",
    "deepspeedconfig",
    "deepspeed",
    "fp8",
];

/// The setting that a name means.
pub(super) enum Hint {
    /// A key, or several if sections share the name.
    Keys(Vec<Proposal>, By),
    /// This setting, `section.key = value`.
    Setting { setting: &'static str, is_for_value: bool },
    /// None, for this reason.
    Nothing { why: &'static str, is_for_value: bool },
}

/// `why` about a setting that is off and does not exist here, which is as asked for.
pub(super) fn left_out(why: &str) -> String {
    format!("leave it out; {}", why.trim_end_matches("; leave it out"))
}

/// A key and what becomes of the value.
pub(super) struct Proposal {
    pub(super) section: &'static Section,
    pub(super) key: &'static Key,
    pub(super) fit: Fit,
}

/// How a key was found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// It has this name.
    Name,
    /// It has this name in another program.
    Alias,
    /// Its name is similar.
    Likeness,
}

impl Proposal {
    /// Its name with the section's: `train.steps`.
    pub(super) fn path(&self) -> String {
        format!("{}.{}", self.section.name, self.key.name)
    }
}

/// The section of this name, here or in another program.
pub(super) fn section_called(name: &str) -> Option<&'static Section> {
    let name = plain(name);
    sections().iter().find(|section| {
        section.aliases.iter().copied().chain([section.name.as_str()]).any(|own| plain(own) == name)
    })
}

/// The setting that `name` means in the section `section`, which need not be one of ours, or in any section.
pub(super) fn hint(section: Option<&str>, name: &str, value: Option<&Value>) -> Option<Hint> {
    let own = section.and_then(section_called);
    if let (Some(section), None) = (section, own)
        && let Some(found) = answered(section, value)
    {
        return Some(found);
    }
    let exact = exact(section, own, name, value);
    let by_prefix = || {
        let name = plain(name);
        let rest = PREFIXES.iter().filter_map(|prefix| name.strip_prefix(prefix));
        rest.filter(|rest| rest.len() > 1).find_map(|rest| self::exact(section, own, rest, value))
    };
    let by_section = || {
        let is_switch = ["enable", "enabled"].contains(&plain(name).as_str());
        section.filter(|_| is_switch).and_then(|section| self::exact(None, None, section, value))
    };
    exact.or_else(by_section).or_else(by_prefix).or_else(|| similar(own, name, value))
}

/// As [`hint`], for names that are known.
fn exact(
    section: Option<&str>,
    own: Option<&'static Section>,
    name: &str,
    value: Option<&Value>,
) -> Option<Hint> {
    for section in section.into_iter().chain(own.map(|own| own.name.as_str())) {
        if let Some(found) = answered(&format!("{section}.{name}"), value) {
            return Some(found);
        }
    }
    let bare = plain(name);
    let called: Vec<_> = all().filter(|(_, key)| key.is_called(name)).collect();
    let called = if MEANS_ANYTHING.contains(&bare.as_str()) { Vec::new() } else { called };
    if let Some((own, key)) =
        own.and_then(|own| Some((own, own.keys.iter().find(|key| key.is_called(name))?)))
    {
        let of_own = keys(vec![(own, key)], By::Alias, name, value);
        // The key of another section, if only that takes the value: `backend = "nccl"`.
        let others = || Some(keys(called.clone(), By::Alias, name, value)).filter(takes);
        if takes(&of_own) {
            return Some(of_own);
        }
        let of_value = || answer_for_value(name, value).map(|answer| answer_to(answer, true));
        return of_value().or_else(others).or(Some(of_own));
    }
    if let Some(found) = answered(name, value) {
        return Some(found);
    }
    let mut named: Vec<_> = all().filter(|(_, key)| plain(&key.name) == bare).collect();
    // A name alone means the model's key, not that of the adapters.
    let is_of_adapters = |of: &(&Section, &Key)| of.0.name == "adapter";
    if !named.iter().all(is_of_adapters) {
        named.retain(|of| !is_of_adapters(of));
    }
    if !named.is_empty() {
        return Some(keys(named, By::Name, name, value));
    }
    (!called.is_empty()).then(|| keys(called, By::Alias, name, value))
}

/// The keys with the most similar name: of the section, or else of the others.
fn similar(own: Option<&'static Section>, name: &str, value: Option<&Value>) -> Option<Hint> {
    let within = |candidates: Vec<(&'static Section, &'static Key)>| {
        let near = nearest(name, candidates.iter().map(|(_, key)| key.name.as_str()))?;
        let near = candidates.into_iter().filter(|(_, key)| key.name == near);
        Some(keys(near.collect(), By::Likeness, name, value))
    };
    let of_own = own.map(|own| own.keys.iter().map(|key| (own, key)).collect());
    of_own.and_then(within).or_else(|| within(all().collect()))
}

/// All keys with their sections.
fn all() -> impl Iterator<Item = (&'static Section, &'static Key)> {
    sections().iter().flat_map(|section| section.keys.iter().map(move |key| (section, key)))
}

/// The proposal of `found`: those that take the value, if any does.
fn keys(found: Vec<(&'static Section, &'static Key)>, by: By, name: &str, value: Option<&Value>) -> Hint {
    let fits = found.into_iter().map(|(section, key)| Proposal {
        section,
        key,
        fit: fit(section, key, name, value),
    });
    let (wrong, right): (Vec<_>, Vec<_>) = fits.partition(|proposal| matches!(proposal.fit, Fit::Wrong(_)));
    Hint::Keys(if right.is_empty() { wrong } else { right }, by)
}

/// True if the keys take the value.
fn takes(hint: &Hint) -> bool {
    matches!(hint, Hint::Keys(keys, _) if keys.iter().any(|key| !matches!(key.fit, Fit::Wrong(_))))
}

/// The answer of the table for this value, or for any.
fn answered(name: &str, value: Option<&Value>) -> Option<Hint> {
    let of_value = answer_for_value(name, value);
    let is_for_value = of_value.is_some();
    of_value.or_else(|| answer(name)).map(|answer| answer_to(answer, is_for_value))
}

fn answer_to(answer: &Answer, is_for_value: bool) -> Hint {
    match *answer {
        Answer::Write(setting) => Hint::Setting { setting, is_for_value },
        Answer::Why(why) => Hint::Nothing { why, is_for_value },
    }
}

/// The answer of the table for this value alone. A row for `false` answers `no` and `never`, too, and one for
/// `negative` every number below 0.
pub(super) fn answer_for_value(name: &str, value: Option<&Value>) -> Option<&'static Answer> {
    let word = value.map_or(Some("true".to_owned()), Value::word)?;
    // Names are compared without `-`, so that `-1` would be read as 1.
    let word = match word.starts_with('-') && word.parse::<f64>().is_ok() {
        true => "negative".to_owned(),
        false => word,
    };
    let on = switch(&word).map(|on| on.to_string());
    [Some(word), on].into_iter().flatten().find_map(|word| answer(&format!("{name}={word}")))
}
