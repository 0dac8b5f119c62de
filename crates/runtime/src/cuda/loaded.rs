//! A program that the CUDA engine has loaded: its places in memory, the work of its instances, and its
//! graphs.

use super::arena::{Arena, ArenaSpan};
use super::lanes::LaneEvents;
use super::marks::Marks;
use super::ring::{Inputs, PendingOutputs as OutputRing};
use super::variants::{Chosen, Varying};
use crate::error::EngineError;
use crate::part::{MicroSlot, Part};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use xtrain_cuda::{CudaError, CudaKernel, CudaOutput, CudaTensor, Gpu, GraphExec, Operands, Stream, Work};
use xtrain_program::{Instance, KernelTable, Output, Program, ValueId, When};
use xtrain_tensor::TensorType;

/// A program in the memory of the engine, with the work of its instances.
pub(super) struct Loaded {
    pub(super) program: Program,
    /// Its instances in runs ([`runs`](xtrain_program::order::runs)).
    pub(super) runs: Vec<Range<usize>>,
    /// The spans of values, by id.
    pub(super) spans: Vec<Option<ArenaSpan>>,
    /// For each value, true if it is in slots: its span is that in the first.
    pub(super) is_in_slots: Vec<bool>,
    /// Bytes of a slot of each chunk.
    pub(super) slot_bytes: Vec<usize>,
    /// True once the collectives are prepared.
    pub(super) is_connected: bool,
    /// The workspace of each instance.
    pub(super) workspaces: Vec<Vec<(TensorType, ArenaSpan)>>,
    /// The work of each instance by slot; none for collectives. A micro-step's instance has one for the first
    /// micro-step and one for the others, if they differ.
    pub(super) works: Vec<Vec<[Option<Work>; 2]>>,
    /// The instances whose work varies with an input.
    pub(super) varying: Vec<Varying>,
    /// The parts that ran, each with its graphs by the variants that they run: at first none.
    pub(super) graphs: HashMap<Part, HashMap<Chosen, GraphExec>>,
    /// Graphs with events around each op, by part, variants, and the repeats of each op.
    pub(super) timed: HashMap<(Part, Chosen, usize), (GraphExec, Marks)>,
    /// The events between lanes, if there are several.
    pub(super) lanes: Option<LaneEvents>,
    /// The inputs on the GPU, and their staging buffers.
    pub(super) input_span: ArenaSpan,
    pub(super) inputs: Inputs,
    /// The outputs on the GPU, and their staging buffers.
    pub(super) output_span: ArenaSpan,
    pub(super) outputs: OutputRing,
    /// The place of each output in the outputs' span.
    pub(super) output_places: Arc<Vec<(Arc<str>, Range<usize>)>>,
    /// The type and the place of each input in the inputs' span, by name.
    pub(super) input_places: HashMap<Arc<str>, (TensorType, Range<usize>)>,
}

impl Loaded {
    /// The part to run for `part`: if no instance depends on it, the last micro-step is like the others
    /// before it, and shares their graph.
    pub(super) fn distinct(&self, part: Part) -> Part {
        let depends = |instance: &Instance| instance.when != When::Always;
        let differs = self.program.instances.iter().any(|i| part.includes(i) && depends(i));
        if differs { part } else { part.before_last() }
    }

    /// The runs of a part's phases. Unless collectives are issued together, each instance is a run.
    pub(super) fn runs(&self, part: Part, together: bool) -> impl Iterator<Item = Range<usize>> {
        let runs = self.runs.iter().filter(move |run| part.includes(&self.program.instances[run.start]));
        runs.flat_map(move |run| {
            let step = if together { run.len() } else { 1 };
            run.clone().step_by(step).map(move |first| first..first + step)
        })
    }

    /// True if `part` runs a collective.
    pub(super) fn has_collective(&self, part: Part) -> bool {
        let is_collective = |i: &Instance| part.runs(i) && i.code.op().collective().is_some();
        self.program.instances.iter().any(is_collective)
    }

    /// True if `part` is recorded as a graph by now.
    pub(super) fn is_recorded(&self, part: Part) -> bool {
        self.graphs.get(&part).is_some_and(|graphs| !graphs.is_empty())
    }

