//! Tests of the chunked loss against a naive one in f64, and of its edge cases.

use super::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad, Terms};
use crate::PassSet;
use crate::check::seed as fresh_seed;
use crate::registry::cpu_kernels;
use crate::run_op::{normal, run, run_over};
use xtrain_program::{Op, OpError, Precision, Program, Root, Storage, Tracer, ValueId, backward, precision};
use xtrain_tensor::formats::round_bf16;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// Inputs of a loss.
struct Case {
    x_td: HostTensor,
    w_vd: HostTensor,
    targets: HostTensor,
    inv_targets: HostTensor,
}

/// Outputs of a loss, in f64.
struct Results {
    objective: f64,
    cross_entropy: f64,
    dx_td: Vec<f64>,
    dw_vd: Vec<f64>,
}

impl Case {
    /// Normal x and w, and targets of which about a quarter are ignored.
    fn random(dtype: DType, t: usize, d: usize, v: usize, seed: u64) -> Self {
        let rng = Philox::new(seed, 1, 0);
        let target = |i| {
            if rng.word(2 * i) < u32::MAX / 4 { IGNORED } else { (rng.word(2 * i + 1) % v as u32) as i32 }
        };
        let targets: Vec<i32> = (0..t as u64).map(target).collect();
        let std = 3.0 / (d as f32).sqrt();
        Case::with_targets(normal(dtype, [t, d], 1.0, seed), normal(dtype, [v, d], std, seed + 1), &targets)
    }

    fn with_targets(x_td: HostTensor, w_vd: HostTensor, targets: &[i32]) -> Self {
        let count = targets.iter().filter(|&&t| t != IGNORED).count();
        let ints: Vec<f64> = targets.iter().map(|&t| t.into()).collect();
        Case {
            targets: HostTensor::from_f64(TensorType::new(DType::I32, [targets.len()]), &ints),
            inv_targets: HostTensor::from_f64(TensorType::new(DType::F32, []), &[1.0 / count as f64]),
            x_td,
            w_vd,
        }
    }

    fn inputs(&self) -> [&HostTensor; 4] {
        [&self.x_td, &self.w_vd, &self.targets, &self.inv_targets]
    }

    fn types(&self) -> Vec<TensorType> {
        self.inputs().iter().map(|t| t.ty()).collect()
    }

    /// Outputs of the op with both gradients, dw in the compute type.
    fn run(&self, loss: LinearCrossEntropy) -> Results {
        let dw = self.x_td.ty().dtype.compute();
        let outputs = run(&LinearCrossEntropyGrad { loss, dx: true, dw: Some(dw) }, &self.inputs());
        let [objective, cross_entropy, dx, dw] = &outputs[..] else { panic!("four outputs") };
        Results {
            objective: objective.to_f64()[0],
            cross_entropy: cross_entropy.to_f64()[0],
            dx_td: dx.to_f64(),
            dw_vd: dw.to_f64(),
        }
    }

    /// The formulas on all logits at once, with `round` applied to logits and dlogits.
    fn reference(&self, z_loss: f32, round: impl Fn(f64) -> f64) -> Results {
        let (x, w, z, inv) =
            (self.x_td.to_f64(), self.w_vd.to_f64(), f64::from(z_loss), self.inv_targets.to_f64()[0]);
        let (_, d) = self.x_td.ty().shape.rows_cols();
        let mut r = Results {
            objective: 0.0,
            cross_entropy: 0.0,
            dx_td: vec![0.0; x.len()],
            dw_vd: vec![0.0; w.len()],
        };
        for (token, target) in self.targets.to_f64().into_iter().enumerate().filter(|(_, t)| *t >= 0.0) {
            let x = &x[token * d..][..d];
            let logits: Vec<f64> =
                w.chunks(d).map(|w| round(x.iter().zip(w).map(|(x, w)| x * w).sum())).collect();
            let max_logit = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let lse = max_logit + logits.iter().map(|l| (l - max_logit).exp()).sum::<f64>().ln();
            r.cross_entropy += inv * (lse - logits[target as usize]);
            r.objective += inv * (lse - logits[target as usize] + z * lse * lse);
            for (class, logit) in logits.iter().enumerate() {
                let p = (logit - lse).exp();
                let onehot = f64::from(class == target as usize);
                let dlogit = round(inv * (p - onehot + 2.0 * z * lse * p));
                for j in 0..d {
                    r.dx_td[token * d + j] += dlogit * w[class * d + j];
                    r.dw_vd[class * d + j] += dlogit * x[j];
                }
            }
        }
        r
    }
}

