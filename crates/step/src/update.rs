//! The update at the end of a training step: next scales, gradient norm, clipping, the optimizer.

use crate::layout::Layout;
use crate::training_spec::TrainingSpec;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use xtrain_model::decoder::{SumsOf, io, zeros};
use xtrain_model::optimizer::{Controls, Updated};
use xtrain_model::{Architecture, DelayedScales, Experts, ParameterGroup, ParameterSpec};
use xtrain_ops::add::Add;
use xtrain_ops::balance_bias::BalanceBias;
use xtrain_ops::clip::Clip;
use xtrain_ops::collective::AllGather;
use xtrain_ops::delayed_scaling::{DelayedScaling, DelayedTensor};
use xtrain_ops::grad_norm::{GradNorm, SquaredNorm};
use xtrain_ops::rank_amaxes::{MaxAmaxes, RankAmaxes};
use xtrain_ops::room::CheckRoom;
use xtrain_ops::step_losses::RecordLosses;
use xtrain_ops::step_totals::{PieceUnits, RankWords, Squares, StepTotals};
use xtrain_ops::unit_norm::{UnitSquaredNorm, UnitSquares};
use xtrain_program::quantize;
use xtrain_program::shard::MICRO_STEP;
use xtrain_program::{
    Delayed, Groups, Parallel, Parameter, ParameterCut, Program, Role, RowShard, Stage, StateKind,
    TraceError, Tracer, ValueId, WriteMode,
};
use xtrain_tensor::{DType, Shape, TensorType};

/// Names of the inputs and outputs that the update adds to [`xtrain_model::decoder::io`].
pub mod update_io {
    /// `f32[]`: the learning rate.
    pub const LR: &str = "lr";
    /// `f32[]`: the global L2 norm of the gradients before clipping.
    pub const GRAD_NORM: &str = "grad_norm";
    /// `u32[]`: 1 if the step was not finite and the update therefore did nothing.
    pub const SKIPPED: &str = "skipped";
    /// The counter of applied updates.
    pub const APPLIED: &str = "applied";
    /// `f32[]`, with several ranks or sums for any world: the sum over ranks of
    /// [`xtrain_model::decoder::io::LOSS`].
    pub const TOTAL_LOSS: &str = "total_loss";
    /// `f32[n, 2]`, likewise: the sum over ranks of [`xtrain_model::decoder::io::SUMS`], if there are any.
    pub const TOTAL_SUMS: &str = "total_sums";
    /// `u32[]`, an input, likewise: not 0 if this rank asks to end the run.
    pub const STOP: &str = "stop";
    /// `u32[]`, likewise: 1 if any rank asks to end the run.
    pub const STOPPING: &str = "stopping";
    /// `f32[n]`, if the room for rows of experts may be too small: the rows that the blocks with experts
    /// need, of the rank and the micro-batch with the most.
    pub const ROWS_NEEDED: &str = "rows_needed";
    /// `f32[n]`, with static scales: the amax over all ranks of each of [`xtrain_program::Program::delayed`].
    pub const AMAXES: &str = "amaxes";
}

/// Appends the op that computes the next step's scales from this step's amaxes; returns the largest amax.
/// Parameters that are cast after the update use the new scales.
fn next_scales(
    t: &mut Tracer,
    delayed: &[Delayed],
    parameters: &[Parameter],
    how: &DelayedScales,
    halted: Option<ValueId>,
) -> Result<ValueId, TraceError> {
    let rows = || parameters.iter().flat_map(|parameter| &parameter.quantized_rows);
    let in_pieces: HashSet<ValueId> = rows().filter_map(|rows| Some(rows.delayed.as_ref()?.scale)).collect();
    let (mut inputs, mut targets, mut tensors) = (Vec::new(), vec![None], Vec::new());
    for tensor in delayed {
        let ty = TensorType::new(DType::F32, [how.history]);
        let history = t.state(StateKind::AmaxHistory, &tensor.name, ty);
        inputs.extend([tensor.amax, history, tensor.scale]);
        targets.extend([Some(history), Some(tensor.scale)]);
        let in_pieces = in_pieces.contains(&tensor.scale);
        tensors.push(DelayedTensor { format: tensor.format, pow2_scales: tensor.pow2_scales, in_pieces });
    }
    inputs.extend(halted);
    let op = DelayedScaling::new(tensors, how.margin, how.latest);
    Ok(t.site("scales").emit_into(op, &inputs, &targets)?[0])
}

