//! The trainer: run configuration, step programs, the training loop, metrics, evaluation and generation.
//!
//! Invariants: policy lives here and arithmetic in ops; nothing here knows which device an
//! [`Engine`](xtrain_runtime::Engine) is. Deliberately absent: flags and terminals, which are the binary's.

pub mod corpus;
pub mod engine;
pub mod error;
pub mod evaluate;
pub mod exchange;
pub mod fit;
pub mod folder;
pub mod generate;
pub mod held_out;
pub mod learner;
pub mod linear_gemms;
pub mod opened;
pub mod position;
pub mod profile;
pub mod programs;
pub mod random_batch;
pub mod run;
pub mod schedule;
pub mod slower;
pub mod source;
mod spans;
pub mod spec;
pub mod weights;
