//! The tuning cache: algorithms that were the fastest on a device, and other measurements of it, on disk.
//!
//! An entry is found by its key, one line of text that names everything the entry depends on. A key is
//! spelled by a method, never by `Debug` output, so that renaming a type does not lose what was measured. An
//! entry holds its value, a newline and its key.

use crate::cache::KernelCache;
use crate::device::CudaDevice;
use crate::gpu::Gpu;

/// The extension of files that hold measurements.
const EXTENSION: &str = "measured";

/// The key of a choice between algorithms, in the tuning cache and in a run's `choices.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChoiceKey {
    /// The key under which the choice is recorded.
    pub text: String,
    /// The key under which xtrain recorded the same choice before keys were spelled out. It is only read.
    pub former: String,
}

impl ChoiceKey {
    /// Both keys, the current one first.
    pub(crate) fn both(&self) -> [&str; 2] {
        [&self.text, &self.former]
    }
}

impl KernelCache {
    /// The cached measurement with this key, one line of text that names everything that it depends on.
    pub fn measurement(&self, key: &str) -> Option<String> {
        decode(&self.get(key, EXTENSION)?, key).map(str::to_owned)
    }

    /// Replaces the cached measurement with this key by `line`.
    pub fn replace_measurement(&self, key: &str, line: &str) {
        self.replace(key, EXTENSION, encode(line, key).as_bytes());
    }
}

impl Gpu {
    /// The cached measurement of `subject`, one line of text. `subject` names everything that it depends on
    /// except the machine.
    pub fn cached_measurement(&self, subject: &str) -> Option<String> {
        self.cache().measurement(&self.measurement_key(subject))
    }

    /// Caches `line` as the measurement of `subject`, unless another process has cached one; returns the
    /// cached one.
    pub fn cache_measurement(&self, subject: &str, line: &str) -> String {
        let key = self.measurement_key(subject);
        let is_valid = |entry: &[u8]| decode(entry, &key).is_some();
        let cached = self.cache().insert_if_absent(&key, EXTENSION, encode(line, &key).as_bytes(), is_valid);
        decode(&cached, &key).unwrap_or(line).to_owned()
    }

    /// Replaces the cached measurement of `subject` by `line`.
    pub fn replace_measurement(&self, subject: &str, line: &str) {
        self.cache().replace_measurement(&self.measurement_key(subject), line);
    }

    fn measurement_key(&self, subject: &str) -> String {
        let (info, version) = (self.info(), env!("CARGO_PKG_VERSION"));
        let cublas = self.blas().map_or(0, |blas| blas.version);
        let driver = CudaDevice::driver_version().unwrap_or(0);
        format!(
            "{} with {} multiprocessors, driver {driver}, cuBLASLt {cublas}, xtrain {version}: {subject}",
            info.name, info.multiprocessors
        )
    }

    /// The values recorded for `key`: those adopted from the run or chosen by this process, then those on
    /// disk.
    pub(crate) fn recorded_choices(&self, key: &ChoiceKey, extension: &str) -> RecordedChoices {
        let choices = self.lock_choices();
        let in_memory = key.both().into_iter().filter_map(|key| choices.get(key).cloned()).collect();
        drop(choices);
        let cached = |key| decode(&self.cache().get(key, extension)?, key).map(str::to_owned);
        RecordedChoices { in_memory, on_disk: key.both().into_iter().filter_map(cached).collect() }
    }
}

/// The values recorded for a key; under the current key before the former one.
pub(crate) struct RecordedChoices {
    pub(crate) in_memory: Vec<String>,
    pub(crate) on_disk: Vec<String>,
}

/// An entry of this value and key.
pub(crate) fn encode(value: &str, key: &str) -> String {
    format!("{value}\n{key}")
}

/// The value of an entry; None if the entry is of another key.
pub(crate) fn decode<'e>(entry: &'e [u8], key: &str) -> Option<&'e str> {
    let (value, entry_key) = std::str::from_utf8(entry).ok()?.split_once('\n')?;
    (entry_key == key).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_for_its_own_key_only() {
        let entry = encode("own", "a kernel");
        assert_eq!(decode(entry.as_bytes(), "a kernel"), Some("own"));
        assert_eq!(decode(entry.as_bytes(), "another"), None);
        assert_eq!(decode(b"own", "a kernel"), None);
        assert_eq!(decode(&[0xff], ""), None);
    }
}