/// Appends the ops that replace the amaxes of this step with their maxima over ranks, by one gather.
fn amaxes_of_all(t: &mut Tracer, delayed: &[Delayed], parallel: &Parallel) -> Result<(), TraceError> {
    let amaxes: Vec<ValueId> = delayed.iter().map(|tensor| tensor.amax).collect();
    let rows = rows_of_amaxes(t, &amaxes, parallel)?;
    let targets: Vec<_> = amaxes.into_iter().map(Some).collect();
    t.emit_into(MaxAmaxes { lengths: vec![1; delayed.len()] }, &[rows], &targets)?;
    Ok(())
}

/// Appends the ops that output the amaxes of this step with static scales, over all ranks, for the host to
/// compare with the scales; returns the largest.
fn amaxes_to_host(t: &mut Tracer, delayed: &[Delayed], parallel: &Parallel) -> Result<ValueId, TraceError> {
    let amaxes: Vec<ValueId> = delayed.iter().map(|tensor| tensor.amax).collect();
    let rows = rows_of_amaxes(t, &amaxes, parallel)?;
    let all = t.emit(MaxAmaxes { lengths: vec![amaxes.len()] }, &[rows])?[0];
    t.output(update_io::AMAXES, all);
    Ok(t.emit(MaxAmaxes { lengths: vec![1] }, &[all])?[0])
}

/// The row of `amaxes` of each rank of the stage, which cast the same tensors.
fn rows_of_amaxes(t: &mut Tracer, amaxes: &[ValueId], parallel: &Parallel) -> Result<ValueId, TraceError> {
    let row = t.site("scales").emit(RankAmaxes, amaxes)?[0];
    let groups = parallel.stage_groups();
    if groups.size == 1 {
        return Ok(row);
    }
    Ok(t.emit(AllGather { groups, first: 0, rows: groups.size * amaxes.len() }, &[row])?[0])
}

/// Gathers one row of each rank of the run, in their order.
fn gather_of_rows(parallel: &Parallel) -> AllGather {
    AllGather { groups: parallel.world(), first: 0, rows: parallel.rank.world_size }
}

/// The loss, the objective and the sums of a micro-batch, with zeros for what another stage computes; with
/// sums for any world, those of each micro-batch in one value. Those of a stage's chunks are added.
fn losses(mut program: Program, parallel: &Parallel) -> Result<(Program, Vec<ValueId>), TraceError> {
    let last = program.slots.len().saturating_sub(1);
    let mut of_chunks = Vec::new();
    for chunk in 0..=last {
        let is_last = chunk == last;
        let sums = program.output(&io::sums((!is_last).then_some(chunk)));
        if !is_last && sums.is_none() {
            continue;
        }
        let numbers = [io::LOSS, io::OBJECTIVE].map(|name| program.output(name).filter(|_| is_last));
        let mut t = Tracer::new(program, Stage::Forward, Role::Forward);
        let numbers = numbers.map(|loss| loss.unwrap_or_else(|| zeros(&mut t, &[])));
        program = t.finish();
        let mut values: Vec<ValueId> = numbers.into_iter().chain(sums).collect();
        if parallel.reduce.is_any_world() {
            let (recorded, kept) = record_losses(program, chunk, &values, parallel.tree_micro_steps)?;
            (program, values) = (recorded, vec![kept]);
        }
        of_chunks.push(values);
    }
    let mut t = Tracer::new(program, Stage::Update, Role::Update);
    let mut losses = of_chunks.pop().unwrap_or_default();
    for chunk in of_chunks {
        for (sum, value) in losses.iter_mut().zip(chunk) {
            *sum = t.site("losses").emit(Add, &[*sum, value])?[0];
        }
    }
    Ok((t.finish(), losses))
}

