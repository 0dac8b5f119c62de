//! The training loop.

use super::corpus::Corpus;
use super::saved::{Position, Saved};
use super::{Notice, RunError, RunFolder, fit, setup};
use crate::config::{Config, Device, Facts, Parsed, Resolved};
use crate::evaluate::Evaluator;
use crate::exchange;
use crate::generate::{Generator, Sampling};
use crate::learner::{Learner, StepResult};
use crate::metrics::{
    Checkpoint, EvalMetrics, Event, MetricsSink, Outputs, Resumed, Sample, SkippedStep,
    Start as MetricsStart, StepMetrics,
};
use crate::programs::{self, TrainingSpec};
use crate::report::{self, RunSummary};
use crate::schedule::Schedule;
use crate::weights::LearnError;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use xtrain_data::{DataError, SpecialTokens, Validation};
use xtrain_runtime::{Checks, CpuEngine, EngineError};

/// Whether a run begins or goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// In a folder where no run has begun.
    New,
    /// From the latest complete checkpoint, else from the start.
    Resume,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// It was asked to stop; the state is saved.
    Stopped,
    /// Its time was up; the state is saved.
    TimeLimit,
    /// It was asked to stop, or its time was up, before its first step; what was made of the data until then is kept.
    StoppedEarly,
}

/// Who watches a run: the terminal.
pub trait Observer {
    /// Something that happens before the first step; [`ControlFlow::Break`] stops it.
    fn notice(&mut self, notice: Notice) -> ControlFlow<()>;
    /// The run is about to take its first step.
    fn started(&mut self, config: &Config, model: &str, first_step: u64, steps: u64);
    /// A step is done: how many are, of how many.
    fn stepped(&mut self, done: u64, steps: u64);
    /// Something that is also in the metrics files.
    fn event(&mut self, event: &Event, steps: u64);
    /// A file or folder was written at the end.
    fn wrote(&mut self, what: &str, path: &Path);
}

/// Runs the run file `parsed` to its end, to its time limit, or until `stop` is set.
pub fn train(
    parsed: &Parsed,
    start: Start,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let begun = Instant::now();
    let limit = parsed.config.train.max_time.map(|t| t.duration());
    let time_is_up = || limit.is_some_and(|limit| begun.elapsed() >= limit);
    let opened = Run::open(parsed, start, observer, &time_is_up);
    let mut run = match opened {
        Err(RunError::Data(DataError::Interrupted)) => return Ok(Outcome::StoppedEarly),
        opened => opened?,
    };
    let outcome = run.steps(stop, begun, observer)?;
    run.finish(outcome, observer)?;
    Ok(outcome)
}

struct Run {
    config: Config,
    steps: u64,
    folder: RunFolder,
    corpus: Corpus,
    learner: Learner,
    schedule: Schedule,
    saved: Saved,
    sink: MetricsSink,
    at: Position,
    hf: exchange::Identity,
    memory_total: Option<u64>,
    evaluator: Option<Evaluator>,
}

