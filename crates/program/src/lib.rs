//! The step program: a flat list of op instances over values, and the passes that turn one program into
//! another.
//!
//! A training step has static shapes, so it is described once and run many times: model code traces ops
//! ([`Tracer`]) → [`Program`] → passes → [`Plan`] → an executor. The passes of this crate, in the order in
//! which they run: [`precision`], [`backward`], [`measure_casts`], [`save_fp8`], [`quantize`], [`wire`],
//! [`recompute`], [`narrow`], [`shard`], [`refresh`], [`fuse`], [`overlap`], [`tails`].
//!
//! Invariants:
//! - This crate names no op and no device. The caller passes in the ops that a pass inserts ([`PassOps`]) and
//!   the rewrites that [`fuse`] applies.
//! - List order is execution order within a lane. Across lanes, [`order`] alone says which instance completes
//!   before which.
//! - Every value, and the workspace that a device's kernels declare, has a place in the [`Plan`] before the
//!   first instance runs. The plan does not count the memory that CPU kernels allocate while they run: for
//!   widened bf16 operands, transposed keys, and packed blocks of GEMMs.

pub mod backward;
mod buffer;
mod collective;
mod cost;
mod dispatch;
mod dump;
pub mod fold;
pub mod fuse;
mod gemm;
mod join;
pub mod measure_casts;
mod memory;
pub mod narrow;
mod op;
pub mod order;
mod origin;
pub mod overlap;
mod parallel;
pub mod pipeline;
mod plan;
pub mod precision;
mod program;
pub mod quantize;
pub mod recompute;
pub mod refresh;
mod row_shard;
pub mod save_fp8;
pub mod shard;
mod tail;
pub mod tails;
mod tensor_cut;
mod trace;
mod traffic;
mod value;
pub mod wire;

pub use backward::Root;
pub use buffer::WorkspaceOf;
pub use collective::Collective;
pub use cost::{Arithmetic, Cost, KernelCost};
pub use dispatch::KernelTable;
pub use fuse::{Edge, Link, Node, OpRewrite, Pair, Replacement, Rewrite};
pub use gemm::{CastOperand, LinearGemm, LinearOperand, Quantization, ScaledGemm, StaticScale};
pub use join::join;
pub use memory::{MemoryRow, MemoryTable, Purpose};
pub use op::{Fp8Twin, Gemms, Op, OpError, OpGemm, Operand, OperandSource, PassOps, Rebuild, Source};
pub use origin::{Lane, Origin, Phase, Role, Stage, When};
pub use parallel::{Gather, Parallel, Reduce, Shard};
pub use plan::{Location, Plan, Region};
pub use precision::Precision;
pub use program::{
    Backward, Code, Delayed, Differentiable, Gathered, Instance, MeasuredCast, Output, Parameter, Program,
    Quantized, QuantizedRows, TraceError, Transposed, WriteMode,
};
pub use recompute::Recompute;
pub use row_shard::{ParameterCut, RowShard, Rows, cut};
pub use tail::{RaggedOp, RaggedOps, Tail};
pub use tensor_cut::{CutBy, CutRegion, TENSOR_PLACE, TensorCut};
pub use trace::Tracer;
pub use traffic::{Payload, Sent};
pub use value::{StateKind, Storage, Value, ValueId};
pub use xtrain_rank::Groups;
