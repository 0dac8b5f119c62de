//! NVTX ranges: names on the time line of NVIDIA's profilers.
//!
//! An attached profiler (`nsys profile xtrain train ..`) names its library in `NVTX_INJECTION64_PATH`. This
//! module speaks the protocol of NVTX's headers: it opens the library and passes `InitializeInjectionNvtx2` a
//! function that returns tables, and the profiler writes the addresses of its functions into them. NVTX need
//! not be installed. Without a profiler a range costs one read of a constant.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fmt::Display;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The variable in which a profiler names its library.
const INJECTION: &str = "NVTX_INJECTION64_PATH";

/// A range on the time line of the thread that opened it. Dropping it closes it.
#[must_use = "it is closed where it is dropped"]
pub struct NvtxRange {
    profiler: Option<&'static Profiler>,
    /// A range must be closed by the thread that opened it, so it is not `Send`.
    _thread: PhantomData<*const ()>,
}

/// Opens a range called `name`. The name is formatted only if a profiler is attached.
pub fn range(name: impl Display) -> NvtxRange {
    NvtxRange::push_to(profiler(), name)
}

impl NvtxRange {
    fn push_to(profiler: Option<&'static Profiler>, name: impl Display) -> NvtxRange {
        if let Some(profiler) = profiler {
            // The name ends at its first zero byte.
            let name = name.to_string().split('\0').next().map(CString::new);
            let name = name.and_then(Result::ok).unwrap_or_default();
            // SAFETY: the profiler's function, which takes a string that it copies.
            unsafe { (profiler.push)(name.as_ptr()) };
        }
        NvtxRange { profiler, _thread: PhantomData }
    }
}

impl Drop for NvtxRange {
    fn drop(&mut self) {
        if let Some(profiler) = self.profiler {
            // SAFETY: the profiler's function; this thread has opened a range before.
            unsafe { (profiler.pop)() };
        }
    }
}

/// `nvtxRangePushA` and `nvtxRangePop` of a profiler.
struct Profiler {
    push: Push,
    pop: Pop,
}

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// The attached profiler; None if there is none.
fn profiler() -> Option<&'static Profiler> {
    static PROFILER: OnceLock<Option<Profiler>> = OnceLock::new();
    PROFILER.get_or_init(attached).as_ref()
}

/// `InitializeInjectionNvtx2`: returns true if the profiler listens.
type Initialize = unsafe extern "C" fn(unsafe extern "C" fn(c_uint) -> *const c_void) -> c_int;

fn attached() -> Option<Profiler> {
    let path = std::env::var_os(INJECTION).filter(|path| !path.is_empty())?;
    // SAFETY: the profiler that started this process asks for its library.
    let library = unsafe { libloading::Library::new(path) }.ok()?;
    // SAFETY: what this name stands for in every such library.
    let initialize: Initialize = *unsafe { library.get(b"InitializeInjectionNvtx2\0") }.ok()?;
    let found = listening(initialize);
    // The profiler's functions are called until the process ends, and its library may run threads: never
    // close it.
    std::mem::forget(library);
    found
}

/// The functions that the profiler's library registers; None if it does not listen.
fn listening(initialize: Initialize) -> Option<Profiler> {
    // SAFETY: it is handed what the interface says.
    if unsafe { initialize(export_table) } == 0 {
        return None;
    }
    let slot = |n: usize| SLOTS[n].load(Ordering::Acquire);
    let (push, pop) = (slot(RANGE_PUSH), slot(RANGE_POP));
    if push.is_null() || pop.is_null() {
        return None;
    }
    // SAFETY: the profiler wrote a function of this type there, as the interface says.
    let push = unsafe { std::mem::transmute::<*mut c_void, Push>(push) };
    // SAFETY: as above.
    let pop = unsafe { std::mem::transmute::<*mut c_void, Pop>(pop) };
    Some(Profiler { push, pop })
}

/// `NvtxExportTableID`, `NvtxCallbackModule` and `NvtxCallbackIdCore` of NVTX 3.
const CALLBACKS: c_uint = 1;
const VERSION_INFO: c_uint = 3;
const MODULE_CORE: c_int = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;
const CORE_SIZE: usize = 16;
/// `NVTX_VERSION`.
const VERSION: u32 = 3;

