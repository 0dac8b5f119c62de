//! `libnvrtc.so.13`: calls the real compiler and returns PTX with source lines instead of machine code.
//!
//! With the setting `ptx`, PTX is kept in a folder and read from there. Only a caller who asks for ptxas's
//! report makes the compiler produce machine code, which is dropped.

use super::export;
use crate::ptx::COMPILED_FROM;
use crate::settings::SETTINGS;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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
            let handle = unsafe { *program } as usize;
            // SAFETY: the caller's string, or the patched one.
            let source = unsafe { CStr::from_ptr(source) }.to_owned();
            lock_programs().insert(handle, Program { title: title.into_owned(), source, ptx: None });
        }
        status
    }

    fn nvrtcDestroyProgram(program: *mut *mut c_void) {
        // SAFETY: the caller's pointer to a program.
        lock_programs().remove(&(unsafe { *program } as usize));
        real!(nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int, FAILED)
    }

    /// Compiles for `compute_90a` instead of `sm_90a` unless ptxas has options, and with `-lineinfo`.
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
        let (of_ptxas, given): (Vec<String>, Vec<String>) =
            given.partition(|option| option.starts_with("--ptxas-options"));
        let kept = {
            let mut programs = lock_programs();
            let Some(of) = programs.get_mut(&(program as usize)) else { return FAILED };
            let kept = cached_at(&of.source, &given);
            let defines: Vec<&str> = given.iter().filter_map(|option| option.strip_prefix("-D")).collect();
            of.title = format!("{} {}", of.title, defines.join(","));
            if of_ptxas.is_empty() {
                of.ptx = kept.as_ref().and_then(|path| std::fs::read(path).ok());
            }
            if of.ptx.is_some() {
                return 0;
            }
            kept
        };
        let target = if of_ptxas.is_empty() { "compute_" } else { "sm_" };
        let asked = given
            .iter()
            .map(|option| option.replace("--gpu-architecture=sm_", &format!("--gpu-architecture={target}")));
        let asked = asked.chain(of_ptxas.iter().cloned()).chain(["-lineinfo".to_owned()]);
        let asked: Vec<CString> = asked.filter_map(|option| CString::new(option).ok()).collect();
        let pointers: Vec<*const c_char> = asked.iter().map(|option| option.as_ptr()).collect();
        let (count, options) = (pointers.len() as c_int, pointers.as_ptr());
        let status =
            real!(nvrtcCompileProgram(program: *mut c_void, count: c_int, options: *const *const c_char) -> c_int, FAILED);
        if status != 0 {
            return status;
        }
        let mut bytes = 0;
        let size: *mut usize = &mut bytes;
        let status = real!(nvrtcGetPTXSize(program: *mut c_void, size: *mut usize) -> c_int, FAILED);
        let mut ptx = vec![0u8; bytes];
        let text = ptx.as_mut_ptr().cast::<c_char>();
        let status = status.max(real!(nvrtcGetPTX(program: *mut c_void, text: *mut c_char) -> c_int, FAILED));
        // The zero at its end.
        ptx.pop();
        if let Some(path) = kept.filter(|_| status == 0) {
            keep(&path, &ptx);
        }
        if let Some(of) = lock_programs().get_mut(&(program as usize)) {
            of.ptx = Some(ptx);
        }
        status
    }

    fn nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) {
        real!(nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) -> c_int, FAILED)
    }

    fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) {
        real!(nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> c_int, FAILED)
    }

    fn nvrtcGetCUBINSize(program: *mut c_void, bytes: *mut usize) {
        let text = text_of(program);
        // SAFETY: the caller's pointer.
        unsafe { *bytes = text.len() };
        0
    }

    fn nvrtcGetCUBIN(program: *mut c_void, cubin: *mut c_char) {
        let text = text_of(program);
        // SAFETY: the caller has room for as many bytes as `nvrtcGetCUBINSize` said.
        unsafe { cubin.cast::<u8>().copy_from(text.as_ptr(), text.len()) };
        0
    }
}

/// A program that is compiled.
struct Program {
    /// Its name, and its defines.
    title: String,
    source: CString,
    ptx: Option<Vec<u8>>,
}

/// Programs by handle.
fn lock_programs() -> MutexGuard<'static, BTreeMap<usize, Program>> {
    static PROGRAMS: Mutex<BTreeMap<usize, Program>> = Mutex::new(BTreeMap::new());
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The file in which the settings keep the PTX of a program.
fn cached_at(source: &CStr, options: &[String]) -> Option<PathBuf> {
    let folder = SETTINGS.as_ref()?.ptx.as_ref()?;
    let mut hash = DefaultHasher::new();
    let compiler = std::env::var_os(VARIABLE).and_then(|path| Path::new(&path).metadata().ok());
    (source, options, compiler.map(|file| file.len())).hash(&mut hash);
    Some(Path::new(folder).join(format!("{:016x}.ptx", hash.finish())))
}

/// Writes a file that other processes, and other threads of this one, may write too.
fn keep(path: &Path, bytes: &[u8]) {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{number}", std::process::id()));
    let written = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path));
    if let Err(error) = written {
        eprintln!("emulated GPU: {}: {error}", path.display());
    }
}

/// The PTX of a program and a comment with its name and its defines, up to a zero.
fn text_of(program: *mut c_void) -> Vec<u8> {
    let programs = lock_programs();
    let Some(Program { title, ptx, .. }) = programs.get(&(program as usize)) else { return vec![0] };
    [ptx.as_deref().unwrap_or_default(), format!("{COMPILED_FROM}{title}\n\0").as_bytes()].concat()
}
