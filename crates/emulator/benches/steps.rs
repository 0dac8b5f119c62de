//! Warp instructions per second of elementwise kernels, with every access checked, and seconds of an FP8 GEMM
//! by `wgmma`: `tests/emulated/run.sh speed`.
//!
//! Kernels are compiled by the NVRTC that `XTRAIN_EMULATOR_NVRTC` names.
#![allow(unsafe_code, reason = "it launches kernels")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;
use std::time::Instant;
use xtrain_cuda::{
    Compiler, Context, CudaDevice, DeviceMemory, DevicePtr, Gemm, GemmOperands, Gpu, Launch, Module, Stream,
    kernel_struct,
};
use xtrain_tensor::{DType, Scaling};

const SOURCE: &str = r#"
struct Args { float* x; const float* y; unsigned n; };
extern "C" __global__ void add(Args a) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) a.x[i] += a.y[i];
}
extern "C" __global__ void polynomial(Args a) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) {
        float x = a.x[i], sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 32; k++) sum = fmaf(sum, x, 0.5f - 0.01f * k);
        a.x[i] = sum;
    }
}
extern "C" __global__ void add_bf16(Args a) {
    const uint4* y = (const uint4*)a.y;
    uint4* x = (uint4*)a.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n / 4; i += gridDim.x * blockDim.x) {
        uint4 p = x[i], q = y[i];
        unsigned* to = &p.x; const unsigned* from = &q.x;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float low = __uint_as_float(to[k] << 16) + __uint_as_float(from[k] << 16);
            float high = __uint_as_float(to[k] & 0xffff0000u) + __uint_as_float(from[k] & 0xffff0000u);
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to[k]) : "f"(high), "f"(low));
        }
        x[i] = p;
    }
}
"#;

kernel_struct! {
    struct Args {
        x: DevicePtr,
        y: DevicePtr,
        n: u32,
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let _folder = common::emulated()?;
    elementwise()?;
    gemm()
}

fn elementwise() -> Result<(), Box<dyn Error>> {
    let context = Context::new(CudaDevice::get(0)?)?;
    let stream = Stream::new(&context)?;
    let arch = context.device().info()?.arch;
    let module = Module::load(&context, &Compiler::open()?.compile("bench.cu", SOURCE, arch, &[])?.cubin)?;
    const N: usize = 1 << 16;
    let memory = [0, 1].map(|_| DeviceMemory::new(&context, 4 * N));
    let [x, y] = memory;
    let (x, y) = (x?, y?);
    for memory in [&x, &y] {
        memory.all().write(&0.25f32.to_le_bytes().repeat(N), &stream)?;
    }
    let arguments = Args { x: x.pointer(), y: y.pointer(), n: N as u32 };
    for name in ["add", "polynomial", "add_bf16"] {
        let function = module.function(name)?;
        stream.synchronize()?;
        let (before, begun) = (common::steps()?, Instant::now());
        for _ in 0..100 {
            // SAFETY: the kernel takes one `Args`, whose memory lives until the stream has passed.
            unsafe { function.launch(Launch::row(64, 256), &arguments, &stream)? };
        }
        stream.synchronize()?;
        let (steps, seconds) = (common::steps()? - before, begun.elapsed().as_secs_f64());
        println!("{name}: {:.1} million warp instructions a second", steps as f64 / seconds * 1e-6);
    }
    Ok(())
}

/// A GEMM of 1024 x 1024 x 1024 with scaled FP8 operands, by the kernel for Hopper.
fn gemm() -> Result<(), Box<dyn Error>> {
    const N: usize = 1024;
    let gpu = Gpu::open(0)?;
    let stream = Stream::new(gpu.context())?;
    let filled = |bytes: &[u8]| -> Result<DeviceMemory, Box<dyn Error>> {
        let memory = DeviceMemory::new(gpu.context(), bytes.len())?;
        memory.all().write(bytes, &stream)?;
        Ok(memory)
    };
    let numbers: Vec<u8> = (0..N * N).map(|n| (n * 7 % 120) as u8).collect();
    let scales = 0.5f32.to_le_bytes().repeat(N * N / 128);
    let [a, b, d] = [filled(&numbers)?, filled(&numbers)?, DeviceMemory::new(gpu.context(), 4 * N * N)?];
    let scales = [filled(&scales)?, filled(&scales)?];
    let operand = (DType::E4M3, Scaling::Tile);
    let operands = GemmOperands {
        a: a.pointer(),
        b: b.pointer(),
        d: d.pointer(),
        bias: None,
        scales: Some(scales.each_ref().map(DeviceMemory::pointer)),
        workspace: d.pointer(),
    };
    let plan = Gemm::scaled([N; 3], [operand; 2], DType::F32, false).block_scaled(&gpu, &operands)?;
    let plan = plan.ok_or("the kernel does not support the GEMM")?;
    let begun = Instant::now();
    plan.work.enqueue(&stream)?;
    stream.synchronize()?;
    println!("FP8 GEMM of {N} x {N} x {N}: {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}
