//! `xtrain export`.

use super::open_model;
use crate::cli::ExportArgs;
use crate::failure::Failure;
use crate::terminal;
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_config::Device;
use xtrain_train::exchange::{export, warn_of_unexported_files};

pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    args.folder.check()?;
    // An export computes nothing.
    let mut opened = open_model(&args.model, Device::Cpu, None)?;
    let dtype = args.dtype.unwrap_or(opened.export_dtype);
    if opened.weights.model().adapter.is_some() && dtype != ExportDtype::Fp32 {
        return Err(Failure::user("adapters are exported in fp32; leave --dtype out"));
    }
    let options = args.folder.options(dtype);
    if opened.step.is_none() {
        warn_of_unexported_files(&args.model.model, Some(&opened.tokenizer));
    }
    export(&mut opened.weights, &opened.identity, &opened.tokenizer, &args.folder.out, &options)?;
    terminal::print(&format!("Hugging Face folder: {}\n", terminal::shown_path(&args.folder.out))).map(|_| ())
}
