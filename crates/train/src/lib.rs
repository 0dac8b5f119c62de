//! A run: its files and data, its ranks, the training loop, checkpoints, evaluation and export.
//!
//! ```text
//! run file (xtrain-config) -> spec, planner's choices -> run: begin or resume -> steps -> finish
//! open_model: a run or a Hugging Face folder, for evaluation, generation and export; merge: with its adapters
//! ```
//!
//! Invariants: a step is computed by crate `step`, and settings are chosen by crate `planner`; files are
//! opened here. Deliberately absent: options and terminals, which are the binary's; the keys of the run file,
//! and the form of metrics and reports, which are crates of their own.

mod adapter_folder;
mod base_model;
pub mod corpus;
pub mod error;
pub mod eval_data;
pub mod exchange;
pub mod folder;
pub mod growth;
pub mod merge;
pub mod open_model;
pub mod paths;
pub mod position;
pub mod process_group;
pub mod profile;
mod questions;
pub mod run;
pub mod run_file;
pub mod source;
pub mod spec;
pub mod state_io;
pub mod static_scales;
mod tasks;
pub mod texts;
