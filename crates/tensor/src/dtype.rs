//! Element types of tensors.

use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary64. Only gradient checks compute in it.
    F64,
    /// IEEE binary32.
    F32,
    /// bfloat16: 1-8-7 bits.
    BF16,
    /// FP8 E4M3 "fn": no infinities, largest finite 448.
    E4M3,
    /// FP8 E5M2: largest finite 57344.
    E5M2,
    /// 12 bits, 1-5-6; two elements packed in three bytes. Largest finite 65024.
    E5M6,
    /// Unsigned byte.
    U8,
    /// Signed 32-bit integer: token ids, positions, labels.
    I32,
    /// Unsigned 32-bit integer: counters.
    U32,
}

impl DType {
    /// Bits of one element in memory.
    pub const fn bits(self) -> usize {
        match self {
            DType::F64 => 64,
            DType::F32 | DType::I32 | DType::U32 => 32,
            DType::BF16 => 16,
            DType::E5M6 => 12,
            DType::E4M3 | DType::E5M2 | DType::U8 => 8,
        }
    }

    /// Bytes of `numel` elements; packed formats round up to a whole byte.
    pub const fn bytes(self, numel: usize) -> usize {
        (numel * self.bits()).div_ceil(8)
    }

    /// True for types of real numbers.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::U8 | DType::I32 | DType::U32)
    }

    /// The type in which CPU kernels compute: F64 for F64, F32 for all others.
    pub const fn compute(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The short lower-case name used in dumps, tables and errors.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::E5M6 => "e5m6",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::U32 => "u32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
