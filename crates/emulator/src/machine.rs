//! The emulated machine: devices, streams, events and graphs.

mod capture;
mod collective;
mod module;

use crate::gemm;
use crate::memory::{Memory, Physical};
use crate::nccl::CallGroup;
use crate::queue::{ItemId, Queue};
use crate::random::Random;
use crate::settings::{Ordering, ProcessDevices, SETTINGS};
use crate::status::{self, Status};
use crate::work::{Failure, WorkItem, run_launches};
use capture::{Capture, Graph, GraphNode};
pub(crate) use collective::Communicator;
use collective::Waiting;
use module::LoadedModule;
pub(crate) use module::{Function, PORTABLE_CLUSTER};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// The state behind the exported functions.
pub(crate) struct Machine {
    pub(crate) settings: ProcessDevices,
    pub(crate) devices: Vec<MachineDevice>,
    pub(crate) streams: HashMap<usize, Stream>,
    pub(crate) events: HashMap<usize, MachineEvent>,
    pub(crate) modules: HashMap<usize, LoadedModule>,
    pub(crate) functions: HashMap<usize, Function>,
    pub(crate) graphs: HashMap<usize, Graph>,
    pub(crate) captures: HashMap<usize, Capture>,
    pub(crate) blas: gemm::Objects,
    pub(crate) communicators: HashMap<usize, Communicator>,
    /// Communicators that were aborted.
    aborted: HashSet<usize>,
    /// CommitGroups of NCCL calls that wait for other ranks.
    waiting: Vec<Waiting>,
    /// Waits for words of device memory, each with its device, address and least value.
    blocked: Vec<(ItemId, usize, u64, u32)>,
    /// The group that `swap` holds back, with its stream.
    held_back: Option<(usize, Arc<CallGroup>)>,
    /// Pinned host memory: lengths by address.
    pub(crate) pinned: BTreeMap<usize, usize>,
    /// Warp instructions executed so far.
    pub(crate) steps: u64,
    queue: Queue,
    random: Random,
    next_handle: usize,
    /// Count of waits, events, copies, edges and collectives so far, for `omit`.
    orderings: [usize; 5],
    /// Count of collectives of the rank of `swap`.
    swappable: usize,
}

/// A device.
pub(crate) struct MachineDevice {
    pub(crate) memory: Memory,
    /// Reserved addresses by start, with their length.
    pub(crate) reservations: BTreeMap<u64, u64>,
    /// Physical memory by handle, with the number of its mappings.
    pub(crate) physical: HashMap<u64, (Physical, usize)>,
    /// Reference count of the primary context.
    pub(crate) holders: usize,
    /// The first failure of its work. Every call reports it until the context is released.
    pub(crate) failure: Option<Failure>,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    /// The last item of the stream.
    tail: Option<ItemId>,
    /// The nominal time at which that item ends, in seconds.
    ends: f64,
    /// The capture that the stream takes part in, and its latest nodes there.
    pub(crate) captured: Option<(usize, Vec<usize>)>,
}

#[derive(Default)]
pub(crate) struct MachineEvent {
    /// The item that last recorded it.
    recorded: Option<ItemId>,
    /// The nominal time of that recording, in seconds.
    pub(crate) time: Option<f64>,
    /// The capture that last recorded it, and the nodes before the event.
    pub(crate) captured: Option<(usize, Vec<usize>)>,
    /// True if a capture that has ended recorded it last: no call may use it then.
    pub(crate) was_captured: bool,
}

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

/// The machine, created on first use. None if its settings cannot be parsed.
pub(crate) fn lock() -> MutexGuard<'static, Option<Machine>> {
    let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if machine.is_none() {
        *machine = SETTINGS.clone().map(Machine::new);
    }
    machine
}

/// The most launches that begin before the one before them has ended, one after the other.
const MOST_EARLY: usize = 63;

/// Pause after which work that waits for other ranks is looked at again.
const PAUSE: Duration = Duration::from_micros(100);

/// Runs work until this item has run.
pub(crate) fn finish(item: Option<ItemId>) {
    finish_while(|machine| item.is_some_and(|item| machine.queue.is_pending(item)));
}

/// Runs all work of a device.
pub(crate) fn finish_device(device: usize) {
    finish_while(|machine| machine.queue.has_work_of(device));
}

/// Runs work while this is true. Other threads may use the machine between two items, so that ranks that are
/// threads of one process do not wait for each other.
fn finish_while(is_pending: impl Fn(&Machine) -> bool) {
    loop {
        let mut guard = lock();
        let Some(machine) = guard.as_mut().filter(|machine| is_pending(machine)) else { return };
        if machine.run_one() {
            continue;
        }
        if machine.waiting.is_empty() && machine.blocked.is_empty() {
            return;
        }
        drop(guard);
        thread::sleep(PAUSE);
    }
}

