//! The choice between algorithms: each candidate is timed once on the device, and the fastest is cached on
//! disk.
//!
//! Choices can be exported and adopted by a later process, so that a resumed run computes with the same
//! kernels, to the same bits, without the disk cache that it began with.
//!
//! A preferred algorithm ([`Gpu::preferred`]) is used wherever it is a candidate, whatever its speed: tests
//! compare each algorithm, and benchmarks measure one against another.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::timing;
use crate::tuning_cache::{ChoiceKey, decode, encode};
use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

/// A named algorithm that may compute an op.
pub struct AlgorithmCandidate<'a> {
    name: &'a str,
    prepare: &'a Prepare<'a>,
}

/// Prepares an algorithm's work; None if the algorithm does not support the operands.
type Prepare<'a> = dyn Fn(WorkPurpose) -> Result<Option<Work>, CudaError> + 'a;

/// The purpose for which work is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkPurpose {
    /// To be timed; on synthetic operands if the time depends on the data.
    Timing,
    /// To be run in the program.
    Use,
}

impl<'a> AlgorithmCandidate<'a> {
    /// A candidate of this name. `prepare` returns None if the algorithm does not support the operands.
    pub fn new(name: &'a str, prepare: &'a Prepare<'a>) -> AlgorithmCandidate<'a> {
        AlgorithmCandidate { name, prepare }
    }
}

/// The extension of files that hold choices.
const EXTENSION: &str = "choice";

impl Gpu {
    /// All choices of this process: the name of the algorithm, by key.
    pub fn choices(&self) -> BTreeMap<String, String> {
        self.lock_choices().clone()
    }

    /// Adopts choices of an earlier process. Call it before anything is prepared. Choices for other devices
    /// are ignored.
    pub fn adopt(&self, choices: &BTreeMap<String, String>) {
        self.lock_choices().extend(choices.iter().map(|(key, name)| (key.clone(), name.clone())));
    }

    pub(crate) fn lock_choices(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // The map stays whole if a thread panics: a choice is added in one step.
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The work of the fastest of `candidates`; None if none supports the operands. `task` names everything
    /// that the choice depends on except the device and its libraries.
    ///
    /// The first time on a device the candidates run, which overwrites their outputs. Later only the chosen
    /// one is prepared.
    pub fn fastest(
        &self,
        task: &ChoiceKey,
        candidates: &[AlgorithmCandidate<'_>],
    ) -> Result<Option<Work>, CudaError> {
        if let [only] = candidates {
            return (only.prepare)(WorkPurpose::Use);
        }
        let prepare = |name: &str| match candidates.iter().find(|c| c.name == name) {
            Some(candidate) => (candidate.prepare)(WorkPurpose::Use),
            None => Ok(None),
        };
        let key = self.choice_key(task, candidates);
        let recorded = self.recorded_choices(&key, EXTENSION);
        let known = recorded.in_memory.into_iter().chain(recorded.on_disk);
        for name in self.preferred().iter().cloned().chain(known) {
            if let Some(work) = prepare(&name)? {
                self.lock_choices().insert(key.text, name);
                return Ok(Some(work));
            }
        }
        let mut works = Vec::new();
        for candidate in candidates {
            let Some(work) = (candidate.prepare)(WorkPurpose::Timing)? else { continue };
            match timing::try_run(self.context(), |stream| work.enqueue(stream))? {
                None => works.push((candidate.name, work)),
                Some(why) => tracing::debug!("{}: {} is refused: {why}", task.text, candidate.name),
            }
        }
        let names: Vec<&str> = works.iter().map(|(name, _)| *name).collect();
        let timed = timing::fastest(self.context(), &works, |(_, work), stream| work.enqueue(stream))?;
        let Some((index, seconds)) = timed else { return Ok(None) };
        let seconds = seconds.map_or("the only one".to_owned(), |seconds| format!("{:.1} us", seconds * 1e6));
        tracing::debug!("{}: {}, {seconds}", task.text, names[index]);
        // Another process may have timed them at the same time: all use the choice that was cached first.
        prepare(&self.cache_choice(&key.text, names[index], &names))
    }

    /// Everything that a choice depends on. Kernels of xtrain's own depend on its version.
    fn choice_key(&self, task: &ChoiceKey, candidates: &[AlgorithmCandidate<'_>]) -> ChoiceKey {
        let (info, version) = (self.info(), env!("CARGO_PKG_VERSION"));
        let cudnn = self.dnn_version().map_or("no cuDNN".into(), |version| format!("cuDNN {version}"));
        let device =
            format!("{} with {} multiprocessors, {cudnn}, xtrain {version}", info.name, info.multiprocessors);
        on_device(&device, task, &candidates.iter().map(|c| c.name).collect::<Vec<_>>())
    }

    /// Caches the choice of `name`, unless another process has cached one of `names`; returns the cached one.
    fn cache_choice(&self, key: &str, name: &str, names: &[&str]) -> String {
        let is_valid = |entry: &[u8]| decode(entry, key).is_some_and(|name| names.contains(&name));
        let cached = self.cache().insert_if_absent(key, EXTENSION, encode(name, key).as_bytes(), is_valid);
        let name = decode(&cached, key).unwrap_or(name).to_owned();
        self.lock_choices().insert(key.to_owned(), name.clone());
        name
    }
}

/// The key of a choice between the algorithms `names` for `task` on `device`.
fn on_device(device: &str, task: &ChoiceKey, names: &[&str]) -> ChoiceKey {
    let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
    ChoiceKey {
        text: format!("{device}: {}, among {}", task.text, names.join(", ")),
        former: format!("{device}: {}, of [{}]", task.former, quoted.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::KernelCache;
    use std::path::Path;

    /// A file that xtrain wrote when keys were `Debug` output.
    #[test]
    fn a_choice_that_an_older_run_cached_is_found() {
        let cache = KernelCache::in_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/former"));
        let sizes = "seq_len: 257, heads: 2, kv_heads: 1, head_dim: 128, deterministic: true";
        let former = format!("flash_keys of Attention {{ {sizes} }}, 1 sequences within documents");
        let task = ChoiceKey { text: "tiles of flash_keys".into(), former };
        let device = "Emulated GPU sm_80 with 8 multiprocessors, no cuDNN, xtrain 0.1.0";
        let key = on_device(device, &task, &["4x1 over 32", "4x1 over 16", "8x1 over 32"]);
        assert_eq!(
            key.text,
            format!("{device}: tiles of flash_keys, among 4x1 over 32, 4x1 over 16, 8x1 over 32")
        );
        let entry = cache.get(&key.former, EXTENSION).expect("the file of an older run");
        assert_eq!(decode(&entry, &key.former), Some("4x1 over 16"));
    }
}
