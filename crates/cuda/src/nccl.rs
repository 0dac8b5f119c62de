//! NCCL: movement of data between the GPUs of several processes, and sums over them.
//!
//! A communicator never blocks the thread that calls it. NCCL may connect ranks in threads of its own, so a
//! call waits until NCCL has enqueued the work, and asks its caller meanwhile whether to go on waiting.
//! Another thread may ask for errors, and end work that will never complete.
//!
//! Invariants: all ranks enqueue the same groups in the same order, and capture the same ones. Graphs that
//! contain a communicator's work are dropped before it: since 2.26, NCCL waits for them when it closes one.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::nccl::{
    NCCL_CONFIG_MAGIC, NCCL_FLOAT32, NCCL_IN_PROGRESS, NCCL_SUCCESS, NCCL_SUM, NCCL_UINT8, NCCL_UNDEFINED,
    Nccl, NcclComm, NcclConfig, NcclUniqueId,
};
use crate::ffi::open::{c_string, nccl};
use crate::memory::DeviceSpan;
use crate::stream::Stream;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use xtrain_rank::Rank;

/// Time between two questions to NCCL.
const TICK: Duration = Duration::from_micros(50);

/// Time in which a communicator is closed in order. After that it is aborted.
const CLOSING: Duration = Duration::from_secs(5);

/// The version of [`NcclConfig`].
const CONFIG_VERSION: c_uint = 22_700;

/// The name under which the ranks of a communicator meet. One rank makes it, and sends it to the others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; 128]);

impl NcclId {
    /// A new id. This process then waits for the other ranks in a thread of NCCL's.
    pub fn new() -> Result<NcclId, CudaError> {
        let table = &nccl()?.table;
        let mut id = NcclUniqueId { bytes: [0; 128] };
        // SAFETY: writes the id.
        let status = unsafe { (table.ncclGetUniqueId)(&mut id) };
        check(table, std::ptr::null_mut(), "ncclGetUniqueId", status)?;
        Ok(NcclId(id.bytes))
    }

    /// The bytes to send to the other ranks.
    pub fn bytes(&self) -> &[u8; 128] {
        &self.0
    }
}

impl From<[u8; 128]> for NcclId {
    fn from(bytes: [u8; 128]) -> Self {
        NcclId(bytes)
    }
}

/// A call of a group. Ranks are those of the communicator.
#[derive(Clone, Copy)]
pub enum NcclCall<'a> {
    /// Gathers the inputs of all ranks, which are equally long, in their order.
    AllGather {
        /// The bytes of this rank.
        input: DeviceSpan<'a>,
        /// The bytes of all ranks.
        output: DeviceSpan<'a>,
    },
    /// Copies the input of a rank to the outputs of all.
    Broadcast {
        /// The rank.
        root: usize,
        /// The bytes of `root`; ignored on other ranks.
        input: DeviceSpan<'a>,
        /// As many bytes on every rank.
        output: DeviceSpan<'a>,
    },
    /// Adds the inputs of all ranks, f32, and gives each rank a piece of the sum, in their order. NCCL
    /// chooses the order of the sum.
    ReduceScatter {
        /// As many bytes on every rank, those of all pieces.
        input: DeviceSpan<'a>,
        /// The piece of this rank.
        output: DeviceSpan<'a>,
    },
    /// Adds the inputs of all ranks, f32, on one of them. NCCL chooses the order of the sum.
    Reduce {
        /// The rank.
        root: usize,
        /// As many bytes on every rank.
        input: DeviceSpan<'a>,
        /// As many bytes; ignored on ranks other than `root`.
        output: DeviceSpan<'a>,
    },
    /// Sends bytes to a rank, which receives as many.
    Send {
        /// The rank.
        to: usize,
        /// The bytes.
        input: DeviceSpan<'a>,
    },
    /// Receives bytes from a rank, which sends as many.
    Receive {
        /// The rank.
        from: usize,
        /// The bytes.
        output: DeviceSpan<'a>,
    },
}

/// A rank's end of a communicator between GPUs, one GPU for each rank.
pub struct NcclCommunicator {
    context: Context,
    table: &'static Nccl,
    rank: Rank,
    /// Absent after [`NcclCommunicator::abort`].
    handle: Mutex<Option<Handle>>,
}

#[derive(Clone, Copy)]
struct Handle(NcclComm);

// SAFETY: the handle is used under a lock; NCCL does not tie it to a thread.
unsafe impl Send for Handle {}

