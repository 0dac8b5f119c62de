//! A checkpoint opened for examination: its masters on an engine, and forward and backward of the batches
//! that its run would have read next. The checkpoint is not changed.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use xtrain_checkpoint::Checkpoint;
use xtrain_config::{Config, Device, Facts, ParallelConfig};
use xtrain_data::DataError;
use xtrain_model::decoder::io;
use xtrain_model::{Fp8Overrides, Numerics, Recipe};
use xtrain_planner::planned;
use xtrain_program::Program;
use xtrain_runtime::{Checks, Outputs, Part, ProgramId};
use xtrain_step::batch_share::BatchShare;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::layout::Layout;
use xtrain_step::learner::{draws, feed};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_train::corpus::{Corpus, Notice};
use xtrain_train::error::RunError;
use xtrain_train::folder::RunFolder;
use xtrain_train::open_model::{Which, checkpoint, load_base, load_masters};
use xtrain_train::{position, run_file, source, static_scales};

/// A checkpoint, and the next batches of its run.
pub(crate) struct Probe {
    pub(crate) run: RunFolder,
    pub(crate) checkpoint: Checkpoint,
    /// The specification of the run's step.
    pub(crate) spec: TrainingSpec,
    /// The FP8 formats to examine.
    pub(crate) casts: Numerics,
    config: Config,
    corpus: Corpus,
    /// Index of the next sample.
    first: u64,
    /// Holds the tokens of texts other than the run's.
    _temporary: Option<TempDir>,
}

impl Probe {
    /// Opens a run, or the run and the step of a checkpoint folder. `casts` names the FP8 formats to examine;
    /// by default those of the run or, if it has no FP8, [`Recipe::Fp8Block`]. `data` names texts to take in
    /// place of those of the run. `notice` receives the progress of preparing texts and may stop it. Also
    /// returns the processor.
    pub(crate) fn open(
        folder: &Path,
        which: Which,
        device: Device,
        casts: Option<Recipe>,
        data: &[PathBuf],
        notice: &mut dyn FnMut(Notice) -> ControlFlow<()>,
    ) -> Result<(Probe, Processor), RunError> {
        let (run, which) = find_run(folder, which)?;
        let checkpoint = checkpoint(&run, which)?;
        let mut parsed = Config::load::<&str>(&run.config(), &[])?;
        parsed.config.precision = position::precision_of(&checkpoint)?;
        // A single process computes the step of all ranks.
        parsed.config.parallel = ParallelConfig::default();
        let facts = Facts { static_scales: static_scales::of_checkpoint(&checkpoint)?, ..Facts::default() };
        let planned = planned::planned(parsed.resolve(&facts)?)?;
        let (mut spec, config) = (planned.spec, planned.resolved.config);
        // Probes do not sum losses by source.
        spec.loss.sources = 0;
        let casts = formats(&spec, casts)?;
        let processor =
            Processor::choose(device).map_err(|e| RunError::Refused(format!("no model on a GPU: {e}")))?;
        let (corpus, first, temporary) = match data {
            [] => {
                let corpus = Corpus::of_run(&config, &run, notice)?;
                let first = position::next_sample(&checkpoint, &corpus.loader)?;
                (corpus, first, None)
            }
            texts => {
                let cache =
                    tempfile::tempdir().map_err(RunError::io(&std::env::temp_dir(), "make a folder in"))?;
                let corpus = Corpus::of_texts(&config, &run, texts, cache.path(), notice)?;
                (corpus, 0, Some(cache))
            }
        };
        let probe = Probe { run, checkpoint, spec, casts, config, corpus, first, _temporary: temporary };
        Ok((probe, processor))
    }

    /// Loads `program` on an engine of `processor`, with the masters and the copies of them that it reads.
    pub(crate) fn load(
        &self,
        processor: Processor,
        program: Program,
    ) -> Result<(Weights, ProgramId), RunError> {
        let refresh = programs::refresh(&program).map_err(LearnError::from)?;
        let engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
        let (model, numerics) = (self.spec.model.clone(), self.spec.numerics());
        let mut weights =
            Weights::with_refresh(refresh, engine, model, numerics, Layout::alone()).map_err(advise)?;
        let id = weights.load(program).map_err(advise)?;
        load_base(&mut weights, &self.checkpoint, &self.config)?;
        load_masters(&mut weights, &self.checkpoint, &self.run)?;
        Ok((weights, id))
    }

