//! What Hopper's tensor cores lose of sums of FP8 products, and that leaving them every 128 products keeps it
//! (DeepSeek-V3, arXiv
//! 2412.19437, section 3.5.2): a model of their sums, to which the CPU has none of the loss, and, on such a
//! GPU, its terms. Without one those tests count as ignored.
//!
//! The model: 32 products and the sum so far are aligned to the largest of them, of each 13 bits behind that
//! one's leading bit stay, and so of their sum; the rest is cut off.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::Gpu;
use xtrain_ops::registry::{cpu_kernels, cuda_kernels};
use xtrain_ops::scaled_matmul::ScaledMatmul;
use xtrain_program::Tracer;
use xtrain_runtime::{CpuEngine, CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TensorType};

/// Products that are summed at once.
const AT_ONCE: usize = 32;
/// Products after which sums leave the tensor cores.
const PROMOTED: usize = 128;
/// Bits that are kept behind the leading one.
const KEPT: i32 = 13;

/// How the numbers of an experiment are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Draw {
    Positive,
    Normal,
}

/// The unit of what is kept beside this magnitude.
fn unit(magnitude: f64) -> f64 {
    if magnitude == 0.0 { 1.0 } else { 2f64.powi(magnitude.log2().floor() as i32 - KEPT) }
}

fn cut(x: f64, unit: f64) -> f64 {
    (x / unit).trunc() * unit
}

/// The sum of products as tensor cores make it; promoted, partial sums leave them and are added in f32.
fn modelled(a: &[f64], b: &[f64], promotes: bool) -> f64 {
    let (mut outside, mut sum) = (0.0f32, 0.0f64);
    for (n, (a, b)) in a.chunks(AT_ONCE).zip(b.chunks(AT_ONCE)).enumerate() {
        let terms = a.iter().zip(b).map(|(a, b)| a * b);
        let unit_of_all = unit(terms.clone().fold(sum.abs(), |most, p| most.max(p.abs())));
        let all: f64 = terms.map(|p| cut(p, unit_of_all)).sum::<f64>() + cut(sum, unit_of_all);
        sum = cut(all, unit(all.abs()));
        if promotes && ((n + 1) * AT_ONCE).is_multiple_of(PROMOTED) {
            outside += sum as f32;
            sum = 0.0;
        }
    }
    f64::from(outside) + sum
}

fn exact(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A factor of E4M3 numbers, up to 448.
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

/// `a b^T`.
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
    let made = t.emit(ScaledMatmul { out: DType::F32, scaling, fast_accumulation, bias: false }, &ids)?[0];
    let mut d = HostTensor::zeros(t.ty(made));
    t.output("d", made);
    let id = engine.load(t.finish())?;
    for (name, x) in inputs {
        engine.write_input(id, name, x.bytes())?;
    }
    engine.run(id, Part::First)?;
    d.bytes_mut().copy_from_slice(engine.outputs(id)?.get("d")?);
    Ok(d.to_f64())
}

/// ||found - expected|| / ||expected|| of some elements of `a b^T`, spread over it, by how each is made of its row and column.
fn error(
    a: &HostTensor,
    b: &HostTensor,
    some: usize,
    found: impl Fn(usize, usize, &[f64], &[f64]) -> f64,
) -> f64 {
    let ((m, k), (n, _)) = (a.ty().shape.rows_cols(), b.ty().shape.rows_cols());
    let (a, b) = (a.to_f64(), b.to_f64());
    let (mut off, mut whole) = (0.0, 0.0);
    for (i, j) in (0..some).flat_map(|i| (0..some).map(move |j| (i * (m / some), j * (n / some)))) {
        let (row, column) = (&a[i * k..][..k], &b[j * k..][..k]);
        let expected = exact(row, column);
        off += (found(i, j, row, column) - expected).powi(2);
        whole += expected.powi(2);
    }
    (off / whole).sqrt()
}

/// The errors of sums of K products by whether they leave the tensor cores: between which numbers a Hopper's
/// are.
fn bars(draw: Draw, k: usize) -> [[f64; 2]; 2] {
    match (draw, k) {
        (Draw::Positive, 4096) => [[5e-2, 9e-2], [1e-4, 7e-4]],
        (Draw::Normal, 4096) => [[8e-4, 2e-3], [5e-5, 2e-4]],
        _ => [[4e-3, 1e-2], [5e-5, 2e-4]],
    }
}

const EXPERIMENTS: [(Draw, usize); 3] =
    [(Draw::Positive, 4096), (Draw::Normal, 4096), (Draw::Normal, 65_536)];

fn the_model_has_the_errors_that_were_measured() -> Result<(), Failed> {
    for (draw, k) in EXPERIMENTS {
        let (a, b) = (operand(draw, 16, k, 0), operand(draw, 16, k, 1));
        for (promotes, [least, most]) in [false, true].into_iter().zip(bars(draw, k)) {
            let error = error(&a, &b, 16, |_, _, row, column| modelled(row, column, promotes));
            println!("{draw:?} numbers, K = {k}, promoted: {promotes}: {error:.2e}");
            assert!(error > least && error < most, "{draw:?}, K = {k}, promoted: {promotes}: {error:e}");
        }
    }
    Ok(())
}

