//! Memory of an emulated device, and the record of which of its bytes were ever written.
//!
//! A device's addresses are those of one reserved range of this process, so that a kernel's access is a host
//! access after a check. Every byte has a mark at a fixed distance, which is 1 once the byte was written;
//! copies carry marks along. Addresses are never used a second time, so an access to freed memory is always
//! outside. Physical memory is a sparse file, mapped shared: another process that maps the same file has the
//! same memory and marks.
#![allow(unsafe_code, reason = "it maps device memory and accesses it through pointers")]

mod bytes;

pub(crate) use bytes::{Bytes, Local};

use crate::fault::{FaultKind, Outcome, ThreadFault};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

/// Size of a device's address range, and the distance from a byte to its mark, in memory and in the file.
const SPAN: u64 = 1 << 42;

/// Page size. Mappings are multiples of it.
pub(crate) const PAGE: u64 = 4096;

/// Mapped addresses of one allocation.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: u64,
    bytes: u64,
    physical: Physical,
    /// True if the device may access the addresses.
    is_accessible: bool,
}

/// A range of the device's file, or of that of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Physical {
    /// The place in the list of other processes' files.
    foreign: Option<usize>,
    offset: u64,
    pub(crate) bytes: u64,
}

/// The memory of a device.
pub(crate) struct Memory {
    base: *mut u8,
    file: OwnedFd,
    /// Files of other processes, from which memory was imported.
    foreign: Vec<OwnedFd>,
    /// The first address and the first byte of the file that were never used.
    next_address: u64,
    next_offset: u64,
    /// Extents in ascending order of addresses.
    extents: Vec<Extent>,
    /// Index of the extent that was found last.
    last: Cell<usize>,
    /// Ends and places, in words, of the last stores of bytes that were never written, by address.
    unwritten: RefCell<BTreeMap<u64, (u64, String)>>,
    capacity: u64,
    used: u64,
}

// SAFETY: the mappings belong to this value and are reached through its methods; the emulator's lock admits
// one thread at a time.
unsafe impl Send for Memory {}

/// Stores of bytes that were never written whose places are kept.
const UNWRITTEN_STORES: usize = 1024;

/// Reason why the host cannot read device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    Outside,
    Unwritten,
}

/// The device has less memory left.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutOfMemory;

