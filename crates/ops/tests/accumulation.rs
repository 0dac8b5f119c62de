//! Accuracy of Hopper's FP8 tensor cores, which accumulate with 14 bits, and of partial sums that leave them
//! every 128 products to be added in f32 (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
//!
//! The tests compare a model of these sums with a Hopper GPU, and check that the CPU kernel has no such
//! error. Without such a GPU its tests count as ignored.
//!
//! The model: 32 products and the running sum are aligned to the largest exponent among them, and truncated
//! to 13 bits after it; their sum is truncated to 13 bits after its leading bit. The exponent of a product is
//! the sum of its operands', and that of a subnormal operand the least of its format.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::Gpu;
use xtrain_ops::registry::{cpu_kernels, cuda_kernels};
use xtrain_ops::scaled_matmul::ScaledMatmul;
use xtrain_program::Tracer;
use xtrain_runtime::{CpuEngine, CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TensorType};

/// Products of one tensor-core instruction, along k.
const INSTRUCTION_K: usize = 32;
/// Products after which partial sums leave the tensor cores.
const PARTIAL_K: usize = 128;
/// Bits after the leading one to which sums are truncated.
const FRACTION_BITS: i32 = 13;

/// Distribution of the operands of an experiment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Draw {
    Positive,
    Normal,
}

/// The least normal number of E4M3.
const LEAST: f64 = 1.0 / 64.0;

/// The power of two of a number's leading bit; 0 for 0.
fn leading(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { 2f64.powi(x.abs().log2().floor() as i32) }
}

/// The unit in the last place of numbers that are aligned to this power of two.
fn unit(leading: f64) -> f64 {
    if leading == 0.0 { 1.0 } else { leading * 2f64.powi(-FRACTION_BITS) }
}

fn truncated(x: f64, unit: f64) -> f64 {
    (x / unit).trunc() * unit
}

/// The dot product by the model. With `adds_in_f32`, partial sums leave the tensor cores and are added in
/// f32.
fn modelled(a: &[f64], b: &[f64], adds_in_f32: bool) -> f64 {
    let (mut outside, mut sum) = (0.0f32, 0.0f64);
    for (n, (a, b)) in a.chunks(INSTRUCTION_K).zip(b.chunks(INSTRUCTION_K)).enumerate() {
        let terms = a.iter().zip(b).map(|(a, b)| a * b);
        let exponents = a.iter().zip(b).filter(|(a, b)| *a * *b != 0.0);
        let exponents = exponents.map(|(a, b)| leading(*a).max(LEAST) * leading(*b).max(LEAST));
        let common_unit = unit(exponents.fold(leading(sum), f64::max));
        let total: f64 = terms.map(|p| truncated(p, common_unit)).sum::<f64>() + truncated(sum, common_unit);
        sum = truncated(total, unit(leading(total)));
        if adds_in_f32 && ((n + 1) * INSTRUCTION_K).is_multiple_of(PARTIAL_K) {
            outside += sum as f32;
            sum = 0.0;
        }
    }
    f64::from(outside) + sum
}