/// Waits while this is true, without running work.
pub(crate) fn wait_while(is_true: impl Fn(&Machine) -> bool) {
    while lock().as_ref().is_some_and(&is_true) {
        thread::sleep(PAUSE);
    }
}

/// True if a word that grows has grown to this value, or beyond it and around.
fn is_reached(value: u32, least: u32) -> bool {
    value.wrapping_sub(least) as i32 >= 0
}

impl Machine {
    fn new(settings: ProcessDevices) -> Machine {
        let device = || MachineDevice {
            memory: Memory::new(settings.memory_bytes),
            reservations: BTreeMap::new(),
            physical: HashMap::new(),
            holders: 0,
            failure: None,
        };
        Machine {
            devices: (0..settings.devices).map(|_| device()).collect(),
            random: Random::new(settings.seed),
            settings,
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            captures: HashMap::new(),
            blas: gemm::Objects::default(),
            communicators: HashMap::new(),
            aborted: HashSet::new(),
            waiting: Vec::new(),
            blocked: Vec::new(),
            held_back: None,
            pinned: BTreeMap::new(),
            queue: Queue::default(),
            steps: 0,
            next_handle: 1,
            orderings: [0; 5],
            swappable: 0,
        }
    }

    /// A new handle. Handles are never reused.
    pub(crate) fn handle(&mut self) -> usize {
        // Handles look like aligned pointers.
        self.next_handle += 1;
        self.next_handle << 4
    }

    /// Counts one wait, event, copy or edge; true if it must be left out.
    pub(crate) fn omits(&mut self, what: Ordering) -> bool {
        let number = self.orderings[what as usize];
        self.orderings[what as usize] += 1;
        self.settings.omit.is_some_and(|omit| omit.what == what && omit.number == number)
    }

    pub(crate) fn new_stream(&mut self, device: usize) -> usize {
        let handle = self.handle();
        self.streams.insert(handle, Stream { device, tail: None, ends: 0.0, captured: None });
        handle
    }

    /// Adds work to a stream, or to the graph that the stream captures.
    pub(crate) fn put(&mut self, stream: usize, work: WorkItem) -> Result<(), Status> {
        if matches!(
            work,
            WorkItem::Upload { .. }
                | WorkItem::Download { .. }
                | WorkItem::Copy { .. }
                | WorkItem::Fill { .. }
        ) && self.omits(Ordering::Copy)
        {
            return Ok(());
        }
        let of = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        if let Some((capture, tail)) = &mut of.captured {
            let capture = self.captures.get_mut(capture).ok_or(status::INVALID_HANDLE)?;
            let node = capture.add(GraphNode { work, after: std::mem::take(tail), stream });
            tail.push(node);
            return Ok(());
        }
        let (device, tail, ends) = (of.device, of.tail, of.ends);
        let item = self.add(device, work, tail.into_iter().collect(), ends)?;
        self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?.tail = Some(item);
        Ok(())
    }

    /// Records an event at the end of a stream.
    pub(crate) fn record(&mut self, event: usize, stream: usize, is_external: bool) -> Result<(), Status> {
        if !self.events.contains_key(&event) {
            return Err(status::INVALID_HANDLE);
        }
        let omitted = self.omits(Ordering::Event);
        let of = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        if let Some((capture, tail)) = of.captured.clone() {
            if is_external {
                return if omitted { Ok(()) } else { self.put(stream, WorkItem::Record(event)) };
            }
            let event = self.events.get_mut(&event).ok_or(status::INVALID_HANDLE)?;
            event.captured = Some((capture, if omitted { Vec::new() } else { tail }));
            event.was_captured = false;
            return Ok(());
        }
        let after: Vec<ItemId> = of.tail.into_iter().filter(|_| !omitted).collect();
        let item = self.queue.add(of.device, WorkItem::Record(event), &after, of.ends);
        if !omitted {
            of.tail = Some(item);
        }
        let event = self.events.get_mut(&event).ok_or(status::INVALID_HANDLE)?;
        *event = MachineEvent { recorded: Some(item), ..MachineEvent::default() };
        Ok(())
    }

