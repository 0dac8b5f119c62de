//! `xtrain init`.

use crate::cli::InitArgs;
use crate::failure::Failure;
use crate::terminal;
use xtrain_config::Device;
use xtrain_data::shell_path;
use xtrain_lab::draft::{self, Draft};
use xtrain_step::engine::Processor;

pub(crate) fn run(args: &InitArgs) -> Result<(), Failure> {
    if args.out.exists() {
        return Err(draft::exists(&args.out).into());
    }
    let threads = terminal::thread_count(0)?;
    let processor = Processor::by_name(Device::Auto)?;
    let draft = Draft::new(&args.sources, &args.out, &processor, threads)?;
    draft.write(&args.out)?;
    let (file, word) = (terminal::shown_path(&args.out), shell_path(&args.out));
    terminal::print(&format!(
        "{file}: {}\nread it, then run: xtrain plan {word}, and xtrain train {word}\n",
        terminal::shown(&draft.to_string())
    ))
    .map(|_| ())
}
