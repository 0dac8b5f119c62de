//! The metrics files of a run, to which each event is written.

use std::path::Path;

use super::dropped_records::DroppedRecords;
use super::event::{Event, Record, Resumed};
use super::{Command, MetricsError, jsonl, tensorboard};

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
    Resumed(DroppedRecords),
}

/// The open metrics files of a run.
#[derive(Debug)]
pub struct MetricsSink {
    jsonl: Option<jsonl::Writer>,
    tensorboard: Option<tensorboard::Writer>,
    command: Option<Command>,
    recovery: jsonl::Recovery,
}

impl MetricsSink {
    /// Opens the files of `outputs` in `folder`, which must exist. A resumed run records that it was resumed.
    /// `config` is the text of the configuration, for dashboards; `command` receives all lines too.
    pub fn open(
        folder: &Path,
        outputs: Outputs,
        start: SinkStart,
        config: &str,
        command: Option<Command>,
    ) -> Result<Self, MetricsError> {
        let path = folder.join(jsonl::FILE_NAME);
        let recovery = jsonl::Recovery::default();
        let mut sink = Self { jsonl: None, tensorboard: None, command, recovery };
        let dropped = match start {
            SinkStart::Fresh => None,
            SinkStart::Resumed(dropped) => Some(dropped),
        };
        if outputs.jsonl {
            sink.jsonl = Some(match dropped {
                None => jsonl::Writer::create(&path)?,
                Some(dropped) => {
                    let (writer, recovery) = jsonl::Writer::resume(&path, dropped)?;
                    sink.recovery = recovery;
                    writer
                }
            });
        }
        if outputs.tensorboard {
            let now = Record::now(Resumed::default()).time;
            let mut writer = tensorboard::Writer::create(folder, now, dropped)?;
            writer.describe(now, config)?;
            sink.tensorboard = Some(writer);
        }
        if let Some(dropped) = dropped {
            sink.record(Resumed { step: dropped.after, switched: dropped.switched })?;
        }
        Ok(sink)
    }

    /// Numbers of lines that the resume dropped from `metrics.jsonl`; 0 for a new run.
    pub fn recovery(&self) -> jsonl::Recovery {
        self.recovery
    }

    /// Writes `event` with the current time to every file before it returns.
    pub fn record(&mut self, event: impl Into<Event>) -> Result<(), MetricsError> {
        self.write(&Record::now(event))
    }

    /// Writes `record` to every file, and hands it to the command.
    ///
    /// If a file cannot be written, the others still get the record; the first error is returned.
    pub fn write(&mut self, record: &Record) -> Result<(), MetricsError> {
        if let Some(command) = &mut self.command {
            command.record(record);
        }
        let lines = self.jsonl.as_mut().map_or(Ok(()), |writer| writer.write(record));
        let events = self.tensorboard.as_mut().map_or(Ok(()), |writer| writer.write(record));
        lines.and(events)
    }

    /// The lines recorded so far. A checkpoint counts as complete only after they are synced, so it never
    /// describes steps whose metrics are lost.
    pub fn unsynced(&self) -> Result<Option<jsonl::Unsynced>, MetricsError> {
        self.jsonl.as_ref().map(jsonl::Writer::unsynced).transpose()
    }
}
