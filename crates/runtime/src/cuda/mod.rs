//! The CUDA engine: planned memory, ops prepared once, and the parts of a program captured as graphs.
//!
//! A part runs op by op the first time, which triggers lazy loading in libraries. The second time it is
//! captured as a graph, and from then on one call replays it. Addresses never change: state is allocated
//! once, and scratch grows in place. Inputs travel through a ring of pinned memory, so the host prepares a
//! step while others run. Each lane of a program is a stream ([`lanes`]). Collectives have no kernel: a
//! [`DeviceCommunicator`] puts them into the stream of the communication lane.

mod arena;
mod communicator;
mod host_staged;
mod lanes;
mod loaded;
mod marks;
mod nccl;
mod nccl_messages;
mod peer_copies;
mod peer_memory;
mod peer_places;
mod positions;
mod ring;
mod staging;
mod stopwatch;
mod thread_pool;
mod variants;
mod watchdog;

use crate::checks::{Checks, check_finite, is_overwritten};
use crate::collective;
use crate::engine::{Engine, Outputs, Promise, Ticket};
use crate::error::{EngineError, ensure_length};
use crate::part::{MicroSlot, Part, ProgramId, Turn};
use crate::state::StateEntry;
use crate::timing::{Timed, TimedWork, Timing};
use arena::{Arena, ArenaSpan};
use communicator::{Call, Copies, DeviceCommError, DeviceCommunicator};
use host_staged::HostStaged;
use lanes::{LaneEvents, Streams};
use loaded::{Loaded, find, prepare};
use marks::Marks;
use nccl::Nccl;
pub use nccl::{NcclGroups, groups_of_run};
pub use nccl_messages::{MessagePair, message_pairs};
use peer_copies::PeerCopies;
use positions::Passage;
use ring::{Inputs, PendingOutputs as OutputRing};
use staging::Staging;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use stopwatch::Stopwatch;
use thread_pool::map_parallel;
use variants::{Chosen, varying};
use xtrain_cuda::{CudaError, CudaKernel, Delay, Event, Gpu, Graph, Stream, Work, exclude_capture, nvtx};
use xtrain_distributed::{CommError, Communicator, Pace};
use xtrain_program::order;
use xtrain_program::{Instance, KernelTable, Location, Op, Plan, Program, Region, StateKind, ValueId};
use xtrain_tensor::TensorType;

/// The byte that poisons memory. Floats of such bytes are NaN.
const POISON: u8 = 0xFF;

/// An engine on one GPU.
pub struct CudaEngine {
    kernels: Arc<KernelTable<dyn CudaKernel>>,
    gpu: Gpu,
    // Their graphs are dropped before the communicator, which would wait for them.
    programs: Vec<Loaded>,
    communicator: Box<dyn DeviceCommunicator>,
    streams: Streams,
    arena: Arena,
    staging: Staging,
    checks: Checks,
    watch: Stopwatch,
}

impl Drop for CudaEngine {
    /// Waits for enqueued steps: their memory is freed with the engine.
    fn drop(&mut self) {
        // Also where collectives were aborted.
        let _ = self.set_waits(true);
        if let Err(error) = self.streams.synchronize() {
            tracing::debug!("the last steps on the GPU failed: {error}");
        }
        let _ = self.set_waits(false);
    }
}

/// The workspace of each op's GPU kernel, for planning a program. It needs no GPU.
pub fn cuda_workspace(
    kernels: &KernelTable<dyn CudaKernel>,
) -> impl Fn(&dyn Op, &[TensorType]) -> Vec<TensorType> {
    |op, inputs| kernels.find(op).map(|kernel| kernel.workspace(inputs)).unwrap_or_default()
}

impl CudaEngine {
    /// An engine with these kernels on `gpu`, in a run of one process.
    pub fn new(kernels: Arc<KernelTable<dyn CudaKernel>>, gpu: Gpu) -> Result<Self, EngineError> {
        let streams = Streams::new(gpu.context())?;
        let arena = Arena::new(gpu.context(), false)?;
        Ok(CudaEngine {
            kernels,
            gpu,
            communicator: Box::new(Copies::unpaced(1)),
            streams,
            arena,
            staging: Staging::default(),
            programs: Vec::new(),
            checks: Checks::default(),
            watch: Stopwatch::default(),
        })
    }