/// Keeps the losses of each micro-step, so that they are added in the same order in any world.
fn record_losses(
    mut program: Program,
    chunk: usize,
    losses: &[ValueId],
    micro_steps: usize,
) -> Result<(Program, ValueId), TraceError> {
    let name = format!("{}.{chunk}", io::LOSS);
    for output in program.instances.iter_mut().flat_map(|i| &mut i.outputs) {
        if losses.contains(&output.value) {
            output.mode = WriteMode::Assign;
        }
    }
    // In a stage of a pipeline, other forwards may run before the backward.
    let stage = if program.slots.is_empty() { Stage::Backward } else { Stage::Forward };
    let mut t = Tracer::new(program, stage, Role::Reduce);
    let micro_step = t.input(MICRO_STEP, TensorType::new(DType::U32, []));
    let columns = losses.iter().map(|&loss| t.ty(loss).numel()).sum();
    let kept = t.state(StateKind::Losses, &name, TensorType::new(DType::F32, [micro_steps, columns]));
    // The loss and the objective, then those of sources, if any.
    let (numbers, sources) = losses.split_at(2);
    let inputs = [numbers, &[micro_step, kept], sources].concat();
    t.site("losses").emit_into(RecordLosses, &inputs, &[Some(kept)])?;
    let mut program = t.finish();
    if let Some(recording) = program.instances.last_mut() {
        recording.chunk = chunk;
    }
    Ok((program, kept))
}

/// The numbers of a step by which clipping decides.
struct Decisive {
    /// `f32[]`: the global gradient norm.
    norm: ValueId,
    /// `f32[]`: the objective.
    objective: Option<ValueId>,
    /// `f32[1]`: not finite if a value that was cast to FP8 is not.
    amax: Option<ValueId>,
    /// `f32[n, 2]`: [`io::SUMS`] of the step, if there are any.
    sums: Option<ValueId>,
}

/// A gradient, and the parameter's name.
type NamedGradient = (Arc<str>, ValueId);

/// The numbers of the step, from the gradients and those of this rank: `losses` are its loss, its objective
/// and the losses of its `sources`, or those of each of its micro-batches.
fn decisive(
    t: &mut Tracer,
    gradients: &[NamedGradient],
    losses: &[ValueId],
    sources: usize,
    amax: Option<ValueId>,
    (model, layout): (&Architecture, &Layout),
) -> Result<Decisive, TraceError> {
    let parallel = layout.parallel();
    t.site("grad_norm");
    let (squares, squares_of) = match layout.stage().is_whole() {
        true => squares(t, gradients, layout)?,
        false => squares_of_stage(t, gradients, model, layout)?,
    };
    let stop = t.input(update_io::STOP, TensorType::new(DType::U32, []));
    let inputs: Vec<ValueId> =
        [squares].into_iter().chain(losses.iter().copied()).chain([stop]).chain(amax).collect();
    let mut words = t.emit(RankWords, &inputs)?[0];
    if parallel.rank.world_size > 1 {
        words = t.emit(gather_of_rows(parallel), &[words])?[0];
    }
    let micro_batches = parallel.tree_micro_steps;
    let parts = if parallel.reduce.is_any_mesh() { parallel.tensor } else { 1 };
    let totals = t.emit(StepTotals { squares: squares_of, micro_batches, sources, parts }, &[words])?;
    t.output(update_io::TOTAL_LOSS, totals[1]);
    t.output(update_io::STOPPING, totals[4]);
    let sums = totals.get(5).copied();
    if let Some(sums) = sums {
        t.output(update_io::TOTAL_SUMS, sums);
    }
    Ok(Decisive { norm: totals[0], objective: Some(totals[2]), amax: Some(totals[3]), sums })
}

