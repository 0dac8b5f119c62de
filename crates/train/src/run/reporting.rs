//! Reports of steps: events, metrics files, and the limit on steps that are not finite.

use super::Run;
use super::observer::Observer;
use super::saturation::Saturation;
use crate::error::RunError;
use std::time::Duration;
use xtrain_data::TokenCounts;
use xtrain_evaluation::loss::SourceTally;
use xtrain_model::decoder::ExpertSums;
use xtrain_report::LiveReport;
use xtrain_report::metrics::{
    Event, ExpertMetrics, MetricsSink, Record, SkippedStep, StepMetrics, TrainedMetrics, Warning,
};
use xtrain_step::engine::Processor;
use xtrain_step::learner::StepResult;
use xtrain_step::spans::step_span;

/// The files from which others see the run, and what they report.
pub(super) struct Reports {
    /// The content of `config.toml`: the configuration, with comments on what was chosen.
    pub(super) config_text: String,
    pub(super) sink: MetricsSink,
    /// The report that is updated during the run, if enabled.
    pub(super) live: Option<LiveReport>,
    pub(super) hardware: Hardware,
    /// Casts at static scales that have saturated.
    pub(super) saturation: Saturation,
}

/// The processor of a run, as reports show it.
pub(super) struct Hardware {
    /// Name of the device.
    pub(super) device: String,
    /// Bytes of its memory, if known.
    memory_total: Option<u64>,
    /// Peak bf16 operations per second of all ranks, if known.
    peak_flops: Option<f64>,
}

impl Hardware {
    /// The processors of `world_size` ranks that are all like this one.
    pub(super) fn new(processor: &Processor, world_size: usize) -> Self {
        Hardware {
            device: match world_size {
                1 => processor.describe(),
                n => format!("{n} x {}", processor.describe()),
            },
            memory_total: processor.total_bytes(),
            peak_flops: processor.peak_flops().map(|peak| peak * world_size as f64),
        }
    }
}

/// The steps since the last report.
#[derive(Default)]
pub(super) struct Progress {
    /// Consecutive steps, up to the last one, that were not finite.
    pub(super) nonfinite_in_a_row: u64,
    steps: u64,
    /// Wall time of `steps`.
    took: Duration,
}

/// A step and its result.
pub(super) struct FinishedStep {
    /// Its number, from 1.
    pub(super) step: u64,
    pub(super) lr: f64,
    pub(super) result: StepResult,
}

impl Run {
    /// Reports a step that took `took`.
    pub(super) fn report_step(
        &mut self,
        finished: FinishedStep,
        took: Duration,
        progress: &mut Progress,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        progress.steps += 1;
        progress.took += took;
        let FinishedStep { step, lr, ref result } = finished;
        let _metrics = step_span("metrics", step);
        if self.process_group.is_first() {
            observer.stepped(step, self.schedule.steps());
        }
        if result.skipped {
            self.position.skipped += 1;
            progress.nonfinite_in_a_row += 1;
            let StepResult { loss, grad_norm, .. } = *result;
            self.record(SkippedStep { step, loss, grad_norm, skipped: self.position.skipped }, observer)?;
            self.stop_if_diverged(step, progress.nonfinite_in_a_row)?;
        } else {
            progress.nonfinite_in_a_row = 0;
            self.add_sources(step, result);
        }
        self.report_saturation(step, result, observer)?;
        let sign = (!result.skipped)
            .then(|| self.position.divergence.stepped(step, result.loss, result.grad_norm, lr))
            .flatten();
        if step.is_multiple_of(self.config.log.every) || step == self.schedule.steps() || step == 1 {
            let metrics = self.metrics(&finished, progress);
            self.record(metrics, observer)?;
            if let Some(experts) = self.expert_metrics(&finished) {
                self.record(experts, observer)?;
            }
            (progress.steps, progress.took) = (0, Duration::ZERO);
        }
        if let Some(text) = sign {
            self.warn_of_divergence(step, text, observer)?;
        }
        let segment = self.position.reference.as_mut();
        if let Some(reference) = segment.and_then(|segment| segment.add(step, result.loss)) {
            self.position.reference = None;
            self.record(reference, observer)?;
        }
        Ok(())
    }

    /// Shows an event and writes it to the metrics files, on rank 0.
    pub(super) fn record(
        &mut self,
        event: impl Into<Event>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        if !self.process_group.is_first() {
            return Ok(());
        }
        let record = Record::now(event);
        observer.event(&record.event, self.schedule.steps());
        if let Some(mut live) = self.reports.live.take() {
            live.add(&record);
            if matches!(record.event, Event::Step(_) | Event::Eval(_)) {
                live.renew(|| self.summary(None));
            }
            self.reports.live = Some(live);
        }
        Ok(self.reports.sink.write(&record)?)
    }

    /// Warns that the run diverges, and ends it with `train.stop_on_divergence`.
    pub(super) fn warn_of_divergence(
        &mut self,
        step: u64,
        text: String,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        self.record(Warning { step, text: text.clone() }, observer)?;
        if !self.config.train.stop_on_divergence {
            return Ok(());
        }
        Err(RunError::Diverged(format!(
            "step {step}: {text} (train.stop_on_divergence = true); {}",
            self.how_to_continue()
        )))
    }

