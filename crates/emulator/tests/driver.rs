//! Tests of the emulated driver: memory, devices, graph captures, events and sticky errors.
#![allow(unsafe_code, reason = "it launches kernels and calls the driver itself")]

mod common;

use common::{Body, Outcome, step};
use std::ffi::c_int;
use xtrain_cuda::{
    Context, CudaDevice, CudaError, DeviceMemory, Event, Gpu, Graph, GrowingMemory, Module, PinnedMemory,
    Stream,
};

const MIB: usize = 1 << 20;

fn context() -> Result<Context, CudaError> {
    Context::new(CudaDevice::get(0)?)
}

fn devices_have_memory_of_their_own() -> Outcome {
    assert_eq!(CudaDevice::all()?.len(), 2);
    let of = |ordinal| -> Result<_, CudaError> {
        let context = Context::new(CudaDevice::get(ordinal)?)?;
        let (memory, stream) = (DeviceMemory::new(&context, 32)?, Stream::new(&context)?);
        memory.all().write(&[ordinal as u8; 32], &stream)?;
        Ok((memory, stream))
    };
    let ((first, first_stream), (second, second_stream)) = (of(0)?, of(1)?);
    assert_eq!(first.all().read(&first_stream)?, [0; 32]);
    assert_eq!(second.all().read(&second_stream)?, [1; 32]);
    first.all().copy_from(second.all(), &first_stream)?;
    assert!(first_stream.synchronize().is_err());
    // A failure on one device does not affect the other.
    assert_eq!(second.all().read(&second_stream)?, [1; 32]);
    Ok(())
}

fn memory_ends() -> Outcome {
    let context = context()?;
    let first = DeviceMemory::new(&context, 48 * MIB)?;
    let error = DeviceMemory::new(&context, 48 * MIB).err().ok_or("there is more memory than 64 MiB")?;
    assert!(error.is_out_of_memory(), "{error}");
    assert!(DeviceMemory::new(&context, usize::MAX / 2).is_err_and(|error| error.is_out_of_memory()));
    let mut growing = GrowingMemory::new(&context, false)?;
    assert!(growing.grow(32 * MIB).is_err_and(|error| error.is_out_of_memory()));
    drop(first);
    growing.grow(32 * MIB)?;
    DeviceMemory::new(&context, 32 * MIB)?;
    Ok(())
}

fn an_old_gpu_is_refused() -> Outcome {
    let error = Gpu::open(0).err().ok_or("sm_75 is too old")?;
    assert!(error.to_string().contains("7.5; xtrain needs 8.0"), "{error}");
    Ok(())
}

fn a_module_for_another_architecture_is_refused() -> Outcome {
    let error = Module::load(&context()?, &common::module("sm_90a", common::STEP)).err().ok_or("it loads")?;
    assert!(error.to_string().contains("CUDA_ERROR_NO_BINARY_FOR_GPU"), "{error}");
    Ok(())
}

fn memory_that_queued_work_uses_is_not_freed() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let memory = DeviceMemory::new(&context, 128)?;
    memory.all().fill(1, &stream)?;
    step(&context, memory.pointer(), memory.pointer(), &stream)?;
    drop(memory);
    assert!(stream.synchronize().is_err());
    Ok(())
}

fn memory_that_queued_work_uses_is_not_unmapped() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let mut memory = GrowingMemory::new(&context, false)?;
    memory.grow(MIB)?;
    memory.span(0..MIB).fill(1, &stream)?;
    drop(memory);
    assert!(stream.synchronize().is_err());
    Ok(())
}

fn memory_grows_in_place() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let mut memory = GrowingMemory::new(&context, false)?;
    memory.grow(128)?;
    let held = memory.bytes();
    memory.span(0..128).fill(1, &stream)?;
    memory.grow(held + 1)?;
    let tail = memory.span(held..held + 128);
    step(&context, memory.span(0..128).pointer(), tail.pointer(), &stream)?;
    assert_eq!(tail.read(&stream)?, [0x0303_0304u32.to_le_bytes(); 32].concat());
    // Accesses the bytes after the mapped ones.
    let end = memory.span(memory.bytes()..memory.bytes()).pointer();
    step(&context, memory.span(0..128).pointer(), end, &stream)?;
    assert!(stream.synchronize().is_err());
    Ok(())
}

fn pageable_memory_is_read_when_a_copy_is_called_and_pinned_memory_when_it_runs() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let [a, b] = [DeviceMemory::new(&context, 4)?, DeviceMemory::new(&context, 4)?];
    let mut pageable = vec![1; 4];
    let mut pinned = PinnedMemory::new(&context, 4)?;
    pinned.fill(1);
    a.all().write(&pageable, &stream)?;
    b.all().write(&pinned, &stream)?;
    pageable.fill(2);
    pinned.fill(2);
    assert_eq!((a.all().read(&stream)?, b.all().read(&stream)?), (vec![1; 4], vec![2; 4]));
    Ok(())
}

