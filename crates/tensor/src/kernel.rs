//! The trait behind which CPU kernels stand, and the views of memory that they are given.
//!
//! A kernel computes in f32, or in f64 when its inputs are f64 (gradient checks). A bf16 operand is widened on reading and rounded
//! once on writing, which is exactly how the GPU's kernels treat it; so bf16 training on the CPU is the GPU's arithmetic up to the
//! order of sums. Kernels widen a task's part of an operand at a time, which stays in a core's cache, and in memory that is lent
//! again and again ([`Pooled`]).

use crate::formats::{from_bf16, narrow_bf16, to_bf16, widen_bf16};
use crate::pool::Pool;
use crate::{DType, Pooled, TensorType};
pub use half::bf16;
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};

/// Elements that one task widens or rounds.
const BLOCK: usize = 32 * 1024;

/// How an op is computed on the CPU: the specification that every other kernel is compared with.
pub trait CpuKernel: Send + Sync {
    /// Computes all outputs from the inputs. Shapes and types are what the op's `infer` accepted and returned; after the outputs come
    /// the tensors of the [`workspace`](CpuKernel::workspace), with whatever was left in them.
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]);

    /// The tensors that a run works in, which are planned with the operands.
    fn workspace(&self, _inputs: &[TensorType]) -> Vec<TensorType> {
        Vec::new()
    }

    /// Bytes that a run on this many threads works in besides its operands and their workspace, at most, as far as they grow with the
    /// inputs. What is left out is bounded: a few blocks of some MiB a thread.
    fn work_bytes(&self, _inputs: &[TensorType], _threads: usize) -> usize {
        0
    }
}

/// A tensor to be read.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Its type.
    pub ty: TensorType,
    bytes: &'a [u8],
}

impl<'a> View<'a> {
    /// A view of `bytes` as a tensor of `ty`.
    ///
    /// # Panics
    /// If the length differs from the type's.
    pub fn new(ty: TensorType, bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len(), ty.bytes(), "{ty} has {} bytes", ty.bytes());
        View { ty, bytes }
    }

    /// The place of an input that an output was computed over: its type without its values, which are in the output.
    pub fn in_output(ty: TensorType) -> Self {
        View { ty, bytes: &[] }
    }

    /// The raw bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements `range`, in the order in which they are stored, as a vector: a part of a tensor that a task reads.
    ///
    /// # Panics
    /// If the range ends after the tensor, or starts within a byte of a packed format.
    pub fn slice(&self, range: Range<usize>) -> View<'a> {
        let (ty, bytes) = part(self.ty, range);
        View::new(ty, &self.bytes[bytes])
    }

    /// The tensor in pieces of `elements` in the order in which they are stored (the last may be shorter), each as a vector.
    pub fn chunks(&self, elements: usize) -> impl Iterator<Item = View<'a>> + use<'a> {
        let (view, numel) = (*self, self.ty.numel());
        (0..numel).step_by(elements).map(move |at| view.slice(at..numel.min(at + elements)))
    }

    /// Rows of the tensor seen as `[rows, cols]`, as a vector.
    pub fn rows(&self, rows: Range<usize>) -> View<'a> {
        let (_, cols) = self.ty.shape.rows_cols();
        self.slice(rows.start * cols..rows.end * cols)
    }

    /// The elements in the kernel's compute type: borrowed where they are stored in it, widened where they are bf16.
    pub fn reals<T: Real>(&self) -> Reals<'a, T> {
        match self.stored() {
            Some(stored) => Reals::Stored(stored),
            None => {
                let mut wide = Pooled::take(self.ty.numel());
                self.widen_into(&mut wide);
                Reals::Widened(wide)
            }
        }
    }

    /// The elements where they are stored as `S`.
    pub fn stored<S: Stored>(&self) -> Option<&'a [S]> {
        (self.ty.dtype == S::DTYPE).then(|| bytemuck::cast_slice(self.bytes))
    }

    /// Writes the elements to `to`, which has as many, in the kernel's compute type.
    pub fn widen_into<T: Real>(&self, to: &mut [T]) {
        assert_eq!(to.len(), self.ty.numel(), "the elements of {}", self.ty);
        T::load(self.ty.dtype, self.bytes, to);
    }

    /// The elements of an I32 tensor.
    pub fn ints(&self) -> &'a [i32] {
        assert_eq!(self.ty.dtype, DType::I32, "expected i32, found {}", self.ty);
        bytemuck::cast_slice(self.bytes)
    }

    /// The elements of a U32 tensor.
    pub fn counters(&self) -> &'a [u32] {
        assert_eq!(self.ty.dtype, DType::U32, "expected u32, found {}", self.ty);
        bytemuck::cast_slice(self.bytes)
    }

    /// The one element of a tensor that has one.
    pub fn scalar<T: Real>(&self) -> T {
        self.reals::<T>()[0]
    }
}

