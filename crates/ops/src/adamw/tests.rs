//! AdamW against a plain f64 loop, and its promises: decay groups, skipped steps, moments in bf16, copies for
//! GEMMs.

use super::{AdamW, AdamWParameter, SITES, cpu::BLOCK};
use crate::check::{on_threads, seed};
use crate::clip::Clip;
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::formats::round_bf16_stochastic;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.95;
const EPS: f64 = 1e-8;

/// The types of one parameter's operands.
#[derive(Clone, Copy)]
struct Kind {
    master: DType,
    moments: DType,
    grad: DType,
    parameter: AdamWParameter,
}

const F32: Kind = Kind {
    master: DType::F32,
    moments: DType::F32,
    grad: DType::F32,
    parameter: AdamWParameter { weight_decay: 0.1, compute: None, first_element: 0 },
};

fn with_copy(kind: Kind, compute: DType) -> Kind {
    Kind { parameter: AdamWParameter { compute: Some(compute), ..kind.parameter }, ..kind }
}

/// A parameter with its moments, as the optimizer's state holds them.
struct State {
    kind: Kind,
    master: HostTensor,
    m: HostTensor,
    v: HostTensor,
    compute: Option<HostTensor>,
}

/// Fresh standard normal numbers.
fn random(dtype: DType, numel: usize) -> HostTensor {
    normal(dtype, [numel], 1.0, seed())
}

fn fresh(kind: Kind, numel: usize) -> State {
    let zeros = || HostTensor::zeros(TensorType::new(kind.moments, [numel]));
    State { kind, master: random(kind.master, numel), m: zeros(), v: zeros(), compute: None }
}

fn scalar(dtype: DType, x: f64) -> HostTensor {
    HostTensor::from_f64(TensorType::new(dtype, []), &[x])
}

fn op(states: &[State]) -> AdamW {
    AdamW::new(states.iter().map(|s| s.kind.parameter).collect(), [BETA1, BETA2], EPS, 5)
}

/// One update of all of `states`.
fn step(states: &mut [State], grads: &[HostTensor], lr: f64, coefficient: f64, t: u32, skip: bool) {
    let mut inputs = vec![
        scalar(DType::F32, lr),
        scalar(DType::F32, coefficient),
        HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[t.into()]),
        scalar(DType::U32, f64::from(u8::from(skip))),
    ];
    for (s, grad) in states.iter().zip(grads) {
        inputs.extend([&s.master, &s.m, &s.v, grad].map(HostTensor::clone));
    }
    let mut outputs = run(&op(states), &inputs.iter().collect::<Vec<_>>()).into_iter();
    for s in states {
        let mut next = || outputs.next().expect("an output");
        (s.master, s.m, s.v) = (next(), next(), next());
        s.compute = s.kind.parameter.compute.map(|_| next());
    }
}

/// A reference in f64, one element at a time, as in the paper.
struct Naive {
    master: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Naive {
    fn of(s: &State) -> Self {
        Naive { master: s.master.to_f64(), m: s.m.to_f64(), v: s.v.to_f64() }
    }

    fn step(&mut self, grad: &[f64], lr: f64, coefficient: f64, weight_decay: f64, t: u32) {
        for i in 0..grad.len() {
            let g = coefficient * grad[i];
            self.m[i] = BETA1 * self.m[i] + (1.0 - BETA1) * g;
            self.v[i] = BETA2 * self.v[i] + (1.0 - BETA2) * g * g;
            let m_hat = self.m[i] / (1.0 - BETA1.powi(t as i32));
            let v_hat = self.v[i] / (1.0 - BETA2.powi(t as i32));
            self.master[i] -= lr * (m_hat / (v_hat.sqrt() + EPS) + weight_decay * self.master[i]);
        }
    }
}

/// The largest errors of masters and of moments after several steps of parameters of many sizes.
fn error_after_steps(kind: Kind) -> (f64, f64) {
    let sizes = [1, 5, BLOCK, 2 * BLOCK + 3];
    let mut states: Vec<State> = (0..8)
        .map(|n| {
            let mut kind = kind;
            kind.parameter.weight_decay = if n % 2 == 0 { 0.5 } else { 0.0 };
            kind.parameter.compute = (n % 3 == 0).then_some(kind.master);
            fresh(kind, sizes[n % 4])
        })
        .collect();
    let mut naive: Vec<Naive> = states.iter().map(Naive::of).collect();
    for t in 1..=5 {
        // Powers of two and f32 values, so that both get equal numbers.
        let (lr, coefficient) = (f64::from(0.01f32 * t as f32), 0.5f64.powi(t as i32 % 3));
        let grads: Vec<HostTensor> =
            states.iter().map(|s| random(kind.grad, s.master.ty().numel())).collect();
        step(&mut states, &grads, lr, coefficient, t, false);
        for ((naive, s), grad) in naive.iter_mut().zip(&states).zip(&grads) {
            naive.step(&grad.to_f64(), lr, coefficient, s.kind.parameter.weight_decay, t);
        }
    }
    let mut worst = (0.0f64, 0.0f64);
    for (s, n) in states.iter().zip(&naive) {
        worst.0 = worst.0.max(error(&s.master, &n.master));
        worst.1 = worst.1.max(error(&s.m, &n.m)).max(error(&s.v, &n.v));
    }
    worst
}

/// The largest error of an element, relative for elements above 1.
fn error(found: &HostTensor, expected: &[f64]) -> f64 {
    found.to_f64().iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f64::max)
}

