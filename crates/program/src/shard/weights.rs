//! Weights of which each rank has its rows, gathered for the blocks that read them.
//!
//! A block's weights are gathered before its forward, and again before its backward unless they are still in
//! their slots. A gather is issued when the block `prefetch_blocks` before it starts, so it runs while that
//! block computes. Weights outside of the blocks are gathered once in a micro-step.
//!
//! Weights that ops gather apart, the matrices of a block's experts, are gathered each by itself, because
//! they are many times as large as the rest of the block. The next block's matrix is gathered as soon as it
//! is read for the last time, so memory holds one of each kind.
//!
//! Of weights that GEMMs read in FP8, ranks gather the numbers and scales (`quantized.rs`), and transpose
//! them where the other layout is read. With another [`Gather`] they cast the gathered weight instead. Either
//! happens directly before the copy is read.

use super::quantized::{self, CopySource, RankRows};
use super::slots::Slots;
use super::{ShardOps, tensor_place};
use crate::program::instantiate;
use crate::{
    Code, Gather, Instance, Op, Origin, Parallel, ParameterCut, Program, Quantized, QuantizedRows, Role,
    RowShard, Stage, StateKind, Storage, TensorCut, TraceError, ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::{DType, TensorType};

/// Cuts masters and compute copies, and inserts the gathers of what the forward and the backward read.
pub(super) fn gather(
    mut program: Program,
    parallel: &Parallel,
    cuts: &HashMap<String, ParameterCut>,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    let windows = windows(&program);
    let prefetch_blocks = parallel.prefetch_blocks;
    let mut copies = Copies::new(prefetch_blocks);
    for p in 0..program.parameters.len() {
        let Some(&ParameterCut { shard: cut, .. }) = cuts.get(&*program.parameters[p].name) else { continue };
        if cut.groups.size == 1 {
            continue;
        }
        let owner = windows.iter().find(|window| window.reads(p)).map(|window| window.owner);
        copies.cut(&mut program, p, owner, cut, parallel.gather, ops);
    }
    // Where forward and backward run apart, neither finds what the other has gathered.
    let first_of_backward = program.instances.iter().position(|i| i.origin.stage == Stage::Backward);
    let apart = first_of_backward.filter(|_| !program.slots.is_empty());
    let placed = copies.place(&windows, prefetch_blocks, apart);
    copies.insert(program, placed)
}

/// The reader of weights: a block, the ops of a block that read a matrix gathered apart, or a layer outside
/// of the blocks, which is known by its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Block(u32),
    Apart { block: u32, parameter: usize },
    Parameter(usize),
}

impl Owner {
    fn block(self) -> Option<u32> {
        match self {
            Owner::Block(block) | Owner::Apart { block, .. } => Some(block),
            Owner::Parameter(_) => None,
        }
    }
}

/// The reads of an owner's weights in one stage.
struct Window {
    owner: Owner,
    stage: Stage,
    /// The first instance that reads any.
    first: usize,
    /// The last one.
    last: usize,
    /// Parameters, and the values of theirs that are read, in the order of their first reads.
    values: Vec<(usize, ValueId)>,
}

impl Window {
    fn reads(&self, parameter: usize) -> bool {
        self.values.iter().any(|(p, _)| *p == parameter)
    }
}

/// The windows of a program, in the order in which they begin.
fn windows(program: &Program) -> Vec<Window> {
    let mut parameter_of = HashMap::new();
    for (p, parameter) in program.parameters.iter().enumerate() {
        let copies = parameter.quantized.iter().flat_map(|copies| &copies.values).copied();
        let values = [parameter.master].into_iter().chain(parameter.compute).chain(copies);
        parameter_of.extend(values.map(|value| (value, p)));
    }
    let parameter_of = &parameter_of;
    let reads = || {
        program.instances.iter().enumerate().flat_map(|(i, instance)| {
            let of_parameter = move |v: &ValueId| Some((i, instance, *parameter_of.get(v)?, *v));
            instance.inputs.iter().filter_map(of_parameter)
        })
    };
    let mut owners: HashMap<usize, Owner> = HashMap::new();
    for (_, instance, p, _) in reads() {
        let reader = match instance.origin.block {
            Some(block) if instance.code.op().gathers_apart() => Owner::Apart { block, parameter: p },
            Some(block) => Owner::Block(block),
            None => Owner::Parameter(p),
        };
        let owner = owners.entry(p).or_insert(reader);
        if *owner != reader {
            *owner = Owner::Parameter(p);
        }
    }
    let mut windows: Vec<Window> = Vec::new();
    for (i, instance, p, value) in reads() {
        let (owner, stage) = (owners[&p], instance.origin.stage);
        let known = windows.iter().position(|w| (w.owner, w.stage) == (owner, stage));
        let at = known.unwrap_or_else(|| {
            windows.push(Window { owner, stage, first: i, last: i, values: Vec::new() });
            windows.len() - 1
        });
        windows[at].last = i;
        if !windows[at].values.contains(&(p, value)) {
            windows[at].values.push((p, value));
        }
    }
    windows
}

