//! The step program: a flat list of op instances over values, and the passes that turn one program into
//! another.
//!
//! A training step has static shapes, so it is described once and run many times: model code traces ops
//! ([`Tracer`]) → [`Program`] → passes → [`Plan`] → an executor. The passes of this crate, in the order in
//! which they run: [`precision`], [`backward`], [`measure_casts`], [`save_fp8`], [`quantize`], [`recompute`],
//! [`narrow`], [`refresh`], [`fuse`].
//!
//! Invariants:
//! - This crate names no op and no device. Passes that insert ops are handed them ([`PassOps`]), and so are
//!   the rewrites of [`fuse`].
//! - List order is execution order within a lane; across lanes only [`order`] says what happens before what.
//! - Every value, and the workspace that a device's kernels declare, has a place in the [`Plan`] before the
//!   first instance runs. CPU kernels allocate further memory while they run, which the plan doesn't count:
//!   they widen bf16 operands, transpose keys and pack blocks for GEMMs.

pub mod backward;
mod cost;
mod dispatch;
mod dump;
pub mod fuse;
mod gemm;
pub mod measure_casts;
mod memory;
pub mod narrow;
mod op;
pub mod order;
mod plan;
pub mod precision;
mod program;
pub mod quantize;
pub mod recompute;
pub mod refresh;
pub mod save_fp8;
mod trace;

pub use backward::{Backward, Root};
pub use cost::{Arithmetic, Cost, KernelCost};
pub use dispatch::KernelTable;
pub use fuse::{Edge, Link, Node, Pair, Place, Replacement, Rewrite};
pub use gemm::{Fp8Twin, Gemms, LinearGemm, OpGemm, OperandSource, Quantization, ScaledGemm};
pub use memory::{MemoryRow, MemoryTable, Purpose};
pub use op::{Differentiable, Op, OpError, Operand, PassOps, Rebuild, Source};
pub use plan::{Location, Plan, Region, WorkspaceOf};
pub use precision::Precision;
pub use program::{
    Code, Instance, Lane, Origin, Output, Parameter, Phase, Program, Role, Stage, StateKind, Storage, Value,
    ValueId, WriteMode,
};
pub use recompute::Recompute;
pub use trace::{TraceError, Tracer};
