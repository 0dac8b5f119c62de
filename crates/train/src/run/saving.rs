//! Saving the state of a run, and reports of its checkpoints.

use super::Run;
use super::background_save::WrittenCheckpoint;
use super::observer::Observer;
use super::steps::exchange_error;
use super::watch::Watch;
use crate::error::RunError;
use std::time::Duration;
use xtrain_report::metrics::CheckpointSaved;
use xtrain_step::spans::step_span;

impl Run {
    /// Begins to save the state, unless this step is saved already. Waits for the save in progress first. All
    /// ranks call it.
    pub(super) fn save(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        if self.checkpoints.holds(self.position.step) {
            return Ok(());
        }
        let _save = step_span("save", self.position.step);
        self.settle(watch, observer)?;
        let copies = self.checkpoints.can_copy(&mut self.learner);
        // Training waits for all ranks, or for none: a write may take longer than `parallel.timeout`.
        let all = self.process_group.gather(&[u64::from(copies)]);
        let all = all.map_err(|error| exchange_error(self.position.step, "save", error))?;
        let copies = all.iter().all(|copies| copies[0] == 1);
        let metrics = self.reports.sink.unsynced()?;
        let (loader, config, position) = (&self.corpus.loader, &self.config, &self.position);
        let written = self.checkpoints.begin(&mut self.learner, loader, config, position, metrics, copies)?;
        self.report_saved(written, watch, observer)
    }

    /// Waits for the save in progress, if any.
    pub(super) fn settle(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let written = self.checkpoints.finish()?;
        self.report_saved(written, watch, observer)
    }

    fn report_saved(
        &mut self,
        written: Option<WrittenCheckpoint>,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let Some(WrittenCheckpoint { step, path, took }) = written else { return Ok(()) };
        if self.process_group.is_first() {
            self.folder.write("config.toml", &self.reports.config_text)?;
        }
        watch.save = watch.save.max(took);
        self.record(CheckpointSaved { step, path }, observer)
    }

    /// Time that a save would take if it began now, including the wait for the one in progress.
    pub(super) fn saving(&self, watch: &Watch<'_>) -> Duration {
        if self.checkpoints.is_writing() { 2 * watch.save } else { watch.save }
    }
}
