//! Opens a run at its beginning or at its latest checkpoint.

use super::assemble::Opened;
use super::begin::begin;
use super::observer::{Observer, Start};
use super::resume::resume;
use crate::error::RunError;
use crate::folder::RunFolder;
use xtrain_config::Parsed;

/// Opens the run of `parsed`. A refusal writes nothing, and a finished run is not changed. `time_is_up` is
/// called while text is tokenized.
pub(super) fn open(
    parsed: &Parsed,
    start: Start,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Opened, RunError> {
    let folder = match RunFolder::of_config(parsed.file()).filter(|_| !parsed.is_argument("train.out")) {
        // A run folder may have been moved since its configuration was written.
        Some(of_config) => of_config,
        None => RunFolder::at(parsed.out()),
    };
    match start == Start::Resume && folder.is_begun() {
        true => resume(parsed, folder, observer, time_is_up),
        false => Ok(Opened::Run(Box::new(begin(parsed, folder, observer, time_is_up)?))),
    }
}
