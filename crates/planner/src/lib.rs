//! The settings of a run: whether it fits, how long it takes, and which settings are best.
//!
//! ```text
//! planned (a configuration and the step of its run) -> estimate of the time
//! tunable (settings that a run may choose), planned, estimate -> choose, fit, fp8_skip
//! planned, estimate -> row_room (the rows of experts that fit) -> routed (the cost of a routing)
//! choose, fit, fp8_skip, routed -> shard_table -> meshes -> advice
//! ```
//!
//! Invariants: it opens no file of a run and runs none of its steps; on a GPU it may time a layer.
//! Deliberately absent: files, and the connection of ranks, which are the run's (crate `train`).

pub mod advice;
pub mod choose;
pub mod describe;
pub mod error;
pub mod estimate;
pub mod fit;
pub mod fp8_skip;
pub mod hf_names;
pub mod learning_rates;
pub mod median;
mod memory;
pub mod meshes;
pub mod planned;
pub mod routed;
pub mod row_room;
pub mod shard_table;
pub mod static_scales;
pub mod tunable;
mod wire;
