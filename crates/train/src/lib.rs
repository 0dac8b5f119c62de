//! The trainer: run configuration, step programs, the training loop, metrics, evaluation and generation.
//!
//! Invariants: policy lives here and arithmetic in ops; nothing here knows which device an [`Engine`](xtrain_runtime::Engine) is.
//! Deliberately absent: flags and terminals, which are the binary's.

mod advice;
pub mod bench;
pub mod blame;
pub mod config;
pub mod doctor;
pub mod engine;
pub mod evaluate;
pub mod exchange;
mod files;
pub mod generate;
pub mod inspect;
pub mod learner;
pub mod metrics;
pub mod opened;
pub mod passes;
mod probe;
pub mod products;
pub mod profile;
pub mod programs;
pub mod report;
pub mod run;
mod sampling;
pub mod schedule;
pub mod slower;
pub mod weights;
