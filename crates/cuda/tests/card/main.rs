//! Tests that need a GPU. Without one, all count as ignored, and the reason is printed.
#![allow(unsafe_code, reason = "it launches kernels")]

mod choices;
mod gemms;

use libtest_mimic::{Arguments, Failed, Trial};
use std::time::Instant;
use xtrain_cuda::{
    Arch, Compiler, Context, CudaDevice, CudaError, DeviceMemory, DevicePtr, Event, Gpu, Graph, KernelCache,
    Launch, Module, PinnedMemory, Sdpa, Stream, Work, kernel_struct,
};
use xtrain_tensor::host::decode;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

const KERNELS: &str = r#"
struct Scale { float* x; float by; int n; };
extern "C" __global__ void scale(Scale a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.x[i] *= a.by;
}
// Each block writes its rank within its cluster.
struct Ranks { unsigned* rank; };
extern "C" __global__ void ranks(Ranks a) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) a.rank[blockIdx.x] = rank;
}
"#;

kernel_struct! {
    struct Scale {
        x: DevicePtr,
        by: f32,
        n: i32,
    }
}

kernel_struct! {
    struct Ranks {
        rank: DevicePtr,
    }
}

struct TestDevice {
    context: Context,
    stream: Stream,
    module: Module,
    arch: Arch,
}

impl TestDevice {
    fn new() -> Result<TestDevice, CudaError> {
        let device = CudaDevice::get(0)?;
        let context = Context::new(device)?;
        let arch = device.info()?.arch;
        let cubin = Compiler::open()?.compile("test.cu", KERNELS, arch, &[])?.cubin;
        Ok(TestDevice {
            stream: Stream::new(&context)?,
            module: Module::load(&context, &cubin)?,
            context,
            arch,
        })
    }

    fn floats(&self, values: &[f32]) -> Result<DeviceMemory, CudaError> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let memory = DeviceMemory::new(&self.context, bytes.len())?;
        memory.span(0..bytes.len()).write(&bytes, &self.stream)?;
        Ok(memory)
    }

    fn read(&self, memory: &DeviceMemory) -> Result<Vec<f32>, CudaError> {
        let bytes = memory.span(0..memory.bytes()).read(&self.stream)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn scale(&self, memory: &DeviceMemory, by: f32) -> Result<(), CudaError> {
        let n = memory.bytes() / 4;
        let arguments = Scale { x: memory.pointer(), by, n: n as i32 };
        let function = self.module.function("scale")?;
        // SAFETY: the kernel takes one `Scale`, and writes the n numbers of `memory`, which the tests keep
        // until they read it.
        unsafe { function.launch(Launch::row((n as u32).div_ceil(128), 128), &arguments, &self.stream) }
    }
}

fn gpu_with_cache(folder: &std::path::Path) -> Result<Gpu, CudaError> {
    Gpu::with_cache(0, KernelCache::in_folder(folder))
}

fn a_gpu_describes_itself(device: &TestDevice) -> Result<(), Failed> {
    let info = device.context.device().info()?;
    eprintln!("{info:?}, driver {}", CudaDevice::driver_version()?);
    assert!(info.multiprocessors > 0 && info.memory_bytes > 1 << 30 && info.memory_bandwidth > 1e11);
    let (free, total) = device.context.memory()?;
    assert!(free > 0 && free <= total);
    Ok(())
}

