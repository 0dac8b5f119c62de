//! Tests of execution order: a program with two streams is correct in every order that its waits and events
//! allow, and wrong for some seed if any wait, event, copy or graph edge is left out.
#![allow(unsafe_code, reason = "it launches kernels")]

mod common;

use common::Outcome;
use libtest_mimic::{Arguments, Failed, Trial};
use xtrain_cuda::{
    Context, CudaDevice, CudaError, DeviceMemory, DevicePtr, Event, Graph, Launch, Module, PinnedMemory,
    Stream, kernel_struct,
};

/// `to[i] = from[i] * 3 + add` of 32 numbers, as PTX: no compiler is needed.
const KERNEL: &str = r#"
.version 9.0
.target sm_90a
.address_size 64
.visible .entry step(.param .align 8 .b8 step_param_0[24])
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [step_param_0];
    ld.param.u64 %rd2, [step_param_0+8];
    ld.param.u32 %r4, [step_param_0+16];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r2, [%rd4];
    mad.lo.s32 %r3, %r2, 3, %r4;
    st.global.u32 [%rd5], %r3;
    ret;
}
"#;

kernel_struct! {
    struct Step {
        from: DevicePtr,
        to: DevicePtr,
        add: u32,
        pad: u32,
    }
}

const BYTES: usize = 32 * 4;

/// Runs two streams that wait for each other, first directly and then as a graph.
fn program() -> Result<Vec<u32>, CudaError> {
    let context = Context::new(CudaDevice::get(0)?)?;
    let module = Module::load(&context, format!("{KERNEL}\0").as_bytes())?;
    let function = module.function("step")?;
    let (main, side) = (Stream::new(&context)?, Stream::new(&context)?);
    let [x, y, z, w] = [0; 4].map(|_| DeviceMemory::new(&context, BYTES));
    let (x, y, z, w) = (x?, y?, z?, w?);
    let step = |from: &DeviceMemory, to: &DeviceMemory, add: u32, stream: &Stream| {
        let arguments = Step { from: from.pointer(), to: to.pointer(), add, pad: 0 };
        // SAFETY: the kernel takes these arguments; the memory lives until the streams have passed.
        unsafe { function.launch(Launch::row(1, 32), &arguments, stream) }
    };
    let mut input = PinnedMemory::new(&context, BYTES)?;
    let mut output = PinnedMemory::new(&context, 4 * BYTES)?;
    let numbers = |first: u32| (first..first + 32).flat_map(u32::to_le_bytes).collect::<Vec<_>>();
    input.copy_from_slice(&numbers(1));
    x.all().write(&input, &main)?;
    let body = |events: &[Event; 2]| -> Result<(), CudaError> {
        step(&x, &y, 1, &main)?;
        events[0].record(&main)?;
        side.wait(&events[0])?;
        step(&y, &w, 4, &main)?;
        step(&y, &z, 2, &side)?;
        x.all().copy_from(z.all(), &side)?;
        events[1].record(&side)?;
        main.wait(&events[1])?;
        step(&x, &y, 3, &main)
    };
    let events = [Event::new(&context)?, Event::new(&context)?];
    body(&events)?;
    y.all().read_into(&mut output, 0, &main)?;
    w.all().read_into(&mut output, BYTES, &main)?;
    let graph = Graph::record(&main, || body(&events))?;
    let mut exec = graph.instantiate()?;
    exec.launch(&main)?;
    y.all().read_into(&mut output, 2 * BYTES, &main)?;
    w.all().read_into(&mut output, 3 * BYTES, &main)?;
    main.synchronize()?;
    Ok(output.as_chunks::<4>().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect())
}

/// The expected y and w after one pass, and after a second pass that starts with the x of the first.
fn expected() -> Vec<u32> {
    let z = |x: u32| (x * 3 + 1) * 3 + 2;
    let y = |x: u32| z(x) * 3 + 3;
    let w = |x: u32| (x * 3 + 1) * 3 + 4;
    let all = |f: &dyn Fn(u32) -> u32| (1..=32).map(f).collect::<Vec<u32>>();
    [all(&y), all(&w), all(&|x| y(z(x))), all(&|x| w(z(x)))].concat()
}

/// Fails if the result is wrong.
fn checked() -> Outcome {
    if program()? == expected() { Ok(()) } else { Err("the result is wrong".into()) }
}

/// True if the program gives the right result under these settings.
fn is_right(settings: &str) -> Result<bool, Failed> {
    Ok(common::child("program", settings)?.status.success())
}

const SEEDS: u64 = 50;

fn every_allowed_order_gives_the_right_result() -> Result<(), Failed> {
    for seed in 0..SEEDS {
        assert!(is_right(&format!("seed={seed}"))?, "seed {seed}");
    }
    Ok(())
}

/// Leaves out each of the `count` waits, events, copies or edges, one at a time.
fn whatever_is_left_out_is_noticed(what: &str, count: usize) -> Result<(), Failed> {
    for number in 0..count {
        let omit = format!("omit={what}:{number}");
        let mut noticed = false;
        for seed in 0..SEEDS {
            noticed |= !is_right(&format!("seed={seed} {omit}"))?;
        }
        assert!(noticed, "nothing is wrong without {what} {number}");
    }
    let too_many = format!("omit={what}:{count}");
    assert!(is_right(&too_many)?, "there are more than {count}");
    Ok(())
}

fn main() -> Outcome {
    common::run_as_child(&[("program", checked)])?;
    let mut tests = vec![Trial::test(
        "every_allowed_order_gives_the_right_result",
        every_allowed_order_gives_the_right_result,
    )];
    for (what, count) in [("wait", 4), ("event", 4), ("copy", 7), ("edge", 5)] {
        let name = format!("whatever_is_left_out_is_noticed_{what}");
        tests.push(Trial::test(name, move || whatever_is_left_out_is_noticed(what, count)));
    }
    libtest_mimic::run(&Arguments::from_args(), tests).exit()
}