fn error(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(1e-300)
}

fn assert_near(found: &Results, expected: &Results, bar: f64, what: &str) {
    let pairs = [
        ("objective", error(&[found.objective], &[expected.objective])),
        ("cross-entropy", error(&[found.cross_entropy], &[expected.cross_entropy])),
        ("dx", error(&found.dx_td, &expected.dx_td)),
        ("dw", error(&found.dw_vd, &expected.dw_vd)),
    ];
    for (name, error) in pairs {
        assert!(error <= bar, "{what}: {name} is off by {error:e}");
    }
}

#[test]
fn agrees_with_the_formulas() {
    for (t, d, v, chunk_tokens, z_loss) in
        [(37, 70, 301, 16, 0.0), (37, 70, 301, 16, 1e-2), (5, 3, 7, 2, 0.5), (9, 130, 33, 100, 1e-4)]
    {
        let seed = fresh_seed();
        for (dtype, bar) in [(DType::F64, 1e-13), (DType::F32, 3e-6)] {
            let case = Case::random(dtype, t, d, v, seed);
            let found = case.run(LinearCrossEntropy { chunk_tokens, z_loss, terms: Terms::None });
            assert_near(&found, &case.reference(z_loss, |x| x), bar, &format!("{dtype} {t} {d} {v}"));
        }
    }
}

#[test]
fn bf16_rounds_logits_and_their_gradients_and_nothing_between() {
    let (t, d, v, seed) = (29, 64, 203, fresh_seed());
    // Multiples of 1/8 and 1/16: products and their sums are exact in f32, so that logits do not depend on
    // the order of summation.
    let grid = |rows: usize, unit: f64, site| {
        let rng = Philox::new(seed, 0, site);
        let values: Vec<f64> =
            (0..(rows * d) as u64).map(|i| (f64::from(rng.word(i) % 17) - 8.0) * unit).collect();
        HostTensor::from_f64(TensorType::new(DType::BF16, [rows, d]), &values)
    };
    let targets: Vec<i32> = (0..t as i32).map(|i| if i % 5 == 2 { IGNORED } else { i * 7 }).collect();
    let case = Case::with_targets(grid(t, 1.0 / 8.0, 0), grid(v, 1.0 / 16.0, 1), &targets);
    let found = case.run(LinearCrossEntropy { chunk_tokens: 8, z_loss: 1e-3, terms: Terms::None });
    let rounded = case.reference(1e-3, |x| f64::from(round_bf16(x as f32)));
    assert!(error(&[found.objective], &[rounded.objective]) < 1e-6);
    assert!(error(&[found.cross_entropy], &[rounded.cross_entropy]) < 1e-6);
    // A few gradients may round to the other neighbour; without rounding all would differ.
    assert!(error(&found.dw_vd, &rounded.dw_vd) < 1e-4);
    assert!(error(&found.dx_td, &rounded.dx_td) < 2f64.powi(-9), "dx is rounded once");
    let exact = case.reference(1e-3, |x| x);
    assert!(error(&exact.dw_vd, &rounded.dw_vd) > 1e-3, "the test sees the rounding");
}

