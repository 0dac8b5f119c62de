//! `libcuda.so.1`: the driver.

use super::functions;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

pub(crate) type CuDevice = c_int;
pub(crate) type CuDevicePtr = c_ulonglong;
/// Opaque handles.
pub(crate) type CuContext = *mut c_void;
pub(crate) type CuStream = *mut c_void;
pub(crate) type CuEvent = *mut c_void;
pub(crate) type CuModule = *mut c_void;
pub(crate) type CuFunction = *mut c_void;
pub(crate) type CuGraph = *mut c_void;
pub(crate) type CuGraphExec = *mut c_void;
pub(crate) type CuGraphNode = *mut c_void;
/// The handle of physical memory.
pub(crate) type CuMemHandle = c_ulonglong;

pub(crate) const CUDA_SUCCESS: c_int = 0;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: c_int = 2;
pub(crate) const CUDA_ERROR_NO_DEVICE: c_int = 100;
pub(crate) const CUDA_ERROR_NOT_FOUND: c_int = 500;
pub(crate) const CUDA_ERROR_NOT_READY: c_int = 600;

pub(crate) const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const CU_EVENT_RECORD_EXTERNAL: c_uint = 1;
pub(crate) const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
pub(crate) const CU_GRAPH_INSTANTIATE_USE_NODE_PRIORITY: c_ulonglong = 8;
pub(crate) const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;

pub(crate) const CU_MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub(crate) const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;
pub(crate) const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: c_int = 1;
pub(crate) const CU_MEM_HANDLE_TYPE_NONE: c_int = 0;
pub(crate) const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;

/// `CUstreamBatchMemOpType`.
pub(crate) const CU_STREAM_MEM_OP_WAIT_VALUE_32: c_uint = 1;
pub(crate) const CU_STREAM_MEM_OP_WRITE_VALUE_32: c_uint = 2;

/// `CUdevice_attribute`.
pub(crate) const MAX_THREADS_PER_BLOCK: c_int = 1;
pub(crate) const CLOCK_RATE_KHZ: c_int = 13;
pub(crate) const MULTIPROCESSOR_COUNT: c_int = 16;
pub(crate) const MEMORY_CLOCK_RATE_KHZ: c_int = 36;
pub(crate) const GLOBAL_MEMORY_BUS_WIDTH_BITS: c_int = 37;
pub(crate) const L2_CACHE_BYTES: c_int = 38;
pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub(crate) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
pub(crate) const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;

/// `CUdevice_P2PAttribute`.
pub(crate) const P2P_NATIVE_ATOMIC_SUPPORTED: c_int = 3;

/// `CUfunction_attribute`.
pub(crate) const FUNC_SHARED_BYTES: c_int = 1;
pub(crate) const FUNC_LOCAL_BYTES: c_int = 3;
pub(crate) const FUNC_REGISTERS: c_int = 4;
pub(crate) const FUNC_MAX_DYNAMIC_SHARED_BYTES: c_int = 8;

/// `CUlaunchAttributeID`.
pub(crate) const LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: c_uint = 4;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuMemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuMemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: CuMemLocation,
    pub(crate) win32: *mut c_void,
    /// Compression, direct access by a network adapter, usage: none.
    pub(crate) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct CuMemAccessDesc {
    pub(crate) location: CuMemLocation,
    pub(crate) flags: c_int,
}

/// `CUstreamBatchMemOpParams`, of a write or a wait.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuStreamMemOp {
    pub(crate) operation: c_uint,
    pub(crate) address: CuDevicePtr,
    pub(crate) value: u64,
    pub(crate) flags: c_uint,
    /// The driver's own.
    pub(crate) alias: [u64; 2],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct CuLaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CuStream,
    pub(crate) attributes: *const CuLaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

/// `CUlaunchAttribute`: an id, and a value of 64 bytes at an offset of 8.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct CuLaunchAttribute {
    pub(crate) id: c_uint,
    pub(crate) pad: u32,
    pub(crate) value: [u32; 16],
}

/// `CUtensorMapDataType` and the other enumerations of a tensor map.
pub(crate) const TENSOR_MAP_DATA_TYPE_UINT8: c_int = 0;
pub(crate) const TENSOR_MAP_DATA_TYPE_FLOAT32: c_int = 7;
pub(crate) const TENSOR_MAP_DATA_TYPE_BFLOAT16: c_int = 9;
pub(crate) const TENSOR_MAP_INTERLEAVE_NONE: c_int = 0;
pub(crate) const TENSOR_MAP_SWIZZLE_128B: c_int = 3;
pub(crate) const TENSOR_MAP_L2_PROMOTION_256B: c_int = 3;
pub(crate) const TENSOR_MAP_FLOAT_OOB_FILL_NONE: c_int = 0;

/// `CUtensorMap`: opaque.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct CuTensorMap {
    pub(crate) words: [u64; 16],
}

