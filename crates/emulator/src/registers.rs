//! The registers of a warp: each has a value for each of 32 lanes, and marks for uninitialised bytes.
//!
//! Bytes of a register that no instruction wrote are *unset*. Arithmetic with them is allowed, because lanes
//! whose results are never used often do it, and its result is unset. Bytes loaded from uninitialised memory
//! are marked too. Arithmetic with those of global memory is a fault; those of shared memory are like unset
//! ones, because kernels compute with the unused end of a tile.

use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::poison::POISON;
use crate::ptx::Class;

/// Threads of a warp.
pub(crate) const LANES: usize = 32;
/// Warps of a warpgroup, which execute `wgmma` together.
pub(crate) const WARPGROUP: usize = 4;

/// A value for each lane.
pub(crate) type Lanes<T> = [T; LANES];

/// Index of a register within its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegisterSlot(pub(crate) u16);

/// The values of one register.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct RegisterRow<T>(Lanes<T>);

/// The uninitialised bytes of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    /// A bit for each byte of each lane.
    pub(crate) unwritten: Lanes<u8>,
    /// The lanes whose bytes came from memory.
    pub(crate) from_memory: u32,
    /// The lanes whose bytes came from global memory or from asynchronous work under way, so that arithmetic
    /// with them is a fault.
    pub(crate) strict: u32,
}

impl Marks {
    pub(crate) const NONE: Marks = Marks { unwritten: [0; LANES], from_memory: 0, strict: 0 };
    /// Marks of a register that asynchronous work will write. To store them is a fault too.
    const RESERVED: Marks = Marks { unwritten: [15; LANES], from_memory: 0, strict: u32::MAX };
}

/// Registers of one class with their marks.
#[derive(Clone, Debug)]
pub(crate) struct File<T> {
    rows: Vec<RegisterRow<T>>,
    /// Lanes that have marks, by slot. Entries of `marks` for other lanes are stale.
    marked: Vec<u32>,
    marks: Vec<Marks>,
}

impl<T: Copy> File<T> {
    const UNSET: Marks =
        Marks { unwritten: [((1u32 << size_of::<T>()) - 1) as u8; LANES], from_memory: 0, strict: 0 };

    fn new(slots: usize, poison: T) -> Self {
        File {
            rows: vec![RegisterRow([poison; LANES]); slots],
            marked: vec![u32::MAX; slots],
            marks: vec![Self::UNSET; slots],
        }
    }

    fn forget(&mut self) {
        self.marked.fill(u32::MAX);
        self.marks.fill(Self::UNSET);
    }

    fn mark(&mut self, slot: usize, marks: &Marks, active: u32) {
        let of_slot = &mut self.marks[slot];
        for lane in lanes_of(active) {
            of_slot.unwritten[lane] = marks.unwritten[lane];
            let bit = 1 << lane;
            self.marked[slot] = self.marked[slot] & !bit | if marks.unwritten[lane] != 0 { bit } else { 0 };
        }
        of_slot.from_memory = of_slot.from_memory & !active | marks.from_memory & active;
        of_slot.strict = of_slot.strict & !active | marks.strict & active;
    }
}

/// All registers of a warp.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    b16: File<u16>,
    b32: File<u32>,
    b64: File<u64>,
    /// A bit for each lane.
    predicates: Vec<u32>,
    /// The lanes that are unset.
    unset_predicates: Vec<u32>,
}

/// Number of slots of each class that a kernel needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotCounts {
    pub(crate) predicates: usize,
    pub(crate) b16: usize,
    pub(crate) b32: usize,
    pub(crate) b64: usize,
}

impl SlotCounts {
    pub(crate) fn count_mut(&mut self, class: Class) -> &mut usize {
        match class {
            Class::Predicate => &mut self.predicates,
            Class::B16 => &mut self.b16,
            Class::B32 => &mut self.b32,
            Class::B64 => &mut self.b64,
        }
    }
}

/// A type of values in registers.
pub(crate) trait Lane: bytemuck::Pod + Copy + Default + Send + Sync + PartialOrd + 'static {
    /// The register's own type.
    type Bits: Copy + Default + bytemuck::Pod;
    /// The class of its registers.
    const CLASS: Class;
    fn file(registers: &Registers) -> &File<Self::Bits>;
    fn file_mut(registers: &mut Registers) -> &mut File<Self::Bits>;
    /// Values as their registers' bits, and back.
    fn bits(values: &Lanes<Self>) -> &Lanes<Self::Bits>;
    fn from_bits(bits: &Lanes<Self::Bits>) -> &Lanes<Self>;
    /// The low bits of an integer constant.
    fn from_u64(bits: u64) -> Self;
    /// The bits, zero-extended.
    fn into_u64(self) -> u64;
}