#[test]
fn the_chunk_changes_nothing() {
    let case = Case::random(DType::F64, 38, 70, 301, fresh_seed());
    let in_chunks =
        |chunk_tokens| case.run(LinearCrossEntropy { chunk_tokens, z_loss: 1e-2, terms: Terms::None });
    let whole = in_chunks(38);
    for chunk_tokens in [2, 3, 5, 16, 37, 1000] {
        let found = in_chunks(chunk_tokens);
        assert!(found.dx_td == whole.dx_td, "dx in chunks of {chunk_tokens} differs");
        assert!(found.objective == whole.objective && found.cross_entropy == whole.cross_entropy);
        assert_near(&found, &whole, 1e-12, &format!("chunks of {chunk_tokens}"));
    }
    // A GEMM with a single row sums in another order.
    assert_near(&in_chunks(1), &whole, 1e-12, "chunks of one");
}

#[test]
fn chunks_are_within_the_limit_and_of_equal_length() {
    for (tokens, chunk_tokens) in [(1, 1), (101, 10), (10, 4), (64, 64), (7, 1000), (4096, 1024)] {
        let loss = LinearCrossEntropy { chunk_tokens, z_loss: 0.0, terms: Terms::None };
        let chunks: Vec<_> = loss.chunks(tokens).collect();
        assert!(chunks.iter().cloned().flatten().eq(0..tokens), "{chunks:?}");
        let (min, max) = chunks.iter().fold((usize::MAX, 0), |(a, b), c| (a.min(c.len()), b.max(c.len())));
        assert!(max <= chunk_tokens && max - min <= 1, "{chunks:?}");
        assert_eq!(chunks.len(), tokens.div_ceil(chunk_tokens));
    }
}

#[test]
fn the_loss_does_not_depend_on_the_gradients_that_are_computed() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let case = Case::random(dtype, 23, 19, 301, fresh_seed());
        let loss = LinearCrossEntropy { chunk_tokens: 7, z_loss: 1e-2, terms: Terms::None };
        let forward = run(&loss, &case.inputs());
        let out = dtype.compute();
        let all = run(&LinearCrossEntropyGrad { loss, dx: true, dw: Some(out) }, &case.inputs());
        let dx = run(&LinearCrossEntropyGrad { loss, dx: true, dw: None }, &case.inputs());
        let dw = run(&LinearCrossEntropyGrad { loss, dx: false, dw: Some(out) }, &case.inputs());
        for outputs in [&all, &dx, &dw] {
            assert!((0..2).all(|k| outputs[k].bytes() == forward[k].bytes()), "{dtype}");
        }
        assert!(dx[2].bytes() == all[2].bytes() && dw[2].bytes() == all[3].bytes(), "{dtype}");
    }
}

#[test]
fn the_terms_of_the_tokens_add_up_to_the_loss() {
    let case = Case::random(DType::F32, 13, 8, 17, fresh_seed());
    let loss = LinearCrossEntropy { chunk_tokens: 5, z_loss: 0.1, terms: Terms::Losses };
    let without = LinearCrossEntropy { terms: Terms::None, ..loss };
    for (dx, dw) in [(true, Some(DType::F32)), (false, Some(DType::F32)), (true, None)] {
        let outputs = |loss| run(&LinearCrossEntropyGrad { loss, dx, dw }, &case.inputs());
        let (mut with, plain) = (outputs(loss), outputs(without));
        let terms = with.remove(2).to_f64();
        assert!(with.iter().zip(&plain).all(|(a, b)| a.bytes() == b.bytes()), "the other outputs");
        let inverse = case.inv_targets.to_f64()[0];
        for (k, output) in plain[..2].iter().enumerate() {
            let sum: f64 = terms.chunks_exact(2).map(|terms| terms[k]).sum();
            assert!((sum * inverse - output.to_f64()[0]).abs() < 1e-6, "output {k}");
        }
        for (target, terms) in case.targets.to_f64().into_iter().zip(terms.chunks_exact(2)) {
            assert_eq!(target == f64::from(IGNORED), terms == [0.0, 0.0]);
        }
    }
}

