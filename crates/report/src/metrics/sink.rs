//! The metrics files of a run, to which each event is written.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{Event, Record, Resumed};
use super::lost::Lost;
use super::{MetricsError, jsonl, tensorboard};

/// The metrics files that a run writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outputs {
    /// `metrics.jsonl`.
    pub jsonl: bool,
    /// TensorBoard events.
    pub tensorboard: bool,
}

/// Start of a run's metrics files in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkStart {
    /// A new run: it is an error if `metrics.jsonl` holds anything.
    Fresh,
    /// A resumed run. The records that it will write again are removed from the files.
    Resumed(Lost),
}

/// The open metrics files of a run.
#[derive(Debug)]
pub struct MetricsSink {
    jsonl: Option<jsonl::Writer>,
    tensorboard: Option<tensorboard::Writer>,
    recovery: jsonl::Recovery,
}

impl MetricsSink {
    /// Opens the files of `outputs` in `folder`, which must exist. A resumed run records that it was resumed.
    pub fn open(folder: &Path, outputs: Outputs, start: SinkStart) -> Result<Self, MetricsError> {
        let path = folder.join(jsonl::FILE_NAME);
        let mut sink = Self { jsonl: None, tensorboard: None, recovery: jsonl::Recovery::default() };
        let lost = match start {
            SinkStart::Fresh => None,
            SinkStart::Resumed(lost) => Some(lost),
        };
        if outputs.jsonl {
            sink.jsonl = Some(match lost {
                None => jsonl::Writer::create(&path)?,
                Some(lost) => {
                    let (writer, recovery) = jsonl::Writer::resume(&path, lost)?;
                    sink.recovery = recovery;
                    writer
                }
            });
        }
        if outputs.tensorboard {
            sink.tensorboard = Some(tensorboard::Writer::create(folder, now(), lost)?);
        }
        if let Some(lost) = lost {
            sink.record(Resumed { step: lost.after, switched: lost.switched })?;
        }
        Ok(sink)
    }

    /// Numbers of lines that the resume dropped from `metrics.jsonl`; 0 for a new run.
    pub fn recovery(&self) -> jsonl::Recovery {
        self.recovery
    }

    /// Writes `event` with the current time to every file before it returns.
    pub fn record(&mut self, event: impl Into<Event>) -> Result<(), MetricsError> {
        self.record_at(now(), event)
    }

    /// Writes `event` with `time`, in seconds since 1970.
    ///
    /// If a file cannot be written, the others still get the record; the first error is returned.
    pub fn record_at(&mut self, time: f64, event: impl Into<Event>) -> Result<(), MetricsError> {
        let record = Record { time, event: event.into() };
        let lines = self.jsonl.as_mut().map_or(Ok(()), |writer| writer.write(&record));
        let events = self.tensorboard.as_mut().map_or(Ok(()), |writer| writer.write(&record));
        lines.and(events)
    }

    /// The lines recorded so far. A checkpoint counts as complete only after they are synced, so it never
    /// describes steps whose metrics are lost.
    pub fn unsynced(&self) -> Result<Option<jsonl::Unsynced>, MetricsError> {
        self.jsonl.as_ref().map(jsonl::Writer::unsynced).transpose()
    }
}

/// Seconds since 1970; 0 if the clock is set before that.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
