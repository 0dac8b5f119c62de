//! The records of a run in chronological order.

use super::loads::Loads;
use crate::metrics::{
    CheckpointSaved, EvalMetrics, Event, ExpertMetrics, Record, ReferenceGap, Resumed, Sample, SkippedStep,
    SourceMetrics, StepMetrics, TaskMetrics, Warning,
};

/// Minimum number of step reports in the history of a run under way. At twice this number it is thinned.
const KEPT_STEPS: usize = 12_288;
/// Size of the groups that thinning halves. It keeps the extremes of some figures, and the last report, of
/// each group.
const THINNED: usize = 8;

/// Events of a run, each list in the order of its steps.
///
/// If steps repeat (because a program resumed the run without removing lost records, or files were
/// concatenated), the later records count.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct History {
    pub(super) steps: Vec<StepMetrics>,
    /// Number of step reports; after thinning, `steps` holds only some of them.
    reports: u64,
    pub(super) evals: Vec<EvalMetrics>,
    pub(super) skipped: Vec<SkippedStep>,
    /// The resumes of the run.
    pub(super) resumed: Vec<Resumed>,
    pub(super) checkpoints: Vec<CheckpointSaved>,
    pub(super) references: Vec<ReferenceGap>,
    pub(super) samples: Vec<Sample>,
    /// In the order of their steps, and of the mixture.
    pub(super) sources: Vec<SourceMetrics>,
    /// In the order of their steps.
    pub(super) tasks: Vec<TaskMetrics>,
    /// Figures of the experts over all blocks.
    pub(super) experts: Vec<ExpertFigures>,
    /// Loads of the experts by block.
    pub(super) loads: Loads,
    pub(super) warnings: Vec<Warning>,
    /// Seconds since 1970 of the first and the last record.
    pub(super) time: Option<(f64, f64)>,
}

/// Figures of [`ExpertMetrics`] over all blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExpertFigures {
    pub(super) step: u64,
    pub(super) balance: f64,
    pub(super) z_loss: f64,
    /// Largest load over the mean load, of the worst block.
    pub(super) worst_load: f64,
    /// The same, as the mean over blocks.
    pub(super) mean_load: f64,
    /// Largest load of a rank over the mean load, of the worst block; `None` if every rank has all experts.
    pub(super) rank_load: Option<f64>,
}

impl From<&ExpertMetrics> for ExpertFigures {
    fn from(m: &ExpertMetrics) -> Self {
        let (step, balance, z_loss) = (m.step, m.balance, m.z_loss);
        let worst_load = m.worst_load().map_or(f64::NAN, |(load, _)| load);
        let rank_load = m.worst_rank_load().map(|(load, _)| load);
        ExpertFigures { step, balance, z_loss, worst_load, mean_load: m.mean_load(), rank_load }
    }
}

impl History {
    pub(super) fn new(records: &[Record]) -> Self {
        let mut history = Self::default();
        records.iter().for_each(|record| history.record(record));
        history
    }

    /// Adds a record of a run under way, and keeps the number of steps bounded.
    pub(super) fn record_thinned(&mut self, record: &Record) {
        self.record(record);
        thin(&mut self.steps, &[|m| -m.loss, |m| m.loss, |m| m.grad_norm]);
        thin(
            &mut self.experts,
            &[|m| m.worst_load, |m| m.balance, |m| m.z_loss, |m| m.rank_load.unwrap_or(f64::NAN)],
        );
    }

    fn record(&mut self, record: &Record) {
        if record.time.is_finite() {
            let (first, last) = self.time.unwrap_or((record.time, record.time));
            self.time = Some((first.min(record.time), last.max(record.time)));
        }
        self.add(&record.event);
    }

    /// Adds scores on tasks that are not among the records.
    pub(super) fn add_scores(&mut self, scores: &[TaskMetrics]) {
        self.tasks.extend_from_slice(scores);
        self.tasks.sort_by_key(|score| score.step);
    }

    /// Number of reports that this many of `kept` steps represent.
    pub(super) fn reports_in(&self, steps: usize, kept: usize) -> u64 {
        (steps as f64 * self.reports as f64 / kept.max(1) as f64).round() as u64
    }

