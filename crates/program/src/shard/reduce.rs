//! The sum of a parameter's gradients over ranks and, for sums that do not depend on the number of ranks,
//! over micro-steps.
//!
//! A block's gradients are exchanged together, when the backward of the block is complete. The kernels that
//! add what arrived run on the compute lane after the backward of `prefetch_blocks` more blocks, by when it
//! has arrived. On the communication lane each would wait until a kernel of the backward leaves
//! multiprocessors free. Where weights are gathered at the same place, exchanges follow the gathers, for
//! which kernels wait.
//!
//! No kernel of the backward would overlap with the exchange of its last gradient, that of the embedding,
//! which is often the largest. So wgrad of the last block of the backward runs after it (`defer_wgrad`), and
//! each of these gradients is exchanged by itself, the smallest last.
//!
//! If a rank has its rows of gradients alone, whole gradients are in slots, and every micro-step adds its
//! sum over ranks to the rows.
//!
//! With several replicas, the ranks of each first exchange and add their gradients. Then the ranks that have
//! equal rows exchange and add those: after the last micro-step or, for sums that do not depend on the number
//! of ranks, after each, because replicas are the levels of the tree between ranks and micro-steps. Each adds
//! a part of the rows, and they gather the sums.

use super::slots::Slots;
use super::{MICRO_STEP, ShardOps, Tie, tensor_place};
use crate::program::{instantiate, tied_name};
use crate::{
    Code, Instance, Op, Origin, Output, Parallel, Parameter, ParameterCut, Program, Reduce, Role, RowShard,
    Stage, StateKind, Storage, TraceError, ValueId, When, WriteMode,
};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use xtrain_tensor::{DType, Shape, TensorType};

/// Inserts the reductions of all gradients. [`crate::Parameter::gradient`] is then the sum, of this rank's
/// rows alone if the optimizer's state is cut.
pub(super) fn reduce(
    mut program: Program,
    parallel: &Parallel,
    cuts: &HashMap<String, ParameterCut>,
    tie: Option<Tie<'_>>,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    if !parallel.reduce.is_any_world() && parallel.rank.world_size == 1 {
        return Ok(program);
    }
    let levels = levels(parallel);
    let reduced: HashSet<ValueId> = program
        .parameters
        .iter()
        .filter(|p| p.gradient.is_some() && is_reduced_in_each_micro_step(&cuts[&*p.name], levels, parallel))
        .flat_map(gradients_of)
        .collect();
    let all: HashSet<ValueId> = program.parameters.iter().flat_map(gradients_of).collect();
    overwrite_gradients(&mut program, if levels.is_some() { &all } else { &reduced });
    let first_deferred = if parallel.stage_groups().size > 1 { defer_wgrad(&mut program) } else { None };
    let reductions = reductions(&program);
    if parallel.cuts_gradients() {
        put_in_slots(&mut program, &reduced, parallel.prefetch_blocks);
    }
    let instances = std::mem::take(&mut program.instances);
    let delay = if parallel.cuts_gradients() { parallel.prefetch_blocks } else { 1 };
    let mut pass = ReducePass::new(program, parallel, levels, ops, delay);
    // A gather or a sum over replicas follows the sums of a replica.
    let collectives_follow = !parallel.cuts_state() || parallel.replicas > 1;
    // Parameters whose gradients are complete, and the block of their last writers.
    let (mut complete, mut block) = (Vec::new(), None);
    for (position, (instance, completed)) in instances.into_iter().zip(reductions).enumerate() {
        let is_deferred = first_deferred.is_some_and(|first| position >= first);
        let is_of_block = block.is_some() && instance.origin.block == block;
        if !complete.is_empty() && !is_of_block && instance.origin.role != Role::Gather {
            pass.reduce_together(&mut complete, block, cuts)?;
        }
        if complete.is_empty() {
            block = instance.origin.block.filter(|_| !is_deferred);
            // Collectives that follow the sums overlap with these instances, too.
            pass.blocks_done += usize::from(is_deferred && collectives_follow);
        }
        complete.extend(completed);
        pass.out.instances.push(instance);
    }
    pass.reduce_together(&mut complete, block, cuts)?;
    pass.insert_all();
    pass.add_uses(tie)?;
    Ok(pass.out)
}

/// The partial sums for any world that exist before the last micro-step; None for other sums.
fn levels(parallel: &Parallel) -> Option<usize> {
    let levels = || parallel.tree_micro_steps.next_power_of_two().ilog2() as usize;
    parallel.reduce.is_any_world().then(levels)
}

