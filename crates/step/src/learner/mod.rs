//! A model in training: one optimizer step at a time.

mod feed;
mod saturation;

pub use feed::{draws, feed};
pub use saturation::Saturated;

use crate::batch_share::BatchShare;
use crate::error::LearnError;
use crate::layout::Layout;
use crate::programs;
use crate::spans::span;
use crate::training_spec::TrainingSpec;
use crate::update::update_io;
use crate::weights::Weights;
use saturation::StaticCasts;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use xtrain_data::{Batch as TokenBatch, TokenCounts};
use xtrain_model::decoder::{ExpertSums, SumsOf, io};
use xtrain_model::{Capacity, StagePass, first_scales};
use xtrain_program::shard::MICRO_STEP;
use xtrain_program::{Program, RowShard, StateKind, Storage, Value, fold};
use xtrain_rank::Rank;
use xtrain_runtime::{Engine, EngineError, MicroSlot, Outputs, Part, ProgramId, StateEntry, Ticket, Turn};

/// Steps that may be in flight while the next one is prepared, so that a device is never idle.
pub const IN_FLIGHT: usize = 2;

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// The mean cross-entropy of the step's targets, in nats.
    pub loss: f64,
    /// The global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// True if a non-finite value turned the update into a no-op.
    pub skipped: bool,
    /// The sum of the cross-entropies of each source's targets, in nats; empty if the spec does not sum
    /// losses by source.
    pub source_losses: Vec<f64>,
    /// The figures of each block with experts.
    pub experts: Vec<ExpertSums>,
    /// The tensors whose casts saturated, the same on all ranks; `None` if scales are not static.
    pub saturated: Option<Vec<Saturated>>,
    /// True if a rank has asked all to stop.
    pub stopping: bool,
    /// Set if rows of experts did not fit. The step is to be repeated ([`Learner::grow`]), as are those that
    /// were launched after it, whose results say nothing.
    pub overflow: Option<Overflow>,
}

/// An optimizer step to launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Number of the attempted step, from 0. Dropout's random numbers depend on it.
    pub number: u64,
    /// The learning rate.
    pub lr: f64,
    /// Inputs and trained targets of the whole global batch.
    pub counts: TokenCounts,
    /// Micro-batches of each rank.
    pub micro_steps: usize,
}

/// A model in training.
pub struct Learner {
    weights: Weights,
    spec: TrainingSpec,
    train: ProgramId,
    reference: Option<ReferencePrograms>,
    /// The program that steps run at present.
    current: ProgramId,
    /// The casts of `train` with static scales.
    static_casts: StaticCasts,
    /// The scales that must be set in the first step, and their values there.
    first_scales: Vec<(Arc<str>, f32)>,
    /// The rows of experts that fit into a micro-batch, if some routings need more.
    room: Option<usize>,
    seed: u64,
    /// True if this rank asks all to stop.
    asks_to_stop: bool,
    /// The step of a stage of a pipeline.
    stage: StageStep,
    saved_of_model: Vec<StateEntry>,
}

/// The step of a stage of a pipeline.
#[derive(Default)]
struct StageStep {
    /// The passes that have not been launched.
    passes: VecDeque<StagePass>,
    /// The micro-batches of which not all passes have been launched, oldest first, with their numbers and the
    /// sources of their tokens, if losses are summed by source.
    batches: VecDeque<(usize, TokenBatch, Vec<i32>)>,
    /// The sources of the micro-batch that comes next.
    sources: Vec<i32>,
}

/// The step in bf16 over the same state.
#[derive(Clone, Copy)]
struct ReferencePrograms {
    train: ProgramId,
    /// Refreshes the copies of masters that the step reads.
    refresh: ProgramId,
}

/// The programs of a step, loaded.
struct LoadedStep {
    train: ProgramId,
    reference: Option<ReferencePrograms>,
    static_casts: StaticCasts,
    room: Option<usize>,
}

/// The state in a checkpoint of the stages of `spec`, each value as in one process. Which casts have scales
/// depends on the mesh: a part of a matrix may be too narrow for FP8.
fn saved_of_model(spec: &TrainingSpec) -> Result<Vec<StateEntry>, LearnError> {
    let saved = |spec: &TrainingSpec| -> Result<Vec<StateEntry>, LearnError> {
        let program = programs::training(spec)?;
        let entry = |value: &Value| match &value.storage {
            Storage::State { kind, name } if kind.is_saved() => {
                Some(StateEntry { kind: *kind, name: name.to_string(), ty: value.ty })
            }
            _ => None,
        };
        Ok(program.values.iter().filter_map(entry).collect())
    };
    let is_of_casts = |entry: &StateEntry| matches!(entry.kind, StateKind::Scale | StateKind::AmaxHistory);
    let mut all = saved(&spec.in_one_process())?;
    if !all.iter().any(is_of_casts) {
        return Ok(all);
    }
    all.retain(|entry| !is_of_casts(entry));
    for stage in spec.of_stages() {
        let of_casts = saved(&stage)?.into_iter().filter(is_of_casts);
        for entry in of_casts {
            if !all.iter().any(|of| (of.kind, &of.name) == (entry.kind, &entry.name)) {
                all.push(entry);
            }
        }
    }
    Ok(all)
}

