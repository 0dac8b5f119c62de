//! Where engines are chosen: nothing else here names one.

use crate::config::Device;
use crate::programs;
use std::sync::Arc;
use xtrain_runtime::{Checks, CpuEngine, Engine};

/// An engine on `device`, empty, that makes these checks.
pub fn engine(device: Device, checks: Checks) -> Box<dyn Engine> {
    match device {
        Device::Auto | Device::Cpu => {
            let mut engine = CpuEngine::new(Arc::new(programs::cpu_kernels()));
            engine.set_checks(checks);
            Box::new(engine)
        }
    }
}