/// The gradients of a parameter.
fn gradients_of(parameter: &Parameter) -> impl Iterator<Item = ValueId> + use<> {
    parameter.gradient.into_iter().chain(parameter.tied_gradient)
}

/// A gradient of a parameter: that of its first use or of all, or that of its further uses.
#[derive(Clone, Copy)]
struct GradientOf {
    parameter: usize,
    is_tied: bool,
}

impl GradientOf {
    fn place(self, program: &mut Program) -> &mut Option<ValueId> {
        let parameter = &mut program.parameters[self.parameter];
        if self.is_tied { &mut parameter.tied_gradient } else { &mut parameter.gradient }
    }
}

/// If the backward ends outside the blocks, moves the instances of its last block that only write gradients
/// after that end, the largest gradient first. Returns the position of the first of them. If GEMMs of the
/// block are recomputed, memory is short, and the order stays: operands of the moved instances would live
/// longer.
fn defer_wgrad(program: &mut Program) -> Option<usize> {
    let gradients: HashSet<ValueId> = program.parameters.iter().flat_map(gradients_of).collect();
    let is_gradient = |o: &Output| gradients.contains(&o.value);
    let last = program.instances.iter().rposition(|i| i.outputs.iter().any(is_gradient))?;
    let (before, end) = (&program.instances[..last], &program.instances[last]);
    let block = before.iter().rev().find_map(|i| i.origin.block).filter(|_| end.origin.block.is_none());
    let again = |i: &Instance| i.origin.role == Role::Recompute && i.origin.block == block;
    if block.is_none() || program.flops(again) > 0.0 {
        return None;
    }
    let mut instances = std::mem::take(&mut program.instances);
    let update = instances.split_off(last + 1);
    let uses = |i: &Instance, v: ValueId| i.inputs.contains(&v) || i.outputs.iter().any(|o| o.value == v);
    let may_move = |n: usize, i: &Instance| {
        let mut written_later = instances[n + 1..].iter().flat_map(|later| &later.outputs);
        i.origin.block == block
            && i.outputs.iter().all(is_gradient)
            && !written_later.any(|o| uses(i, o.value))
    };
    let moves: Vec<bool> = instances.iter().enumerate().map(|(n, i)| may_move(n, i)).collect();
    let (mut moved, mut others) = (Vec::new(), Vec::new());
    for (instance, moves) in instances.into_iter().zip(moves) {
        if moves { moved.push(instance) } else { others.push(instance) }
    }
    let bytes = |i: &Instance| i.outputs.iter().map(|o| program.ty(o.value).bytes()).sum::<usize>();
    moved.sort_by_key(|i| Reverse(bytes(i)));
    let first = others.len();
    program.instances = [others, moved, update].concat();
    Some(first)
}

/// For each instance, the gradients that are complete after it.
fn reductions(program: &Program) -> Vec<Vec<GradientOf>> {
    let mut after = vec![Vec::new(); program.instances.len()];
    let mut last_write: HashMap<ValueId, usize> = HashMap::new();
    for (n, instance) in program.instances.iter().enumerate() {
        last_write.extend(instance.outputs.iter().map(|output| (output.value, n)));
    }
    for (p, parameter) in program.parameters.iter().enumerate() {
        for (gradient, is_tied) in [(parameter.gradient, false), (parameter.tied_gradient, true)] {
            if let Some(last) = gradient.and_then(|gradient| last_write.get(&gradient)) {
                after[*last].push(GradientOf { parameter: p, is_tied });
            }
        }
    }
    after
}

/// True if every micro-step adds a parameter's gradient to sums, so that the next one overwrites it. Ranks
/// that do not share a parameter with others add all micro-steps to its gradient, unless they add in a tree.
fn is_reduced_in_each_micro_step(cut: &ParameterCut, levels: Option<usize>, parallel: &Parallel) -> bool {
    let (is_shared, has_replicas) = (cut.shard.groups.size > 1, cut.replicas.size > 1);
    match levels {
        None => parallel.cuts_gradients() && is_shared,
        Some(levels) => levels > 0 || is_shared || has_replicas,
    }
}