macro_rules! lane {
    ($($ty:ty, $bits:ty, $file:ident, $class:ident, $from:expr, $to:expr;)*) => {$(
        impl Lane for $ty {
            type Bits = $bits;
            const CLASS: Class = Class::$class;
            #[inline(always)]
            fn file(registers: &Registers) -> &File<$bits> {
                &registers.$file
            }
            #[inline(always)]
            fn file_mut(registers: &mut Registers) -> &mut File<$bits> {
                &mut registers.$file
            }
            #[inline(always)]
            fn bits(values: &Lanes<$ty>) -> &Lanes<$bits> {
                bytemuck::must_cast_ref(values)
            }
            #[inline(always)]
            fn from_bits(bits: &Lanes<$bits>) -> &Lanes<$ty> {
                bytemuck::must_cast_ref(bits)
            }
            #[inline(always)]
            fn from_u64(bits: u64) -> $ty {
                $from(bits as $bits)
            }
            fn into_u64(self) -> u64 {
                $to(self).into()
            }
        }
    )*};
}

lane! {
    u16, u16, b16, B16, |bits| bits, |value: u16| value;
    i16, u16, b16, B16, |bits| bits as i16, |value: i16| value as u16;
    u32, u32, b32, B32, |bits| bits, |value: u32| value;
    i32, u32, b32, B32, |bits| bits as i32, |value: i32| value as u32;
    f32, u32, b32, B32, f32::from_bits, f32::to_bits;
    u64, u64, b64, B64, |bits| bits, |value: u64| value;
    i64, u64, b64, B64, |bits| bits as i64, |value: i64| value as u64;
    f64, u64, b64, B64, f64::from_bits, f64::to_bits;
}

impl Registers {
    /// Registers that were never written.
    pub(crate) fn new(slots: SlotCounts) -> Registers {
        Registers {
            b16: File::new(slots.b16, u16::from_le_bytes([POISON; 2])),
            b32: File::new(slots.b32, u32::from_le_bytes([POISON; 4])),
            b64: File::new(slots.b64, u64::from_le_bytes([POISON; 8])),
            predicates: vec![0; slots.predicates],
            unset_predicates: vec![u32::MAX; slots.predicates],
        }
    }

    #[inline(always)]
    pub(crate) fn read<T: Lane>(&self, slot: RegisterSlot) -> Lanes<T> {
        *T::from_bits(&T::file(self).rows[usize::from(slot.0)].0)
    }

    /// Writes the lanes of `active`.
    #[inline(always)]
    pub(crate) fn write<T: Lane>(&mut self, slot: RegisterSlot, values: &Lanes<T>, active: u32) {
        let file = T::file_mut(self);
        let (row, values) = (&mut file.rows[usize::from(slot.0)].0, T::bits(values));
        if active == u32::MAX {
            *row = *values;
        } else {
            for lane in 0..LANES {
                row[lane] = if active >> lane & 1 != 0 { values[lane] } else { row[lane] };
            }
        }
        file.marked[usize::from(slot.0)] &= !active;
    }

    /// The lanes with marks.
    #[inline(always)]
    pub(crate) fn marked<T: Lane>(&self, slot: RegisterSlot) -> u32 {
        T::file(self).marked[usize::from(slot.0)]
    }

    /// The marks of all lanes.
    pub(crate) fn marks<T: Lane>(&self, slot: RegisterSlot) -> Marks {
        let (file, slot) = (T::file(self), usize::from(slot.0));
        let Marks { unwritten, from_memory, strict } = file.marks[slot];
        let is_marked = |lane: usize| file.marked[slot] >> lane & 1 != 0;
        Marks {
            unwritten: std::array::from_fn(|lane| if is_marked(lane) { unwritten[lane] } else { 0 }),
            from_memory: from_memory & file.marked[slot],
            strict: strict & file.marked[slot],
        }
    }

    /// Sets the marks of the lanes of `active`, after these were written.
    pub(crate) fn mark<T: Lane>(&mut self, slot: RegisterSlot, marks: &Marks, active: u32) {
        T::file_mut(self).mark(usize::from(slot.0), marks, active);
    }

    /// Marks lanes as unset, after a result of unset operands was written.
    pub(crate) fn unset<T: Lane>(&mut self, slot: RegisterSlot, lanes: u32) {
        T::file_mut(self).mark(usize::from(slot.0), &File::<T::Bits>::UNSET, lanes);
    }

