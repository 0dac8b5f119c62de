//! Removes the lines of dropped steps from `metrics.jsonl` when a run is resumed.

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::Path;
use xtrain_checkpoint::replace_file;

use super::reader::Lines;
use super::wire;
use crate::metrics::{DroppedRecords, MetricsError};

/// Numbers of lines that a resume kept and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Lines that stayed: those up to the checkpoint, and any line that precedes one of them.
    pub kept: u64,
    /// Lines of steps after the checkpoint, which the run writes again.
    pub lost_steps: u64,
    /// Lines after the last good one that could not be parsed, including a torn last line and overlong ones.
    /// They are dropped.
    pub unreadable: u64,
}

/// Rewrites the file at `path` without the lines that are `dropped`; leaves it unchanged if there are none.
pub(super) fn drop_records(path: &Path, dropped: DroppedRecords) -> Result<Recovery, MetricsError> {
    let scan = match File::open(path).and_then(|file| scan(file, dropped)) {
        Ok(scan) => scan,
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(Recovery::default()),
        Err(source) => return Err(MetricsError::io("read metrics", path)(source)),
    };
    if scan.recovery.lost_steps + scan.recovery.unreadable > 0 || !scan.ended {
        replace_file(path, |out| copy_records_before(path, dropped, scan.last_kept, out))?;
    }
    Ok(scan.recovery)
}

struct Scan {
    recovery: Recovery,
    /// Number of the last line of a step that stays; 0 if there is none.
    last_kept: u64,
    /// True if the last line has its line end.
    ended: bool,
}

fn scan(file: File, dropped: DroppedRecords) -> io::Result<Scan> {
    let mut scan = Scan { recovery: Recovery::default(), last_kept: 0, ended: true };
    let recovery = &mut scan.recovery;
    let mut not_understood = 0;
    let mut lines = Lines::new(BufReader::new(file));
    while let Some(line) = lines.next_line()? {
        scan.ended = line.ended;
        match line.content.map(wire::place_of) {
            Some(Some((step, kind))) if !dropped.holds(step, &kind) => {
                recovery.kept += 1 + std::mem::take(&mut not_understood);
                scan.last_kept = line.number;
            }
            Some(Some(_)) => recovery.lost_steps += 1,
            Some(None) => not_understood += 1,
            // A line that exceeds the limit is none of ours.
            None => recovery.unreadable += 1,
        }
    }
    recovery.unreadable += not_understood;
    Ok(scan)
}

fn copy_records_before(
    path: &Path,
    dropped: DroppedRecords,
    last_kept: u64,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut lines = Lines::new(BufReader::new(File::open(path)?));
    while let Some(line) = lines.next_line()?.filter(|line| line.number <= last_kept) {
        let Some(content) = line.content else { continue };
        if wire::place_of(content).is_none_or(|(step, kind)| !dropped.holds(step, &kind)) {
            out.write_all(content)?;
            out.write_all(b"\n")?;
        }
    }
    Ok(())
}
