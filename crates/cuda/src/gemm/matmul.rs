//! A GEMM in cuBLASLt's terms.
//!
//! The library's matrices are column-major. A row-major matrix is its own transpose in that view, so the
//! library computes D^T = B^T A^T: the operands change places, and no data moves.

use super::{Gemm, GemmOperands, OperandLayout};
use crate::blas::{Blas, MatmulDesc, MatrixLayout, Preference};
use crate::capture_lock;
use crate::error::CudaError;
use crate::ffi::cublaslt as ffi;
use crate::ffi::cublaslt::{LtAlgo, LtHeuristicResult};
use crate::memory::DevicePtr;
use crate::stream::Stream;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use xtrain_tensor::{DType, Scaling};

/// The number of algorithms to ask for.
const CANDIDATES: usize = 8;

/// Reductions of split sums that are as exact as one sum and the same in every run.
const REDUCTIONS: u32 = ffi::REDUCTION_SCHEME_NONE | ffi::REDUCTION_SCHEME_COMPUTE_TYPE;

/// A GEMM with its descriptors and operands.
pub(super) struct Matmul {
    blas: Arc<Blas>,
    desc: MatmulDesc,
    /// The library's A is our B.
    first: MatrixLayout,
    second: MatrixLayout,
    d: MatrixLayout,
    operands: GemmOperands,
    beta: f32,
}

// SAFETY: descriptors are plain memory of the library's, which calls only read once they are set.
unsafe impl Send for Matmul {}
// SAFETY: as above.
unsafe impl Sync for Matmul {}

impl Matmul {
    pub(super) fn new(blas: &Arc<Blas>, gemm: &Gemm, operands: &GemmOperands) -> Result<Matmul, CudaError> {
        let desc = MatmulDesc::new(blas, ffi::CUBLAS_COMPUTE_32F, ffi::CUDA_R_32F)?;
        let operation =
            |operand: OperandLayout| if operand.transposed { ffi::CUBLAS_OP_T } else { ffi::CUBLAS_OP_N };
        desc.set(ffi::MATMUL_DESC_TRANSA, operation(gemm.b))?;
        desc.set(ffi::MATMUL_DESC_TRANSB, operation(gemm.a))?;
        if let Some(bias) = operands.bias {
            desc.set(ffi::MATMUL_DESC_EPILOGUE, ffi::EPILOGUE_BIAS)?;
            desc.set(ffi::MATMUL_DESC_BIAS_POINTER, bias.0)?;
        }
        if let Some(scales) = operands.scales {
            // The library's A is our B.
            desc.set(ffi::MATMUL_DESC_A_SCALE_MODE, scale_mode(gemm.b))?;
            desc.set(ffi::MATMUL_DESC_B_SCALE_MODE, scale_mode(gemm.a))?;
            desc.set(ffi::MATMUL_DESC_A_SCALE_POINTER, scales[1].0)?;
            desc.set(ffi::MATMUL_DESC_B_SCALE_POINTER, scales[0].0)?;
            desc.set(ffi::MATMUL_DESC_FAST_ACCUM, i8::from(gemm.fast_accumulation))?;
        }
        let layout = |operand: OperandLayout, rows: usize, columns: usize| {
            let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
            MatrixLayout::new(blas, cuda_type(operand.dtype), columns, rows, operand.stride)
        };
        let Gemm { m, n, k, .. } = *gemm;
        Ok(Matmul {
            desc,
            first: layout(gemm.b, k, n)?,
            second: layout(gemm.a, m, k)?,
            d: MatrixLayout::new(blas, cuda_type(gemm.d), n, m, gemm.d_stride)?,
            operands: *operands,
            beta: if gemm.accumulate { 1.0 } else { 0.0 },
            blas: blas.clone(),
        })
    }

    pub(super) fn blas(&self) -> &Blas {
        &self.blas
    }

