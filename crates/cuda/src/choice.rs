//! Which of several implementations an op is computed: the fastest on this card, timed once and kept on the disk, as with the algorithms of products.
//! What was chosen can be told and handed to a later process, so that a run goes on by the same kernels, to the same bits, without the disk
//! that it began with.
//!
//! `XTRAIN_PREFER` names implementations, separated by commas, that are taken wherever they are offered, whatever their speed: for tests of each, and
//! to measure one against another.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::timing;
use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

/// A way to compute something.
pub struct AlgorithmCandidate<'a> {
    name: &'a str,
    make: &'a dyn Fn(WorkPurpose) -> Result<Option<Work>, CudaError>,
}

/// What work is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkPurpose {
    /// To be timed once; on operands that are made up where the time depends on what they hold.
    Timing,
    /// To be used.
    Use,
}

impl<'a> AlgorithmCandidate<'a> {
    /// One of this name; `make` gives none where it does not take the operands.
    pub fn new(
        name: &'a str,
        make: &'a dyn Fn(WorkPurpose) -> Result<Option<Work>, CudaError>,
    ) -> AlgorithmCandidate<'a> {
        AlgorithmCandidate { name, make }
    }
}

/// The implementations that `XTRAIN_PREFER` names, the first one first.
pub fn preferred_algorithms() -> Vec<String> {
    let named = std::env::var("XTRAIN_PREFER").unwrap_or_default();
    named.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The ending of the files in which choices are kept.
const EXTENSION: &str = "choice";

impl Gpu {
    /// All that was chosen in this process: what was chosen for what on which card.
    pub fn choices(&self) -> BTreeMap<String, String> {
        self.lock_choices().clone()
    }

    /// Takes over what was chosen before; to be called before anything is made ready. What does not fit this card is not asked for.
    pub fn adopt(&self, choices: &BTreeMap<String, String>) {
        self.lock_choices().extend(choices.iter().map(|(key, name)| (key.clone(), name.clone())));
    }

    pub(crate) fn lock_choices(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // What a thread that panicked left is whole: choices are added in one step.
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fastest of `candidates` for `what`, which says all that the choice depends on but the card; none where none takes the operands.
    /// The first time on a card they are run, which overwrites what they write; then the choice is kept, and only its work is made.
    pub fn fastest(
        &self,
        what: &str,
        candidates: &[AlgorithmCandidate<'_>],
    ) -> Result<Option<Work>, CudaError> {
        if let [only] = candidates {
            return (only.make)(WorkPurpose::Use);
        }
        let make = |name: &str| match candidates.iter().find(|c| c.name == name) {
            Some(candidate) => (candidate.make)(WorkPurpose::Use),
            None => Ok(None),
        };
        let key = self.key(what, candidates);
        for name in preferred_algorithms() {
            if let Some(work) = make(&name)? {
                self.lock_choices().insert(key, name);
                return Ok(Some(work));
            }
        }
        if let Some(work) = self.chosen(&key).map(|name| make(&name)).transpose()?.flatten() {
            return Ok(Some(work));
        }
        let mut works = Vec::new();
        for candidate in candidates {
            let Some(work) = (candidate.make)(WorkPurpose::Timing)? else { continue };
            match timing::runs(self.context(), |stream| work.enqueue(stream))? {
                None => works.push((candidate.name, work)),
                Some(why) => tracing::debug!("{what}: {} is refused: {why}", candidate.name),
            }
        }
        let names: Vec<&str> = works.iter().map(|(name, _)| *name).collect();
        let timed = timing::fastest(self.context(), &works, |(_, work), stream| work.enqueue(stream))?;
        let Some((index, seconds)) = timed else { return Ok(None) };
        let seconds = seconds.map_or("the only one".to_owned(), |seconds| format!("{:.1} us", seconds * 1e6));
        tracing::debug!("{what}: {}, {seconds}", names[index]);
        // Another process may have measured at the same time: all use what the first one kept.
        make(&self.cache_choice(&key, names[index], &names))
    }

    /// All that a choice depends on; kernels of our own are those of a version.
    fn key(&self, what: &str, candidates: &[AlgorithmCandidate<'_>]) -> String {
        let (info, version) = (self.info(), env!("CARGO_PKG_VERSION"));
        let names: Vec<&str> = candidates.iter().map(|c| c.name).collect();
        let cudnn = self.dnn_version().map_or("no cuDNN".into(), |version| format!("cuDNN {version}"));
        format!(
            "{} with {} multiprocessors, {cudnn}, xtrain {version}: {what}, of {names:?}",
            info.name, info.multiprocessors
        )
    }

    /// What was chosen before, in this process or an earlier one.
    fn chosen(&self, key: &str) -> Option<String> {
        if let Some(name) = self.lock_choices().get(key) {
            return Some(name.clone());
        }
        let name = decode(&self.cache().get(key, EXTENSION)?, key)?.to_owned();
        self.lock_choices().insert(key.to_owned(), name.clone());
        Some(name)
    }

    /// `names` are the implementations that run here.
    fn cache_choice(&self, key: &str, name: &str, names: &[&str]) -> String {
        let usable = |held: &[u8]| decode(held, key).is_some_and(|name| names.contains(&name));
        let kept = self.cache().insert_if_absent(key, EXTENSION, encode(name, key).as_bytes(), usable);
        let name = decode(&kept, key).unwrap_or(name).to_owned();
        self.lock_choices().insert(key.to_owned(), name.clone());
        name
    }
}

/// What is kept: the name, then what it was chosen for.
pub(crate) fn encode(name: &str, key: &str) -> String {
    format!("{name}\n{key}")
}

pub(crate) fn decode<'h>(held: &'h [u8], key: &str) -> Option<&'h str> {
    let (name, chosen_for) = std::str::from_utf8(held).ok()?.split_once('\n')?;
    (chosen_for == key).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_for_the_same_thing_alone() {
        let held = encode("own", "a kernel");
        assert_eq!(decode(held.as_bytes(), "a kernel"), Some("own"));
        assert_eq!(decode(held.as_bytes(), "another"), None);
        assert_eq!(decode(b"own", "a kernel"), None);
        assert_eq!(decode(&[0xff], ""), None);
    }
}
