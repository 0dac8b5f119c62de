//! `libnvrtc.so.13`: calls the real compiler and asks it for PTX with source lines instead of machine code.

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
macro_rules! forward {
    ($name:literal, fn($($ty:ty),* $(,)?) -> $ret:ty, ($($arg:expr),*), $otherwise:expr) => {
        match real() {
            Some(library) => {
                // SAFETY: the function has this signature in NVRTC 13.
                let function = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> $ret>($name) };
                match function {
                    // SAFETY: the caller's arguments.
                    Ok(function) => unsafe { function($($arg),*) },
                    Err(_) => $otherwise,
                }
            }
            None => $otherwise,
        }
    };
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    forward!(b"nvrtcVersion\0", fn(*mut c_int, *mut c_int) -> c_int, (major, minor), FAILED)
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcGetErrorString(result: c_int) -> *const c_char {
    let unknown = c"the real NVRTC cannot be opened".as_ptr();
    forward!(b"nvrtcGetErrorString\0", fn(c_int) -> *const c_char, (result), unknown)
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut c_void,
    source: *const c_char,
    name: *const c_char,
    header_count: c_int,
    headers: *const *const c_char,
    header_names: *const *const c_char,
) -> c_int {
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
    let status = forward!(
        b"nvrtcCreateProgram\0",
        fn(
            *mut *mut c_void,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int,
        (program, source, name, header_count, headers, header_names),
        FAILED
    );
    if status == 0 {
        // SAFETY: the caller's pointer, which was just written.
        lock_sources().insert(unsafe { *program } as usize, title.into_owned());
    }
    status
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's pointer to a program.
    lock_sources().remove(&(unsafe { *program } as usize));
    forward!(b"nvrtcDestroyProgram\0", fn(*mut *mut c_void) -> c_int, (program), FAILED)
}

/// Compiles to PTX instead of machine code: `compute_90a` for `sm_90a`, with `-lineinfo` and without ptxas
/// options.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut c_void,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
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
    forward!(
        b"nvrtcCompileProgram\0",
        fn(*mut c_void, c_int, *const *const c_char) -> c_int,
        (program, pointers.len() as c_int, pointers.as_ptr()),
        FAILED
    )
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

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) -> c_int {
    forward!(b"nvrtcGetProgramLogSize\0", fn(*mut c_void, *mut usize) -> c_int, (program, bytes), FAILED)
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> c_int {
    forward!(b"nvrtcGetProgramLog\0", fn(*mut c_void, *mut c_char) -> c_int, (program, log), FAILED)
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcGetCUBINSize(program: *mut c_void, bytes: *mut usize) -> c_int {
    let status =
        forward!(b"nvrtcGetPTXSize\0", fn(*mut c_void, *mut usize) -> c_int, (program, bytes), FAILED);
    if status == 0 {
        // SAFETY: the caller's pointer, which was just written. The trailer brings a zero of its own.
        unsafe { *bytes += trailer(program).len() - 1 };
    }
    status
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
unsafe extern "C" fn nvrtcGetCUBIN(program: *mut c_void, cubin: *mut c_char) -> c_int {
    let status = forward!(b"nvrtcGetPTX\0", fn(*mut c_void, *mut c_char) -> c_int, (program, cubin), FAILED);
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
