//! Test setup: a folder that links NVIDIA's library names to the emulator, and tests that run in child
//! processes.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]
#![allow(unsafe_code, reason = "it sets variables of the environment and calls a foreign function")]

use libtest_mimic::{Arguments, Failed, Trial};
use std::error::Error;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use xtrain_cuda::{Context, CudaError, DevicePtr, Launch, Module, Stream, kernel_struct};

/// The shared library, which cargo builds beside the tests.
pub fn library() -> Result<PathBuf, Box<dyn Error>> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1);
    let found = folders.map(|folder| folder.join("libxtrain_emulator.so")).find(|path| path.is_file());
    found.ok_or_else(|| "libxtrain_emulator.so is not built: `cargo build -p xtrain-emulator`".into())
}

/// Makes this process load the emulator instead of NVIDIA's libraries. Call it before any of them is loaded.
pub fn emulated() -> Result<tempfile::TempDir, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    for name in ["libcuda.so.1", "libcublasLt.so.13", "libnvrtc.so.13", "libnccl.so.2"] {
        symlink(library()?, folder.path().join(name))?;
    }
    // An empty file fails to load, so that no real library is found elsewhere.
    std::fs::write(folder.path().join("libcudnn.so.9"), [])?;
    // SAFETY: called before there are other threads.
    unsafe { std::env::set_var("XTRAIN_CUDA_LIBRARIES", folder.path()) };
    // SAFETY: as above.
    unsafe { std::env::set_var("XTRAIN_CACHE", folder.path().join("cache")) };
    Ok(folder)
}

/// The number of warp instructions executed in this process.
pub fn steps() -> Result<u64, Box<dyn Error>> {
    // SAFETY: the library is open already; nothing is initialised again.
    let library = unsafe { libloading::Library::new(library()?) }?;
    // SAFETY: the function takes nothing and returns a number.
    let steps = unsafe { library.get::<unsafe extern "C" fn() -> u64>(b"xtrain_emulator_steps\0") }?;
    // SAFETY: as above.
    Ok(unsafe { steps() })
}

/// The result of a test.
pub type Outcome = Result<(), Box<dyn Error>>;

/// The code of a case.
pub type Body = fn() -> Outcome;

/// A test that runs in its own process.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    /// `XTRAIN_EMULATOR`, the emulator's settings.
    pub settings: &'static str,
    /// Text that must appear on standard error.
    pub says: &'static str,
    pub body: Body,
}

/// The environment variable that names the case of a child process.
pub const CHILD: &str = "XTRAIN_TEST_CHILD";

/// Runs a case of this test binary in a child process.
pub fn child(name: &str, settings: &str) -> std::io::Result<Output> {
    child_command(name, settings)?.output()
}

/// The command that runs a case of this test binary, with its output in pipes.
pub fn child_command(name: &str, settings: &str) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env("XTRAIN_EMULATOR", settings).env(CHILD, name).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// Runs the case of a child process and exits. Returns at once in the parent.
pub fn run_as_child(bodies: &[(&str, Body)]) -> Outcome {
    let Ok(name) = std::env::var(CHILD) else { return Ok(()) };
    let folder = emulated()?;
    let (_, body) = bodies.iter().find(|(of, _)| *of == name).ok_or("no case has this name")?;
    let result = body();
    drop(folder);
    if let Err(error) = &result {
        eprintln!("{error}");
    }
    std::process::exit(if result.is_ok() { 0 } else { 1 })
}

/// Runs each case in a child process.
pub fn main(cases: &[Case]) -> Outcome {
    let bodies: Vec<_> = cases.iter().map(|case| (case.name, case.body)).collect();
    run_as_child(&bodies)?;
    let test = |case: Case| {
        let run = move || -> Result<(), Failed> {
            let output = child(case.name, case.settings)?;
            let said = String::from_utf8_lossy(&output.stderr);
            if output.status.success() && said.contains(case.says) {
                return Ok(());
            }
            Err(format!("{}, `{}` is missing from its output:\n{said}", output.status, case.says).into())
        };
        Trial::test(case.name, run)
    };
    libtest_mimic::run(&Arguments::from_args(), cases.iter().copied().map(test).collect()).exit()
}

/// The PTX of a kernel `step` with the parameters `from` and `to`. `body` is line 7 of `step.cu`.
pub fn module(arch: &str, body: &str) -> Vec<u8> {
    let head = format!(".version 9.0\n.target {arch}\n.address_size 64\n.file 1 \"step.cu\"\n");
    format!(
        "{head}.visible .entry step(.param .align 8 .b8 step_param_0[16])\n{{\n\
         .reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n.reg .pred %p<3>;\n\
         ld.param.u64 %rd1, [step_param_0];\nld.param.u64 %rd2, [step_param_0+8];\n\
         mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 4;\n\
         add.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n.loc 1 7 1\n{body}\nret;\n}}\n\0"
    )
    .into_bytes()
}

/// `to[i] = from[i] * 3 + 1`, one u32 per thread.
pub const STEP: &str = "ld.global.u32 %r2, [%rd4];\nmad.lo.s32 %r3, %r2, 3, 1;\nst.global.u32 [%rd5], %r3;";

/// Launches [`STEP`] for 32 numbers.
pub fn step(context: &Context, from: DevicePtr, to: DevicePtr, stream: &Stream) -> Result<(), CudaError> {
    let module = Module::load(context, &module("sm_90a", STEP))?;
    launch(&module, Launch::row(1, 32), from, to, stream)
}

kernel_struct! {
    struct Step {
        from: DevicePtr,
        to: DevicePtr,
    }
}

/// Launches a kernel `step`.
pub fn launch(
    module: &Module,
    launch: Launch,
    from: DevicePtr,
    to: DevicePtr,
    stream: &Stream,
) -> Result<(), CudaError> {
    // SAFETY: the kernel takes two pointers; the emulator reports invalid accesses.
    unsafe { module.function("step")?.launch(launch, &Step { from, to }, stream) }
}
