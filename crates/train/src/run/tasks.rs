//! Scores on tasks during a run.

use super::Run;
use super::observer::{Observer, Outcome};
use super::watch::Watch;
use crate::error::RunError;
use crate::paths::Sources;
use crate::tasks;
use std::sync::Arc;
use xtrain_data::task::Metric;
use xtrain_distributed::Channel;
use xtrain_evaluation::{CheckedTask, Exchange, ScoredModel, model_name};
use xtrain_report::scores::{Earlier, ScoresFolder, task_metrics};
use xtrain_step::scoring::Scorer;
use xtrain_step::spans::step_span;

/// The tasks of a run.
pub(super) struct RunTasks {
    pub(super) tasks: Vec<CheckedTask>,
    /// Programs for their sequences.
    pub(super) scorer: Scorer,
    /// The ranks that share them.
    pub(super) channel: Arc<dyn Channel>,
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
        let scored = self.score_due_tasks(watch, observer);
        let is_of_task =
            matches!(scored, Err(RunError::Data(_) | RunError::Refused(_) | RunError::Report(_)));
        if is_of_task && self.process_group.is_alone() {
            // A task that cannot be scored costs no step. Other ranks may not know of it.
            self.checkpoints.outdate();
            self.save(watch, observer)?;
        }
        scored
    }

    fn score_due_tasks(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let step = self.position.step;
        let _tasks = step_span("tasks", step);
        let (mut stop_request, mut batch_begun, saving) = (None, None, self.saving(watch));
        let mut check = || watch.check_batch(&mut batch_begun, &mut stop_request, saving);
        let RunTasks { tasks, scorer, channel } = &mut self.evaluation.tasks;
        let (tokenizer, sources) = (&self.corpus.tokenizer, Sources::resolve(&self.config));
        let prompts = tasks::prompts(&sources, tokenizer, tasks.iter().map(|task| &task.task))?;
        let exchange = Exchange::new(channel.as_ref(), self.process_group.rank());
        let mut model = ScoredModel {
            weights: self.learner.weights(),
            scorer,
            generator: None,
            tokenizer,
            prompts: prompts.as_ref(),
            name: model_name(self.folder.path()),
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
            // Rank 0 has the rows.
            let metrics = self.process_group.decide(|| {
                task_metrics(&header, &rows).map_err(|error| RunError::Refused(error.to_string()))
            })?;
            scored.extend(metrics.map(|metrics| (task.task.metric(), metrics)));
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
