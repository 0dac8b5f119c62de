//! Tensor maps: descriptors of tensors for Hopper's TMA.

use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver as ffi;
use crate::layout::KernelValue;
use crate::memory::DevicePtr;
use std::ffi::c_void;
use xtrain_tensor::DType;

/// The map of a tensor in GPU memory: its place, its extents, and the size of the boxes that are copied.
///
/// A box has rows of 128 bytes in shared memory, in which 16-byte pieces are permuted within each eight rows.
/// What lies outside of the tensor is read as zeros, and not written. Kernels take a map within a
/// `__grid_constant__` argument: `struct alignas(64) TensorMap { u64 words[16]; }`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(ffi::CuTensorMap);

impl TensorMap {
    /// The map of a tensor of bytes or of bf16 or f32 numbers at `at`. Extents and boxes are in elements and
    /// begin with the contiguous dimension; strides are those of the other dimensions, also in elements.
    ///
    /// # Errors
    /// If the driver refuses it: if the address or a stride is not a multiple of 16 bytes, for example.
    pub fn new(
        context: &Context,
        dtype: DType,
        at: DevicePtr,
        extents: &[usize],
        strides: &[usize],
        boxed: &[usize],
    ) -> Result<TensorMap, CudaError> {
        let wide = |of: &[usize], unit: usize| of.iter().map(|&x| (x * unit) as u64).collect::<Vec<_>>();
        let element_bytes = dtype.bytes(1);
        let data_type = match dtype {
            DType::BF16 => ffi::TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F32 => ffi::TENSOR_MAP_DATA_TYPE_FLOAT32,
            _ => ffi::TENSOR_MAP_DATA_TYPE_UINT8,
        };
        debug_assert!(
            matches!(dtype, DType::BF16 | DType::F32) || element_bytes == 1,
            "maps of {dtype} are not made"
        );
        let boxed: Vec<u32> = boxed.iter().map(|&x| x as u32).collect();
        let (extents, strides) = (wide(extents, 1), wide(strides, element_bytes));
        let steps = vec![1u32; boxed.len()];
        let mut map = ffi::CuTensorMap { words: [0; 16] };
        context.enter()?;
        // SAFETY: writes one map; reads as many numbers as the rank says, one less of strides. The address is
        // not dereferenced.
        let status = unsafe {
            (context.driver().cuTensorMapEncodeTiled)(
                &mut map,
                data_type,
                boxed.len() as u32,
                at.0 as *mut c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                boxed.as_ptr(),
                steps.as_ptr(),
                ffi::TENSOR_MAP_INTERLEAVE_NONE,
                ffi::TENSOR_MAP_SWIZZLE_128B,
                ffi::TENSOR_MAP_L2_PROMOTION_256B,
                ffi::TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        context.check("cuTensorMapEncodeTiled", status)?;
        Ok(TensorMap(map))
    }

    /// The map of a matrix of bytes in boxes of so many rows and columns, in which each 16 rows are permuted:
    /// row 8 i + 2 t + e of a box is row 4 t + 2 i + e in memory. The rows of the matrix and of a box are
    /// multiples of 16, and the stride is that of rows. Coordinates are the column, three zeros, and the
    /// number of 16 rows.
    ///
    /// Of a product with such rows, a thread t of four holds columns 8 i + 2 t and 8 i + 2 t + 1 for i of 0
    /// and 1, which are columns 4 t to 4 t + 3 of the result.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub fn by_sixteen_rows(
        context: &Context,
        at: DevicePtr,
        [rows, cols]: [usize; 2],
        stride: usize,
        [high, wide]: [usize; 2],
    ) -> Result<TensorMap, CudaError> {
        let extents = [cols, 2, 4, 2, rows / 16];
        let strides = [stride, 4 * stride, 2 * stride, 16 * stride];
        TensorMap::new(context, DType::E4M3, at, &extents, &strides, &[wide, 2, 4, 2, high / 16])
    }
}

impl KernelValue for TensorMap {
    fn write_to(&self, to: &mut [u8]) {
        let words = self.0.words.map(u64::to_ne_bytes);
        to.copy_from_slice(words.as_flattened());
    }
}