fn bytes_come_back_as_they_went(device: &TestDevice) -> Result<(), Failed> {
    let source: Vec<u8> = (0..100_003u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let memory = DeviceMemory::new(&device.context, source.len())?;
    memory.span(0..source.len()).write(&source, &device.stream)?;
    assert_eq!(memory.span(0..source.len()).read(&device.stream)?, source);
    assert_eq!(memory.span(17..1000).read(&device.stream)?, source[17..1000]);
    let copy = DeviceMemory::new(&device.context, 50)?;
    copy.span(0..50).fill(0xA5, &device.stream)?;
    copy.span(3..13).copy_from(memory.span(100..110), &device.stream)?;
    let mut pinned = PinnedMemory::new(&device.context, 64)?;
    copy.span(0..50).read_into(&mut pinned, 7, &device.stream)?;
    device.stream.synchronize()?;
    assert_eq!((pinned[6], pinned[7], pinned[57]), (0, 0xA5, 0));
    assert_eq!(pinned[10..20], source[100..110]);
    Ok(())
}

fn a_kernel_computes(device: &TestDevice) -> Result<(), Failed> {
    let values: Vec<f32> = (0..1001).map(|i| i as f32).collect();
    let memory = device.floats(&values)?;
    device.scale(&memory, 3.0)?;
    assert_eq!(device.read(&memory)?, values.iter().map(|x| x * 3.0).collect::<Vec<_>>());
    Ok(())
}

fn blocks_form_clusters(device: &TestDevice) -> Result<(), Failed> {
    if device.arch < Arch::SM90 {
        return Ok(());
    }
    let memory = DeviceMemory::new(&device.context, 8 * 4)?;
    let launch = Launch { cluster: [2, 1, 1], ..Launch::row(8, 32) };
    let function = device.module.function("ranks")?;
    // SAFETY: the kernel takes one `Ranks`, and writes one number for each of 8 blocks.
    unsafe { function.launch(launch, &Ranks { rank: memory.pointer() }, &device.stream)? };
    let bytes = memory.span(0..32).read(&device.stream)?;
    assert_eq!(bytes.chunks_exact(4).map(|b| b[0]).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1, 0, 1]);
    Ok(())
}

fn a_graph_replays_the_captured_work(device: &TestDevice) -> Result<(), Failed> {
    let memory = device.floats(&[1.0; 77])?;
    let graph = Graph::record(&device.stream, || -> Result<(), CudaError> {
        device.scale(&memory, 2.0)?;
        device.scale(&memory, 5.0)
    })?;
    assert_eq!(device.read(&memory)?, [1.0; 77], "capture runs nothing");
    assert_eq!(graph.nodes()?, 2);
    let mut exec = graph.instantiate()?;
    for _ in 0..3 {
        exec.launch(&device.stream)?;
    }
    assert_eq!(device.read(&memory)?, [1000.0; 77]);
    Ok(())
}

fn an_event_in_a_graph_marks_each_replay(device: &TestDevice) -> Result<(), Failed> {
    let memory = device.floats(&[1.0; 77])?;
    let timed = || Event::timed(&device.context);
    let (origin, begin, end) = (timed()?, timed()?, timed()?);
    let graph = Graph::record(&device.stream, || -> Result<(), CudaError> {
        begin.record_in_graph(&device.stream)?;
        device.scale(&memory, 2.0)?;
        end.record_in_graph(&device.stream)
    })?;
    assert_eq!(graph.nodes()?, 3);
    let mut exec = graph.instantiate()?;
    origin.record(&device.stream)?;
    let mut last = 0.0;
    for _ in 0..3 {
        exec.launch(&device.stream)?;
        device.stream.synchronize()?;
        let (begun, ended) = (origin.seconds_until(&begin)?, origin.seconds_until(&end)?);
        assert!(begun > last && ended >= begun, "{last} {begun} {ended}");
        last = ended;
    }
    assert_eq!(device.read(&memory)?, [8.0; 77]);
    Ok(())
}

fn a_call_that_cannot_be_captured_is_an_error_and_the_stream_stays_usable(
    device: &TestDevice,
) -> Result<(), Failed> {
    let memory = device.floats(&[1.0; 8])?;
    let refused = Graph::record(&device.stream, || device.stream.synchronize());
    assert!(refused.is_err());
    device.scale(&memory, 2.0)?;
    assert_eq!(device.read(&memory)?, [2.0; 8]);
    Ok(())
}