    fn add(&mut self, event: &Event) {
        let step = event.step();
        match event {
            Event::Step(metrics) => {
                self.cut_steps(step);
                self.steps.push(*metrics);
                self.reports += 1;
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
            // Several sources are reported after one step.
            Event::Source(source) => {
                cut(&mut self.sources, step.saturating_add(1), |s| s.step);
                let first = self.sources.partition_point(|s| s.step < step);
                match self.sources[first..].iter_mut().find(|s| s.name == source.name) {
                    Some(again) => *again = source.clone(),
                    None => self.sources.push(source.clone()),
                }
            }
            // Several tasks are scored after one step.
            Event::Task(task) => {
                cut(&mut self.tasks, step.saturating_add(1), |t| t.step);
                let first = self.tasks.partition_point(|t| t.step < step);
                match self.tasks[first..].iter_mut().find(|t| t.task == task.task) {
                    Some(again) => *again = task.clone(),
                    None => self.tasks.push(task.clone()),
                }
            }
            Event::Experts(metrics) => {
                cut(&mut self.experts, step, |m| m.step);
                self.loads.cut(step);
                self.experts.push(metrics.into());
                self.loads.add(metrics);
            }
            Event::Warning(warning) => {
                cut(&mut self.warnings, step.saturating_add(1), |w| w.step);
                self.warnings.push(warning.clone());
            }
            Event::Resumed(resumed) => {
                let lost = step.saturating_add(1);
                self.cut_steps(lost);
                cut(&mut self.evals, lost, |m| m.step);
                cut(&mut self.skipped, lost, |s| s.step);
                cut(&mut self.checkpoints, lost, |c| c.step);
                cut(&mut self.references, lost, |r| r.step);
                cut(&mut self.samples, lost, |s| s.step);
                cut(&mut self.sources, lost, |s| s.step);
                cut(&mut self.tasks, lost, |t| t.step);
                cut(&mut self.experts, lost, |m| m.step);
                self.loads.cut(lost);
                cut(&mut self.warnings, lost, |w| w.step);
                cut(&mut self.resumed, lost, |r| r.step);
                self.resumed.push(*resumed);
            }
        }
    }

    fn cut_steps(&mut self, step: u64) {
        let before = self.steps.len();
        cut(&mut self.steps, step, |m| m.step);
        let share = self.steps.len() as f64 / before.max(1) as f64;
        self.reports = (self.reports as f64 * share).round() as u64;
    }

    /// The figures of each source after the last evaluation that has them.
    pub(super) fn last_sources(&self) -> &[SourceMetrics] {
        let last = self.sources.last().map(|source| source.step);
        &self.sources[self.sources.partition_point(|source| Some(source.step) < last)..]
    }

    /// The last step with a record.
    pub(super) fn last_step(&self) -> u64 {
        let last = [
            self.steps.last().map(|m| m.step),
            self.evals.last().map(|m| m.step),
            self.skipped.last().map(|s| s.step),
            self.tasks.last().map(|t| t.step),
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

/// Halves the number of reports if there are too many: of each group, those with the highest of the `figures`
/// and the last one stay. Extremes survive repeated thinning.
fn thin<T: Copy>(reports: &mut Vec<T>, figures: &[fn(&T) -> f64]) {
    if reports.len() < 2 * KEPT_STEPS {
        return;
    }
    let mut kept = Vec::with_capacity(reports.len() / 2 + THINNED);
    for group in reports.chunks(THINNED) {
        let highest =
            |of: &fn(&T) -> f64| (0..group.len()).max_by(|&a, &b| of(&group[a]).total_cmp(&of(&group[b])));
        let mut at: Vec<usize> = figures.iter().filter_map(highest).chain([group.len() - 1]).collect();
        at.sort_unstable();
        at.dedup();
        kept.extend(at.into_iter().map(|at| group[at]));
    }
    *reports = kept;
}

/// Drops the items of `step` and later from the end of `items`.
fn cut<T>(items: &mut Vec<T>, step: u64, step_of: impl Fn(&T) -> u64) {
    while items.last().is_some_and(|last| step_of(last) >= step) {
        items.pop();
    }
}