#[test]
fn several_steps_agree_with_the_paper_in_f64() {
    let (master, moments) = error_after_steps(F32);
    assert!(master < 1e-6 && moments < 1e-6, "f32: {master:e}, {moments:e}");
    let f64s = Kind { master: DType::F64, moments: DType::F64, grad: DType::F64, ..F32 };
    let (master, moments) = error_after_steps(f64s);
    assert!(master < 1e-14 && moments < 1e-14, "f64: {master:e}, {moments:e}");
}

#[test]
fn moments_and_gradients_in_bf16_cost_their_rounding_and_no_more() {
    let (master, moments) = error_after_steps(Kind { grad: DType::BF16, ..F32 });
    assert!(master < 1e-6 && moments < 1e-6, "gradients: {master:e}, {moments:e}");
    let (master, moments) = error_after_steps(Kind { moments: DType::BF16, ..F32 });
    assert!(moments > 1e-5 && moments < 2e-2, "moments: {moments:e}");
    assert!(master < 5e-3, "masters: {master:e}");
}

/// The moments after this many steps with zero gradients, from ones.
fn fall(op: &AdamW, moments: DType, steps: u32) -> [Vec<f64>; 2] {
    let zeros = HostTensor::zeros(TensorType::new(DType::F32, [4 * BLOCK + 3]));
    let start = HostTensor::from_f64(zeros.ty().with_dtype(moments), &vec![1.0; 4 * BLOCK + 3]);
    let (mut m, mut v) = (start.clone(), start);
    for t in 1..=steps {
        let applied = HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[t.into()]);
        let [lr, one, skip] = [scalar(DType::F32, 0.1), scalar(DType::F32, 1.0), scalar(DType::U32, 0.0)];
        let mut outputs = run(op, &[&lr, &one, &applied, &skip, &zeros, &m, &v, &zeros]);
        (v, m) = (outputs.remove(2), outputs.remove(1));
    }
    [m.to_f64(), v.to_f64()]
}

#[test]
fn moments_in_bf16_that_move_by_less_than_half_a_unit_move_in_the_mean() {
    // A unit below 1 is 2^-8: to nearest, nothing would ever fall.
    let op = AdamW::new(vec![F32.parameter], [0.9999, 0.999], EPS, seed());
    let [m, v] = fall(&op, DType::BF16, 40);
    for (x, beta) in [(&m, 0.9999f64), (&v, 0.999)] {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
        let expected = beta.powi(40);
        assert!((mean - expected).abs() < 6.0 * deviation / n.sqrt(), "{mean} instead of {expected}");
        assert!(deviation > 1e-3 && deviation < 2e-2, "{deviation:e}");
    }
    // The two are rounded by other bits.
    let deviations = m.iter().zip(&v).map(|(m, v)| (m - 0.9999f64.powi(40)) * (v - 0.999f64.powi(40)));
    let covariance = deviations.sum::<f64>() / m.len() as f64;
    assert!(covariance.abs() < 1e-6, "{covariance:e}");
}

#[test]
fn moments_in_bf16_are_rounded_by_the_stream_that_is_documented() {
    // Numbers that bf16 holds, so that moments of both types start equal.
    let values: Vec<f64> = (0..BLOCK + 7).map(|i| 1.0 + (i % 128) as f64 / 128.0).collect();
    let tensor = |dtype| HostTensor::from_f64(TensorType::new(dtype, [BLOCK + 7]), &values);
    let once = |seed, t: u32, p: usize, moments| {
        let (x, moment) = (tensor(DType::F32), tensor(moments));
        let applied = HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[t.into()]);
        let [lr, one, skip] = [scalar(DType::F32, 0.1), scalar(DType::F32, 0.7), scalar(DType::U32, 0.0)];
        let op = AdamW::new(vec![F32.parameter; 2], [BETA1, BETA2], EPS, seed);
        let both = [&x, &moment, &moment, &x].repeat(2);
        let outputs = run(&op, &[&[&lr, &one, &applied, &skip][..], &both].concat());
        [1, 2].map(|k| outputs[3 * p + k].to_f64())
    };
    for (seed, t, p) in [(1, 2, 0), (u64::MAX - 1, 2, 0), (1, 3, 0), (1, 2, 1)] {
        let (wide, narrow) = (once(seed, t, p, DType::F32), once(seed, t, p, DType::BF16));
        let rng = Philox::new(seed, t, SITES + p as u32);
        for (k, shift) in [(0, 0), (1, 16)] {
            for (i, (x, found)) in wide[k].iter().zip(&narrow[k]).enumerate() {
                let expected = round_bf16_stochastic(*x as f32, rng.word(i as u64) >> shift);
                assert_eq!(*found, f64::from(expected), "element {i} of moment {k} of parameter {p}");
            }
        }
    }
}