    /// The engine of one rank of a run: collectives use this communicator, through host memory.
    pub fn with_communicator(mut self, communicator: Arc<dyn Communicator>) -> Self {
        self.communicator = Box::new(HostStaged::new(communicator));
        self
    }

    /// The engine of rank 0 of `world_size` whose others do not exist, for measurements: copies within the
    /// GPU replace collectives. With a `pace`, those that are issued together take its time at least.
    ///
    /// # Errors
    /// The kernel that delays a stream cannot be compiled.
    pub fn as_rank_of(mut self, world_size: usize, pace: Option<Pace>) -> Result<Self, EngineError> {
        let with_delay = |pace| Ok::<_, CudaError>((pace, Delay::new(&self.gpu)?));
        let pace = pace.map(with_delay).transpose()?;
        self.communicator = Box::new(Copies { world_size, pace });
        Ok(self)
    }

    /// The engine of one rank of a run: collectives use NCCL, and are parts of graphs. `host` knows how long
    /// the GPU may take, and whether the run has ended on another rank.
    ///
    /// # Errors
    /// The system refuses a thread, the GPU a stream.
    pub fn with_nccl(mut self, nccl: NcclGroups, host: Arc<dyn Communicator>) -> Result<Self, EngineError> {
        self.communicator = Box::new(Nccl::new(nccl, host, self.gpu.context())?);
        Ok(self)
    }

    /// The engine of one rank of a run on one host: each GPU copies to the memory of the others, as a part
    /// of graphs. `host` connects the ranks. If `names`, graphs tell which collectives they have come to, so
    /// that an error can name those that do not complete.
    ///
    /// # Errors
    /// The GPU has too little memory; the system refuses a thread.
    pub fn with_peer_copies(mut self, host: Arc<dyn Communicator>, names: bool) -> Result<Self, EngineError> {
        self.arena = Arena::new(self.gpu.context(), true)?;
        self.communicator = Box::new(PeerCopies::new(host, self.gpu.context(), names)?);
        Ok(self)
    }

    /// Tells the thread that watches collectives, if there is one, that the host begins or ends to wait for
    /// the GPU.
    fn set_waits(&self, waits: bool) -> Result<(), CommError> {
        self.communicator.watchdog().map_or(Ok(()), |watchdog| watchdog.set_waits(waits))
    }

    /// Runs what may wait for the GPU, and so for other ranks.
    fn waiting<T>(
        &mut self,
        wait: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.set_waits(true)?;
        let waited = wait(self);
        // The reason, where collectives were aborted.
        self.set_waits(false)?;
        waited
    }

    /// Enqueues a part, with what its collectives need before and after it.
    fn run_part(&mut self, id: ProgramId, part: Part) -> Result<(), EngineError> {
        let part = self.programs[id.0].distinct(part);
        let loaded = &mut self.programs[id.0];
        if !loaded.is_connected {
            self.communicator.connect(id, loaded, &self.arena)?;
            loaded.is_connected = true;
        }
        let begin = self.watch.begin(self.streams.compute())?;
        let loaded = &mut self.programs[id.0];
        loaded.inputs.send(self.arena.memory(loaded.input_span), self.streams.compute())?;
        self.watch.end(begin, id, TimedWork::Inputs, self.streams.compute())?;
        self.communicator.begin_part(id, &self.programs[id.0], part, self.streams.compute())?;
        self.launch_part(id, part)?;
        Ok(self.communicator.end_part(id, &self.programs[id.0], part, self.streams.compute())?)
    }

    /// Enqueues a part, or waits for it if its ops are timed.
    fn launch_part(&mut self, id: ProgramId, part: Part) -> Result<(), EngineError> {
        let chosen = self.chosen(id, part);
        if let Timing::Ops { repeats } = self.watch.timing() {
            return self.run_ops(id, part, chosen, repeats);
        }
        let begin = self.watch.begin(self.streams.compute())?;
        let is_graph = self.records(id, part) && self.programs[id.0].graphs.contains_key(&part);
        if is_graph {
            if !self.programs[id.0].graphs[&part].contains_key(&chosen) {
                let graph = Graph::record(self.streams.compute(), || {
                    self.enqueue_part(id, part, &EnqueueMode::plain(&chosen, true))
                })?;
                self.programs[id.0].add_graph(part, chosen.clone(), graph.instantiate()?);
            }
            self.programs[id.0].graph(part, &chosen).launch(self.streams.compute())?;
        } else {
            let started = Instant::now();
            self.enqueue_part(id, part, &EnqueueMode::plain(&chosen, false))?;
            tracing::debug!("{part:?} enqueued op by op in {:.3} s", started.elapsed().as_secs_f64());
            self.programs[id.0].graphs.entry(part).or_default();
        }
        if let Some(watchdog) = self.communicator.watchdog() {
            watchdog.enqueued(id, part, is_graph, self.streams.compute())?;
        }
        Ok(self.watch.end(begin, id, TimedWork::Part(part), self.streams.compute())?)
    }