    /// Marks all lanes of a register that asynchronous work will write.
    pub(crate) fn reserve(&mut self, RegisterSlot(slot): RegisterSlot) {
        let file = &mut self.b32;
        (file.marked[usize::from(slot)], file.marks[usize::from(slot)]) = (u32::MAX, Marks::RESERVED);
    }

    /// True if no instruction has written the register since it was reserved.
    pub(crate) fn is_reserved(&self, RegisterSlot(slot): RegisterSlot) -> bool {
        let file = &self.b32;
        file.marked[usize::from(slot)] == u32::MAX && file.marks[usize::from(slot)] == Marks::RESERVED
    }

    /// Writes all lanes of a reserved register, which stays so.
    pub(crate) fn write_reserved(&mut self, RegisterSlot(slot): RegisterSlot, values: &Lanes<f32>) {
        self.b32.rows[usize::from(slot)].0 = *f32::bits(values);
    }

    /// Undoes [`Registers::reserve`].
    pub(crate) fn unreserve(&mut self, RegisterSlot(slot): RegisterSlot) {
        self.b32.marked[usize::from(slot)] = 0;
    }

    /// A predicate and its unset lanes, as masks.
    #[inline(always)]
    pub(crate) fn predicate(&self, slot: RegisterSlot) -> (u32, u32) {
        (self.predicates[usize::from(slot.0)], self.unset_predicates[usize::from(slot.0)])
    }

    #[inline(always)]
    pub(crate) fn write_predicate(&mut self, slot: RegisterSlot, values: u32, unset: u32, active: u32) {
        let slot = usize::from(slot.0);
        self.predicates[slot] = self.predicates[slot] & !active | values & active;
        self.unset_predicates[slot] = self.unset_predicates[slot] & !active | unset & active;
    }

    /// Makes all registers unset.
    pub(crate) fn forget(&mut self) {
        self.b16.forget();
        self.b32.forget();
        self.b64.forget();
        self.unset_predicates.fill(u32::MAX);
    }

    /// A hash of all values, to detect a spinning warp.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut sum = 0u64;
        let mut add = |value: u64| sum = (sum.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.b16.rows.iter().flat_map(|row| row.0).for_each(|value| add(value.into()));
        self.b32.rows.iter().flat_map(|row| row.0).for_each(|value| add(value.into()));
        self.b64.rows.iter().flat_map(|row| row.0).for_each(&mut add);
        self.predicates.iter().for_each(|value| add((*value).into()));
        sum
    }
}

/// The fault of using an uninitialised value.
#[cold]
pub(crate) fn uninitialised(lanes: u32) -> Outcome {
    let problem = "uses an uninitialised value";
    Err(ThreadFault::new(lanes.trailing_zeros(), FaultKind::Uninitialised, problem))
}

/// The lanes whose bits are set.
pub(crate) fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        mask &= mask - 1;
        Some(lane)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_hold_what_active_lanes_write_and_mark_what_none_wrote() {
        let mut registers = Registers::new(SlotCounts { predicates: 1, b16: 1, b32: 2, b64: 1 });
        let slot = RegisterSlot(1);
        assert_eq!(registers.marked::<u32>(slot), u32::MAX);
        registers.write(slot, &[1.5f32; LANES], 0xFF);
        assert_eq!(registers.marked::<u32>(slot), !0xFF);
        let values = registers.read::<u32>(slot);
        assert_eq!((values[7], values[8]), (1.5f32.to_bits(), 0xCBCB_CBCB));
        registers.unset::<u32>(slot, 1);
        assert_eq!(registers.marked::<u32>(slot), !0xFE);
        let mut marks = Marks { from_memory: 1 << 3, ..Marks::NONE };
        marks.unwritten[3] = 0b1100;
        registers.mark::<f32>(slot, &marks, 0xFF);
        assert_eq!(registers.marked::<u32>(slot) & 0xFF, 1 << 3);
        let found = registers.marks::<u32>(slot);
        assert_eq!((found.unwritten[3], found.unwritten[4], found.from_memory), (0b1100, 0, 1 << 3));
        registers.write_predicate(RegisterSlot(0), 0b101, 0b100, 0b111);
        assert_eq!(registers.predicate(RegisterSlot(0)), (0b101, !0b011));
        assert_eq!(lanes_of(0b1010_0001).collect::<Vec<_>>(), [0, 5, 7]);
    }
}
