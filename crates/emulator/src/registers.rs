//! The registers of a warp: each has a value for each of 32 lanes, and marks for the bytes that were never written.

use crate::fault::{Fault, FaultKind, Outcome};
use crate::ptx::Class;

/// Threads of a warp.
pub(crate) const LANES: usize = 32;

/// A value for each lane.
pub(crate) type Lanes<T> = [T; LANES];

/// Where a register is kept: an index among those of its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) u16);

/// The values of one register.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Row<T>(Lanes<T>);

/// Registers of one class, and per lane a bit for each byte that was never written.
#[derive(Clone, Debug)]
pub(crate) struct File<T> {
    rows: Vec<Row<T>>,
    /// By slot, the lanes of which `unwritten` names a byte.
    marked: Vec<u32>,
    unwritten: Vec<Lanes<u8>>,
}

impl<T: Copy + Default> File<T> {
    fn new(slots: usize) -> Self {
        let all = (1u32 << size_of::<T>()) - 1;
        File {
            rows: vec![Row([T::default(); LANES]); slots],
            marked: vec![u32::MAX; slots],
            unwritten: vec![[all as u8; LANES]; slots],
        }
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
    unwritten_predicates: Vec<u32>,
}

/// How many slots of each class a kernel needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotCounts {
    pub(crate) predicates: usize,
    pub(crate) b16: usize,
    pub(crate) b32: usize,
    pub(crate) b64: usize,
}

impl SlotCounts {
    pub(crate) fn of(&mut self, class: Class) -> &mut usize {
        match class {
            Class::Predicate => &mut self.predicates,
            Class::B16 => &mut self.b16,
            Class::B32 => &mut self.b32,
            Class::B64 => &mut self.b64,
        }
    }
}

/// A type that registers hold values of.
pub(crate) trait Lane: Copy + Default + Send + Sync + PartialOrd + 'static {
    /// The register's own type.
    type Bits: Copy + Default;
    /// Its registers.
    const CLASS: Class;
    fn file(registers: &Registers) -> &File<Self::Bits>;
    fn file_mut(registers: &mut Registers) -> &mut File<Self::Bits>;
    fn from_bits(bits: Self::Bits) -> Self;
    fn bits(self) -> Self::Bits;
    /// The low bits of an integer constant.
    fn from_u64(bits: u64) -> Self;
    /// The bits in the low ones of the result.
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
            fn from_bits(bits: $bits) -> $ty {
                $from(bits)
            }
            #[inline(always)]
            fn bits(self) -> $bits {
                $to(self)
            }
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
            b16: File::new(slots.b16),
            b32: File::new(slots.b32),
            b64: File::new(slots.b64),
            predicates: vec![0; slots.predicates],
            unwritten_predicates: vec![u32::MAX; slots.predicates],
        }
    }

    #[inline(always)]
    pub(crate) fn read<T: Lane>(&self, slot: Slot) -> Lanes<T> {
        T::file(self).rows[usize::from(slot.0)].0.map(T::from_bits)
    }

    /// Writes the lanes of `active`.
    #[inline(always)]
    pub(crate) fn write<T: Lane>(&mut self, slot: Slot, values: &Lanes<T>, active: u32) {
        let file = T::file_mut(self);
        let row = &mut file.rows[usize::from(slot.0)].0;
        if active == u32::MAX {
            for (to, value) in row.iter_mut().zip(values) {
                *to = value.bits();
            }
        } else {
            for (lane, (to, value)) in row.iter_mut().zip(values).enumerate() {
                *to = if active >> lane & 1 != 0 { value.bits() } else { *to };
            }
        }
        file.marked[usize::from(slot.0)] &= !active;
    }

    /// The lanes of which a byte was never written.
    #[inline(always)]
    pub(crate) fn marked<T: Lane>(&self, slot: Slot) -> u32 {
        T::file(self).marked[usize::from(slot.0)]
    }

    /// A bit for each byte of each lane that was never written.
    pub(crate) fn unwritten<T: Lane>(&self, slot: Slot) -> Lanes<u8> {
        let (file, slot) = (T::file(self), usize::from(slot.0));
        std::array::from_fn(
            |lane| if file.marked[slot] >> lane & 1 != 0 { file.unwritten[slot][lane] } else { 0 },
        )
    }

    /// Marks bytes of the lanes of `active`, after these were written.
    pub(crate) fn mark<T: Lane>(&mut self, slot: Slot, unwritten: &Lanes<u8>, active: u32) {
        let (file, slot) = (T::file_mut(self), usize::from(slot.0));
        for lane in lanes_of(active) {
            file.unwritten[slot][lane] = unwritten[lane];
            let bit = 1 << lane;
            file.marked[slot] = file.marked[slot] & !bit | if unwritten[lane] != 0 { bit } else { 0 };
        }
    }

    /// A predicate, a bit for each lane.
    #[inline(always)]
    pub(crate) fn predicate(&self, slot: Slot, active: u32) -> Outcome<u32> {
        let unwritten = self.unwritten_predicates[usize::from(slot.0)] & active;
        if unwritten != 0 {
            uninitialised(unwritten)?
        }
        Ok(self.predicates[usize::from(slot.0)])
    }

    #[inline(always)]
    pub(crate) fn write_predicate(&mut self, slot: Slot, values: u32, active: u32) {
        let predicate = &mut self.predicates[usize::from(slot.0)];
        *predicate = *predicate & !active | values & active;
        self.unwritten_predicates[usize::from(slot.0)] &= !active;
    }

    /// A number that changes where any value does: a warp that spins comes back to the same one.
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

/// The fault of computing with what was never written.
#[cold]
pub(crate) fn uninitialised(lanes: u32) -> Outcome {
    let problem = "computes with memory or a register that was never written";
    Err(Fault::new(lanes.trailing_zeros(), FaultKind::Uninitialised, problem))
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
        let slot = Slot(1);
        assert_eq!(registers.marked::<u32>(slot), u32::MAX);
        registers.write(slot, &[1.5f32; LANES], 0xFF);
        assert_eq!(registers.marked::<u32>(slot), !0xFF);
        let values = registers.read::<f32>(slot);
        assert_eq!((values[7], values[8]), (1.5, 0.0));
        let mut unwritten = [0; LANES];
        unwritten[3] = 0b1100;
        registers.mark::<f32>(slot, &unwritten, 0xFF);
        assert_eq!(registers.marked::<u32>(slot) & 0xFF, 1 << 3);
        assert_eq!(registers.unwritten::<u32>(slot)[3], 0b1100);
        assert!(registers.predicate(Slot(0), 1).is_err());
        registers.write_predicate(Slot(0), 0b101, 0b111);
        assert_eq!(registers.predicate(Slot(0), 0b111).unwrap(), 0b101);
        assert_eq!(lanes_of(0b1010_0001).collect::<Vec<_>>(), [0, 5, 7]);
    }
}
