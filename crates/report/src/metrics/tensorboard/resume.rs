//! Removes dropped events from an event file when a run is resumed.

use std::fs::OpenOptions;
use std::io::{self, BufReader};
use std::path::Path;

use super::frame::{self, Next};
use super::proto;
use crate::metrics::DroppedRecords;

/// Truncates the file at `path` before its first event that is `dropped`, or before a torn frame at its end.
///
/// One process writes in order, a step's evaluation before its samples, so everything after that event is
/// dropped too. A file with a damaged frame before it is left unchanged: no reader gets past the damage.
pub(super) fn cut(path: &Path, dropped: DroppedRecords) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut source = BufReader::new(&file);
    let mut len_bytes = 0;
    loop {
        match frame::read(&mut source)? {
            Next::Payload(event) if !is_dropped(&event, dropped) => {
                len_bytes += event.len() as u64 + frame::OVERHEAD_BYTES;
            }
            Next::Payload(_) | Next::Torn => return file.set_len(len_bytes),
            Next::Damaged | Next::End => return Ok(()),
        }
    }
}

/// The part of an event's tag before the slash is its kind.
fn is_dropped(event: &[u8], dropped: DroppedRecords) -> bool {
    let kind = || proto::tag_of(event).unwrap_or_default().split('/').next().unwrap_or_default();
    proto::step_of(event).is_some_and(|step| dropped.holds(step, kind()))
}
