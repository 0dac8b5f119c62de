//! A model in training: one optimizer step at a time.

use crate::evaluate::feed;
use crate::programs::{self, TrainingSpec, update_io};
use crate::weights::{LearnError, Weights};
use xtrain_data::Batch as TokenBatch;
use xtrain_model::decoder::io;
use xtrain_program::{Phase, StateKind};
use xtrain_runtime::{Engine, EngineError, ProgramId, StateEntry};

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// The mean cross-entropy of the step's targets, in nats.
    pub loss: f64,
    /// The global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Whether a non-finite value made the update do nothing.
    pub skipped: bool,
}

/// A model in training.
pub struct Learner {
    weights: Weights,
    spec: TrainingSpec,
    train: ProgramId,
    seed: u64,
}

impl Learner {
    /// Loads the training program of `spec` into `engine`. All state is zero until the weights are initialised or read; `seed`
    /// is that of dropout.
    pub fn new(engine: Box<dyn Engine>, spec: TrainingSpec, seed: u64) -> Result<Self, LearnError> {
        let mut weights = Weights::new(engine, spec.model.clone(), spec.recipe)?;
        let train = weights.load(programs::training(&spec)?)?;
        Ok(Learner { weights, spec, train, seed })
    }

    /// What is being trained, and how.
    pub fn spec(&self) -> &TrainingSpec {
        &self.spec
    }

    /// The weights, to evaluate, to generate, to read and to write.
    pub fn weights(&mut self) -> &mut Weights {
        &mut self.weights
    }

    /// Bytes that the engine holds.
    pub fn memory_bytes(&self) -> usize {
        self.weights.memory_bytes()
    }

    /// The state that a checkpoint holds: masters, moments, counters. Gradients and compute copies are made from it.
    pub fn saved_state(&mut self) -> Vec<StateEntry> {
        let lasting = |e: &StateEntry| {
            matches!(e.kind, StateKind::Master | StateKind::Moment1 | StateKind::Moment2 | StateKind::Counter)
        };
        self.weights.engine().state_entries().into_iter().filter(lasting).collect()
    }

    /// The bytes of a state value.
    pub fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, LearnError> {
        Ok(self.weights.engine().read_state(kind, name)?)
    }

    /// Overwrites a state value; after masters, refresh the weights.
    pub fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), LearnError> {
        Ok(self.weights.engine().write_state(kind, name, bytes)?)
    }

    /// Adds the gradients of one micro-batch. `valid_targets` counts those of the whole global batch, `first_token` is the place of
    /// this micro-batch's first token in it; `step` is the attempted step.
    pub fn micro_step(
        &mut self,
        batch: &TokenBatch,
        step: u64,
        first_token: usize,
        valid_targets: usize,
    ) -> Result<(), LearnError> {
        let engine = self.weights.engine();
        feed(engine, self.train, batch, self.spec.document_mask, valid_targets)?;
        if self.spec.dropout > 0.0 {
            let rng = [self.seed as u32, (self.seed >> 32) as u32, step as u32, first_token as u32];
            engine.write_input(self.train, io::RNG, bytemuck::cast_slice(&rng))?;
        }
        Ok(engine.run(self.train, Phase::Micro, first_token == 0)?)
    }

    /// Clips and applies the gradients of the micro-steps since the last update.
    pub fn update(&mut self, lr: f64) -> Result<StepResult, LearnError> {
        let (engine, train) = (self.weights.engine(), self.train);
        engine.write_input(train, update_io::LR, bytemuck::bytes_of(&(lr as f32)))?;
        engine.run(train, Phase::Update, true)?;
        let mut read = |name: &str| -> Result<f64, EngineError> {
            Ok(bytemuck::pod_read_unaligned::<f32>(&engine.read_output(train, name)?).into())
        };
        let (loss, grad_norm) = (read(io::LOSS)?, read(update_io::GRAD_NORM)?);
        let skipped = engine.read_output(train, update_io::SKIPPED)?.iter().any(|&b| b != 0);
        Ok(StepResult { loss, grad_norm, skipped })
    }
}
