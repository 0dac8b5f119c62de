//! Views of tensors in memory, which CPU kernels read and write.

use crate::real::{Real, Stored};
use crate::{DType, Pooled, TensorType};
use half::bf16;
use std::ops::{Deref, DerefMut, Range};

/// A tensor for reading.
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

    /// The view of an input that an output overwrites in place: it has a type and no values, which are in the
    /// output.
    pub fn in_output(ty: TensorType) -> Self {
        View { ty, bytes: &[] }
    }

    /// The raw bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements `range` in storage order, as a vector.
    ///
    /// # Panics
    /// If the range ends after the tensor, or starts within a byte of a packed format.
    pub fn slice(&self, range: Range<usize>) -> View<'a> {
        let (ty, bytes) = part(self.ty, range);
        View::new(ty, &self.bytes[bytes])
    }

    /// Pieces of `elements` elements in storage order, each as a vector; the last may be shorter.
    pub fn chunks(&self, elements: usize) -> impl Iterator<Item = View<'a>> + use<'a> {
        let (view, numel) = (*self, self.ty.numel());
        (0..numel).step_by(elements).map(move |at| view.slice(at..numel.min(at + elements)))
    }

    /// Rows of the tensor seen as `[rows, cols]`, as a vector.
    pub fn rows(&self, rows: Range<usize>) -> View<'a> {
        let (_, cols) = self.ty.shape.rows_cols();
        self.slice(rows.start * cols..rows.end * cols)
    }

    /// The elements in the kernel's compute type: borrowed if they are stored in it, widened if they are
    /// bf16.
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

    /// The elements; None if they are not stored as `S`.
    pub fn stored<S: Stored>(&self) -> Option<&'a [S]> {
        (self.ty.dtype == S::DTYPE).then(|| bytemuck::cast_slice(self.bytes))
    }

    /// Writes the elements to `to`, in the kernel's compute type. Both have the same length.
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

    /// The element of a tensor with one element.
    pub fn scalar<T: Real>(&self) -> T {
        self.reals::<T>()[0]
    }
}

/// A tensor for writing.
pub struct ViewMut<'a> {
    /// Its type.
    pub ty: TensorType,
    /// True if the kernel adds to the tensor instead of overwriting it. Only outputs that the op declares as
    /// accumulating have it set.
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

    /// The tensor, for reading.
    pub fn view(&self) -> View<'_> {
        View::new(self.ty, self.bytes)
    }

    /// The elements `range` in storage order, as a vector.
    ///
    /// # Panics
    /// As [`View::slice`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        let (ty, bytes) = part(self.ty, range);
        ViewMut::new(ty, &mut self.bytes[bytes], self.accumulate)
    }

    /// Pieces of `elements` elements in storage order, each as a vector, for tasks that write in parallel;
    /// the last may be shorter.
    ///
    /// # Panics
    /// If `elements` is zero, or ends within a byte of a packed format.
    pub fn chunks(&mut self, elements: usize) -> impl Iterator<Item = ViewMut<'_>> {
        ViewMut::new(self.ty, self.bytes, self.accumulate).into_chunks(elements)
    }

    /// [`ViewMut::chunks`] with the lifetime of the memory.
    pub fn into_chunks(self, elements: usize) -> impl Iterator<Item = ViewMut<'a>> {
        let (dtype, numel, accumulate) = (self.ty.dtype, self.ty.numel(), self.accumulate);
        assert_eq!(elements * dtype.bits() % 8, 0, "{dtype} is cut within a byte every {elements} elements");
        self.bytes.chunks_mut(dtype.bytes(elements)).enumerate().map(move |(n, bytes)| {
            let ty = TensorType::new(dtype, [elements.min(numel - n * elements)]);
            ViewMut::new(ty, bytes, accumulate)
        })
    }

    /// The elements in the kernel's compute type, with the values in memory, which in-place and accumulating
    /// kernels read. A bf16 tensor is written back, rounded once, when the guard is dropped.
    pub fn reals<T: Real>(&mut self) -> RealsMut<'_, T> {
        let mut reals = open(self.ty.dtype, self.bytes);
        if let RealsMut::Widened { work, target } = &mut reals {
            T::widen(target, work);
        }
        reals
    }

    /// [`ViewMut::reals`] with uninitialised elements, for a kernel that writes each of them.
    pub fn fresh<T: Real>(&mut self) -> RealsMut<'_, T> {
        open(self.ty.dtype, self.bytes)
    }

    /// Overwrites all elements, rounding them if the tensor is bf16.
    pub fn write<T: Real>(&mut self, from: &[T]) {
        assert_eq!(from.len(), self.ty.numel(), "the elements of {}", self.ty);
        match self.ty.dtype == T::DTYPE {
            true => self.bytes.copy_from_slice(bytemuck::cast_slice(from)),
            false => T::narrow(from, bf16_elements(self.ty.dtype, self.bytes)),
        }
    }

    /// Overwrites all elements, or adds to them if [`accumulate`](ViewMut::accumulate) is set.
    pub fn store<T: Real>(&mut self, from: &[T]) {
        if !self.accumulate {
            return self.write(from);
        }
        assert_eq!(from.len(), self.ty.numel(), "the elements of {}", self.ty);
        self.reals::<T>().iter_mut().zip(from).for_each(|(to, from)| *to += *from);
    }

    /// The elements of an I32 tensor.
    pub fn ints(&mut self) -> &mut [i32] {
        assert_eq!(self.ty.dtype, DType::I32, "expected i32, found {}", self.ty);
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// The elements of a U32 tensor.
    pub fn counters(&mut self) -> &mut [u32] {
        assert_eq!(self.ty.dtype, DType::U32, "expected u32, found {}", self.ty);
        bytemuck::cast_slice_mut(self.bytes)
    }
}

/// The type and the bytes of the elements `range` of a tensor.
fn part(ty: TensorType, range: Range<usize>) -> (TensorType, Range<usize>) {
    let dtype = ty.dtype;
    assert!(range.end <= ty.numel(), "elements {range:?} of {ty}");
    assert_eq!(range.start * dtype.bits() % 8, 0, "{dtype} is cut within a byte at element {}", range.start);
    (TensorType::new(dtype, [range.len()]), dtype.bytes(range.start)..dtype.bytes(range.end))
}

/// Opens elements for writing: in place if they are stored in the compute type, else in a buffer that is
/// rounded to bf16.
fn open<T: Real>(dtype: DType, bytes: &mut [u8]) -> RealsMut<'_, T> {
    if dtype == T::DTYPE {
        return RealsMut::Stored(bytemuck::cast_slice_mut(bytes));
    }
    assert_eq!(T::DTYPE, DType::F32, "a kernel that computes in {} was given {dtype} to write", T::DTYPE);
    let target = bf16_elements(dtype, bytes);
    RealsMut::Widened { work: Pooled::take(target.len()), target }
}

fn bf16_elements(dtype: DType, bytes: &mut [u8]) -> &mut [bf16] {
    assert_eq!(dtype, DType::BF16, "a kernel that computes in f32 was given {dtype} to write");
    bytemuck::cast_slice_mut(bytes)
}

/// Elements for reading; see [`View::reals`].
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

/// Elements for writing; see [`ViewMut::reals`] and [`ViewMut::fresh`].
pub enum RealsMut<'a, T: Real> {
    /// Stored in the compute type itself.
    Stored(&'a mut [T]),
    /// Rounded to bf16 when dropped.
    Widened {
        /// The buffer that the kernel writes.
        work: Pooled<T>,
        /// The elements that the buffer is rounded into.
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