/// The squares of the gradients that this rank has, and the order in which those of all ranks are added.
fn squares(
    t: &mut Tracer,
    gradients: &[NamedGradient],
    layout: &Layout,
) -> Result<(ValueId, Squares), TraceError> {
    let values: Vec<ValueId> = gradients.iter().map(|(_, gradient)| *gradient).collect();
    let values = &values[..];
    let parallel = layout.parallel();
    let is_any_world = parallel.reduce.is_any_world();
    // Ranks that share experts have different gradients of them, also if each has all other state.
    let (in_pieces, in_parts) = (layout.cuts_state(), parallel.expert > 1);
    let whole_units = || vec![PieceUnits { shard: Groups::world(parallel.shards()), ..PieceUnits::WHOLE }];
    Ok(match (is_any_world, in_pieces || in_parts) {
        (false, false) => (t.emit(SquaredNorm, values)?[0], Squares::Whole),
        // The pieces of a rank are one unit.
        (false, true) if in_pieces => (t.emit(SquaredNorm, values)?[0], Squares::Pieces(whole_units())),
        (_, has_units) => {
            // Without sums for any world, a rank's piece of each gradient is a unit.
            let unit = |name: &str, rows: usize| if is_any_world { layout.unit_rows(name) } else { rows };
            let (mut unit_elements, mut pieces) = (Vec::new(), Vec::new());
            for (name, gradient) in gradients {
                let shape = t.ty(*gradient).shape;
                let unit = unit(name, shape[0]);
                unit_elements.push(unit * shape[1..].iter().product::<usize>());
                let units = shape[0].div_ceil(unit);
                pieces.extend(has_units.then(|| piece_units(layout, name, units)));
            }
            match has_units {
                true => (t.emit(UnitSquares { unit_elements }, values)?[0], Squares::Pieces(pieces)),
                false => (t.emit(UnitSquaredNorm { unit_elements }, values)?[0], Squares::Whole),
            }
        }
    })
}

/// The squares of the gradients of this rank's stage of a pipeline, and the order in which those of all
/// stages are added. As in [`squares`], they are units of gradients only where that is needed.
fn squares_of_stage(
    t: &mut Tracer,
    gradients: &[NamedGradient],
    model: &Architecture,
    layout: &Layout,
) -> Result<(ValueId, Squares), TraceError> {
    let parallel = layout.parallel();
    let is_any_world = parallel.reduce.is_any_world();
    let own: Vec<&NamedGradient> = gradients.iter().filter(|(name, _)| layout.is_own(name)).collect();
    let values: Vec<ValueId> = own.iter().map(|(_, gradient)| *gradient).collect();
    let ranks = parallel.stage_groups().size;
    if !is_any_world && (layout.cuts_state() || parallel.expert == 1) {
        // The gradients, or the pieces of a rank, are one unit.
        let shard = Groups::world(if layout.cuts_state() { parallel.shards() } else { 1 });
        let pieces = vec![vec![PieceUnits { shard, ..PieceUnits::WHOLE }]; parallel.pipeline];
        return Ok((t.emit(SquaredNorm, &values)?[0], Squares::OfStages { ranks, pieces }));
    }
    let mut pieces = vec![Vec::new(); parallel.pipeline];
    let mut elements_of: HashMap<String, usize> = HashMap::new();
    for p in model.parameters().into_iter().filter(|p| p.is_trained()) {
        let cut = layout.cuts()[&p.name];
        let rows = if layout.cuts_state() { cut.shard.piece_rows } else { cut.shard.rows };
        let unit = if is_any_world { layout.unit_rows(&p.name) } else { rows };
        pieces[layout.stage_of(&p)].push(piece_units(layout, &p.name, rows.div_ceil(unit)));
        elements_of.insert(p.name, unit * p.shape[1..].iter().product::<usize>());
    }
    let mut unit_elements: Vec<usize> = own.iter().map(|(name, _)| elements_of[&**name]).collect();
    let mut values = values;
    let squares_of = Squares::OfStages { ranks, pieces };
    let words: usize =
        values.iter().zip(&unit_elements).map(|(v, unit)| t.ty(*v).numel().div_ceil(*unit)).sum();
    // The words of all ranks are equally many.
    let missing = squares_of.words() - words;
    if missing > 0 {
        values.push(zeros(t, &[missing]));
        unit_elements.push(1);
    }
    Ok((t.emit(UnitSquares { unit_elements }, &values)?[0], squares_of))
}

