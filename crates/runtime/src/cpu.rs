//! The CPU engine: interprets a program with the CPU kernels on planned memory. A collective runs when its
//! turn comes, and waits there for the other ranks.

use crate::checks::{Checks, check_finite, is_overwritten};
use crate::collective;
use crate::engine::{Engine, Outputs, Promise, Ticket, output_places};
use crate::error::{EngineError, ensure_length};
use crate::lane_order::random_order;
use crate::memory::{ChunkSpan, Memory, SCRATCH};
use crate::part::{Part, ProgramId};
use crate::state::{StateEntry, StateTable};
use crate::timing::{Timed, TimedWork, Timing};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use xtrain_cuda::nvtx;
use xtrain_distributed::{Alone, Communicator};
use xtrain_program::{KernelTable, Location, Op, Plan, Program, Region, StateKind, ValueId, WriteMode};
use xtrain_tensor::available_bytes;
use xtrain_tensor::{CpuKernel, Philox, TensorType, View, ViewMut};

/// The name of the device in messages.
const DEVICE: &str = "the CPU";

/// Bytes of a state value that one thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// The CPU engine.
pub struct CpuEngine {
    kernels: Arc<KernelTable<dyn CpuKernel>>,
    communicator: Arc<dyn Communicator>,
    memory: Memory,
    state: StateTable<ChunkSpan>,
    programs: Vec<CpuProgram>,
    /// The largest workspace of each op's kernel beyond its operands, in any program, in bytes.
    work_bytes: HashMap<&'static str, usize>,
    /// Bytes that this engine may hold; None if the system does not report them.
    limit_bytes: Option<u64>,
    checks: Checks,
    /// The generator of random orders, if instances run in such an order, and the runs so far.
    random_order: Option<(u64, u32)>,
    timing: Timing,
    timed: Vec<Timed>,
}

struct CpuProgram {
    program: Program,
    /// The spans of values, by id; of values in slots, in the first.
    spans: Vec<Option<ChunkSpan>>,
    /// The chunk of memory for slots, and the bytes of a slot of each chunk of the stage.
    slots: (usize, Vec<usize>),
    /// The workspace of each instance.
    workspaces: Vec<Vec<(TensorType, ChunkSpan)>>,
    /// The name and the place of each output among the outputs' bytes.
    outputs: Arc<Vec<(Arc<str>, Range<usize>)>>,
}

/// The workspace of each op's CPU kernel and of collectives, for planning a program.
pub fn cpu_workspace(
    kernels: &KernelTable<dyn CpuKernel>,
) -> impl Fn(&dyn Op, &[TensorType]) -> Vec<TensorType> {
    |op, inputs| match kernels.find(op) {
        Some(kernel) => kernel.workspace(inputs),
        None => collective::workspace(op, inputs).into_iter().collect(),
    }
}

/// An upper bound of the kernels' memory beyond the plans of `programs`, in bytes, on this number of threads.
/// It adds the largest run of each op, because threads keep their buffers for the next run.
pub fn cpu_work_bytes(kernels: &KernelTable<dyn CpuKernel>, programs: &[&Program], threads: usize) -> usize {
    let mut most = HashMap::new();
    programs.iter().for_each(|program| add_work(&mut most, kernels, program, threads));
    sum(&most)
}

/// Raises the bytes of each op to those of its largest run in `program`.
fn add_work(
    most: &mut HashMap<&'static str, usize>,
    kernels: &KernelTable<dyn CpuKernel>,
    program: &Program,
    threads: usize,
) {
    for instance in &program.instances {
        let op = instance.code.op();
        let Some(kernel) = kernels.find(op) else { continue };
        let work = kernel.work_bytes(&program.input_types(instance), threads);
        let most = most.entry(op.name()).or_default();
        *most = work.max(*most);
    }
}

fn sum(work: &HashMap<&'static str, usize>) -> usize {
    work.values().copied().fold(0, usize::saturating_add)
}

