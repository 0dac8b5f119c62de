//! A kernel with `wgmma` and tensor copies on the emulated GPU, as `docs/kernels.md` shows it: compiled,
//! launched and compared with a plain loop. The launch is ignored unless `XTRAIN_EMULATOR_NVRTC` names a
//! compiler.
#![allow(unsafe_code, reason = "it launches a kernel")]

mod common;

use common::Outcome;
use half::bf16;
use libtest_mimic::{Arguments, Failed, Trial};
use xtrain_cuda::{
    Compiler, Context, CudaDevice, DeviceMemory, DevicePtr, Launch, Module, Stream, TensorMap, kernel_struct,
};
use xtrain_tensor::DType;

const SOURCE: &str = include_str!("kernel/gemm.cu");
/// Rows and columns of a tile.
const TILE: usize = 64;
/// Two stages of two tiles, their barriers, and padding for alignment.
const SHARED_BYTES: usize = 4 * 2 * TILE * TILE + 4 * 8 + 1024;

kernel_struct! {
    struct GemmArguments {
        a: TensorMap,
        b: TensorMap,
        d: DevicePtr,
        m: u32,
        n: u32,
        k: u32,
        padding: u32,
    }
}

fn gemm(context: &Context, module: &Module, [m, n, k]: [usize; 3]) -> Outcome {
    let stream = Stream::new(context)?;
    // Whole numbers, of which all sums are exact.
    let numbers = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + i / 13 * seed) % 17) as f32 - 8.0).collect()
    };
    let (a, b) = (numbers(m * k, 3), numbers(n * k, 5));
    let stored = |numbers: &[f32]| -> Result<DeviceMemory, Box<dyn std::error::Error>> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        let memory = DeviceMemory::new(context, bytes.len())?;
        memory.all().write(&bytes, &stream)?;
        Ok(memory)
    };
    let (a_memory, b_memory) = (stored(&a)?, stored(&b)?);
    let d = DeviceMemory::new(context, 4 * m * n)?;
    // Boxes are tiles; rows of 128 bytes are permuted.
    let tensor_map = |at: &DeviceMemory, rows: usize| {
        TensorMap::new(context, DType::BF16, at.pointer(), &[k, rows], &[k], &[TILE; 2])
    };
    let arguments = GemmArguments {
        a: tensor_map(&a_memory, m)?,
        b: tensor_map(&b_memory, n)?,
        d: d.pointer(),
        m: m as u32,
        n: n as u32,
        k: k as u32,
        padding: 0,
    };
    let grid = [n.div_ceil(TILE) as u32, m.div_ceil(TILE) as u32, 1];
    let launch = Launch { grid, ..Launch::row(1, 160).shared(SHARED_BYTES as u32) };
    // SAFETY: the kernel takes one `Arguments`, whose memory lives until the stream has passed.
    unsafe { module.function("gemm")?.launch(launch, &arguments, &stream)? };
    let found = d.all().read(&stream)?;
    for (i, found) in found.as_chunks::<4>().0.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let sum: f32 = (0..k).map(|p| a[row * k + p] * b[column * k + p]).sum();
        if f32::from_le_bytes(*found) != sum {
            return Err(
                format!("row {row}, column {column}: {} is not {sum}", f32::from_le_bytes(*found)).into()
            );
        }
    }
    Ok(())
}

fn sizes_within_and_beyond_tiles() -> Result<(), Failed> {
    let run = || -> Outcome {
        let context = Context::new(CudaDevice::get(0)?)?;
        let arch = context.device().info()?.arch;
        let module = Module::load(
            &context,
            &Compiler::open()?.compile("gemm.cu", SOURCE, arch, &["--std=c++17".into()])?.cubin,
        )?;
        for shape in [[64, 64, 64], [128, 64, 328], [100, 72, 200], [8, 8, 16]] {
            gemm(&context, &module, shape).map_err(|error| format!("{shape:?}: {error}"))?;
        }
        Ok(())
    };
    Ok(run()?)
}

fn the_page_shows_this_kernel() -> Result<(), Failed> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/kernels.md"))?;
    if page.contains(&format!("```cuda\n{SOURCE}```\n")) {
        Ok(())
    } else {
        Err("docs/kernels.md shows another kernel".into())
    }
}

fn main() -> Outcome {
    let is_there = std::env::var_os("XTRAIN_EMULATOR_NVRTC").is_some();
    let _folder = common::emulated()?;
    let tests = vec![
        Trial::test("sizes_within_and_beyond_tiles", sizes_within_and_beyond_tiles)
            .with_ignored_flag(!is_there),
        Trial::test("the_page_shows_this_kernel", the_page_shows_this_kernel),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit()
}