fn events_order_streams_and_time_work(device: &TestDevice) -> Result<(), Failed> {
    let other = Stream::new(&device.context)?;
    let multiprocessors = device.context.device().info()?.multiprocessors as usize;
    let memory = device.floats(&vec![1.0; multiprocessors << 15])?;
    let (start, end) = (Event::timed(&device.context)?, Event::timed(&device.context)?);
    let host = Instant::now();
    start.record(&device.stream)?;
    for _ in 0..10 {
        device.scale(&memory, 2.0)?;
    }
    end.record(&device.stream)?;
    other.wait(&end)?;
    let first = memory.span(0..4).read(&other)?;
    assert_eq!(f32::from_le_bytes([first[0], first[1], first[2], first[3]]), 1024.0);
    end.synchronize()?;
    assert!(end.is_done()?);
    let seconds = start.seconds_until(&end)?;
    // The GPU waits for the host, which may be busy.
    assert!(seconds > 1e-6 && seconds < 1.0 + host.elapsed().as_secs_f64(), "{seconds} s");
    Ok(())
}

fn too_little_memory_is_reported_in_bytes(device: &TestDevice) -> Result<(), Failed> {
    let (_, total) = device.context.memory()?;
    let Err(error) = DeviceMemory::new(&device.context, total + (1 << 30)) else {
        return Err("the allocation succeeded".into());
    };
    assert!(error.is_out_of_memory(), "{error}");
    Ok(())
}

fn kernels_are_cached_on_disk(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let (cache, compiler) = (KernelCache::in_folder(folder.path()), Compiler::open()?);
    let get = || cache.compile(compiler, "test.cu", KERNELS, device.arch, &[]);
    let first = get()?;
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
    assert_eq!(get()?, first);
    Module::load(&device.context, &first)?.function("scale")?;
    assert!(Module::load(&device.context, &first)?.function("nothing").is_err());
    Ok(())
}

fn the_self_tests_pass(_: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    gpu.test_kernel()?;
    Ok(gpu.test_gemm()?)
}

fn cudnn_finds_the_known_results(_: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    Ok(gpu_with_cache(folder.path())?.test_attention()?)
}

/// Sizes at which blocks that add to dq in any order gave other bits in a few of a hundred runs.
fn cudnns_deterministic_backward_repeats(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    for [sequences, seq_len, heads, kv_heads, head_dim] in
        [[16, 512, 12, 12, 64], [4, 1024, 16, 8, 128], [8, 300, 12, 4, 64]]
    {
        let scale = 1.0 / (head_dim as f32).sqrt();
        let sdpa = Sdpa { sequences, seq_len, heads, kv_heads, head_dim, scale, deterministic: true };
        let rows = sequences * seq_len;
        let columns = (heads + 2 * kv_heads) * head_dim;
        let of_qkv = TensorType::new(DType::BF16, [rows, columns]);
        let random = |site, columns| {
            let ty = TensorType::new(DType::BF16, [rows, columns]);
            let mut values = vec![0.0; ty.numel()];
            Philox::new(17, 0, site).fill_normal(1.0, &mut values);
            HostTensor::from_f64(ty, &values.into_iter().map(f64::from).collect::<Vec<_>>()).bytes().to_vec()
        };
        let memory = |bytes: usize| DeviceMemory::new(gpu.context(), bytes);
        let (qkv, d_o) = (memory(2 * rows * columns)?, memory(2 * rows * heads * head_dim)?);
        let (o, lse) = (memory(2 * rows * heads * head_dim)?, memory(4 * rows * heads)?);
        let dqkv = memory(2 * rows * columns)?;
        let workspace = memory(sdpa.forward_bytes().max(sdpa.backward_bytes()))?;
        let at = DeviceMemory::pointer;
        let backward = |sdpa: Sdpa| {
            // SAFETY: the addresses are allocations of these sizes, which live until the numbers are read.
            unsafe { sdpa.backward(&gpu, at(&d_o), at(&qkv), at(&o), at(&lse), at(&dqkv), at(&workspace)) }
        };
        // SAFETY: as above.
        let forward = unsafe { sdpa.forward(&gpu, at(&qkv), at(&o), at(&lse), at(&workspace))? };
        let in_order = backward(sdpa)?;
        qkv.all().write(&random(0, columns), &device.stream)?;
        d_o.all().write(&random(1, heads * head_dim), &device.stream)?;
        forward.enqueue(&device.stream)?;
        let run = |work: &Work| -> Result<Vec<u8>, CudaError> {
            work.enqueue(&device.stream)?;
            dqkv.all().read(&device.stream)
        };
        let first = run(&in_order)?;
        for n in 1..100 {
            let found = run(&in_order)?;
            let other = found.iter().zip(&first).filter(|(a, b)| a != b).count();
            if other > 0 {
                return Err(format!("run {n} of {sdpa:?}: {other} other bytes").into());
            }
        }
        let in_any_order = backward(Sdpa { deterministic: false, ..sdpa })?;
        let (found, expected) = (decode(of_qkv, &run(&in_any_order)?), decode(of_qkv, &first));
        let difference = |(a, b): (&f64, &f64)| (a - b).abs();
        let largest = found.iter().zip(&expected).map(difference).fold(0.0, f64::max);
        let size = expected.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
        if largest.is_nan() || largest > 0.01 * size {
            return Err(
                format!("{sdpa:?}: the orders differ by {largest}, gradients are up to {size}").into()
            );
        }
    }
    Ok(())
}

