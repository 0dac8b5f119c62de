//! The verbs, one file each; their options are in `cli`, in files of the same names.

mod answers;
pub(crate) mod bench;
pub(crate) mod bench_comm;
pub(crate) mod bench_fp8;
pub(crate) mod bench_ops;
pub(crate) mod blame;
pub(crate) mod chat;
mod chat_input;
mod chat_line;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod eval;
mod eval_tasks;
pub(crate) mod export;
pub(crate) mod generate;
mod generate_chats;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod merge;
pub(crate) mod plan;
pub(crate) mod report;
mod speed;
mod task_scores;
pub(crate) mod tokenize;
pub(crate) mod train;
mod transcript;

use crate::cli::{CheckpointArgs, ModelArgs};
use crate::failure::Failure;
use crate::terminal;
use xtrain_config::Device;
use xtrain_model::Recipe;
use xtrain_step::engine::ProcessorChoice;
use xtrain_train::error::RunError;
use xtrain_train::open_model::{OpenedModel, Which, open, open_with_adapter};

/// Opens the model that a command names, on `device`; `recipe` replaces the precision of its computation.
fn open_model(args: &ModelArgs, device: Device, recipe: Option<Recipe>) -> Result<OpenedModel, Failure> {
    terminal::use_threads(args.cpu.threads)?;
    reopen_model(args, device, recipe)
}

/// As [`open_model`] in a process whose threads are already started.
fn reopen_model(args: &ModelArgs, device: Device, recipe: Option<Recipe>) -> Result<OpenedModel, Failure> {
    Ok(open_named(args, which(&args.checkpoint), device, recipe)?)
}

/// Opens a checkpoint of the run that a command names, or its model, with adapters if it names some.
fn open_named(
    args: &ModelArgs,
    which: Which,
    choice: impl Into<ProcessorChoice>,
    recipe: Option<Recipe>,
) -> Result<OpenedModel, RunError> {
    match &args.adapter {
        Some(adapter) => open_with_adapter(&args.model, adapter, choice, recipe),
        None => open(&args.model, which, choice, recipe),
    }
}

/// The checkpoint that a command names.
fn which(args: &CheckpointArgs) -> Which {
    match args.step {
        Some(step) => Which::Step(step),
        None if args.best => Which::Best,
        None => Which::Latest,
    }
}