/// A tensor to be written.
pub struct ViewMut<'a> {
    /// Its type.
    pub ty: TensorType,
    /// Whether the kernel adds to what is there instead of overwriting it. Only ops that say that an output accumulates see it set.
    pub accumulate: bool,
    bytes: &'a mut [u8],
}

impl<'a> ViewMut<'a> {
    /// A view of `bytes` as a tensor of `ty`.
    ///
    /// # Panics
    /// If the length differs from the type's.
    pub fn new(ty: TensorType, bytes: &'a mut [u8], accumulate: bool) -> Self {
        assert_eq!(bytes.len(), ty.bytes(), "{ty} has {} bytes", ty.bytes());
        ViewMut { ty, accumulate, bytes }
    }

    /// The raw bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The tensor, to be read.
    pub fn view(&self) -> View<'_> {
        View::new(self.ty, self.bytes)
    }

    /// The elements `range`, in the order in which they are stored, as a vector.
    ///
    /// # Panics
    /// As [`View::slice`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        let (ty, bytes) = part(self.ty, range);
        ViewMut::new(ty, &mut self.bytes[bytes], self.accumulate)
    }

    /// The tensor in pieces of `elements` in the order in which they are stored (the last may be shorter), each as a vector: parts that
    /// tasks write in parallel.
    ///
    /// # Panics
    /// If `elements` is zero, or ends within a byte of a packed format.
    pub fn chunks(&mut self, elements: usize) -> impl Iterator<Item = ViewMut<'_>> {
        ViewMut::new(self.ty, self.bytes, self.accumulate).into_chunks(elements)
    }

    /// The same for as long as the tensor is lent.
    pub fn into_chunks(self, elements: usize) -> impl Iterator<Item = ViewMut<'a>> {
        let (dtype, numel, accumulate) = (self.ty.dtype, self.ty.numel(), self.accumulate);
        assert_eq!(elements * dtype.bits() % 8, 0, "{dtype} is cut within a byte every {elements} elements");
        self.bytes.chunks_mut(dtype.bytes(elements)).enumerate().map(move |(n, bytes)| {
            let ty = TensorType::new(dtype, [elements.min(numel - n * elements)]);
            ViewMut::new(ty, bytes, accumulate)
        })
    }

    /// The elements in the kernel's compute type. They hold what is in memory (which in-place and accumulating kernels read);
    /// a bf16 tensor is written back, rounded once, when the guard is dropped.
    pub fn reals<T: Real>(&mut self) -> RealsMut<'_, T> {
        let mut reals = T::open(self.ty.dtype, self.bytes);
        if let RealsMut::Widened { work, target } = &mut reals {
            T::widen(target, work);
        }
        reals
    }

    /// The same without reading what is in memory, for a kernel that writes every element.
    pub fn fresh<T: Real>(&mut self) -> RealsMut<'_, T> {
        T::open(self.ty.dtype, self.bytes)
    }

    /// Overwrites all elements, rounding them where the tensor is bf16.
    pub fn write<T: Real>(&mut self, from: &[T]) {
        assert_eq!(from.len(), self.ty.numel(), "the elements of {}", self.ty);
        match self.ty.dtype == T::DTYPE {
            true => self.bytes.copy_from_slice(bytemuck::cast_slice(from)),
            false => T::narrow(from, bf16_elements(self.ty.dtype, self.bytes)),
        }
    }

    /// Overwrites all elements, or adds to them where the kernel is to [`accumulate`](ViewMut::accumulate).
    pub fn store<T: Real>(&mut self, from: &[T]) {
        if !self.accumulate {
            return self.write(from);
        }
        assert_eq!(from.len(), self.ty.numel(), "the elements of {}", self.ty);
        self.reals::<T>().iter_mut().zip(from).for_each(|(to, from)| *to += *from);
    }

    /// The elements of a U32 tensor.
    pub fn counters(&mut self) -> &mut [u32] {
        assert_eq!(self.ty.dtype, DType::U32, "expected u32, found {}", self.ty);
        bytemuck::cast_slice_mut(self.bytes)
    }
}

