//! Where a run's events go.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{EVAL, Event, Record, Resumed, SAMPLE};
use super::{MetricsError, jsonl, tensorboard};
use xtrain_model::Recipe;

/// Which files a run writes its metrics to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outputs {
    /// `metrics.jsonl`.
    pub jsonl: bool,
    /// TensorBoard events.
    pub tensorboard: bool,
}

/// Whether the run folder's metrics begin or go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkStart {
    /// A new run: it is an error if `metrics.jsonl` holds anything.
    Fresh,
    /// A run that goes on from a checkpoint, or from its start. What it makes again is taken out of the files.
    Resumed(Lost),
}

/// What a resumed run makes again, so that its files say it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Attempted steps that the checkpoint holds; 0 at the start. Everything of later steps is made again.
    pub after: u64,
    /// So is the evaluation of that step itself: the run was stopped in it.
    pub evaluation: bool,
    /// So are the samples of that step itself: it is the last one.
    pub samples: bool,
    /// See [`Resumed::switched`].
    pub switched: Option<[Recipe; 2]>,
}

impl Lost {
    /// What is lost of a run that goes on with the step after `step`.
    pub fn after(step: u64) -> Self {
        Lost { after: step, evaluation: false, samples: false, switched: None }
    }

    /// Whether a record of this step and kind is lost.
    pub(super) fn holds(&self, step: u64, kind: &str) -> bool {
        let again = match kind {
            EVAL => self.evaluation,
            SAMPLE => self.samples,
            _ => false,
        };
        step > self.after || (step == self.after && again)
    }
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

    /// What the resume dropped from `metrics.jsonl`; all zeros for a fresh run.
    pub fn recovery(&self) -> jsonl::Recovery {
        self.recovery
    }

    /// Writes `event`, as of now, to every file. It is in the files when this returns.
    pub fn record(&mut self, event: impl Into<Event>) -> Result<(), MetricsError> {
        self.record_at(now(), event)
    }

    /// Writes `event` as of `time`, in seconds since 1970.
    ///
    /// A file that cannot be written keeps no other from its record; the first error is returned.
    pub fn record_at(&mut self, time: f64, event: impl Into<Event>) -> Result<(), MetricsError> {
        let record = Record { time, event: event.into() };
        let lines = self.jsonl.as_mut().map_or(Ok(()), |writer| writer.write(&record));
        let events = self.tensorboard.as_mut().map_or(Ok(()), |writer| writer.write(&record));
        lines.and(events)
    }

    /// The lines recorded so far. A checkpoint that is complete only after they are on the disk never outlives them.
    pub fn unsynced(&self) -> Result<Option<jsonl::Unsynced>, MetricsError> {
        self.jsonl.as_ref().map(jsonl::Writer::unsynced).transpose()
    }
}

/// Seconds since 1970; 0 on a machine whose clock is before that.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
