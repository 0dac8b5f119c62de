//! `xtrain merge`.

use super::which;
use crate::cli::MergeArgs;
use crate::failure::Failure;
use crate::terminal;
use xtrain_train::exchange::warn_of_unexported_files;
use xtrain_train::merge::Merge;

pub(crate) fn run(args: &MergeArgs) -> Result<(), Failure> {
    args.folder.check()?;
    terminal::use_threads(args.cpu.threads)?;
    let merge = Merge::open(&args.adapter, which(&args.checkpoint), args.base.as_deref())?;
    warn_of_unexported_files(&merge.base, merge.tokenizer.as_ref());
    merge.write(&args.folder.out, &args.folder.options(args.dtype.unwrap_or(merge.dtype)))?;
    terminal::print(&format!("Hugging Face folder: {}\n", terminal::shown_path(&args.folder.out))).map(|_| ())
}
