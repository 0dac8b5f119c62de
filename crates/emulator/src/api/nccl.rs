//! `libnccl.so.2`: communicators that do not block, all-gathers, broadcasts, sums of f32, sends and receives.

use super::driver::current;
use super::{Handle, In, Out, export};
use crate::machine::{self, Communicator, Machine};
use crate::nccl::link::{LinkState, RankLink};
use crate::nccl::{CallGroup, CallKind, CommunicatorName, GroupCall, Refusal, element_bytes, open};
use crate::settings::SETTINGS;
use crate::status;
use crate::work::Failure;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// `ncclDataType_t` and `ncclRedOp_t` of sums.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// The most answers "in progress" after a call.
const MOST_POLLS: usize = 3;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId {
    bytes: [u8; 128],
}

/// The head of an `ncclConfig_t`; what follows is not emulated.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    bytes: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// A call that waits for the end of its group: its communicator, its stream, and the call.
type Pending = (usize, usize, GroupCall);

thread_local! {
    /// CommitGroups that were started and not ended.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static CALLS: RefCell<Vec<Pending>> = const { RefCell::new(Vec::new()) };
    /// The last error of this thread, as `ncclGetLastError` returns it.
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

type CallOutcome = Result<c_int, (Refusal, String)>;

fn refused<T>(refusal: Refusal, text: impl Into<String>) -> Result<T, (Refusal, String)> {
    Err((refusal, text.into()))
}

/// The number that a call returns; remembers the text of a refusal.
fn number(outcome: CallOutcome) -> c_int {
    outcome.unwrap_or_else(|(refusal, text)| {
        LAST.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
        refusal as c_int
    })
}

/// Runs a call on the machine.
fn on_machine(body: impl FnOnce(&mut Machine) -> CallOutcome) -> c_int {
    number(match machine::lock().as_mut() {
        None => refused(Refusal::Internal, "there is no emulated GPU"),
        Some(machine) => body(machine),
    })
}

/// Runs a call on a communicator that is ready for one.
fn on_communicator(handle: Handle, body: impl FnOnce(&mut Machine) -> CallOutcome) -> c_int {
    on_machine(|machine| {
        let of = find(machine, handle)?;
        if let Some((refusal, text)) = &of.error {
            return refused(*refusal, text.clone());
        }
        if of.launching.is_some() || of.link.state() != LinkState::Ready {
            let text = "the communicator is used before its previous call has succeeded";
            return refused(Refusal::InvalidArgument, text);
        }
        body(machine)
    })
}

fn find(machine: &mut Machine, handle: Handle) -> Result<&mut Communicator, (Refusal, String)> {
    let of = machine.communicators.get_mut(&handle);
    of.ok_or((Refusal::InvalidArgument, "there is no such communicator".into()))
}

/// Adds a call to the thread's group, or makes it a group of its own.
fn call(
    handle: Handle,
    stream: Handle,
    kind: CallKind,
    places: [u64; 2],
    count: usize,
    element: c_int,
) -> c_int {
    let (count, [from, to]) = (count as u64, places);
    let begun = on_machine(|machine| {
        let of = find(machine, handle)?;
        let Some(size) = element_bytes(element) else {
            return refused(Refusal::InvalidArgument, format!("{element} is no type of elements"));
        };
        let (bytes, size, rank) = (count * size, of.size as u64, of.rank);
        let (source, target) = match kind {
            CallKind::AllGather => (Some((from, bytes)), Some((to, bytes * size))),
            CallKind::Broadcast { root } => ((root == rank).then_some((from, bytes)), Some((to, bytes))),
            CallKind::ReduceScatter => (Some((from, bytes * size)), Some((to, bytes))),
            CallKind::Reduce { root } => (Some((from, bytes)), (root == rank).then_some((to, bytes))),
            CallKind::Send { .. } => (Some((from, bytes)), None),
            CallKind::Receive { .. } => (None, Some((to, bytes))),
        };
        let peer = match kind {
            CallKind::AllGather | CallKind::ReduceScatter => rank,
            CallKind::Broadcast { root: peer }
            | CallKind::Reduce { root: peer }
            | CallKind::Send { to: peer }
            | CallKind::Receive { from: peer } => peer,
        };
        if peer as u64 >= size {
            return refused(Refusal::InvalidArgument, format!("{kind}: there are {size} ranks"));
        }
        CALLS.with_borrow_mut(|calls| {
            calls.push((handle, stream, GroupCall { kind, element, count, source, target }))
        });
        Ok(SUCCESS)
    });
    if begun != SUCCESS || DEPTH.get() > 0 { begun } else { end_group() }
}

/// Adds a call that adds f32, as [`call`] does.
fn sum(
    handle: Handle,
    stream: Handle,
    kind: CallKind,
    places: [u64; 2],
    count: usize,
    [element, op]: [c_int; 2],
) -> c_int {
    if [element, op] != [FLOAT32, SUM] {
        let text = format!(
            "{kind} of other types than float32, or with other operations than sums, is not emulated"
        );
        return number(refused(Refusal::InvalidUsage, text));
    }
    call(handle, stream, kind, places, count, element)
}

/// Hands the calls of the thread's group to their communicators, which queue them later.
fn end_group() -> c_int {
    let calls = CALLS.take();
    let mut handles: Vec<Handle> = calls.iter().map(|(handle, ..)| *handle).collect();
    handles.dedup();
    if handles.is_empty() {
        return SUCCESS;
    }
    for handle in handles {
        let of_it = || calls.iter().filter(|(of, ..)| *of == handle);
        let launched = on_communicator(handle, |machine| {
            let stream = of_it().map(|(_, stream, _)| *stream).next().unwrap_or_default();
            if of_it().any(|(_, other, _)| *other != stream) {
                return refused(
                    Refusal::InvalidUsage,
                    "a group of one communicator on several streams is not emulated",
                );
            }
            let group =
                CallGroup { communicator: handle, calls: of_it().map(|(.., call)| call.clone()).collect() };
            let polls = machine.draw(MOST_POLLS + 1);
            find(machine, handle)?.launching = Some((Arc::new(group), stream, polls));
            Ok(IN_PROGRESS)
        });
        if launched != IN_PROGRESS {
            return launched;
        }
    }
    IN_PROGRESS
}

/// The state of a communicator. A group that was called is queued here at last.
fn progress(machine: &mut Machine, handle: Handle) -> CallOutcome {
    let of = find(machine, handle)?;
    if let Some((refusal, text)) = &of.error {
        return refused(*refusal, text.clone());
    }
    match of.link.state() {
        LinkState::Connecting => return Ok(IN_PROGRESS),
        LinkState::Refused(text) => return refused(Refusal::InvalidUsage, text),
        LinkState::Ready => {}
    }
    if of.is_finalized {
        return finalize(machine, handle);
    }
    let gone = of.link.gone();
    let launches = of.launching.is_some();
    // Ranks connect in their first group.
    let waits = launches && !of.link.call();
    // Only who waits for the rank notices.
    if let Some(rank) = gone.filter(|_| launches || machine.has_groups(handle)) {
        let error = (Refusal::Remote, format!("rank {rank} has left"));
        find(machine, handle)?.error = Some(error.clone());
        return Err(error);
    }
    let of = find(machine, handle)?;
    match of.launching.take() {
        None => Ok(SUCCESS),
        Some((group, stream, polls)) if polls > 0 || waits => {
            of.launching = Some((group, stream, polls.saturating_sub(1)));
            Ok(IN_PROGRESS)
        }
        Some((group, stream, _)) => match machine.put_group(stream, group) {
            Ok(()) => Ok(SUCCESS),
            Err(status) => {
                refused(Refusal::Internal, format!("the work cannot be queued: status {}", status.0))
            }
        },
    }
}

/// The state of a communicator that is finalized: it waits for its work, for graphs, and for the other ranks.
fn finalize(machine: &mut Machine, handle: Handle) -> CallOutcome {
    if machine.has_groups(handle) {
        machine.step();
        return Ok(IN_PROGRESS);
    }
    if machine.graphs_with(handle) > 0 {
        return Ok(IN_PROGRESS);
    }
    let of = find(machine, handle)?;
    if !of.link.has_finished() {
        of.link.finish(of.issued);
    }
    Ok(if of.link.is_over() { SUCCESS } else { IN_PROGRESS })
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    let text: &CStr = match result {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn ncclGetLastError(_communicator: Handle) -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

export! {
    fn ncclGetVersion(version: Out<c_int>) {
        let reported = SETTINGS.as_ref().map_or(0, |settings| settings.nccl);
        version.set(reported).map_or(Refusal::InvalidArgument as c_int, |()| SUCCESS)
    }

    fn ncclGetUniqueId(id: Out<UniqueId>) {
        number(match open() {
            Ok(name) => match id.set(UniqueId { bytes: name.id() }) {
                Ok(()) => Ok(SUCCESS),
                Err(_) => refused(Refusal::InvalidArgument, "the id is null"),
            },
            Err(error) => refused(Refusal::System, error.to_string()),
        })
    }

    fn ncclCommInitRankConfig(
        communicator: Out<Handle>,
        ranks: c_int,
        id: UniqueId,
        rank: c_int,
        config: In<Config>,
    ) {
        on_machine(|machine| {
            let config = config.get().or_else(|_| refused(Refusal::InvalidArgument, "there is no config"))?;
            if config.magic != 0xcafe_beef || config.blocking != 0 {
                return refused(Refusal::InvalidArgument, "communicators that block are not emulated");
            }
            let Some(device) = current() else {
                return refused(Refusal::InvalidUsage, "there is no current device");
            };
            if ranks < 1 || !(0..ranks).contains(&rank) {
                return refused(Refusal::InvalidArgument, format!("Invalid rank requested : {rank}/{ranks}"));
            }
            let (rank, size) = (rank as usize, ranks as usize);
            let mut gpu = *b"emulated GPU 000";
            gpu[15] = b'0' + device as u8;
            let link = RankLink::connect(CommunicatorName::of_id(&id.bytes), rank, size, gpu);
            let handle = machine.handle();
            machine.communicators.insert(handle, Communicator {
                device,
                rank,
                size,
                link,
                launching: None,
                issued: 0,
                posted: 0,
                tail: None,
                error: None,
                is_finalized: false,
            });
            match communicator.set(handle) {
                Ok(()) => Ok(IN_PROGRESS),
                Err(_) => refused(Refusal::InvalidArgument, "the communicator is null"),
            }
        })
    }

    fn ncclCommGetAsyncError(communicator: Handle, result: Out<c_int>) {
        let state = on_machine(|machine| progress(machine, communicator));
        result.set(state).map_or(Refusal::InvalidArgument as c_int, |()| SUCCESS)
    }

    fn ncclCommFinalize(communicator: Handle) {
        on_communicator(communicator, |machine| {
            let of = find(machine, communicator)?;
            if std::mem::replace(&mut of.is_finalized, true) {
                return refused(Refusal::InvalidArgument, "the communicator is finalized twice");
            }
            Ok(IN_PROGRESS)
        })
    }

    fn ncclCommDestroy(communicator: Handle) {
        on_machine(|machine| {
            let graphs = machine.graphs_with(communicator);
            let of = find(machine, communicator)?;
            let (device, is_finished) = (of.device, of.link.has_finished());
            if graphs > 0 || !is_finished {
                let why = match graphs {
                    0 => "before it was finalized".to_owned(),
                    _ => format!("before {graphs} graphs with its work: NCCL would wait for them for ever"),
                };
                let text = format!("NCCL: a communicator is destroyed {why}");
                machine.fail(device, Failure { status: status::LAUNCH_FAILED, text: text.clone() });
                return refused(Refusal::InvalidUsage, text);
            }
            of.link.leave();
            machine.communicators.remove(&communicator);
            Ok(SUCCESS)
        })
    }

    fn ncclCommAbort(communicator: Handle) {
        let aborted = on_machine(|machine| {
            find(machine, communicator)?;
            machine.abort(communicator);
            Ok(SUCCESS)
        });
        // As NCCL does, after it has ended the work.
        machine::wait_while(|machine| machine.graphs_with(communicator) > 0);
        aborted
    }

    fn ncclGroupStart() {
        DEPTH.set(DEPTH.get() + 1);
        SUCCESS
    }

    fn ncclGroupEnd() {
        match DEPTH.get() {
            0 => number(refused(Refusal::InvalidUsage, "ncclGroupEnd: not in a group call.")),
            depth => {
                DEPTH.set(depth - 1);
                if depth > 1 { SUCCESS } else { end_group() }
            }
        }
    }

    fn ncclAllGather(
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        element: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        call(communicator, stream, CallKind::AllGather, [from as u64, to as u64], count, element)
    }

    fn ncclBroadcast(
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        element: c_int,
        root: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        let kind = CallKind::Broadcast { root: root as usize };
        call(communicator, stream, kind, [from as u64, to as u64], count, element)
    }

    fn ncclReduceScatter(
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        element: c_int,
        op: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        let places = [from as u64, to as u64];
        sum(communicator, stream, CallKind::ReduceScatter, places, count, [element, op])
    }

    fn ncclReduce(
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        element: c_int,
        op: c_int,
        root: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        let (kind, places) = (CallKind::Reduce { root: root as usize }, [from as u64, to as u64]);
        sum(communicator, stream, kind, places, count, [element, op])
    }

    fn ncclSend(
        from: *const c_void,
        count: usize,
        element: c_int,
        peer: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        call(communicator, stream, CallKind::Send { to: peer as usize }, [from as u64, 0], count, element)
    }

    fn ncclRecv(
        to: *mut c_void,
        count: usize,
        element: c_int,
        peer: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        call(communicator, stream, CallKind::Receive { from: peer as usize }, [0, to as u64], count, element)
    }
}
