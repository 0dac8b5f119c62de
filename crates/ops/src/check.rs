//! Checks of every op in the registry, generated from its samples, with new random inputs and poisoned
//! outputs.

use crate::PassSet;
use crate::linear::Linear;
use crate::registry::{self, CpuKernels};
use crate::samples::{Sample, SampleOp, Sampled};
use example::{Gelu, GeluGrad};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use xtrain_program::{Code, Program, Root, StateKind, Storage, Tracer, ValueId, backward};
use xtrain_runtime::{Checks, CpuEngine, Engine, EngineError, Part, ProgramId};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// The example op of docs/add-an-op.md, checked with the ops of the registry. `crates/xtrain/tests/house.rs`
/// checks that the code on that page is this code.
#[allow(unreachable_pub, reason = "an op is public")]
mod example;

fn cpu_kernels() -> CpuKernels {
    let mut table = registry::cpu_kernels();
    table.register::<Gelu>(|op| op);
    table.register::<GeluGrad>(|op| op);
    table
}

fn samples() -> Vec<Sample> {
    [registry::samples(), Gelu::samples(), GeluGrad::samples()].into_iter().flatten().collect()
}

fn large_samples() -> Vec<Sample> {
    [registry::large_samples(), vec![Gelu::large(), GeluGrad::large()]].into_iter().flatten().collect()
}

/// A new seed, from the clock.
pub(crate) fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock after 1970");
    now.as_nanos() as u64
}

/// The result of `f`, run on a pool of this many threads.
pub(crate) fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(f)
}

/// A sample as a loaded program.
struct Case {
    engine: CpuEngine,
    id: ProgramId,
    inputs: Vec<HostTensor>,
    outputs: Vec<TensorType>,
}

fn describe(sample: &Sample) -> String {
    format!("{:?} on {:?}", sample.op(), sample.inputs.iter().map(|i| i.ty).collect::<Vec<_>>())
}

fn engine() -> CpuEngine {
    let mut engine = CpuEngine::new(Arc::new(cpu_kernels()));
    engine.set_checks(Checks { poison: true, numerics: false });
    engine
}

/// A program with the sample's op, the values of its inputs, named in0, in1, ..., and those of its outputs.
/// With `as_parameters`, inputs that the sample marks as parameters are parameters.
fn trace(
    sample: &Sample,
    inputs: &[HostTensor],
    as_parameters: bool,
) -> (Program, Vec<ValueId>, Vec<ValueId>) {
    let mut tracer = Tracer::default();
    let ids: Vec<ValueId> = (sample.inputs.iter().zip(inputs).enumerate())
        .map(|(n, (s, t))| match as_parameters && s.parameter {
            true => tracer.parameter(&format!("in{n}"), t.ty()),
            false => tracer.input(&format!("in{n}"), t.ty()),
        })
        .collect();
    let outputs = match &sample.op {
        SampleOp::Forward(op) => tracer.apply_code(Code::Forward(op.clone()), &ids),
        SampleOp::Plain(op) => tracer.apply_code(Code::Plain(op.clone()), &ids),
    }
    .unwrap_or_else(|e| panic!("{}: {e}", describe(sample)));
    (tracer.finish(), ids, outputs)
}

fn name_output(program: &mut Program, id: ValueId, name: String) {
    program.values[id.0 as usize].storage = Storage::Output { name: name.into() };
}

/// A program with only the sample's op, its outputs named out0, out1, ...
fn forward_case(sample: &Sample, dtype: DType, seed: u64) -> Case {
    let inputs = sample.tensors(dtype, seed);
    let (mut program, _, outputs) = trace(sample, &inputs, false);
    let types = outputs.iter().map(|&o| program.ty(o)).collect();
    for (k, &o) in outputs.iter().enumerate() {
        name_output(&mut program, o, format!("out{k}"));
    }
    let mut engine = engine();
    let id = engine.load(program).expect("every op has a CPU kernel");
    Case { engine, id, inputs, outputs: types }
}

