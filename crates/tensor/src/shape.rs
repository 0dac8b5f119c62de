//! Shapes and tensor types.

use crate::DType;
use std::fmt;
use std::ops::Deref;

const MAX_RANK: usize = 4;

/// The extents of a tensor, outermost first, at most four of them; rows are contiguous. A scalar has rank 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// A shape of these extents.
    ///
    /// # Panics
    /// If there are more than four extents: no op takes such a tensor.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= MAX_RANK, "a shape has at most {MAX_RANK} extents, not {}", dims.len());
        let mut all = [1; MAX_RANK];
        all[..dims.len()].copy_from_slice(dims);
        Shape { dims: all, rank: dims.len() as u8 }
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.iter().product()
    }

    /// The product of all extents but the last, and the last: the tensor seen as `[rows, cols]`.
    pub fn rows_cols(&self) -> (usize, usize) {
        match self.split_last() {
            Some((cols, rows)) => (rows.iter().product(), *cols),
            None => (1, 1),
        }
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape::new(&dims)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

/// A tensor's type: its shape and its element type.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// The extents.
    pub shape: Shape,
    /// The element type.
    pub dtype: DType,
}

impl TensorType {
    /// A tensor type from its element type and extents.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        TensorType { shape: shape.into(), dtype }
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.dtype.bytes(self.numel())
    }

    /// The type with another element type.
    pub fn with_dtype(self, dtype: DType) -> Self {
        TensorType { dtype, ..self }
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
