//! Loads and stores (PTX ISA, sections 9.7.9.8 to 9.7.9.11).

use super::{AnySource, AnyTarget, Decoded, Decoder, lanes, unknown};
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::kernel::Execute;
use crate::kernel::cluster::SharedPlace;
use crate::kernel::context::{Source, WarpContext, vectorized};
use crate::memory::{Bytes, outside};
use crate::ptx::{Class, Instruction, Operand, Space};
use crate::races::{AccessKind, Scope};
use crate::registers::{LANES, Lanes, Marks, lanes_of, uninitialised};

/// Start of a space among generic addresses. Global memory keeps its own addresses.
pub(crate) fn window(space: Space) -> u64 {
    match space {
        Space::Global | Space::Generic => 0,
        Space::Shared | Space::Cluster => 1 << 60,
        Space::Local => 2 << 60,
        Space::Param => 3 << 60,
    }
}

/// The space of an address and its offset in that space. A generic address is in the space whose window
/// contains it.
pub(super) fn located(space: Space, address: u64) -> (Space, u64) {
    if space != Space::Generic {
        return (space, address);
    }
    let spaces = [Space::Shared, Space::Local, Space::Param];
    let space = spaces.into_iter().find(|&space| address >> 60 == window(space) >> 60);
    match space {
        Some(Space::Shared) => (Space::Cluster, address - window(Space::Shared)),
        Some(space) => (space, address - window(space)),
        None => (Space::Global, address),
    }
}

/// A memory operand: base and offset.
pub(super) struct Address {
    base: Base,
    offset: u64,
}

enum Base {
    Wide(Source<u64>),
    /// Addresses in shared memory may have 32 bits.
    Short(Source<u32>),
}

impl Address {
    pub(super) fn decode(d: &Decoder<'_>, operand: &Operand) -> Decoded<Address> {
        let Operand::Address(base, offset) = operand else {
            return Err(format!("{operand:?} is not an address"));
        };
        let base = match &**base {
            Operand::Register(register) if d.class(*register) == Class::B32 => Base::Short(d.source(base)?),
            base => Base::Wide(d.source(base)?),
        };
        Ok(Address { base, offset: *offset as u64 })
    }

    #[inline(always)]
    pub(super) fn read(&self, cx: &WarpContext<'_>) -> Outcome<Lanes<u64>> {
        let mut addresses = match self.base {
            Base::Wide(source) => cx.value(source)?,
            Base::Short(source) => super::widened(&cx.value(source)?),
        };
        for address in &mut addresses {
            *address = address.wrapping_add(self.offset);
        }
        Ok(addresses)
    }
}

