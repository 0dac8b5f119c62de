//! The feed-forward of experts, from the router to the sum of a token's experts, against the plain sum over
//! all experts with gates that are 0 where an expert is not chosen; against the dense feed-forward; and with
//! its forward recomputed.

mod ranks;

use std::sync::Arc;
use xtrain_ops::PassSet;
use xtrain_ops::dispatch::Dispatch;
use xtrain_ops::grouped_linear::GroupedLinear;
use xtrain_ops::groups::Groups;
use xtrain_ops::linear::{Linear, UnroundedLinear};
use xtrain_ops::permute::{Permute, PermuteGates, Unpermute};
use xtrain_ops::registry::cpu_kernels;
use xtrain_ops::rewrites;
use xtrain_ops::route::{Route, Router, Score};
use xtrain_ops::router_losses::RouterLosses;
use xtrain_ops::swiglu::Swiglu;
use xtrain_program::{Program, Recompute, Role, Root, Storage, Tracer, ValueId, backward, fuse, recompute};
use xtrain_runtime::{CpuEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, Shape, TensorType};

/// A layer of experts: t tokens of width d, e experts of width f.
#[derive(Clone, Copy)]
struct Layer {
    t: usize,
    d: usize,
    e: usize,
    f: usize,
    align: usize,
    router: Router,
    /// True if every third token is padding.
    padded: bool,
    /// True if a shared expert's output is added.
    shared: bool,
    /// Added to the bias of the last expert.
    favour: f64,
}

const SOFTMAX: Router = Router::SOFTMAX_TOP2;
const SIGMOID: Router = Router { score: Score::Sigmoid, biased: true, scale: 2.5, ..SOFTMAX };
const LAYER: Layer =
    Layer { t: 13, d: 7, e: 5, f: 6, align: 4, router: SOFTMAX, padded: false, shared: false, favour: 0.0 };