    /// Adds the graph of a part with these variants.
    pub(super) fn add_graph(&mut self, part: Part, chosen: Chosen, graph: GraphExec) {
        self.graphs.entry(part).or_default().insert(chosen, graph);
    }

    /// The graph of a part with these variants, which was added.
    pub(super) fn graph(&mut self, part: Part, chosen: &Chosen) -> &mut GraphExec {
        let graph = self.graphs.get_mut(&part).and_then(|graphs| graphs.get_mut(chosen));
        graph.expect("it was added")
    }

    /// The span of a value in a part that uses this slot.
    pub(super) fn span(&self, value: ValueId, slot: MicroSlot) -> ArenaSpan {
        let span = self.spans[value.0 as usize].expect("every operand is planned");
        span.part(slot.number * self.slot_stride(value, slot.chunk), span.bytes)
    }

    /// Bytes between the places of a value of a chunk in a slot and in the next; 0 if it is in no slots.
    pub(super) fn slot_stride(&self, value: ValueId, chunk: usize) -> usize {
        if self.is_in_slots[value.0 as usize] { self.slot_bytes[chunk] } else { 0 }
    }

    /// The indices of an instance's work in a part that uses this slot: 0 if it has no operand in slots; and
    /// 1 if it adds to outputs that the first micro-step overwrites.
    pub(super) fn variant(&self, index: usize, slot: MicroSlot, first: bool) -> (usize, usize) {
        let instance = &self.program.instances[index];
        let mut operands = instance.inputs.iter().copied().chain(instance.outputs.iter().map(|o| o.value));
        let slot = if operands.any(|v| self.is_in_slots[v.0 as usize]) { slot.number } else { 0 };
        let differs = |o: &Output| o.mode.accumulates(false) != o.mode.accumulates(true);
        (slot, usize::from(!first && instance.outputs.iter().any(differs)))
    }

    /// The work of an instance.
    pub(super) fn work(&mut self, index: usize, slot: MicroSlot, first: bool) -> &mut Option<Work> {
        let (slot, variant) = self.variant(index, slot, first);
        &mut self.works[index][slot][variant]
    }

    /// Copies the inputs of in-place ops whose memory the planner did not share.
    pub(super) fn copy_in_place_inputs(
        &self,
        index: usize,
        slot: MicroSlot,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let instance = &self.program.instances[index];
        for &(o, n) in instance.code.op().in_place() {
            let (from, to) =
                (self.span(instance.inputs[n], slot), self.span(instance.outputs[o].value, slot));
            if from != to {
                arena.memory(to).copy_from(arena.memory(from), stream)?;
            }
        }
        Ok(())
    }
}

/// The kernel of an instance's op.
pub(super) fn find<'a>(
    kernels: &'a KernelTable<dyn CudaKernel>,
    instance: &'a Instance,
    gpu: &Gpu,
) -> Result<&'a dyn CudaKernel, EngineError> {
    kernels.find(instance.code.op()).ok_or_else(|| EngineError::no_kernel(instance, &gpu.info().name))
}

/// Prepares the work of an instance in parts that use this slot.
pub(super) fn prepare(
    kernel: &dyn CudaKernel,
    gpu: &Gpu,
    arena: &Arena,
    loaded: &Loaded,
    (index, slot): (usize, MicroSlot),
    first: bool,
) -> Result<Work, EngineError> {
    let instance = &loaded.program.instances[index];
    let tensor = |ty, span| CudaTensor { ty, place: arena.memory(span).pointer() };
    let mut inputs: Vec<CudaTensor> =
        instance.inputs.iter().map(|&v| tensor(loaded.program.ty(v), loaded.span(v, slot))).collect();
    let output = |o: &Output| CudaOutput {
        ty: loaded.program.ty(o.value),
        place: arena.memory(loaded.span(o.value, slot)).pointer(),
        accumulate: o.mode.accumulates(first),
    };
    let outputs: Vec<CudaOutput> = instance.outputs.iter().map(output).collect();
    for &(o, n) in instance.code.op().in_place() {
        inputs[n].place = outputs[o].place;
    }
    let workspace: Vec<CudaTensor> =
        loaded.workspaces[index].iter().map(|&(ty, span)| tensor(ty, span)).collect();
    Ok(kernel.prepare(gpu, &Operands { inputs: &inputs, outputs: &outputs, workspace: &workspace })?)
}