functions! {
    /// The functions that xtrain calls.
    Driver {
        fn cuInit(flags: c_uint) -> c_int;
        fn cuDriverGetVersion(version: *mut c_int) -> c_int;
        fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> c_int;
        fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int;

        fn cuDeviceGetCount(count: *mut c_int) -> c_int;
        fn cuDeviceGet(device: *mut CuDevice, ordinal: c_int) -> c_int;
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CuDevice) -> c_int;
        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CuDevice) -> c_int;
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CuDevice) -> c_int;
        fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, device: CuDevice, peer: CuDevice) -> c_int;
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CuDevice) -> c_int;
        fn cuDevicePrimaryCtxRetain(context: *mut CuContext, device: CuDevice) -> c_int;
        fn cuDevicePrimaryCtxRelease_v2(device: CuDevice) -> c_int;
        fn cuCtxSetCurrent(context: CuContext) -> c_int;

        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
        fn cuMemAlloc_v2(pointer: *mut CuDevicePtr, bytes: usize) -> c_int;
        fn cuMemFree_v2(pointer: CuDevicePtr) -> c_int;
        fn cuMemGetAllocationGranularity(bytes: *mut usize, prop: *const CuMemAllocationProp, option: c_int) -> c_int;
        fn cuMemAddressReserve(
            pointer: *mut CuDevicePtr,
            bytes: usize,
            alignment: usize,
            requested: CuDevicePtr,
            flags: c_ulonglong,
        ) -> c_int;
        fn cuMemAddressFree(pointer: CuDevicePtr, bytes: usize) -> c_int;
        fn cuMemCreate(
            handle: *mut CuMemHandle,
            bytes: usize,
            prop: *const CuMemAllocationProp,
            flags: c_ulonglong,
        ) -> c_int;
        fn cuMemExportToShareableHandle(
            shared: *mut c_void,
            handle: CuMemHandle,
            kind: c_int,
            flags: c_ulonglong,
        ) -> c_int;
        fn cuMemImportFromShareableHandle(handle: *mut CuMemHandle, shared: *mut c_void, kind: c_int) -> c_int;
        fn cuMemRelease(handle: CuMemHandle) -> c_int;
        fn cuMemMap(
            pointer: CuDevicePtr,
            bytes: usize,
            offset: usize,
            handle: CuMemHandle,
            flags: c_ulonglong,
        ) -> c_int;
        fn cuMemUnmap(pointer: CuDevicePtr, bytes: usize) -> c_int;
        fn cuMemSetAccess(
            pointer: CuDevicePtr,
            bytes: usize,
            access: *const CuMemAccessDesc,
            count: usize,
        ) -> c_int;
        fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int;
        fn cuMemFreeHost(pointer: *mut c_void) -> c_int;
        fn cuMemcpyHtoDAsync_v2(to: CuDevicePtr, from: *const c_void, bytes: usize, stream: CuStream) -> c_int;
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CuDevicePtr, bytes: usize, stream: CuStream) -> c_int;
        fn cuMemcpyDtoDAsync_v2(to: CuDevicePtr, from: CuDevicePtr, bytes: usize, stream: CuStream) -> c_int;
        fn cuMemsetD8Async(to: CuDevicePtr, byte: u8, bytes: usize, stream: CuStream) -> c_int;

        fn cuStreamCreateWithPriority(stream: *mut CuStream, flags: c_uint, priority: c_int) -> c_int;
        fn cuStreamDestroy_v2(stream: CuStream) -> c_int;
        fn cuStreamSynchronize(stream: CuStream) -> c_int;
        fn cuStreamWaitEvent(stream: CuStream, event: CuEvent, flags: c_uint) -> c_int;
        fn cuStreamBatchMemOp_v2(
            stream: CuStream,
            count: c_uint,
            operations: *mut CuStreamMemOp,
            flags: c_uint,
        ) -> c_int;
        fn cuStreamBeginCapture_v2(stream: CuStream, mode: c_int) -> c_int;
        fn cuStreamEndCapture(stream: CuStream, graph: *mut CuGraph) -> c_int;
        fn cuEventCreate(event: *mut CuEvent, flags: c_uint) -> c_int;
        fn cuEventRecord(event: CuEvent, stream: CuStream) -> c_int;
        fn cuEventRecordWithFlags(event: CuEvent, stream: CuStream, flags: c_uint) -> c_int;
        fn cuEventQuery(event: CuEvent) -> c_int;
        fn cuEventSynchronize(event: CuEvent) -> c_int;
        fn cuEventElapsedTime(milliseconds: *mut f32, start: CuEvent, end: CuEvent) -> c_int;
        fn cuEventDestroy_v2(event: CuEvent) -> c_int;
        fn cuGraphInstantiateWithFlags(exec: *mut CuGraphExec, graph: CuGraph, flags: c_ulonglong) -> c_int;
        fn cuGraphGetNodes(graph: CuGraph, nodes: *mut CuGraphNode, count: *mut usize) -> c_int;
        fn cuGraphLaunch(exec: CuGraphExec, stream: CuStream) -> c_int;
        fn cuGraphExecDestroy(exec: CuGraphExec) -> c_int;
        fn cuGraphDestroy(graph: CuGraph) -> c_int;

        fn cuModuleLoadData(module: *mut CuModule, image: *const c_void) -> c_int;
        fn cuModuleUnload(module: CuModule) -> c_int;
        fn cuModuleGetFunction(function: *mut CuFunction, module: CuModule, name: *const c_char) -> c_int;
        fn cuFuncSetAttribute(function: CuFunction, attribute: c_int, value: c_int) -> c_int;
        fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CuFunction) -> c_int;
        fn cuLaunchKernelEx(
            config: *const CuLaunchConfig,
            function: CuFunction,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> c_int;
        fn cuTensorMapEncodeTiled(
            map: *mut CuTensorMap,
            data_type: c_int,
            rank: c_uint,
            address: *mut c_void,
            extents: *const c_ulonglong,
            strides: *const c_ulonglong,
            boxed: *const c_uint,
            steps: *const c_uint,
            interleave: c_int,
            swizzle: c_int,
            promotion: c_int,
            fill: c_int,
        ) -> c_int;
    }
}