/// Without cuDNN the self-test frees its memory. A copy to that memory would make every later call fail.
fn a_missing_cudnn_leaves_the_gpu_usable(_: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    match gpu.test_attention() {
        Ok(()) | Err(CudaError::Missing(_)) => Ok(gpu.test_kernel()?),
        Err(error) => Err(error.into()),
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let missing = TestDevice::new().err();
    if let Some(reason) = &missing {
        eprintln!("skipped, no GPU to test on: {reason}");
    }
    let tests: [(&str, fn(&TestDevice) -> Result<(), Failed>); 19] = [
        ("a_gpu_describes_itself", a_gpu_describes_itself),
        ("bytes_come_back_as_they_went", bytes_come_back_as_they_went),
        ("a_kernel_computes", a_kernel_computes),
        ("blocks_form_clusters", blocks_form_clusters),
        ("a_graph_replays_the_captured_work", a_graph_replays_the_captured_work),
        ("an_event_in_a_graph_marks_each_replay", an_event_in_a_graph_marks_each_replay),
        (
            "a_call_that_cannot_be_captured_is_an_error_and_the_stream_stays_usable",
            a_call_that_cannot_be_captured_is_an_error_and_the_stream_stays_usable,
        ),
        ("events_order_streams_and_time_work", events_order_streams_and_time_work),
        ("too_little_memory_is_reported_in_bytes", too_little_memory_is_reported_in_bytes),
        ("kernels_are_cached_on_disk", kernels_are_cached_on_disk),
        ("large_gemms_equal_the_fallback_kernel", gemms::large_gemms_equal_the_fallback_kernel),
        ("a_captured_gemm_computes_the_same", gemms::a_captured_gemm_computes_the_same),
        ("the_choice_of_an_algorithm_is_cached", choices::the_choice_of_an_algorithm_is_cached),
        ("an_algorithm_is_chosen_in_a_new_thread", choices::an_algorithm_is_chosen_in_a_new_thread),
        ("a_choice_that_an_older_run_recorded_is_used", choices::a_choice_that_an_older_run_recorded_is_used),
        ("the_self_tests_pass", the_self_tests_pass),
        ("cudnn_finds_the_known_results", cudnn_finds_the_known_results),
        ("cudnns_deterministic_backward_repeats", cudnns_deterministic_backward_repeats),
        ("a_missing_cudnn_leaves_the_gpu_usable", a_missing_cudnn_leaves_the_gpu_usable),
    ];
    let trials = tests.into_iter().map(|(name, test)| Trial::test(name, move || test(&TestDevice::new()?)));
    let mut trials: Vec<Trial> = trials.collect();
    trials.extend(gemms::trials());
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(missing.is_some())).collect();
    libtest_mimic::run(&arguments, trials).exit();
}