impl Run {
    fn open(
        parsed: &Parsed,
        start: Start,
        observer: &mut dyn Observer,
        time_is_up: &dyn Fn() -> bool,
    ) -> Result<Self, RunError> {
        let folder = RunFolder::at(parsed.out());
        let going_on = start == Start::Resume && folder.is_begun();
        let hf = match going_on {
            true => setup::kept_init(&parsed.config, &folder)?,
            false => setup::init(&parsed.config)?,
        };
        if start == Start::New && folder.is_begun() {
            return Err(RunError::Refused(format!(
                "{} already holds a run; go on with --resume, choose another folder with --set train.out=..., or delete it",
                folder.path().display()
            )));
        }
        let tokenizer = folder.tokenizer();
        let kept = going_on.then_some(tokenizer.as_path()).filter(|t| t.is_dir());
        let corpus = Corpus::open(&parsed.config, kept, &mut |notice| match time_is_up() {
            true => ControlFlow::Break(()),
            false => observer.notice(notice),
        })?;
        let facts = Facts {
            init: hf.as_ref().map(|hf| hf.model.clone()),
            tokenizer_vocab_size: Some(corpus.tokenizer.vocab_size()),
            epoch_tokens: Some(corpus.loader.epoch_tokens()),
            gpu: false,
        };
        let planned = setup::planned(parsed.resolve(&facts)?)?;
        let Resolved { config, steps, .. } = planned.resolved;
        let steps = steps.ok_or_else(|| RunError::Refused("the length of the run is not known".into()))?;
        if let Some(available) = xtrain_runtime::available_bytes() {
            fit::check(&planned.spec, config.train.batch_size, available)?;
        }
        let mut learner = learner(&config, planned.spec)?;
        if !going_on {
            // Before the folder is made: what refuses here leaves none.
            begin(&mut learner, &config)?;
        }
        let mut saved = Saved::open(&folder)?;
        if folder.is_begun() != going_on {
            return Err(RunError::Refused(format!(
                "another process began a run in {} meanwhile; start this one again, with --resume to go on with that run",
                folder.path().display()
            )));
        }
        let mut at = Position::default();
        if going_on {
            match saved.restore(&mut learner, &corpus.loader, &config)? {
                Some(position) => at = position,
                None => begin(&mut learner, &config)?,
            }
        } else {
            corpus.tokenizer.save(&folder.tokenizer())?;
            setup::keep_init(&parsed.config, &folder)?;
            if let Some(from) = &parsed.config.model.init_from {
                exchange::warn_of_what_stays(Path::new(from), &corpus.tokenizer);
            }
        }
        folder.write("config.toml", &config.to_toml())?;
        let outputs = Outputs { jsonl: config.log.jsonl, tensorboard: config.log.tensorboard };
        let metrics = if going_on { MetricsStart::Resumed { step: at.step } } else { MetricsStart::Fresh };
        let sink = MetricsSink::open(folder.path(), outputs, metrics)?;
        let schedule = Schedule::of(&config, steps);
        let hf = exchange::Identity::new(hf, &learner.spec().model, &corpus.tokenizer);
        let evaluator = match &corpus.validation {
            Some(_) => {
                let (batch, mask, chunk) =
                    (learner.spec().batch, config.data.document_mask, config.train.loss_chunk);
                Some(Evaluator::new(learner.weights(), batch, mask, chunk)?)
            }
            None => None,
        };
        observer.started(&config, &describe(learner.spec()), at.step, steps);
        if going_on {
            observer.event(&Event::Resumed(Resumed { step: at.step }), steps);
        }
        Ok(Run {
            config,
            steps,
            folder,
            corpus,
            learner,
            schedule,
            saved,
            sink,
            at,
            hf,
            memory_total: xtrain_runtime::total_bytes(),
            evaluator,
        })
    }

    /// Steps until the end, the time limit or a stop. The state is saved when it returns.
    fn steps(
        &mut self,
        stop: &AtomicBool,
        begun: Instant,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        let limit = self.config.train.max_time.map(|t| t.duration());
        let (every, eval_every) = (self.config.checkpoint.every, self.config.eval.every.unwrap_or(0));
        let mut window = Window::open();
        // What a step took at most, with its evaluation and its checkpoint.
        let mut longest = Duration::ZERO;
        let mut nonfinite_in_a_row = 0;
        while self.at.step < self.steps {
            let step_begun = Instant::now();
            let lr = self.schedule.lr(self.at.step);
            let result = self.step(lr)?;
            self.at.step += 1;
            self.at.train_seconds += step_begun.elapsed().as_secs_f64();
            window.steps += 1;
            window.busy += step_begun.elapsed();
            observer.stepped(self.at.step, self.steps);
            if result.skipped {
                self.at.skipped += 1;
                nonfinite_in_a_row += 1;
                self.record(self.skipped(result), observer)?;
                self.stop_if_diverged(nonfinite_in_a_row)?;
            } else {
                nonfinite_in_a_row = 0;
            }
            if self.at.step.is_multiple_of(self.config.log.every)
                || self.at.step == self.steps
                || self.at.step == 1
            {
                let metrics = self.metrics(result, lr, &window);
                self.record(metrics, observer)?;
                window = Window::open();
            }
            let last = self.at.step == self.steps;
            let evaluate = if last { self.config.eval.at_end } else { due(self.at.step, eval_every) };
            if evaluate {
                self.evaluate(observer)?;
            }
            longest = longest.max(step_begun.elapsed());
            let time_is_up = limit.is_some_and(|limit| begun.elapsed() + longest >= limit);
            let stopped = stop.load(Ordering::Relaxed);
            // Skipped steps change nothing that is worth a checkpoint, and must not push out the good ones.
            let worth_saving = due(self.at.step, every) && nonfinite_in_a_row == 0;
            if worth_saving || last || stopped || time_is_up {
                self.save(observer)?;
            }
            longest = longest.max(step_begun.elapsed());
            match (last, stopped, time_is_up) {
                (true, ..) => {}
                (_, true, _) => return Ok(Outcome::Stopped),
                (_, _, true) => return Ok(Outcome::TimeLimit),
                _ => {}
            }
        }
        Ok(Outcome::Finished)
    }