impl CpuEngine {
    /// An engine with these kernels, in a run of one process.
    pub fn new(kernels: Arc<KernelTable<dyn CpuKernel>>) -> Self {
        CpuEngine {
            kernels,
            communicator: Arc::new(Alone),
            memory: Memory::new(),
            state: StateTable::new(),
            programs: Vec::new(),
            work_bytes: HashMap::new(),
            limit_bytes: available_bytes(),
            checks: Checks::default(),
            random_order: None,
            timing: Timing::Off,
            timed: Vec::new(),
        }
    }

    /// The engine of one rank of a run: collectives use this communicator.
    pub fn with_communicator(self, communicator: Arc<dyn Communicator>) -> Self {
        CpuEngine { communicator, ..self }
    }

    /// Sets the checks of the runs that follow.
    pub fn set_checks(&mut self, checks: Checks) {
        self.checks = checks;
    }

    /// Runs instances from now on in a random order among those that their lanes and dependencies allow, by
    /// this seed. Values do not depend on it.
    pub fn set_random_order(&mut self, seed: u64) {
        self.random_order = Some((seed, 0));
    }

    /// The instances of `part` in the order in which this run executes them.
    fn ordered(&mut self, program: ProgramId, part: Part) -> Vec<usize> {
        let program = &self.programs[program.0].program;
        let all = match &mut self.random_order {
            Some((seed, runs)) => {
                *runs += 1;
                random_order(program, part, &Philox::new(*seed, *runs, 0))
            }
            None => (0..program.instances.len()).collect(),
        };
        all.into_iter().filter(|&index| part.runs(&program.instances[index])).collect()
    }

    /// Allocates the state and constants that `program` uses and the engine lacks, chunks of its own of so
    /// many bytes, and `scratch` bytes in all. Returns these chunks.
    fn allocate_for(
        &mut self,
        program: &Program,
        own: [usize; 2],
        scratch: usize,
    ) -> Result<[usize; 2], EngineError> {
        let missing = self.state.missing(program)?;
        let grown = scratch.saturating_sub(self.memory.scratch_bytes());
        let needed_bytes = [missing.bytes, own[0], own[1], grown, sum(&self.work_bytes)]
            .into_iter()
            .fold(self.memory.total_bytes(), usize::saturating_add);
        let refused = EngineError::Memory { needed_bytes, available_bytes: self.limit_bytes };
        if self.limit_bytes.is_some_and(|limit| needed_bytes as u64 > limit) {
            return Err(refused);
        }
        let memory = &mut self.memory;
        let chunks =
            memory.grow_scratch(scratch).and_then(|()| Some([memory.add(own[0])?, memory.add(own[1])?]));
        let chunks = chunks.ok_or_else(|| refused.clone())?;
        if missing.bytes > 0 {
            let chunk = self.memory.add(missing.bytes).ok_or(refused)?;
            let place = |offset, bytes| ChunkSpan { chunk, offset, bytes };
            let memory = &mut self.memory;
            self.state.add(missing, place, |span, bytes| {
                memory.get_mut(span).copy_from_slice(bytes);
                Ok::<_, EngineError>(())
            })?;
        }
        Ok(chunks)
    }