impl WarpContext<'_> {
    /// The bytes that a lane accesses at `address`, which must be a multiple of their number.
    #[inline]
    pub(super) fn reach(
        &self,
        lane: usize,
        space: Space,
        address: u64,
        bytes: u64,
        does: &str,
    ) -> Outcome<Bytes<'_>> {
        self.reach_aligned(lane, space, address, [bytes, bytes], does)
    }

    /// As [`WarpContext::reach`], for an address that must be a multiple of `align`.
    #[inline]
    pub(super) fn reach_aligned(
        &self,
        lane: usize,
        space: Space,
        address: u64,
        [bytes, align]: [u64; 2],
        does: &str,
    ) -> Outcome<Bytes<'_>> {
        let (space, offset) = located(space, address);
        let found = match space {
            Space::Shared => self.own_shared().bytes(offset, bytes),
            Space::Cluster => self.shared_bytes(SharedPlace::locate(offset, self.position.rank), bytes),
            Space::Local => self.local_bytes(lane, offset, bytes),
            Space::Param => self.launch.parameters.bytes(offset, bytes),
            _ => self.launch.memory.bytes(offset, bytes),
        };
        match found {
            Some(found) if address.is_multiple_of(align) => Ok(found),
            Some(_) => {
                let problem =
                    format!("{does} {bytes} bytes at {address:#x}, which is not aligned to {align} bytes");
                Err(ThreadFault::new(lane as u32, FaultKind::Alignment, problem))
            }
            None => {
                let what = match space {
                    Space::Shared => {
                        format!("{bytes} bytes at {offset} of a block's {}", self.own_shared().len())
                    }
                    Space::Cluster => self.describe_shared(offset, bytes),
                    Space::Local => {
                        format!("{bytes} bytes at {offset} of a thread's {}", self.launch.code.local_bytes)
                    }
                    Space::Param => format!("{bytes} bytes at {offset} of the kernel's parameters"),
                    _ => self.launch.memory.describe(offset, bytes),
                };
                outside(lane as u32, &format!("{does} {}", name_of(space)), what)
            }
        }
    }

    /// The bytes at a place in the shared memory of a block of the cluster that has not exited.
    pub(super) fn shared_bytes(&self, at: SharedPlace, bytes: u64) -> Option<Bytes<'_>> {
        let block = self.cluster.blocks.get(at.rank as usize)?;
        if block.has_exited { None } else { self.shared[at.rank as usize].bytes(at.offset, bytes) }
    }

    #[cold]
    fn describe_shared(&self, address: u64, bytes: u64) -> String {
        let SharedPlace { rank, offset } = SharedPlace::locate(address, self.position.rank);
        match self.cluster.blocks.get(rank as usize) {
            None => format!("block {rank} of a cluster of {}", self.cluster.blocks.len()),
            Some(block) if block.has_exited => format!("block {rank} of its cluster, which has exited"),
            Some(_) => {
                let length = self.own_shared().len();
                format!("{bytes} bytes at {offset} of the {length} of block {rank} of the cluster")
            }
        }
    }

    /// The active lanes that read global memory of these bytes, which were not all written. A fault if a copy
    /// under way will write some.
    #[cold]
    fn check_read(&self, space: Space, addresses: &Lanes<u64>, bytes: u64) -> Outcome<u32> {
        let mut global = 0;
        for lane in lanes_of(self.active) {
            let (space, offset) = located(space, addresses[lane]);
            if !matches!(space, Space::Shared | Space::Cluster) {
                global |= 1 << lane;
                continue;
            }
            let at = SharedPlace::locate(offset, self.position.rank);
            if let Some(location) = self.cluster.writer(at, bytes) {
                let place = self.launch.code.describe(location);
                let problem = format!(
                    "reads {bytes} bytes at {} of shared memory, which the copy of {place} has not written yet",
                    at.offset
                );
                return Err(ThreadFault::new(lane as u32, FaultKind::Uninitialised, problem));
            }
        }
        Ok(global)
    }

    /// A fault if asynchronous work uses some of these bytes, which a lane is about to write.
    pub(super) fn check_unused(&self, lane: usize, space: Space, address: u64, bytes: u64) -> Outcome {
        if self.cluster.has_no_readers() && self.cluster.copies.is_empty() {
            return Ok(());
        }
        let (space, offset) = located(space, address);
        if !matches!(space, Space::Shared | Space::Cluster) {
            return Ok(());
        }
        let at = SharedPlace::locate(offset, self.position.rank);
        let work = match (self.cluster.reader(at, bytes), self.cluster.writer(at, bytes)) {
            (Some(location), _) => ("reads", location),
            (None, Some(location)) => ("writes", location),
            (None, None) => return Ok(()),
        };
        let place = self.launch.code.describe(work.1);
        let problem = format!(
            "writes {bytes} bytes at {} of shared memory, which the asynchronous work of {place} still {}; wait for it first",
            at.offset, work.0
        );
        Err(ThreadFault::new(lane as u32, FaultKind::Synchronisation, problem))
    }

    /// The memory around the address of the first active lane, and the offset of each lane's address in it.
    /// Inactive lanes get the offset of the first active one. `None` if the lanes need separate checks.
    #[inline(always)]
    fn surroundings(
        &self,
        space: Space,
        addresses: &Lanes<u64>,
        align: u64,
    ) -> Option<(Bytes<'_>, Lanes<u64>)> {
        let first = addresses[self.active.trailing_zeros() as usize % LANES];
        let (bytes, start) = match (space, first >> 60) {
            (Space::Shared | Space::Cluster, _) => {
                (self.own_shared().bytes(0, self.own_shared().len() as u64)?, 0)
            }
            (Space::Generic, 1) => {
                (self.own_shared().bytes(0, self.own_shared().len() as u64)?, window(Space::Shared))
            }
            (Space::Global, _) | (Space::Generic, 0) => {
                let (start, length) = self.launch.memory.allocation(first)?;
                (self.launch.memory.bytes(start, length)?, start)
            }
            (Space::Param, _) => {
                let parameters = &self.launch.parameters;
                (parameters.bytes(0, parameters.len() as u64)?, 0)
            }
            _ => return None,
        };
        let (mut offsets, mut bits) = ([0; LANES], 0);
        for lane in 0..LANES {
            let address = if self.active >> lane & 1 != 0 { addresses[lane] } else { first };
            bits |= address;
            offsets[lane] = address.wrapping_sub(start);
        }
        (bits & (align - 1) == 0).then_some((bytes, offsets))
    }

    /// Reads N bytes for each active lane, with marks if some were never written.
    #[inline(always)]
    fn gather<const N: usize>(&self, space: Space, addresses: &Lanes<u64>) -> Outcome<LaneBytes<N>> {
        let near = self.surroundings(space, addresses, N as u64);
        if let Some((data, marks)) = near.and_then(|(bytes, offsets)| bytes.gather::<N>(&offsets)) {
            let is_written = marks.as_flattened().iter().fold(1, |all, mark| all & mark) != 0;
            return Ok((data, (!is_written).then(|| marks.map(|row| unwritten(&row)))));
        }
        self.gather_slowly(space, addresses)
    }

    #[inline(never)]
    fn gather_slowly<const N: usize>(&self, space: Space, addresses: &Lanes<u64>) -> Outcome<LaneBytes<N>> {
        let (mut data, mut marks, mut some) = ([[0; N]; LANES], [0u16; LANES], 0);
        for lane in lanes_of(self.active) {
            let bytes = self.reach(lane, space, addresses[lane], N as u64, "reads")?;
            data[lane] = bytes.read(0);
            marks[lane] = unwritten(&bytes.marks::<N>(0));
            some |= marks[lane];
        }
        Ok((data, (some != 0).then_some(marks)))
    }

    /// Writes N bytes for each active lane, with marks if some were never written.
    #[inline(always)]
    fn scatter<const N: usize>(
        &mut self,
        space: Space,
        addresses: &Lanes<u64>,
        data: &[[u8; N]; LANES],
        marks: Option<&Lanes<u16>>,
    ) -> Outcome {
        let first = addresses[self.active.trailing_zeros() as usize % LANES];
        let is_unused = located(space, first).0 == Space::Global
            || self.cluster.has_no_readers() && self.cluster.copies.is_empty();
        let near =
            if is_unused && marks.is_none() { self.surroundings(space, addresses, N as u64) } else { None };
        if let Some(changed) = near.and_then(|(bytes, offsets)| bytes.scatter(&offsets, data, self.active)) {
            self.changed |= changed;
            return Ok(());
        }
        for lane in lanes_of(self.active) {
            self.check_unused(lane, space, addresses[lane], N as u64)?;
            let bytes = self.reach(lane, space, addresses[lane], N as u64, "writes")?;
            let unwritten = marks.map_or(0, |marks| marks[lane]);
            let new_marks = std::array::from_fn(|n| u8::from(unwritten >> n & 1 == 0));
            let changes = bytes.read::<N>(0) != data[lane] || bytes.marks::<N>(0) != new_marks;
            bytes.write_marked(0, data[lane], new_marks);
            let is_local = located(space, addresses[lane]).0 == Space::Local;
            self.changed |= changes && !is_local;
            self.changed_local |= changes && is_local;
        }
        Ok(())
    }
}

