//! Cutting the lost steps off an event file when a run resumes.

use std::fs::OpenOptions;
use std::io::{self, BufReader};
use std::path::Path;

use super::frame::{self, Next};
use super::proto;

/// Cuts the file at `path` before its first event later than `step`, or before a torn frame at its end.
///
/// One process writes its steps in order, so all that lies behind that event is as late. A file with a damaged frame before
/// it is left as it is: no reader gets past the damage.
pub(super) fn cut_after(path: &Path, step: u64) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut source = BufReader::new(&file);
    let mut len_bytes = 0;
    loop {
        match frame::read(&mut source)? {
            Next::Payload(event) if proto::step_of(&event).is_none_or(|of_event| of_event <= step) => {
                len_bytes += event.len() as u64 + frame::OVERHEAD_BYTES;
            }
            Next::Payload(_) | Next::Torn => return file.set_len(len_bytes),
            Next::Damaged | Next::End => return Ok(()),
        }
    }
}