    fn run_instance(&mut self, id: ProgramId, index: usize, part: Part) -> Result<(), EngineError> {
        let first = part.is_first();
        let CpuProgram { program, spans, workspaces, slots: (slots, slot_bytes), .. } = &self.programs[id.0];
        let instance = &program.instances[index];
        let op = instance.code.op();
        let span = |v: ValueId| {
            let (span, slot) = (spans[v.0 as usize].expect("every operand is planned"), part.slot());
            if span.chunk == *slots { span.later(slot.number * slot_bytes[slot.chunk]) } else { span }
        };

        let outputs = instance.outputs.iter().map(|o| (program.ty(o.value), o.mode, span(o.value)));
        let workspace = workspaces[index].iter().map(|&(ty, span)| (ty, WriteMode::Assign, span));
        let written: Vec<(TensorType, WriteMode, ChunkSpan)> = outputs.chain(workspace).collect();
        let writes: Vec<ChunkSpan> = written.iter().map(|&(.., span)| span).collect();
        let mut over = vec![false; instance.inputs.len()];
        for &(o, n) in op.in_place() {
            over[n] = true;
            let source = span(instance.inputs[n]);
            if source != writes[o] {
                self.memory.copy(source, writes[o]);
            }
        }
        if self.checks.poison {
            for (k, &(ty, mode, span)) in written.iter().enumerate() {
                if is_overwritten(op, k, mode, first) && ty.dtype.is_float() {
                    self.memory.get_mut(span).fill(0xFF);
                }
            }
        }
        let none = ChunkSpan { chunk: SCRATCH, offset: 0, bytes: 0 };
        let reads: Vec<ChunkSpan> =
            instance.inputs.iter().zip(&over).map(|(&v, &over)| if over { none } else { span(v) }).collect();
        let (read, mut lent) = self.memory.lend(&reads, &writes);
        if let Some(call) = op.collective() {
            // A message has no input or no output, and one of both may be empty.
            let (outputs, work) = lent.split_at_mut(instance.outputs.len());
            let [output, padded] =
                [outputs, work].map(|spans| spans.first_mut().map_or(&mut [][..], |span| span));
            let input = read.first().copied().unwrap_or_default();
            collective::run(&*self.communicator, call, input, output, padded)
                .map_err(|error| collective::failed(instance, part, error))?;
        } else {
            let kernel = self.kernels.find(op).ok_or_else(|| EngineError::no_kernel(instance, DEVICE))?;
            let inputs: Vec<View<'_>> = (instance.inputs.iter().zip(&over).zip(read))
                .map(|((&v, &over), bytes)| match over {
                    true => View::in_output(program.ty(v)),
                    false => View::new(program.ty(v), bytes),
                })
                .collect();
            let mut outputs: Vec<ViewMut<'_>> = (written.iter().zip(lent))
                .map(|(&(ty, mode, _), bytes)| ViewMut::new(ty, bytes, mode.accumulates(first)))
                .collect();
            kernel.run(&inputs, &mut outputs);
        }

        if self.checks.numerics {
            check_finite(program, instance, |k| Ok(self.memory.get(writes[k])))?;
        }
        Ok(())
    }
}

