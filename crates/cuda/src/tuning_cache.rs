//! What was measured on a card, kept on the disk for what is decided by it: found by all that it depends on of card, driver and libraries.

use crate::choice::{decode, encode};
use crate::device::Device;
use crate::gpu::Gpu;

/// The ending of the files in which it is kept.
const EXTENSION: &str = "measured";

impl Gpu {
    /// What was kept of `what`, which says all that it depends on but the machine: one line of text.
    pub fn cached_measurement(&self, what: &str) -> Option<String> {
        let key = self.measurement_key(what);
        let held = self.cache().get(&key, EXTENSION)?;
        decode(&held, &key).map(str::to_owned)
    }

    /// Keeps `line`, which was measured of `what`, and returns what stands there: where another process was first, what that one kept.
    pub fn cache_measurement(&self, what: &str, line: &str) -> String {
        let key = self.measurement_key(what);
        let usable = |held: &[u8]| decode(held, &key).is_some();
        let kept = self.cache().insert_if_absent(&key, EXTENSION, encode(line, &key).as_bytes(), usable);
        decode(&kept, &key).unwrap_or(line).to_owned()
    }

    /// Keeps `line` in the place of what was kept of `what`.
    pub fn replace_measurement(&self, what: &str, line: &str) {
        let key = self.measurement_key(what);
        self.cache().replace(&key, EXTENSION, encode(line, &key).as_bytes());
    }

    fn measurement_key(&self, what: &str) -> String {
        let (info, version) = (self.info(), env!("CARGO_PKG_VERSION"));
        let cublas = self.blas().map_or(0, |blas| blas.version);
        let driver = Device::driver_version().unwrap_or(0);
        format!(
            "{} with {} multiprocessors, driver {driver}, cuBLASLt {cublas}, xtrain {version}: {what}",
            info.name, info.multiprocessors
        )
    }
}
