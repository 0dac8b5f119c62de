//! A comparison of the emulator with a GPU: each form's results, bit by bit.
//!
//! A form's test runs twice: emulated, and on the GPU with the emulated results as its own, so that both take
//! the same path and each difference is counted. If threads access memory in an undefined order, the test
//! runs only on the GPU, and the definition judges its results. The test is ignored by default:
//! `XTRAIN_TEST_FAMILY=float cargo test -p xtrain-emulator -- --ignored --nocapture a_gpu` on a machine with
//! a GPU of compute capability 9. `XTRAIN_TEST_FIRST=n` begins with form n, for after a fault.
#![allow(unsafe_code, reason = "it launches kernels on a GPU")]

use super::device::Grid;
use super::form::{Form, Tolerance};
use crate::ptx::Kernel;
use crate::tensor_map::TensorMap;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

/// Bytes of a buffer that was read.
type Bytes = Vec<u8>;

/// The devices that a thread uses.
enum Mode {
    /// Emulates and records the buffers that are read.
    Emulated { read: Vec<Bytes> },
    /// Runs kernels on the GPU and compares the buffers that are read with these, in order.
    Compared { gpu: &'static Gpu, expected: VecDeque<Bytes>, difference: Difference },
    /// Runs kernels on the GPU.
    Alone { gpu: &'static Gpu },
}

thread_local! {
    static MODE: RefCell<Mode> = const { RefCell::new(Mode::Emulated { read: Vec::new() }) };
}

/// Memory and kernels of a GPU, if the thread uses one.
pub(super) fn session() -> Option<Session> {
    MODE.with_borrow(|mode| match mode {
        Mode::Emulated { .. } => None,
        Mode::Compared { gpu, .. } | Mode::Alone { gpu } => {
            Some(Session { gpu, first: RefCell::default(), allocated: Vec::new() })
        }
    })
}

/// Records or compares a buffer that was read; returns the buffer to continue with.
pub(super) fn noted(found: Bytes) -> Bytes {
    MODE.with_borrow_mut(|mode| match mode {
        Mode::Emulated { read } => {
            if IS_COMPARING.get() {
                read.push(found.clone());
            }
            found
        }
        Mode::Compared { expected, difference, .. } => match expected.pop_front() {
            Some(emulated) => {
                difference.count(&emulated, &found);
                emulated
            }
            None => found,
        },
        Mode::Alone { .. } => found,
    })
}

thread_local! {
    static IS_COMPARING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Differences between the GPU's and the emulated results.
#[derive(Default)]
struct Difference {
    opcode: &'static str,
    tolerance: Tolerance,
    words: usize,
    differing: usize,
    /// Number of words that differ by more than the tolerance.
    wrong: usize,
    /// The largest difference of two numbers, in units of the last place.
    ulps: u64,
    /// The first wrong word, or else the one with the largest difference.
    example: String,
    /// The first buffer that was stored on the present device.
    stored: Bytes,
}

impl Difference {
    /// A number of the form's type, and its rank among the numbers of that type; `None` for NaN and integers.
    fn number(&self, bits: u64) -> Option<(f64, i64)> {
        let is_float = |part: &&str| ["f32", "f64"].contains(part);
        match self.opcode.split('.').rfind(is_float)? {
            "f64" if !self.opcode.starts_with("cvt") => {
                let (x, magnitude) = (f64::from_bits(bits), (bits & (u64::MAX >> 1)) as i64);
                (!x.is_nan()).then_some((x, if x.is_sign_negative() { -magnitude } else { magnitude }))
            }
            _ => {
                let (x, magnitude) = (f32::from_bits(bits as u32), i64::from(bits as u32 & 0x7FFF_FFFF));
                (!x.is_nan()).then_some((x.into(), if x.is_sign_negative() { -magnitude } else { magnitude }))
            }
        }
    }

    fn count(&mut self, emulated: &[u8], found: &[u8]) {
        // Rows have results of 8 bytes, other kernels results of 4.
        let is_rows = self.stored.len() == 5 * emulated.len();
        let step = if is_rows { 8 } else { 4 };
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        for (n, (emulated, found)) in emulated.chunks(step).zip(found.chunks(step)).enumerate() {
            self.words += 1;
            let (emulated, found) = (word(emulated), word(found));
            if emulated == found {
                continue;
            }
            self.differing += 1;
            let (ulps, is_wrong) = match (self.number(emulated), self.number(found)) {
                (Some((x, place)), Some((y, other))) => {
                    let ulps = place.abs_diff(other);
                    (ulps, ulps > self.tolerance.ulps && (x - y).abs() > self.tolerance.absolute)
                }
                (x, y) => (0, !self.tolerance.any_nan || x.is_some() || y.is_some()),
            };
            if self.wrong == 0 && (is_wrong || ulps > self.ulps) {
                let row: Vec<String> = match is_rows {
                    true => self.stored[40 * n..40 * n + 32]
                        .chunks(8)
                        .map(|x| format!("{:#x}", word(x)))
                        .collect(),
                    false => vec![format!("word {n}")],
                };
                self.example = format!("emulated {emulated:#x}, GPU {found:#x} of {}", row.join(", "));
            }
            self.wrong += usize::from(is_wrong);
            self.ulps = self.ulps.max(ulps);
        }
    }
}

/// Memory on a GPU.
pub(super) struct Session {
    gpu: &'static Gpu,
    first: RefCell<bool>,
    allocated: Vec<u64>,
}

impl Session {
    pub(super) fn allocate(&mut self, bytes: usize) -> u64 {
        let mut address = 0;
        self.gpu.call("cuMemAlloc_v2", |f: unsafe extern "C" fn(*mut u64, usize) -> c_int| {
            // SAFETY: writes one address.
            unsafe { f(&mut address, bytes.max(1)) }
        });
        self.allocated.push(address);
        let fill = |f: unsafe extern "C" fn(u64, u8, usize, usize) -> c_int| {
            // SAFETY: the memory was just allocated.
            unsafe { f(address, 0xCB, bytes.max(1), self.gpu.stream) }
        };
        self.gpu.call("cuMemsetD8Async", fill);
        address
    }

    pub(super) fn write(&mut self, address: u64, bytes: &[u8]) {
        let copy = |f: unsafe extern "C" fn(u64, *const c_void, usize, usize) -> c_int| {
            // SAFETY: the caller allocated as many bytes.
            unsafe { f(address, bytes.as_ptr().cast(), bytes.len(), self.gpu.stream) }
        };
        self.gpu.call("cuMemcpyHtoDAsync_v2", copy);
        self.gpu.wait().unwrap_or_else(|problem| panic!("{problem}"));
        if !self.first.replace(true) {
            MODE.with_borrow_mut(|mode| {
                if let Mode::Compared { difference, .. } = mode {
                    difference.stored = bytes.to_vec();
                }
            });
        }
    }

    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), String> {
        let copy = |f: unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int| {
            // SAFETY: the caller allocated as many bytes, and it is waited for.
            unsafe { f(into.as_mut_ptr().cast(), address, into.len(), self.gpu.stream) }
        };
        self.gpu.try_call("cuMemcpyDtoHAsync_v2", copy)?;
        self.gpu.wait()
    }

    pub(super) fn tensor_map(&self, map: &TensorMap) -> [u64; 16] {
        type Encode = unsafe extern "C" fn(
            *mut Map,
            c_int,
            c_uint,
            u64,
            *const u64,
            *const u64,
            *const c_uint,
            *const c_uint,
            c_int,
            c_int,
            c_int,
            c_int,
        ) -> c_int;
        #[repr(C, align(64))]
        struct Map([u64; 16]);
        let (mut words, rank) = (Map([0; 16]), map.extents.len());
        let boxed: Vec<c_uint> = map.boxed.iter().map(|&extent| extent as c_uint).collect();
        // CU_TENSOR_MAP_DATA_TYPE_UINT8, UINT16 and UINT32.
        let (ty, steps) = (map.element_bytes.ilog2() as c_int, vec![1; rank]);
        self.gpu.call("cuTensorMapEncodeTiled", |f: Encode| {
            // SAFETY: writes one map, and reads as many numbers as the rank says, one stride less.
            unsafe {
                f(
                    &mut words,
                    ty,
                    rank as c_uint,
                    map.address,
                    map.extents.as_ptr(),
                    map.strides.as_ptr(),
                    boxed.as_ptr(),
                    steps.as_ptr(),
                    0,
                    map.swizzle_bits as c_int,
                    0,
                    0,
                )
            }
        });
        words.0
    }

    pub(super) fn run(
        &self,
        text: &str,
        kernel: &Kernel,
        grid: Grid,
        arguments: &[u8],
    ) -> Result<(), String> {
        let function = self.gpu.function(text, &kernel.name)?;
        let mut pointers: Vec<*mut c_void> = Vec::new();
        let mut at = 0usize;
        for parameter in &kernel.parameters {
            at = at.next_multiple_of(parameter.align as usize);
            pointers.push(arguments[at..].as_ptr().cast_mut().cast());
            at += parameter.bytes as usize;
        }
        assert!(at <= arguments.len(), "{kernel:?} takes more");
        let config = Config {
            grid: grid.blocks,
            block: grid.threads,
            shared_bytes: 0,
            stream: self.gpu.stream,
            attributes: 0,
            attribute_count: 0,
        };
        let launch = |f: unsafe extern "C" fn(*const Config, usize, *mut *mut c_void, usize) -> c_int| {
            // SAFETY: the kernel takes these arguments; the driver copies them.
            unsafe { f(&config, function, pointers.as_mut_ptr(), 0) }
        };
        self.gpu.try_call("cuLaunchKernelEx", launch)?;
        self.gpu.wait()
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: usize,
    attributes: usize,
    attribute_count: c_uint,
}

impl Drop for Session {
    fn drop(&mut self) {
        for &address in &self.allocated {
            // After a fault in a kernel this fails, and the context is left with all its memory.
            // SAFETY: the memory was allocated here, and nothing runs.
            let _ = self
                .gpu
                .try_call("cuMemFree_v2", |f: unsafe extern "C" fn(u64) -> c_int| unsafe { f(address) });
        }
    }
}

/// NVIDIA's driver with a context and a stream.
struct Gpu {
    library: Library,
    stream: usize,
    functions: RefCell<HashMap<String, usize>>,
}

impl Gpu {
    fn open() -> Result<Gpu, String> {
        // SAFETY: NVIDIA's driver runs nothing harmful when it is opened.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| error.to_string())?;
        let mut gpu = Gpu { library, stream: 0, functions: RefCell::default() };
        // SAFETY: initialises.
        gpu.try_call("cuInit", |f: unsafe extern "C" fn(c_uint) -> c_int| unsafe { f(0) })?;
        let mut context = 0usize;
        let retain = |f: unsafe extern "C" fn(*mut usize, c_int) -> c_int| {
            // SAFETY: writes one handle.
            unsafe { f(&mut context, 0) }
        };
        gpu.try_call("cuDevicePrimaryCtxRetain", retain)?;
        // SAFETY: the handle was just made.
        gpu.try_call("cuCtxSetCurrent", |f: unsafe extern "C" fn(usize) -> c_int| unsafe { f(context) })?;
        let mut stream = 0usize;
        let create = |f: unsafe extern "C" fn(*mut usize, c_uint, c_int) -> c_int| {
            // SAFETY: writes one handle.
            unsafe { f(&mut stream, 0, 0) }
        };
        gpu.try_call("cuStreamCreateWithPriority", create)?;
        gpu.stream = stream;
        Ok(gpu)
    }

    /// Waits for all queued work.
    fn wait(&self) -> Result<(), String> {
        let wait = |f: unsafe extern "C" fn(usize) -> c_int| {
            // SAFETY: the stream is ours.
            unsafe { f(self.stream) }
        };
        self.try_call("cuStreamSynchronize", wait)
    }

    /// Calls a function of the driver; `F` is its type.
    fn try_call<F: Copy>(&self, name: &str, call: impl FnOnce(F) -> c_int) -> Result<(), String> {
        // SAFETY: the caller gives the type that the driver's header gives.
        let function =
            unsafe { self.library.get::<F>(name.as_bytes()) }.map_err(|error| format!("{name}: {error}"))?;
        match call(*function) {
            0 => Ok(()),
            status => Err(format!("{name}: {}", self.name_of(status))),
        }
    }

    fn call<F: Copy>(&self, name: &str, call: impl FnOnce(F) -> c_int) {
        self.try_call(name, call).unwrap_or_else(|problem| panic!("{problem}"));
    }

    fn name_of(&self, status: c_int) -> String {
        type Name = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
        // SAFETY: as in `try_call`.
        let Ok(name_of) = (unsafe { self.library.get::<Name>(b"cuGetErrorName") }) else {
            return status.to_string();
        };
        let mut name = std::ptr::null();
        // SAFETY: writes a pointer to a constant text.
        if unsafe { name_of(status, &mut name) } != 0 || name.is_null() {
            return status.to_string();
        }
        // SAFETY: the driver's texts end with a zero and stay.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    fn function(&self, text: &str, kernel: &str) -> Result<usize, String> {
        if let Some(&function) = self.functions.borrow().get(text) {
            return Ok(function);
        }
        let terminated = CString::new(text).expect("no zeros in PTX");
        let (mut module, mut function) = (0usize, 0usize);
        let load = |f: unsafe extern "C" fn(*mut usize, *const c_void) -> c_int| {
            // SAFETY: the text ends with a zero.
            unsafe { f(&mut module, terminated.as_ptr().cast()) }
        };
        self.try_call("cuModuleLoadData", load)?;
        let name = CString::new(kernel).expect("no zeros in a name");
        let get = |f: unsafe extern "C" fn(*mut usize, usize, *const c_char) -> c_int| {
            // SAFETY: the module was just loaded; the name ends with a zero.
            unsafe { f(&mut function, module, name.as_ptr()) }
        };
        self.try_call("cuModuleGetFunction", get)?;
        self.functions.borrow_mut().insert(text.to_owned(), function);
        Ok(function)
    }
}

/// Compares a form's results; the error describes the difference.
fn compare(gpu: &'static Gpu, make: impl Fn() -> Form) -> Result<(), String> {
    IS_COMPARING.set(true);
    let run = |mode: Mode| {
        MODE.replace(mode);
        let result = make().check();
        (result, MODE.replace(Mode::Emulated { read: Vec::new() }))
    };
    let Form { opcode, tolerance, .. } = make();
    let (emulated, mode) = run(Mode::Emulated { read: Vec::new() });
    emulated?;
    let Mode::Emulated { read } = mode else { unreachable!("the mode stays") };
    let difference = Difference { opcode, tolerance, ..Difference::default() };
    let (compared, mode) = run(Mode::Compared { gpu, expected: read.into(), difference });
    let Mode::Compared { difference, .. } = mode else { unreachable!("the mode stays") };
    let Difference { words, differing, wrong, ulps, example, .. } = difference;
    if differing > 0 && !tolerance.is_of_any_order {
        println!("{opcode}: {differing} of {words} results differ, at most by {ulps} ulps: {example}");
    }
    compared?;
    if tolerance.is_of_any_order {
        return run(Mode::Alone { gpu }).0;
    }
    if wrong > 0 { Err(format!("{opcode}: {wrong} of {words} results are wrong: {example}")) } else { Ok(()) }
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 and NVIDIA's driver"]
fn a_gpu_gives_the_emulated_results() {
    let family = std::env::var("XTRAIN_TEST_FAMILY").unwrap_or_default();
    // The driver stays open until the process ends, because drivers are not meant to be closed.
    let gpu: &'static Gpu = Box::leak(Box::new(Gpu::open().expect("a GPU")));
    let first = std::env::var("XTRAIN_TEST_FIRST").map_or(0, |first| first.parse().expect("a number"));
    let (mut compared, mut problems) = (0, Vec::new());
    for (name, forms) in super::FAMILIES {
        if family.is_empty() || family == name {
            for n in first..forms().len() {
                compared += 1;
                if let Err(problem) = compare(gpu, || forms().swap_remove(n)) {
                    println!("{name} {n}, {}: {problem}", forms().swap_remove(n).opcode);
                    problems.push(problem);
                }
                // After a fault in a kernel, the driver refuses all further calls.
                if let Err(fault) = gpu.wait() {
                    panic!("{fault}; the next form is XTRAIN_TEST_FIRST={}", n + 1);
                }
            }
        }
    }
    println!("{compared} forms compared, {} wrong", problems.len());
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