/// The whole copies that instances read after this pass, and the steps that write them.
struct Copies {
    /// Slots of what is gathered for blocks.
    gathered: Slots,
    /// Slots of what is gathered apart.
    apart: Slots,
    /// Slots of what is computed from gathered tensors, directly before it is read.
    computed: Slots,
    steps: Vec<CopyStep>,
    /// Gathered tensors, by this rank's rows of them.
    pieces: HashMap<ValueId, Whole>,
    /// By the value that instances read before this pass.
    whole: HashMap<ValueId, Whole>,
    /// Values that every rank has, by those that instances read before.
    held: HashMap<ValueId, ValueId>,
}

/// The making of whole copies.
struct CopyStep {
    op: Arc<dyn Op>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    /// Its place, but for the stage.
    origin: Origin,
    /// The step that writes its first input, if it computes something from that.
    source: Option<usize>,
}

#[derive(Clone, Copy)]
struct Whole {
    slot: ValueId,
    /// The step that writes the slot.
    step: usize,
}

impl Copies {
    fn new(prefetch_blocks: usize) -> Self {
        Copies {
            gathered: Slots::new(prefetch_blocks),
            apart: Slots::new(0),
            computed: Slots::new(0),
            steps: Vec::new(),
            pieces: HashMap::new(),
            whole: HashMap::new(),
            held: HashMap::new(),
        }
    }

    /// Cuts a parameter, and gives whole copies to its reader.
    fn cut(
        &mut self,
        program: &mut Program,
        p: usize,
        owner: Option<Owner>,
        cut: RowShard,
        gather: Gather,
        ops: &dyn ShardOps,
    ) {
        let parameter = &mut program.parameters[p];
        parameter.shard = Some(cut);
        let (name, master, compute) = (parameter.name.clone(), parameter.master, parameter.compute);
        let quantized = std::mem::take(&mut parameter.quantized);
        let part = parameter.part.clone();
        let mut weights = Vec::new();
        for piece in [master].into_iter().chain(compute) {
            let ty = program.ty(piece);
            let whole = part.as_ref().map_or(ty, |part| part.whole(ty));
            program.values[piece.0 as usize].ty = cut.piece(whole);
            weights.push(RankRows { piece, cut, whole });
        }
        let Some(owner) = owner else { return };
        // The part of a tensor group is cast from the part of the master.
        let gathers_numbers =
            |copies: &Quantized| gather == Gather::Auto && part.is_none() && quantized::is_possible(copies);
        let (of_rows, of_whole): (Vec<_>, Vec<_>) = quantized.into_iter().partition(gathers_numbers);
        let is_f32 = program.ty(master).dtype == DType::F32;
        if gather == Gather::Bf16 && !of_whole.is_empty() && compute.is_none() && is_f32 {
            let whole = weights[0].whole.with_dtype(DType::BF16);
            let piece = program.add_state(StateKind::Compute, &name, cut.piece(whole));
            program.parameters[p].compute = Some(piece);
            weights.push(RankRows { piece, cut, whole });
        }
        for &rows in &weights {
            let mut whole = self.gather(program, rows, owner, &name, ops);
            if let Some(part) = &part {
                whole = self.take_part(program, whole, part, owner, &name, ops);
            }
            self.whole.insert(rows.piece, whole);
        }
        let cast_from = weights.last().filter(|_| gather == Gather::Bf16).map_or(master, |rows| rows.piece);
        for copies in of_whole {
            self.cast(program, copies, cast_from, owner.block(), ops);
        }
        for copies in of_rows {
            let of_rows = self.gather_numbers(program, &copies, cut, owner, &name, ops);
            program.parameters[p].quantized_rows.extend(of_rows);
        }
    }

