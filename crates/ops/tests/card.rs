//! Every op on a GPU against its CPU kernel, from the registry's samples: fresh inputs, odd sizes, poisoned
//! outputs, two micro-steps, run op by op and replayed as a graph. Without a GPU every test counts as
//! ignored, and the reason is printed.

mod common;

use common::fp8;
use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use xtrain_cuda::Gpu;
use xtrain_ops::registry::{cpu_kernels, cuda_kernels, gpu_samples, large_samples, ragged_ops, samples};
use xtrain_ops::samples::{GpuTolerance, Sample, SampleOp};
use xtrain_program::{Code, Program, Tracer};
use xtrain_runtime::{Checks, CpuEngine, CudaEngine, Engine, EngineError, Part};
use xtrain_tensor::{DType, HostTensor, TensorType};

const POISONED: Checks = Checks { numerics: false, poison: true };
/// The fewest numbers of an output whose mean error is checked.
const ENOUGH: u32 = 1000;

/// A program with only the op, its inputs and outputs named by number. Outputs that can accumulate do so from
/// the second micro-step on.
fn program(sample: &Sample, inputs: &[HostTensor]) -> (Program, Vec<TensorType>) {
    let mut tracer = Tracer::default();
    let named = inputs.iter().enumerate();
    let ids: Vec<_> = named.map(|(n, t)| tracer.input(&format!("in{n}"), t.ty())).collect();
    let code = match &sample.op {
        SampleOp::Forward(op) => Code::Forward(op.clone()),
        SampleOp::Plain(op) => Code::Plain(op.clone()),
    };
    let outputs = tracer.site("sample").apply_code(code, &ids).expect("a sample fits its op");
    let types = outputs.iter().map(|&o| tracer.ty(o)).collect();
    for (k, &o) in outputs.iter().enumerate() {
        tracer.output(&format!("out{k}"), o);
    }
    (tracer.finish(), types)
}

/// Outputs after each of these parts.
fn run(
    engine: &mut dyn Engine,
    sample: &Sample,
    inputs: &[HostTensor],
    parts: &[Part],
) -> Result<Vec<Vec<HostTensor>>, EngineError> {
    let (program, types) = program(sample, inputs);
    let id = engine.load(program)?;
    let mut each = Vec::new();
    for &part in parts {
        for (n, input) in inputs.iter().enumerate() {
            engine.write_input(id, &format!("in{n}"), input.bytes())?;
        }
        engine.run(id, part)?;
        let outputs = engine.outputs(id)?;
        let mut made = Vec::new();
        for (k, &ty) in types.iter().enumerate() {
            let mut tensor = HostTensor::zeros(ty);
            tensor.bytes_mut().copy_from_slice(outputs.get(&format!("out{k}"))?);
            made.push(tensor);
        }
        each.push(made);
    }
    Ok(each)
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied()).max(1e-30)
}

/// The pairs of finite values. Values that are not finite must be equal.
fn finite(what: &str, found: &[f64], expected: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let both = found.iter().zip(expected);
    let (finite, other): (Vec<_>, Vec<_>) = both.partition(|(a, b)| a.is_finite() && b.is_finite());
    let differs = other.iter().find(|(a, b)| a != b && !(a.is_nan() && b.is_nan()));
    assert!(differs.is_none(), "{what}: {differs:?} should be the same");
    finite.into_iter().unzip()
}

/// Checks that a bf16 op rounds to nearest. The mean error of its outputs is then close to 0, in units of the
/// last place of bf16. If outputs or values that they are computed from are truncated instead, it is half a
/// unit towards 0.
fn assert_unbiased(what: &str, output: usize, ty: TensorType, found: &[f64], expected: &[f64]) {
    let (mut sum, mut count) = (0.0, 0);
    for (a, b) in found.iter().zip(expected).filter(|(_, b)| **b != 0.0) {
        let unit = (b.abs().log2().floor() - 7.0).exp2();
        sum += ((a - b) / unit * b.signum()).clamp(-1.0, 1.0);
        count += 1;
    }
    let mean = sum / f64::from(count);
    assert!(
        count < ENOUGH || mean.abs() < 0.2,
        "{what}: output {output} ({ty}) is off by {mean:.2} units in the last place of bf16 on average"
    );
}