#[test]
fn a_target_matches_if_its_logit_is_the_highest_and_the_first_of_equal_ones() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let x = HostTensor::from_f64(TensorType::new(dtype, [6, 1]), &[1.0, 1.0, 1.0, -1.0, 1.0, 0.0]);
        let w = HostTensor::from_f64(TensorType::new(dtype, [5, 1]), &[1.0, 3.0, 3.0, 2.0, -4.0]);
        let case = Case::with_targets(x, w, &[1, 2, 3, 4, IGNORED, 0]);
        let loss = LinearCrossEntropy { chunk_tokens: 4, z_loss: 0.1, terms: Terms::LossesAndMatches };
        let losses = LinearCrossEntropy { terms: Terms::Losses, ..loss };
        for gradients in [false, true] {
            let outputs = |loss| match gradients {
                false => run(&loss, &case.inputs()),
                true => run(&LinearCrossEntropyGrad { loss, dx: true, dw: None }, &case.inputs()),
            };
            let (with, without) = (outputs(loss), outputs(losses));
            let (terms, expected) = (with[2].to_f64(), without[2].to_f64());
            let columns = |k| terms.chunks_exact(3).map(|terms| terms[k]).collect::<Vec<f64>>();
            assert_eq!(columns(2), [1.0, 0.0, 0.0, 1.0, 0.0, 1.0], "{dtype}");
            let of_losses: Vec<f64> = terms.chunks_exact(3).flat_map(|terms| [terms[0], terms[1]]).collect();
            assert_eq!(of_losses, expected, "{dtype}");
            assert!(
                with.iter().zip(&without).enumerate().all(|(k, (a, b))| k == 2 || a.bytes() == b.bytes())
            );
        }
    }
}

#[test]
fn ignored_tokens_change_nothing() {
    let (t, d, v, seed) = (12, 5, 31, fresh_seed());
    let targets: Vec<i32> = (0..t as i32).map(|i| if i % 3 == 0 { IGNORED } else { i }).collect();
    let (x, w) = (normal(DType::F64, [t, d], 1.0, seed), normal(DType::F64, [v, d], 1.0, seed + 1));
    let used: Vec<usize> = (0..t).filter(|i| i % 3 != 0).collect();
    let used_x: Vec<f64> = used.iter().flat_map(|&i| x.to_f64()[i * d..][..d].to_vec()).collect();
    let used_x = HostTensor::from_f64(TensorType::new(DType::F64, [used.len(), d]), &used_x);
    let used_targets: Vec<i32> = used.iter().map(|&i| targets[i]).collect();
    let loss = LinearCrossEntropy { chunk_tokens: 5, z_loss: 0.1, terms: Terms::None };
    let all = Case::with_targets(x, w.clone(), &targets).run(loss);
    let alone = Case::with_targets(used_x, w, &used_targets).run(loss);
    assert!(error(&[all.objective], &[alone.objective]) < 1e-14);
    assert!(error(&all.dw_vd, &alone.dw_vd) < 1e-14);
    for (token, dx) in all.dx_td.chunks(d).enumerate() {
        match used.iter().position(|&k| k == token) {
            Some(n) => assert!(error(dx, &alone.dx_td[n * d..][..d]) < 1e-14),
            None => assert!(dx.iter().all(|&g| g == 0.0), "ignored token {token} has gradient {dx:?}"),
        }
    }
}

#[test]
fn tokens_without_a_target_are_not_read_and_few_with_one_are_enough() {
    let (t, d, v, seed) = (9, 5, 31, fresh_seed());
    let loss = LinearCrossEntropy { chunk_tokens: 4, z_loss: 0.1, terms: Terms::None };
    for used in [&[0][..], &[8], &[3], &[0, 8], &[1, 2, 7], &[0, 1, 2, 3, 5, 6, 7, 8]] {
        let targets: Vec<i32> = (0..t).map(|n| if used.contains(&n) { n } else { IGNORED }).collect();
        let (x, w) =
            (normal(DType::F64, [t as usize, d], 1.0, seed), normal(DType::F64, [v, d], 1.0, seed + 1));
        let expected = Case::with_targets(x, w, &targets);
        let mut x = expected.x_td.to_f64();
        for (row, target) in x.chunks_mut(d).zip(&targets) {
            // A second token is computed beside a single one.
            if *target == IGNORED && used.len() > 1 {
                row.fill(f64::NAN);
            }
        }
        let x = HostTensor::from_f64(expected.x_td.ty(), &x);
        let found = Case::with_targets(x, expected.w_vd.clone(), &targets).run(loss);
        assert_near(&found, &expected.reference(0.1, |x| x), 1e-13, &format!("{used:?}"));
    }
}