/// Bytes of all lanes, and, if some were never written, a bit for each of these.
type LaneBytes<const N: usize> = ([[u8; N]; LANES], Option<Lanes<u16>>);

fn unwritten<const N: usize>(marks: &[u8; N]) -> u16 {
    marks.iter().enumerate().map(|(n, mark)| u16::from(*mark == 0) << n).sum()
}

fn name_of(space: Space) -> &'static str {
    match space {
        Space::Global | Space::Generic => "global memory",
        Space::Shared | Space::Cluster => "shared memory",
        Space::Local => "local memory",
        Space::Param => "parameters",
    }
}

/// The access that an opcode describes.
pub(super) struct Access {
    pub(super) space: Space,
    /// Bytes of an element.
    pub(super) bytes: usize,
    pub(super) is_signed: bool,
    pub(super) count: usize,
    /// Order and scope. A store's kind is its caller's.
    pub(super) kind: AccessKind,
}

impl Access {
    pub(super) fn decode(instruction: &Instruction, parts: &[&str]) -> Decoded<Access> {
        let mut access =
            Access { space: Space::Generic, bytes: 0, is_signed: false, count: 1, kind: AccessKind::READ };
        for part in parts {
            match *part {
                // Order and scope matter for races only: accesses execute one after the other.
                "volatile" | "relaxed" | "gpu" | "sys" => access.kind.scope = Some(Scope::Gpu),
                "cta" => access.kind.scope = Some(Scope::Block),
                "cluster" => access.kind.scope = Some(Scope::Cluster),
                "acquire" => access.kind.acquires = true,
                "release" => access.kind.releases = true,
                "acq_rel" => (access.kind.acquires, access.kind.releases) = (true, true),
                "nc" => access.kind.is_constant = true,
                "weak" | "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "L1::no_allocate" => {}
                "global" => access.space = Space::Global,
                "shared" | "shared::cta" => access.space = Space::Shared,
                "shared::cluster" => access.space = Space::Cluster,
                "local" => access.space = Space::Local,
                "param" => access.space = Space::Param,
                "v2" => access.count = 2,
                "v4" => access.count = 4,
                "b8" | "u8" => access.bytes = 1,
                "s8" => (access.bytes, access.is_signed) = (1, true),
                "b16" | "u16" => access.bytes = 2,
                "s16" => (access.bytes, access.is_signed) = (2, true),
                "b32" | "u32" | "f32" => access.bytes = 4,
                "s32" => (access.bytes, access.is_signed) = (4, true),
                "b64" | "u64" | "s64" | "f64" => access.bytes = 8,
                _ => return unknown(instruction),
            }
        }
        if access.bytes == 0 || access.bytes * access.count > 16 { unknown(instruction) } else { Ok(access) }
    }
}

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let access = Access::decode(instruction, parts)?;
    let is_load = instruction.parts()[0] == "ld";
    let [first, second] = &instruction.operands[..] else { return unknown(instruction) };
    let (data, address) = if is_load { (first, second) } else { (second, first) };
    let address = Address::decode(d, address)?;
    let elements = d.elements(data);
    if elements.len() != access.count {
        return unknown(instruction);
    }
    macro_rules! by_size {
        ($make:ident, $data:expr) => {
            match (access.bytes, access.count) {
                (1, 1) => $make::<1, 1>(access, address, $data),
                (2, 1) => $make::<2, 2>(access, address, $data),
                (2, 2) => $make::<4, 2>(access, address, $data),
                (2, 4) => $make::<8, 2>(access, address, $data),
                (4, 1) => $make::<4, 4>(access, address, $data),
                (4, 2) => $make::<8, 4>(access, address, $data),
                (4, 4) => $make::<16, 4>(access, address, $data),
                (8, 1) => $make::<8, 8>(access, address, $data),
                (8, 2) => $make::<16, 8>(access, address, $data),
                _ => return unknown(instruction),
            }
        };
    }
    lanes(if is_load {
        let targets =
            elements.iter().map(|target| d.any_target(target)).collect::<Decoded<Vec<AnyTarget>>>()?;
        by_size!(load, targets)
    } else {
        let sources = elements.iter().map(|source| d.any(source)).collect::<Decoded<Vec<AnySource>>>()?;
        let sources = (sources, instruction.location);
        by_size!(store, sources)
    })
}

