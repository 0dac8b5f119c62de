//! `libnccl.so.2`: collectives, from release 2.27 on.

use super::driver::CuStream;
use super::functions;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Opaque handle.
pub(crate) type NcclComm = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NcclUniqueId {
    pub(crate) bytes: [u8; 128],
}

/// `ncclResult_t`.
pub(crate) const NCCL_SUCCESS: c_int = 0;
pub(crate) const NCCL_IN_PROGRESS: c_int = 7;

/// `ncclDataType_t`.
pub(crate) const NCCL_UINT8: c_int = 1;
pub(crate) const NCCL_FLOAT32: c_int = 7;

/// `ncclRedOp_t`.
pub(crate) const NCCL_SUM: c_int = 0;

/// The values of a config that make the library accept it, and choose what is left open.
pub(crate) const NCCL_CONFIG_MAGIC: c_uint = 0xcafe_beef;
pub(crate) const NCCL_UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` of release 2.27. Later releases append members, and read as many as `bytes` and `version`
/// say.
#[repr(C)]
pub(crate) struct NcclConfig {
    pub(crate) bytes: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
    pub(crate) cga_cluster_size: c_int,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
    pub(crate) net_name: *const c_char,
    pub(crate) split_share: c_int,
    pub(crate) traffic_class: c_int,
    pub(crate) comm_name: *const c_char,
    pub(crate) collnet_enable: c_int,
    pub(crate) cta_policy: c_int,
    pub(crate) shrink_share: c_int,
    pub(crate) nvls_ctas: c_int,
}

functions! {
    /// The functions that xtrain calls.
    Nccl {
        fn ncclGetVersion(version: *mut c_int) -> c_int;
        fn ncclGetUniqueId(id: *mut NcclUniqueId) -> c_int;
        fn ncclGetErrorString(result: c_int) -> *const c_char;
        fn ncclGetLastError(comm: NcclComm) -> *const c_char;
        fn ncclCommInitRankConfig(
            comm: *mut NcclComm,
            ranks: c_int,
            id: NcclUniqueId,
            rank: c_int,
            config: *mut NcclConfig,
        ) -> c_int;
        fn ncclCommGetAsyncError(comm: NcclComm, result: *mut c_int) -> c_int;
        fn ncclCommFinalize(comm: NcclComm) -> c_int;
        fn ncclCommDestroy(comm: NcclComm) -> c_int;
        fn ncclCommAbort(comm: NcclComm) -> c_int;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclAllGather(
            from: *const c_void,
            to: *mut c_void,
            count: usize,
            element: c_int,
            comm: NcclComm,
            stream: CuStream,
        ) -> c_int;
        fn ncclBroadcast(
            from: *const c_void,
            to: *mut c_void,
            count: usize,
            element: c_int,
            root: c_int,
            comm: NcclComm,
            stream: CuStream,
        ) -> c_int;
        fn ncclReduceScatter(
            from: *const c_void,
            to: *mut c_void,
            count: usize,
            element: c_int,
            op: c_int,
            comm: NcclComm,
            stream: CuStream,
        ) -> c_int;
        fn ncclReduce(
            from: *const c_void,
            to: *mut c_void,
            count: usize,
            element: c_int,
            op: c_int,
            root: c_int,
            comm: NcclComm,
            stream: CuStream,
        ) -> c_int;
        fn ncclSend(
            from: *const c_void,
            count: usize,
            element: c_int,
            peer: c_int,
            comm: NcclComm,
            stream: CuStream,
        ) -> c_int;
        fn ncclRecv(
            to: *mut c_void,
            count: usize,
            element: c_int,
            peer: c_int,
            comm: NcclComm,
            stream: CuStream,
        ) -> c_int;
    }
}

impl Nccl {
    /// 22703 is 2.27.3.
    pub(crate) fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: writes one integer, and fails only where it cannot.
        unsafe { (self.ncclGetVersion)(&mut version) };
        version
    }
}