    /// The variants of a part's work for the staged inputs.
    fn chosen(&mut self, id: ProgramId, part: Part) -> Chosen {
        let loaded = &mut self.programs[id.0];
        // Each rank would capture a graph for other variants when it first needs them.
        if self.communicator.is_captured_together() && loaded.has_collective(part) {
            return Chosen::default();
        }
        let Loaded { program, varying, inputs, .. } = loaded;
        Chosen::of_inputs(program, part, varying, inputs.staged(), &self.kernels)
    }

    /// Sets the checks of the runs that follow. With any check, ops run one by one instead of as a graph.
    pub fn set_checks(&mut self, checks: Checks) {
        self.checks = checks;
    }

    /// Prepares the instances of `part`: first one of each kind, which compiles kernels and chooses
    /// algorithms, then the other blocks' instances, which reuse both.
    fn prepare_part(&mut self, id: ProgramId, part: Part) -> Result<(), EngineError> {
        let (first, slot) = (part.is_first(), part.slot());
        let loaded = &self.programs[id.0];
        let (mut kinds, mut leading, mut following) = (HashSet::new(), Vec::new(), Vec::new());
        for (index, instance) in loaded.program.instances.iter().enumerate() {
            let (of_slot, variant) = loaded.variant(index, slot, first);
            let is_ready = loaded.works[index][of_slot][variant].is_some();
            let is_collective = instance.code.op().collective().is_some();
            if !part.includes(instance) || is_ready || is_collective {
                continue;
            }
            let kind = (instance.code.op().name(), &instance.origin.site, instance.origin.role.name());
            if kinds.insert(kind) { leading.push(index) } else { following.push(index) }
        }
        let (gpu, arena, kernels) = (&self.gpu, &self.arena, &self.kernels);
        let make = |&index: &usize| {
            let kernel = find(kernels, &loaded.program.instances[index], gpu)?;
            prepare(kernel, gpu, arena, loaded, (index, slot), first)
        };
        let works = map_parallel(&leading, make)?.into_iter().chain(map_parallel(&following, make)?);
        let loaded = &mut self.programs[id.0];
        for (index, work) in leading.into_iter().chain(following).zip(works) {
            *loaded.work(index, slot, first) = Some(work);
        }
        Ok(())
    }

    /// Enqueues the instances of `part`, each on the stream of its lane.
    fn enqueue_part(&self, id: ProgramId, part: Part, mode: &EnqueueMode<'_>) -> Result<(), EngineError> {
        let loaded = &self.programs[id.0];
        let lanes = loaded.lanes.as_ref();
        let mark = |event: Option<&Event>, stream: &Stream| {
            event.map_or(Ok(()), |event| marks::mark(event, stream, mode.recording))
        };
        let mut marks_of_ops = mode.marks.map(|marks| marks.ops.iter());
        mark(mode.marks.map(|marks| &marks.begin), self.streams.compute())?;
        lanes.map_or(Ok(()), |lanes| lanes.begin(&self.streams))?;
        for run in loaded.runs(part, self.communicator.is_recordable()) {
            let instances = &loaded.program.instances[run.clone()];
            let stream = self.streams.get(instances[0].lane);
            for index in run.clone() {
                lanes.map_or(Ok(()), |lanes| lanes.wait(&loaded.program, part, index, stream))?;
            }
            if part.runs(&instances[0]) {
                let marks = marks_of_ops.as_mut().and_then(Iterator::next);
                mark(marks.and_then(|marks| marks.begin.as_ref()), stream)?;
                self.enqueue_run(id, run.clone(), part, mode)?;
                mark(marks.map(|marks| &marks.end), stream)?;
                instances
                    .iter()
                    .try_for_each(|instance| self.check_outputs(loaded, instance, part.slot()))?;
            }
            for index in run {
                lanes.map_or(Ok(()), |lanes| lanes.done(index, stream))?;
            }
        }
        lanes.map_or(Ok(()), |lanes| lanes.end(&self.streams))?;
        Ok(mark(mode.marks.map(|marks| &marks.end), self.streams.compute())?)
    }