#[test]
fn rows_of_a_parameter_are_updated_as_in_the_whole() {
    let whole = [(); 4].map(|()| random(DType::F32, 60));
    // From the first of a block of random words, and from within one.
    for (first, elements) in [(8, 20), (5, 31), (3, 1), (57, 3)] {
        let updated = |parts: &[HostTensor; 4], first_element| {
            let parameter = AdamWParameter { first_element, ..F32.parameter };
            let op = AdamW::new(vec![parameter], [BETA1, BETA2], EPS, 5);
            let [master, m, v, grad] = parts;
            let [m, v] = [m, v].map(|moment| {
                let positive: Vec<f64> = moment.to_f64().into_iter().map(f64::abs).collect();
                HostTensor::from_f64(moment.ty().with_dtype(DType::BF16), &positive)
            });
            let [lr, one] = [scalar(DType::F32, 0.1), scalar(DType::F32, 1.0)];
            let applied = HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[3.0]);
            let inputs = [&lr, &one, &applied, &scalar(DType::U32, 0.0), master, &m, &v, grad];
            run(&op, &inputs).iter().map(HostTensor::to_f64).collect::<Vec<_>>()
        };
        let part = |x: &HostTensor| {
            let ty = TensorType::new(DType::F32, [elements]);
            HostTensor::from_f64(ty, &x.to_f64()[first..first + elements])
        };
        let expected = updated(&whole, 0);
        for (found, expected) in updated(&whole.each_ref().map(part), first as u64).iter().zip(expected) {
            assert_eq!(*found, expected[first..first + elements], "{elements} from {first}");
        }
    }
}

#[test]
fn the_first_step_moves_by_the_learning_rate_against_the_sign() {
    let mut states = vec![fresh(F32, 1001)];
    states[0].kind.parameter.weight_decay = 0.0;
    let before = states[0].master.to_f64();
    let grad = random(DType::F32, 1001);
    step(&mut states, std::slice::from_ref(&grad), 0.25, 1.0, 1, false);
    for ((a, b), g) in states[0].master.to_f64().iter().zip(&before).zip(grad.to_f64()) {
        // mhat / sqrt(vhat) is the sign, up to eps / |g|.
        let expected = -0.25 * g.signum() / (1.0 + EPS / g.abs());
        assert!((a - b - expected).abs() < 1e-6, "{g}: moved by {} instead of {expected}", a - b);
    }
}

#[test]
fn decay_alone_shrinks_masters_by_lr_times_decay() {
    let mut states = vec![fresh(F32, 7), fresh(F32, 7)];
    states[1].kind.parameter.weight_decay = 0.0;
    let before: Vec<_> = states.iter().map(|s| s.master.to_f64()).collect();
    let zeros = || HostTensor::zeros(TensorType::new(DType::F32, [7]));
    step(&mut states, &[zeros(), zeros()], 0.5, 1.0, 1, false);
    let shrunk: Vec<f64> = before[0].iter().map(|x| x * 0.95).collect();
    assert!(error(&states[0].master, &shrunk) < 1e-6);
    assert_eq!(states[1].master.to_f64(), before[1]);
}

#[test]
fn a_skipped_step_changes_no_bit_and_still_writes_the_copies() {
    for kind in [F32, Kind { moments: DType::BF16, ..F32 }, Kind { master: DType::BF16, ..F32 }] {
        let mut states = vec![fresh(with_copy(kind, DType::BF16), BLOCK + 5)];
        // Bits that arithmetic would change, such as signalling NaNs.
        let scramble = |t: &mut HostTensor, site| {
            let rng = Philox::new(seed(), 3, site);
            t.bytes_mut().iter_mut().enumerate().for_each(|(i, b)| *b = rng.word(i as u64) as u8);
        };
        scramble(&mut states[0].m, 0);
        scramble(&mut states[0].v, 1);
        let all = |s: &State| [&s.master, &s.m, &s.v].map(|t| t.bytes().to_vec());
        let before = all(&states[0]);
        let nan = HostTensor::from_f64(TensorType::new(DType::F32, [BLOCK + 5]), &vec![f64::NAN; BLOCK + 5]);
        step(&mut states, &[nan], 0.1, f64::NAN, 3, true);
        assert!(all(&states[0]) == before);
        let copy = states[0].compute.as_ref().expect("a copy");
        assert!(copy.bytes() == rounded(&states[0].master, DType::BF16).bytes());
    }
}

