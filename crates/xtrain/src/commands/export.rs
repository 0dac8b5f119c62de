//! `xtrain export`.

use super::open_model;
use crate::cli::ExportArgs;
use crate::failure::Failure;
use crate::terminal;
use std::path::Path;
use xtrain_checkpoint::hf::ExportOptions;
use xtrain_config::Device;
use xtrain_train::exchange::{export, warn_of_unexported_files};

pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    // Checked before the weights are read, which may take minutes; the export itself checks again.
    let holds_something = |folder: &Path| folder.read_dir().is_ok_and(|mut entries| entries.next().is_some());
    if !args.overwrite && holds_something(&args.out) {
        return Err(Failure::user(format!(
            "{} exists already and is not empty; choose another folder, or replace it with --overwrite",
            terminal::shown_path(&args.out)
        )));
    }
    // An export computes nothing.
    let mut opened = open_model(&args.model, Device::Cpu, None)?;
    let dtype = args.dtype.unwrap_or(opened.export_dtype);
    let options = ExportOptions { dtype, max_shard_bytes: args.max_shard_size.0, overwrite: args.overwrite };
    if opened.step.is_none() {
        warn_of_unexported_files(&args.model.model, &opened.tokenizer);
    }
    export(&mut opened.weights, &opened.identity, &opened.tokenizer, &args.out, &options)?;
    terminal::print(&format!("Hugging Face folder: {}\n", terminal::shown_path(&args.out))).map(|_| ())
}
