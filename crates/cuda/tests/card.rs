//! Tests that need a GPU. Without one, all count as ignored, and the reason is printed.
#![allow(unsafe_code, reason = "it launches kernels")]

use libtest_mimic::{Arguments, Failed, Trial};
use std::time::Instant;
use xtrain_cuda::{
    Arch, ChoiceKey, Compiler, Context, CudaError, CudaOutput, CudaTensor, Device, DeviceMemory, DevicePtr,
    Event, Gemm, GemmChoice, GemmOperands, Gpu, Graph, KernelCache, Launch, Module, Operands, PinnedMemory,
    Sdpa, Stream, Work, kernel_struct,
};
use xtrain_tensor::host::decode;
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TensorType};

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
struct Copy { const unsigned* from; unsigned* to; int n; };
extern "C" __global__ void copy(Copy a) {
    for (int i = threadIdx.x; i < a.n; i += blockDim.x) a.to[i] = a.from[i];
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

kernel_struct! {
    struct Copy {
        from: DevicePtr,
        to: DevicePtr,
        n: i32,
        padding: i32,
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
        let device = Device::at(0)?;
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

fn a_gpu_describes_itself(device: &TestDevice) -> Result<(), Failed> {
    let info = device.context.device().info()?;
    eprintln!("{info:?}, driver {}", Device::driver_version()?);
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

/// A GEMM with operands on the GPU. Rows are a stride apart; the elements between them are `GAP`.
struct GemmCase<'a> {
    gemm: Gemm,
    device: &'a TestDevice,
    a: DeviceMemory,
    b: DeviceMemory,
    d: DeviceMemory,
    bias: Option<DeviceMemory>,
    /// Scales of FP8 operands.
    scales: Option<[DeviceMemory; 2]>,
    workspace: DeviceMemory,
    /// A, B, the initial D and the bias, as they lie in memory, FP8 numbers multiplied by their scales.
    host: [Vec<f64>; 4],
}

/// The value of elements between the rows of a matrix.
const GAP: f64 = -3.5;

impl<'a> GemmCase<'a> {
    fn new(device: &'a TestDevice, gemm: Gemm, bias: bool) -> Result<GemmCase<'a>, CudaError> {
        let seed =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let fill = |site: u32, dtype: DType, rows: usize, columns: usize, stride: usize| {
            let mut normal = vec![0.0f32; rows * columns];
            Philox::new(seed as u64, 0, site).fill_normal(1.0, &mut normal);
            let mut values = vec![GAP; rows * stride];
            for (to, from) in values.chunks_mut(stride).zip(normal.chunks(columns)) {
                to.iter_mut().zip(from).for_each(|(to, &from)| *to = from.into());
            }
            let tensor = HostTensor::from_f64(TensorType::new(dtype, [values.len()]), &values);
            let memory = DeviceMemory::new(&device.context, tensor.bytes().len())?;
            memory.all().write(tensor.bytes(), &device.stream)?;
            Ok::<_, CudaError>((memory, tensor.to_f64()))
        };
        let Gemm { m, n, k, a, b, d, .. } = gemm;
        let stored = |transposed, rows, columns| if transposed { (columns, rows) } else { (rows, columns) };
        let ((a_rows, a_columns), (b_rows, b_columns)) =
            (stored(a.transposed, m, k), stored(b.transposed, k, n));
        let (a_memory, mut a_host) = fill(0, a.dtype, a_rows, a_columns, a.stride)?;
        let (b_memory, mut b_host) = fill(1, b.dtype, b_rows, b_columns, b.stride)?;
        let scaled = |site, scaling: Scaling, rows: usize, stride: usize, host: &mut [f64]| {
            let [down, across] = scaling.shape(rows, k);
            let mut scales = vec![0.0f32; down * across];
            Philox::new(seed as u64, 0, site).fill_normal(1.0, &mut scales);
            scales.iter_mut().for_each(|scale| *scale = scale.abs() + 0.25);
            let ((high, wide), (below, beside)) = (scaling.region(rows, k), scaling.steps(rows, k));
            for (i, x) in host.iter_mut().enumerate().filter(|(i, _)| i % stride < k) {
                *x *= f64::from(scales[i / stride / high * below + i % stride / wide * beside]);
            }
            device.floats(&scales)
        };
        let scales = match (a.scaling, b.scaling) {
            (Some(of_a), Some(of_b)) => {
                Some([scaled(4, of_a, m, a.stride, &mut a_host)?, scaled(5, of_b, n, b.stride, &mut b_host)?])
            }
            _ => None,
        };
        let (d_memory, d_host) = fill(2, d, m, n, gemm.d_stride)?;
        let (bias_memory, bias_host) = fill(3, d, 1, n, n)?;
        // Choosing an algorithm runs the GEMM on a stream of its own.
        device.stream.synchronize()?;
        Ok(GemmCase {
            gemm,
            device,
            a: a_memory,
            b: b_memory,
            d: d_memory,
            bias: bias.then_some(bias_memory),
            scales,
            workspace: DeviceMemory::new(&device.context, Gemm::WORKSPACE_BYTES)?,
            host: [a_host, b_host, d_host, bias_host],
        })
    }

    fn operands(&self) -> GemmOperands {
        GemmOperands {
            a: self.a.pointer(),
            b: self.b.pointer(),
            d: self.d.pointer(),
            bias: self.bias.as_ref().map(DeviceMemory::pointer),
            scales: self.scales.as_ref().map(|scales| scales.each_ref().map(DeviceMemory::pointer)),
            workspace: self.workspace.pointer(),
        }
    }

    /// D, computed on the GPU from the initial D.
    fn run(&self, work: &Work) -> Result<Vec<f64>, CudaError> {
        let ty = TensorType::new(self.gemm.d, [self.host[2].len()]);
        self.d.all().write(HostTensor::from_f64(ty, &self.host[2]).bytes(), &self.device.stream)?;
        self.workspace.all().fill(0xFF, &self.device.stream)?;
        work.enqueue(&self.device.stream)?;
        Ok(decode(ty, &self.d.all().read(&self.device.stream)?))
    }

    /// D by a plain loop in f64, not rounded.
    fn expected(&self) -> Vec<f64> {
        let Gemm { m, n, k, a, b, .. } = self.gemm;
        let [a_host, b_host, d_host, bias] = &self.host;
        let at = |transposed: bool, stride: usize, row: usize, column: usize| match transposed {
            true => column * stride + row,
            false => row * stride + column,
        };
        let mut d_host = d_host.clone();
        for i in 0..m {
            for j in 0..n {
                let a_at = |p| a_host[at(a.transposed, a.stride, i, p)];
                let b_at = |p| b_host[at(b.transposed, b.stride, p, j)];
                let d = &mut d_host[i * self.gemm.d_stride + j];
                let held = if self.gemm.accumulate { *d } else { 0.0 };
                let bias = if self.bias.is_some() { bias[j] } else { 0.0 };
                *d = (0..k).map(|p| a_at(p) * b_at(p)).sum::<f64>() + held + bias;
            }
        }
        d_host
    }

    fn assert_near(&self, found: &[f64], expected: &[f64], by: &str) {
        let Gemm { m, n, d_stride, .. } = self.gemm;
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let inside = |x: &'_ [f64]| x.chunks(d_stride).flat_map(|row| row[..n].to_vec()).collect::<Vec<_>>();
        let (f, e) = (inside(found), inside(expected));
        assert_eq!((f.len(), e.len()), (m * n, m * n));
        // Sums near zero are no more exact than their terms.
        let size = norm(&mut e.iter().copied()).max(((m * n) as f64).sqrt());
        let error = norm(&mut f.iter().zip(&e).map(|(f, e)| f - e)) / size;
        // One rounding to bf16 costs at most 2^-8. Long f32 sums in another order differ more than short
        // ones.
        let bar = if self.gemm.k > 4096 { 1e-4 } else { 1e-5 };
        let bar = if self.gemm.d == DType::BF16 { bar + 2f64.powi(-8) } else { bar };
        // Tensor cores keep 14 bits of sums of 128 products.
        let bar = if self.scales.is_some() { bar + 1e-3 } else { bar };
        assert!(error <= bar, "{:?} by {by} is off by {error:e}", self.gemm);
        let between = found.chunks(d_stride).flat_map(|row| &row[n..]);
        assert!(between.copied().all(|x| x == GAP), "{:?} by {by} wrote between the rows", self.gemm);
    }
}

fn gpu_with_cache(folder: &std::path::Path) -> Result<Gpu, CudaError> {
    Gpu::with_cache(0, KernelCache::in_folder(folder))
}

/// Element types of the operands and of D.
const GEMM_TYPES: [(DType, DType); 3] =
    [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)];

/// m, n and k.
const SHAPES: [[usize; 3]; 6] =
    [[1, 1, 1], [13, 5, 7], [1, 40, 33], [64, 128, 64], [33, 129, 70], [130, 200, 257]];

fn gemms_equal_a_plain_loop(
    device: &TestDevice,
    shape: [usize; 3],
    transposed: [bool; 2],
) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    for (dtype, d) in GEMM_TYPES {
        let plain = Gemm::new(shape, dtype, transposed, d);
        let gapped = plain.a_stride(plain.a.stride + 3).d_stride(plain.n.next_multiple_of(64));
        let cases = [(plain, false), (plain, true), (plain.accumulate(true), false), (gapped, false)];
        for (gemm, bias) in cases.into_iter().chain([(gapped.accumulate(true), true)]) {
            let case = GemmCase::new(device, gemm, bias)?;
            let expected = case.expected();
            let plan = gemm.plan(&gpu, &case.operands())?;
            case.assert_near(&case.run(&plan.work)?, &expected, &format!("{:?}", plan.choice));
            let own = gemm.fallback(&gpu, &case.operands())?;
            case.assert_near(&case.run(&own.work)?, &expected, "the fallback kernel");
        }
    }
    Ok(())
}

fn large_gemms_equal_the_fallback_kernel(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    // The GEMMs of a head with an odd vocabulary and its two gradients, and a sum so long that it is worth
    // splitting. The sizes keep the multiprocessors of an H100 busy, scaled to this GPU's.
    let of_device = |size: usize| size * gpu.info().multiprocessors as usize / 132;
    let (c, d, v) = (96, 768, of_device(5025) | 1);
    // The stride of logits in the workspace of the loss.
    let stride = v.next_multiple_of(64);
    for (dtype, out) in GEMM_TYPES {
        let logits = Gemm::new([c, v, d], dtype, [false, true], dtype).d_stride(stride);
        let dx = Gemm::new([c, d, v], dtype, [false, false], dtype).a_stride(stride);
        let dw = Gemm::new([v, d, c], dtype, [true, false], DType::F32).a_stride(stride).accumulate(true);
        let long = Gemm::new([72, 136, of_device(30_000)], dtype, [true, false], out);
        for gemm in [logits, dx, dw, long] {
            let case = GemmCase::new(device, gemm, false)?;
            let plan = gemm.plan(&gpu, &case.operands())?;
            assert_ne!(plan.choice, GemmChoice::Fallback, "{gemm}");
            let own = case.run(&gemm.fallback(&gpu, &case.operands())?.work)?;
            let found = case.run(&plan.work)?;
            // Both results are rounded.
            if gemm.d == DType::F32 {
                case.assert_near(&found, &own, "cuBLASLt");
            } else {
                let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                let off: Vec<f64> = found.iter().zip(&own).map(|(a, b)| a - b).collect();
                assert!(norm(&off) <= 1e-3 * norm(&own), "{gemm} is off by {}", norm(&off) / norm(&own));
            }
            assert!(case.run(&plan.work)? == found, "{gemm} differs from run to run");
        }
    }
    Ok(())
}

/// Sizes of block-scaled GEMMs, which end within tiles and clusters; the last ones have more tiles than an
/// H200 has multiprocessors.
const BLOCK_SCALED_SHAPES: [[usize; 3]; 5] =
    [[16, 16, 16], [256, 256, 128], [272, 400, 656], [48, 528, 1040], [2320, 4368, 16]];

/// Types of A and B.
const BLOCK_SCALED_TYPES: [[DType; 2]; 3] =
    [[DType::E4M3; 2], [DType::E5M2, DType::E4M3], [DType::E4M3, DType::E5M2]];

fn block_scaled_gemms_equal_a_plain_loop(
    device: &TestDevice,
    shape: [usize; 3],
    [a, b]: [DType; 2],
) -> Result<(), Failed> {
    if device.arch != Arch::SM90 {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    let is_small = gpu.info().multiprocessors < 100;
    let shape = if shape == BLOCK_SCALED_SHAPES[4] && is_small { [560, 1072, 16] } else { shape };
    // The emulated GPU is slow, and does not differ from run to run.
    let repetitions =
        if std::env::var("XTRAIN_TEST_SAMPLE").is_ok_and(|sample| sample == "1") { 0 } else { 3 };
    for (of_b, d) in [Scaling::Tile, Scaling::Block]
        .into_iter()
        .flat_map(|scaling| [DType::F32, DType::BF16].map(|d| (scaling, d)))
    {
        let plain = Gemm::scaled(shape, [(a, Scaling::Tile), (b, of_b)], d, false);
        let gapped = plain.a_stride(plain.a.stride + 16).d_stride(plain.n + 4);
        let all = [plain, gapped, plain.accumulate(true), gapped.accumulate(true)];
        for gemm in all.into_iter().filter(|gemm| d == DType::F32 || !gemm.accumulate) {
            let case = GemmCase::new(device, gemm, false)?;
            let Some(plan) = gemm.block_scaled(&gpu, &case.operands())? else {
                return Err(format!("{gemm} is not supported").into());
            };
            let found = case.run(&plan.work)?;
            case.assert_near(&found, &case.expected(), "the block-scaled kernel");
            for _ in 0..repetitions {
                assert!(case.run(&plan.work)? == found, "{gemm} differs from run to run");
            }
        }
    }
    Ok(())
}

fn a_captured_gemm_computes_the_same(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    let case =
        GemmCase::new(device, Gemm::new([70, 90, 4000], DType::BF16, [true, false], DType::F32), false)?;
    let plan = case.gemm.plan(&gpu, &case.operands())?;
    let found = case.run(&plan.work)?;
    let mut exec = Graph::record(&device.stream, || plan.work.enqueue(&device.stream))?.instantiate()?;
    for _ in 0..3 {
        case.d.all().fill(0xFF, &device.stream)?;
        case.workspace.all().fill(0xFF, &device.stream)?;
        exec.launch(&device.stream)?;
        let ty = TensorType::new(DType::F32, [found.len()]);
        assert!(decode(ty, &case.d.all().read(&device.stream)?) == found);
    }
    Ok(())
}

fn the_choice_of_an_algorithm_is_cached(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let case =
        GemmCase::new(device, Gemm::new([256, 384, 512], DType::BF16, [false, true], DType::BF16), true)?;
    let plan = |gpu: &Gpu| case.gemm.plan(gpu, &case.operands());
    let gpu = gpu_with_cache(folder.path())?;
    let first = plan(&gpu)?;
    assert_eq!(first.choice, GemmChoice::Timed);
    let files = || std::fs::read_dir(folder.path()).map(|entries| entries.flatten().collect::<Vec<_>>());
    let file = match &files()?[..] {
        [file] => file.path(),
        files => return Err(format!("{} files instead of one", files.len()).into()),
    };
    for gpu in [&gpu, &gpu_with_cache(folder.path())?] {
        let again = plan(gpu)?;
        assert_eq!((again.choice, again.algorithm), (GemmChoice::Cached, first.algorithm));
    }
    let whole = std::fs::read(&file)?;
    std::fs::write(&file, &whole[..50])?;
    assert_eq!(plan(&gpu_with_cache(folder.path())?)?.choice, GemmChoice::Timed, "it was damaged");
    assert_eq!(std::fs::read(&file)?.len(), whole.len());
    assert_eq!(plan(&gpu_with_cache(folder.path())?)?.choice, GemmChoice::Cached);
    // Another GEMM, and one with other alignments, have their own choices.
    let shifted = GemmOperands { a: case.a.pointer().offset(16), ..case.operands() };
    let shorter = Gemm { m: 255, ..case.gemm };
    let others = [
        case.gemm.accumulate(true).plan(&gpu, &case.operands())?,
        shorter.plan(&gpu, &case.operands())?,
        shorter.plan(&gpu, &shifted)?,
    ];
    assert!(others.iter().all(|other| other.choice == GemmChoice::Timed));
    assert_eq!(files()?.len(), 4);
    Ok(())
}

/// Candidates copy their operands to `seen`, which holds those of the last run that was timed.
fn large_gemms_are_timed_on_noise(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let shape = [60, 100];
    let dtypes = [DType::BF16, DType::E4M3, DType::F32, DType::I32];
    let types: Vec<TensorType> = dtypes.iter().map(|&dtype| TensorType::new(dtype, shape)).collect();
    let zeros = || -> Result<DeviceMemory, CudaError> {
        let memory = DeviceMemory::new(&device.context, 60 * 100 * 4)?;
        memory.all().write(&[0; 60 * 100 * 4], &device.stream)?;
        Ok(memory)
    };
    let [operand, timing, out] = [zeros()?, zeros()?, zeros()?];
    let seen: Vec<DeviceMemory> = (0..5).map(|_| zeros()).collect::<Result<_, _>>()?;
    timing.all().write(&7u32.to_le_bytes().repeat(60 * 100), &device.stream)?;
    device.stream.synchronize()?;
    let inputs = |place| types.iter().map(|&ty| CudaTensor { ty, place }).collect::<Vec<_>>();
    let (used, timed) = (inputs(operand.pointer()), inputs(timing.pointer()));
    let ty = TensorType::new(DType::F32, shape);
    let outputs = [CudaOutput { ty, place: out.pointer(), accumulate: true }];
    let of = |inputs| Operands { inputs, outputs: &outputs, workspace: &[] };
    let key = ChoiceKey { text: "copies".into(), former: "copies".into() };
    let copies = |_: &str, operands: &Operands<'_>| -> Result<Work, CudaError> {
        assert!(operands.outputs[0].accumulate);
        let inputs = operands.inputs.iter().map(|input| (input.place, input.ty));
        let tensors = inputs.chain([(operands.outputs[0].place, ty)]).zip(&seen);
        let copy = |((from, ty), to): ((DevicePtr, TensorType), &DeviceMemory)| -> Result<Work, CudaError> {
            let arguments = Copy { from, to: to.pointer(), n: (ty.bytes() / 4) as i32, padding: 0 };
            let function = device.module.function("copy")?;
            // SAFETY: the kernel takes one `Copy`; both tensors have so many words, and outlive the work.
            Ok(unsafe { Work::launch(function, Launch::row(1, 128), arguments) })
        };
        Ok(Work::sequence(tensors.map(copy).collect::<Result<_, _>>()?))
    };
    let found = |n: usize, ty: TensorType| -> Result<Vec<f64>, Failed> {
        Ok(decode(ty, &seen[n].span(0..ty.bytes()).read(&device.stream)?))
    };
    let gpu = Gpu::with_cache(0, KernelCache::in_folder(folder.path()))?;
    let chosen = |flops| gpu.fastest_gemm(&key, flops, &["one", "two"], [&of(&used), &of(&timed)], copies);
    let work = chosen(1e9)?.ok_or("no candidate")?;
    assert!(found(3, types[3])?.iter().all(|&x| x == 7.0), "small ones are timed on the operands for timing");
    assert!(found(0, types[0])?.iter().all(|&x| x.abs() < 1e-30));
    work.enqueue(&device.stream)?;
    device.stream.synchronize()?;
    assert!(found(3, types[3])?.iter().all(|&x| x == 0.0), "the work is that of the operands");
    assert_eq!(gpu.choices().len(), 1);

    let work = chosen(1e10)?.ok_or("no candidate")?;
    assert_eq!(gpu.choices().len(), 2, "a choice on noise is another one");
    for (n, largest) in [(0, 7.0), (1, 448.0)] {
        let values = found(n, types[n])?;
        let deviation = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
        assert!((largest / 8.0..largest / 3.0).contains(&deviation), "{:?}: {deviation}", types[n]);
        assert!(values.iter().all(|x| x.abs() <= largest));
    }
    assert!(found(2, types[2])?.iter().all(|&scale| scale == 1.0));
    assert!(found(3, types[3])?.iter().all(|&x| x == 7.0), "what is no number stays");
    assert!(found(4, ty)?.iter().filter(|&&x| x == 0.0).count() < 10);
    work.enqueue(&device.stream)?;
    device.stream.synchronize()?;
    assert!(found(0, types[0])?.iter().all(|&x| x == 0.0), "the work is that of the operands");
    // Another process times nothing: the choice is cached.
    let again = Gpu::with_cache(0, KernelCache::in_folder(folder.path()))?;
    again.fastest_gemm(&key, 1e10, &["one", "two"], [&of(&used), &of(&timed)], copies)?.ok_or("none")?;
    assert!(found(0, types[0])?.iter().all(|&x| x == 0.0));
    assert!(
        gpu.choices().into_iter().collect::<Vec<_>>().contains(&again.choices().pop_first().ok_or("none")?)
    );
    Ok(())
}

/// The former key is one that xtrain wrote to `choices.json` when keys were `Debug` output.
fn a_choice_that_an_older_run_recorded_is_used(device: &TestDevice) -> Result<(), Failed> {
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let case =
        GemmCase::new(device, Gemm::new([256, 384, 512], DType::BF16, [false, true], DType::BF16), true)?;
    let gpu = gpu_with_cache(folders[0].path())?;
    let first = case.gemm.plan(&gpu, &case.operands())?;
    let (key, value) = gpu.choices().pop_first().ok_or("nothing is recorded")?;
    let device = key.split_once(": ").ok_or("the key names no device")?.0;
    let former = format!(
        "{device}: Gemm {{ m: 256, n: 384, k: 512, \
         a: Factor {{ dtype: BF16, transposed: false, stride: 512, scaling: None }}, \
         b: Factor {{ dtype: BF16, transposed: true, stride: 512, scaling: None }}, \
         d: BF16, d_stride: 384, accumulate: false, fast_accumulation: false }}, \
         aligned to [Some(256), Some(256), Some(256), Some(256)] bytes, working in 33554432"
    );
    let resumed = gpu_with_cache(folders[1].path())?;
    resumed.adopt(&[(former, value.clone())].into());
    let again = case.gemm.plan(&resumed, &case.operands())?;
    assert_eq!((again.choice, again.algorithm), (GemmChoice::Cached, first.algorithm));
    assert_eq!(resumed.choices().get(&key), Some(&value), "it is recorded under its current key");
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
        ("large_gemms_equal_the_fallback_kernel", large_gemms_equal_the_fallback_kernel),
        ("a_captured_gemm_computes_the_same", a_captured_gemm_computes_the_same),
        ("the_choice_of_an_algorithm_is_cached", the_choice_of_an_algorithm_is_cached),
        ("large_gemms_are_timed_on_noise", large_gemms_are_timed_on_noise),
        ("a_choice_that_an_older_run_recorded_is_used", a_choice_that_an_older_run_recorded_is_used),
        ("the_self_tests_pass", the_self_tests_pass),
        ("cudnn_finds_the_known_results", cudnn_finds_the_known_results),
        ("cudnns_deterministic_backward_repeats", cudnns_deterministic_backward_repeats),
        ("a_missing_cudnn_leaves_the_gpu_usable", a_missing_cudnn_leaves_the_gpu_usable),
    ];
    let trials = tests.into_iter().map(|(name, test)| Trial::test(name, move || test(&TestDevice::new()?)));
    let mut trials: Vec<Trial> = trials.collect();
    for [m, n, k] in SHAPES {
        for [a, b] in [[false, false], [false, true], [true, false], [true, true]] {
            let of = |transposed| if transposed { "t" } else { "n" };
            let name = format!("gemms_equal_a_plain_loop_{m}x{n}x{k}_{}{}", of(a), of(b));
            let test = move || gemms_equal_a_plain_loop(&TestDevice::new()?, [m, n, k], [a, b]);
            trials.push(Trial::test(name, test));
        }
    }
    for (shape, types) in
        BLOCK_SCALED_SHAPES.into_iter().flat_map(|shape| BLOCK_SCALED_TYPES.map(|of| (shape, of)))
    {
        let ([m, n, k], [a, b]) = (shape, types);
        let name = format!("block_scaled_gemms_equal_a_plain_loop_{m}x{n}x{k}_{a}_{b}");
        let test = move || block_scaled_gemms_equal_a_plain_loop(&TestDevice::new()?, shape, types);
        trials.push(Trial::test(name, test));
    }
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(missing.is_some())).collect();
    libtest_mimic::run(&arguments, trials).exit();
}