fn exact(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// An operand of E4M3 numbers, up to 448.
fn operand(draw: Draw, rows: usize, k: usize, site: u32) -> HostTensor {
    let rng = Philox::new(11, 0, site);
    let mut x = vec![0.0f32; rows * k];
    match draw {
        Draw::Positive => x.iter_mut().enumerate().for_each(|(i, x)| *x = 448.0 * rng.uniform(i as u64)),
        Draw::Normal => rng.fill_normal(80.0, &mut x),
    }
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    HostTensor::from_f64(TensorType::new(DType::E4M3, [rows, k]), &x)
}

/// `a b^T`, by the engine.
fn gemm(
    engine: &mut dyn Engine,
    a: &HostTensor,
    b: &HostTensor,
    fast_accumulation: bool,
) -> Result<Vec<f64>, Failed> {
    let one = HostTensor::from_f64(TensorType::new(DType::F32, [1, 1]), &[1.0]);
    let inputs = [("a", a), ("a scale", &one), ("b", b), ("b scale", &one)];
    let mut t = Tracer::default();
    let ids = inputs.map(|(name, x)| t.input(name, x.ty()));
    let scaling = [Scaling::Tensor; 2];
    let product = t.emit(ScaledMatmul { out: DType::F32, scaling, fast_accumulation, bias: false }, &ids)?[0];
    let mut d = HostTensor::zeros(t.ty(product));
    t.output("d", product);
    let id = engine.load(t.finish())?;
    for (name, x) in inputs {
        engine.write_input(id, name, x.bytes())?;
    }
    engine.run(id, Part::First)?;
    d.bytes_mut().copy_from_slice(engine.outputs(id)?.get("d")?);
    Ok(d.to_f64())
}

/// The relative error ||found - expected|| / ||expected|| of `a b^T`, over `count` rows and columns that are
/// spread over it. `found` gets the indices of an element, its row of a and its row of b.
fn error(
    a: &HostTensor,
    b: &HostTensor,
    count: usize,
    found: impl Fn(usize, usize, &[f64], &[f64]) -> f64,
) -> f64 {
    let ((m, k), (n, _)) = (a.ty().shape.rows_cols(), b.ty().shape.rows_cols());
    let (a, b) = (a.to_f64(), b.to_f64());
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, j) in (0..count).flat_map(|i| (0..count).map(move |j| (i * (m / count), j * (n / count)))) {
        let (row, column) = (&a[i * k..][..k], &b[j * k..][..k]);
        let expected = exact(row, column);
        error += (found(i, j, row, column) - expected).powi(2);
        norm += expected.powi(2);
    }
    (error / norm).sqrt()
}

/// Minimum and maximum error of sums of K products on Hopper: within the tensor cores, and with partial sums
/// added in f32.
fn bars(draw: Draw, k: usize) -> [[f64; 2]; 2] {
    match (draw, k) {
        (Draw::Positive, 4096) => [[5e-2, 9e-2], [1e-4, 7e-4]],
        (Draw::Normal, 4096) => [[8e-4, 2e-3], [5e-5, 2e-4]],
        _ => [[4e-3, 1e-2], [5e-5, 2e-4]],
    }
}

const EXPERIMENTS: [(Draw, usize); 3] =
    [(Draw::Positive, 4096), (Draw::Normal, 4096), (Draw::Normal, 65_536)];

fn the_model_has_the_measured_errors() -> Result<(), Failed> {
    for (draw, k) in EXPERIMENTS {
        let (a, b) = (operand(draw, 16, k, 0), operand(draw, 16, k, 1));
        for (adds_in_f32, [min, max]) in [false, true].into_iter().zip(bars(draw, k)) {
            let error = error(&a, &b, 16, |_, _, row, column| modelled(row, column, adds_in_f32));
            println!("{draw:?} numbers, K = {k}, added in f32: {adds_in_f32}: {error:.2e}");
            assert!(error > min && error < max, "{draw:?}, K = {k}, added in f32: {adds_in_f32}: {error:e}");
        }
    }
    Ok(())
}

fn the_cpu_has_no_such_error() -> Result<(), Failed> {
    let mut cpu = CpuEngine::new(Arc::new(cpu_kernels()));
    for draw in [Draw::Positive, Draw::Normal] {
        let (a, b) = (operand(draw, 16, 4096, 0), operand(draw, 16, 4096, 1));
        for fast in [false, true] {
            let found = gemm(&mut cpu, &a, &b, fast)?;
            let error = error(&a, &b, 16, |i, j, _, _| found[i * 16 + j]);
            assert!(error < 2e-6, "{draw:?}: {error:e}");
        }
    }
    Ok(())
}

/// An engine on the GPU, and the rows and columns of the operands: 2048 for 132 multiprocessors, so many that
/// cuBLASLt does not split K, which would shorten the sums.
fn gpu_engine() -> Result<(CudaEngine, usize), Failed> {
    let gpu = Gpu::open(0)?;
    let wide = (gpu.info().multiprocessors as usize * 2048 / 132).next_multiple_of(32);
    Ok((CudaEngine::new(Arc::new(cuda_kernels()), gpu)?, wide))
}