    /// Makes later work of a stream wait for an event.
    pub(crate) fn wait(&mut self, stream: usize, event: usize) -> Result<(), Status> {
        let omitted = self.omits(Ordering::Wait);
        let event = self.events.get(&event).ok_or(status::INVALID_HANDLE)?;
        if event.was_captured {
            return Err(status::CAPTURED_EVENT);
        }
        let of = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        match (&event.captured, &mut of.captured) {
            (Some((of_event, nodes)), captured) => {
                let (capture, tail) = captured.get_or_insert_with(|| (*of_event, Vec::new()));
                if capture != of_event {
                    return Err(self.invalidate_capture(*of_event, status::CAPTURE_MERGE));
                }
                if omitted {
                    return Ok(());
                }
                tail.extend(nodes);
                tail.sort_unstable();
                tail.dedup();
            }
            // A capture cannot wait for work outside of it, even if that work has ended.
            (None, Some((capture, _))) => {
                let capture = *capture;
                if event.recorded.is_some() {
                    return Err(self.invalidate_capture(capture, status::CAPTURE_ISOLATION));
                }
            }
            (None, None) => {
                if omitted {
                    return Ok(());
                }
                let after: Vec<ItemId> = of.tail.into_iter().chain(event.recorded).collect();
                let begins = of.ends.max(event.time.unwrap_or(0.0));
                of.tail = Some(self.queue.add(of.device, WorkItem::Nothing, &after, begins));
            }
        }
        Ok(())
    }

    /// Adds all work of a graph to a stream, after earlier launches of the same graph.
    pub(crate) fn launch(&mut self, graph: usize, stream: usize) -> Result<(), Status> {
        let of = self.streams.get(&stream).ok_or(status::INVALID_HANDLE)?;
        if of.captured.is_some() {
            return Err(status::NOT_SUPPORTED);
        }
        let (device, ends) = (of.device, of.ends);
        let Graph { nodes, last } = self.graphs.get(&graph).ok_or(status::INVALID_HANDLE)?.clone();
        let before: Vec<ItemId> = of.tail.into_iter().chain(last).collect();
        let mut items: Vec<ItemId> = Vec::with_capacity(nodes.len());
        for node in nodes.iter() {
            let mut after: Vec<ItemId> = Vec::with_capacity(node.after.len());
            for &before in &node.after {
                if !self.omits(Ordering::Edge) {
                    after.push(items[before]);
                }
            }
            if node.after.is_empty() {
                after.extend(&before);
            }
            let item = self.add(device, node.work.clone(), after, ends)?;
            if let WorkItem::Record(event) = node.work
                && let Some(event) = self.events.get_mut(&event)
            {
                (event.recorded, event.time) = (Some(item), None);
            }
            items.push(item);
        }
        items.extend(before);
        let end = self.queue.add(device, WorkItem::Nothing, &items, ends);
        self.graphs.get_mut(&graph).ok_or(status::INVALID_HANDLE)?.last = Some(end);
        self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?.tail = Some(end);
        Ok(())
    }

    /// Adds work to the queue. CommitGroups of one communicator run in the order in which they are added.
    fn add(
        &mut self,
        device: usize,
        work: WorkItem,
        mut after: Vec<ItemId>,
        begins: f64,
    ) -> Result<ItemId, Status> {
        let WorkItem::Collective(group) = &work else {
            return Ok(self.queue.add(device, work, &after, begins));
        };
        let handle = group.communicator;
        if self.aborted.contains(&handle) {
            return Ok(self.queue.add(device, WorkItem::Nothing, &after, begins));
        }
        let Some(communicator) = self.communicators.get_mut(&handle) else {
            let text = "NCCL: a graph with collectives of a communicator that was destroyed is launched";
            return Err(self.fail(device, Failure { status: status::LAUNCH_FAILED, text: text.into() }));
        };
        after.extend(communicator.tail);
        let item = self.queue.add(device, work, &after, begins);
        communicator.tail = Some(item);
        communicator.issued += 1;
        Ok(item)
    }