/// Makes every micro-step overwrite these gradients of the one before: the first writer overwrites, the
/// others add.
fn overwrite_gradients(program: &mut Program, gradients: &HashSet<ValueId>) {
    let outputs = program.instances.iter_mut().flat_map(|i| &mut i.outputs);
    for Output { mode, .. } in outputs.filter(|o| gradients.contains(&o.value)) {
        *mode = if *mode == WriteMode::AddAfterFirst { WriteMode::Assign } else { *mode };
    }
}

/// Puts these gradients of blocks in slots.
fn put_in_slots(program: &mut Program, gradients: &HashSet<ValueId>, prefetch_blocks: usize) {
    let mut blocks: HashMap<ValueId, Option<u32>> = HashMap::new();
    for instance in &program.instances {
        for output in &instance.outputs {
            let block = blocks.entry(output.value).or_insert(instance.origin.block);
            *block = block.filter(|block| Some(*block) == instance.origin.block);
        }
    }
    let (mut slots, mut slot_of) = (Slots::new(prefetch_blocks), HashMap::new());
    let all = (0..program.parameters.len())
        .flat_map(|parameter| [false, true].map(|is_tied| GradientOf { parameter, is_tied }));
    for of in all {
        let Some(gradient) = of.place(program).filter(|g| gradients.contains(g)) else { continue };
        let block = blocks.get(&gradient).copied().flatten();
        let slot = slots.take(program, block, program.ty(gradient));
        slot_of.insert(gradient, slot);
        // No one uses the whole gradient any more.
        program.values[gradient.0 as usize].storage = Storage::Transient;
        *of.place(program) = Some(slot);
    }
    for instance in &mut program.instances {
        let outputs = instance.outputs.iter_mut().map(|o| &mut o.value);
        for value in instance.inputs.iter_mut().chain(outputs) {
            *value = slot_of.get(value).copied().unwrap_or(*value);
        }
    }
}

struct ReducePass<'a> {
    out: Program,
    parallel: &'a Parallel,
    /// Levels of the tree over micro-steps, if gradients are added in one.
    levels: Option<usize>,
    ops: &'a dyn ShardOps,
    /// The input [`MICRO_STEP`], once an op reads it.
    micro_step: Option<ValueId>,
    /// The instances of the reduction that is being made.
    reduction: Vec<Instance>,
    /// The instances that put parts of gradients into their places, before the reductions of a block.
    placed: Vec<Instance>,
    /// Blocks whose backward runs between an exchange and the reader of its output.
    delay: usize,
    /// Blocks whose backward is complete.
    blocks_done: usize,
    delayed: Vec<Delayed>,
}

/// The rest of some parameters' reductions.
struct Delayed {
    /// The number of complete blocks after which the next segment is inserted.
    after: usize,
    /// Each ends with collectives, whose outputs the next one reads.
    segments: VecDeque<Vec<Instance>>,
}

