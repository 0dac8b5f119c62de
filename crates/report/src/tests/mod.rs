//! Promises to readers of a report.

mod axis;
mod curve;
mod experts;
mod files;
mod inspection;
mod live;
mod looks;
mod markup;
mod names;
mod page;
mod tasks;

use super::*;
use crate::metrics::{
    CheckpointSaved, EvalMetrics, Event, ExpertMetrics, Record, ReferenceGap, Resumed, Sample, SkippedStep,
    SourceMetrics, StepMetrics, TaskMetrics, Warning,
};

/// A run of `steps` steps whose loss falls from 10, evaluated every tenth step.
fn run(name: &str, steps: u64) -> RunData {
    let mut records = Vec::new();
    let mut add = |step: u64, event: Event| records.push(Record { time: 1.764e9 + step as f64, event });
    for step in 1..=steps {
        let loss = 2.0 + 8.0 * (-(step as f64) / 20.0).exp();
        let metrics = StepMetrics {
            step,
            loss,
            grad_norm: loss / 4.0,
            lr: 1e-3 / step as f64,
            memory_bytes: 1 << 28,
            tokens_per_second: 5e4,
            tokens: step * 1000,
            step_ms: 20.0,
            ..StepMetrics::default()
        };
        add(step, metrics.into());
        if step % 10 == 0 {
            add(
                step,
                EvalMetrics { step, loss: loss + 0.125, bits_per_byte: Some(1.5), ..EvalMetrics::default() }
                    .into(),
            );
        }
    }
    let config = Some(format!("[train]\nsteps = {steps}\nseed = 1\n"));
    RunData { name: name.to_owned(), records, config, ..RunData::default() }
}

/// The score on a task of 200 rows.
fn score(step: u64, task: &str, value: f64) -> TaskMetrics {
    let interval = Some([value - 0.0625, value + 0.0625]);
    TaskMetrics { step, task: task.into(), metric: "acc".into(), value, interval, rows: 200, chance: 0.25 }
}

fn record(event: impl Into<Event>) -> Record {
    Record { time: 1.764e9, event: event.into() }
}
