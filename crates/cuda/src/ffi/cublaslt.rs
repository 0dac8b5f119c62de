//! `libcublasLt.so.13`: GEMMs.

use super::driver::CuStream;
use super::functions;
use std::ffi::{c_char, c_int, c_void};

/// Opaque handles.
pub(crate) type LtHandle = *mut c_void;
pub(crate) type LtMatmulDesc = *mut c_void;
pub(crate) type LtMatrixLayout = *mut c_void;
pub(crate) type LtPreference = *mut c_void;

pub(crate) const CUBLAS_STATUS_SUCCESS: c_int = 0;
pub(crate) const CUBLAS_STATUS_INVALID_VALUE: c_int = 7;
pub(crate) const CUBLAS_STATUS_NOT_SUPPORTED: c_int = 15;

/// `cublasComputeType_t`: sums in f32, and f32 operands in full precision (no TF32).
pub(crate) const CUBLAS_COMPUTE_32F: c_int = 68;

/// `cudaDataType_t`.
pub(crate) const CUDA_R_32F: c_int = 0;
pub(crate) const CUDA_R_16BF: c_int = 14;
pub(crate) const CUDA_R_8F_E4M3: c_int = 28;
pub(crate) const CUDA_R_8F_E5M2: c_int = 29;

/// `cublasOperation_t`.
pub(crate) const CUBLAS_OP_N: i32 = 0;
pub(crate) const CUBLAS_OP_T: i32 = 1;

/// `cublasLtMatmulDescAttributes_t`.
pub(crate) const MATMUL_DESC_TRANSA: c_int = 3;
pub(crate) const MATMUL_DESC_TRANSB: c_int = 4;
pub(crate) const MATMUL_DESC_EPILOGUE: c_int = 7;
pub(crate) const MATMUL_DESC_BIAS_POINTER: c_int = 8;
pub(crate) const MATMUL_DESC_A_SCALE_POINTER: c_int = 17;
pub(crate) const MATMUL_DESC_B_SCALE_POINTER: c_int = 18;
pub(crate) const MATMUL_DESC_FAST_ACCUM: c_int = 25;
pub(crate) const MATMUL_DESC_A_SCALE_MODE: c_int = 31;
pub(crate) const MATMUL_DESC_B_SCALE_MODE: c_int = 32;

/// `cublasLtMatmulMatrixScale_t`.
pub(crate) const MATRIX_SCALE_SCALAR_32F: i32 = 0;
pub(crate) const MATRIX_SCALE_OUTER_VEC_32F: i32 = 3;
pub(crate) const MATRIX_SCALE_VEC128_32F: i32 = 4;
pub(crate) const MATRIX_SCALE_BLK128X128_32F: i32 = 5;

/// `cublasLtEpilogue_t`.
pub(crate) const EPILOGUE_BIAS: u32 = 4;

/// `cublasLtMatmulPreferenceAttributes_t`.
pub(crate) const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
pub(crate) const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
pub(crate) const PREF_MIN_ALIGNMENT_A_BYTES: c_int = 5;
pub(crate) const PREF_MIN_ALIGNMENT_B_BYTES: c_int = 6;
pub(crate) const PREF_MIN_ALIGNMENT_C_BYTES: c_int = 7;
pub(crate) const PREF_MIN_ALIGNMENT_D_BYTES: c_int = 8;

/// `cublasLtReductionScheme_t`: the reduction of a sum that is split over blocks.
pub(crate) const REDUCTION_SCHEME_NONE: u32 = 0;
pub(crate) const REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;

/// `cublasLtMatmulAlgoConfigAttributes_t`.
pub(crate) const ALGO_CONFIG_REDUCTION_SCHEME: c_int = 3;

/// `cublasLtMatmulAlgo_t`: may be stored and given to the same version of the library again.
pub(crate) type LtAlgo = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct LtHeuristicResult {
    pub(crate) algo: LtAlgo,
    pub(crate) workspace_bytes: usize,
    pub(crate) state: c_int,
    pub(crate) waves: f32,
    pub(crate) reserved: [c_int; 4],
}

functions! {
    /// The functions that xtrain calls.
    CublasLt {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusString(status: c_int) -> *const c_char;
        fn cublasLtCreate(handle: *mut LtHandle) -> c_int;
        fn cublasLtDestroy(handle: LtHandle) -> c_int;

        fn cublasLtMatmulDescCreate(desc: *mut LtMatmulDesc, compute: c_int, scale: c_int) -> c_int;
        fn cublasLtMatmulDescDestroy(desc: LtMatmulDesc) -> c_int;
        fn cublasLtMatmulDescSetAttribute(
            desc: LtMatmulDesc,
            attribute: c_int,
            value: *const c_void,
            bytes: usize,
        ) -> c_int;
        fn cublasLtMatrixLayoutCreate(
            layout: *mut LtMatrixLayout,
            element: c_int,
            rows: u64,
            columns: u64,
            leading: i64,
        ) -> c_int;
        fn cublasLtMatrixLayoutDestroy(layout: LtMatrixLayout) -> c_int;
        fn cublasLtMatmulPreferenceCreate(preference: *mut LtPreference) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(preference: LtPreference) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(
            preference: LtPreference,
            attribute: c_int,
            value: *const c_void,
            bytes: usize,
        ) -> c_int;

        fn cublasLtMatmulAlgoGetHeuristic(
            handle: LtHandle,
            desc: LtMatmulDesc,
            a: LtMatrixLayout,
            b: LtMatrixLayout,
            c: LtMatrixLayout,
            d: LtMatrixLayout,
            preference: LtPreference,
            asked: c_int,
            results: *mut LtHeuristicResult,
            found: *mut c_int,
        ) -> c_int;
        fn cublasLtMatmulAlgoCheck(
            handle: LtHandle,
            desc: LtMatmulDesc,
            a: LtMatrixLayout,
            b: LtMatrixLayout,
            c: LtMatrixLayout,
            d: LtMatrixLayout,
            algo: *const LtAlgo,
            result: *mut LtHeuristicResult,
        ) -> c_int;
        fn cublasLtMatmulAlgoConfigGetAttribute(
            algo: *const LtAlgo,
            attribute: c_int,
            value: *mut c_void,
            bytes: usize,
            written: *mut usize,
        ) -> c_int;
        fn cublasLtMatmul(
            handle: LtHandle,
            desc: LtMatmulDesc,
            alpha: *const c_void,
            a: *const c_void,
            a_layout: LtMatrixLayout,
            b: *const c_void,
            b_layout: LtMatrixLayout,
            beta: *const c_void,
            c: *const c_void,
            c_layout: LtMatrixLayout,
            d: *mut c_void,
            d_layout: LtMatrixLayout,
            algo: *const LtAlgo,
            workspace: *mut c_void,
            workspace_bytes: usize,
            stream: CuStream,
        ) -> c_int;
    }
}