/// The type of the elements `range` of a tensor, and where their bytes are.
fn part(ty: TensorType, range: Range<usize>) -> (TensorType, Range<usize>) {
    let dtype = ty.dtype;
    assert!(range.end <= ty.numel(), "elements {range:?} of {ty}");
    assert_eq!(range.start * dtype.bits() % 8, 0, "{dtype} is cut within a byte at element {}", range.start);
    (TensorType::new(dtype, [range.len()]), dtype.bytes(range.start)..dtype.bytes(range.end))
}

fn bf16_elements(dtype: DType, bytes: &mut [u8]) -> &mut [bf16] {
    assert_eq!(dtype, DType::BF16, "a kernel that computes in f32 was given {dtype} to write");
    bytemuck::cast_slice_mut(bytes)
}

/// Elements being read; see [`View::reals`].
pub enum Reals<'a, T: Real> {
    /// Stored in the compute type itself.
    Stored(&'a [T]),
    /// Widened into it.
    Widened(Pooled<T>),
}

impl<T: Real> Deref for Reals<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Reals::Stored(s) => s,
            Reals::Widened(w) => w,
        }
    }
}

/// Elements being written; see [`ViewMut::reals`] and [`ViewMut::fresh`].
pub enum RealsMut<'a, T: Real> {
    /// Stored in the compute type itself.
    Stored(&'a mut [T]),
    /// Rounded to bf16 when dropped.
    Widened {
        /// What the kernel works on.
        work: Pooled<T>,
        /// Where it is rounded to.
        target: &'a mut [bf16],
    },
}

impl<T: Real> Deref for RealsMut<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            RealsMut::Stored(s) => s,
            RealsMut::Widened { work, .. } => work,
        }
    }
}

impl<T: Real> DerefMut for RealsMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            RealsMut::Stored(s) => s,
            RealsMut::Widened { work, .. } => work,
        }
    }
}

impl<T: Real> Drop for RealsMut<'_, T> {
    fn drop(&mut self) {
        if let RealsMut::Widened { work, target } = self {
            T::narrow(work, target);
        }
    }
}

/// How the elements that a loop reads or writes are stored: in the compute type itself, or in bf16, which the loop widens and rounds in
/// its registers.
pub trait Stored: bytemuck::Pod + Send + Sync {
    /// The compute type.
    type Real: Real;
    /// The element type.
    const DTYPE: DType;
    /// The element's value.
    fn real(self) -> Self::Real;
    /// The element of this value, rounded to nearest even.
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

/// The types that CPU kernels compute in: f32 and f64.
pub trait Real:
    Stored<Real = Self>
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
    /// The least value of all.
    const NEG_INFINITY: Self;
    /// From f64, rounded.
    fn of(x: f64) -> Self;
    /// To f64, exactly.
    fn f64(self) -> f64;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e to the power of self.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// The larger of two; NaN loses.
    fn max(self, other: Self) -> Self;
    /// The smaller of two; NaN loses.
    fn min(self, other: Self) -> Self;
    /// Neither NaN nor infinite.
    fn is_finite(self) -> bool;