fn a_call_that_may_synchronise_invalidates_a_capture() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let memory = DeviceMemory::new(&context, 128)?;
    memory.all().fill(1, &stream)?;
    let allocating = Graph::record(&stream, || {
        let refused = DeviceMemory::new(&context, 128).err();
        memory.all().fill(2, &stream)?;
        assert!(refused.is_some_and(|e| e.to_string().contains("STREAM_CAPTURE_UNSUPPORTED")));
        Ok::<(), CudaError>(())
    });
    assert!(allocating.is_err_and(|error| error.to_string().contains("STREAM_CAPTURE_INVALIDATED")));
    let waiting = Graph::record(&stream, || stream.synchronize());
    assert!(waiting.is_err_and(|error| error.to_string().contains("STREAM_CAPTURE_UNSUPPORTED")));
    // Neither capture executed anything, and the stream still works.
    assert_eq!(memory.all().read(&stream)?, [1; 128]);
    Ok(())
}

fn captures_of_other_threads_continue() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let memory = DeviceMemory::new(&context, 128)?;
    let graph = Graph::record(&stream, || {
        memory.all().fill(2, &stream)?;
        // `DeviceMemory::new` would wait for the end of the capture; this calls the driver itself.
        let allocated = std::thread::scope(|scope| scope.spawn(allocate).join());
        assert_eq!(allocated.ok(), Some(0));
        Ok::<(), CudaError>(())
    })?;
    graph.instantiate()?.launch(&stream)?;
    assert_eq!(memory.all().read(&stream)?, [2; 128]);
    Ok(())
}

/// Allocates memory of the first device; returns the status.
fn allocate() -> c_int {
    let library = common::library().expect("the emulator");
    // SAFETY: the library is open already; nothing is initialised again.
    let library = unsafe { libloading::Library::new(library) }.expect("the emulator");
    type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    type SetCurrent = unsafe extern "C" fn(usize) -> c_int;
    type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
    let (mut context, mut pointer) = (0, 0);
    // SAFETY: this is the function's type.
    let retain = unsafe { library.get::<Retain>(b"cuDevicePrimaryCtxRetain\0") }.expect("a function");
    // SAFETY: this is the function's type.
    let set_current = unsafe { library.get::<SetCurrent>(b"cuCtxSetCurrent\0") }.expect("a function");
    // SAFETY: this is the function's type.
    let allocate = unsafe { library.get::<Allocate>(b"cuMemAlloc_v2\0") }.expect("a function");
    // SAFETY: it writes the variable here.
    let retained = unsafe { retain(&mut context, 0) };
    // SAFETY: it takes a number.
    let current = unsafe { set_current(context) };
    // SAFETY: it writes the variable here.
    let allocated = unsafe { allocate(&mut pointer, 128) };
    retained.max(current).max(allocated)
}

fn a_launch_takes_half_a_millisecond() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let memory = DeviceMemory::new(&context, 128)?;
    let [start, end] = [Event::timed(&context)?, Event::timed(&context)?];
    memory.all().fill(0, &stream)?;
    start.record(&stream)?;
    step(&context, memory.pointer(), memory.pointer(), &stream)?;
    end.record(&stream)?;
    end.synchronize()?;
    // Half a millisecond for each launch and little for its few instructions, whatever the real time.
    let seconds = start.seconds_until(&end)?;
    assert!((0.5e-3..0.502e-3).contains(&seconds), "{seconds}");
    Ok(())
}

fn a_failure_stays_until_the_context_is_released() -> Outcome {
    let first = context()?;
    let stream = Stream::new(&first)?;
    let memory = DeviceMemory::new(&first, 128)?;
    memory.all().fill(1, &stream)?;
    step(&first, memory.pointer(), memory.pointer().offset(4), &stream)?;
    for _ in 0..2 {
        let error = stream.synchronize().err().ok_or("the kernel writes outside")?;
        assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        // The error text of the driver holds the emulator's report.
        assert!(error.to_string().contains("kernel step"), "{error}");
    }
    assert!(DeviceMemory::new(&first, 128).is_err());
    drop((memory, stream, first));
    let second = context()?;
    let memory = DeviceMemory::new(&second, 128)?;
    let stream = Stream::new(&second)?;
    memory.all().fill(1, &stream)?;
    assert_eq!(memory.all().read(&stream)?, [1; 128]);
    Ok(())
}

fn instructions_that_the_architecture_lacks_are_refused() -> Outcome {
    let context = context()?;
    for body in [
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f1;",
        "red.global.add.v4.f32 [%rd4], {%f1, %f1, %f1, %f1};",
        "max.s16x2 %r2, %r1, %r1;",
    ] {
        let module = common::module("sm_80", &format!(".reg .b16 %rs<2>;\n.reg .f32 %f<2>;\n{body}"));
        let module = Module::load(&context, &module)?;
        let error = module.function("step").err().ok_or("sm_80 lacks the instruction")?;
        assert!(error.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"), "{error}");
    }
    Ok(())
}

fn events_of_a_capture_are_not_for_other_calls() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context)?;
    let memory = DeviceMemory::new(&context, 128)?;
    let event = Event::new(&context)?;
    Graph::record(&stream, || {
        memory.all().fill(2, &stream)?;
        event.record(&stream)
    })?;
    let refused = |result: Result<(), CudaError>| {
        assert!(result.is_err_and(|error| error.to_string().contains("CUDA_ERROR_CAPTURED_EVENT")));
    };
    refused(event.synchronize());
    refused(stream.wait(&event));
    event.record(&stream)?;
    event.synchronize()?;
    // A capture does not wait for work outside of it, even if that work has ended.
    let waiting = Graph::record(&stream, || stream.wait(&event));
    assert!(waiting.is_err_and(|error| error.to_string().contains("STREAM_CAPTURE_ISOLATION")));
    Ok(())
}