impl Case {
    fn run(&mut self, inputs: &[HostTensor]) -> Vec<Vec<u8>> {
        for (n, t) in inputs.iter().enumerate() {
            self.engine.write_input(self.id, &format!("in{n}"), t.bytes()).expect("input");
        }
        self.engine.run(self.id, Part::Whole).expect("run");
        let outputs = self.engine.outputs(self.id).expect("outputs");
        (0..self.outputs.len()).map(|k| outputs.get(&format!("out{k}")).expect("output").to_vec()).collect()
    }

    fn run_f64(&mut self, inputs: &[HostTensor]) -> Vec<Vec<f64>> {
        let raw = self.run(inputs);
        raw.iter().zip(&self.outputs).map(|(bytes, ty)| decode(*ty, bytes)).collect()
    }
}

fn decode(ty: TensorType, bytes: &[u8]) -> Vec<f64> {
    let mut t = HostTensor::zeros(ty);
    t.bytes_mut().copy_from_slice(bytes);
    t.to_f64()
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(x, y)| x - y));
    difference / norm(&mut b.iter().copied()).max(1e-30)
}

#[test]
fn gradients_agree_with_central_differences_in_f64() {
    for sample in samples() {
        let SampleOp::Forward(_) = &sample.op else { continue };
        let seed = seed();
        let mut case = forward_case(&sample, DType::F64, seed);
        let inputs = case.inputs.clone();
        let base = case.run_f64(&inputs);
        assert!(
            base.iter().flatten().all(|x| x.is_finite()),
            "{}: an output was not written",
            describe(&sample)
        );

        // The number that is differentiated: a randomly weighted sum of all outputs.
        let weights: Vec<HostTensor> = (0..sample.roots)
            .map(|k| {
                let mut w = vec![0.0; case.outputs[k].numel()];
                Philox::new(seed, 1, k as u32).fill_normal(1.0, &mut w);
                let w: Vec<f64> = w.into_iter().map(|x| if sample.loss { 1.0 } else { x.into() }).collect();
                HostTensor::from_f64(case.outputs[k], &w)
            })
            .collect();
        let score = |outputs: &[Vec<f64>]| -> f64 {
            weights
                .iter()
                .zip(outputs)
                .map(|(w, o)| w.to_f64().iter().zip(o).map(|(w, o)| w * o).sum::<f64>())
                .sum()
        };
        let analytic = gradients(&sample, &inputs, &weights, false);
        for (n, input) in inputs.iter().enumerate().filter(|(_, i)| i.ty().dtype == DType::F64) {
            let Some(analytic) = &analytic[n] else { continue };
            let values = input.to_f64();
            let numeric: Vec<f64> = (0..values.len())
                .map(|j| {
                    let mut probe = |step: f64| {
                        let mut moved = values.clone();
                        moved[j] += step;
                        let mut all = inputs.clone();
                        all[n] = HostTensor::from_f64(input.ty(), &moved);
                        score(&case.run_f64(&all))
                    };
                    // A central difference of fourth order: its error, of order h^4, is far below the bar.
                    let h = 1e-3;
                    (8.0 * (probe(h) - probe(-h)) - (probe(2.0 * h) - probe(-2.0 * h))) / (12.0 * h)
                })
                .collect();
            let error = relative(analytic, &numeric);
            assert!(error < 1e-6, "{}: gradient of input {n} is off by {error:e}", describe(&sample));
        }
    }
}

