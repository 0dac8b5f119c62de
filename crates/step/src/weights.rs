//! A model's weights on an engine, shared by training, evaluation and generation.

use crate::error::LearnError;
use crate::layout::{HeldRows, Layout};
use crate::programs;
use std::time::Instant;
use xtrain_model::decoder::io;
use xtrain_model::{Architecture, Init, Numerics, ParameterSpec};
use xtrain_program::{Program, StateKind, TENSOR_PLACE, fold};
use xtrain_runtime::{Engine, EngineError, Part, ProgramId, StateEntry};
use xtrain_tensor::{DType, HostTensor, Shape, TensorType, View, ViewMut};

/// A model on an engine. Its masters are zero until they are initialised or written.
pub struct Weights {
    engine: Box<dyn Engine>,
    model: Architecture,
    numerics: Numerics,
    layout: Layout,
    refresh: ProgramId,
}

impl Weights {
    /// Loads `model` onto `engine`, with the copies of masters that these formats need.
    pub fn new(
        engine: Box<dyn Engine>,
        model: Architecture,
        numerics: impl Into<Numerics>,
    ) -> Result<Self, LearnError> {
        let numerics = numerics.into();
        let refresh = programs::weights(&model, &numerics)?;
        Weights::with_refresh(refresh, engine, model, numerics, Layout::alone())
    }

    /// As [`Weights::new`], with a refresh program that derives more from the masters than a forward reads. A
    /// rank has the rows of its layout.
    pub fn with_refresh(
        refresh: Program,
        mut engine: Box<dyn Engine>,
        model: Architecture,
        numerics: Numerics,
        layout: Layout,
    ) -> Result<Self, LearnError> {
        let refresh = load(engine.as_mut(), refresh, &layout)?;
        Ok(Weights { engine, model, numerics, layout, refresh })
    }

    /// The model.
    pub fn model(&self) -> &Architecture {
        &self.model
    }

    /// The formats of the computation.
    pub fn numerics(&self) -> &Numerics {
        &self.numerics
    }

