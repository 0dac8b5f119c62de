//! A training step: the programs that compute it, the learner that runs them on an engine, and generation
//! with the same weights.
//!
//! ```text
//! training_spec, layout -> programs (traced by model, then passes and update) -> engine -> learner
//! weights on an engine -> generate
//! ```
//!
//! Invariants: policy lives here and arithmetic in ops; nothing but `engine` knows which device an
//! [`Engine`](xtrain_runtime::Engine) is. Deliberately absent: files, run folders and the connection of
//! ranks, which are the run's (crate `train`), and the choice of settings (crate `planner`).

pub mod batch_share;
pub mod divergence;
pub mod engine;
pub mod error;
pub mod generate;
pub mod layout;
pub mod learner;
pub mod linear_gemms;
pub mod passes;
pub mod programs;
pub mod random_batch;
pub mod schedule;
pub mod scored_shape;
pub mod scoring;
pub mod spans;
pub mod training_spec;
pub mod update;
pub mod weights;
