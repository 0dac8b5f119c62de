//! Progress reports to the caller of a preparation, and their rate.

use std::time::{Duration, Instant};

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Bytes of the (possibly compressed) input files read.
    pub bytes_done: u64,
    /// Bytes of all input files.
    pub bytes_total: u64,
    /// Tokens so far, including those of earlier runs.
    pub tokens: u64,
    /// Documents so far.
    pub documents: u64,
    /// Time since this run started.
    pub elapsed: Duration,
    /// Bytes that earlier runs read.
    pub(super) bytes_before: u64,
}

impl Progress {
    /// Speed of this run, in megabytes (10^6) of input per second.
    pub fn mb_per_s(&self) -> f64 {
        let bytes = self.bytes_done.saturating_sub(self.bytes_before) as f64;
        bytes / 1e6 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Progress of learning a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LearnProgress {
    /// Reading the text.
    Reading {
        /// Bytes of the (possibly compressed) input files read.
        bytes_done: u64,
        /// Bytes of all input files.
        bytes_total: u64,
    },
    /// Merging the most frequent pairs of tokens.
    Merging {
        /// Merges found.
        done: usize,
        /// Maximum number of merges.
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