    /// The whole of which ranks have rows. The first call adds the step that gathers it.
    fn gather(
        &mut self,
        program: &mut Program,
        rows: RankRows,
        owner: Owner,
        parameter: &Arc<str>,
        ops: &dyn ShardOps,
    ) -> Whole {
        let RankRows { piece, cut, whole } = rows;
        *self.pieces.entry(piece).or_insert_with(|| {
            let slots = match owner {
                Owner::Apart { .. } => &mut self.apart,
                Owner::Block(_) | Owner::Parameter(_) => &mut self.gathered,
            };
            let slot = slots.take(program, owner.block(), whole);
            let (op, inputs, outputs) = (ops.all_gather(cut), vec![piece], vec![slot]);
            let (block, site) = (owner.block(), parameter.clone());
            let origin = Origin { block, site, role: Role::Gather, stage: Stage::Forward };
            self.steps.push(CopyStep { op, inputs, outputs, origin, source: None });
            Whole { slot, step: self.steps.len() - 1 }
        })
    }

    /// Takes this rank's part of a gathered weight.
    fn take_part(
        &mut self,
        program: &mut Program,
        whole: Whole,
        part: &TensorCut,
        owner: Owner,
        parameter: &Arc<str>,
        ops: &dyn ShardOps,
    ) -> Whole {
        let ty = part.part(program.ty(whole.slot));
        let slot = self.computed.take(program, owner.block(), ty);
        let (inputs, outputs) = (vec![whole.slot, tensor_place(program)], vec![slot]);
        let (block, site) = (owner.block(), parameter.clone());
        let origin = Origin { block, site, role: Role::Precision, stage: Stage::Forward };
        self.steps.push(CopyStep {
            op: ops.take_part(part),
            inputs,
            outputs,
            origin,
            source: Some(whole.step),
        });
        Whole { slot, step: self.steps.len() - 1 }
    }

    /// Casts a gathered weight to FP8.
    fn cast(
        &mut self,
        program: &mut Program,
        copies: Quantized,
        cast_from: ValueId,
        block: Option<u32>,
        ops: &dyn ShardOps,
    ) {
        let Whole { slot, step: source } = self.whole[&cast_from];
        let step = self.steps.len();
        let op = ops.quantize(copies.quantization, copies.layouts);
        let mut outputs = Vec::new();
        for value in copies.values {
            let slot = self.computed.take(program, block, program.ty(value));
            self.whole.insert(value, Whole { slot, step });
            outputs.push(slot);
        }
        let (amax, scale) = copies.delayed.map(|delayed| (delayed.amax, delayed.scale)).unzip();
        outputs.extend(amax);
        let inputs = [slot].into_iter().chain(scale).collect();
        let origin = Origin { block, ..copies.origin };
        self.steps.push(CopyStep { op, inputs, outputs, origin, source: Some(source) });
    }

    /// Gathers the FP8 numbers of rows, and transposes them where that is read.
    fn gather_numbers(
        &mut self,
        program: &mut Program,
        copies: &Quantized,
        cut: RowShard,
        owner: Owner,
        parameter: &Arc<str>,
        ops: &dyn ShardOps,
    ) -> Vec<QuantizedRows> {
        let retype = |program: &mut Program, value: ValueId, ty| {
            program.values[value.0 as usize].ty = ty;
            value
        };
        let types: Vec<TensorType> = copies.values.iter().map(|&value| program.ty(value)).collect();
        let quantized::Cut { rows, sources } = quantized::cut(program, copies, cut, ops, retype);
        let mut is_kept: Vec<ValueId> = rows.iter().flat_map(|rows| [rows.numbers, rows.scales]).collect();
        for ((value, source), ty) in sources.into_iter().zip(types) {
            match source {
                CopySource::Held(held) => {
                    self.held.insert(value, held);
                    is_kept.push(held);
                }
                CopySource::Gathered(rows) => {
                    let whole = self.gather(program, rows, owner, parameter, ops);
                    self.whole.insert(value, whole);
                }
                CopySource::Transposed(rows, op) => {
                    let from = self.gather(program, rows, owner, parameter, ops);
                    let slot = self.computed.take(program, owner.block(), ty);
                    let (inputs, outputs, source) = (vec![from.slot], vec![slot], Some(from.step));
                    let origin = Origin { block: owner.block(), ..copies.origin.clone() };
                    self.whole.insert(value, Whole { slot, step: self.steps.len() });
                    self.steps.push(CopyStep { op, inputs, outputs, origin, source });
                }
            }
        }
        for &value in copies.values.iter().filter(|value| !is_kept.contains(value)) {
            program.values[value.0 as usize].storage = Storage::Transient;
        }
        rows
    }