/// True if one of two scales is twice the other. Of the scales of a fused cast that are powers of two, those
/// whose amax is within rounding of a power of two may differ so.
fn is_doubled(a: f64, b: f64) -> bool {
    a != b && (a == 2.0 * b || b == 2.0 * a)
}

/// The share of the scales in an output of a fused cast that differ by a factor of 2. Few may.
fn doubled_scales(what: &str, found: &HostTensor, expected: &HostTensor) -> f64 {
    if found.ty().dtype != DType::F32 {
        return 0.0;
    }
    let (found, expected) = (found.to_f64(), expected.to_f64());
    let count = found.iter().zip(&expected).filter(|(a, b)| is_doubled(**a, **b)).count();
    let total = found.len().max(1);
    assert!(count <= 1 + total / 1000, "{what}: {count} of {total} scales differ by a factor of 2");
    count as f64 / total as f64
}

/// Compares a GPU's results with the CPU's from the same inputs.
fn compare(
    what: &str,
    dtype: DType,
    tolerance: GpuTolerance,
    found_all: &[HostTensor],
    expected_all: &[HostTensor],
) {
    for (k, (found, expected)) in found_all.iter().zip(expected_all).enumerate() {
        let ty = found.ty();
        if found.bytes() == expected.bytes() {
            continue; // NaNs that belong there, too.
        }
        let is_plain = matches!(ty.dtype, DType::F32 | DType::BF16);
        // The input of a fused cast may differ in its last bit, and so may the cast. tests/fused.rs checks
        // that fused and separate casts are equal to the bit.
        let bar = match tolerance {
            GpuTolerance::ScaledLoss if k < 2 => Some(4e-3),
            GpuTolerance::ScaledLoss => Some(3e-2),
            GpuTolerance::FusedCast { .. } if !is_plain => {
                let is_next = found_all.get(k + 1).zip(expected_all.get(k + 1));
                let doubled = is_next.map_or(0.0, |(found, expected)| doubled_scales(what, found, expected));
                Some((3e-2f64.powi(2) + doubled).sqrt())
            }
            GpuTolerance::RoundedOperands if dtype == DType::F32 && ty.dtype == DType::F32 => Some(4e-3),
            GpuTolerance::Rounding { f32 } if dtype == DType::F32 && ty.dtype == DType::F32 => Some(f32),
            GpuTolerance::Rounding { f32 } if ty.dtype == DType::F64 => Some(f32),
            GpuTolerance::FusedCast { .. } if dtype == DType::F32 && ty.dtype == DType::F32 => Some(1e-5),
            _ => None,
        };
        let exact_bf16 = tolerance == GpuTolerance::FusedCast { exact_bf16: true };
        let is_exact = tolerance == GpuTolerance::Exact || (exact_bf16 && ty.dtype == DType::BF16);
        assert!(!is_exact, "{what}: output {k} ({ty}) is not the CPU's to the bit");
        assert!(is_plain || bar.is_some(), "{what}: output {k} ({ty}) differs");
        let is_fused = matches!(tolerance, GpuTolerance::FusedCast { .. });
        if is_fused {
            doubled_scales(what, found, expected);
        }
        let (mut found, expected) = finite(what, &found.to_f64(), &expected.to_f64());
        if let Some(bar) = bar {
            if is_fused && is_plain {
                for (a, b) in found.iter_mut().zip(&expected).filter(|(a, b)| is_doubled(**a, **b)) {
                    *a = *b;
                }
            }
            let error = relative(&found, &expected);
            assert!(error <= bar, "{what}: output {k} ({ty}) is off by {error:e}");
            continue;
        }
        if tolerance != GpuTolerance::RoundedOperands {
            assert_unbiased(what, k, ty, &found, &expected);
        }
        // A sum with a small error may round to the next bf16 number.
        let rms = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len().max(1) as f64).sqrt();
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            let near = (a - b).abs() <= 1.6e-2 * (b.abs() + 2.0 * rms);
            assert!(near, "{what}: element {i} of output {k} ({ty}) is {a} instead of {b}");
        }
    }
}

