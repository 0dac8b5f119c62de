//! `libnvrtc.so.13`: the compiler.

use super::functions;
use std::ffi::{c_char, c_int, c_void};

/// Opaque handle.
pub(crate) type NvrtcProgram = *mut c_void;

pub(crate) const NVRTC_SUCCESS: c_int = 0;
pub(crate) const NVRTC_ERROR_COMPILATION: c_int = 6;

functions! {
    /// The functions that xtrain calls.
    Nvrtc {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int;
        fn nvrtcGetErrorString(result: c_int) -> *const c_char;
        fn nvrtcCreateProgram(
            program: *mut NvrtcProgram,
            source: *const c_char,
            name: *const c_char,
            header_count: c_int,
            headers: *const *const c_char,
            header_names: *const *const c_char,
        ) -> c_int;
        fn nvrtcDestroyProgram(program: *mut NvrtcProgram) -> c_int;
        fn nvrtcCompileProgram(program: NvrtcProgram, count: c_int, options: *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(program: NvrtcProgram, bytes: *mut usize) -> c_int;
        fn nvrtcGetProgramLog(program: NvrtcProgram, log: *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(program: NvrtcProgram, bytes: *mut usize) -> c_int;
        fn nvrtcGetCUBIN(program: NvrtcProgram, cubin: *mut c_char) -> c_int;
    }
}