/// Element `n` of E bytes as an integer.
#[inline(always)]
fn element<const E: usize, const N: usize>(bytes: &[u8; N], n: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..E].copy_from_slice(&bytes[n * E..][..E]);
    u64::from_le_bytes(wide)
}

/// Loads N bytes, elements of E.
fn load<const N: usize, const E: usize>(
    access: Access,
    address: Address,
    targets: Vec<AnyTarget>,
) -> Execute {
    Box::new(move |cx| {
        vectorized(
            #[inline(always)]
            || {
                let addresses = address.read(cx)?;
                let (data, marks) = cx.gather::<N>(access.space, &addresses)?;
                if cx.races.is_some() {
                    cx.note(access.space, &addresses, N as u64, access.kind)?;
                }
                for (n, target) in targets.iter().enumerate() {
                    if E == 4 && target.class == Class::B32 && marks.is_none() {
                        let mut values = [0u32; LANES];
                        for lane in 0..LANES {
                            values[lane] = element::<E, N>(&data[lane], n) as u32;
                        }
                        cx.write(target.slot, &values, 0);
                        continue;
                    }
                    let mut values = [0; LANES];
                    for lane in 0..LANES {
                        let value = element::<E, N>(&data[lane], n);
                        let shift = 64 - 8 * E;
                        values[lane] =
                            if access.is_signed { ((value << shift) as i64 >> shift) as u64 } else { value };
                    }
                    match &marks {
                        None => target.write(cx, &values, 0),
                        Some(marks) => {
                            let strict = cx.check_read(access.space, &addresses, N as u64)?;
                            write_marked::<E>(cx, *target, &values, marks, (n, access.is_signed, strict));
                        }
                    }
                }
                Ok(())
            },
        )
    })
}