impl<'a> ReducePass<'a> {
    fn new(
        out: Program,
        parallel: &'a Parallel,
        levels: Option<usize>,
        ops: &'a dyn ShardOps,
        delay: usize,
    ) -> ReducePass<'a> {
        ReducePass {
            out,
            parallel,
            levels,
            ops,
            micro_step: None,
            reduction: Vec::new(),
            placed: Vec::new(),
            delay,
            blocks_done: 0,
            delayed: Vec::new(),
        }
    }

    /// Begins the reductions of these parameters, whose last writers are in `block`, and goes on with earlier
    /// ones.
    fn reduce_together(
        &mut self,
        gradients: &mut Vec<GradientOf>,
        block: Option<u32>,
        cuts: &HashMap<String, ParameterCut>,
    ) -> Result<(), TraceError> {
        let mut reductions = Vec::new();
        for gradient in gradients.drain(..) {
            let cut = cuts[&*self.out.parameters[gradient.parameter].name];
            self.reduce_gradient(gradient, cut)?;
            reductions.push(std::mem::take(&mut self.reduction));
        }
        self.blocks_done += usize::from(block.is_some());
        let mut segments = segments(reductions);
        if let Some(first) = segments.front_mut() {
            first.splice(0..0, self.placed.drain(..));
        }
        self.delayed.push(Delayed { after: self.blocks_done, segments });
        for delayed in &mut self.delayed {
            while delayed.after <= self.blocks_done
                && let Some(segment) = delayed.segments.pop_front()
            {
                self.out.instances.extend(segment);
                delayed.after += self.delay;
            }
        }
        self.delayed.retain(|delayed| !delayed.segments.is_empty());
        Ok(())
    }

    /// Inserts the rest of all reductions.
    fn insert_all(&mut self) {
        while !self.delayed.is_empty() {
            for delayed in &mut self.delayed {
                self.out.instances.extend(delayed.segments.pop_front().into_iter().flatten());
            }
            self.delayed.retain(|delayed| !delayed.segments.is_empty());
        }
    }

    fn reduce_gradient(&mut self, of: GradientOf, cut: ParameterCut) -> Result<(), TraceError> {
        let Some(gradient) = *of.place(&mut self.out) else { return Ok(()) };
        let name = self.out.parameters[of.parameter].name.clone();
        let name = if of.is_tied { tied_name(&name) } else { name };
        let origin = Origin { block: None, site: name.clone(), role: Role::Reduce, stage: Stage::Backward };
        let (part, parallel) = (self.out.parameters[of.parameter].part.clone(), self.parallel);
        let ty = self.out.ty(gradient);
        let whole = part.as_ref().map_or(ty, |part| part.whole(ty));
        let in_each_micro_step = is_reduced_in_each_micro_step(&cut, self.levels, parallel);
        let ParameterCut { shard: cut, replicas: replica_groups, .. } = cut;
        let (shards, replicas) = (cut.groups.size > 1, replica_groups.size > 1);
        let cuts_state = shards && parallel.cuts_state();
        let levels = self.levels.unwrap_or(0);
        if !shards && !replicas && levels == 0 {
            return Ok(());
        }
        if in_each_micro_step {
            self.out.values[gradient.0 as usize].storage = Storage::Transient;
        }
        let total = match (cuts_state, self.levels) {
            (true, _) => self.out.add_state(StateKind::ReducedGradient, &name, cut.piece(whole)),
            (false, Some(_)) => self.out.add_state(StateKind::Gradient, &name, whole),
            (false, None) => gradient,
        };
        // Each rank then gathers the whole sum.
        let gathers = shards && !cuts_state;
        let mut sum = gradient;
        if shards {
            let accumulates = self.levels.is_none() && in_each_micro_step;
            let is_total = levels == 0 && !replicas && !gathers;
            let target = is_total.then_some(total);
            let when = if in_each_micro_step { When::Always } else { When::Last };
            if let Some(part) = part {
                let inputs = [sum, tensor_place(&mut self.out)];
                sum = self.emit(self.ops.place_part(&part), &inputs, None, when, &origin)?;
                self.placed.extend(self.reduction.pop());
            }
            sum = match accumulates {
                true => self.add_sum_over_ranks(sum, cut, total, &origin)?,
                false => self.sum_over_ranks(sum, cut, target, when, &origin)?,
            };
        }
        let rows = self.out.ty(sum).shape[0];
        let of_replica = RowShard {
            groups: replica_groups,
            first: 0,
            piece_rows: rows.div_ceil(replica_groups.size),
            rows,
        };
        if replicas {
            let when = if self.levels.is_some() { When::Always } else { When::Last };
            sum = self.sum_over_ranks(sum, of_replica, None, when, &origin)?;
        }
        if levels > 0 {
            let of_levels = Shape::new(&[&[levels], &*self.out.ty(sum).shape].concat());
            let ty = TensorType { dtype: DType::F32, shape: of_levels };
            let partial = self.out.add_state(StateKind::PartialSums, &name, ty);
            let inputs = [sum, self.micro_step(), partial];
            self.emit(self.ops.pairwise_add(), &inputs, Some(partial), When::BeforeLast, &origin)?;
            let target = (!replicas && !gathers).then_some(total);
            sum = self.emit(self.ops.pairwise_total(), &inputs, target, When::Last, &origin)?;
        }
        if replicas {
            let target = (!gathers).then_some(total);
            sum = self.emit(self.ops.all_gather(of_replica), &[sum], target, When::Last, &origin)?;
        }
        if gathers {
            self.emit(self.ops.all_gather(cut), &[sum], Some(total), When::Last, &origin)?;
        }
        *of.place(&mut self.out) = Some(total);
        Ok(())
    }

    /// Adds the gradients of the uses of tied parameters, which have been kept apart, and those of the other
    /// stage that has the `tie`.
    fn add_uses(&mut self, tie: Option<Tie<'_>>) -> Result<(), TraceError> {
        let when = When::Last;
        for p in 0..self.out.parameters.len() {
            let Parameter { gradient: Some(gradient), tied_gradient, name, .. } = &self.out.parameters[p]
            else {
                continue;
            };
            let (gradient, tied_gradient, name) = (*gradient, *tied_gradient, name.clone());
            let origin =
                Origin { block: None, site: name.clone(), role: Role::Reduce, stage: Stage::Backward };
            if let Some(further) = tied_gradient {
                self.emit(self.ops.add(), &[gradient, further], Some(gradient), when, &origin)?;
            }
            let Some(Tie { other, .. }) = tie.filter(|tie| *tie.parameter == *name) else { continue };
            // In the update, before which each stage has sent all gradients of activations: the first one has
            // its gradient after the last.
            let (origin, when) = (Origin { stage: Stage::Update, ..origin }, When::Always);
            let both = self.ops.send_receive(self.parallel.pipeline_groups(), other);
            let received = self.emit(both, &[gradient], None, when, &origin)?;
            self.emit(self.ops.add(), &[gradient, received], Some(gradient), when, &origin)?;
        }
        let added = std::mem::take(&mut self.reduction);
        self.out.instances.extend(added);
        Ok(())
    }

    /// Adds `x` over the ranks of a group. The result is this rank's piece.
    fn sum_over_ranks(
        &mut self,
        x: ValueId,
        cut: RowShard,
        target: Option<ValueId>,
        when: When,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let x = self.cast_to_send(x, when, origin)?;
        if self.parallel.reduce == Reduce::Fast {
            return self.emit(self.ops.reduce_scatter(cut, false), &[x], target, when, origin);
        }
        let pieces = self.emit(self.ops.all_to_all(cut), &[x], None, when, origin)?;
        self.emit(self.ops.sum_ranks(), &[pieces], target, when, origin)
    }

    /// Adds `x` over the ranks of a group, and this rank's piece to `total`, which the first micro-step
    /// overwrites.
    fn add_sum_over_ranks(
        &mut self,
        x: ValueId,
        cut: RowShard,
        total: ValueId,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let when = When::Always;
        let x = self.cast_to_send(x, when, origin)?;
        let collective = match self.parallel.reduce {
            Reduce::Fast => self.ops.reduce_scatter(cut, true),
            Reduce::SameWorld | Reduce::AnyWorld | Reduce::AnyMesh => self.ops.all_to_all(cut),
        };
        let summands = self.emit(collective, &[x], None, when, origin)?;
        let sum = self.emit(self.ops.sum_ranks(), &[summands], Some(total), when, origin)?;
        let outputs = self.reduction.last_mut().map(|last| &mut last.outputs);
        for output in outputs.into_iter().flatten() {
            output.mode = WriteMode::AddAfterFirst;
        }
        Ok(sum)
    }

    /// Casts `x` to the type in which ranks send gradients, if it has another.
    fn cast_to_send(&mut self, x: ValueId, when: When, origin: &Origin) -> Result<ValueId, TraceError> {
        match self.parallel.reduce_dtype {
            dtype if dtype == self.out.ty(x).dtype => Ok(x),
            dtype => self.emit(self.ops.cast(dtype), &[x], None, when, origin),
        }
    }

    fn micro_step(&mut self) -> ValueId {
        let input = || Storage::Input { name: MICRO_STEP.into() };
        let ty = TensorType::new(DType::U32, []);
        *self.micro_step.get_or_insert_with(|| self.out.add_value(ty, input()))
    }

    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        target: Option<ValueId>,
        when: When,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, &[target], origin.clone())?;
        let output = instance.outputs[0].value;
        self.reduction.push(Instance { when, ..instance });
        Ok(output)
    }
}

/// The instances of reductions that run together, one kind of instance of all of them after the other, cut
/// after each kind of collective.
fn segments(reductions: Vec<Vec<Instance>>) -> VecDeque<Vec<Instance>> {
    let mut reductions: Vec<_> = reductions.into_iter().map(Vec::into_iter).collect();
    let (mut segments, mut segment) = (VecDeque::new(), Vec::new());
    loop {
        let kind: Vec<Instance> = reductions.iter_mut().filter_map(Iterator::next).collect();
        let Some(first) = kind.first() else { break };
        let is_collective = first.code.op().collective().is_some();
        segment.extend(kind);
        if is_collective {
            segments.push_back(std::mem::take(&mut segment));
        }
    }
    segments.extend((!segment.is_empty()).then_some(segment));
    segments
}