fn rounded(t: &HostTensor, dtype: DType) -> HostTensor {
    HostTensor::from_f64(t.ty().with_dtype(dtype), &t.to_f64())
}

#[test]
fn the_copy_is_the_new_master_rounded() {
    for dtype in [DType::BF16, DType::F32] {
        let mut states = vec![fresh(with_copy(F32, dtype), 2 * BLOCK + 1), fresh(F32, 3)];
        let grads = [random(DType::F32, 2 * BLOCK + 1), random(DType::F32, 3)];
        step(&mut states, &grads, 0.1, 1.0, 1, false);
        let copy = states[0].compute.as_ref().expect("a copy");
        assert!(copy.bytes() == rounded(&states[0].master, dtype).bytes());
    }
}

#[test]
fn after_a_skipped_step_training_goes_on_as_if_it_had_not_been() {
    let grads: Vec<HostTensor> = (0..4).map(|_| random(DType::F32, 33)).collect();
    let start = fresh(F32, 33);
    let run = |losses: &[f64]| {
        let mut states = vec![State {
            compute: None,
            kind: F32,
            master: start.master.clone(),
            m: start.m.clone(),
            v: start.v.clone(),
        }];
        let mut applied = HostTensor::zeros(TensorType::new(DType::U32, [1]));
        let mut good = grads.iter();
        for &loss in losses {
            let outputs = run(
                &Clip { max_norm: 1.0 },
                &[&scalar(DType::F32, 3.0), &scalar(DType::F32, loss), &applied],
            );
            let skip = outputs[2].to_f64()[0] != 0.0;
            let grad = if skip { random(DType::F32, 33) } else { good.next().expect("a gradient").clone() };
            applied = outputs[0].clone();
            step(&mut states, &[grad], 0.1, outputs[1].to_f64()[0], applied.to_f64()[0] as u32, skip);
        }
        (applied.to_f64()[0], states.remove(0).master.bytes().to_vec())
    };
    let plain = run(&[1.0; 4]);
    assert_eq!(plain.0, 4.0);
    assert!(plain == run(&[f64::NAN, 1.0, 1.0, f64::INFINITY, f64::NAN, 1.0, 1.0]));
}

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let grad = random(DType::F32, 5 * BLOCK + 7);
    for kind in [F32, Kind { moments: DType::BF16, ..F32 }] {
        let start = fresh(kind, 5 * BLOCK + 7);
        let on = |threads| {
            on_threads(threads, || {
                let mut states = vec![State {
                    compute: None,
                    kind,
                    master: start.master.clone(),
                    m: start.m.clone(),
                    v: start.v.clone(),
                }];
                step(&mut states, std::slice::from_ref(&grad), 0.1, 1.0, 1, false);
                [&states[0].master, &states[0].m, &states[0].v].map(|t| t.bytes().to_vec())
            })
        };
        assert!((2..5).all(|threads| on(threads) == on(1)));
    }
}

#[test]
fn wrong_operands_are_named_by_the_index_of_their_parameter() {
    let op = AdamW::new(vec![F32.parameter; 2], [BETA1, BETA2], EPS, 5);
    let f32s = |shape: [usize; 1]| TensorType::new(DType::F32, shape);
    let controls = [
        TensorType::new(DType::F32, []),
        TensorType::new(DType::F32, []),
        TensorType::new(DType::U32, [1]),
        TensorType::new(DType::U32, []),
    ];
    let mut good = controls.to_vec();
    good.extend([f32s([3]); 8]);
    assert_eq!(op.infer(&good).expect("good operands"), vec![f32s([3]); 6]);
    for (k, what) in ["m", "v", "the gradient"].into_iter().enumerate() {
        let mut bad = good.clone();
        bad[9 + k] = f32s([4]);
        let error = op.infer(&bad).expect_err("another shape").0;
        assert!(error.contains("parameter 1") && error.contains(&format!("{what} is f32[4]")), "{error}");
    }
    let mut bad = good.clone();
    bad[6] = bad[6].with_dtype(DType::F64);
    let error = op.infer(&bad).expect_err("another type").0;
    assert!(error.contains("parameter 0: v is f64[3]"), "{error}");
    let fp8 = AdamWParameter { compute: Some(DType::E4M3), ..F32.parameter };
    assert!(
        AdamW::new(vec![fp8; 2], [BETA1, BETA2], EPS, 5).infer(&good).is_err(),
        "an FP8 copy needs a scale"
    );
    assert!(op.infer(&good[..11]).is_err());
}
