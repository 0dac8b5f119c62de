//! Where engines are chosen: nothing else here names one.

use crate::config::Device;
use crate::programs;
use std::sync::Arc;
use xtrain_program::{Plan, Program};
use xtrain_runtime::{Checks, CpuEngine, Engine, cpu_work_bytes, cpu_workspace};

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

/// Where everything of `program` would live on an engine.
pub fn plan(program: &Program) -> Plan {
    Plan::of(program, &cpu_workspace(&programs::cpu_kernels()))
}

/// Bytes that the kernels of `program` work in beside what its plan holds, at most.
pub fn work_bytes(program: &Program) -> usize {
    cpu_work_bytes(&programs::cpu_kernels(), program)
}
