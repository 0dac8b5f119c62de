//! Executors: they run any program and name no op.
//!
//! [`Engine`] is what a trainer sees of one: memory that programs share by name, inputs to write, parts to run, outputs to read.
//! [`CpuEngine`] interprets the list with the CPU kernels, [`CudaEngine`] replays it as graphs on a card.

mod available;
mod cpu;
mod cuda;
mod engine;
mod memory;
mod timing;

pub use available::{available_bytes, total_bytes};
pub use cpu::{Checks, CpuEngine, cpu_work_bytes, cpu_workspace};
pub use cuda::{CudaEngine, cuda_workspace};
pub use engine::{Engine, EngineError, Outputs, Part, ProgramId, StateEntry, Ticket};
pub use timing::{Timed, TimedWork, Timing};
