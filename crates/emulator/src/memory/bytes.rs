//! Bytes and their marks: the accesses of kernels and copies, and the memory of a block or thread.

use crate::poison::POISON;
use crate::registers::{LANES, Lanes};
use std::cell::Cell;
use std::marker::PhantomData;

/// A range of memory with its marks. A shared reference suffices for reading and writing, because threads of
/// a kernel share memory.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'m> {
    data: *mut u8,
    marks: *mut u8,
    length: usize,
    memory: PhantomData<&'m Cell<u8>>,
}

impl<'m> Bytes<'m> {
    /// The range that starts at `data`, and its marks.
    ///
    /// # Safety
    ///
    /// Both are valid for `length` bytes for `'m`.
    pub(super) unsafe fn new(data: *mut u8, marks: *mut u8, length: usize) -> Bytes<'m> {
        Bytes { data, marks, length, memory: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.length
    }

    /// The N bytes from `at` on.
    #[inline(always)]
    pub(crate) fn read<const N: usize>(self, at: usize) -> [u8; N] {
        assert!(at + N <= self.length);
        // SAFETY: `data` is valid for `length` bytes that nobody else writes meanwhile: one thread at a time
        // runs the emulator.
        unsafe { self.data.wrapping_add(at).cast::<[u8; N]>().read_unaligned() }
    }

    /// Replaces N bytes from `at` on and marks them as written.
    #[inline(always)]
    pub(crate) fn write<const N: usize>(self, at: usize, bytes: [u8; N]) {
        self.write_marked(at, bytes, [1; N]);
    }

    /// As [`Bytes::write`], with given marks.
    #[inline(always)]
    pub(crate) fn write_marked<const N: usize>(self, at: usize, bytes: [u8; N], marks: [u8; N]) {
        assert!(at + N <= self.length);
        // SAFETY: as in `read`.
        unsafe { self.data.wrapping_add(at).cast::<[u8; N]>().write_unaligned(bytes) };
        // SAFETY: there are as many marks as bytes.
        unsafe { self.marks.wrapping_add(at).cast::<[u8; N]>().write_unaligned(marks) };
    }

    /// The marks of N bytes from `at` on.
    #[inline(always)]
    pub(crate) fn marks<const N: usize>(self, at: usize) -> [u8; N] {
        assert!(at + N <= self.length);
        // SAFETY: as in `write_marked`.
        unsafe { self.marks.wrapping_add(at).cast::<[u8; N]>().read_unaligned() }
    }

    /// N bytes and their marks for each lane of a warp, at these offsets; `None` if one is out of range.
    #[inline(always)]
    pub(crate) fn gather<const N: usize>(
        self,
        offsets: &Lanes<u64>,
    ) -> Option<([[u8; N]; LANES], [[u8; N]; LANES])> {
        self.holds(offsets, N)?;
        let (mut data, mut marks) = ([[0; N]; LANES], [[0; N]; LANES]);
        if are_neighbours(offsets, N) {
            let offset = offsets[0] as usize;
            // SAFETY: the first and the last lane's bytes lie within, so those between do; otherwise as in
            // `read`.
            data = unsafe { self.data.wrapping_add(offset).cast::<[[u8; N]; LANES]>().read_unaligned() };
            // SAFETY: there are as many marks as bytes.
            marks = unsafe { self.marks.wrapping_add(offset).cast::<[[u8; N]; LANES]>().read_unaligned() };
            return Some((data, marks));
        }
        for lane in 0..LANES {
            let offset = offsets[lane] as usize;
            // SAFETY: checked above; otherwise as in `read`.
            data[lane] = unsafe { self.data.wrapping_add(offset).cast::<[u8; N]>().read_unaligned() };
            // SAFETY: there are as many marks as bytes.
            marks[lane] = unsafe { self.marks.wrapping_add(offset).cast::<[u8; N]>().read_unaligned() };
        }
        Some((data, marks))
    }

    /// Replaces N bytes for each lane of `active`; returns true if a byte or a mark changed. If an offset is
    /// out of range, returns `None` and writes nothing.
    #[inline(always)]
    pub(crate) fn scatter<const N: usize>(
        self,
        offsets: &Lanes<u64>,
        data: &[[u8; N]; LANES],
        active: u32,
    ) -> Option<bool> {
        self.holds(offsets, N)?;
        if active == u32::MAX && are_neighbours(offsets, N) {
            let offset = offsets[0] as usize;
            let target = self.data.wrapping_add(offset).cast::<[[u8; N]; LANES]>();
            let marks = self.marks.wrapping_add(offset).cast::<[[u8; N]; LANES]>();
            // SAFETY: the first and the last lane's bytes lie within, so those between do; otherwise as in
            // `read`.
            let old = unsafe { target.read_unaligned() };
            // SAFETY: there are as many marks as bytes.
            let old_marks = unsafe { marks.read_unaligned() };
            // SAFETY: as above.
            unsafe { target.write_unaligned(*data) };
            // SAFETY: as above.
            unsafe { marks.write_unaligned([[1; N]; LANES]) };
            return Some(old != *data || old_marks != [[1; N]; LANES]);
        }
        let mut changed = false;
        for lane in 0..LANES {
            if active >> lane & 1 != 0 {
                let offset = offsets[lane] as usize;
                let target = self.data.wrapping_add(offset).cast::<[u8; N]>();
                let marks = self.marks.wrapping_add(offset).cast::<[u8; N]>();
                // SAFETY: checked above; otherwise as in `read`.
                let old = unsafe { target.read_unaligned() };
                // SAFETY: there are as many marks as bytes.
                let old_marks = unsafe { marks.read_unaligned() };
                changed |= old != data[lane] || old_marks != [1; N];
                // SAFETY: as above.
                unsafe { target.write_unaligned(data[lane]) };
                // SAFETY: as above.
                unsafe { marks.write_unaligned([1; N]) };
            }
        }
        Some(changed)
    }