impl Memory {
    /// Memory of `capacity` bytes, all free.
    pub(crate) fn new(capacity: u64) -> Memory {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), 2 * SPAN as usize, ProtFlags::empty(), flags)
        };
        let base = base.expect("8 TiB of addresses can be reserved").cast::<u8>();
        let file =
            rustix::fs::memfd_create("emulated device", MemfdFlags::CLOEXEC).expect("a file in memory");
        rustix::fs::ftruncate(&file, 2 * SPAN).expect("a sparse file");
        Memory {
            base,
            file,
            foreign: Vec::new(),
            next_address: base as u64 + PAGE,
            next_offset: 0,
            extents: Vec::new(),
            last: Cell::new(0),
            unwritten: RefCell::default(),
            capacity,
            used: 0,
        }
    }

    /// Free and total bytes.
    pub(crate) fn free_and_total(&self) -> (u64, u64) {
        (self.capacity - self.used, self.capacity)
    }

    /// Reserves addresses for later mappings. They are never reused, so a device runs out after 4 TiB in
    /// total.
    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<u64, OutOfMemory> {
        let start = self.next_address;
        let left = self.base as u64 + SPAN - start;
        // A page that is never mapped lies between two reservations.
        let length = bytes.checked_next_multiple_of(PAGE).filter(|length| *length < left - PAGE);
        self.next_address += length.ok_or(OutOfMemory)? + PAGE;
        Ok(start)
    }

    /// Allocates physical memory, uninitialised.
    pub(crate) fn create(&mut self, bytes: u64) -> Result<Physical, OutOfMemory> {
        let left = self.capacity - self.used;
        let taken = bytes.checked_next_multiple_of(PAGE).filter(|taken| *taken <= left).ok_or(OutOfMemory)?;
        let physical = Physical { foreign: None, offset: self.next_offset, bytes };
        self.used += taken;
        self.next_offset += taken;
        Ok(physical)
    }

    /// Allocates accessible memory, uninitialised; returns its address.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64, OutOfMemory> {
        let start = self.reserve(bytes)?;
        let physical = self.create(bytes)?;
        self.map(start, physical);
        self.allow_access(start, bytes);
        Ok(start)
    }

    /// A file that names physical memory to other processes, as long as this process lives.
    pub(crate) fn export(&self, physical: Physical) -> OwnedFd {
        let name = [rustix::process::getpid().as_raw_nonzero().get() as u64, self.file.as_raw_fd() as u64];
        let words = [name[0], name[1], physical.offset, physical.bytes];
        let file =
            rustix::fs::memfd_create("emulated memory", MemfdFlags::CLOEXEC).expect("a file in memory");
        let bytes = words.map(u64::to_le_bytes).concat();
        rustix::io::pwrite(&file, &bytes, 0).expect("a file in memory can be written");
        file
    }

    /// Physical memory of another process that named it by [`Memory::export`].
    pub(crate) fn import(&mut self, file: BorrowedFd<'_>) -> Option<Physical> {
        let mut bytes = [0; 32];
        rustix::io::pread(file, &mut bytes, 0).ok().filter(|read| *read == bytes.len())?;
        let word = |n: usize| bytes[8 * n..8 * n + 8].try_into().map_or(0, u64::from_le_bytes);
        let path = format!("/proc/{}/fd/{}", word(0), word(1));
        let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        self.foreign.push(opened);
        Some(Physical { foreign: Some(self.foreign.len() - 1), offset: word(2), bytes: word(3) })
    }

    /// Frees physical memory.
    pub(crate) fn release(&mut self, physical: Physical) {
        if physical.foreign.is_some() {
            return;
        }
        let taken = physical.bytes.next_multiple_of(PAGE);
        self.used -= taken;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for offset in [physical.offset, physical.offset + SPAN] {
            rustix::fs::fallocate(&self.file, flags, offset, taken).expect("a hole in a file in memory");
        }
    }

    /// Maps physical memory to reserved addresses, without access.
    pub(crate) fn map(&mut self, start: u64, physical: Physical) {
        let length = physical.bytes.next_multiple_of(PAGE) as usize;
        for distance in [0, SPAN] {
            let (at, offset) = ((start + distance) as *mut c_void, physical.offset + distance);
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            let file = physical.foreign.map_or(&self.file, |foreign| &self.foreign[foreign]);
            // SAFETY: the addresses lie in the reservation of `new`, which this value owns.
            let placed = unsafe { rustix::mm::mmap(at, length, access, flags, file, offset) };
            placed.expect("a page of a file in memory can be mapped");
        }
        let index = self.extents.partition_point(|extent| extent.start < start);
        self.extents.insert(index, Extent { start, bytes: physical.bytes, physical, is_accessible: false });
    }

    /// Makes mapped memory accessible; false, and nothing changes, unless the range is that of one or more
    /// mappings.
    pub(crate) fn allow_access(&mut self, start: u64, bytes: u64) -> bool {
        let is_inside = |of: &Extent| start <= of.start && of.start + of.bytes <= start + bytes;
        let mapped: u64 = self.extents.iter().filter(|of| is_inside(of)).map(|of| of.bytes).sum();
        let is_whole = mapped == bytes;
        if is_whole {
            self.extents.iter_mut().filter(|of| is_inside(of)).for_each(|of| of.is_accessible = true);
        }
        is_whole
    }

    /// True if nothing is mapped in this range.
    pub(crate) fn is_free(&self, start: u64, bytes: u64) -> bool {
        !self.extents.iter().any(|extent| extent.start < start + bytes && start < extent.start + extent.bytes)
    }

    /// Undoes [`Memory::map`]; returns the memory that was mapped from `start` on.
    pub(crate) fn unmap(&mut self, start: u64) -> Option<Physical> {
        let index = self.extents.iter().position(|extent| extent.start == start)?;
        let Extent { physical, .. } = self.extents.remove(index);
        self.last.set(0);
        let length = physical.bytes.next_multiple_of(PAGE) as usize;
        for distance in [0, SPAN] {
            let (at, flags) = (
                (start + distance) as *mut c_void,
                MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
            );
            // SAFETY: the addresses lie in the reservation of `new`, as at first.
            let hole = unsafe { rustix::mm::mmap_anonymous(at, length, ProtFlags::empty(), flags) };
            hole.expect("addresses can be reserved again");
        }
        Some(physical)
    }

    /// The extent that holds all of these bytes.
    fn find(&self, address: u64, bytes: u64) -> Option<&Extent> {
        let holds = |extent: &Extent| {
            let offset = address.wrapping_sub(extent.start);
            offset < extent.bytes && bytes <= extent.bytes - offset
        };
        if let Some(extent) = self.extents.get(self.last.get()).filter(|extent| holds(extent)) {
            return Some(extent);
        }
        let index = self.extents.partition_point(|extent| extent.start <= address).checked_sub(1)?;
        let extent = Some(&self.extents[index]).filter(|extent| holds(extent))?;
        self.last.set(index);
        Some(extent)
    }

    /// The bytes from `address` on, if one allocation holds them and the device may access it.
    #[inline]
    pub(crate) fn bytes(&self, address: u64, bytes: u64) -> Option<Bytes<'_>> {
        self.find(address, bytes).filter(|extent| extent.is_accessible)?;
        // SAFETY: these bytes and their marks are mapped while `self` is borrowed, since unmapping takes
        // `&mut self`.
        Some(unsafe { Bytes::new(address as *mut u8, (address + SPAN) as *mut u8, bytes as usize) })
    }

    /// The bytes from `address` on, in one piece for each allocation that they span.
    pub(crate) fn pieces(&self, mut address: u64, mut bytes: u64) -> Option<Vec<Bytes<'_>>> {
        let mut all = Vec::new();
        while bytes > 0 {
            let extent = self.find(address, 1)?;
            let length = bytes.min(extent.start + extent.bytes - address);
            all.push(self.bytes(address, length)?);
            (address, bytes) = (address + length, bytes - length);
        }
        Some(all)
    }

    /// Copies bytes to the host. Bytes that were never written are an error.
    pub(crate) fn read(&self, address: u64, mut target: &mut [u8]) -> Result<(), Unreadable> {
        for piece in self.pieces(address, target.len() as u64).ok_or(Unreadable::Outside)? {
            if !piece.is_written() {
                return Err(Unreadable::Unwritten);
            }
            let (part, rest) = target.split_at_mut(piece.len());
            // SAFETY: the part has as many bytes as the piece.
            unsafe { piece.copy_to_host(part.as_mut_ptr()) };
            target = rest;
        }
        Ok(())
    }

    /// Notes that a kernel stores bytes of which some were never written.
    pub(crate) fn note_unwritten(&self, address: u64, bytes: u64, place: impl FnOnce() -> String) {
        let mut stores = self.unwritten.borrow_mut();
        if stores.len() < UNWRITTEN_STORES || stores.contains_key(&address) {
            stores.insert(address, (address + bytes, place()));
        }
    }

    /// Describes those of these bytes that were never written: how many, where the first is, and who stored
    /// it; `None` if there are none.
    pub(crate) fn describe_unwritten(&self, address: u64, bytes: u64) -> Option<String> {
        let (mut start, mut first, mut count) = (address, None, 0);
        for piece in self.pieces(address, bytes)? {
            for n in (0..piece.len()).filter(|&n| piece.marks(n) == [0]) {
                first.get_or_insert(start + n as u64);
                count += 1;
            }
            start += piece.len() as u64;
        }
        let first = first?;
        let stores = self.unwritten.borrow();
        let store = stores.range(..=first).rev().find(|(_, (end, _))| first < *end);
        let who = match store {
            Some((_, (_, place))) => format!(
                "was stored without ever having had a value by {place} (`races=1` reports what was read too early)"
            ),
            None if stores.len() < UNWRITTEN_STORES => "no kernel or copy wrote".to_owned(),
            None => "was never written, or stored where it is no longer known".to_owned(),
        };
        let all = self.describe(address, bytes);
        Some(format!("{count} of {all}; the first, byte {} of them, {who}", first - address))
    }

    /// Copies bytes from the host, which marks them as written; `None` if they are outside of memory.
    pub(crate) fn write(&self, address: u64, mut source: &[u8]) -> Option<()> {
        for piece in self.pieces(address, source.len() as u64)? {
            let (part, rest) = source.split_at(piece.len());
            // SAFETY: the part has as many bytes as the piece.
            unsafe { piece.copy_from_host(part.as_ptr()) };
            source = rest;
        }
        Some(())
    }

    /// A word that other processes may write meanwhile; what they wrote before it is there.
    pub(crate) fn signal(&self, address: u64) -> Option<u32> {
        self.signal_at(address).map(|signal| signal.load(Ordering::Acquire))
    }

    /// Writes a word after all that was written before.
    pub(crate) fn set_signal(&self, address: u64, value: u32) -> Option<()> {
        let bytes = self.bytes(address, 4)?;
        self.signal_at(address)?.store(value, Ordering::Release);
        bytes.mark();
        Some(())
    }

    fn signal_at(&self, address: u64) -> Option<&AtomicU32> {
        self.find(address, 4).filter(|extent| extent.is_accessible && address.is_multiple_of(4))?;
        // SAFETY: the word is mapped while `self` is borrowed and aligned; others access it by atomics too.
        Some(unsafe { AtomicU32::from_ptr(address as *mut u32) })
    }

    /// Start and length of the allocation that contains an address.
    pub(crate) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        self.find(address, 1).map(|extent| (extent.start, extent.bytes))
    }

    /// Describes an address for messages.
    pub(crate) fn describe(&self, address: u64, bytes: u64) -> String {
        let index = self.extents.partition_point(|extent| extent.start <= address);
        let before = index.checked_sub(1).map(|index| self.extents[index]);
        match before.filter(|extent| address < extent.start + extent.bytes + 4 * PAGE) {
            Some(Extent { is_accessible: false, .. }) => {
                format!("{bytes} bytes at {address:#x}, which is mapped without access")
            }
            Some(Extent { start, bytes: length, .. }) => {
                format!("{bytes} bytes at offset {} of an allocation of {length} bytes", address - start)
            }
            None if self.is_of_device(address) => {
                format!("{bytes} bytes at {address:#x}, which is not allocated")
            }
            None => format!("{bytes} bytes at {address:#x}, which is not a device address"),
        }
    }

    /// True if the address was allocated at any time.
    pub(crate) fn is_of_device(&self, address: u64) -> bool {
        (self.base as u64..self.next_address).contains(&address)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nothing of it is reached any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), 2 * SPAN as usize) };
    }
}

/// The fault of an access out of bounds.
pub(crate) fn outside<T>(lane: u32, does: &str, what: String) -> Outcome<T> {
    Err(ThreadFault::new(lane, FaultKind::Address, format!("{does} out of bounds: {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_allowed_to_whole_mappings() {
        let mut memory = Memory::new(8 * PAGE);
        let start = memory.reserve(4 * PAGE).unwrap();
        for n in [0, 1] {
            let physical = memory.create(2 * PAGE).unwrap();
            memory.map(start + n * 2 * PAGE, physical);
        }
        for (from, pages) in [(0, 1), (0, 3), (1, 1), (1, 3), (0, 5), (4, 1)] {
            assert!(!memory.allow_access(start + from * PAGE, pages * PAGE), "{pages} pages from {from} on");
        }
        assert_eq!(memory.write(start, &[1]), None);
        assert!(memory.allow_access(start, 4 * PAGE));
        assert_eq!(memory.write(start + 3 * PAGE, &[1]), Some(()));
    }
}
