//! A model's weights on an engine: what training, evaluation and generation share.

use crate::programs::{self, ProgramError};
use thiserror::Error;
use xtrain_model::{Architecture, Init, Recipe};
use xtrain_program::{Program, StateKind};
use xtrain_runtime::{Engine, EngineError, Part, ProgramId, StateEntry};
use xtrain_tensor::Philox;

/// What can fail while a model is trained or run.
#[derive(Clone, Debug, Error)]
pub enum LearnError {
    /// A program could not be made.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The engine refused something.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// More memory than there is, and what would need less.
    #[error("{error}; {advice}")]
    Memory {
        /// How much more.
        error: EngineError,
        /// What to ask for instead.
        advice: &'static str,
    },
    /// A model that makes no sense.
    #[error(
        "the model's logits contain {0}: its weights are broken, or it diverged in training; use another checkpoint or folder"
    )]
    Logits(f32),
}

impl LearnError {
    /// The same error; one about memory with what would need less.
    pub(crate) fn advising(self, advice: &'static str) -> Self {
        match self {
            LearnError::Engine(error @ EngineError::Memory { .. }) => LearnError::Memory { error, advice },
            other => other,
        }
    }

    /// Whether the user can mend it: too little memory, and numbers that are not finite, come from what was asked for.
    pub fn is_users(&self) -> bool {
        match self {
            LearnError::Logits(_) | LearnError::Memory { .. } => true,
            LearnError::Engine(EngineError::Cuda(e)) => e.is_about_the_machine(),
            LearnError::Engine(e) => matches!(e, EngineError::Memory { .. } | EngineError::NonFinite { .. }),
            LearnError::Program(_) => false,
        }
    }
}

/// A model on an engine. Its masters are zero until they are initialised or written.
pub struct Weights {
    engine: Box<dyn Engine>,
    model: Architecture,
    recipe: Recipe,
    refresh: ProgramId,
}

/// The Philox stream of initialisation; steps use their own numbers.
const INIT_STREAM: u32 = u32::MAX;

impl Weights {
    /// Gives `model` its place on `engine`, to be computed with under `recipe`.
    pub fn new(mut engine: Box<dyn Engine>, model: Architecture, recipe: Recipe) -> Result<Self, LearnError> {
        let refresh = engine.load(programs::weights(&model, recipe)?)?;
        Ok(Weights { engine, model, recipe, refresh })
    }

    /// The model.
    pub fn model(&self) -> &Architecture {
        &self.model
    }

    /// In which types it computes.
    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// The engine that it is on.
    pub fn engine(&mut self) -> &mut dyn Engine {
        self.engine.as_mut()
    }

    /// Bytes that the engine holds.
    pub fn memory_bytes(&self) -> usize {
        self.engine.memory_bytes()
    }

    /// Loads a program over these weights.
    pub fn load(&mut self, program: Program) -> Result<ProgramId, LearnError> {
        Ok(self.engine.load(program)?)
    }

    /// Sets the masters to a fresh start: normal numbers of standard deviation `std` (residual projections less, see
    /// [`Architecture::parameters`]), ones for norms, zeros for biases. A parameter's numbers depend only on `seed` and its place.
    pub fn initialize(&mut self, seed: u64, std: f64) -> Result<(), LearnError> {
        for (site, p) in self.model.parameters().iter().enumerate() {
            let mut values = vec![0.0f32; p.shape.iter().product()];
            match p.init {
                Init::Zeros => {}
                Init::Ones => values.fill(1.0),
                Init::Normal(scale) => {
                    Philox::new(seed, INIT_STREAM, site as u32).fill_normal(std as f32 * scale, &mut values)
                }
            }
            self.write_master(&p.name, &values)?;
        }
        self.refresh()
    }

    /// The masters that the engine holds: one for each parameter.
    pub fn masters(&mut self) -> Vec<StateEntry> {
        let mut entries = self.engine.state_entries();
        entries.retain(|entry| entry.kind == StateKind::Master);
        entries
    }

    /// A parameter's master copy.
    pub fn read_master(&mut self, name: &str) -> Result<Vec<f32>, LearnError> {
        Ok(bytemuck::pod_collect_to_vec(&self.engine.read_state(StateKind::Master, name)?))
    }

    /// Overwrites a parameter's master copy; call [`Weights::refresh`] after the last one.
    pub fn write_master(&mut self, name: &str, values: &[f32]) -> Result<(), LearnError> {
        Ok(self.engine.write_state(StateKind::Master, name, bytemuck::cast_slice(values))?)
    }

    /// Remakes the copies that GEMMs read from the masters.
    pub fn refresh(&mut self) -> Result<(), LearnError> {
        Ok(self.engine.run(self.refresh, Part::Whole)?)
    }
}
