//! What was measured on a card, kept on the disk for what is decided by it: found by all that it depends on of card, driver and libraries.

use crate::choice::{decode, encode};
use crate::device::Device;
use crate::gpu::Gpu;

/// The ending of the files in which it is kept.
const EXTENSION: &str = "measured";

impl Gpu {
    /// What was kept of `what`, which says all that it depends on but the machine: one line of text.
    pub fn measured(&self, what: &str) -> Option<String> {
        let key = self.key_of_measured(what);
        let held = self.cache().kept(&key, EXTENSION)?;
        decode(&held, &key).map(str::to_owned)
    }

    /// Keeps `line`, which was measured of `what`, and returns what stands there: where another process was first, what that one kept.
    pub fn keep_measured(&self, what: &str, line: &str) -> String {
        let key = self.key_of_measured(what);
        let usable = |held: &[u8]| decode(held, &key).is_some();
        let kept = self.cache().keep(&key, EXTENSION, encode(line, &key).as_bytes(), usable);
        decode(&kept, &key).unwrap_or(line).to_owned()
    }

    /// Keeps `line` in the place of what was kept of `what`.
    pub fn replace_measured(&self, what: &str, line: &str) {
        let key = self.key_of_measured(what);
        self.cache().replace(&key, EXTENSION, encode(line, &key).as_bytes());
    }

    fn key_of_measured(&self, what: &str) -> String {
        let (info, version) = (self.info(), env!("CARGO_PKG_VERSION"));
        let cublas = self.blas().map_or(0, |blas| blas.version);
        let driver = Device::driver_version().unwrap_or(0);
        format!(
            "{} with {} multiprocessors, driver {driver}, cuBLASLt {cublas}, xtrain {version}: {what}",
            info.name, info.multiprocessors
        )
    }
}
