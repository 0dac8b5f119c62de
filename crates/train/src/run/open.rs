//! Opens a run at its beginning or at its latest checkpoint.

use super::assemble::Opened;
use super::begin::begin;
use super::observer::{Observer, Start};
use super::resume::resume;
use crate::error::RunError;
use crate::process_group::ProcessGroup;
use crate::run_file;
use xtrain_config::Parsed;

/// Opens the run of `parsed`. A refusal writes nothing, and a finished run is not changed. `time_is_up` is
/// called while text is tokenized.
pub(super) fn open(
    parsed: &Parsed,
    start: Start,
    process_group: &ProcessGroup,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Opened, RunError> {
    process_group.compare_files(&parsed.config)?;
    let folder = run_file::folder(parsed);
    match process_group.decide(|| Ok(start == Start::Resume && folder.is_begun()))? {
        true => resume(parsed, folder, process_group, observer, time_is_up),
        false => Ok(Opened::Run(Box::new(begin(parsed, folder, process_group, observer, time_is_up)?))),
    }
}