type Named = Vec<(&'static str, HostTensor)>;

fn normal(dtype: DType, shape: &[usize], site: u32) -> HostTensor {
    let ty = TensorType { dtype, shape: Shape::new(shape) };
    let mut x = vec![0.0; ty.numel()];
    Philox::new(9, 0, site).fill_normal(0.7, &mut x);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

impl Layer {
    /// The inputs that are differentiated, then the others.
    fn inputs(&self, dtype: DType) -> [Named; 2] {
        let Layer { t, d, e, f, .. } = *self;
        let mut differentiated = vec![
            ("x", normal(dtype, &[t, d], 0)),
            ("router", normal(dtype, &[e, d], 1)),
            ("gate_up", normal(dtype, &[e * 2 * f, d], 2)),
            ("down", normal(dtype, &[e * d, f], 3)),
        ];
        if self.shared {
            differentiated.push(("shared", normal(dtype, &[t, d], 4)));
        }
        let mut others = Vec::new();
        if self.router.biased {
            let mut bias = normal(dtype, &[e], 5).to_f64();
            bias[e - 1] += self.favour;
            others.push(("bias", HostTensor::from_f64(TensorType::new(dtype, [e]), &bias)));
        }
        if self.padded {
            let targets: Vec<f64> = (0..t).map(|n| if n % 3 == 2 { -100.0 } else { n as f64 }).collect();
            others.push(("targets", HostTensor::from_f64(TensorType::new(DType::I32, [t]), &targets)));
        }
        [differentiated, others]
    }

    /// Traces the layer. Returns its output and the objective of the router.
    fn trace(&self, tracer: &mut Tracer, value: &dyn Fn(&str) -> Option<ValueId>) -> [ValueId; 2] {
        let [x, router, gate_up, down] =
            ["x", "router", "gate_up", "down"].map(|name| value(name).expect("an input"));
        let (experts, live_rows) = (self.e, self.t * self.router.top_k);
        let mut apply = |op: Arc<dyn xtrain_program::Differentiable>, inputs: &[ValueId]| {
            tracer.apply_code(xtrain_program::Code::Forward(op), inputs).expect("operands that fit")
        };
        let logits = apply(Arc::new(UnroundedLinear { in_fp8: false }), &[x, router])[0];
        let route: Vec<_> = [logits].into_iter().chain(value("bias")).chain(value("targets")).collect();
        let [gates, ids] = apply(Arc::new(Route(self.router)), &route)[..] else {
            unreachable!("two outputs")
        };
        let dispatch = Dispatch { experts, align: self.align };
        let [starts, counts, rows, sources] = apply(Arc::new(dispatch), &[ids])[..] else {
            unreachable!("four outputs")
        };
        let x_c = apply(Arc::new(Permute::default()), &[x, sources, rows])[0];
        let gates_c = apply(Arc::new(PermuteGates), &[gates, sources, rows])[0];
        let linear = || Arc::new(GroupedLinear::new(Groups { experts, align: self.align, live_rows }));
        let gate_up = apply(linear(), &[x_c, gate_up, starts])[0];
        let activated = apply(Arc::new(Swiglu::WEIGHTED), &[gate_up, gates_c, starts])[0];
        let y_c = apply(linear(), &[activated, down, starts])[0];
        let summed: Vec<_> = [y_c, sources, rows].into_iter().chain(value("shared")).collect();
        let out = apply(Arc::new(Unpermute), &summed)[0];
        let losses = RouterLosses { score: self.router.score, balance_weight: 0.1, z_weight: 0.01 };
        let inv_tokens = value("inv_tokens").expect("an input");
        let objective = apply(Arc::new(losses), &[logits, ids, counts, inv_tokens])[0];
        tracer.output("ids", ids);
        [out, objective]
    }
}

/// A traced layer with its backward. The gradient of input `x` is the output `dx`, and so on.
fn differentiated(
    inputs: &[Named; 2],
    trace: impl FnOnce(&mut Tracer, &dyn Fn(&str) -> Option<ValueId>) -> (ValueId, Option<ValueId>),
) -> Program {
    let mut tracer = Tracer::default();
    let ids: Vec<(&str, ValueId)> =
        inputs.iter().flatten().map(|(name, tensor)| (*name, tracer.input(name, tensor.ty()))).collect();
    let value = |name: &str| ids.iter().find(|(other, _)| *other == name).map(|(_, id)| *id);
    tracer.enter_block(Some(0));
    let (out, objective) = trace(&mut tracer, &value);
    tracer.output("out", out);
    let mut program = tracer.finish();
    let seed = program.add_value(program.ty(out), Storage::Input { name: "dout".into() });
    let roots: Vec<Root> = [Root { value: out, grad: Some(seed) }]
        .into_iter()
        .chain(objective.map(|value| Root { value, grad: None }))
        .collect();
    let wrt: Vec<ValueId> = inputs[0].iter().filter_map(|(name, _)| value(name)).collect();
    let (mut program, grads) = backward::backward(program, &roots, &wrt, &PassSet).expect("a backward");
    for ((name, _), grad) in inputs[0].iter().zip(grads) {
        // The gradient of the shared expert's output is the output's.
        let grad = grad.expect("a gradient");
        if grad != seed {
            program.values[grad.0 as usize].storage = Storage::Output { name: format!("d{name}").into() };
        }
    }
    program
}

/// The outputs of a program, by name.
struct Outputs(Vec<(String, TensorType, Vec<u8>)>);

impl Outputs {
    fn of(program: Program, inputs: &[Named; 2], dout: &HostTensor) -> Outputs {
        Outputs::by(CpuEngine::new(Arc::new(cpu_kernels())), program, inputs, dout)
    }

    /// The outputs that this engine computes.
    fn by(mut engine: CpuEngine, program: Program, inputs: &[Named; 2], dout: &HostTensor) -> Outputs {
        let named: Vec<_> = program.outputs().map(|(name, id)| (name.to_string(), program.ty(id))).collect();
        let id = engine.load(program).expect("every op has a CPU kernel");
        for (name, tensor) in inputs.iter().flatten() {
            engine.write_input(id, name, tensor.bytes()).expect("an input");
        }
        engine.write_input(id, "dout", dout.bytes()).expect("an input");
        engine.run(id, Part::Whole).expect("a run");
        let values = engine.outputs(id).expect("outputs");
        let bytes = |name: &str| values.get(name).expect("an output").to_vec();
        Outputs(named.into_iter().map(|(name, ty)| (name.clone(), ty, bytes(&name))).collect())
    }

    fn get(&self, name: &str) -> Vec<f64> {
        let (_, ty, bytes) = self.0.iter().find(|(other, ..)| other == name).expect("an output");
        let mut tensor = HostTensor::zeros(*ty);
        tensor.bytes_mut().copy_from_slice(bytes);
        tensor.to_f64()
    }
}

fn inv_tokens(dtype: DType, t: usize) -> (&'static str, HostTensor) {
    ("inv_tokens", HostTensor::from_f64(TensorType::new(dtype, []), &[1.0 / t as f64]))
}

fn assert_near(what: &str, found: &[f64], expected: &[f64], bar: f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let scale = norm(&mut expected.iter().copied());
    assert!(error <= bar * scale.max(1e-3), "{what} is off by {error:e} of {scale:e}");
}

/// `a_mk b_nk^T`.
fn times_transposed(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    a.chunks(k).flat_map(|a| b.chunks(k).map(move |b| dot(a, b))).collect()
}

fn transposed(a: &[f64], cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|col| a.iter().skip(col).step_by(cols).copied()).collect()
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The output of the layer without the shared expert, and the gradients of x, router, gate_up and down: every
/// expert computes all tokens.
fn sum_over_all_experts(layer: &Layer, inputs: &Named, dout: &[f64], ids: &[f64]) -> [Vec<f64>; 5] {
    let Layer { t, d, e, f, router, .. } = *layer;
    let [x, w_router, w_gate_up, w_down] = [0, 1, 2, 3].map(|n| inputs[n].1.to_f64());
    let logits = times_transposed(&x, &w_router, d);
    let scores: Vec<f64> = logits
        .chunks(e)
        .flat_map(|row| {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(move |x| if router.score == Score::Softmax { x.exp() / sum } else { sigmoid(*x) })
        })
        .collect();
    let is_chosen =
        |token: usize, expert: usize| ids[token * router.top_k..][..router.top_k].contains(&(expert as f64));
    let of_chosen = |token: usize, f: &dyn Fn(usize) -> f64| -> f64 {
        (0..e).filter(|expert| is_chosen(token, *expert)).map(|expert| f(token * e + expert)).sum()
    };
    // Gates and their gradients, [t, e].
    let mut gates = vec![0.0; t * e];
    for n in (0..t * e).filter(|n| is_chosen(n / e, n % e)) {
        let divisor = if router.normalise { of_chosen(n / e, &|n| scores[n]) } else { 1.0 };
        gates[n] = f64::from(router.scale) * scores[n] / divisor;
    }
    let mut dgates = vec![0.0; t * e];
    let (mut out, mut dx) = (vec![0.0; t * d], vec![0.0; t * d]);
    let (mut dgate_up, mut ddown) = (Vec::new(), Vec::new());
    for expert in 0..e {
        let w_gate_up = &w_gate_up[expert * 2 * f * d..][..2 * f * d];
        let w_down = &w_down[expert * d * f..][..d * f];
        let both = times_transposed(&x, w_gate_up, d);
        let da = times_transposed(dout, &transposed(w_down, f), d);
        let (mut a, mut dboth) = (vec![0.0; t * f], vec![0.0; t * 2 * f]);
        for (token, j) in (0..t).flat_map(|token| (0..f).map(move |j| (token, j))) {
            let (gate, up) = (both[token * 2 * f + j], both[token * 2 * f + f + j]);
            let (weight, s) = (gates[token * e + expert], sigmoid(gate));
            let da = da[token * f + j];
            a[token * f + j] = weight * gate * s * up;
            dgates[token * e + expert] += da * gate * s * up;
            dboth[token * 2 * f + j] = weight * da * up * s * (1.0 + gate * (1.0 - s));
            dboth[token * 2 * f + f + j] = weight * da * gate * s;
        }
        add(&mut out, &times_transposed(&a, w_down, f));
        add(&mut dx, &times_transposed(&dboth, &transposed(w_gate_up, d), 2 * f));
        dgate_up.extend(times_transposed(&transposed(&dboth, 2 * f), &transposed(&x, d), t));
        ddown.extend(times_transposed(&transposed(dout, d), &transposed(&a, f), t));
    }
    let mut dlogits = vec![0.0; t * e];
    for token in 0..t {
        let sum = of_chosen(token, &|n| scores[n]);
        let dot = of_chosen(token, &|n| dgates[n] * scores[n]);
        let dscore = |n: usize| match (is_chosen(token, n % e), router.normalise) {
            (false, _) => 0.0,
            (true, true) => f64::from(router.scale) * (dgates[n] / sum - dot / (sum * sum)),
            (true, false) => f64::from(router.scale) * dgates[n],
        };
        let mean: f64 = (token * e..(token + 1) * e).map(|n| dscore(n) * scores[n]).sum();
        for n in token * e..(token + 1) * e {
            dlogits[n] = match router.score {
                Score::Softmax => scores[n] * (dscore(n) - mean),
                Score::Sigmoid => dscore(n) * scores[n] * (1.0 - scores[n]),
            };
        }
    }
    add(&mut dx, &times_transposed(&dlogits, &transposed(&w_router, d), e));
    let drouter = times_transposed(&transposed(&dlogits, e), &transposed(&x, d), t);
    [out, dx, drouter, dgate_up, ddown]
}

#[test]
fn the_layer_is_the_sum_over_all_experts_with_gates() {
    let layers = [
        ("two of five", LAYER),
        ("one token", Layer { t: 1, e: 3, ..LAYER }),
        ("all experts", Layer { t: 6, e: 4, router: Router { top_k: 4, ..SOFTMAX }, ..LAYER }),
        (
            "fewer copies than experts",
            Layer { t: 2, e: 8, router: Router { top_k: 1, normalise: false, ..SOFTMAX }, ..LAYER },
        ),
        (
            "all tokens to one expert",
            Layer { router: Router { top_k: 1, normalise: false, ..SIGMOID }, favour: 9.0, ..LAYER },
        ),
        ("experts without tokens", Layer { e: 24, favour: 9.0, align: 16, router: SIGMOID, ..LAYER }),
        (
            "groups, padding and a shared expert",
            Layer {
                t: 20,
                e: 8,
                router: Router { groups: 4, top_groups: 2, ..SIGMOID },
                padded: true,
                shared: true,
                ..LAYER
            },
        ),
        ("no alignment", Layer { align: 1, router: Router { normalise: false, ..SOFTMAX }, ..LAYER }),
    ];
    for (name, layer) in layers {
        let mut inputs = layer.inputs(DType::F64);
        inputs[1].push(inv_tokens(DType::F64, layer.t));
        let program = differentiated(&inputs, |tracer, value| (layer.trace(tracer, value)[0], None));
        let dout = normal(DType::F64, &[layer.t, layer.d], 6);
        let found = Outputs::of(program, &inputs, &dout);
        let ids = found.get("ids");
        if layer.favour > 0.0 && layer.router.top_k == 1 {
            assert!(ids.iter().all(|id| *id == layer.e as f64 - 1.0), "{ids:?}");
        }
        let [mut out, dx, drouter, dgate_up, ddown] =
            sum_over_all_experts(&layer, &inputs[0], &dout.to_f64(), &ids);
        if layer.shared {
            add(&mut out, &inputs[0][4].1.to_f64());
        }
        for (output, expected) in
            [("out", out), ("dx", dx), ("drouter", drouter), ("dgate_up", dgate_up), ("ddown", ddown)]
        {
            assert_near(&format!("{name}: {output}"), &found.get(output), &expected, 1e-9);
        }
    }
}

#[test]
fn one_expert_of_one_is_the_dense_feed_forward() {
    let layer = Layer { e: 1, router: Router { top_k: 1, ..SOFTMAX }, ..LAYER };
    let mut inputs = layer.inputs(DType::F64);
    inputs[1].push(inv_tokens(DType::F64, layer.t));
    let dout = normal(DType::F64, &[layer.t, layer.d], 6);
    let program = differentiated(&inputs, |tracer, value| (layer.trace(tracer, value)[0], None));
    let experts = Outputs::of(program, &inputs, &dout);
    let [mut differentiable, _] = layer.inputs(DType::F64);
    differentiable.remove(1);
    let inputs = [differentiable, Vec::new()];
    let program = differentiated(&inputs, |tracer, value| {
        let [x, gate_up, down] = ["x", "gate_up", "down"].map(|name| value(name).expect("an input"));
        let gate_up = tracer.apply(Linear, &[x, gate_up]).expect("operands that fit")[0];
        let activated = tracer.apply(Swiglu::PLAIN, &[gate_up]).expect("operands that fit")[0];
        (tracer.apply(Linear, &[activated, down]).expect("operands that fit")[0], None)
    });
    let dense = Outputs::of(program, &inputs, &dout);
    for output in ["out", "dx", "dgate_up", "ddown"] {
        assert_near(output, &experts.get(output), &dense.get(output), 1e-12);
    }
    assert!(experts.get("drouter").iter().all(|x| x.abs() < 1e-12));
}

#[test]
fn recomputing_the_layer_changes_no_bit_and_routes_once() {
    for dtype in [DType::F32, DType::BF16] {
        let layer = Layer { t: 40, d: 24, f: 16, padded: true, ..LAYER };
        let mut inputs = layer.inputs(dtype);
        inputs[1].push(inv_tokens(DType::F32, layer.t));
        let dout = normal(dtype, &[layer.t, layer.d], 6);
        let program = differentiated(&inputs, |tracer, value| {
            let [out, objective] = layer.trace(tracer, value);
            (out, Some(objective))
        });
        let saved = Outputs::of(program.clone(), &inputs, &dout);
        for policy in [Recompute::Norms, Recompute::Block] {
            let again = recompute::apply(program.clone(), policy, None).expect("a program");
            let recomputed: Vec<_> = (again.instances.iter())
                .filter(|i| i.origin.role == Role::Recompute)
                .map(|i| i.code.op().name())
                .collect();
            for once in ["route", "dispatch", "router_losses"] {
                assert!(!recomputed.contains(&once), "{once} runs twice with {policy:?}");
            }
            for cheap in ["permute", "permute_gates", "swiglu"] {
                assert!(recomputed.contains(&cheap), "{cheap} is saved with {policy:?}");
            }
            let fused = fuse::apply(again.clone(), rewrites::ALL).expect("a program");
            let swiglus = fused.instances.iter().filter(|i| i.code.op().name() == "swiglu").count();
            assert_eq!(swiglus, 1, "its gradient recomputes it: {fused}");
            for other in [again, fused] {
                let other = Outputs::of(other, &inputs, &dout);
                for (name, _, bytes) in &saved.0 {
                    let (_, _, found) = other.0.iter().find(|(other, ..)| other == name).expect("an output");
                    assert!(found == bytes, "{name} in {dtype} with {policy:?}");
                }
            }
        }
    }
}
