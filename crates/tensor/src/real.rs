//! Types in which CPU kernels compute, and types in which they store elements.

use crate::DType;
use crate::formats::{from_bf16, narrow_bf16, to_bf16, widen_bf16};
use crate::pool::Poolable;
pub use half::bf16;
use rayon::prelude::*;

/// Elements that one task casts.
const BLOCK: usize = 32 * 1024;

/// A storage type of elements that a loop reads or writes: the compute type itself, or bf16, which the loop
/// casts in registers.
pub trait Stored: bytemuck::Pod + Send + Sync {
    /// The compute type.
    type Real: Real;
    /// The element type.
    const DTYPE: DType;
    /// The value of the element.
    fn real(self) -> Self::Real;
    /// The element of a value, rounded to nearest even.
    fn of_real(x: Self::Real) -> Self;
}

impl Stored for f32 {
    type Real = f32;
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn real(self) -> f32 {
        self
    }
    #[inline(always)]
    fn of_real(x: f32) -> f32 {
        x
    }
}

impl Stored for f64 {
    type Real = f64;
    const DTYPE: DType = DType::F64;
    #[inline(always)]
    fn real(self) -> f64 {
        self
    }
    #[inline(always)]
    fn of_real(x: f64) -> f64 {
        x
    }
}

impl Stored for bf16 {
    type Real = f32;
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn real(self) -> f32 {
        from_bf16(self)
    }
    #[inline(always)]
    fn of_real(x: f32) -> bf16 {
        bf16::from_bits(to_bf16(x))
    }
}

/// A type in which CPU kernels compute: f32 or f64.
pub trait Real:
    Stored<Real = Self>
    + Poolable
    + PartialOrd
    + std::fmt::Debug
    + std::iter::Sum
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::SubAssign
    + std::ops::MulAssign
    + std::ops::DivAssign
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Negative infinity.
    const NEG_INFINITY: Self;
    /// From f64, rounded.
    fn from_f64(x: f64) -> Self;
    /// To f64, exactly.
    fn f64(self) -> f64;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e to the power of self.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// The larger of two numbers; of a NaN and a number, the number.
    fn max(self, other: Self) -> Self;
    /// The smaller of two numbers; of a NaN and a number, the number.
    fn min(self, other: Self) -> Self;
    /// True for numbers other than NaN and the infinities.
    fn is_finite(self) -> bool;

    #[doc(hidden)]
    fn load(dtype: DType, bytes: &[u8], to: &mut [Self]);
    #[doc(hidden)]
    fn widen(from: &[bf16], to: &mut [Self]);
    #[doc(hidden)]
    fn narrow(from: &[Self], to: &mut [bf16]);
}

macro_rules! real_methods {
    ($t:ident) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = $t::NEG_INFINITY;
        #[inline(always)]
        fn from_f64(x: f64) -> Self {
            x as $t
        }
        #[inline(always)]
        fn f64(self) -> f64 {
            f64::from(self)
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            $t::sqrt(self)
        }
        #[inline(always)]
        fn exp(self) -> Self {
            $t::exp(self)
        }
        #[inline(always)]
        fn ln(self) -> Self {
            $t::ln(self)
        }
        #[inline(always)]
        fn abs(self) -> Self {
            $t::abs(self)
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            $t::max(self, other)
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            $t::min(self, other)
        }
        #[inline(always)]
        fn is_finite(self) -> bool {
            $t::is_finite(self)
        }
    };
}

impl Real for f32 {
    real_methods!(f32);

    fn load(dtype: DType, bytes: &[u8], to: &mut [f32]) {
        match dtype {
            DType::F32 => to.copy_from_slice(bytemuck::cast_slice(bytes)),
            DType::BF16 => Self::widen(bytemuck::cast_slice(bytes), to),
            other => panic!("a kernel that computes in f32 was given {other}"),
        }
    }

    fn widen(from: &[bf16], to: &mut [f32]) {
        match from.len() <= BLOCK {
            true => widen_bf16(from, to),
            false => {
                let blocks = to.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
                blocks.for_each(|(to, from)| widen_bf16(from, to));
            }
        }
    }

    fn narrow(from: &[f32], to: &mut [bf16]) {
        match from.len() <= BLOCK {
            true => narrow_bf16(from, to),
            false => {
                let blocks = to.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
                blocks.for_each(|(to, from)| narrow_bf16(from, to));
            }
        }
    }
}

impl Real for f64 {
    real_methods!(f64);

    fn load(dtype: DType, bytes: &[u8], to: &mut [f64]) {
        match dtype {
            DType::F64 => to.copy_from_slice(bytemuck::cast_slice(bytes)),
            // Control scalars and tables stay f32 in an f64 program; widening is exact.
            DType::F32 => {
                to.iter_mut().zip(bytemuck::cast_slice::<u8, f32>(bytes)).for_each(|(t, &x)| *t = x.into());
            }
            other => panic!("a kernel that computes in f64 was given {other}"),
        }
    }

    fn widen(_: &[bf16], _: &mut [f64]) {
        unreachable!("f64 programs hold no bf16 value")
    }

    fn narrow(_: &[f64], _: &mut [bf16]) {
        unreachable!("f64 programs hold no bf16 value")
    }
}

/// Runs `$body` with `$S` as the storage type of `$dtype`: f64, bf16, else f32.
#[macro_export]
macro_rules! with_stored {
    ($dtype:expr, $S:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $S = f64;
                $body
            }
            $crate::DType::BF16 => {
                type $S = $crate::real::bf16;
                $body
            }
            _ => {
                type $S = f32;
                $body
            }
        }
    };
}

/// Runs `$body` with `$T` as the compute type of `$dtype`: f64 for F64, else f32.
#[macro_export]
macro_rules! with_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        if $dtype == $crate::DType::F64 {
            type $T = f64;
            $body
        } else {
            type $T = f32;
            $body
        }
    };
}
