//! `libcudnn.so.9`: operation graphs.

use super::driver::CuStream;
use super::functions;
use std::ffi::{c_char, c_int, c_void};

/// Opaque handles.
pub(crate) type CudnnHandle = *mut c_void;
pub(crate) type CudnnDescriptor = *mut c_void;

pub(crate) const CUDNN_STATUS_SUCCESS: c_int = 0;

/// `cudnnBackendDescriptorType_t`.
pub(crate) mod kind {
    use std::ffi::c_int;
    pub(crate) const POINTWISE: c_int = 0;
    pub(crate) const ENGINE_HEURISTIC: c_int = 4;
    pub(crate) const ENGINE_CONFIG: c_int = 3;
    pub(crate) const ENGINE: c_int = 2;
    pub(crate) const EXECUTION_PLAN: c_int = 5;
    pub(crate) const OPERATION_POINTWISE: c_int = 13;
    pub(crate) const OPERATION_GRAPH: c_int = 15;
    pub(crate) const VARIANT_PACK: c_int = 16;
    pub(crate) const TENSOR: c_int = 17;
    pub(crate) const MATMUL: c_int = 18;
    pub(crate) const OPERATION_MATMUL: c_int = 19;
    pub(crate) const REDUCTION: c_int = 21;
    pub(crate) const OPERATION_REDUCTION: c_int = 22;
    pub(crate) const OPERATION_RESHAPE: c_int = 31;
}

/// `cudnnBackendAttributeType_t`.
pub(crate) mod ty {
    use std::ffi::c_int;
    pub(crate) const HANDLE: c_int = 0;
    pub(crate) const DATA_TYPE: c_int = 1;
    pub(crate) const BOOLEAN: c_int = 2;
    pub(crate) const INT64: c_int = 3;
    pub(crate) const VOID_PTR: c_int = 6;
    pub(crate) const HEURISTIC_MODE: c_int = 8;
    pub(crate) const NAN_PROPAGATION: c_int = 10;
    pub(crate) const NUMERICAL_NOTE: c_int = 11;
    pub(crate) const POINTWISE_MODE: c_int = 14;
    pub(crate) const DESCRIPTOR: c_int = 15;
    pub(crate) const REDUCTION_OPERATOR: c_int = 18;
}

/// `cudnnBackendAttributeName_t`.
pub(crate) mod attribute {
    use std::ffi::c_int;
    pub(crate) const POINTWISE_MODE: c_int = 0;
    pub(crate) const POINTWISE_MATH_PREC: c_int = 1;
    pub(crate) const POINTWISE_NAN_PROPAGATION: c_int = 2;
    pub(crate) const POINTWISE_AXIS: c_int = 9;
    pub(crate) const HEURISTIC_MODE: c_int = 200;
    pub(crate) const HEURISTIC_GRAPH: c_int = 201;
    pub(crate) const HEURISTIC_RESULTS: c_int = 202;
    pub(crate) const CONFIG_ENGINE: c_int = 300;
    pub(crate) const ENGINE_NUMERICAL_NOTE: c_int = 1303;
    pub(crate) const PLAN_HANDLE: c_int = 400;
    pub(crate) const PLAN_CONFIG: c_int = 401;
    pub(crate) const PLAN_WORKSPACE_SIZE: c_int = 402;
    pub(crate) const OP_POINTWISE_DESCRIPTOR: c_int = 750;
    pub(crate) const OP_POINTWISE_X: c_int = 751;
    pub(crate) const OP_POINTWISE_B: c_int = 752;
    pub(crate) const OP_POINTWISE_Y: c_int = 753;
    pub(crate) const OP_POINTWISE_T: c_int = 758;
    pub(crate) const GRAPH_HANDLE: c_int = 800;
    pub(crate) const GRAPH_OPS: c_int = 801;
    pub(crate) const TENSOR_ALIGNMENT: c_int = 900;
    pub(crate) const TENSOR_DATA_TYPE: c_int = 901;
    pub(crate) const TENSOR_DIMENSIONS: c_int = 902;
    pub(crate) const TENSOR_STRIDES: c_int = 903;
    pub(crate) const TENSOR_UNIQUE_ID: c_int = 906;
    pub(crate) const TENSOR_IS_VIRTUAL: c_int = 907;
    pub(crate) const TENSOR_IS_BY_VALUE: c_int = 908;
    pub(crate) const PACK_UNIQUE_IDS: c_int = 1000;
    pub(crate) const PACK_DATA_POINTERS: c_int = 1001;
    pub(crate) const PACK_WORKSPACE: c_int = 1003;
    pub(crate) const MATMUL_COMP_TYPE: c_int = 1500;
    pub(crate) const OP_MATMUL_A: c_int = 1520;
    pub(crate) const OP_MATMUL_B: c_int = 1521;
    pub(crate) const OP_MATMUL_C: c_int = 1522;
    pub(crate) const OP_MATMUL_DESCRIPTOR: c_int = 1523;
    pub(crate) const REDUCTION_OPERATOR: c_int = 1600;
    pub(crate) const REDUCTION_COMP_TYPE: c_int = 1601;
    pub(crate) const OP_REDUCTION_X: c_int = 1610;
    pub(crate) const OP_REDUCTION_Y: c_int = 1611;
    pub(crate) const OP_REDUCTION_DESCRIPTOR: c_int = 1612;
    pub(crate) const OP_RESHAPE_X: c_int = 2200;
    pub(crate) const OP_RESHAPE_Y: c_int = 2201;
}

/// `cudnnDataType_t`.
pub(crate) const DATA_FLOAT: c_int = 0;
pub(crate) const DATA_INT32: c_int = 4;
pub(crate) const DATA_BFLOAT16: c_int = 9;
pub(crate) const DATA_BOOLEAN: c_int = 11;

pub(crate) const NOT_PROPAGATE_NAN: c_int = 0;
/// `cudnnBackendHeurMode_t`: the best engine first.
pub(crate) const HEUR_MODE_A: c_int = 3;
/// `cudnnBackendNumericalNote_t`.
pub(crate) const NOTE_NONDETERMINISTIC: c_int = 4;
/// The largest number of notes of an engine.
pub(crate) const MOST_NOTES: usize = 16;

functions! {
    /// The functions that xtrain calls.
    Cudnn {
        fn cudnnGetVersion() -> usize;
        fn cudnnGetCudartVersion() -> usize;
        fn cudnnGetErrorString(status: c_int) -> *const c_char;
        fn cudnnGetLastErrorString(text: *mut c_char, bytes: usize) -> ();
        fn cudnnCreate(handle: *mut CudnnHandle) -> c_int;
        fn cudnnDestroy(handle: CudnnHandle) -> c_int;
        fn cudnnSetStream(handle: CudnnHandle, stream: CuStream) -> c_int;
        fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut CudnnDescriptor) -> c_int;
        fn cudnnBackendDestroyDescriptor(descriptor: CudnnDescriptor) -> c_int;
        fn cudnnBackendFinalize(descriptor: CudnnDescriptor) -> c_int;
        fn cudnnBackendSetAttribute(
            descriptor: CudnnDescriptor,
            name: c_int,
            ty: c_int,
            count: i64,
            elements: *const c_void,
        ) -> c_int;
        fn cudnnBackendGetAttribute(
            descriptor: CudnnDescriptor,
            name: c_int,
            ty: c_int,
            asked: i64,
            count: *mut i64,
            elements: *mut c_void,
        ) -> c_int;
        fn cudnnBackendExecute(handle: CudnnHandle, plan: CudnnDescriptor, pack: CudnnDescriptor) -> c_int;
    }
}