    /// Loads another program over the same masters, and refreshes the copies of them that it reads.
    pub(crate) fn add(&self, weights: &mut Weights, program: Program) -> Result<ProgramId, RunError> {
        let refresh = programs::refresh(&program).map_err(LearnError::from)?;
        let refresh = weights.load(refresh).map_err(advise)?;
        let id = weights.load(program).map_err(advise)?;
        weights.engine().run(refresh, Part::Whole).map_err(LearnError::from)?;
        Ok(id)
    }

    /// Micro-batches of a step.
    pub(crate) fn micro_steps(&self) -> usize {
        self.config.train.batch_size / self.config.train.micro_batch_size()
    }

    /// Forward and backward of the step that is `ahead` of the next: the loss in nats a token. Gradients are
    /// left in the state. `on_progress` is called before the n-th micro-batch; `made` receives the outputs of
    /// each.
    pub(crate) fn step(
        &self,
        weights: &mut Weights,
        id: ProgramId,
        ahead: u64,
        on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
        made: &mut dyn FnMut(&Outputs) -> Result<(), LearnError>,
    ) -> Result<f64, RunError> {
        let (batch_size, micro) = (self.config.train.batch_size, self.config.train.micro_batch_size());
        let first = self.first + ahead * batch_size as u64;
        let counts = self.corpus.loader.counts(first..first + batch_size as u64);
        let (spec, step) = (&self.spec, self.checkpoint.step() + ahead);
        let mut loss = 0.0;
        for n in 0..self.micro_steps() {
            if on_progress(n).is_break() {
                return Err(DataError::Interrupted.into());
            }
            let batch = self.corpus.loader.batch(first + (n * micro) as u64, micro)?;
            let engine = weights.engine();
            let mut make = || -> Result<Outputs, LearnError> {
                let share = BatchShare::whole(batch.tokens.len());
                feed(engine, id, &batch, spec.document_mask, counts, &share)?;
                if spec.dropout > 0.0 {
                    let draws = draws(self.config.train.seed, step, n * spec.batch.tokens());
                    engine.write_input(id, io::RNG, bytemuck::cast_slice(&draws))?;
                }
                engine.run(id, if n == 0 { Part::First } else { Part::Next })?;
                Ok(engine.outputs(id)?)
            };
            let outputs = make()?;
            made(&outputs)?;
            let bytes = outputs.get(io::LOSS).map_err(LearnError::from)?;
            loss = bytemuck::pod_read_unaligned::<f32>(bytes).into();
        }
        Ok(loss)
    }
}

fn advise(error: LearnError) -> LearnError {
    error.advising("look at it where the run is trained, or on the CPU with --device cpu")
}

/// The run that `folder` is or belongs to, and the selected checkpoint.
fn find_run(folder: &Path, which: Which) -> Result<(RunFolder, Which), RunError> {
    if !folder.exists() {
        return Err(source::no_such_folder(folder));
    }
    run_file::refuse_as_run(folder)?;
    let place = folder.display();
    let run = RunFolder::new(folder);
    if run.is_begun() {
        return Ok((run, which));
    }
    match RunFolder::of_checkpoint(folder) {
        Some((run, step)) if which == Which::Latest || which == Which::Step(step) => {
            Ok((run, Which::Step(step)))
        }
        Some((_, step)) => Err(RunError::Refused(format!(
            "{place} is the checkpoint of step {step}; leave out --step and --best, or name the run folder"
        ))),
        None => Err(RunError::Refused(format!(
            "{place} is neither a run folder (it has no config.toml) nor a checkpoint of one (no manifest.json)"
        ))),
    }
}

/// The FP8 formats to examine.
fn formats(spec: &TrainingSpec, asked: Option<Recipe>) -> Result<Numerics, RunError> {
    let own = spec.numerics();
    match asked {
        Some(recipe) if !recipe.is_fp8() => Err(RunError::Refused(format!(
            "--casts {}: this recipe casts nothing to FP8; name one that does, such as fp8-block",
            recipe.name()
        ))),
        // Overrides apply to the run's own recipe; `head` also applies to others.
        Some(recipe) if recipe != own.recipe => {
            Ok(Numerics { recipe, fp8: Fp8Overrides { head: own.fp8.head, ..Default::default() } })
        }
        None if !own.recipe.is_fp8() => Ok(Recipe::Fp8Block.into()),
        _ => Ok(own),
    }
}
