//! Engines: they run any program and name no op.
//!
//! [`Engine`] is the interface that a trainer uses: state that programs share by name, inputs to write, parts
//! to run, outputs to read. [`CpuEngine`] interprets a program with the CPU kernels; [`CudaEngine`] replays
//! it as graphs on a GPU.

mod checks;
mod collective;
mod cpu;
mod cuda;
mod engine;
mod error;
mod lane_order;
mod memory;
mod part;
mod state;
mod timing;

pub use checks::Checks;
pub use collective::sending;
pub use cpu::{CpuEngine, cpu_work_bytes, cpu_workspace};
pub use cuda::{CudaEngine, MessagePair, NcclGroups, cuda_workspace, groups_of_run, message_pairs};
pub use engine::{Engine, Outputs, Ticket};
pub use error::EngineError;
pub use part::{MicroSlot, Part, ProgramId, Turn};
pub use state::StateEntry;
pub use timing::{Timed, TimedWork, Timing};