impl Engine for CpuEngine {
    fn load(&mut self, program: Program) -> Result<ProgramId, EngineError> {
        let program = self.checks.prepared(program);
        collective::check_groups(&program, self.communicator.world_size())?;
        let is_unknown = |op: &dyn Op| op.collective().is_none() && self.kernels.find(op).is_none();
        if let Some(instance) = program.instances.iter().find(|i| is_unknown(i.code.op())) {
            return Err(EngineError::no_kernel(instance, DEVICE));
        }
        add_work(&mut self.work_bytes, &self.kernels, &program, rayon::current_num_threads());
        let plan = Plan::new(&program, &cpu_workspace(&self.kernels));
        let region = |r: Region| plan.region_bytes[r as usize];
        let [io, slots] = self.allocate_for(
            &program,
            [region(Region::Io), region(Region::Slots)],
            region(Region::Scratch),
        )?;
        let within = |chunk, at: Location| ChunkSpan { chunk, offset: at.offset, bytes: at.bytes };
        let place = |id: ValueId| {
            let location = plan.locations[id.0 as usize]?;
            Some(match location.region {
                Region::State => self.state.span(program.value(id))?,
                Region::Io => within(io, location),
                Region::Scratch => within(SCRATCH, location),
                Region::Slots => within(slots, location),
            })
        };
        let spans = program.ids().map(place).collect();
        let workspace = |of: &Vec<(TensorType, Location)>| {
            of.iter().map(|&(ty, location)| (ty, within(SCRATCH, location))).collect()
        };
        let workspaces = plan.workspaces.iter().map(workspace).collect();
        let outputs = Arc::new(output_places(&program));
        let slots = (slots, plan.slot_bytes);
        self.programs.push(CpuProgram { program, spans, slots, workspaces, outputs });
        Ok(ProgramId(self.programs.len() - 1))
    }

    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        let CpuProgram { program, spans, .. } = &self.programs[program.0];
        let unknown = || EngineError::Unknown { what: "input", name: name.into() };
        let id = program.input(name).ok_or_else(unknown)?;
        let span = spans[id.0 as usize].ok_or_else(unknown)?;
        write(&mut self.memory, name, program.ty(id), span, bytes)
    }

    fn run(&mut self, program: ProgramId, part: Part) -> Result<(), EngineError> {
        let started = Instant::now();
        // A run precedes its ops.
        let at = self.timed.len();
        let (by_op, repeats) = match self.timing {
            Timing::Ops { repeats } => (true, repeats),
            Timing::Off | Timing::Runs => (false, 1),
        };
        for index in self.ordered(program, part) {
            let instance = &self.programs[program.0].program.instances[index];
            let _range = nvtx::range(format_args!("{} {}", instance.code.op().name(), instance.origin));
            let begin = Instant::now();
            (0..repeats).try_for_each(|_| self.run_instance(program, index, part))?;
            if by_op {
                let work = TimedWork::Instance(index);
                self.timed.push(Timed { program, work, begin, end: Instant::now() });
            }
        }
        if self.timing != Timing::Off {
            let work = TimedWork::Part(part);
            self.timed.insert(at, Timed { program, work, begin: started, end: Instant::now() });
        }
        Ok(())
    }

    fn fetch(&mut self, program: ProgramId) -> Result<Ticket, EngineError> {
        let CpuProgram { program, spans, outputs, .. } = &self.programs[program.0];
        let mut bytes = Vec::new();
        for (_, id) in program.outputs() {
            let span = spans[id.0 as usize].expect("every output is planned");
            bytes.extend_from_slice(self.memory.get(span));
        }
        Ok(Ticket(Promise::Arrived(Outputs { bytes, places: outputs.clone() })))
    }

    fn is_ready(&self, _: &Ticket) -> Result<bool, EngineError> {
        Ok(true)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Outputs, EngineError> {
        match ticket.0 {
            Promise::Arrived(outputs) => Ok(outputs),
            Promise::Copying { .. } => {
                Err(EngineError::Unknown { what: "ticket", name: "of another engine".into() })
            }
        }
    }

    fn state_entries(&self) -> Vec<StateEntry> {
        self.state.entries()
    }

    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError> {
        let (_, span) = self.state.get(kind, name)?;
        Ok(self.memory.get(span).to_vec())
    }

    fn read_state_part(
        &mut self,
        kind: StateKind,
        name: &str,
        part: Range<usize>,
    ) -> Result<Vec<u8>, EngineError> {
        let (_, span) = self.state.get(kind, name)?;
        Ok(self.memory.get(span)[part].to_vec())
    }

    fn copy_state(&mut self, entries: &[StateEntry], targets: &mut [&mut [u8]]) -> Result<(), EngineError> {
        for (entry, target) in entries.iter().zip(targets) {
            let span = self.state.span_of_rows(entry)?;
            ensure_length(&entry.name, entry.ty, target)?;
            // In pieces: one thread cannot saturate the memory.
            let pieces = self.memory.get(span)[..target.len()].par_chunks(COPY_BYTES);
            target.par_chunks_mut(COPY_BYTES).zip(pieces).for_each(|(to, from)| to.copy_from_slice(from));
        }
        Ok(())
    }

    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        let (ty, span) = self.state.get(kind, name)?;
        write(&mut self.memory, name, ty, span, bytes)
    }

    fn memory_bytes(&self) -> usize {
        self.memory.total_bytes()
    }

    fn program(&self, id: ProgramId) -> &Program {
        &self.programs[id.0].program
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), EngineError> {
        self.timing = timing;
        Ok(())
    }

    fn take_times(&mut self) -> Result<Vec<Timed>, EngineError> {
        Ok(std::mem::take(&mut self.timed))
    }

    fn free_bytes(&self) -> Option<u64> {
        available_bytes()
    }

    fn busy_rows(&self) -> usize {
        64
    }

    fn memory_bandwidth(&self) -> Option<f64> {
        None
    }

    fn choices(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

fn write(
    memory: &mut Memory,
    name: &str,
    ty: TensorType,
    span: ChunkSpan,
    bytes: &[u8],
) -> Result<(), EngineError> {
    ensure_length(name, ty, bytes)?;
    memory.get_mut(span).copy_from_slice(bytes);
    Ok(())
}