impl LoadedStep {
    /// Loads the step of `spec`, which is `program`.
    fn load(weights: &mut Weights, program: Program, spec: &TrainingSpec) -> Result<Self, LearnError> {
        let static_casts = StaticCasts::find(&program);
        let train = weights.load(program)?;
        let reference = match programs::reference(spec)? {
            None => None,
            Some(program) => {
                let refresh = weights.load(programs::refresh(&program)?)?;
                Some(ReferencePrograms { train: weights.load(program)?, refresh })
            }
        };
        Ok(LoadedStep { train, reference, static_casts, room: spec.room() })
    }
}

/// A step whose rows of experts did not fit. It has changed nothing, nor have the steps that were launched
/// after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The block that needs most rows.
    pub block: usize,
    /// The rows that it needs, on the rank with the most.
    pub needed: usize,
    /// The rows that it needs on this rank.
    pub own: usize,
    /// The rows that there are.
    pub room: usize,
}

impl Learner {
    /// Loads the training program of `spec` into `engine`. All state is zero until the weights are
    /// initialised or read. `seed` is the seed of dropout.
    pub fn new(engine: Box<dyn Engine>, spec: TrainingSpec, seed: u64) -> Result<Self, LearnError> {
        let (program, layout) = (programs::training(&spec)?, Layout::from_spec(&spec)?);
        let (tokens, wire) = (spec.tree_tokens(), spec.fp8.wire);
        let first_scales = first_scales(&program, &spec.model, &spec.parallel, tokens, wire);
        let refresh = programs::refresh(&program)?;
        let mut weights =
            Weights::with_refresh(refresh, engine, spec.model.clone(), spec.numerics(), layout)?;
        let LoadedStep { train, reference, static_casts, room } =
            LoadedStep::load(&mut weights, program, &spec)?;
        for (name, scale) in &first_scales {
            weights.engine().write_state(StateKind::Scale, name, bytemuck::bytes_of(scale))?;
        }
        let (current, asks_to_stop) = (train, false);
        let saved_of_model = if spec.stage().is_whole() { Vec::new() } else { saved_of_model(&spec)? };
        Ok(Learner {
            weights,
            spec,
            train,
            reference,
            current,
            static_casts,
            first_scales,
            room,
            seed,
            asks_to_stop,
            stage: StageStep::default(),
            saved_of_model,
        })
    }

    /// Loads a program with room for the rows of experts of a step that did not fit, and a quarter more. That
    /// step, which has changed nothing, can then be repeated. All ranks call it, with the same overflow, when
    /// no step is in flight. Returns the new capacity; None if every routing fits.
    ///
    /// # Errors
    /// Too little memory for the program. The state is that before the step.
    pub fn grow(&mut self, overflow: Overflow) -> Result<Option<Capacity>, LearnError> {
        let mut spec = self.spec.clone();
        spec.grow(overflow.needed);
        let is_reference = self.current != self.train;
        let LoadedStep { train, reference, static_casts, room } =
            LoadedStep::load(&mut self.weights, programs::training(&spec)?, &spec)?;
        (self.train, self.reference, self.static_casts, self.room) = (train, reference, static_casts, room);
        self.spec = spec;
        let flag = bytemuck::bytes_of(&0u32);
        self.weights.engine().write_state(StateKind::Halted, update_io::ROWS_NEEDED, flag)?;
        // An update that is not applied casts the weights with the scales that it would have set.
        self.end_reference()?;
        if is_reference {
            self.begin_reference()?;
        }
        Ok(self.spec.capacity)
    }

    /// Asks all ranks to stop: results of the steps that are launched from now on say so on every rank. A
    /// process that trains alone needs to ask no one, and its results do not say it.
    pub fn ask_to_stop(&mut self) {
        self.asks_to_stop = true;
    }

