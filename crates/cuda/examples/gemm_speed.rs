//! Products of a linear layer on the first card, in TFLOP/s: forward, gradient of the input, gradient of the weight added up in f32.
//!
//! `cargo run --release -p xtrain-cuda --example gemm_speed`. Factors are random bf16 numbers, which cost the card more power than zeros,
//! and a product runs for about a second before it is timed: what is shown is what lasts.

use std::process::ExitCode;
use xtrain_cuda::{CudaError, DeviceMemory, Event, Gemm, GemmOperands, Gpu, Stream};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// Tokens, outputs, inputs.
const SHAPES: [[usize; 3]; 9] = [
    [8192, 4096, 4096],
    [8192, 28672, 4096],
    [8192, 4096, 14336],
    [16384, 2048, 2048],
    [16384, 16384, 2048],
    [4096, 7168, 16384],
    [4096, 576, 7168],
    // Heads of models, a chunk of tokens at a time; the rows of logits begin at multiples of 128 bytes.
    [1024, 50257, 768],
    [1024, 128256, 2048],
];

/// Seconds that a product runs before it is timed, and that each of the timed runs lasts.
const WARM_UP_SECONDS: f64 = 1.0;
const RUN_SECONDS: f64 = 0.2;
const RUNS: usize = 5;

/// What all products work with.
struct Bench {
    gpu: Gpu,
    stream: Stream,
    /// Random numbers.
    pattern: DeviceMemory,
    workspace: DeviceMemory,
}

impl Bench {
    fn new() -> Result<Bench, CudaError> {
        let gpu = Gpu::open(0)?;
        let stream = Stream::new(gpu.context())?;
        let mut numbers = vec![0.0f32; 1 << 20];
        Philox::new(1, 0, 0).fill_normal(1.0, &mut numbers);
        let numbers: Vec<f64> = numbers.into_iter().map(f64::from).collect();
        let numbers = HostTensor::from_f64(TensorType::new(DType::BF16, [numbers.len()]), &numbers);
        let pattern = DeviceMemory::new(gpu.context(), numbers.bytes().len())?;
        pattern.all().write(numbers.bytes(), &stream)?;
        let workspace = DeviceMemory::new(gpu.context(), Gemm::WORKSPACE_BYTES)?;
        Ok(Bench { gpu, stream, pattern, workspace })
    }

    /// Memory for that many elements, filled with random numbers.
    fn matrix(&self, dtype: DType, elements: usize) -> Result<DeviceMemory, CudaError> {
        let memory = DeviceMemory::new(self.gpu.context(), dtype.bytes(elements))?;
        for start in (0..memory.bytes()).step_by(self.pattern.bytes()) {
            let bytes = self.pattern.bytes().min(memory.bytes() - start);
            memory.span(start..start + bytes).copy_from(self.pattern.span(0..bytes), &self.stream)?;
        }
        Ok(memory)
    }

    /// TFLOP/s of a product.
    fn speed(&self, gemm: Gemm) -> Result<f64, CudaError> {
        let rows = |transposed, plain, other| if transposed { other } else { plain };
        let a = self.matrix(gemm.a.dtype, rows(gemm.a.transposed, gemm.m, gemm.k) * gemm.a.stride)?;
        let b = self.matrix(gemm.b.dtype, rows(gemm.b.transposed, gemm.k, gemm.n) * gemm.b.stride)?;
        let d = self.matrix(gemm.d, gemm.m * gemm.d_stride)?;
        let operands = GemmOperands {
            a: a.pointer(),
            b: b.pointer(),
            d: d.pointer(),
            bias: None,
            workspace: self.workspace.pointer(),
        };
        let work = gemm.ready(&self.gpu, &operands)?;
        let (start, end) = (Event::timed(self.gpu.context())?, Event::timed(self.gpu.context())?);
        let seconds = |repeats: usize| -> Result<f64, CudaError> {
            start.record(&self.stream)?;
            (0..repeats).try_for_each(|_| work.put(&self.stream))?;
            end.record(&self.stream)?;
            end.synchronize()?;
            Ok(start.seconds_until(&end)? / repeats as f64)
        };
        seconds(1)?;
        let repeats = |lasting: f64, each: f64| (lasting / each).ceil().max(1.0) as usize;
        let each = seconds(repeats(WARM_UP_SECONDS, seconds(3)?))?;
        let mut runs = Vec::new();
        for _ in 0..RUNS {
            runs.push(seconds(repeats(RUN_SECONDS, each))?);
        }
        runs.sort_by(f64::total_cmp);
        Ok(gemm.flops() / runs[RUNS / 2] * 1e-12)
    }
}

fn run() -> Result<(), CudaError> {
    let bench = Bench::new()?;
    println!("{}", bench.gpu.info().name);
    println!("{:>24} {:>10} {:>10} {:>10}", "tokens, outputs, inputs", "forward", "dgrad", "wgrad f32");
    for [t, o, i] in SHAPES {
        // Rows of y and dy.
        let stride = o.next_multiple_of(64);
        let forward = Gemm::new([t, o, i], DType::BF16, [false, true], DType::BF16).d_stride(stride);
        let dgrad = Gemm::new([t, i, o], DType::BF16, [false, false], DType::BF16).a_stride(stride);
        let wgrad = Gemm::new([o, i, t], DType::BF16, [true, false], DType::F32).a_stride(stride);
        let speeds = [bench.speed(forward)?, bench.speed(dgrad)?, bench.speed(wgrad.accumulate(true))?];
        println!(
            "{:>24} {:>10.1} {:>10.1} {:>10.1}",
            format!("{t}, {o}, {i}"),
            speeds[0],
            speeds[1],
            speeds[2]
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