    /// Enqueues an instance, or several collectives together, on the stream of the lane.
    fn enqueue_run(
        &self,
        id: ProgramId,
        run: Range<usize>,
        part: Part,
        mode: &EnqueueMode<'_>,
    ) -> Result<(), EngineError> {
        let loaded = &self.programs[id.0];
        let instances = &loaded.program.instances[run.clone()];
        let (index, instance) = (run.start, &instances[0]);
        let (first, stream) = (part.is_first(), self.streams.get(instance.lane));
        let _range = (!mode.recording)
            .then(|| nvtx::range(format_args!("{} {}", instance.code.op().name(), instance.origin)));
        if self.checks.poison {
            run.clone().try_for_each(|index| self.poison(loaded, index, part))?;
        }
        let calls: Vec<Call<'_>> =
            run.clone().filter_map(|index| self.call(id, index, part.slot())).collect();
        if !calls.is_empty() {
            let watchdog = self.communicator.watchdog();
            let passes = |passage| {
                watchdog
                    .map_or(Ok(()), |watchdog| watchdog.passes(id, index, passage, stream, mode.recording))
            };
            passes(Passage::Before)?;
            let enqueued = (0..mode.repeats).try_for_each(|_| self.communicator.enqueue(&calls, stream));
            enqueued.map_err(|error| match error {
                DeviceCommError::Cuda(error) => EngineError::from(error),
                DeviceCommError::Communicator(error) => collective::failed(instance, part, error),
            })?;
            return Ok(passes(Passage::After)?);
        }
        let _no_capture = (!mode.recording).then(exclude_capture);
        loaded.copy_in_place_inputs(index, part.slot(), &self.arena, stream)?;
        let (slot, variant) = loaded.variant(index, part.slot(), first);
        let work = loaded.works[index][slot][variant].as_ref().expect("prepared before");
        let of_inputs = mode.chosen.of(index);
        Ok((0..mode.repeats).try_for_each(|_| work.enqueue_variant(of_inputs, stream))?)
    }