/// Gradients of the float inputs from the op's backward. With `as_parameters` the program runs two
/// micro-steps, which doubles the gradients of parameters.
fn gradients(
    sample: &Sample,
    inputs: &[HostTensor],
    weights: &[HostTensor],
    as_parameters: bool,
) -> Vec<Option<Vec<f64>>> {
    let (mut program, ids, outputs) = trace(sample, inputs, as_parameters);
    let mut seeds = Vec::new();
    let mut roots = Vec::new();
    for (k, w) in weights.iter().enumerate() {
        let name = format!("dout{k}");
        let grad =
            (!sample.loss).then(|| program.add_value(w.ty(), Storage::Input { name: name.as_str().into() }));
        roots.push(Root { value: outputs[k], grad });
        seeds.extend(grad.map(|grad| (name, grad, w.clone())));
    }
    let wrt: Vec<ValueId> =
        (0..ids.len()).filter(|&n| inputs[n].ty().dtype.is_float()).map(|n| ids[n]).collect();
    let parameters: Vec<(usize, String)> = (program.parameters.iter())
        .filter_map(|p| Some((ids.iter().position(|&v| v == p.master)?, p.name.to_string())))
        .collect();
    let is_parameter = |v: &ValueId| parameters.iter().any(|(n, _)| ids[*n] == *v);
    let plain: Vec<ValueId> = wrt.iter().copied().filter(|v| !is_parameter(v)).collect();
    let (mut program, grads) = backward::backward(program, &roots, &plain, &PassSet)
        .unwrap_or_else(|e| panic!("{}: {e}", describe(sample)));
    let mut named = HashMap::new();
    for &g in grads.iter().flatten() {
        if matches!(program.value(g).storage, Storage::Transient) {
            name_output(&mut program, g, format!("grad{}", g.0));
            named.insert(g, program.ty(g));
        }
    }
    let mut engine = engine();
    let id = engine.load(program).expect("every op has a CPU kernel");
    for (n, t) in inputs.iter().enumerate() {
        match parameters.iter().find(|(m, _)| *m == n) {
            Some((_, name)) => engine.write_state(StateKind::Master, name, t.bytes()).expect("parameter"),
            None => engine.write_input(id, &format!("in{n}"), t.bytes()).expect("input"),
        }
    }
    for (name, _, t) in &seeds {
        engine.write_input(id, name, t.bytes()).expect("seed");
    }
    engine.run(id, Part::First).expect("first micro-step");
    if as_parameters {
        engine.run(id, Part::Next).expect("next micro-step");
    }
    let outputs = engine.outputs(id).expect("outputs");
    (0..ids.len())
        .map(|n| {
            if let Some((_, name)) = parameters.iter().find(|(m, _)| *m == n) {
                let bytes = engine.read_state(StateKind::Gradient, name).expect("gradient");
                return Some(decode(inputs[n].ty(), &bytes));
            }
            let grad = grads[plain.iter().position(|v| *v == ids[n])?]?;
            match named.get(&grad) {
                Some(&ty) => Some(decode(ty, outputs.get(&format!("grad{}", grad.0)).expect("gradient"))),
                // The gradient of a sum's operand is the output's gradient itself.
                None => seeds.iter().find(|(_, seed, _)| *seed == grad).map(|(_, _, t)| t.to_f64()),
            }
        })
        .collect()
}

#[test]
fn gradients_of_parameters_accumulate_over_micro_steps() {
    for sample in samples() {
        let (SampleOp::Forward(_), true) = (&sample.op, sample.inputs.iter().any(|i| i.parameter)) else {
            continue;
        };
        let seed = seed();
        let case = forward_case(&sample, DType::F64, seed);
        let weights: Vec<HostTensor> = case.outputs[..sample.roots]
            .iter()
            .map(|&ty| HostTensor::from_f64(ty, &vec![1.0; ty.numel()]))
            .collect();
        let once = gradients(&sample, &case.inputs, &weights, false);
        let twice = gradients(&sample, &case.inputs, &weights, true);
        for (n, input) in sample.inputs.iter().enumerate().filter(|(_, i)| i.parameter) {
            let (Some(once), Some(twice)) = (&once[n], &twice[n]) else {
                panic!("{input:?} has no gradient")
            };
            let doubled: Vec<f64> = once.iter().map(|x| 2.0 * x).collect();
            assert!(relative(twice, &doubled) < 1e-12, "{}: parameter {n}", describe(&sample));
        }
    }
}