    /// `Some` if N bytes from each offset are in range.
    #[inline(always)]
    fn holds(self, offsets: &Lanes<u64>, bytes: usize) -> Option<()> {
        let last = self.length.checked_sub(bytes)? as u64;
        let mut outside = 0u64;
        for offset in offsets {
            outside += u64::from(*offset > last);
        }
        (outside == 0).then_some(())
    }

    /// Fills the bytes.
    pub(crate) fn fill(self, byte: u8) {
        // SAFETY: as in `read`.
        unsafe { self.data.write_bytes(byte, self.length) };
        // SAFETY: as in `write_marked`.
        unsafe { self.marks.write_bytes(1, self.length) };
    }

    /// True if every byte was written.
    pub(crate) fn is_written(self) -> bool {
        // SAFETY: there are as many marks as bytes, which nobody else writes meanwhile, as in `read`.
        let marks = unsafe { std::slice::from_raw_parts(self.marks, self.length) };
        marks.iter().fold(1, |all, mark| all & mark) == 1
    }

    /// Marks all bytes as written.
    pub(crate) fn mark(self) {
        // SAFETY: as in `write_marked`.
        unsafe { self.marks.write_bytes(1, self.length) };
    }

    /// Marks all bytes as never written.
    pub(crate) fn forget(self) {
        // SAFETY: as in `write_marked`.
        unsafe { self.marks.write_bytes(0, self.length) };
    }

    /// Copies from host memory and marks the bytes as written.
    ///
    /// # Safety
    ///
    /// `source` is valid for as many bytes.
    pub(crate) unsafe fn copy_from_host(self, source: *const u8) {
        // SAFETY: the caller's promise; a device's addresses are no memory of a host program's.
        unsafe { self.data.copy_from(source, self.length) };
        // SAFETY: as in `write_marked`.
        unsafe { self.marks.write_bytes(1, self.length) };
    }

    /// Copies to host memory.
    ///
    /// # Safety
    /// `target` is valid for as many bytes.
    pub(crate) unsafe fn copy_to_host(self, target: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.data.copy_to(target, self.length) };
    }

    /// Copies bytes and marks. Both ranges have one length and may overlap.
    pub(crate) fn copy_from(self, source: Bytes<'_>) {
        assert_eq!(self.length, source.length);
        // SAFETY: both are valid for as many bytes.
        unsafe { self.data.copy_from(source.data, self.length) };
        // SAFETY: both have as many marks.
        unsafe { self.marks.copy_from(source.marks, self.length) };
    }

    /// The bytes before `at`, and the rest.
    pub(crate) fn split(self, at: usize) -> (Self, Self) {
        assert!(at <= self.length);
        let (data, marks) = (self.data.wrapping_add(at), self.marks.wrapping_add(at));
        (Bytes { length: at, ..self }, Bytes { data, marks, length: self.length - at, ..self })
    }
}

/// Memory of a block or of its threads, with marks like a device's.
pub(crate) struct Local {
    data: Box<[Cell<u8>]>,
    marks: Box<[Cell<u8>]>,
}

impl Local {
    /// Uninitialised memory of `bytes` bytes.
    pub(crate) fn new(bytes: usize) -> Local {
        let filled = |byte: u8| vec![Cell::new(byte); bytes].into();
        Local { data: filled(POISON), marks: filled(0) }
    }

    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    /// Marks all bytes as never written.
    pub(crate) fn forget(&mut self) {
        self.data.iter_mut().for_each(|byte| *byte.get_mut() = POISON);
        self.marks.iter_mut().for_each(|mark| *mark.get_mut() = 0);
    }

    /// A range of this memory, if it lies within.
    #[inline]
    pub(crate) fn bytes(&self, offset: u64, bytes: u64) -> Option<Bytes<'_>> {
        let length = self.data.len() as u64;
        (offset <= length && bytes <= length - offset).then(|| {
            let range = offset as usize..(offset + bytes) as usize;
            Bytes {
                data: self.data[range.clone()].as_ptr().cast_mut().cast(),
                marks: self.marks[range].as_ptr().cast_mut().cast(),
                length: bytes as usize,
                memory: PhantomData,
            }
        })
    }
}

/// True if the bytes of all lanes are contiguous.
#[inline(always)]
fn are_neighbours(offsets: &Lanes<u64>, bytes: usize) -> bool {
    // Counts mismatches, because an early exit would compile to 32 branches.
    let mut differing = 0u64;
    for lane in 0..LANES {
        differing += u64::from(offsets[lane] != offsets[0].wrapping_add((lane * bytes) as u64));
    }
    differing == 0
}