    /// The collective of an instance, if it is one.
    fn call(&self, id: ProgramId, index: usize, slot: MicroSlot) -> Option<Call<'_>> {
        let loaded = &self.programs[id.0];
        let instance = &loaded.program.instances[index];
        let (collective, groups) = instance.code.op().collective()?;
        let input = instance.inputs.first().copied();
        let output = instance.outputs.first().map(|o| o.value);
        let span = |value: ValueId| self.arena.memory(loaded.span(value, slot));
        // A message may have one of both.
        let any = input.or(output).map(span)?;
        let [input, output] = [input, output].map(|value| value.map_or(any.part(0..0), span));
        Some(Call { program: id, instance: index, slot, collective, groups, input, output })
    }

    /// Makes the checks that follow an instance.
    fn check_outputs(
        &self,
        loaded: &Loaded,
        instance: &Instance,
        slot: MicroSlot,
    ) -> Result<(), EngineError> {
        if self.checks == Checks::default() {
            return Ok(());
        }
        let _no_capture = exclude_capture();
        if self.checks.poison {
            self.check_padding(loaded, instance, slot)?;
        }
        if self.checks.numerics {
            let stream = self.streams.get(instance.lane);
            check_finite(&loaded.program, instance, |output| {
                let span = loaded.span(instance.outputs[output].value, slot);
                Ok(self.arena.memory(span).read(stream)?)
            })?;
        }
        Ok(())
    }

    /// True if `part` is recorded as a graph. Otherwise it always runs op by op.
    fn records(&self, id: ProgramId, part: Part) -> bool {
        self.checks == Checks::default()
            && (self.communicator.is_recordable() || !self.programs[id.0].has_collective(part))
    }

    /// Runs `part` and times each op. Where the part may be captured by now, it runs as a graph with events
    /// in it, so that the host's speed does not count.
    fn run_ops(
        &mut self,
        id: ProgramId,
        part: Part,
        chosen: Chosen,
        repeats: usize,
    ) -> Result<(), EngineError> {
        let marks = || {
            let loaded = &self.programs[id.0];
            let runs = loaded.runs(part, self.communicator.is_recordable());
            Marks::new(&loaded.program, loaded.lanes.as_ref(), part, runs, self.gpu.context())
        };
        if !self.records(id, part) || !self.programs[id.0].graphs.contains_key(&part) {
            let marks = marks()?;
            let mode = EnqueueMode { recording: false, chosen: &chosen, repeats, marks: Some(&marks) };
            self.enqueue_part(id, part, &mode)?;
            self.programs[id.0].graphs.entry(part).or_default();
            self.streams.compute().synchronize()?;
            return Ok(self.watch.ops(id, part, &marks)?);
        }
        let key = (part, chosen, repeats);
        if !self.programs[id.0].timed.contains_key(&key) {
            let marks = marks()?;
            let mode = EnqueueMode { recording: true, chosen: &key.1, repeats, marks: Some(&marks) };
            let record = || self.enqueue_part(id, part, &mode);
            let graph = Graph::record(self.streams.compute(), record)?.instantiate()?;
            self.programs[id.0].timed.insert(key.clone(), (graph, marks));
        }
        let loaded = &mut self.programs[id.0];
        let Some((graph, _)) = loaded.timed.get_mut(&key) else { unreachable!("it is there now") };
        graph.launch(self.streams.compute())?;
        self.streams.compute().synchronize()?;
        Ok(self.watch.ops(id, part, &loaded.timed[&key].1)?)
    }

    /// Poisons the outputs that an instance must overwrite, the padding after each output, and the workspace.
    fn poison(&self, loaded: &Loaded, index: usize, part: Part) -> Result<(), EngineError> {
        let instance = &loaded.program.instances[index];
        let stream = self.streams.get(instance.lane);
        let fill = |span| self.arena.memory(span).fill(POISON, stream);
        let op = instance.code.op();
        for (k, o) in instance.outputs.iter().enumerate() {
            let (ty, span) = (loaded.program.ty(o.value), loaded.span(o.value, part.slot()));
            if is_overwritten(op, k, o.mode, part.is_first()) && ty.dtype.is_float() {
                fill(span)?;
            }
            span.padding().map_or(Ok(()), fill)?;
        }
        loaded.workspaces[index].iter().try_for_each(|&(_, span)| fill(span))?;
        Ok(())
    }

    /// Fails if an instance has written to the poisoned padding after an output.
    fn check_padding(
        &self,
        loaded: &Loaded,
        instance: &Instance,
        slot: MicroSlot,
    ) -> Result<(), EngineError> {
        let stream = self.streams.get(instance.lane);
        for (output, o) in instance.outputs.iter().enumerate() {
            let Some(padding) = loaded.span(o.value, slot).padding() else { continue };
            if self.arena.memory(padding).read(stream)?.iter().any(|byte| *byte != POISON) {
                return Err(EngineError::Overrun {
                    op: instance.code.op().name(),
                    site: instance.origin.to_string(),
                    role: instance.origin.role.name(),
                    output,
                    ty: loaded.program.ty(o.value).into(),
                });
            }
        }
        Ok(())
    }
}

/// The places for the works of an instance, of whose chunk there are so many slots.
fn empty_works(slots: Option<usize>) -> Vec<[Option<Work>; 2]> {
    (0..slots.unwrap_or(1)).map(|_| [None, None]).collect()
}

/// The mode in which the instances of a part are enqueued.
struct EnqueueMode<'a> {
    /// True while a graph is captured.
    recording: bool,
    /// The variants of the ops whose work varies.
    chosen: &'a Chosen,
    /// Runs of each op.
    repeats: usize,
    /// The events around the ops, if they are timed.
    marks: Option<&'a Marks>,
}

impl<'a> EnqueueMode<'a> {
    /// The mode without repeats and events.
    fn plain(chosen: &'a Chosen, recording: bool) -> Self {
        EnqueueMode { recording, chosen, repeats: 1, marks: None }
    }
}

