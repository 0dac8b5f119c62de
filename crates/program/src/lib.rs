//! The step program: a flat list of op instances over values, and the passes that turn one program into another.
//!
//! A training step has static shapes, so it is described once and run many times: model code traces ops ([`Tracer`]) → [`Program`] → passes
//! ([`precision`], [`backward`], [`casts`], [`kept`], [`quantized`], [`fuse`], [`recompute`], [`measured`]) → [`Plan`] → an executor.
//!
//! Invariants:
//! - This crate names no op and no device. Passes that insert ops are handed them ([`PassOps`]).
//! - List order is execution order within a lane; across lanes only [`order`] says what happens before what.
//! - Every value, and the workspace that a device's kernels declare, has a place in the [`Plan`] before the first instance runs. What a
//!   kernel takes beside that while it runs is not in the plan: CPU kernels widen bf16 operands, transpose keys and pack blocks for
//!   GEMMs in memory of their own.

pub mod backward;
pub mod casts;
mod dispatch;
mod dump;
pub mod fuse;
pub mod kept;
pub mod measured;
mod memory;
mod op;
pub mod order;
mod plan;
pub mod precision;
mod program;
pub mod quantized;
pub mod recompute;
mod remake;
mod trace;

pub use backward::{Backward, Root};
pub use dispatch::KernelTable;
pub use memory::{MemoryRow, MemoryTable, Purpose};
pub use op::{Cost, Differentiable, Fused, Fusion, Op, OpError, Operand, PassOps, Rebuild, Source};
pub use plan::{Location, Plan, Region, WorkspaceOf};
pub use precision::Precision;
pub use program::{
    Code, Instance, Lane, Origin, Output, Parameter, Phase, Program, Role, Stage, StateKind, Storage, Value,
    ValueId, WriteMode,
};
pub use recompute::Recompute;
pub use trace::{TraceError, Tracer};
