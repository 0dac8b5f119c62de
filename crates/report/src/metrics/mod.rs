//! Metrics of a run: the figures of steps, events, and their formats.
//!
//! | form | file | for |
//! |---|---|---|
//! | JSON lines | `metrics.jsonl` in the run folder ([`jsonl`]) | programs, and `report` |
//! | TensorBoard events | `events.out.tfevents.*` in the run folder ([`tensorboard`]) | dashboards |
//! | JSON lines | standard input of a program ([`Command`]) | other loggers |
//! | one line of text | the terminal ([`line()`]) | people |
//!
//! An [`Event`] is made once by the trainer, and a [`MetricsSink`] writes it into each file; the text is a
//! pure function, because the binary decides between a progress bar and plain lines.
//!
//! Invariants: a line is in the file when `record` returns; a killed and resumed run has one history, without
//! the steps that were dropped; a write that fails names its file and leaves no half line behind.
//!
//! Deliberately absent: averaging, timing and the peak that MFU refers to. They belong to the trainer.

mod command;
mod dropped_records;
mod error;
mod event;
pub mod format;
pub mod jsonl;
mod line;
pub mod printable;
mod sink;
pub mod tensorboard;

pub use command::{COMMAND_LOG, Command};
pub use dropped_records::DroppedRecords;
pub use error::MetricsError;
pub use event::{
    CheckpointSaved, EvalMetrics, Event, ExpertMetrics, Record, ReferenceGap, Resumed, Sample, SkippedStep,
    SourceMetrics, StepMetrics, TaskMetrics, TrainedMetrics, Warning,
};
pub use line::line;
pub use sink::{MetricsSink, Outputs, SinkStart};

#[cfg(test)]
mod tests;
