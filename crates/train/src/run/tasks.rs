//! Scores on tasks during a run.

use super::Run;
use super::observer::{Observer, Outcome};
use super::setup::Setup;
use super::watch::Watch;
use crate::error::RunError;
use crate::paths::Sources;
use crate::position::Position;
use crate::tasks;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;
use xtrain_data::Tokenizer;
use xtrain_data::task::Metric;
use xtrain_distributed::Channel;
use xtrain_report::metrics::TaskMetrics;
use xtrain_report::scores::{TaskScore, items};
use xtrain_step::scoring::Scorer;
use xtrain_step::spans::step_span;
use xtrain_tasks::{CheckedTask, Earlier, Exchange, ScoredModel, ScoresFolder};

/// The tasks of a run.
pub(super) struct RunTasks {
    pub(super) tasks: Vec<CheckedTask>,
    /// Programs for their sequences.
    pub(super) scorer: Scorer,
    /// The ranks that share them.
    pub(super) channel: Arc<dyn Channel>,
}

impl Setup<'_> {
    /// Opens the tasks, whose rows are all read, and are those of the run so far.
    pub(super) fn tasks(&self, tokenizer: &Tokenizer) -> Result<Vec<CheckedTask>, RunError> {
        tasks::checked(&self.sources, tokenizer)
    }
}

/// Records the hashes of tasks, and refuses one that has changed since the run began.
pub(super) fn check_hashes(tasks: &[CheckedTask], position: &mut Position) -> Result<(), RunError> {
    for task in tasks {
        let (name, now) = (task.task.name(), &task.summary.hash);
        let before = position.task_hashes.entry(name.to_owned()).or_insert_with(|| now.clone());
        if before != now {
            return Err(RunError::Refused(format!(
                "{}: the task {name} has hash {now}, but hash {before} in the checkpoint, so its scores would be of another \
                 task; take the task as it was, or give it another `name`",
                task.task.path().display()
            )));
        }
    }
    Ok(())
}

impl Run {
    /// Scores the tasks if that is due. If the run is asked to stop meanwhile, it saves its state and returns
    /// the outcome; the next process makes the rest.
    pub(super) fn score_tasks(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        if !self.position.tasks_due {
            return Ok(None);
        }
        let step = self.position.step;
        let _tasks = step_span("tasks", step);
        let (mut stop_request, mut batch_begun, saving) = (None, None, self.saving(watch));
        let mut check = || {
            if let Some(begun) = batch_begun.replace(Instant::now()) {
                watch.batch = watch.batch.max(begun.elapsed());
            }
            stop_request = stop_request.or_else(|| watch.ended(watch.batch + saving));
            if stop_request.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let RunTasks { tasks, scorer, channel } = &mut self.tasks;
        let (tokenizer, sources) = (&self.corpus.tokenizer, Sources::resolve(&self.config));
        let prompts = tasks::prompts(&sources, tokenizer, tasks.iter().map(|task| &task.task))?;
        let exchange = Exchange::new(channel.as_ref(), self.process_group.rank());
        let mut model = ScoredModel {
            weights: self.learner.weights(),
            scorer,
            tokenizer,
            prompts: prompts.as_ref(),
            name: self
                .folder
                .path()
                .file_name()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            step: Some(step),
        };
        let (hash, folder) = (model.hash(&exchange)?, ScoresFolder::of_run(self.folder.path()));
        let mut scored = Vec::new();
        for task in tasks.iter() {
            let header = model.header(task, &hash);
            let rows =
                model
                    .scores(task, &header, Some(&folder), Earlier::UsedIfSame, &exchange, &mut |_| check())?;
            let Some(rows) = rows else {
                return self.cut_evaluation(stop_request, watch, observer).map(Some);
            };
            let metric = task.task.metric();
            let of_metric = || {
                let items = items(&rows, metric).map_err(|error| RunError::Refused(error.to_string()))?;
                let score = items.as_ref().and_then(TaskScore::new);
                Ok(score.map(|score| (score.mean, score.interval.map(|found| [found.low, found.high]))))
            };
            // Rank 0 has the rows.
            let score: Option<(f64, Option<[f64; 2]>)> = self.process_group.decide(of_metric)?;
            scored.extend(score.map(|(value, interval)| {
                (
                    metric,
                    TaskMetrics {
                        step,
                        task: header.task,
                        metric: header.metric,
                        value,
                        interval,
                        rows: header.rows,
                        chance: header.chance,
                    },
                )
            }));
        }
        self.position.tasks_due = false;
        let mut is_best = false;
        for (metric, score) in scored {
            if self.config.checkpoint.best_task() == Some(&score.task) {
                let is_lower_better = metric == Metric::GoldBpb;
                is_best = self.is_best(score.value, is_lower_better);
                if is_best {
                    self.position.best = Some((step, score.value));
                }
            }
            self.record(score, observer)?;
        }
        if is_best {
            self.save(watch, observer)?;
        }
        Ok(None)
    }
}
