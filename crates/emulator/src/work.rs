//! Work of a device and its nominal time.
#![allow(unsafe_code, reason = "copies read and write host memory through pointers")]

use crate::fault::{FaultKind, Report};
use crate::grid;
use crate::kernel::Code;
use crate::kernel::context::Launch;
use crate::memory::{Local, Memory};
use crate::nccl::CallGroup;
use crate::random::Random;
use crate::status::Status;
use std::cell::Cell;
use std::sync::Arc;

/// The minimum nominal time of a launch, so that timing loops, which repeat short work, repeat it only a few
/// times.
const LEAST_SECONDS: f64 = 0.5e-3;
/// Nominal rates, low enough that they rarely matter.
const SECONDS_PER_INSTRUCTION: f64 = 1e-9;
const SECONDS_PER_BYTE: f64 = 1e-11;
/// The nominal time of an event, so that no two events coincide.
const RECORD_SECONDS: f64 = 1e-6;

/// An item of work in a stream.
#[derive(Clone)]
pub(crate) enum WorkItem {
    /// A launch, and whether it may begin before the launch has ended that it waits for.
    Launch(Arc<KernelLaunch>, bool),
    /// A copy to device memory.
    Upload {
        target: u64,
        source: HostSource,
    },
    /// A copy to host memory.
    Download {
        target: HostAddress,
        source: u64,
        bytes: u64,
    },
    Copy {
        target: u64,
        source: u64,
        bytes: u64,
    },
    Fill {
        target: u64,
        byte: u8,
        bytes: u64,
    },
    Gemm(Arc<GemmWork>),
    /// A word that is written after all earlier work.
    Signal {
        target: u64,
        value: u32,
    },
    /// A wait until a word is at least this value.
    Await {
        source: u64,
        least: u32,
    },
    /// Calls of NCCL, which the machine runs together with other ranks.
    Collective(Arc<CallGroup>),
    /// The recording of an event, by its handle.
    Record(usize),
    /// The end of a graph, or a wait for an event.
    Nothing,
}

/// A launch with its arguments.
pub(crate) struct KernelLaunch {
    pub(crate) code: Arc<Code>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    pub(crate) shared_bytes: u64,
    /// Bytes of the parameter space.
    pub(crate) parameters: Vec<u8>,
}

/// A GEMM in a stream.
pub(crate) struct GemmWork {
    /// Addresses that it uses, to check that they are not freed.
    pub(crate) operands: Vec<u64>,
    pub(crate) seconds: f64,
    pub(crate) run: Box<dyn Fn(&Memory) -> Result<(), String> + Send + Sync>,
}

/// A place in host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostAddress(pub(crate) usize);

/// Source of an upload.
#[derive(Clone)]
pub(crate) enum HostSource {
    /// The contents of pageable memory at the time of the call.
    Taken(Arc<[u8]>),
    /// Pinned memory, which is read when the copy runs.
    Pinned(HostAddress, u64),
}

/// A failure and the status that the driver reports.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl From<Report> for Failure {
    fn from(report: Report) -> Failure {
        let status = match report.kind {
            FaultKind::Address => crate::status::ILLEGAL_ADDRESS,
            FaultKind::Alignment => crate::status::MISALIGNED_ADDRESS,
            FaultKind::Uninitialised | FaultKind::Synchronisation => crate::status::LAUNCH_FAILED,
        };
        Failure { status, text: report.to_string() }
    }
}

impl WorkItem {
    /// The nominal time in seconds. It depends only on sizes, so that choices by time are the same in every
    /// run.
    pub(crate) fn seconds(&self) -> f64 {
        let bytes = |bytes: u64| bytes as f64 * SECONDS_PER_BYTE;
        match self {
            WorkItem::Launch(launch, _) => {
                let threads = launch.block.iter().product::<u32>().div_ceil(32);
                let warps = launch.grid.iter().map(|&n| f64::from(n)).product::<f64>() * f64::from(threads);
                LEAST_SECONDS + warps * launch.code.instructions() as f64 * SECONDS_PER_INSTRUCTION
            }
            WorkItem::Upload { source: HostSource::Taken(taken), .. } => bytes(taken.len() as u64),
            WorkItem::Upload { source: HostSource::Pinned(_, length), .. } => bytes(*length),
            WorkItem::Download { bytes: length, .. }
            | WorkItem::Copy { bytes: length, .. }
            | WorkItem::Fill { bytes: length, .. } => bytes(*length),
            WorkItem::Gemm(gemm) => LEAST_SECONDS + gemm.seconds,
            WorkItem::Collective(group) => bytes(group.bytes()),
            WorkItem::Record(_) | WorkItem::Signal { .. } | WorkItem::Await { .. } => RECORD_SECONDS,
            WorkItem::Nothing => 0.0,
        }
    }