    #[doc(hidden)]
    fn load(dtype: DType, bytes: &[u8], to: &mut [Self]);
    #[doc(hidden)]
    fn open(dtype: DType, bytes: &mut [u8]) -> RealsMut<'_, Self>;
    #[doc(hidden)]
    fn widen(from: &[bf16], to: &mut [Self]);
    #[doc(hidden)]
    fn narrow(from: &[Self], to: &mut [bf16]);
    #[doc(hidden)]
    fn pool<R>(f: impl FnOnce(&mut Pool<Self>) -> R) -> Option<R>;
}

macro_rules! real_methods {
    ($t:ident) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = $t::NEG_INFINITY;
        #[inline(always)]
        fn of(x: f64) -> Self {
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
        fn pool<R>(f: impl FnOnce(&mut Pool<Self>) -> R) -> Option<R> {
            thread_local! {
                static POOL: RefCell<Pool<$t>> = const { RefCell::new(Pool::new()) };
            }
            POOL.try_with(|pool| f(&mut pool.borrow_mut())).ok()
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

    fn open(dtype: DType, bytes: &mut [u8]) -> RealsMut<'_, f32> {
        if dtype == DType::F32 {
            return RealsMut::Stored(bytemuck::cast_slice_mut(bytes));
        }
        let target = bf16_elements(dtype, bytes);
        RealsMut::Widened { work: Pooled::take(target.len()), target }
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

    fn open(dtype: DType, bytes: &mut [u8]) -> RealsMut<'_, f64> {
        match dtype {
            DType::F64 => RealsMut::Stored(bytemuck::cast_slice_mut(bytes)),
            other => panic!("a kernel that computes in f64 was given {other} to write"),
        }
    }

    fn widen(_: &[bf16], _: &mut [f64]) {
        unreachable!("f64 programs hold no bf16 value")
    }

    fn narrow(_: &[f64], _: &mut [bf16]) {
        unreachable!("f64 programs hold no bf16 value")
    }
}

/// Runs `$body` with `$S` naming the type in which elements of `$dtype` are stored: f64, bf16, else f32.
#[macro_export]
macro_rules! with_stored {
    ($dtype:expr, $S:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $S = f64;
                $body
            }
            $crate::DType::BF16 => {
                type $S = $crate::kernel::bf16;
                $body
            }
            _ => {
                type $S = f32;
                $body
            }
        }
    };
}

/// Runs `$body` with `$T` naming the compute type of `$dtype`: f64 for F64, else f32.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostTensor;

    #[test]
    fn pieces_read_and_written_make_up_the_tensor() {
        for dtype in [DType::F32, DType::BF16, DType::E4M3, DType::E5M6] {
            let ty = TensorType::new(dtype, [3, 7]);
            let t = HostTensor::from_f64(ty, &(0..21).map(|i| f64::from(i) - 10.0).collect::<Vec<_>>());
            let mut copy = HostTensor::zeros(ty);
            let view = View::new(ty, t.bytes());
            let mut target = ViewMut::new(ty, copy.bytes_mut(), false);
            let mut at = 0;
            for mut piece in target.chunks(8) {
                let source = view.slice(at..at + piece.ty.numel());
                assert_eq!(source.ty, piece.ty);
                piece.bytes().copy_from_slice(source.bytes());
                at += piece.ty.numel();
            }
            assert_eq!((at, copy.bytes()), (21, t.bytes()), "{dtype}");
        }
    }

    #[test]
    #[should_panic(expected = "within a byte")]
    fn a_packed_format_is_not_cut_within_a_byte() {
        let ty = TensorType::new(DType::E5M6, [10]);
        View::new(ty, &[0; 15]).slice(3..5);
    }
}