    /// Runs one item; false if none is ready.
    fn run_one(&mut self) -> bool {
        self.admit();
        self.look_at_words();
        let Some(taken) = self.queue.take(&mut self.random) else { return false };
        let device = &mut self.devices[taken.device];
        let (mut ran, mut early) = (Ok(()), Vec::new());
        if device.failure.is_none() {
            if let WorkItem::Await { source, least } = taken.work {
                match device.memory.signal(source) {
                    Some(value) if is_reached(value, least) => {}
                    Some(_) => {
                        self.blocked.push((taken.id, taken.device, source, least));
                        self.queue.put_back(taken);
                        return true;
                    }
                    None => {
                        let what = device.memory.describe(source, 4);
                        let text = format!("a wait for a word out of bounds: {what}");
                        ran = Err(Failure { status: status::ILLEGAL_ADDRESS, text });
                    }
                }
            } else if let WorkItem::Collective(group) = &taken.work {
                let group = group.clone();
                match self.run_collective(&group, &taken) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.queue.put_back(taken);
                        return true;
                    }
                    Err(failure) => ran = Err(failure),
                }
            } else if let WorkItem::Launch(..) = taken.work {
                while early.len() < MOST_EARLY
                    && let Some(next) = self.queue.take_early(early.last().unwrap_or(&taken))
                {
                    early.push(next);
                }
                let launches = std::iter::once(&taken).chain(&early).filter_map(|taken| match &taken.work {
                    WorkItem::Launch(launch, _) => Some(&**launch),
                    _ => None,
                });
                ran =
                    run_launches(launches, &device.memory, &mut self.random).map(|steps| self.steps += steps);
            } else {
                ran = taken.work.run(&device.memory);
            }
        }
        if let Err(failure) = ran {
            eprintln!("emulated GPU: {}", failure.text);
            self.devices[taken.device].failure = Some(failure);
        }
        if self.devices[taken.device].failure.is_some() {
            self.clear(taken.device);
            return true;
        }
        for taken in std::iter::once(&taken).chain(&early) {
            self.queue.finish(taken);
            for stream in self.streams.values_mut().filter(|stream| stream.tail == Some(taken.id)) {
                stream.ends = taken.ends;
            }
        }
        if let WorkItem::Record(event) = taken.work
            && let Some(event) = self.events.get_mut(&event)
            && event.recorded == Some(taken.id)
        {
            event.time = Some(taken.ends);
        }
        true
    }

    /// Makes waits ready whose words have been written.
    fn look_at_words(&mut self) {
        let Machine { blocked, devices, queue, .. } = self;
        blocked.retain(|&(item, device, source, least)| {
            let value = devices[device].memory.signal(source);
            let is_ready = value.is_none_or(|value| is_reached(value, least));
            if is_ready {
                queue.make_ready(item);
            }
            !is_ready
        });
    }

    /// The last item of a stream, if it has any.
    pub(crate) fn tail_of(&self, stream: usize) -> Result<Option<ItemId>, Status> {
        Ok(self.streams.get(&stream).ok_or(status::INVALID_HANDLE)?.tail)
    }

    /// The item that recorded an event; an error if a capture recorded it.
    pub(crate) fn completable(&self, event: usize) -> Result<Option<ItemId>, Status> {
        let event = self.events.get(&event).ok_or(status::INVALID_HANDLE)?;
        let is_captured = event.was_captured || event.captured.is_some();
        if is_captured { Err(status::CAPTURED_EVENT) } else { Ok(event.recorded) }
    }

    /// True if the event has completed. Each query runs one queued item, so that polling ends.
    pub(crate) fn has_completed(&mut self, event: usize) -> Result<bool, Status> {
        let recorded = self.completable(event)?;
        self.run_one();
        Ok(recorded.is_none_or(|item| !self.queue.is_pending(item)))
    }

    /// The status of a device whose work has failed.
    pub(crate) fn check(&self, device: usize) -> Result<(), Status> {
        self.devices.get(device).and_then(|device| device.failure.as_ref()).map_or(Ok(()), |f| Err(f.status))
    }

    /// The queued work that uses memory in this range, if any.
    pub(crate) fn user_of(&self, start: u64, bytes: u64) -> Option<String> {
        self.queue.user_of(start, bytes)
    }

    /// Ends a device's work with a failure that every later call reports.
    pub(crate) fn fail(&mut self, device: usize, failure: Failure) -> Status {
        eprintln!("emulated GPU: {}", failure.text);
        let status = failure.status;
        self.devices[device].failure.get_or_insert(failure);
        self.clear(device);
        status
    }

    /// Allocates device memory.
    pub(crate) fn allocate(&mut self, device: usize, bytes: u64) -> Result<u64, Status> {
        self.devices[device].memory.allocate(bytes).map_err(|_| status::OUT_OF_MEMORY)
    }

    /// Frees device memory. A failure if queued work uses it.
    pub(crate) fn free(&mut self, device: usize, start: u64) -> Result<(), Status> {
        let allocation = self.devices[device].memory.allocation(start).filter(|(begin, _)| *begin == start);
        let (_, bytes) = allocation.ok_or(status::INVALID_VALUE)?;
        if let Some(user) = self.user_of(start, bytes) {
            let text = format!("cuMemFree of memory that {user} uses, which is queued and has not run");
            return Err(self.fail(device, Failure { status: status::ILLEGAL_ADDRESS, text }));
        }
        let memory = &mut self.devices[device].memory;
        if let Some(physical) = memory.unmap(start) {
            memory.release(physical);
        }
        Ok(())
    }

    /// Invalidates a capture, which then yields no graph; returns `status`.
    pub(crate) fn invalidate_capture(&mut self, capture: usize, status: Status) -> Status {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.is_valid = false;
        }
        status
    }

    /// Fails a call that may synchronise the device if this thread captures, and invalidates its captures.
    /// Captures are thread-local, so those of other threads continue.
    pub(crate) fn may_synchronize(&mut self, thread: ThreadId) -> Result<(), Status> {
        let mut own = self.captures.values_mut().filter(|capture| capture.thread == thread).peekable();
        let is_refused = own.peek().is_some();
        own.for_each(|capture| capture.is_valid = false);
        if is_refused { Err(status::CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }
}
