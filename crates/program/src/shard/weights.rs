//! Weights of which each rank has its rows, gathered for the blocks that read them.
//!
//! A block's weights are gathered before its forward, and again before its backward unless they are still in
//! their slots. A gather is issued when the block `prefetch_blocks` before it starts, so it runs while that
//! block computes. Weights outside of the blocks are gathered once in a micro-step.
//!
//! FP8 copies are cast from the gathered master, as in one process, so they have the same bits.

use super::ShardOps;
use super::slots::Slots;
use crate::program::instantiate;
use crate::{Code, Instance, Op, Origin, Program, Role, RowShard, Stage, TraceError, ValueId};
use std::collections::HashMap;
use std::sync::Arc;

/// Cuts masters and compute copies, and inserts the gathers of what the forward and the backward read.
pub(super) fn gather(
    mut program: Program,
    prefetch_blocks: usize,
    cuts: &HashMap<String, RowShard>,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    let windows = windows(&program);
    let mut copies = Copies::new(prefetch_blocks);
    for p in 0..program.parameters.len() {
        let Some(&cut) = cuts.get(&*program.parameters[p].name) else { continue };
        let owner = windows.iter().find(|window| window.reads(p)).map(|window| window.owner);
        copies.cut(&mut program, p, owner, cut, ops);
    }
    let placed = copies.place(&windows, prefetch_blocks);
    copies.insert(program, placed)
}

/// The reader of weights: a block, or a layer outside of the blocks, which is known by its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Block(u32),
    Parameter(usize),
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
            let of_parameter = move |v: &ValueId| Some((i, &instance.origin, *parameter_of.get(v)?, *v));
            instance.inputs.iter().filter_map(of_parameter)
        })
    };
    let mut owners: HashMap<usize, Owner> = HashMap::new();
    for (_, origin, p, _) in reads() {
        let reader = origin.block.map_or(Owner::Parameter(p), Owner::Block);
        let owner = owners.entry(p).or_insert(reader);
        if *owner != reader {
            *owner = Owner::Parameter(p);
        }
    }
    let mut windows: Vec<Window> = Vec::new();
    for (i, &Origin { stage, .. }, p, value) in reads() {
        let owner = owners[&p];
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
    /// Slots of what is gathered.
    gathered: Slots,
    /// Slots of what is cast from it, directly before it is read.
    cast: Slots,
    steps: Vec<Step>,
    /// By the value that instances read before this pass.
    whole: HashMap<ValueId, Whole>,
}

/// The making of whole copies.
struct Step {
    op: Arc<dyn Op>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    /// Its place, but for the stage.
    origin: Origin,
    /// The step that gathers its input, if it is a cast.
    gather: Option<usize>,
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
            cast: Slots::new(0),
            steps: Vec::new(),
            whole: HashMap::new(),
        }
    }

    /// Cuts a parameter, and gives whole copies to its reader.
    fn cut(
        &mut self,
        program: &mut Program,
        p: usize,
        owner: Option<Owner>,
        cut: RowShard,
        ops: &dyn ShardOps,
    ) {
        let parameter = &mut program.parameters[p];
        parameter.shard = Some(cut);
        let (name, master, compute) = (parameter.name.clone(), parameter.master, parameter.compute);
        let quantized = std::mem::take(&mut parameter.quantized);
        let block = match owner {
            Some(Owner::Block(block)) => Some(block),
            Some(Owner::Parameter(_)) | None => None,
        };
        let origin = Origin { block, site: name, role: Role::Gather, stage: Stage::Forward };
        let mut of_master = None;
        for piece in [master].into_iter().chain(compute) {
            let whole = program.ty(piece);
            program.values[piece.0 as usize].ty = cut.piece(whole);
            if owner.is_none() {
                continue;
            }
            let slot = self.gathered.take(program, block, whole);
            let step = self.steps.len();
            let op = ops.all_gather(cut);
            let (inputs, outputs) = (vec![piece], vec![slot]);
            self.steps.push(Step { op, inputs, outputs, origin: origin.clone(), gather: None });
            self.whole.insert(piece, Whole { slot, step });
            of_master = of_master.or(Some(Whole { slot, step }));
        }
        for copies in quantized {
            let Some(Whole { slot: master, step: gather }) = of_master else { continue };
            let step = self.steps.len();
            let mut outputs = Vec::new();
            for value in copies.values {
                let slot = self.cast.take(program, block, program.ty(value));
                self.whole.insert(value, Whole { slot, step });
                outputs.push(slot);
            }
            let (amax, scale) = copies.delayed.map(|delayed| (delayed.amax, delayed.scale)).unzip();
            outputs.extend(amax);
            let inputs = [master].into_iter().chain(scale).collect();
            let origin = Origin { block, ..copies.origin };
            self.steps.push(Step { op: copies.op, inputs, outputs, origin, gather: Some(gather) });
        }
    }

    /// The steps to insert: before which instance, in which stage, which.
    fn place(&self, windows: &[Window], prefetch_blocks: usize) -> Vec<(usize, Stage, usize)> {
        let mut placed = Vec::new();
        let mut slots = Contents::default();
        for (w, window) in windows.iter().enumerate() {
            let blocks = windows[..w].iter().rev().filter(|earlier| matches!(earlier.owner, Owner::Block(_)));
            let early = match prefetch_blocks {
                0 => window.first,
                n => blocks.map(|block| block.first).nth(n - 1).unwrap_or(windows[0].first),
            };
            for (_, value) in &window.values {
                let Whole { slot, step } = self.whole[value];
                if slots.holds(slot, step) {
                    slots.read(slot, window.last);
                    continue;
                }
                let Step { gather, inputs, outputs, .. } = &self.steps[step];
                let mut at = early;
                if let Some(gather) = *gather {
                    // The master is read by the cast alone, directly before the window.
                    if !slots.holds(inputs[0], gather) {
                        placed.push((
                            slots.write(&inputs[..1], gather, early, window.first),
                            window.stage,
                            gather,
                        ));
                    }
                    at = window.first;
                }
                let at = slots.write(outputs, step, at, window.last);
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
                *value = self.whole.get(value).map_or(*value, |whole| whole.slot);
            }
            program.instances.push(instance);
        }
        Ok(program)
    }

    fn instance(&self, program: &mut Program, stage: Stage, step: usize) -> Result<Instance, TraceError> {
        let Step { op, inputs, outputs, origin, .. } = &self.steps[step];
        let targets: Vec<_> = outputs.iter().copied().map(Some).collect();
        let origin = Origin { stage, ..origin.clone() };
        instantiate(program, Code::Plain(op.clone()), inputs, &targets, origin)
    }
}

/// The contents of slots, as the windows are walked in order.
#[derive(Default)]
struct Contents(HashMap<ValueId, Content>);

struct Content {
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
        let earlier: Vec<Content> =
            slots.iter().filter_map(|slot| self.0.insert(*slot, Content { step, last })).collect();
        earlier.iter().fold(at, |at, content| at.max(content.last + 1))
    }
}