    /// The steps to insert: before which instance, in which stage, which.
    /// If forward and backward run `apart`, the backward begins with that instance.
    fn place(
        &self,
        windows: &[Window],
        prefetch_blocks: usize,
        apart: Option<usize>,
    ) -> Vec<(usize, Stage, usize)> {
        let mut placed = Vec::new();
        let mut slots = Contents::default();
        let mut least = 0;
        for (w, window) in windows.iter().enumerate() {
            if let Some(first) = apart.filter(|first| window.first >= *first && least == 0) {
                (slots, least) = (Contents::default(), first);
            }
            // What a block gathers apart begins before or after the rest of it.
            let is_other = |earlier: &&Window| {
                matches!(earlier.owner, Owner::Block(_))
                    && (earlier.owner.block(), earlier.stage) != (window.owner.block(), window.stage)
            };
            let blocks = windows[..w].iter().rev().filter(is_other);
            let early = match prefetch_blocks {
                0 => window.first,
                n => blocks.map(|block| block.first).nth(n - 1).unwrap_or(windows[0].first),
            };
            let early = early.max(least);
            for (_, value) in &window.values {
                let Some(&Whole { slot, step }) = self.whole.get(value) else { continue };
                if slots.holds(slot, step) {
                    slots.read(slot, window.last);
                    continue;
                }
                // First what the step reads directly before the window, and what that reads.
                let sources = std::iter::successors(self.steps[step].source, |&of| self.steps[of].source);
                let sources: Vec<usize> = sources.collect();
                for &source in sources.iter().rev() {
                    let CopyStep { source: from, outputs, .. } = &self.steps[source];
                    if slots.holds(outputs[0], source) {
                        slots.read(outputs[0], window.first);
                        continue;
                    }
                    let at = if from.is_some() { window.first } else { early };
                    let at = slots.write(outputs, source, at, window.first);
                    placed.push((at, window.stage, source));
                }
                let at = if sources.is_empty() { early } else { window.first };
                let at = slots.write(&self.steps[step].outputs, step, at, window.last);
                assert!(at <= window.first, "a slot is read after its next tensor is needed");
                placed.push((at, window.stage, step));
            }
        }
        placed
    }

    /// Inserts the steps, and lets instances read the whole copies.
    fn insert(
        self,
        mut program: Program,
        mut placed: Vec<(usize, Stage, usize)>,
    ) -> Result<Program, TraceError> {
        placed.sort_by_key(|(at, ..)| *at);
        let mut placed = placed.into_iter().peekable();
        for (i, mut instance) in std::mem::take(&mut program.instances).into_iter().enumerate() {
            while let Some((_, stage, step)) = placed.next_if(|(at, ..)| *at == i) {
                let step = self.instance(&mut program, stage, step)?;
                program.instances.push(step);
            }
            for value in &mut instance.inputs {
                let held = self.held.get(value).copied().unwrap_or(*value);
                *value = self.whole.get(value).map_or(held, |whole| whole.slot);
            }
            program.instances.push(instance);
        }
        Ok(program)
    }

    fn instance(&self, program: &mut Program, stage: Stage, step: usize) -> Result<Instance, TraceError> {
        let CopyStep { op, inputs, outputs, origin, .. } = &self.steps[step];
        let targets: Vec<_> = outputs.iter().copied().map(Some).collect();
        let origin = Origin { stage, ..origin.clone() };
        instantiate(program, Code::Plain(op.clone()), inputs, &targets, origin)
    }
}

/// The contents of slots, as the windows are walked in order.
#[derive(Default)]
struct Contents(HashMap<ValueId, CopyContent>);

struct CopyContent {
    /// The step that wrote it.
    step: usize,
    /// The last instance that reads it.
    last: usize,
}

impl Contents {
    fn holds(&self, slot: ValueId, step: usize) -> bool {
        self.0.get(&slot).is_some_and(|content| content.step == step)
    }

    fn read(&mut self, slot: ValueId, last: usize) {
        if let Some(content) = self.0.get_mut(&slot) {
            content.last = content.last.max(last);
        }
    }

    /// Lets `step` write these slots, which are read until `last`. Returns the first instance from `at` on
    /// before which none of them is read any more.
    fn write(&mut self, slots: &[ValueId], step: usize, at: usize, last: usize) -> usize {
        let earlier: Vec<CopyContent> =
            slots.iter().filter_map(|slot| self.0.insert(*slot, CopyContent { step, last })).collect();
        earlier.iter().fold(at, |at, content| at.max(content.last + 1))
    }
}