impl Engine for CudaEngine {
    fn load(&mut self, program: Program) -> Result<ProgramId, EngineError> {
        let program = self.checks.prepared(program);
        collective::check_groups(&program, self.communicator.world_size())?;
        for instance in program.instances.iter().filter(|i| i.code.op().collective().is_none()) {
            find(&self.kernels, instance, &self.gpu)?;
        }
        let started = Instant::now();
        let plan = Plan::new(&program, &cuda_workspace(&self.kernels));
        self.streams.add_for(&program)?;
        // Work in progress may use the memory that is written below, and wait for other ranks.
        self.waiting(|engine| Ok(engine.streams.compute().synchronize()?))?;
        let id = ProgramId(self.programs.len());
        self.communicator.reserve(id, &program, self.streams.compute())?;
        let planned = started.elapsed();
        let io = self.arena.allocate_for(&program, &plan, self.streams.compute())?;
        // Kernels are timed on streams of their own, which do not wait for this one.
        self.streams.compute().synchronize()?;
        let placed = started.elapsed();
        let io_bytes = plan.region_bytes[Region::Io as usize];
        let place = |id: ValueId| {
            let at = plan.locations[id.0 as usize]?;
            match at.region {
                Region::State => self.arena.state().span(program.value(id)),
                Region::Io => Some(io.part(at.offset, at.bytes)),
                Region::Scratch => Some(ArenaSpan::scratch(at.offset, at.bytes)),
                Region::Slots => Some(io.part(io_bytes + at.offset, at.bytes)),
            }
        };
        let is_in_slots = |at: &Option<Location>| at.is_some_and(|at| at.region == Region::Slots);
        let is_in_slots = plan.locations.iter().map(is_in_slots).collect();
        let spans = program.ids().map(place).collect();
        let workspace = |of: &Vec<(TensorType, Location)>| {
            of.iter().map(|&(ty, at)| (ty, ArenaSpan::scratch(at.offset, at.bytes))).collect()
        };
        let workspaces = plan.workspaces.iter().map(workspace).collect();
        let context = self.gpu.context();
        let output_bytes = io_bytes - plan.input_bytes;
        let range_of = |id: ValueId, base: usize| {
            let at = plan.location(id);
            at.offset - base..at.offset - base + at.bytes
        };
        let input_places: HashMap<Arc<str>, _> =
            program.inputs().map(|(name, id)| (name, (program.ty(id), range_of(id, 0)))).collect();
        let staged = |name: &str| input_places.get(name).map(|(_, range)| range.clone());
        let varying = varying(&program, &self.kernels, staged);
        let output_places =
            Arc::new(program.outputs().map(|(name, id)| (name, range_of(id, plan.input_bytes))).collect());
        let loaded = Loaded {
            input_span: io.part(0, plan.input_bytes),
            inputs: Inputs::new(context, plan.input_bytes)?,
            output_span: io.part(plan.input_bytes, output_bytes),
            outputs: OutputRing::new(context, output_bytes)?,
            output_places,
            input_places,
            works: program
                .instances
                .iter()
                .map(|i| empty_works(program.slots.get(i.chunk).copied()))
                .collect(),
            is_in_slots,
            slot_bytes: plan.slot_bytes,
            varying,
            graphs: HashMap::new(),
            timed: HashMap::new(),
            spans,
            is_connected: false,
            workspaces,
            lanes: LaneEvents::new(&program, context)?,
            runs: order::runs(&program),
            program,
        };
        self.programs.push(loaded);
        // Prepares all parts now: timing algorithms overwrites values that later parts read.
        let of_chunks = self.programs[id.0].program.slots.clone().into_iter().enumerate();
        let slots =
            of_chunks.flat_map(|(chunk, slots)| (1..slots).map(move |number| MicroSlot { chunk, number }));
        let of_slots = slots.flat_map(|slot| [Turn::First, Turn::Next].map(|turn| (turn, slot)));
        let of_slots =
            of_slots.flat_map(|(turn, slot)| [Part::Forward(turn, slot), Part::Backward(turn, slot)]);
        let mut parts = [Part::Whole, Part::Next].into_iter().chain(of_slots);
        let prepared = parts.try_for_each(|part| self.prepare_part(id, part));
        if prepared.is_err() {
            self.programs.pop();
        }
        prepared?;
        tracing::debug!(
            "a program of {} ops: planned in {:.3} s, memory allocated in {:.3} s, prepared in {:.3} s",
            self.programs[id.0].works.len(),
            planned.as_secs_f64(),
            (placed - planned).as_secs_f64(),
            (started.elapsed() - placed).as_secs_f64()
        );
        Ok(id)
    }

    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        let loaded = &mut self.programs[program.0];
        let Some((ty, range)) = loaded.input_places.get(name) else {
            return Err(EngineError::Unknown { what: "input", name: name.into() });
        };
        ensure_length(name, *ty, bytes)?;
        loaded.inputs.staged()[range.clone()].copy_from_slice(bytes);
        Ok(())
    }

    fn run(&mut self, id: ProgramId, part: Part) -> Result<(), EngineError> {
        self.waiting(|engine| engine.run_part(id, part))
    }

    fn fetch(&mut self, program: ProgramId) -> Result<Ticket, EngineError> {
        let begin = self.watch.begin(self.streams.compute())?;
        let loaded = &mut self.programs[program.0];
        let fetch = loaded.outputs.fetch(self.arena.memory(loaded.output_span), self.streams.compute())?;
        self.watch.end(begin, program, TimedWork::Outputs, self.streams.compute())?;
        Ok(Ticket(Promise::Copying { program, fetch }))
    }

    fn is_ready(&self, ticket: &Ticket) -> Result<bool, EngineError> {
        match &ticket.0 {
            Promise::Arrived(_) => Ok(true),
            Promise::Copying { program, fetch } => {
                Ok(self.programs[program.0].outputs.has_arrived(*fetch)?)
            }
        }
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Outputs, EngineError> {
        match ticket.0 {
            Promise::Arrived(outputs) => Ok(outputs),
            Promise::Copying { program, fetch } => self.waiting(|engine| {
                let loaded = &mut engine.programs[program.0];
                let unknown = || EngineError::Unknown { what: "ticket", name: fetch.to_string() };
                let bytes = loaded.outputs.take(fetch)?.ok_or_else(unknown)?;
                Ok(Outputs { bytes, places: loaded.output_places.clone() })
            }),
        }
    }

    fn state_entries(&self) -> Vec<StateEntry> {
        self.arena.state().entries()
    }

    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError> {
        let (ty, _) = self.arena.state().get(kind, name)?;
        self.read_state_part(kind, name, 0..ty.bytes())
    }

    fn read_state_part(
        &mut self,
        kind: StateKind,
        name: &str,
        part: Range<usize>,
    ) -> Result<Vec<u8>, EngineError> {
        let (_, span) = self.arena.state().get(kind, name)?;
        let span = span.part(part.start, part.len());
        let mut bytes = vec![0u8; part.len()];
        self.waiting(|engine| {
            let copies = vec![(span, &mut bytes[..])];
            Ok(engine.staging.read(&engine.arena, copies, engine.streams.compute())?)
        })?;
        Ok(bytes)
    }

    fn copy_state(&mut self, entries: &[StateEntry], targets: &mut [&mut [u8]]) -> Result<(), EngineError> {
        let mut copies = Vec::with_capacity(entries.len());
        for (entry, target) in entries.iter().zip(targets) {
            let span = self.arena.state().span_of_rows(entry)?;
            ensure_length(&entry.name, entry.ty, target)?;
            copies.push((span, &mut **target));
        }
        self.waiting(|engine| Ok(engine.staging.read(&engine.arena, copies, engine.streams.compute())?))
    }

    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        let (ty, span) = self.arena.state().get(kind, name)?;
        ensure_length(name, ty, bytes)?;
        self.waiting(|engine| {
            Ok(engine.staging.write(&engine.arena, span, bytes, engine.streams.compute())?)
        })
    }

    fn memory_bytes(&self) -> usize {
        self.arena.planned_bytes()
    }

    fn program(&self, id: ProgramId) -> &Program {
        &self.programs[id.0].program
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), EngineError> {
        Ok(self.watch.set(timing, self.streams.compute())?)
    }

    fn take_times(&mut self) -> Result<Vec<Timed>, EngineError> {
        self.watch.take()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.gpu.context().memory().ok().map(|(free, _)| free as u64)
    }

    fn busy_rows(&self) -> usize {
        512
    }

    fn memory_bandwidth(&self) -> Option<f64> {
        Some(self.gpu.info().memory_bandwidth).filter(|bandwidth| *bandwidth > 0.0)
    }

    fn choices(&self) -> BTreeMap<String, String> {
        self.gpu.choices()
    }
}