fn a_gpu_has_the_measured_errors() -> Result<(), Failed> {
    // The exact reference of the longest sums takes the host too long.
    for &(draw, k) in &EXPERIMENTS[..2] {
        let (_, wide) = gpu_engine()?;
        let (a, b) = (operand(draw, wide, k, 0), operand(draw, wide, k, 1));
        for (adds_in_f32, [min, max]) in [false, true].into_iter().zip(bars(draw, k)) {
            let found = gemm(&mut gpu_engine()?.0, &a, &b, !adds_in_f32)?;
            let error = error(&a, &b, 32, |i, j, _, _| found[i * wide + j]);
            println!("{draw:?} numbers, K = {k}, added in f32: {adds_in_f32}: {error:.2e}");
            assert!(error > min && error < max, "{draw:?}, K = {k}, added in f32: {adds_in_f32}: {error:e}");
        }
    }
    Ok(())
}

/// Sums of 1 and one small product, at several indices along k.
fn a_gpu_truncates_to_13_bits() -> Result<(), Failed> {
    let (k, (_, wide)) = (256, gpu_engine()?);
    let sum = |index: usize, [x, y]: [f64; 2], fast| -> Result<f64, Failed> {
        let operand = |number| {
            let mut row = vec![0.0; k];
            (row[0], row[index]) = (1.0, number);
            HostTensor::from_f64(TensorType::new(DType::E4M3, [wide, k]), &row.repeat(wide))
        };
        let (a, b) = (operand(x), operand(y));
        let found = gemm(&mut gpu_engine()?.0, &a, &b, fast)?;
        assert!(found.iter().all(|x| *x == found[0]), "sums of the same numbers differ");
        let (a, b) = (a.to_f64(), b.to_f64());
        let expected = modelled(&a[..k], &b[..k], !fast);
        let error = format!("1 and {} at {index}, fast: {fast}: {}, not {expected}", x * y, found[0]);
        if found[0] == expected { Ok(found[0]) } else { Err(error.into()) }
    };
    // 2^-13 and three quarters of it: among the same 32 products as the 1, among others of the first 128, and
    // after these.
    let (held, lost) = ([2f64.powi(-7), 2f64.powi(-6)], [1.5 * 2f64.powi(-7), 2f64.powi(-7)]);
    for index in [1, 40, 100] {
        for fast in [false, true] {
            assert_eq!(sum(index, held, fast)?, 1.0 + 2f64.powi(-13));
            assert_eq!(sum(index, lost, fast)?, 1.0);
        }
    }
    assert_eq!(sum(200, lost, true)?, 1.0);
    assert_eq!(sum(200, lost, false)?, 1.0 + 1.5 * 2f64.powi(-14));
    Ok(())
}

type Test = fn() -> Result<(), Failed>;

fn main() {
    let arguments = Arguments::from_args();
    let gpu = common::gpu();
    let is_hopper = gpu.as_ref().is_some_and(|gpu| gpu.info().arch.major == 9);
    if gpu.is_some() && !is_hopper {
        eprintln!("GPU tests are ignored: they model the tensor cores of Hopper (sm_90)");
    }
    let anywhere: [(&str, Test); 2] = [
        ("the_model_has_the_measured_errors", the_model_has_the_measured_errors),
        ("the_cpu_has_no_such_error", the_cpu_has_no_such_error),
    ];
    let on_hopper: [(&str, Test); 2] = [
        ("a_gpu_has_the_measured_errors", a_gpu_has_the_measured_errors),
        ("a_gpu_truncates_to_13_bits", a_gpu_truncates_to_13_bits),
    ];
    let mut tests: Vec<_> = anywhere.map(|(name, test)| Trial::test(name, test)).into();
    tests.extend(on_hopper.map(|(name, test)| Trial::test(name, test).with_ignored_flag(!is_hopper)));
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(gpu);
    conclusion.exit();
}
