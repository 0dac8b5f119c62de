//! Tests of programmatic dependent launch: kernels that may begin before the one before them has ended, in a
//! stream and in a captured graph. Each case runs with several seeds.
#![allow(unsafe_code, reason = "it calls the driver, whose launch attribute the product does not use")]

mod common;

use common::Outcome;
use libtest_mimic::{Arguments, Failed, Trial};
use std::ffi::{c_int, c_uint, c_void};
use xtrain_cuda::{Context, CudaDevice, DeviceMemory, Graph, Stream};

/// `CUlaunchConfig`, and the one attribute that it may have.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *const [u64; 9],
    attribute_count: c_uint,
}

type Load = unsafe extern "C" fn(*mut usize, *const u8) -> c_int;
type GetFunction = unsafe extern "C" fn(*mut usize, usize, *const u8) -> c_int;
type LaunchEx = unsafe extern "C" fn(*const Config, usize, *const *const u64, usize) -> c_int;

/// A chain of kernels of two parts each, whether all but the first have the attribute, a report, and without
/// one the words of `to`. Each kernel has two blocks of 64 threads; `%rd1` is the thread's word of `data`,
/// which holds zeros, `%rd2` that of `to`, `%rd3` a flag, and `%r1` the thread.
type Case = (&'static str, &'static [&'static str], bool, &'static str, u32);

const WAIT: &str = "griddepcontrol.wait;";
const LAUNCH: &str = "griddepcontrol.launch_dependents;";
const ADD: &str = "ld.global.u32 %r2, [%rd1]; add.s32 %r2, %r2, 5; st.global.u32 [%rd1], %r2;";
const TAKE: &str = "ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd2], %r2;";
const OF_ONE_THREAD: &str = "setp.eq.u32 %p1, %r1, 0; @%p1 griddepcontrol.wait; bar.sync 0;";
const READ: &str = "ld.global.u32 %r3, [%rd1];";
const WRITE: &str = "st.global.u32 [%rd1], %r1;";
/// The first kernel waits for a flag of the second one, which begins because it may.
const AWAIT_FLAG: &str =
    "AGAIN: ld.relaxed.gpu.global.u32 %r2, [%rd3]; setp.eq.u32 %p1, %r2, 0; @%p1 bra AGAIN;";
const SET_FLAG: &str = "st.relaxed.gpu.global.u32 [%rd3], 7;";
const TAKE_FLAG: &str = "ld.relaxed.gpu.global.u32 %r2, [%rd3]; st.global.u32 [%rd2], %r2;";
const RACE: &str = "the later launch began early and needs `griddepcontrol.wait` before its access";

const CASES: [Case; 11] = [
    ("a_kernel_that_waits", &[LAUNCH, ADD, WAIT, TAKE], true, "", 5),
    ("a_chain_that_waits", &[ADD, LAUNCH, WAIT, ADD, WAIT, TAKE], true, "", 10),
    ("one_thread_that_waits_for_its_block", &[LAUNCH, ADD, OF_ONE_THREAD, TAKE], true, "", 5),
    ("a_kernel_without_the_attribute", &[LAUNCH, ADD, "", TAKE], false, "", 5),
    ("a_wait_without_the_attribute", &[LAUNCH, ADD, WAIT, TAKE], false, "", 5),
    ("a_kernel_that_begins_early", &[LAUNCH, AWAIT_FLAG, SET_FLAG, WAIT, "", TAKE_FLAG], true, "", 7),
    ("a_kernel_that_does_not_wait", &[LAUNCH, ADD, "", TAKE], true, RACE, 0),
    ("a_kernel_after_one_that_lets_nothing_begin", &["", ADD, "", TAKE], true, RACE, 0),
    ("a_read_before_the_wait", &[ADD, LAUNCH, READ, WAIT], true, "race: ", 0),
    ("a_write_before_the_wait", &[LAUNCH, TAKE, WRITE, WAIT], true, "race: ", 0),
    // The third kernel waits for the second one, which may end before the first.
    ("a_kernel_between_that_does_not_wait", &[LAUNCH, ADD, LAUNCH, "", WAIT, TAKE], true, RACE, 0),
];

/// The PTX of a kernel from its two parts.
fn kernel(number: usize, parts: &[&str]) -> String {
    format!(
        ".visible .entry k{number}(.param .u64 data, .param .u64 to, .param .u64 flag)\n{{\n.reg .b32 %r<5>;\n.reg .b64 %rd<5>;\n\
         .reg .pred %p<2>;\nld.param.u64 %rd1, [data];\nld.param.u64 %rd2, [to];\nld.param.u64 %rd3, [flag];\nmov.u32 %r1, %tid.x;\n\
         mov.u32 %r3, %ctaid.x;\nmad.lo.s32 %r4, %r3, 64, %r1;\nmul.wide.u32 %rd4, %r4, 4;\nadd.s64 %rd1, %rd1, %rd4;\n\
         add.s64 %rd2, %rd2, %rd4;\n.loc 1 7 1\n{}\nret;\n}}\n",
        parts.join("\n")
    )
}

/// Calls a function of the driver, whose header declares its type `F`.
fn call<F: Copy>(name: &str, call: impl FnOnce(F) -> c_int) -> Outcome {
    // SAFETY: the library is open already; nothing is initialised again.
    let driver = unsafe { libloading::Library::new(common::library()?) }?;
    // SAFETY: the caller's type.
    let function = unsafe { driver.get::<F>(name.as_bytes()) }?;
    let status = call(*function);
    if status == 0 { Ok(()) } else { Err(format!("{name}: {status}").into()) }
}

/// Launches the kernels of a case in a stream, or as a graph.
fn run(&(_, parts, is_early, _, expected): &Case, as_graph: bool) -> Outcome {
    let context = Context::new(CudaDevice::get(0)?)?;
    let stream = Stream::new(&context)?;
    let kernels = parts.chunks(2).enumerate().map(|(n, parts)| kernel(n, parts));
    let head = ".version 9.0\n.target sm_90a\n.address_size 64\n.file 1 \"step.cu\"\n";
    let text = format!("{head}{}\0", kernels.collect::<String>());
    let (mut module, mut functions) = (0, vec![0; parts.len().div_ceil(2)]);
    // SAFETY: the text ends with a zero.
    call("cuModuleLoadData", |load: Load| unsafe { load(&mut module, text.as_ptr()) })?;
    for (n, function) in functions.iter_mut().enumerate() {
        let name = format!("k{n}\0");
        // SAFETY: the name ends with a zero.
        call("cuModuleGetFunction", |get: GetFunction| unsafe { get(function, module, name.as_ptr()) })?;
    }
    let [data, to, flag] = [0; 3].map(|_| DeviceMemory::new(&context, 512));
    let memory = [data?, to?, flag?];
    memory.iter().try_for_each(|memory| memory.all().write(&[0; 512], &stream))?;
    let addresses = [0, 1, 2].map(|n| memory[n].pointer().0);
    let arguments = [0, 1, 2].map(|n| std::ptr::from_ref(&addresses[n]));
    // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    let attribute = [6, 1, 0, 0, 0, 0, 0, 0, 0];
    let launch_all = || {
        functions.iter().enumerate().try_for_each(|(n, &function)| {
            let config = Config {
                grid: [2, 1, 1],
                block: [64, 1, 1],
                shared_bytes: 0,
                stream: stream.raw(),
                attributes: &attribute,
                attribute_count: u32::from(n > 0 && is_early),
            };
            // SAFETY: each kernel takes three addresses.
            call("cuLaunchKernelEx", |launch: LaunchEx| unsafe {
                launch(&config, function, arguments.as_ptr(), 0)
            })
        })
    };
    let mut graph = if as_graph { Some(Graph::record(&stream, launch_all)?.instantiate()?) } else { None };
    match &mut graph {
        Some(graph) => graph.launch(&stream)?,
        None => launch_all()?,
    }
    let found = memory[1].all().read(&stream)?;
    let wrong = found.as_chunks::<4>().0.iter().find(|word| u32::from_le_bytes(**word) != expected);
    if let Some(word) = wrong { Err(format!("{word:?} is not {expected}").into()) } else { Ok(()) }
}

/// Runs the case of the child process, directly and then as a graph.
fn run_case() -> Outcome {
    let name = std::env::var(common::CHILD)?;
    let (name, as_graph) = name.strip_suffix("_in_a_graph").map_or((&*name, false), |name| (name, true));
    run(CASES.iter().find(|case| case.0 == name).ok_or("no case has this name")?, as_graph)
}

fn check(name: &str, says: &str) -> Result<(), Failed> {
    for seed in 0..6 {
        let output = common::child(name, &format!("seed={seed} races={}", seed % 2))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() != says.is_empty() || !said.contains(says) {
            return Err(format!("seed {seed}: {}, expected `{says}`:\n{said}", output.status).into());
        }
    }
    Ok(())
}

fn main() -> Outcome {
    let names: Vec<(&'static str, &'static str)> = (CASES.iter())
        .flat_map(|&(name, _, _, says, _)| [(name, says), (format!("{name}_in_a_graph").leak(), says)])
        .collect();
    common::run_as_child(
        &names.iter().map(|(name, _)| (*name, run_case as common::Body)).collect::<Vec<_>>(),
    )?;
    let tests = names.into_iter().map(|(name, says)| Trial::test(name, move || check(name, says)));
    libtest_mimic::run(&Arguments::from_args(), tests.collect()).exit()
}