impl NcclCommunicator {
    /// Joins the other ranks that have `id`, and returns when all are there. `poll` is called every now and
    /// then meanwhile.
    ///
    /// # Errors
    /// NCCL is missing or too old; it cannot connect the ranks, or two of them have the same GPU; an error of
    /// `poll`.
    pub fn join<E: From<CudaError>>(
        context: &Context,
        id: &NcclId,
        rank: Rank,
        poll: &dyn Fn() -> Result<(), E>,
    ) -> Result<NcclCommunicator, E> {
        let table = &nccl()?.table;
        context.enter()?;
        let undefined = NCCL_UNDEFINED;
        let mut config = NcclConfig {
            bytes: size_of::<NcclConfig>(),
            magic: NCCL_CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: undefined,
            net_name: std::ptr::null(),
            split_share: undefined,
            traffic_class: undefined,
            comm_name: std::ptr::null(),
            collnet_enable: undefined,
            cta_policy: undefined,
            shrink_share: undefined,
            nvls_ctas: undefined,
        };
        let mut handle = std::ptr::null_mut();
        let id = NcclUniqueId { bytes: id.0 };
        let (ranks, number) = (rank.world_size as c_int, rank.index as c_int);
        // SAFETY: writes the handle; NCCL copies the config. The device is that of the current context.
        let status = unsafe { (table.ncclCommInitRankConfig)(&mut handle, ranks, id, number, &mut config) };
        check(table, handle, "ncclCommInitRankConfig", status)?;
        let handle = Mutex::new(Some(Handle(handle)));
        let communicator = NcclCommunicator { context: context.clone(), table, rank, handle };
        if let Err(error) = communicator.settle("ncclCommInitRankConfig", poll) {
            communicator.abort();
            return Err(error);
        }
        Ok(communicator)
    }