    /// The library's proposals that may be used, its preferred one first.
    pub(super) fn candidates(&self) -> Result<Vec<LtAlgo>, CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        let preference = Preference::new(&self.blas)?;
        preference.set(ffi::PREF_MAX_WORKSPACE_BYTES, Gemm::WORKSPACE_BYTES as u64)?;
        preference.set(ffi::PREF_REDUCTION_SCHEME_MASK, REDUCTIONS)?;
        let GemmOperands { a, b, d, .. } = self.operands;
        preference.set(ffi::PREF_MIN_ALIGNMENT_A_BYTES, alignment(b))?;
        preference.set(ffi::PREF_MIN_ALIGNMENT_B_BYTES, alignment(a))?;
        preference.set(ffi::PREF_MIN_ALIGNMENT_C_BYTES, alignment(d))?;
        preference.set(ffi::PREF_MIN_ALIGNMENT_D_BYTES, alignment(d))?;
        let mut results = [LtHeuristicResult::default(); CANDIDATES];
        let mut found: c_int = 0;
        // SAFETY: all handles live here; at most as many results are written as there is room for.
        let status = unsafe {
            (self.blas.lt.cublasLtMatmulAlgoGetHeuristic)(
                self.blas.handle,
                self.desc.handle,
                self.first.handle,
                self.second.handle,
                self.d.handle,
                self.d.handle,
                preference.handle,
                CANDIDATES as c_int,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        // An unsupported shape is a valid answer: no proposals.
        if matches!(status, ffi::CUBLAS_STATUS_NOT_SUPPORTED | ffi::CUBLAS_STATUS_INVALID_VALUE) {
            return Ok(Vec::new());
        }
        self.blas.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        let proposed = results.iter().take(found.max(0) as usize);
        let usable = proposed.filter(|result| {
            result.state == ffi::CUBLAS_STATUS_SUCCESS
                && result.workspace_bytes <= Gemm::WORKSPACE_BYTES
                && self.is_deterministic(&result.algo)
        });
        Ok(usable.map(|result| result.algo).collect())
    }

    /// True if a recorded algorithm supports this GEMM on this GPU within the workspace.
    pub(super) fn supports(&self, algo: &LtAlgo) -> bool {
        let _no_capture = capture_lock::exclude_capture();
        let mut result = LtHeuristicResult::default();
        // SAFETY: all handles live here; reads the algorithm, writes one result.
        let status = unsafe {
            (self.blas.lt.cublasLtMatmulAlgoCheck)(
                self.blas.handle,
                self.desc.handle,
                self.first.handle,
                self.second.handle,
                self.d.handle,
                self.d.handle,
                algo,
                &mut result,
            )
        };
        status == ffi::CUBLAS_STATUS_SUCCESS
            && result.workspace_bytes <= Gemm::WORKSPACE_BYTES
            && self.is_deterministic(algo)
    }

    /// True if the algorithm adds in the same order in every run. An algorithm without this attribute counts
    /// as such: the preference that was passed to the library asks for it.
    fn is_deterministic(&self, algo: &LtAlgo) -> bool {
        let (mut scheme, mut written) = (0u32, 0usize);
        // SAFETY: reads the algorithm, writes at most four bytes.
        let status = unsafe {
            (self.blas.lt.cublasLtMatmulAlgoConfigGetAttribute)(
                algo,
                ffi::ALGO_CONFIG_REDUCTION_SCHEME,
                std::ptr::from_mut(&mut scheme).cast::<c_void>(),
                size_of::<u32>(),
                &mut written,
            )
        };
        status != ffi::CUBLAS_STATUS_SUCCESS || scheme & !REDUCTIONS == 0
    }

    /// Enqueues the GEMM on `stream`.
    pub(super) fn enqueue(&self, algo: &LtAlgo, stream: &Stream) -> Result<(), CudaError> {
        self.blas.context.enter()?;
        let GemmOperands { a, b, d, workspace, .. } = self.operands;
        let (one, beta) = (1.0f32, self.beta);
        // SAFETY: the descriptors hold the shapes of the operands, which are GPU memory and keep their
        // addresses, as the caller that named them promises; the workspace has the stated bytes; the two
        // numbers are read before the call returns.
        let status = unsafe {
            (self.blas.lt.cublasLtMatmul)(
                self.blas.handle,
                self.desc.handle,
                std::ptr::from_ref(&one).cast::<c_void>(),
                b.0 as *const c_void,
                self.first.handle,
                a.0 as *const c_void,
                self.second.handle,
                std::ptr::from_ref(&beta).cast::<c_void>(),
                d.0 as *const c_void,
                self.d.handle,
                d.0 as *mut c_void,
                self.d.handle,
                algo,
                workspace.0 as *mut c_void,
                Gemm::WORKSPACE_BYTES,
                stream.handle,
            )
        };
        self.blas.check("cublasLtMatmul", status)
    }
}

/// The largest power of two that divides the address, at most 256, the largest alignment that any algorithm
/// requires.
pub(super) fn alignment(place: DevicePtr) -> u32 {
    1 << place.0.trailing_zeros().min(8)
}

fn cuda_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => ffi::CUDA_R_32F,
        DType::BF16 => ffi::CUDA_R_16BF,
        DType::E4M3 => ffi::CUDA_R_8F_E4M3,
        DType::E5M2 => ffi::CUDA_R_8F_E5M2,
        other => panic!("GPU GEMMs take f32, bf16 and FP8 operands, not {other}"),
    }
}

fn scale_mode(operand: OperandLayout) -> i32 {
    match operand.scaling {
        None | Some(Scaling::Tensor) => ffi::MATRIX_SCALE_SCALAR_32F,
        Some(Scaling::Row) => ffi::MATRIX_SCALE_OUTER_VEC_32F,
        Some(Scaling::Tile) => ffi::MATRIX_SCALE_VEC128_32F,
        Some(Scaling::Block) => ffi::MATRIX_SCALE_BLK128X128_32F,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_as_aligned_as_it_is() {
        for (address, bytes) in
            [(0x7000_0000u64, 256), (0x7000_0100, 256), (0x7000_0080, 128), (0x7000_0006, 2)]
        {
            assert_eq!(alignment(DevicePtr(address)), bytes);
        }
    }
}
