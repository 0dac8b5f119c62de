//! The trainer: programs of a training step, the learner that runs them, and the run around it.
//!
//! ```text
//! run file (xtrain-config) -> spec, choose, fit, slower -> run: begin or resume -> steps -> finish
//! spec -> programs -> estimate of the time -> choose
//! spec -> programs -> learner, evaluate, generate over weights on an engine
//! opened: a run or a Hugging Face folder, for evaluation, generation and export
//! ```
//!
//! Invariants: policy lives here and arithmetic in ops; nothing but `engine` knows which device an
//! [`Engine`](xtrain_runtime::Engine) is. Deliberately absent: options and terminals, which are the binary's;
//! the keys of the run file, and the form of metrics and reports, which are crates of their own.

pub mod corpus;
pub mod crew;
pub mod draft;
pub mod error;
pub mod evaluate;
pub mod exchange;
pub mod folder;
pub mod held_out;
pub mod opened;
mod paths;
pub mod position;
pub mod profile;
pub mod run;
pub mod run_file;
pub mod saved;
pub mod source;
pub mod spec;
pub mod static_scales;
pub mod texts;