    /// One optimizer step: all its micro-batches, then the update.
    fn step(&mut self, lr: f64) -> Result<StepResult, RunError> {
        let (batch_size, micro) = (self.config.train.batch_size, self.config.train.micro_batch_size());
        let first = self.at.step * batch_size as u64;
        let targets = self.corpus.loader.valid_targets(first..first + batch_size as u64) as usize;
        for at in (0..batch_size).step_by(micro) {
            let batch = self.corpus.loader.batch(first + at as u64, micro)?;
            let first_token = at * self.config.data.seq_len;
            let done = self.learner.micro_step(&batch, self.at.step, first_token, targets);
            done.map_err(|e| self.during_step(e))?;
        }
        self.learner.update(lr).map_err(|e| self.during_step(e))
    }

    /// What stopped the step that is being made.
    fn during_step(&self, error: LearnError) -> RunError {
        match error {
            LearnError::Engine(EngineError::NonFinite { .. }) => RunError::Diverged(format!(
                "step {}: {error}; look at the numbers that it reads: a lower optimizer.lr, or other data or weights to start from, \
                 keep them small",
                self.at.step + 1
            )),
            other => other.into(),
        }
    }

    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let (Some(validation), Some(evaluator)) = (self.corpus.validation.clone(), self.evaluator) else {
            return Ok(());
        };
        let tokens = self.config.eval.tokens.unwrap_or(0);
        let windows = if tokens == 0 { u64::MAX } else { tokens.div_ceil(self.config.data.seq_len as u64) };
        let validation = validation.at_most(windows);
        let (loss, targets) = evaluator.mean_loss(self.learner.weights(), &validation)?;
        let bits = loss * targets as f64 / std::f64::consts::LN_2;
        let bits_per_byte = validation.text_bytes()?.map(|bytes| bits / bytes);
        self.record(EvalMetrics { step: self.at.step, loss, bits_per_byte }, observer)?;
        let is_best = loss.is_finite() && self.at.best.is_none_or(|(_, best)| loss < best);
        if is_best {
            self.at.best = Some((self.at.step, loss));
            if self.config.checkpoint.keep_best == Some(true) {
                self.save(observer)?;
            }
        }
        Ok(())
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        self.sink.sync()?;
        let Some(path) = self.saved.save(&mut self.learner, &self.corpus.loader, &self.config, &self.at)?
        else {
            return Ok(());
        };
        self.record(Checkpoint { step: self.at.step, path }, observer)
    }

    /// Samples, export, summary and report.
    fn finish(&mut self, outcome: Outcome, observer: &mut dyn Observer) -> Result<(), RunError> {
        if outcome == Outcome::Finished {
            if self.config.checkpoint.export_hf {
                let (path, options) = (self.folder.hf(), exchange::export_options(&self.config));
                exchange::export(self.learner.weights(), &self.hf, &self.corpus.tokenizer, &path, &options)?;
                observer.wrote("Hugging Face folder", &path);
            }
            self.sample(observer)?;
        }
        self.summary(outcome)?.write(self.folder.path())?;
        if self.config.log.jsonl {
            observer.wrote("report", &report::write(self.folder.path())?);
        }
        Ok(())
    }

    fn sample(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let eval = self.config.eval.clone();
        let tokenizer = &self.corpus.tokenizer;
        let encoded = eval.prompts.iter().map(|prompt| tokenizer.encode_prompt(prompt));
        let encoded: Vec<Vec<u32>> = encoded.collect::<Result<_, _>>()?;
        let Some(longest) = encoded.iter().map(Vec::len).max() else { return Ok(()) };
        // One cache serves all prompts.
        let mut generator = Generator::new(self.learner.weights(), longest + eval.max_tokens)?;
        let mut text = String::new();
        for (number, (prompt, tokens)) in eval.prompts.iter().zip(encoded).enumerate() {
            if tokens.is_empty() {
                continue;
            }
            generator.reset();
            let sampling = Sampling {
                temperature: eval.temperature,
                top_k: 0,
                top_p: 1.0,
                seed: self.config.train.seed + number as u64,
            };
            let stop = self.corpus.tokenizer.stop_tokens().to_vec();
            let made = generator.generate(
                self.learner.weights(),
                &tokens,
                eval.max_tokens,
                sampling,
                &stop,
                &mut |_| ControlFlow::Continue(()),
            )?;
            let written = self.corpus.tokenizer.decode(&made, SpecialTokens::Hide)?;
            text.push_str(&format!("{prompt}{written}\n\n"));
            self.record(Sample { step: self.at.step, prompt: prompt.clone(), text: written }, observer)?;
        }
        self.folder.write("sample.txt", &text)
    }

    fn summary(&self, outcome: Outcome) -> Result<RunSummary, RunError> {
        let entropy = self.corpus.validation.as_ref().map(Validation::unigram_entropy_nats).transpose()?;
        Ok(RunSummary {
            model: Some(describe(self.learner.spec())),
            parameters: Some(self.learner.spec().model.parameter_count() as u64),
            precision: Some(self.learner.spec().recipe.name().into()),
            device: Some(format!("CPU, {} threads", rayon::current_num_threads())),
            total_steps: Some(self.steps),
            train_seconds: Some(self.at.train_seconds),
            unigram_entropy: entropy,
            outcome: Some(
                match outcome {
                    Outcome::Finished => "finished",
                    Outcome::Stopped => "stopped on request",
                    Outcome::TimeLimit => "stopped at the time limit",
                    Outcome::StoppedEarly => "stopped before its first step",
                }
                .into(),
            ),
        })
    }

    fn record(&mut self, event: impl Into<Event>, observer: &mut dyn Observer) -> Result<(), RunError> {
        let event = event.into();
        observer.event(&event, self.steps);
        Ok(self.sink.record(event)?)
    }

    fn metrics(&mut self, result: StepResult, lr: f64, window: &Window) -> StepMetrics {
        let step_tokens = self.config.step_tokens();
        let seconds = window.busy.as_secs_f64().max(1e-9) / window.steps as f64;
        let tokens_per_second = step_tokens as f64 / seconds;
        let flops = self.learner.spec().model.flops_per_token(self.config.data.seq_len);
        let samples = self.at.step * self.config.train.batch_size as u64;
        let epoch = self.corpus.loader.epochs(samples).into_iter().fold(0.0, f64::max);
        StepMetrics {
            step: self.at.step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            lr,
            memory_bytes: self.learner.memory_bytes() as u64,
            memory_total_bytes: self.memory_total,
            tokens_per_second,
            tflops: tokens_per_second * flops / 1e12,
            mfu: None,
            tokens: self.at.step * step_tokens,
            epoch,
            step_ms: seconds * 1e3,
            skipped: self.at.skipped,
            seconds_left: Some((self.steps - self.at.step) as f64 * seconds),
        }
    }

    fn skipped(&self, result: StepResult) -> SkippedStep {
        SkippedStep {
            step: self.at.step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            skipped: self.at.skipped,
        }
    }

    fn stop_if_diverged(&self, in_a_row: u64) -> Result<(), RunError> {
        let limit = self.config.train.max_nonfinite_steps;
        if limit == 0 || in_a_row < limit {
            return Ok(());
        }
        Err(RunError::Diverged(format!(
            "step {}: the loss or the gradient norm was not finite in {in_a_row} steps in a row; lower optimizer.lr and go on with --resume from \
             the latest checkpoint in {} (delete it to go on from the one before), or find the operation with train.check_numerics = true",
            self.at.step,
            self.folder.checkpoints().display()
        )))
    }
}

/// The time of the steps since the last report.
struct Window {
    steps: u64,
    busy: Duration,
}

impl Window {
    fn open() -> Self {
        Window { steps: 0, busy: Duration::ZERO }
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// An engine and a learner on it, all state zero.
fn learner(config: &Config, spec: TrainingSpec) -> Result<Learner, RunError> {
    let mut engine = CpuEngine::new(Arc::new(programs::cpu_kernels()));
    engine.set_checks(Checks { numerics: config.train.check_numerics, poison: false });
    match config.train.device {
        Device::Auto | Device::Cpu => {}
    }
    Ok(Learner::new(Box::new(engine), spec, config.train.seed)?)
}

/// Fresh weights, or those of the folder that training starts from.
fn begin(learner: &mut Learner, config: &Config) -> Result<(), RunError> {
    match &config.model.init_from {
        Some(folder) => exchange::import(learner.weights(), Path::new(folder)),
        None => Ok(learner.weights().initialize(config.train.seed, config.model.init_std)?),
    }
}

fn describe(spec: &TrainingSpec) -> String {
    let m = &spec.model;
    format!("{}, {} layers, dim {}, {} heads", m.family.name(), m.layers, m.dim, m.heads)
}
