//! The model's names for the tensors of a folder. They may have one prefix in common (`base_model.model.`),
//! lack that of the base model (`model.`), or have the components that wrappers of modules insert
//! (`_orig_mod`).
//!
//! Invariant: names are taken only in a way that all of them agree with. Tensors from several saves in one
//! folder are an error.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use super::NameMap;
use crate::error::{CheckpointError, Result};

/// Components of names that belong to wrappers: torch.compile, DistributedDataParallel, FSDP, and checkpoints
/// of activations.
const WRAPPERS: [&str; 4] = ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Tensors by which a prefix is recognised: enough that a folder with any model has one of them.
const ANCHORS: usize = 8;

/// The name in the model of each name in `folder`. Names without a place in the model stay as they are, but
/// for the prefix.
pub(super) fn standard_names<'a>(
    folder: &Path,
    names: &NameMap,
    stored: impl Iterator<Item = &'a str>,
) -> Result<Vec<(&'a str, String)>> {
    let known = Known::new(names);
    let stored: Vec<Name<'a>> = stored.map(Name::new).collect();
    if let Some(adapter) = stored.iter().find(|name| is_of_adapter(name.stored)) {
        let problem = format!("'{}' belongs to an adapter (LoRA) that is not merged", adapter.stored);
        return Err(CheckpointError::tensors(folder, problem, MERGE));
    }
    let prefix = Prefix::detect(&stored, names);
    let mixed = |one: &str, other: &str| {
        let problem = format!("the names of its tensors have different prefixes: '{one}', but '{other}'");
        let advice = "these are tensors of several saves: export the model again into an empty folder";
        Err(CheckpointError::tensors(folder, problem, advice))
    };
    let mut found: BTreeMap<String, &Name<'a>> = BTreeMap::new();
    // A tensor of the base model, by whose wrappers the others are judged.
    let mut first: Option<&Name<'a>> = None;
    let mut unknown = Vec::new();
    for name in &stored {
        let standard = prefix.standard(&name.unwrapped, &known);
        if known.has(&standard) && standard.starts_with(&names.base) {
            let other = first.get_or_insert(name);
            if other.wrappers != name.wrappers || !name.unwrapped.starts_with(&prefix.dropped) {
                return mixed(other.stored, name.stored);
            }
        } else if !known.has(&standard) {
            unknown.push(name);
        }
        if let Some(other) = found.insert(standard, name) {
            let problem = format!("'{}' and '{}' are one tensor of the model", other.stored, name.stored);
            let advice = "remove one of the two: export the model again into an empty folder";
            return Err(CheckpointError::tensors(folder, problem, advice));
        }
    }
    // A tensor that the model lacks otherwise.
    let is_missing = |standard: &str| known.has(standard) && !found.contains_key(standard);
    let is_strange =
        |name: &&&Name<'_>| readings(&name.unwrapped, &names.base).any(|reading| is_missing(&reading));
    if let (Some(first), Some(strange)) = (first, unknown.iter().find(is_strange)) {
        return mixed(first.stored, strange.stored);
    }
    if let Some(first) = first.filter(|first| !known.has(first.stored)) {
        tracing::debug!("{}: names of tensors have another prefix: '{}'", folder.display(), first.stored);
    }
    Ok(found.into_iter().map(|(standard, name)| (name.stored, standard)).collect())
}

/// The ending of the names of scales of FP8 matrices.
pub(super) const SCALES: &str = "_scale_inv";

/// The name of the matrix that the scales `name` belong to; `None` if `name` is not that of scales.
pub(super) fn scaled_name(name: &str) -> Option<&str> {
    name.strip_suffix(SCALES)
}

/// Advice for an adapter in place of a model.
pub(super) const MERGE: &str = "merge it into its base model first (xtrain merge FOLDER --base MODEL --out NEW), or name that model, and \
                                this folder with --adapter, or in a run file as adapter.init_from";

fn is_of_adapter(name: &str) -> bool {
    [".lora_", ".base_layer.", ".lora."].iter().any(|part| name.contains(part))
}