#[test]
fn without_targets_all_outputs_are_zero() {
    for dtype in [DType::F32, DType::BF16] {
        let seed = fresh_seed();
        // The inverse of no targets is infinite.
        let case = Case::with_targets(
            normal(dtype, [7, 5], 1.0, seed),
            normal(dtype, [11, 5], 1.0, seed),
            &[IGNORED; 7],
        );
        assert!(case.inv_targets.to_f64()[0].is_infinite());
        let found = case.run(LinearCrossEntropy { chunk_tokens: 3, z_loss: 0.1, terms: Terms::None });
        assert!(found.objective == 0.0 && found.cross_entropy == 0.0);
        assert!(found.dx_td.iter().chain(&found.dw_vd).all(|&g| g == 0.0));
    }
}

#[test]
fn huge_logits_do_not_overflow() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        // The target of the first token has the highest logit, 1e4, and that of the second the lowest, -1e4.
        let x = HostTensor::from_f64(TensorType::new(dtype, [2, 1]), &[100.0, 100.0]);
        let w = HostTensor::from_f64(TensorType::new(dtype, [3, 1]), &[100.0, 0.0, -100.0]);
        let found = Case::with_targets(x, w, &[0, 2]).run(LinearCrossEntropy {
            chunk_tokens: 2,
            z_loss: 0.0,
            terms: Terms::None,
        });
        // 1e4 is 9984 in bf16.
        let huge = if dtype == DType::BF16 { 9984.0 } else { 1e4 };
        assert!(error(&[found.cross_entropy], &[huge]) < 1e-6, "{dtype}: {}", found.cross_entropy);
        assert_eq!(found.objective, found.cross_entropy);
        assert_eq!(found.dx_td, [0.0, 0.5 * (100.0 - -100.0)], "{dtype}");
        assert_eq!(found.dw_vd, [50.0, 0.0, -50.0], "{dtype}");
    }
}

#[test]
fn inputs_that_are_not_finite_make_the_loss_not_finite() {
    for bad in [f64::NAN, f64::INFINITY] {
        let x = HostTensor::from_f64(TensorType::new(DType::F32, [2, 2]), &[1.0, 2.0, bad, 1.0]);
        let w = normal(DType::F32, [5, 2], 1.0, fresh_seed());
        let found = Case::with_targets(x, w, &[0, 1]).run(LinearCrossEntropy {
            chunk_tokens: 2,
            z_loss: 0.0,
            terms: Terms::None,
        });
        assert!(
            !found.objective.is_finite() && !found.cross_entropy.is_finite(),
            "{bad}: {}",
            found.objective
        );
    }
}

#[test]
fn micro_steps_add_to_the_loss_and_to_dw_but_not_to_dx() {
    let case = Case::random(DType::F64, 11, 7, 23, fresh_seed());
    let loss = LinearCrossEntropy { chunk_tokens: 4, z_loss: 1e-2, terms: Terms::None };
    let op = LinearCrossEntropyGrad { loss, dx: true, dw: Some(DType::F64) };
    let once = run(&op, &case.inputs());
    let twice = run_over(&op, &case.inputs(), once.clone(), true);
    for (k, (once, twice)) in once.iter().zip(&twice).enumerate() {
        let times = if k == 2 { 1.0 } else { 2.0 };
        let expected: Vec<f64> = once.to_f64().iter().map(|x| times * x).collect();
        assert!(error(&twice.to_f64(), &expected) < 1e-14, "output {k}");
    }
}