    /// Counts the casts of a step that saturated, and warns if they are more, or further beyond their scales,
    /// than at the last warning.
    fn report_saturation(
        &mut self,
        step: u64,
        result: &StepResult,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let Some(saturated) = &result.saturated else { return Ok(()) };
        self.position.saturated += saturated.len() as u64;
        match self.reports.saturation.warning(saturated, self.folder.path()) {
            Some(text) => self.record(Warning { step, text }, observer),
            None => Ok(()),
        }
    }

    /// Adds the losses of a step to those of each source of a mixture.
    fn add_sources(&mut self, step: u64, result: &StepResult) {
        let batch_size = self.config.train.batch_size as u64;
        let loader = &self.corpus.loader;
        let count = loader.source_names().len();
        if result.source_losses.is_empty() || count < 2 {
            return;
        }
        self.position.trained.resize(count, SourceTally::default());
        let counts = loader.counts_by_source((step - 1) * batch_size..step * batch_size);
        let sums = result.source_losses.iter().zip(counts);
        self.position.trained.iter_mut().zip(sums).for_each(|(tally, (&loss_sum, counts))| {
            tally.add(SourceTally { targets: counts.trained as usize, loss_sum, matches: 0 });
        });
    }

    fn metrics(&mut self, finished: &FinishedStep, progress: &Progress) -> StepMetrics {
        let FinishedStep { step, lr, ref result } = *finished;
        let step_tokens = self.config.step_tokens();
        let seconds = progress.took.as_secs_f64().max(1e-9) / progress.steps as f64;
        let tokens_per_second = step_tokens as f64 / seconds;
        let flops = self.learner.spec().model.flops_per_token(self.config.data.seq_len);
        let samples = step * self.config.train.batch_size as u64;
        let taken = (samples - progress.steps * self.config.train.batch_size as u64)..samples;
        let counts = self.corpus.loader.counts(taken);
        let positions = progress.steps * step_tokens;
        let trained = (counts != TokenCounts::full(positions)).then(|| TrainedMetrics {
            tokens_per_second: counts.trained as f64 / progress.took.as_secs_f64().max(1e-9),
            share: counts.trained as f64 / counts.inputs.max(1) as f64,
            padding: 1.0 - counts.inputs as f64 / positions as f64,
        });
        let epoch = self.corpus.loader.epochs(samples).into_iter().fold(0.0, f64::max);
        StepMetrics {
            step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            lr,
            memory_bytes: self.learner.memory_bytes() as u64,
            memory_total_bytes: self.reports.hardware.memory_total,
            tokens_per_second,
            trained,
            tflops: tokens_per_second * flops / 1e12,
            mfu: self.reports.hardware.peak_flops.map(|peak| tokens_per_second * flops / peak),
            tokens: step * step_tokens,
            epoch,
            step_ms: seconds * 1e3,
            skipped: self.position.skipped,
            saturated: result.saturated.is_some().then_some(self.position.saturated),
            seconds_left: Some((self.schedule.steps() - step) as f64 * seconds),
        }
    }

    /// The figures of the experts in a step, if the model has some.
    fn expert_metrics(&self, finished: &FinishedStep) -> Option<ExpertMetrics> {
        let all = &finished.result.experts;
        if all.is_empty() {
            return None;
        }
        let layers = self.learner.spec().model.layers.iter().enumerate();
        let blocks = layers.filter(|(_, layer)| layer.feed_forward.experts().is_some());
        let mean = |of: fn(&ExpertSums) -> f32| {
            all.iter().map(|sums| f64::from(of(sums))).sum::<f64>() / all.len() as f64
        };
        let ranks = self.learner.spec().parallel.expert;
        let of_ranks = all.iter().filter(|_| ranks > 1);
        let of_experts = |sums: &ExpertSums| ExpertMetrics::largest_part(&sums.tokens, sums.tokens.len());
        let least = |sums: &ExpertSums| sums.tokens.iter().copied().fold(f32::INFINITY, f32::min) as u64;
        Some(ExpertMetrics {
            step: finished.step,
            balance: mean(|sums| sums.balance),
            z_loss: mean(|sums| sums.z_loss),
            blocks: blocks.map(|(block, _)| block as u64).collect(),
            max_load: all.iter().map(of_experts).collect(),
            min_tokens: all.iter().map(least).collect(),
            rank_load: of_ranks.map(|sums| ExpertMetrics::largest_part(&sums.tokens, ranks)).collect(),
        })
    }

    fn stop_if_diverged(&self, step: u64, in_a_row: u64) -> Result<(), RunError> {
        let limit = self.config.train.max_nonfinite_steps;
        if limit == 0 || in_a_row < limit {
            return Ok(());
        }
        let how = self.how_to_continue();
        Err(RunError::Diverged(format!(
            "step {step}: the loss or the gradient norm was not finite in {in_a_row} steps in a row; lower optimizer.lr and {how}, or find the \
             operation with train.check_numerics = true"
        )))
    }

    /// Advice on how to continue after a divergence.
    fn how_to_continue(&self) -> String {
        match self.checkpoints.has_any() {
            true => format!(
                "continue with --resume from the latest checkpoint in {} (delete it to continue from the one before)",
                self.folder.checkpoints().display()
            ),
            false => "start again with --resume, because nothing was saved yet".to_owned(),
        }
    }
}
