//! Progress of a preparation, and how often the caller is told of it.

use std::time::{Duration, Instant};

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Bytes of the input files, as they lie on the disk, that are done.
    pub bytes_done: u64,
    /// Bytes of all input files.
    pub bytes_total: u64,
    /// Tokens so far, those of earlier runs included.
    pub tokens: u64,
    /// Documents so far.
    pub documents: u64,
    /// Time since this run began.
    pub elapsed: Duration,
    /// Bytes that an earlier run had done.
    pub(super) bytes_before: u64,
}

impl Progress {
    /// Speed of this run in megabytes (10^6) of input a second.
    pub fn mb_per_s(&self) -> f64 {
        let bytes = self.bytes_done.saturating_sub(self.bytes_before) as f64;
        bytes / 1e6 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// How far the making of a vocabulary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LearnProgress {
    /// The text is read.
    Reading {
        /// Bytes of the input files, as they lie on the disk, that are done.
        bytes_done: u64,
        /// Bytes of all input files.
        bytes_total: u64,
    },
    /// The most frequent pairs of tokens are merged.
    Merging {
        /// Merges that are found.
        done: usize,
        /// Merges that are found at most.
        total: usize,
    },
}

/// Minimum time between two reports to the caller.
const INTERVAL: Duration = Duration::from_millis(100);

/// Limits how often progress is reported.
#[derive(Debug, Default)]
pub(super) struct ProgressTimer {
    last_report: Option<Instant>,
}

impl ProgressTimer {
    /// True when a report is due; the next one is due an interval later.
    pub(super) fn is_due(&mut self) -> bool {
        if self.last_report.is_some_and(|last| last.elapsed() < INTERVAL) {
            return false;
        }
        self.last_report = Some(Instant::now());
        true
    }
}