    /// This rank among those that the communicator connects.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Enqueues `calls`, of which there is one at least, as one group on `stream`, or adds them to the graph
    /// that it captures. NCCL may have to connect ranks before it can: `poll` is called meanwhile.
    ///
    /// # Errors
    /// A refusal or an asynchronous error of NCCL; an abort; an error of `poll`.
    pub fn enqueue<E: From<CudaError>>(
        &self,
        calls: &[NcclCall<'_>],
        stream: &Stream,
        poll: &dyn Fn() -> Result<(), E>,
    ) -> Result<(), E> {
        // Connecting ranks allocates memory.
        let _no_capture = capture_lock::exclude_capture();
        self.context.enter()?;
        {
            let guard = self.lock();
            let handle = opened(&guard)?;
            // SAFETY: takes nothing.
            check(self.table, handle, "ncclGroupStart", unsafe { (self.table.ncclGroupStart)() })?;
            let called = calls.iter().try_for_each(|call| self.call(handle, call, stream));
            // SAFETY: ends the group that was started above.
            let status = unsafe { (self.table.ncclGroupEnd)() };
            called?;
            check(self.table, handle, "ncclGroupEnd", status)?;
        }
        self.settle("ncclGroupEnd", poll)
    }

    fn call(&self, comm: NcclComm, call: &NcclCall<'_>, stream: &Stream) -> Result<(), CudaError> {
        let from = |span: &DeviceSpan<'_>| span.pointer().0 as *const c_void;
        let to = |span: &DeviceSpan<'_>| span.pointer().0 as *mut c_void;
        let stream = stream.raw();
        let (name, status) = match call {
            NcclCall::AllGather { input, output } => {
                assert_eq!(output.bytes(), input.bytes() * self.rank.world_size, "a piece of each rank");
                let (from, to, bytes) = (from(input), to(output), input.bytes());
                // SAFETY: the spans have these lengths; the caller keeps the memory until the work has run.
                let call =
                    || unsafe { (self.table.ncclAllGather)(from, to, bytes, NCCL_UINT8, comm, stream) };
                ("ncclAllGather", call())
            }
            NcclCall::Broadcast { root, input, output } => {
                let is_root = *root == self.rank.index;
                assert!(!is_root || input.bytes() == output.bytes(), "the bytes of the root");
                let from = if is_root { from(input) } else { to(output).cast_const() };
                let (to, bytes, root) = (to(output), output.bytes(), *root as c_int);
                // SAFETY: as above.
                let call =
                    || unsafe { (self.table.ncclBroadcast)(from, to, bytes, NCCL_UINT8, root, comm, stream) };
                ("ncclBroadcast", call())
            }
            NcclCall::ReduceScatter { input, output } => {
                assert_eq!(input.bytes(), output.bytes() * self.rank.world_size, "a piece of each rank");
                let (from, to, count) = (from(input), to(output), output.bytes() / size_of::<f32>());
                let (element, op) = (NCCL_FLOAT32, NCCL_SUM);
                // SAFETY: as above.
                let call =
                    || unsafe { (self.table.ncclReduceScatter)(from, to, count, element, op, comm, stream) };
                ("ncclReduceScatter", call())
            }
            NcclCall::Reduce { root, input, output } => {
                let is_root = *root == self.rank.index;
                assert!(!is_root || input.bytes() == output.bytes(), "the bytes of the sum");
                let to = if is_root { to(output) } else { std::ptr::null_mut() };
                let (from, count, root) = (from(input), input.bytes() / size_of::<f32>(), *root as c_int);
                let (element, op) = (NCCL_FLOAT32, NCCL_SUM);
                // SAFETY: as above; NCCL ignores the output of ranks other than the root.
                let call =
                    || unsafe { (self.table.ncclReduce)(from, to, count, element, op, root, comm, stream) };
                ("ncclReduce", call())
            }
            NcclCall::Send { to, input } => {
                let (from, bytes, peer) = (from(input), input.bytes(), *to as c_int);
                // SAFETY: as above.
                ("ncclSend", unsafe { (self.table.ncclSend)(from, bytes, NCCL_UINT8, peer, comm, stream) })
            }
            NcclCall::Receive { from, output } => {
                let (to, bytes, peer) = (to(output), output.bytes(), *from as c_int);
                // SAFETY: as above.
                ("ncclRecv", unsafe { (self.table.ncclRecv)(to, bytes, NCCL_UINT8, peer, comm, stream) })
            }
        };
        check(self.table, comm, name, status)
    }

    /// The error that NCCL met in its own threads or in work on the GPU, if any.
    pub fn check(&self) -> Result<(), CudaError> {
        self.is_settled("ncclCommGetAsyncError").map(drop)
    }

    /// Ends all enqueued work, from any thread: streams that wait for it go on, with outputs that are not
    /// complete. Every later call fails.
    pub fn abort(&self) {
        let Some(Handle(handle)) = self.lock().take() else { return };
        if self.context.enter().is_ok() {
            // SAFETY: the handle is given up here, and no other call uses it.
            let status = unsafe { (self.table.ncclCommAbort)(handle) };
            self.release("ncclCommAbort", status);
        }
    }

    /// Waits until NCCL is done with the last call.
    fn settle<E: From<CudaError>>(
        &self,
        call: &'static str,
        poll: &dyn Fn() -> Result<(), E>,
    ) -> Result<(), E> {
        loop {
            let settled = self.is_settled(call);
            if let Ok(true) = settled {
                return Ok(());
            }
            // It knows the reason of an abort.
            poll()?;
            settled?;
            thread::sleep(TICK);
        }
    }

    /// True if NCCL is done with the last call.
    fn is_settled(&self, call: &'static str) -> Result<bool, CudaError> {
        let guard = self.lock();
        let handle = opened(&guard)?;
        let mut result = NCCL_SUCCESS;
        // SAFETY: writes one integer; the lock keeps the handle open.
        let status = unsafe { (self.table.ncclCommGetAsyncError)(handle, &mut result) };
        check(self.table, handle, "ncclCommGetAsyncError", status)?;
        check(self.table, handle, call, result)?;
        Ok(result != NCCL_IN_PROGRESS)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the communicator in order: all ranks do so. False if that fails or takes too long.
    fn close(&self) -> bool {
        let began = Instant::now();
        let status = match opened(&self.lock()) {
            // SAFETY: no work is enqueued after this.
            Ok(handle) => unsafe { (self.table.ncclCommFinalize)(handle) },
            Err(_) => return false,
        };
        let in_time = || -> Result<(), CudaError> {
            let is_late = began.elapsed() > CLOSING;
            if is_late {
                Err(failed("ncclCommFinalize", "the other ranks do not close theirs"))
            } else {
                Ok(())
            }
        };
        let is_accepted = matches!(status, NCCL_SUCCESS | NCCL_IN_PROGRESS);
        is_accepted && self.settle("ncclCommFinalize", &in_time).is_ok()
    }

    /// Logs an error of a call that ends a communicator, which no caller could handle.
    fn release(&self, call: &'static str, status: c_int) {
        if let Err(error) = check(self.table, std::ptr::null_mut(), call, status) {
            tracing::warn!("{error}");
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if self.lock().is_none() || self.context.enter().is_err() {
            return;
        }
        if thread::panicking() || !self.close() {
            return self.abort();
        }
        let _no_capture = capture_lock::exclude_capture();
        if let Some(Handle(handle)) = self.lock().take() {
            // SAFETY: the handle is given up here, and no other call uses it.
            let status = unsafe { (self.table.ncclCommDestroy)(handle) };
            self.release("ncclCommDestroy", status);
        }
    }
}

/// The handle, unless the communicator was aborted.
fn opened(handle: &Option<Handle>) -> Result<NcclComm, CudaError> {
    handle.map(|Handle(handle)| handle).ok_or_else(|| failed("NCCL", "the communicator was aborted"))
}

fn failed(call: &'static str, text: &str) -> CudaError {
    CudaError::Library { call, text: text.into() }
}

/// Fails unless the status is success, or that of a call that NCCL has still to complete.
fn check(table: &Nccl, comm: NcclComm, call: &'static str, status: c_int) -> Result<(), CudaError> {
    if matches!(status, NCCL_SUCCESS | NCCL_IN_PROGRESS) {
        return Ok(());
    }
    // SAFETY: returns a string of the library's own for any number.
    let text = c_string(unsafe { (table.ncclGetErrorString)(status) });
    let text = text.unwrap_or_else(|| format!("status {status}"));
    // SAFETY: returns a string of the library's own, or null; the argument may be null.
    let last = c_string(unsafe { (table.ncclGetLastError)(comm) }).filter(|last| !last.is_empty());
    let last = last.map(|last| format!(": {}", last.trim())).unwrap_or_default();
    Err(CudaError::Library { call, text: format!("{text}{last}") })
}