/// Writes element `n` of what was loaded, with its marks.
#[inline(never)]
fn write_marked<const E: usize>(
    cx: &mut WarpContext<'_>,
    target: AnyTarget,
    values: &Lanes<u64>,
    marks: &Lanes<u16>,
    (n, is_signed, strict): (usize, bool, u32),
) {
    let of_element = |lane: usize| {
        let bits = marks[lane] >> (n * E) & ((1u32 << E) - 1) as u16;
        // Bytes that extend a signed number have the mark of its last one.
        let extends = is_signed && bits >> (E - 1) != 0;
        bits as u8 | if extends { (0xFFu32 << E) as u8 } else { 0 }
    };
    let marks = Marks { unwritten: std::array::from_fn(of_element), from_memory: u32::MAX, strict };
    target.write_marked(cx, values, &marks);
}

/// Stores N bytes, elements of E.
fn store<const N: usize, const E: usize>(
    access: Access,
    address: Address,
    (sources, location): (Vec<AnySource>, u32),
) -> Execute {
    Box::new(move |cx| {
        vectorized(
            #[inline(always)]
            || {
                let addresses = address.read(cx)?;
                if cx.races.is_some() {
                    cx.note(access.space, &addresses, N as u64, access.kind.with(AccessKind::WRITE))?;
                }
                let (mut data, mut is_marked) = ([[0; N]; LANES], false);
                for (n, source) in sources.iter().enumerate() {
                    is_marked |= source.is_marked(cx);
                    let values = source.read(cx);
                    for lane in 0..LANES {
                        data[lane][n * E..][..E].copy_from_slice(&values[lane].to_le_bytes()[..E]);
                    }
                }
                if is_marked {
                    return store_marked::<N, E>(cx, &access, &addresses, &data, (&sources, location));
                }
                cx.scatter(access.space, &addresses, &data, None)
            },
        )
    })
}

/// Stores values with bytes that were never written.
#[inline(never)]
fn store_marked<const N: usize, const E: usize>(
    cx: &mut WarpContext<'_>,
    access: &Access,
    addresses: &Lanes<u64>,
    data: &[[u8; N]; LANES],
    (sources, location): (&[AnySource], u32),
) -> Outcome {
    let mut marks = [0u16; LANES];
    for (n, source) in sources.iter().enumerate() {
        let limit = ((1u32 << E) - 1) as u16;
        let of_source = source.marks(cx);
        for lane in lanes_of(cx.active) {
            let bytes = u16::from(of_source.unwritten[lane]) & limit;
            if bytes != 0 && of_source.from_memory >> lane & 1 == 0 {
                uninitialised(1 << lane)?;
            }
            marks[lane] |= bytes << (n * E);
        }
    }
    let is_global = |lane: &usize| located(access.space, addresses[*lane]).0 == Space::Global;
    for lane in lanes_of(cx.active).filter(|lane| marks[*lane] != 0).filter(is_global) {
        cx.launch.memory.note_unwritten(addresses[lane], N as u64, || {
            let (block, thread) = (cx.position.block, cx.thread(lane));
            format!("{}, block {block:?}, thread {thread:?}", cx.launch.place(location))
        });
    }
    cx.scatter(access.space, addresses, data, Some(&marks))
}