    /// The layout of the model over ranks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut dyn Engine {
        self.engine.as_mut()
    }

    /// Bytes that the engine holds.
    pub fn memory_bytes(&self) -> usize {
        self.engine.memory_bytes()
    }

    /// Loads a program over these weights, and tells it which experts and which parts of matrices this rank
    /// has.
    pub fn load(&mut self, program: Program) -> Result<ProgramId, LearnError> {
        load(self.engine.as_mut(), program, &self.layout)
    }

    /// Adds values of `kind` that no program loaded so far has, such as the scales of casts of a program that
    /// is loaded later. They are zeros.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn hold<'a>(
        &mut self,
        kind: StateKind,
        values: impl Iterator<Item = (&'a str, TensorType)>,
    ) -> Result<(), LearnError> {
        self.load(programs::held(kind, values)).map(drop)
    }

    /// Initialises the masters: normal numbers of standard deviation `std` (less for residual projections,
    /// see [`Architecture::parameters`]), ones for norms, zeros for biases. A parameter's numbers depend only
    /// on `seed` and its index.
    pub fn initialize(&mut self, seed: u64, std: f64) -> Result<(), LearnError> {
        let begun = Instant::now();
        // Drawn on the device, because a copy from the host would take longer than the rest of the start.
        let normal = self.engine.load(programs::initial(&self.model, &self.layout, seed, std)?)?;
        self.engine.run(normal, Part::Whole)?;
        self.fill(seed, std, |p| p.is_frozen || !matches!(p.init, Init::Normal(_)))?;
        self.refresh()?;
        tracing::debug!("weights initialised in {:.3} s", begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// Initialises the adapters: uniform numbers for A, zeros for B.
    pub fn initialize_adapters(&mut self, seed: u64) -> Result<(), LearnError> {
        self.fill(seed, 0.0, ParameterSpec::is_adapter)?;
        self.refresh()
    }

    /// Draws the parameters that `is_drawn` on the host.
    fn fill(
        &mut self,
        seed: u64,
        std: f64,
        is_drawn: impl Fn(&ParameterSpec) -> bool,
    ) -> Result<(), LearnError> {
        for (stream, p) in programs::streams(&self.model) {
            if !self.layout.has(&p.name) || !is_drawn(&p) {
                continue;
            }
            let mut values = vec![0.0; p.shape.iter().product()];
            let numbers = programs::init_numbers(seed, stream);
            match p.init {
                Init::Zeros => {}
                Init::Ones => values.fill(1.0),
                Init::Normal(scale) => numbers.fill_normal(std as f32 * scale, &mut values),
                Init::Uniform(bound) => {
                    let draw = |n: usize| bound * (2.0 * numbers.uniform(n as u64) - 1.0);
                    values.iter_mut().enumerate().for_each(|(n, value)| *value = draw(n));
                }
            }
            self.write_parameter(&p.name, &values)?;
        }
        Ok(())
    }

    /// The masters that the engine holds: one for each trained parameter, or this rank's rows with their
    /// padding.
    pub fn masters(&mut self) -> Vec<StateEntry> {
        let mut entries = self.engine.state_entries();
        entries.retain(|entry| entry.kind == StateKind::Master);
        entries
    }

    /// The parameters that the engine holds: the masters, and those that are not trained.
    pub fn parameters(&mut self) -> Vec<StateEntry> {
        let mut entries = self.engine.state_entries();
        entries.retain(|entry| is_parameter(entry.kind));
        entries
    }

    /// A parameter, or this rank's rows of it: its master, or what is held of one that is not trained.
    pub fn read_parameter(&mut self, name: &str) -> Result<Vec<f32>, LearnError> {
        let entry = self.entry(name)?;
        let ty = self.layout.held_type(entry.kind, name, entry.ty);
        let mut values = vec![0.0; ty.numel()];
        let held = StateEntry { ty, ..entry };
        if ty.dtype == DType::F32 {
            // Into the result at once: these are the largest tensors of a model.
            self.engine.copy_state(&[held], &mut [bytemuck::cast_slice_mut(&mut values)])?;
        } else {
            let mut tensor = HostTensor::zeros(ty);
            self.engine.copy_state(&[held], &mut [tensor.bytes_mut()])?;
            View::new(ty, tensor.bytes()).widen_into(&mut values);
        }
        Ok(values)
    }

    /// Overwrites a parameter, or this rank's rows of it, from all rows; call [`Weights::refresh`] after the
    /// last one.
    pub fn write_parameter(&mut self, name: &str, values: &[f32]) -> Result<(), LearnError> {
        let kind = self.entry(name)?.kind;
        let rows = self.layout.held(kind, name);
        let values = rows.map_or(values, |HeldRows { of, rows }| {
            let row = values.len() / of;
            &values[rows.start * row..rows.end * row]
        });
        self.write_parameter_rows(name, values)
    }

    /// Overwrites a parameter, or this rank's rows of it, from those rows.
    pub fn write_parameter_rows(&mut self, name: &str, values: &[f32]) -> Result<(), LearnError> {
        let StateEntry { kind, ty, .. } = self.entry(name)?;
        if ty.dtype == DType::F32 {
            return self.write_rows(kind, name, bytemuck::cast_slice(values));
        }
        let ty = TensorType { shape: Shape::new(&[values.len()]), ..ty };
        let mut tensor = HostTensor::zeros(ty);
        ViewMut::new(ty, tensor.bytes_mut(), false).write(values);
        self.write_rows(kind, name, tensor.bytes())
    }

    fn entry(&mut self, name: &str) -> Result<StateEntry, EngineError> {
        let is_it = |entry: &StateEntry| is_parameter(entry.kind) && entry.name == name;
        let unknown = || EngineError::Unknown { what: "parameter", name: name.into() };
        self.engine.state_entries().into_iter().find(is_it).ok_or_else(unknown)
    }

    /// Overwrites a state value, or this rank's rows of it, from those rows.
    pub fn write_rows(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), LearnError> {
        let padded = self.layout.cut_of(kind, name).map(|cut| {
            let rows = cut.rows_of(self.layout.parallel().rank.index).len();
            (bytes.len() / rows.max(1) * cut.piece_rows, rows)
        });
        match padded {
            // Rows are padded with zeros. Without a row there is nothing to overwrite.
            Some((_, 0)) => Ok(()),
            Some((padded, _)) if padded > bytes.len() => {
                let mut piece = bytes.to_vec();
                piece.resize(padded, 0);
                Ok(self.engine.write_state(kind, name, &piece)?)
            }
            _ => Ok(self.engine.write_state(kind, name, bytes)?),
        }
    }

    /// Refreshes the copies of masters that GEMMs read, and waits for it: other ranks may need this one to
    /// gather them, while it waits for something else.
    pub fn refresh(&mut self) -> Result<(), LearnError> {
        self.engine.run(self.refresh, Part::Whole)?;
        Ok(self.engine.outputs(self.refresh).map(drop)?)
    }
}

/// True for the kinds of state that are parameters.
fn is_parameter(kind: StateKind) -> bool {
    matches!(kind, StateKind::Master | StateKind::Frozen)
}

/// Loads a program and writes the places of this rank that it reads.
fn load(engine: &mut dyn Engine, program: Program, layout: &Layout) -> Result<ProgramId, LearnError> {
    let parallel = layout.parallel();
    let (rank, folded) = (parallel.rank.index, layout.ranks().folded);
    let mut places = vec![(io::PLACE.to_owned(), parallel.expert_groups().place(rank))];
    let first = parallel.tensor_groups().place(rank) * folded;
    places.extend((0..folded).map(|n| (fold::input_of(TENSOR_PLACE, n), first + n)));
    places.retain(|(name, _)| program.input(name).is_some());
    let id = engine.load(program)?;
    for (name, place) in places {
        engine.write_input(id, &name, bytemuck::bytes_of(&(place as u32)))?;
    }
    Ok(id)
}