#[test]
fn bf16_is_as_near_to_f32_as_its_rounding_allows() {
    for sample in samples() {
        let seed = seed();
        let mut narrow = forward_case(&sample, DType::BF16, seed);
        let inputs = narrow.inputs.clone();
        let found = narrow.run_f64(&inputs);
        let mut wide = forward_case(&sample, DType::F32, seed);
        let same: Vec<HostTensor> = inputs
            .iter()
            .zip(&wide.inputs)
            .map(|(narrow, wide)| HostTensor::from_f64(wide.ty(), &narrow.to_f64()))
            .collect();
        let expected = wide.run_f64(&same);
        for (k, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let is_tail = registry::ragged_ops().leaves_undefined(sample.op(), k);
            let is_defined = |b: &&f64| !(is_tail && b.is_nan());
            let squares = expected.iter().filter(is_defined).map(|x| x * x).sum::<f64>();
            let rms = (squares / expected.len() as f64).sqrt();
            for (a, b) in found.iter().zip(expected).filter(|(_, b)| is_defined(b)) {
                assert!(
                    (a - b).abs() <= 1.6e-2 * (b.abs() + 2.0 * rms),
                    "{}: output {k}: {a} instead of {b}",
                    describe(&sample)
                );
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_unread_tails() {
    let all: Vec<Sample> = samples().into_iter().chain(registry::gpu_samples(1)).collect();
    let (mut declared, mut shown) = (BTreeSet::new(), BTreeSet::new());
    let ragged = registry::ragged_ops();
    for sample in &all {
        let op = sample.op();
        let reads_tail = |n: usize| ragged.find(op).is_none_or(|op| op.reads_tail(n));
        declared.extend((0..sample.inputs.len()).filter(|n| !reads_tail(*n)).map(|n| (op.name(), n)));
        let seed = seed();
        let poisoned = sample.tensors(DType::F32, seed);
        let is_poisoned = |n: &usize| {
            let has_nans = sample.inputs[*n].tail.is_some();
            has_nans && poisoned[*n].to_f64().iter().any(|x| x.is_nan())
        };
        let tails: Vec<usize> = (0..sample.inputs.len()).filter(is_poisoned).collect();
        if tails.is_empty() {
            continue;
        }
        shown.extend(tails.iter().map(|n| (op.name(), *n)));
        let mut clean = poisoned.clone();
        for &n in &tails {
            assert!(!reads_tail(n), "{}: input {n} must not have NaNs", describe(sample));
            let values: Vec<f64> =
                clean[n].to_f64().into_iter().map(|x| if x.is_nan() { 0.0 } else { x }).collect();
            clean[n] = HostTensor::from_f64(clean[n].ty(), &values);
        }
        let mut case = forward_case(sample, DType::F32, seed);
        assert!(case.run(&poisoned) == case.run(&clean), "{} depends on a tail", describe(sample));
    }
    let missing: Vec<_> = declared.difference(&shown).collect();
    assert!(missing.is_empty(), "no sample has NaNs in the tails of {missing:?}");
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for (sample, dtype) in
        large_samples().iter().flat_map(|sample| [(sample, DType::F32), (sample, DType::BF16)])
    {
        let mut case = forward_case(sample, dtype, seed());
        let inputs = case.inputs.clone();
        let mut outputs_on = |threads: usize| on_threads(threads, || case.run(&inputs));
        let on_one = outputs_on(1);
        assert!((2..6).all(|threads| outputs_on(threads) == on_one), "{} in {dtype}", describe(sample));
    }
}

#[test]
fn a_gradient_that_overflows_where_it_is_added_is_named() {
    let ty = TensorType::new(DType::F32, [1, 1]);
    let mut tracer = Tracer::default();
    let w = tracer.parameter("w", ty);
    let uses = ["first", "second"].map(|name| {
        let x = tracer.input(name, ty);
        tracer.apply(Linear, &[x, w]).expect("valid operands")[0]
    });
    let mut program = tracer.finish();
    let seed = program.add_value(ty, Storage::Input { name: "seed".into() });
    let roots = uses.map(|value| Root { value, grad: Some(seed) });
    let (program, _) = backward::backward(program, &roots, &[], &PassSet).expect("a backward");
    let mut engine = engine();
    engine.set_checks(Checks { poison: false, numerics: true });
    let id = engine.load(program).expect("loads");
    let mut run = |first: f32| {
        for (name, x) in [("first", first), ("second", 1.0), ("seed", 1e30)] {
            engine.write_input(id, name, &x.to_le_bytes()).expect("an input");
        }
        engine.run(id, Part::Whole)
    };
    run(1.0).expect("all is finite");
    // The gradient of the second use is assigned, and that of the first is then added to it.
    assert!(matches!(run(1e30), Err(EngineError::NonFinite { op: "linear_wgrad", .. })));
}