#[test]
fn threads_change_no_bit_of_large_operands() {
    // Large enough for GEMMs and rows to use several threads.
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::random(dtype, 150, 70, 2003, fresh_seed());
        let op = LinearCrossEntropyGrad {
            loss: LinearCrossEntropy { chunk_tokens: 64, z_loss: 1e-3, terms: Terms::None },
            dx: true,
            dw: Some(DType::F32),
        };
        let run_on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| run(&op, &case.inputs()))
        };
        let (one, three) = (run_on(1), run_on(3));
        assert!(one.iter().zip(&three).all(|(a, b)| a.bytes() == b.bytes()), "{dtype}");
    }
}

#[test]
#[should_panic(expected = "target 7 of token 1 is not in a vocabulary of 7")]
fn a_target_past_the_vocabulary_is_our_bug() {
    let case =
        Case::with_targets(normal(DType::F32, [2, 3], 1.0, 1), normal(DType::F32, [7, 3], 1.0, 2), &[0, 7]);
    case.run(LinearCrossEntropy { chunk_tokens: 2, z_loss: 0.0, terms: Terms::None });
}

#[test]
fn wrong_operands_are_named() {
    let case = Case::random(DType::F32, 4, 3, 5, 0);
    let refuse = |loss: LinearCrossEntropy, n: usize, ty: TensorType, expected: &str| {
        let mut types = case.types();
        types[n] = ty;
        let OpError(message) = loss.infer(&types).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    };
    let loss = LinearCrossEntropy { chunk_tokens: 2, z_loss: 0.0, terms: Terms::None };
    refuse(loss, 0, TensorType::new(DType::F32, [4]), "x must be a matrix, not f32[4]");
    refuse(loss, 0, TensorType::new(DType::F32, [0, 3]), "must not be empty");
    refuse(loss, 1, TensorType::new(DType::F32, [5, 4]), "x has 3 columns, but the weight f32[5, 4] takes 4");
    refuse(loss, 1, TensorType::new(DType::BF16, [5, 3]), "one float type");
    refuse(loss, 2, TensorType::new(DType::I32, [3]), "targets must be i32[4], not i32[3]");
    refuse(loss, 3, TensorType::new(DType::F32, [1]), "inv_targets");
    let types = case.types();
    refuse(LinearCrossEntropy { chunk_tokens: 0, ..loss }, 0, types[0], "chunk_tokens");
    refuse(LinearCrossEntropy { z_loss: -1.0, ..loss }, 0, types[0], "z_loss");
}

/// A program of only the loss, with w as a parameter, differentiated from the roots that `roots` chooses
/// among its outputs.
fn differentiate(
    precision: Precision,
    roots: impl Fn(&mut Program, &[ValueId]) -> Vec<Root>,
) -> Result<Program, String> {
    let mut tracer = Tracer::default();
    let float = |shape: [usize; 2]| TensorType::new(DType::F32, shape);
    let inputs = [
        tracer.input("x", float([4, 3])),
        tracer.parameter("w", float([5, 3])),
        tracer.input("targets", TensorType::new(DType::I32, [4])),
        tracer.input("inv_targets", TensorType::new(DType::F32, [])),
    ];
    let outputs = tracer
        .apply(LinearCrossEntropy { chunk_tokens: 2, z_loss: 0.0, terms: Terms::None }, &inputs)
        .expect("traces");
    let mut program = precision::apply(tracer.finish(), precision).expect("the types fit");
    let roots = roots(&mut program, &outputs);
    let (program, _) = backward::backward(program, &roots, &[], &PassSet).map_err(|e| e.to_string())?;
    Ok(program)
}

fn loss_of(value: ValueId) -> Root {
    Root { value, grad: None }
}

#[test]
fn only_wanted_gradients_are_computed() {
    let program =
        differentiate(Precision::FP32, |_, outputs| vec![loss_of(outputs[0])]).expect("has a backward");
    let [instance] = &program.instances[..] else { panic!("one op computes the loss and its gradients") };
    assert_eq!(instance.code.op().name(), "linear_cross_entropy_grad");
    assert_eq!(instance.outputs.len(), 3, "two scalars and dw");
    assert_eq!(Some(instance.outputs[2].value), program.parameters[0].gradient);
}