/// A GPU's results with NaNs where the CPU leaves them in an undefined tail: a GPU may write there.
fn without_tails(sample: &Sample, found: &[HostTensor], expected: &[HostTensor]) -> Vec<HostTensor> {
    let both = found.iter().zip(expected).enumerate();
    let masked = both.map(|(k, (found, expected))| {
        let is_undefined = ragged_ops().leaves_undefined(sample.op(), k);
        if !is_undefined || found.bytes() == expected.bytes() {
            return found.clone();
        }
        let pairs = found.to_f64().into_iter().zip(expected.to_f64());
        let values: Vec<f64> = pairs.map(|(a, b)| if b.is_nan() { b } else { a }).collect();
        HostTensor::from_f64(found.ty(), &values)
    });
    masked.collect()
}

/// Compares one sample with the CPU in one type. `replays` also checks recorded and replayed graphs.
fn check(sample: &Sample, dtype: DType, replays: bool) -> Result<(), Failed> {
    let seed = common::seed();
    let inputs = sample.tensors(dtype, seed);
    let types: Vec<_> = inputs.iter().map(|t| t.ty()).collect();
    let what = format!("{:?} on {types:?} in {dtype} of XTRAIN_TEST_SEED={seed}", sample.op());
    let parts = [Part::First, Part::Next];
    let mut cpu = CpuEngine::new(Arc::new(cpu_kernels()));
    cpu.set_checks(POISONED);
    // The reference of a bf16 op is the f32 op on the same values, except for casts, whose reference has bf16
    // inputs.
    let wide: Vec<HostTensor> = (sample.inputs.iter().zip(&inputs))
        .map(|(s, t)| match s.ty.dtype == DType::F32 && !s.computed {
            true => HostTensor::from_f64(s.ty, &t.to_f64()),
            false => t.clone(),
        })
        .collect();
    let expected = run(&mut cpu, sample, &wide, &parts)?;

    let gpu = Gpu::open(0)?;
    let is_refused = fp8::must_refuse(sample.op(), &types, gpu.info().arch);
    let mut card = CudaEngine::new(Arc::new(cuda_kernels()), gpu)?;
    card.set_checks(POISONED);
    let found = run(&mut card, sample, &inputs, &parts);
    if is_refused {
        return fp8::assert_refused(&what, found.err());
    }
    let found = found?;
    for (found, expected) in found.iter().zip(&expected) {
        compare(&what, dtype, sample.tolerance, &without_tails(sample, found, expected), expected);
    }

    // Without poison, undefined tails would be uninitialised memory.
    let is_undefined = |k| ragged_ops().leaves_undefined(sample.op(), k);
    if !replays || (0..found[0].len()).any(is_undefined) {
        return Ok(());
    }
    // Run op by op, recorded as a graph, replayed: equal to the bit if the op is deterministic.
    card.set_checks(Checks::default());
    let thrice = [parts, parts, parts].concat();
    let replayed = run(&mut card, sample, &inputs, &thrice)?;
    let bytes = |made: &[HostTensor]| made.iter().map(|t| t.bytes().to_vec()).collect::<Vec<_>>();
    for (n, replayed) in replayed.iter().enumerate() {
        if sample.deterministic {
            assert!(bytes(replayed) == bytes(&found[n % 2]), "{what}: run {n} differs");
        } else {
            compare(&what, dtype, sample.tolerance, replayed, &expected[n % 2]);
        }
    }
    Ok(())
}

fn main() {
    let arguments = Arguments::from_args();
    let card = common::gpu();
    let multiprocessors = card.as_ref().map_or(1, |card| card.info().multiprocessors as usize);
    let kernels = cuda_kernels();
    let mut tests = Vec::new();
    for (size, samples) in
        [("small", samples()), ("large", large_samples()), ("card", gpu_samples(multiprocessors))]
    {
        for (n, sample) in samples.into_iter().enumerate().filter(|(_, s)| kernels.find(s.op()).is_some()) {
            let sample = Arc::new(sample);
            let dtypes =
                if sample.differs_in_bf16() { &[DType::F32, DType::BF16][..] } else { &[DType::F32] };
            for &dtype in dtypes {
                let order = if sample.deterministic { "" } else { "_in_any_order" };
                let name = format!("{}_{size}_{n}_{dtype}{order}", sample.op().name());
                let sample = sample.clone();
                let replays = common::is_drawn(tests.len());
                let test = Trial::test(name, move || check(&sample, dtype, replays));
                tests.push(test.with_ignored_flag(card.is_none()));
            }
        }
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(card);
    conclusion.exit();
}