    /// Runs the following steps in bf16, from the current masters. Does nothing if the spec has no reference.
    pub fn begin_reference(&mut self) -> Result<(), LearnError> {
        let Some(ReferencePrograms { train, refresh }) = self.reference else { return Ok(()) };
        self.weights.engine().run(refresh, Part::Whole)?;
        self.current = train;
        Ok(())
    }

    /// Runs the following steps in the recipe again, from the current masters.
    pub fn end_reference(&mut self) -> Result<(), LearnError> {
        self.current = self.train;
        self.weights.refresh()
    }

    /// The specification of the training step.
    pub fn spec(&self) -> &TrainingSpec {
        &self.spec
    }

    /// The training program.
    pub fn program(&self) -> ProgramId {
        self.train
    }

    /// The weights, for evaluation and generation, reading and writing.
    pub fn weights(&mut self) -> &mut Weights {
        &mut self.weights
    }

    /// Bytes that the engine holds.
    pub fn memory_bytes(&self) -> usize {
        self.weights.memory_bytes()
    }

    /// The state in a checkpoint: masters, moments, counters. Gradients and compute copies are derived from
    /// it. Of a value that ranks share, an entry has the rows of this rank, without padding; [`Layout::held`]
    /// says which they are.
    pub fn saved_state(&mut self) -> Vec<StateEntry> {
        let entries = self.weights.engine().state_entries().into_iter().filter(|entry| entry.kind.is_saved());
        let layout = self.weights.layout();
        entries
            .map(|entry| StateEntry { ty: layout.held_type(entry.kind, &entry.name, entry.ty), ..entry })
            .collect()
    }

    /// The state in a checkpoint of the whole model, with all rows, of a stage of a pipeline; empty if this
    /// rank has all blocks.
    pub fn saved_state_of_model(&self) -> &[StateEntry] {
        &self.saved_of_model
    }

    /// The layout of the model over ranks.
    pub fn layout(&self) -> &Layout {
        self.weights.layout()
    }

    /// The bytes of a state value, or of the rows of this rank.
    pub fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, LearnError> {
        let mut bytes = self.weights.engine().read_state(kind, name)?;
        bytes.truncate(self.without_padding(kind, name, bytes.len()));
        Ok(bytes)
    }

    /// A part of the bytes of a state value, without padding.
    pub fn read_state_part(&mut self, entry: &StateEntry, part: Range<usize>) -> Result<Vec<u8>, LearnError> {
        let held = self.without_padding(entry.kind, &entry.name, entry.ty.bytes());
        let part = part.start.min(held)..part.end.min(held);
        Ok(self.weights.engine().read_state_part(entry.kind, &entry.name, part)?)
    }

    /// Bytes of a state value without the padding after this rank's rows, given those with it.
    fn without_padding(&self, kind: StateKind, name: &str, bytes: usize) -> usize {
        let layout = self.layout();
        let rows = |cut: RowShard| cut.rows_of(layout.parallel().rank.index).len();
        layout.cut_of(kind, name).map_or(bytes, |cut| bytes / cut.piece_rows * rows(cut))
    }

    /// Copies state values, or their first rows, each into the slice of the same index.
    pub fn copy_state(
        &mut self,
        entries: &[StateEntry],
        targets: &mut [&mut [u8]],
    ) -> Result<(), LearnError> {
        Ok(self.weights.engine().copy_state(entries, targets)?)
    }