fn the_cpu_loses_nothing_of_it() -> Result<(), Failed> {
    let mut cpu = CpuEngine::new(Arc::new(cpu_kernels()));
    for draw in [Draw::Positive, Draw::Normal] {
        let (a, b) = (operand(draw, 16, 4096, 0), operand(draw, 16, 4096, 1));
        for fast in [false, true] {
            let made = gemm(&mut cpu, &a, &b, fast)?;
            let error = error(&a, &b, 16, |i, j, _, _| made[i * 16 + j]);
            assert!(error < 2e-6, "{draw:?}: {error:e}");
        }
    }
    Ok(())
}

/// An engine, and the rows and columns of its products: 2048 for 132 multiprocessors, so many that none is
/// cut along what is summed, which would make shorter sums of it.
fn card() -> Result<(CudaEngine, usize), Failed> {
    let gpu = Gpu::open(0)?;
    let wide = (gpu.info().multiprocessors as usize * 2048 / 132).next_multiple_of(32);
    Ok((CudaEngine::new(Arc::new(cuda_kernels()), gpu)?, wide))
}

fn a_card_has_the_errors_that_were_measured() -> Result<(), Failed> {
    // The longest sums take a host too long.
    for &(draw, k) in &EXPERIMENTS[..2] {
        let (_, wide) = card()?;
        let (a, b) = (operand(draw, wide, k, 0), operand(draw, wide, k, 1));
        for (promotes, [least, most]) in [false, true].into_iter().zip(bars(draw, k)) {
            let made = gemm(&mut card()?.0, &a, &b, !promotes)?;
            let error = error(&a, &b, 32, |i, j, _, _| made[i * wide + j]);
            println!("{draw:?} numbers, K = {k}, promoted: {promotes}: {error:.2e}");
            assert!(error > least && error < most, "{draw:?}, K = {k}, promoted: {promotes}: {error:e}");
        }
    }
    Ok(())
}

/// Sums of 1 and one small number, which is at another place of what is summed.
fn a_card_keeps_13_bits_and_cuts_off_the_rest() -> Result<(), Failed> {
    let (k, (_, wide)) = (256, card()?);
    let sum = |at: usize, [x, y]: [f64; 2], fast| -> Result<f64, Failed> {
        let operand = |number| {
            let mut row = vec![0.0; k];
            (row[0], row[at]) = (1.0, number);
            HostTensor::from_f64(TensorType::new(DType::E4M3, [wide, k]), &row.repeat(wide))
        };
        let (a, b) = (operand(x), operand(y));
        let found = gemm(&mut card()?.0, &a, &b, fast)?;
        assert!(found.iter().all(|x| *x == found[0]), "sums of the same numbers differ");
        let (a, b) = (a.to_f64(), b.to_f64());
        let expected = modelled(&a[..k], &b[..k], !fast);
        let error = format!("1 and {} at {at}, fast: {fast}: {}, not {expected}", x * y, found[0]);
        if found[0] == expected { Ok(found[0]) } else { Err(error.into()) }
    };
    // 2^-13 and three quarters of it, in the same 32 products, in others, and behind the first 128.
    let (kept, lost) = ([2f64.powi(-7), 2f64.powi(-6)], [1.5 * 2f64.powi(-7), 2f64.powi(-7)]);
    for at in [1, 40, 100] {
        for fast in [false, true] {
            assert_eq!(sum(at, kept, fast)?, 1.0 + 2f64.powi(-13));
            assert_eq!(sum(at, lost, fast)?, 1.0);
        }
    }
    assert_eq!(sum(200, lost, true)?, 1.0);
    assert_eq!(sum(200, lost, false)?, 1.0 + 1.5 * 2f64.powi(-14));
    Ok(())
}

type Test = fn() -> Result<(), Failed>;

fn main() {
    let arguments = Arguments::from_args();
    let card = common::gpu();
    let is_hopper = card.as_ref().is_some_and(|card| card.info().arch.major == 9);
    if card.is_some() && !is_hopper {
        eprintln!("the card is no Hopper: its tensor cores sum in another way");
    }
    let anywhere: [(&str, Test); 2] = [
        ("the_model_has_the_errors_that_were_measured", the_model_has_the_errors_that_were_measured),
        ("the_cpu_loses_nothing_of_it", the_cpu_loses_nothing_of_it),
    ];
    let of_a_card: [(&str, Test); 2] = [
        ("a_card_has_the_errors_that_were_measured", a_card_has_the_errors_that_were_measured),
        ("a_card_keeps_13_bits_and_cuts_off_the_rest", a_card_keeps_13_bits_and_cuts_off_the_rest),
    ];
    let mut tests: Vec<_> = anywhere.map(|(name, test)| Trial::test(name, test)).into();
    tests.extend(of_a_card.map(|(name, test)| Trial::test(name, test).with_ignored_flag(!is_hopper)));
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(card);
    conclusion.exit();
}
