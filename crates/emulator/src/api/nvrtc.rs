//! `libnvrtc.so.13`: calls the real compiler and asks it for PTX with source lines instead of machine code.

use super::export;
use crate::ptx::COMPILED_FROM;
use crate::settings::SETTINGS;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The variable that names the real library's file.
const VARIABLE: &str = "XTRAIN_EMULATOR_NVRTC";

/// The real library. Opened with RTLD_LOCAL, because it exports the same names as this one.
fn real() -> Option<&'static Library> {
    static REAL: OnceLock<Option<Library>> = OnceLock::new();
    let open = || {
        let path = std::env::var_os(VARIABLE)?;
        let open = |path: &Path| {
            // SAFETY: initialisers of NVIDIA's library run, which may be run at any time.
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        };
        // NVRTC loads its builtins by name, so they are opened first.
        let folder = Path::new(&path).parent()?.read_dir().ok()?.flatten();
        for entry in
            folder.filter(|entry| entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so"))
        {
            std::mem::forget(open(&entry.path()));
        }
        open(Path::new(&path)).inspect_err(|error| eprintln!("emulated GPU: {error}")).ok()
    };
    let opened = REAL.get_or_init(open).as_ref();
    if opened.is_none() {
        eprintln!("emulated GPU: {VARIABLE} does not name a libnvrtc.so.13 that can be loaded");
    }
    opened
}

/// NVRTC_ERROR_INTERNAL_ERROR
const FAILED: c_int = 11;

/// Calls the real function of this name.
macro_rules! real {
    ($name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty, $otherwise:expr) => {{
        let name = concat!(stringify!($name), "\0").as_bytes();
        let function = real().and_then(|library| {
            // SAFETY: the function has this signature in NVRTC 13.
            unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> $ret>(name) }.ok()
        });
        // SAFETY: the caller's arguments.
        function.map_or($otherwise, |function| unsafe { function($($arg),*) })
    }};
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcGetErrorString(result: c_int) -> *const c_char {
    let unknown = c"the real NVRTC cannot be opened".as_ptr();
    real!(nvrtcGetErrorString(result: c_int) -> *const c_char, unknown)
}

export! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) {
        real!(nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int, FAILED)
    }

    fn nvrtcCreateProgram(
        program: *mut *mut c_void,
        source: *const c_char,
        name: *const c_char,
        header_count: c_int,
        headers: *const *const c_char,
        header_names: *const *const c_char,
    ) {
        // SAFETY: the caller's string.
        let title = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let patch =
            SETTINGS.as_ref().and_then(|settings| settings.patch.as_ref()).filter(|patch| patch.source == title);
        let patched = patch.map(|patch| {
            // SAFETY: as above.
            let text = unsafe { CStr::from_ptr(source) }.to_string_lossy();
            // If the patch does not fit, the compiler reports it.
            let text = patch.apply(&text).unwrap_or_else(|problem| format!("#error {problem}\n"));
            CString::new(text).unwrap_or_default()
        });
        let source = patched.as_ref().map_or(source, |text| text.as_ptr());
        let status = real!(
            nvrtcCreateProgram(
                program: *mut *mut c_void,
                source: *const c_char,
                name: *const c_char,
                header_count: c_int,
                headers: *const *const c_char,
                header_names: *const *const c_char,
            ) -> c_int,
            FAILED
        );
        if status == 0 {
            // SAFETY: the caller's pointer, which was just written.
            lock_sources().insert(unsafe { *program } as usize, title.into_owned());
        }
        status
    }

    fn nvrtcDestroyProgram(program: *mut *mut c_void) {
        // SAFETY: the caller's pointer to a program.
        lock_sources().remove(&(unsafe { *program } as usize));
        real!(nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int, FAILED)
    }

    /// Compiles to PTX instead of machine code: `compute_90a` for `sm_90a`, with `-lineinfo` and without
    /// ptxas options.
    fn nvrtcCompileProgram(
        program: *mut c_void,
        count: c_int,
        options: *const *const c_char,
    ) {
        let given = (0..count as usize).map(|n| {
            // SAFETY: as many pointers as `count` says.
            let option = unsafe { *options.wrapping_add(n) };
            // SAFETY: to strings that end with zeros.
            unsafe { CStr::from_ptr(option) }.to_string_lossy().into_owned()
        });
        let given: Vec<String> = given.filter(|option| !option.starts_with("--ptxas-options")).collect();
        let defines: Vec<&str> = given.iter().filter_map(|option| option.strip_prefix("-D")).collect();
        if let Some(source) = lock_sources().get_mut(&(program as usize)) {
            *source = format!("{source} {}", defines.join(","));
        }
        let asked =
            given.iter().map(|option| option.replace("--gpu-architecture=sm_", "--gpu-architecture=compute_"));
        let asked = asked.chain(["-lineinfo".to_owned()]);
        let asked: Vec<CString> = asked.filter_map(|option| CString::new(option).ok()).collect();
        let pointers: Vec<*const c_char> = asked.iter().map(|option| option.as_ptr()).collect();
        let (count, options) = (pointers.len() as c_int, pointers.as_ptr());
        real!(nvrtcCompileProgram(program: *mut c_void, count: c_int, options: *const *const c_char) -> c_int, FAILED)
    }

    fn nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) {
        real!(nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) -> c_int, FAILED)
    }

    fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) {
        real!(nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> c_int, FAILED)
    }

    fn nvrtcGetCUBINSize(program: *mut c_void, bytes: *mut usize) {
        let status = real!(nvrtcGetPTXSize(program: *mut c_void, bytes: *mut usize) -> c_int, FAILED);
        if status == 0 {
            // SAFETY: the caller's pointer, which was just written. The trailer brings a zero of its own.
            unsafe { *bytes += trailer(program).len() - 1 };
        }
        status
    }

    fn nvrtcGetCUBIN(program: *mut c_void, cubin: *mut c_char) {
        let status = real!(nvrtcGetPTX(program: *mut c_void, cubin: *mut c_char) -> c_int, FAILED);
        if status == 0 {
            let trailer = trailer(program);
            // SAFETY: the text ends with a zero.
            let length = unsafe { CStr::from_ptr(cubin) }.count_bytes();
            let end = cubin.wrapping_add(length).cast::<u8>();
            // SAFETY: the caller has room for as many bytes as `nvrtcGetCUBINSize` said.
            unsafe { end.copy_from(trailer.as_ptr(), trailer.len()) };
        }
        status
    }
}

/// Names and defines of programs, by handle.
fn lock_sources() -> MutexGuard<'static, BTreeMap<usize, String>> {
    static SOURCES: Mutex<BTreeMap<usize, String>> = Mutex::new(BTreeMap::new());
    SOURCES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The comment with which the PTX of a program ends: its name and its defines.
fn trailer(program: *mut c_void) -> String {
    format!("{COMPILED_FROM}{}\n\0", lock_sources().get(&(program as usize)).map_or("", String::as_str))
}