/// The addresses of the profiler's functions, by id. The profiler writes them.
static SLOTS: [AtomicPtr<c_void>; CORE_SIZE] = [const { AtomicPtr::new(null_mut()) }; CORE_SIZE];

/// Pointers to [`SLOTS`], the first and the last null: the table of the module `core` that the profiler
/// reads.
static TABLE: [AtomicPtr<AtomicPtr<c_void>>; CORE_SIZE + 1] =
    [const { AtomicPtr::new(null_mut()) }; CORE_SIZE + 1];

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    bytes: usize,
    table_of: unsafe extern "C" fn(c_int, *mut *const c_void, *mut c_uint) -> c_int,
}

static CALLBACK_TABLE: Callbacks = Callbacks { bytes: size_of::<Callbacks>(), table_of: module_table };

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    bytes: usize,
    version: u32,
    reserved: u32,
    set_version: extern "C" fn(u32),
}

static VERSION_TABLE: VersionInfo =
    VersionInfo { bytes: size_of::<VersionInfo>(), version: VERSION, reserved: 0, set_version };

/// The profiler reports the version that it was built for; nothing here depends on it.
extern "C" fn set_version(_: u32) {}

/// `nvtxGetExportTable`.
unsafe extern "C" fn export_table(id: c_uint) -> *const c_void {
    match id {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => std::ptr::null(),
    }
}

/// `GetModuleFunctionTable`: true if the module is known.
unsafe extern "C" fn module_table(module: c_int, table: *mut *const c_void, size: *mut c_uint) -> c_int {
    if module != MODULE_CORE {
        return 0;
    }
    for (id, slot) in SLOTS.iter().enumerate().skip(1) {
        TABLE[id].store((&raw const *slot).cast_mut(), Ordering::Release);
    }
    if !table.is_null() {
        // SAFETY: the caller's pointer, to be written.
        unsafe { *table = TABLE.as_ptr().cast() };
    }
    if !size.is_null() {
        // SAFETY: as above.
        unsafe { *size = CORE_SIZE as c_uint };
    }
    1
}

#[cfg(test)]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "it plays a library in C")]
mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::sync::Mutex;

    static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

    unsafe extern "C" fn push(name: *const c_char) -> c_int {
        // SAFETY: a range's name.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        HEARD.lock().expect("no panic").push(name);
        0
    }

    unsafe extern "C" fn pop() -> c_int {
        HEARD.lock().expect("no panic").push("end".into());
        0
    }

    /// A profiler's library: it asks for the tables as NVTX's headers define them.
    unsafe extern "C" fn initialize(export: unsafe extern "C" fn(c_uint) -> *const c_void) -> c_int {
        // SAFETY: what the interface says of the tables.
        unsafe {
            let callbacks = export(CALLBACKS).cast::<Callbacks>();
            assert_eq!((*callbacks).bytes, 2 * size_of::<usize>());
            let version = export(VERSION_INFO).cast::<VersionInfo>();
            ((*version).set_version)(3);
            assert!(export(77).is_null());
            let (mut table, mut size) = (std::ptr::null(), 0);
            assert_eq!(
                ((*callbacks).table_of)(5, &mut table, &mut size),
                0,
                "the module core2 is not offered"
            );
            assert_eq!(((*callbacks).table_of)(MODULE_CORE, &mut table, &mut size), 1);
            assert_eq!(size as usize, CORE_SIZE);
            let table = table.cast::<*mut *const c_void>();
            assert!((*table).is_null() && (*table.add(CORE_SIZE)).is_null());
            **table.add(RANGE_PUSH) = push as *const c_void;
            **table.add(RANGE_POP) = pop as *const c_void;
        }
        1
    }

    unsafe extern "C" fn refuses(_: unsafe extern "C" fn(c_uint) -> *const c_void) -> c_int {
        0
    }

    #[test]
    fn a_profiler_hears_ranges_in_their_order_and_nobody_hears_them_without_one() {
        assert!(listening(refuses).is_none());
        let profiler: &'static Profiler = Box::leak(Box::new(listening(initialize).expect("it listens")));
        {
            let _step = NvtxRange::push_to(Some(profiler), format_args!("step {}", 3));
            drop(NvtxRange::push_to(Some(profiler), "linear a\0b"));
            drop(NvtxRange::push_to(None, "unheard"));
        }
        assert_eq!(*HEARD.lock().expect("no panic"), ["step 3", "linear a", "end", "end"]);
    }
}