/// The units of a gradient of which each rank has pieces of so many units.
fn piece_units(layout: &Layout, name: &str, units: usize) -> PieceUnits {
    let ParameterCut { parts, shard: RowShard { groups, first, .. }, .. } = layout.cuts()[name];
    // Otherwise all ranks of the group have the part.
    match layout.cuts_state() {
        true => PieceUnits { parts, shard: groups, first, units },
        false => PieceUnits { parts, shard: Groups::world(1), first: 0, units },
    }
}

/// Appends the update of the biases of routers, from the loads of the step.
fn balance(
    t: &mut Tracer,
    model: &Architecture,
    rate: f32,
    skip: ValueId,
    (sums, sums_of): (ValueId, &SumsOf),
) -> Result<(), TraceError> {
    let biases: Vec<ValueId> = model
        .parameters()
        .iter()
        .filter(|p| p.group == ParameterGroup::RouterBias && !p.is_frozen)
        .map(|p| t.state(StateKind::Master, &p.name, TensorType::new(DType::F32, Shape::new(&p.shape))))
        .collect();
    let targets: Vec<_> = biases.iter().copied().map(Some).collect();
    let inputs = [&[skip, sums], &biases[..]].concat();
    t.site("balance").emit_into(BalanceBias::new(rate, sums_of.loads()), &inputs, &targets)?;
    Ok(())
}

/// The rows that each block with experts needs on this rank, if its room may be too small; None for a block
/// of another stage.
fn rows_needed(program: &Program, spec: &TrainingSpec) -> Vec<Option<ValueId>> {
    let may_be_too_small =
        |experts: &Experts| experts.dispatch_own(spec.own_tokens(), spec.expert_ranks()).room.is_some();
    let blocks = spec.model.layers.iter().enumerate();
    let with_room = blocks.filter(|(_, layer)| layer.feed_forward.experts().is_some_and(may_be_too_small));
    with_room.map(|(block, _)| program.output(&io::rows_needed(block))).collect()
}

/// Appends the check of the room for the rows that the blocks need on this rank, if it may be too small:
/// `u32[1]`, not 0 if the step is repeated, or one that it builds on; and `f32[1]`, an amax that skips the
/// update if so.
fn check_room(
    t: &mut Tracer,
    spec: &TrainingSpec,
    of_blocks: &[Option<ValueId>],
) -> Result<Option<[ValueId; 2]>, TraceError> {
    let Some(room) = spec.room() else { return Ok(None) };
    t.site("room");
    let of_blocks: Vec<ValueId> =
        of_blocks.iter().map(|needed| needed.unwrap_or_else(|| zeros(t, &[1]))).collect();
    let row = t.emit(RankAmaxes, &of_blocks)?[0];
    let ranks = spec.parallel.rank.world_size;
    let gather = AllGather { rows: ranks * of_blocks.len(), ..gather_of_rows(&spec.parallel) };
    let rows = t.emit(gather, &[row])?[0];
    let needed = t.emit(MaxAmaxes { lengths: vec![of_blocks.len()] }, &[rows])?[0];
    t.output(update_io::ROWS_NEEDED, needed);
    let halted = t.state(StateKind::Halted, update_io::ROWS_NEEDED, TensorType::new(DType::U32, [1]));
    let outputs = t.emit_into(CheckRoom { room }, &[needed, halted], &[Some(halted)])?;
    Ok(Some([halted, outputs[1]]))
}