    /// Overwrites a state value, or the rows of this rank. Refresh the weights after writing masters. A scale
    /// that is not set stays as it is if it must be set.
    pub fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), LearnError> {
        let is_unset = kind == StateKind::Scale && bytes.iter().all(|byte| *byte == 0);
        if is_unset && self.first_scales.iter().any(|(scale, _)| **scale == *name) {
            return Ok(());
        }
        self.weights.write_rows(kind, name, bytes)
    }

    /// Runs a whole step of these micro-batches and waits for its result.
    pub fn step(&mut self, number: u64, lr: f64, batches: &[TokenBatch]) -> Result<StepResult, LearnError> {
        let counts = batches.iter().map(TokenBatch::counts).fold(TokenCounts::default(), TokenCounts::plus);
        let step = Step { number, lr, counts, micro_steps: batches.len() };
        for (n, batch) in batches.iter().enumerate() {
            self.micro_step(&step, n, batch)?;
        }
        let ticket = self.fetch()?;
        self.collect(ticket)
    }

    /// Sets the source of each sequence of the micro-batch that is launched next. Does nothing if the spec
    /// does not sum losses by source.
    pub fn name_sources(&mut self, sources: &[usize]) -> Result<(), LearnError> {
        if self.spec.loss.sources == 0 || !self.spec.stage().is_last() {
            return Ok(());
        }
        let of_tokens = |&source: &usize| std::iter::repeat_n(source as i32, self.spec.batch.seq_len);
        let tokens: Vec<i32> = sources.iter().flat_map(of_tokens).collect();
        let (train, share) = (self.current, self.share());
        let own = share.of(&tokens, 0);
        if !self.spec.stage().is_whole() {
            self.stage.sources = own.into_owned();
            return Ok(());
        }
        Ok(self.weights.engine().write_input(train, io::SOURCES, bytemuck::cast_slice(&own))?)
    }

    /// The share of this rank in a micro-batch.
    fn share(&self) -> BatchShare {
        self.layout().share(self.spec.batch.tokens())
    }

    /// Launches the `n`-th of this rank's micro-batches of `step`, and after the last one the update. For n
    /// ranks with different data, it is micro-batch `n * ranks + rank` of the step.
    pub fn micro_step(&mut self, step: &Step, n: usize, batch: &TokenBatch) -> Result<(), LearnError> {
        let _micro_step = span("micro-step");
        if !self.spec.stage().is_whole() {
            return self.micro_step_of_stage(step, n, batch);
        }
        self.write_inputs(step, n, batch)?;
        let (engine, train, last) = (self.weights.engine(), self.current, n + 1 == step.micro_steps);
        let launch = span("launch");
        match (n, last) {
            (0, true) => return Ok(engine.run(train, Part::Whole)?),
            (0, false) => engine.run(train, Part::First)?,
            (_, false) => engine.run(train, Part::Next)?,
            (_, true) => engine.run(train, Part::Last)?,
        }
        drop(launch);
        if last {
            let _update = span("update");
            engine.run(train, Part::Update)?;
        }
        Ok(())
    }

    /// Launches the passes of a stage of a pipeline, in their order, up to the next one that needs a
    /// micro-batch after the `n`-th.
    fn micro_step_of_stage(&mut self, step: &Step, n: usize, batch: &TokenBatch) -> Result<(), LearnError> {
        let stage = self.spec.stage();
        if n == 0 {
            self.stage =
                StageStep { sources: std::mem::take(&mut self.stage.sources), ..StageStep::default() };
            self.stage.passes = stage.passes(step.micro_steps).into();
        }
        let sources = std::mem::take(&mut self.stage.sources);
        self.stage.batches.push_back((n, batch.clone(), sources));
        let slots = stage.in_flight();
        let mut written = None;
        while let Some(&StagePass { is_forward, chunk, micro_step }) = self.stage.passes.front()
            && micro_step <= n
        {
            self.stage.passes.pop_front();
            if written.replace(micro_step) != Some(micro_step) {
                self.write_inputs_of_stage(step, micro_step)?;
            }
            let slot = MicroSlot { chunk, number: micro_step % slots[chunk] };
            let turn = Turn::of(micro_step, step.micro_steps);
            let part = if is_forward { Part::Forward(turn, slot) } else { Part::Backward(turn, slot) };
            self.weights.engine().run(self.current, part)?;
            if !is_forward && chunk == 0 {
                // Its last pass. Backwards come in the order of micro-batches.
                self.stage.batches.pop_front();
            }
        }
        if n + 1 == step.micro_steps {
            let _update = span("update");
            self.weights.engine().run(self.current, Part::Update)?;
        }
        Ok(())
    }

    /// Writes the inputs of a micro-batch that this stage of a pipeline keeps.
    fn write_inputs_of_stage(&mut self, step: &Step, n: usize) -> Result<(), LearnError> {
        let kept = self.stage.batches.iter().position(|(of, ..)| *of == n);
        let Some((_, batch, sources)) = kept.map(|at| std::mem::take(&mut self.stage.batches[at])) else {
            unreachable!("passes need micro-batches that were given and that no later pass has freed")
        };
        self.write_inputs(step, n, &batch)?;
        if !sources.is_empty() {
            let (train, bytes) = (self.current, bytemuck::cast_slice(&sources));
            self.weights.engine().write_input(train, io::SOURCES, bytes)?;
        }
        self.stage.batches[kept.unwrap_or(0)] = (n, batch, sources);
        Ok(())
    }

    /// Writes the inputs of the `n`-th of this rank's micro-batches of `step`.
    fn write_inputs(&mut self, step: &Step, n: usize, batch: &TokenBatch) -> Result<(), LearnError> {
        let _inputs = span("write inputs");
        let share = self.share();
        let (engine, train) = (self.weights.engine(), self.current);
        feed(engine, train, batch, self.spec.document_mask, step.counts, &share)?;
        if self.spec.dropout > 0.0 {
            let Rank { index, world_size } = self.spec.parallel.data_rank();
            let n = n * world_size + index;
            let first = n * self.spec.batch.tokens() + share.tokens.start;
            let folded = self.spec.ranks().folded;
            for part in 0..folded {
                let draws = draws(self.seed, step.number, first + part * share.tokens.len() / folded);
                engine.write_input(train, &fold::input_of(io::RNG, part), bytemuck::cast_slice(&draws))?;
            }
        }
        if self.spec.parallel.reduce.is_any_world() {
            let micro_steps = self.spec.parallel.tree_micro_steps;
            assert_eq!(step.micro_steps, micro_steps, "the program adds the micro-steps that its spec says");
            engine.write_input(train, MICRO_STEP, bytemuck::bytes_of(&(n as u32)))?;
        }
        if n + 1 == step.micro_steps {
            engine.write_input(train, update_io::LR, bytemuck::bytes_of(&(step.lr as f32)))?;
            if self.spec.has_totals() {
                let asks = u32::from(self.asks_to_stop);
                engine.write_input(train, update_io::STOP, bytemuck::bytes_of(&asks))?;
            }
        }
        Ok(())
    }

    /// Starts the transfer of the latest launched step's result, without waiting for it.
    pub fn fetch(&mut self) -> Result<Ticket, LearnError> {
        let _fetch = span("fetch");
        Ok(self.weights.engine().fetch(self.current)?)
    }

    /// True if the result of a step has arrived.
    pub fn is_ready(&mut self, ticket: &Ticket) -> Result<bool, LearnError> {
        Ok(self.weights.engine().is_ready(ticket)?)
    }

    /// Waits for the result of a step.
    pub fn collect(&mut self, ticket: Ticket) -> Result<StepResult, LearnError> {
        let _collect = span("collect");
        let outputs = self.weights.engine().collect(ticket)?;
        let number = |name: &str| -> Result<f64, EngineError> {
            Ok(bytemuck::pod_read_unaligned::<f32>(outputs.get(name)?).into())
        };
        let (loss, sums) = match self.spec.has_totals() {
            true => (update_io::TOTAL_LOSS, update_io::TOTAL_SUMS),
            false => (io::LOSS, io::SUMS),
        };
        let (loss, grad_norm) = (number(loss)?, number(update_io::GRAD_NORM)?);
        let flag =
            |name: &str| -> Result<bool, EngineError> { Ok(outputs.get(name)?.iter().any(|&b| b != 0)) };
        let skipped = flag(update_io::SKIPPED)?;
        let stopping = self.spec.has_totals() && flag(update_io::STOPPING)?;
        let sums_of = SumsOf::loss(&self.spec.model, &self.spec.loss);
        let numbers: Vec<f32> = match sums_of.pairs() {
            0 => Vec::new(),
            _ => bytemuck::pod_collect_to_vec(outputs.get(sums)?),
        };
        let (sources, experts) = sums_of.split(&numbers);
        // The second of each pair is the cross-entropy.
        let source_losses = sources.into_iter().map(|[_, sum]| f64::from(sum)).collect();
        let amaxes: Option<Vec<f32>> = match self.static_casts.is_empty() || self.current != self.train {
            true => None,
            false => Some(bytemuck::pod_collect_to_vec(outputs.get(update_io::AMAXES)?)),
        };
        let saturated = amaxes.map(|amaxes| self.static_casts.saturated(&amaxes));
        let overflow = self.room.map(|room| self.overflow(room, &outputs)).transpose()?.flatten();
        Ok(StepResult { loss, grad_norm, skipped, stopping, source_losses, experts, saturated, overflow })
    }

    /// The overflow of a step, if the rows of a block did not fit.
    fn overflow(&self, room: usize, outputs: &Outputs) -> Result<Option<Overflow>, EngineError> {
        let needed: Vec<f32> = bytemuck::pod_collect_to_vec(outputs.get(update_io::ROWS_NEEDED)?);
        let blocks = self.spec.model.layers.iter().enumerate();
        let with_experts =
            blocks.filter(|(_, of)| of.feed_forward.experts().is_some()).map(|(block, _)| block);
        let Some((block, &needed)) = with_experts.zip(&needed).max_by(|a, b| a.1.total_cmp(b.1)) else {
            return Ok(None);
        };
        let own = match self.spec.stage().has_block(block) {
            true => bytemuck::pod_read_unaligned::<f32>(outputs.get(&io::rows_needed(block))?) as usize,
            false => 0,
        };
        let needed = needed as usize;
        Ok((needed > room).then_some(Overflow { block, needed, own, room }))
    }
}