    /// Describes the work if its arguments point into this range.
    pub(crate) fn uses(&self, start: u64, bytes: u64) -> Option<String> {
        let is_within = |address: u64| address.wrapping_sub(start) < bytes;
        let overlaps = |address: u64, length: u64| address < start + bytes && start < address + length;
        let (uses, name) = match self {
            WorkItem::Launch(launch, _) => {
                let words = launch.parameters.chunks_exact(8);
                let mut addresses = words.map(|word| word.try_into().map_or(0, u64::from_le_bytes));
                (addresses.any(is_within), format!("kernel {}", launch.code.name))
            }
            WorkItem::Upload { target, source } => {
                let length = match source {
                    HostSource::Taken(taken) => taken.len() as u64,
                    HostSource::Pinned(_, length) => *length,
                };
                (overlaps(*target, length), "a copy to the device".into())
            }
            WorkItem::Download { source, bytes, .. } => {
                (overlaps(*source, *bytes), "a copy to the host".into())
            }
            WorkItem::Copy { target, source, bytes } => {
                (overlaps(*target, *bytes) || overlaps(*source, *bytes), "a copy on the device".into())
            }
            WorkItem::Fill { target, bytes, .. } => (overlaps(*target, *bytes), "a fill".into()),
            WorkItem::Gemm(gemm) => {
                (gemm.operands.iter().any(|&address| is_within(address)), "a GEMM".into())
            }
            WorkItem::Signal { target, .. } => (overlaps(*target, 4), "a write of a word".into()),
            WorkItem::Await { source, .. } => (overlaps(*source, 4), "a wait for a word".into()),
            WorkItem::Collective(group) => (group.uses(start, bytes), "a collective".into()),
            WorkItem::Record(_) | WorkItem::Nothing => (false, String::new()),
        };
        uses.then_some(name)
    }

    /// Executes a copy, a fill, a GEMM or the writing of a word.
    pub(crate) fn run(&self, memory: &Memory) -> Result<(), Failure> {
        let outside = |what: &str, address: u64, bytes: u64| Failure {
            status: crate::status::ILLEGAL_ADDRESS,
            text: format!("{what} out of bounds: {}", memory.describe(address, bytes)),
        };
        match self {
            WorkItem::Upload { target, source } => {
                let (mut from, bytes) = match source {
                    HostSource::Taken(taken) => (taken.as_ptr(), taken.len() as u64),
                    HostSource::Pinned(HostAddress(address), bytes) => (*address as *const u8, *bytes),
                };
                let pieces =
                    memory.pieces(*target, bytes).ok_or_else(|| outside("a copy writes", *target, bytes))?;
                for piece in pieces {
                    // SAFETY: taken bytes are owned; pinned ones are registered, and the caller keeps them
                    // until the copy has run.
                    unsafe { piece.copy_from_host(from) };
                    from = from.wrapping_add(piece.len());
                }
            }
            WorkItem::Download { target: HostAddress(target), source, bytes } => {
                let pieces =
                    memory.pieces(*source, *bytes).ok_or_else(|| outside("a copy reads", *source, *bytes))?;
                if !pieces.iter().all(|piece| piece.is_written()) {
                    let what = memory.describe_unwritten(*source, *bytes).unwrap_or_default();
                    let text = format!("a copy to the host reads bytes that were never written: {what}");
                    return Err(Failure { status: crate::status::LAUNCH_FAILED, text });
                }
                let mut to = *target as *mut u8;
                for piece in pieces {
                    // SAFETY: the caller keeps the target until the copy has run.
                    unsafe { piece.copy_to_host(to) };
                    to = to.wrapping_add(piece.len());
                }
            }
            WorkItem::Copy { target, source, bytes } => {
                let from =
                    memory.pieces(*source, *bytes).ok_or_else(|| outside("a copy reads", *source, *bytes))?;
                let to = memory
                    .pieces(*target, *bytes)
                    .ok_or_else(|| outside("a copy writes", *target, *bytes))?;
                copy_pieces(&to, &from);
            }
            WorkItem::Fill { target, byte, bytes } => {
                let pieces = memory
                    .pieces(*target, *bytes)
                    .ok_or_else(|| outside("a fill writes", *target, *bytes))?;
                pieces.into_iter().for_each(|piece| piece.fill(*byte));
            }
            WorkItem::Gemm(gemm) => {
                (gemm.run)(memory)
                    .map_err(|text| Failure { status: crate::status::ILLEGAL_ADDRESS, text })?;
            }
            WorkItem::Signal { target, value } => {
                memory.set_signal(*target, *value).ok_or_else(|| outside("a word is", *target, 4))?;
            }
            // The machine runs these.
            WorkItem::Launch(..) | WorkItem::Await { .. } | WorkItem::Collective(_) => {}
            WorkItem::Record(_) | WorkItem::Nothing => {}
        }
        Ok(())
    }
}

/// Executes launches, of which each but the first may begin before the one before it has ended; returns the
/// number of warp instructions.
pub(crate) fn run_launches<'a>(
    launches: impl Iterator<Item = &'a KernelLaunch>,
    memory: &Memory,
    random: &mut Random,
) -> Result<u64, Failure> {
    let launches: Vec<Launch<'_>> = launches
        .enumerate()
        .map(|(n, &KernelLaunch { ref code, grid, block, cluster, shared_bytes, parameters: ref given })| {
            let parameters = Local::new(given.len());
            for (n, byte) in given.iter().enumerate() {
                parameters.bytes(n as u64, 1).expect("a byte of them").write(0, [*byte]);
            }
            Launch {
                code,
                memory,
                parameters,
                grid,
                block,
                cluster,
                shared_bytes,
                may_wait: Cell::new(n > 0),
            }
        })
        .collect();
    Ok(grid::run(&launches, random)?)
}

/// Copies between lists of pieces with the same total length.
fn copy_pieces(to: &[crate::memory::Bytes<'_>], from: &[crate::memory::Bytes<'_>]) {
    let (mut to, mut from) = (to.iter().copied(), from.iter().copied());
    let (mut target, mut source) = (to.next(), from.next());
    while let (Some(t), Some(s)) = (target, source) {
        let length = t.len().min(s.len());
        let ((t, t_rest), (s, s_rest)) = (t.split(length), s.split(length));
        t.copy_from(s);
        target = if t_rest.len() > 0 { Some(t_rest) } else { to.next() };
        source = if s_rest.len() > 0 { Some(s_rest) } else { from.next() };
    }
}