fn launches_of_one_graph_do_not_overlap() -> Outcome {
    let context = context()?;
    let [stream, other] = [Stream::new(&context)?, Stream::new(&context)?];
    let [a, b] = [DeviceMemory::new(&context, 128)?, DeviceMemory::new(&context, 128)?];
    a.all().fill(0, &stream)?;
    let module = Module::load(&context, &common::module("sm_90a", common::STEP))?;
    let launch = |from: &DeviceMemory, to: &DeviceMemory| {
        common::launch(&module, xtrain_cuda::Launch::row(1, 32), from.pointer(), to.pointer(), &stream)
    };
    launch(&a, &b)?;
    stream.synchronize()?;
    a.all().fill(0, &stream)?;
    stream.synchronize()?;
    let graph = Graph::record(&stream, || {
        launch(&a, &b)?;
        launch(&b, &a)
    })?;
    let mut graph = graph.instantiate()?;
    for _ in 0..2 {
        graph.launch(&stream)?;
        graph.launch(&other)?;
    }
    other.synchronize()?;
    // x becomes 9 x + 4, four times.
    let expected = (0..4).fold(0u32, |x, _| 9 * x + 4);
    assert_eq!(a.all().read(&other)?, expected.to_le_bytes().repeat(32));
    Ok(())
}

fn unknown_settings_are_reported() -> Outcome {
    let error = CudaDevice::all().err().ok_or("the setting is accepted")?;
    assert!(error.to_string().contains("cuInit failed: CUDA_ERROR_NOT_INITIALIZED"), "{error}");
    Ok(())
}

fn main() -> Outcome {
    let case = |name, settings, says, body: Body| common::Case { name, settings, says, body };
    common::main(&[
        case(
            "devices_have_memory_of_their_own",
            "devices=2",
            "a copy reads out of bounds",
            devices_have_memory_of_their_own,
        ),
        case("memory_ends", "memory=64", "", memory_ends),
        case(
            "unknown_settings_are_reported",
            "arch=sm_80 speed=9",
            "emulated GPU: XTRAIN_EMULATOR: unknown setting `speed`; known are arch, devices, memory, ",
            unknown_settings_are_reported,
        ),
        case("an_old_gpu_is_refused", "arch=sm_75", "", an_old_gpu_is_refused),
        case(
            "a_module_for_another_architecture_is_refused",
            "arch=sm_80",
            "a module for sm_90a on sm_80",
            a_module_for_another_architecture_is_refused,
        ),
        case(
            "memory_that_queued_work_uses_is_not_freed",
            "",
            "cuMemFree of memory that a fill uses, which is queued and has not run",
            memory_that_queued_work_uses_is_not_freed,
        ),
        case(
            "memory_that_queued_work_uses_is_not_unmapped",
            "",
            "cuMemUnmap of memory that a fill uses, which is queued and has not run",
            memory_that_queued_work_uses_is_not_unmapped,
        ),
        case(
            "instructions_that_the_architecture_lacks_are_refused",
            "arch=sm_80",
            "`cvt.rn.satfinite.e4m3x2.f32` needs sm_89, and the module is for sm_80",
            instructions_that_the_architecture_lacks_are_refused,
        ),
        case(
            "events_of_a_capture_are_not_for_other_calls",
            "",
            "",
            events_of_a_capture_are_not_for_other_calls,
        ),
        case("launches_of_one_graph_do_not_overlap", "", "", launches_of_one_graph_do_not_overlap),
        case("launches_of_one_graph_do_not_overlap_5", "seed=5", "", launches_of_one_graph_do_not_overlap),
        case("launches_of_one_graph_do_not_overlap_6", "seed=6", "", launches_of_one_graph_do_not_overlap),
        case("memory_grows_in_place", "", "writes global memory out of bounds", memory_grows_in_place),
        case(
            "pageable_memory_is_read_when_a_copy_is_called_and_pinned_memory_when_it_runs",
            "",
            "",
            pageable_memory_is_read_when_a_copy_is_called_and_pinned_memory_when_it_runs,
        ),
        case(
            "a_call_that_may_synchronise_invalidates_a_capture",
            "",
            "",
            a_call_that_may_synchronise_invalidates_a_capture,
        ),
        case("captures_of_other_threads_continue", "", "", captures_of_other_threads_continue),
        case("a_launch_takes_half_a_millisecond", "", "", a_launch_takes_half_a_millisecond),
        case(
            "a_failure_stays_until_the_context_is_released",
            "",
            "",
            a_failure_stays_until_the_context_is_released,
        ),
    ])
}