/// The largest magnitudes of the values that the step casts: for the host if scales are static, and those
/// from which the scales of the next step follow if they are not. Returns the largest, or `amax` without such
/// values; one that skips the update if the rows of experts do not fit.
fn amaxes(
    t: &mut Tracer,
    spec: &TrainingSpec,
    delayed: &[Delayed],
    parameters: &[Parameter],
    room: Option<[ValueId; 2]>,
    amax: Option<ValueId>,
) -> Result<Option<ValueId>, TraceError> {
    let (halted, blocked) = room.map(|[halted, blocked]| (halted, blocked)).unzip();
    let amax = match delayed.is_empty() {
        true => amax,
        false if spec.fp8.static_scales.is_some() => Some(amaxes_to_host(t, delayed, &spec.parallel)?),
        false => {
            if spec.parallel.stage_groups().size > 1 {
                amaxes_of_all(t, delayed, &spec.parallel)?;
            }
            Some(next_scales(t, delayed, parameters, &spec.fp8.delayed, halted)?)
        }
    };
    let (Some(amax), Some(blocked)) = (amax, blocked) else { return Ok(amax.or(blocked)) };
    let both = t.site("room").emit(RankAmaxes, &[amax, blocked])?[0];
    Ok(Some(t.emit(MaxAmaxes { lengths: vec![1] }, &[both])?[0]))
}

/// Appends the scales of the next step, gradient norm, clip and the optimizer's update.
pub fn append(mut program: Program, spec: &TrainingSpec, layout: &Layout) -> Result<Program, TraceError> {
    let mut specs = spec.model.parameters();
    specs.retain(|p| p.is_trained());
    let specs: HashMap<&str, (usize, &ParameterSpec)> =
        specs.iter().enumerate().map(|(index, p)| (p.name.as_str(), (index, p))).collect();
    let parameters = program.parameters.clone();
    let parallel = layout.parallel();
    let (objective, sums) = (program.output(io::OBJECTIVE), program.output(io::SUMS));
    let losses;
    (program, losses) = self::losses(program, parallel)?;
    let rows_needed = rows_needed(&program, spec);
    let amax = program.state(StateKind::Amax, quantize::AMAX);
    let delayed = program.delayed.clone();
    let mut t = Tracer::new(program, Stage::Update, Role::Update);
    let room = check_room(&mut t, spec, &rows_needed)?;
    let amax = amaxes(&mut t, spec, &delayed, &parameters, room, amax)?;
    let lr = t.input(update_io::LR, TensorType::new(DType::F32, []));
    let gradients: Vec<NamedGradient> =
        parameters.iter().filter_map(|p| Some((p.name.clone(), p.gradient?))).collect();
    let sums_of = SumsOf::loss(&spec.model, &spec.loss);
    let Decisive { norm, objective, amax, sums } = if spec.has_totals() {
        decisive(&mut t, &gradients, &losses, sums_of.pairs(), amax, (&spec.model, layout))?
    } else {
        let gradients: Vec<ValueId> = gradients.into_iter().map(|(_, gradient)| gradient).collect();
        Decisive { norm: t.site("grad_norm").emit(GradNorm, &gradients)?[0], objective, amax, sums }
    };
    let applied = t.state(StateKind::Counter, update_io::APPLIED, TensorType::new(DType::U32, [1]));
    let clip = Clip { max_norm: spec.max_grad_norm };
    let mut inputs = vec![norm];
    inputs.extend(objective);
    inputs.push(applied);
    inputs.extend(amax);
    let decided = t.site("clip").emit_into(clip, &inputs, &[Some(applied)])?;
    let (coefficient, skip) = (decided[1], decided[2]);
    if let (Some(rate), Some(sums)) = (spec.loss.balancing.and_then(|balancing| balancing.bias_rate), sums) {
        balance(&mut t, &spec.model, rate, skip, (sums, &sums_of))?;
    }

    // Every traced parameter is in the list, because tracing declares parameters from it.
    let updated: Vec<_> = parameters
        .iter()
        .filter(|parameter| parameter.gradient.is_some())
        .map(|parameter| {
            let (index, spec) = specs[&*parameter.name];
            let held = layout.held(StateKind::Master, &parameter.name);
            let first_row = held.map_or(0, |held| held.rows.start);
            let row: usize = spec.shape[1..].iter().product();
            Updated { parameter, spec, index, first_element: (first_row * row) as u64 }
        })
        .collect();
    spec.optimizer.trace(&mut t, &updated, Controls { lr, coefficient, applied, skip }, parallel.rank)?;
    t.output(update_io::GRAD_NORM, norm);
    t.output(update_io::SKIPPED, skip);
    Ok(t.finish())
}