#[test]
fn in_bf16_the_gradient_of_the_weight_is_f32() {
    let program =
        differentiate(Precision::BF16, |_, outputs| vec![loss_of(outputs[0])]).expect("has a backward");
    let [instance] = &program.instances[..] else { panic!("one instance") };
    let read: Vec<String> = instance.inputs.iter().map(|&v| program.ty(v).to_string()).collect();
    assert_eq!(read, ["bf16[4, 3]", "bf16[5, 3]", "i32[4]", "f32[]"]);
    let written: Vec<String> = instance.outputs.iter().map(|o| program.ty(o.value).to_string()).collect();
    assert_eq!(written, ["f32[]", "f32[]", "f32[5, 3]"]);
    let kernels = cpu_kernels();
    let kernel = kernels.find(instance.code.op()).expect("a kernel");
    let workspace = kernel.workspace(&program.input_types(instance));
    let workspace: Vec<String> = workspace.iter().map(ToString::to_string).collect();
    assert_eq!(workspace, ["f32[4, 2]", "bf16[2, 5]"], "the terms of the tokens, the logits of a chunk");
}

#[test]
fn the_objective_must_be_the_loss_itself() {
    let with_gradient = |program: &mut Program, value| {
        let grad = program.add_value(program.ty(value), Storage::Transient);
        Root { value, grad: Some(grad) }
    };
    let cases: [Result<Program, String>; 4] = [
        differentiate(Precision::FP32, |p, outputs| vec![with_gradient(p, outputs[0])]),
        differentiate(Precision::FP32, |p, outputs| vec![loss_of(outputs[0]), with_gradient(p, outputs[1])]),
        differentiate(Precision::FP32, |_, outputs| vec![loss_of(outputs[0]), loss_of(outputs[1])]),
        differentiate(Precision::FP32, |_, outputs| vec![loss_of(outputs[1])]),
    ];
    for case in cases {
        let message = case.err().expect("refused");
        assert!(message.contains("its objective (output 0) must itself be the loss"), "{message}");
    }
}

/// The lengths of chunks, in order.
fn sorted(mut lengths: Vec<usize>) -> Vec<usize> {
    lengths.sort();
    lengths
}

#[test]
fn the_cost_counts_the_chunks_that_are_computed() {
    for (tokens, chunk_tokens) in [(1, 1), (7, 3), (8, 4), (100, 7), (100, 128), (4096, 1000), (129, 2)] {
        let loss = LinearCrossEntropy { chunk_tokens, z_loss: 0.0, terms: Terms::None };
        let counted = loss.chunk_lengths(tokens);
        let counted = counted.into_iter().flat_map(|(length, count)| vec![length; count]).collect();
        let chunks = loss.chunks(tokens).map(|chunk| chunk.len()).collect();
        assert_eq!(sorted(counted), sorted(chunks), "{tokens} by {chunk_tokens}");
    }
}

#[test]
fn a_smaller_chunk_reads_the_weights_gradient_more_often_and_computes_as_much() {
    let types = |t| {
        let x = TensorType::new(DType::BF16, [t, 64]);
        let w = TensorType::new(DType::BF16, [1000, 64]);
        [x, w, TensorType::new(DType::I32, [t]), TensorType::new(DType::F32, [])]
    };
    let cost = |chunk_tokens| {
        let loss = LinearCrossEntropy { chunk_tokens, z_loss: 0.0, terms: Terms::None };
        LinearCrossEntropyGrad { loss, dx: true, dw: Some(DType::F32) }.cost(&types(960), &[])
    };
    for (chunk, chunks) in [(960, 1), (240, 4), (100, 10)] {
        let cost = cost(chunk);
        assert_eq!(cost.flops(), 3.0 * 2.0 * 960.0 * 1000.0 * 64.0, "{chunk}");
        let added: f64 = cost.kernels.iter().map(|of| of.times as f64 * of.added_bytes).sum();
        assert_eq!(added, (chunks - 1) as f64 * 4.0 * 1000.0 * 64.0, "{chunk}");
    }
}