/// A name in a folder.
struct Name<'a> {
    stored: &'a str,
    /// The name without the components of wrappers.
    unwrapped: Cow<'a, str>,
    /// The components of wrappers at its beginning.
    wrappers: Vec<&'a str>,
}

impl<'a> Name<'a> {
    fn new(stored: &'a str) -> Self {
        let is_wrapper = |part: &&str| WRAPPERS.contains(part);
        let unwrapped = match stored.split('.').any(|part| is_wrapper(&part)) {
            true => {
                Cow::Owned(stored.split('.').filter(|part| !is_wrapper(part)).collect::<Vec<_>>().join("."))
            }
            false => Cow::Borrowed(stored),
        };
        Name { stored, unwrapped, wrappers: stored.split('.').take_while(is_wrapper).collect() }
    }
}

/// The names that `name` could mean with another prefix.
fn readings(name: &str, base: &str) -> impl Iterator<Item = String> {
    let starts = name.match_indices('.').map(|(dot, _)| dot + 1);
    [0].into_iter().chain(starts).flat_map(move |start| {
        let rest = &name[start..];
        [rest.to_owned(), format!("{base}{rest}")]
    })
}

/// The names of the model's tensors.
struct Known<'a>(HashSet<&'a str>);

impl<'a> Known<'a> {
    fn new(names: &'a NameMap) -> Self {
        let parts = names.entries.iter().flat_map(|entry| &entry.parts).map(|part| &part.hf_name);
        let whole = names.whole.iter().map(|whole| &whole.hf_name);
        let tied = names.tied.iter().map(|tied| &tied.hf_name);
        let all = parts.chain(whole).chain(tied).map(String::as_str);
        Known(all.collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains(name) || scaled_name(name).is_some_and(|of| self.0.contains(of))
    }
}

/// The difference between the names in a folder and those of the model.
struct Prefix<'a> {
    /// A prefix that all names of the base model have.
    dropped: String,
    /// The prefix that they lack.
    added: &'a str,
    base: &'a str,
}

impl<'a> Prefix<'a> {
    fn detect(stored: &[Name<'_>], names: &'a NameMap) -> Self {
        let base = names.base.as_str();
        let firsts = names.entries.iter().filter_map(|entry| entry.parts.first());
        let stems = firsts.filter_map(|part| part.hf_name.strip_prefix(base)).take(ANCHORS);
        let stems: Vec<&str> = if base.is_empty() { Vec::new() } else { stems.collect() };
        let is_prefix = |prefix: &str| prefix.is_empty() || prefix.ends_with('.');
        let of_stem = |stem: &&str| {
            let prefixes = stored.iter().filter_map(|name| name.unwrapped.strip_suffix(stem));
            prefixes.filter(|prefix| is_prefix(prefix)).collect::<Vec<_>>()
        };
        let found: Vec<Vec<&str>> = stems.iter().map(of_stem).collect();
        let is_standard = found.iter().any(|prefixes| prefixes.contains(&base));
        // Two candidates for one tensor are two models.
        let only = found.iter().filter(|_| !is_standard).find(|prefixes| prefixes.len() == 1);
        match only.map(|prefixes| prefixes[0]) {
            None => Prefix { dropped: String::new(), added: "", base },
            // language_model. ends with model., and is another component.
            Some(prefix) => match prefix.strip_suffix(base).filter(|outer| is_prefix(outer)) {
                Some(outer) => Prefix { dropped: outer.to_owned(), added: "", base },
                None => Prefix { dropped: prefix.to_owned(), added: base, base },
            },
        }
    }

    /// The name in the model, if that has it.
    fn standard(&self, name: &str, known: &Known<'_>) -> String {
        let rest = name.strip_prefix(&self.dropped).unwrap_or(name);
        // The head is no part of the base model.
        let is_outside = known.has(rest) && !rest.starts_with(self.base);
        let added = if is_outside { "" } else { self.added };
        format!("{added}{rest}")
    }
}
