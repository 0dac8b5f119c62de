//! The records of a run in chronological order.

use crate::metrics::{
    CheckpointSaved, EvalMetrics, Event, Record, ReferenceGap, Resumed, Sample, SkippedStep, StepMetrics,
};

/// Events of a run, each list in the order of its steps.
///
/// If steps repeat (because a program resumed the run without removing lost records, or files were
/// concatenated), the later records count.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) steps: Vec<StepMetrics>,
    pub(super) evals: Vec<EvalMetrics>,
    pub(super) skipped: Vec<SkippedStep>,
    /// The resumes of the run.
    pub(super) resumed: Vec<Resumed>,
    pub(super) checkpoints: Vec<CheckpointSaved>,
    pub(super) references: Vec<ReferenceGap>,
    pub(super) samples: Vec<Sample>,
    /// Seconds since 1970 of the first and the last record.
    pub(super) time: Option<(f64, f64)>,
}

impl History {
    pub(super) fn new(records: &[Record]) -> Self {
        let mut history = Self::default();
        for record in records {
            if record.time.is_finite() {
                let (first, last) = history.time.unwrap_or((record.time, record.time));
                history.time = Some((first.min(record.time), last.max(record.time)));
            }
            history.add(&record.event);
        }
        history
    }

    fn add(&mut self, event: &Event) {
        let step = event.step();
        match event {
            Event::Step(metrics) => {
                cut(&mut self.steps, step, |m| m.step);
                self.steps.push(*metrics);
            }
            Event::Eval(metrics) => {
                cut(&mut self.evals, step, |m| m.step);
                self.evals.push(*metrics);
            }
            Event::Skipped(skipped) => {
                cut(&mut self.skipped, step, |s| s.step);
                self.skipped.push(*skipped);
            }
            Event::Checkpoint(checkpoint) => {
                cut(&mut self.checkpoints, step, |c| c.step);
                self.checkpoints.push(checkpoint.clone());
            }
            Event::Reference(reference) => {
                cut(&mut self.references, step, |r| r.step);
                self.references.push(*reference);
            }
            // Several prompts may be continued after one step.
            Event::Sample(sample) => {
                cut(&mut self.samples, step.saturating_add(1), |s| s.step);
                self.samples.push(sample.clone());
            }
            Event::Resumed(resumed) => {
                let lost = step.saturating_add(1);
                cut(&mut self.steps, lost, |m| m.step);
                cut(&mut self.evals, lost, |m| m.step);
                cut(&mut self.skipped, lost, |s| s.step);
                cut(&mut self.checkpoints, lost, |c| c.step);
                cut(&mut self.references, lost, |r| r.step);
                cut(&mut self.samples, lost, |s| s.step);
                cut(&mut self.resumed, lost, |r| r.step);
                self.resumed.push(*resumed);
            }
        }
    }

    /// The last step with a record.
    pub(super) fn last_step(&self) -> u64 {
        let last = [
            self.steps.last().map(|m| m.step),
            self.evals.last().map(|m| m.step),
            self.skipped.last().map(|s| s.step),
        ];
        last.into_iter().flatten().max().unwrap_or(0)
    }

    /// The evaluation with the lowest finite loss, the first of equals.
    pub(super) fn best_eval(&self) -> Option<EvalMetrics> {
        let finite = self.evals.iter().copied().filter(|m| m.loss.is_finite());
        finite.min_by(|a, b| a.loss.total_cmp(&b.loss))
    }

    /// Seconds spent in steps: the sum over reports of the mean time times the number of steps.
    pub(super) fn step_seconds(&self) -> f64 {
        let mut before = 0;
        let mut total_ms = 0.0;
        for m in &self.steps {
            if m.step_ms.is_finite() {
                total_ms += m.step_ms * (m.step - before) as f64;
            }
            before = m.step;
        }
        total_ms / 1e3
    }
}

/// Drops the items of `step` and later from the end of `items`.
fn cut<T>(items: &mut Vec<T>, step: u64, step_of: impl Fn(&T) -> u64) {
    while items.last().is_some_and(|last| step_of(last) >= step) {
        items.pop();
    }
}
