//! Collectives of tokens are sent before kernels that do not need them, and nothing else changes.

use proptest::prelude::*;
use std::sync::Arc;
use xtrain_program::wire::{CastTokens, WireOps};
use xtrain_program::{
    Arithmetic, Collective, Cost, Groups, Instance, KernelCost, Lane, Op, OpError, Program, Role, Stage,
    Tracer, ValueId, overlap,
};
use xtrain_tensor::{DType, TensorType};

const GROUPS: Groups = Groups { size: 2, stride: 1 };

/// A kernel of a GEMM with this extent, or of none.
#[derive(Clone, Copy, Debug)]
struct Kernel(&'static str, usize);

impl Op for Kernel {
    fn name(&self) -> &'static str {
        self.0
    }

    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(DType::F32, [8])])
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let arithmetic = Arithmetic::Gemm { mnk: [self.1; 3], operands: DType::BF16, scaling: None };
        let kernel = KernelCost { times: 1, arithmetic, bytes: 0.0, added_bytes: 0.0 };
        match self.1 {
            0 => Cost::of_operands(Arithmetic::None, inputs, outputs),
            _ => Cost { kernels: vec![kernel], sent_bytes: 0.0 },
        }
    }
}

/// An all-gather of 32 bytes, for which a GEMM of 41^3 is enough to hide it, and one of 40^3 is not.
#[derive(Clone, Copy, Debug)]
struct Exchange(&'static str);

impl Op for Exchange {
    fn name(&self) -> &'static str {
        self.0
    }

    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(DType::F32, [16])])
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::AllGather { first: 0 }, GROUPS))
    }

    fn cost(&self, _: &[TensorType], _: &[TensorType]) -> Cost {
        Cost::of_collective(GROUPS, 32)
    }
}

struct Gathers;

impl WireOps for Gathers {
    fn cast_tokens(&self, _: &dyn Op, _: &dyn Op) -> Option<CastTokens> {
        None
    }

    fn gather_rows(&self, _: Groups, _: usize) -> Arc<dyn Op> {
        Arc::new(Exchange("gather"))
    }
}

/// Enough to hide an [`Exchange`].
const MUCH: usize = 41;

/// Adds an instance of the backward.
fn add(program: Program, role: Role, op: impl Op, inputs: &[ValueId]) -> (Program, ValueId) {
    let mut t = Tracer::new(program, Stage::Backward, role);
    let output = t.site("site").emit(op, inputs).expect("traced")[0];
    let mut program = t.finish();
    let last = program.instances.last_mut().expect("an instance");
    if last.code.op().collective().is_some() {
        last.lane = Lane::Communication;
    }
    (program, output)
}

fn names(program: &Program) -> Vec<&'static str> {
    program.instances.iter().map(|i| i.code.op().name()).collect()
}

fn with_input() -> (Program, ValueId) {
    let mut t = Tracer::default();
    let x = t.input("x", TensorType::new(DType::F32, [8]));
    (t.finish(), x)
}

#[test]
fn an_exchange_goes_before_a_wgrad_and_what_only_that_reads() {
    let (p, x) = with_input();
    let (p, gradient) = add(p, Role::Dgrad, Kernel("activation_grad", 0), &[x]);
    let (p, _) = add(p, Role::Wgrad, Kernel("earlier_wgrad", MUCH), &[gradient]);
    let (p, rows) = add(p, Role::Recompute, Kernel("rows", 0), &[x]);
    let (p, _) = add(p, Role::Wgrad, Kernel("wgrad", MUCH), &[gradient, rows]);
    let (p, dx) = add(p, Role::Dgrad, Kernel("dgrad", MUCH), &[gradient]);
    let (p, part) = add(p, Role::Dgrad, Kernel("sum", 0), &[dx]);
    let (p, sent) = add(p, Role::Dgrad, Exchange("exchange"), &[part]);
    let (p, _) = add(p, Role::Dgrad, Kernel("reader", 0), &[sent]);
    let order = names(&overlap::apply(p, &Gathers));
    let expected =
        ["activation_grad", "earlier_wgrad", "dgrad", "sum", "exchange", "rows", "wgrad", "reader"];
    assert_eq!(order, expected);
}

#[test]
fn an_exchange_goes_before_exchanges_of_gradients_but_not_where_enough_follows() {
    let (p, x) = with_input();
    let (p, gradient) = add(p, Role::Dgrad, Kernel("norm_grad", 0), &[x]);
    let (p, weight) = add(p, Role::Wgrad, Kernel("wgrad", 40), &[x]);
    let (p, _) = add(p, Role::Reduce, Exchange("reduce"), &[weight]);
    let (p, sent) = add(p, Role::Dgrad, Exchange("exchange"), &[gradient]);
    let (p, _) = add(p, Role::Dgrad, Kernel("reader", 0), &[sent]);
    assert_eq!(
        names(&overlap::apply(p.clone(), &Gathers)),
        ["norm_grad", "exchange", "wgrad", "reduce", "reader"]
    );
    let (mut p, _) = add(p, Role::Dgrad, Kernel("other", MUCH), &[x]);
    let end = p.instances.len();
    p.instances.swap(end - 1, end - 2);
    let before = names(&p);
    assert_eq!(names(&overlap::apply(p, &Gathers)), before);
}

#[test]
fn what_is_recomputed_goes_before_the_reader_of_an_exchange_until_that_is_hidden() {
    let (p, x) = with_input();
    let (p, sent) = add(p, Role::Dgrad, Exchange("exchange"), &[x]);
    let (p, read) = add(p, Role::Dgrad, Kernel("reader", 0), &[sent]);
    let (p, first) = add(p, Role::Recompute, Kernel("linear", 30), &[x]);
    let (p, _) = add(p, Role::Recompute, Kernel("with_reader", 0), &[read]);
    let (p, second) = add(p, Role::Recompute, Kernel("attention", MUCH), &[first]);
    let (p, _) = add(p, Role::Recompute, Kernel("last", 0), &[second]);
    let order = names(&overlap::apply(p, &Gathers));
    assert_eq!(order, ["exchange", "linear", "attention", "reader", "with_reader", "last"]);
}

#[test]
fn a_gather_of_tokens_does_not_wait_for_ids() {
    let (p, x) = with_input();
    let (p, tokens) = add(p, Role::Forward, Kernel("norm", 0), &[x]);
    let (p, ids) = add(p, Role::Forward, Kernel("route", 0), &[tokens]);
    let (p, gathered) = add(p, Role::Forward, Exchange("gather_tokens"), &[tokens, ids]);
    let (p, _) = add(p, Role::Forward, Kernel("reader", 0), &[gathered, ids]);
    assert_eq!(names(&overlap::apply(p, &Gathers)), ["norm", "gather", "route", "reader"]);
}

/// An instance of a random program: what it reads, its GEMM or exchange, and its role.
#[derive(Clone, Debug)]
struct Line {
    reads: Vec<prop::sample::Index>,
    flops: usize,
    exchanges: bool,
    role: Role,
}

fn line() -> impl Strategy<Value = Line> {
    let roles = prop::sample::select(vec![Role::Dgrad, Role::Wgrad, Role::Recompute, Role::Reduce]);
    let reads = prop::collection::vec(any::<prop::sample::Index>(), 1..3);
    let flops = prop::sample::select(vec![0, 0, 20, 41]);
    (reads, flops, prop::bool::weighted(0.25), roles).prop_map(|(reads, flops, exchanges, role)| Line {
        reads,
        flops,
        exchanges,
        role,
    })
}

/// True if two instances must keep their order.
fn conflict(a: &Instance, b: &Instance) -> bool {
    let writes = |i: &Instance, v: ValueId| i.outputs.iter().any(|o| o.value == v);
    let touches = |i: &Instance, v: ValueId| i.inputs.contains(&v) || writes(i, v);
    a.outputs.iter().any(|o| touches(b, o.value)) || b.outputs.iter().any(|o| touches(a, o.value))
}

proptest! {
    /// Some instances write a value that others have written before.
    #[test]
    fn every_instance_stays_and_none_passes_another_that_it_depends_on(
        lines in prop::collection::vec(line(), 1..40),
        rewrites in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3),
    ) {
        let (mut program, x) = with_input();
        let mut values = vec![x];
        for line in &lines {
            let reads: Vec<ValueId> = line.reads.iter().map(|index| *index.get(&values)).collect();
            let (next, output) = match line.exchanges {
                true => add(program, line.role, Exchange("exchange"), &reads[..1]),
                false => add(program, line.role, Kernel("kernel", line.flops), &reads),
            };
            values.push(output);
            program = next;
        }
        for (from, to) in rewrites {
            let (from, to) = (from.index(lines.len()), to.index(lines.len()));
            let is_kernel = |n: usize| program.instances[n].code.op().collective().is_none();
            if from < to && is_kernel(from) && is_kernel(to) {
                program.instances[to].outputs = program.instances[from].outputs.clone();
            }
        }
        let before = program.instances.clone();
        let after = overlap::apply(program, &Gathers).instances;
        // The line of each instance afterwards: equal ones keep their order.
        let mut left: Vec<usize> = (0..before.len()).collect();
        let mut line_of = Vec::new();
        for instance in &after {
            let same = |n: &usize| {
                let old = &before[*n];
                old.inputs == instance.inputs && old.outputs[0].value == instance.outputs[0].value
                    && old.origin == instance.origin
            };
            let found = left.iter().position(same);
            prop_assert!(found.is_some());
            line_of.push(left.remove(found.unwrap_or_default()));
        }
        prop_assert!(left.is_empty());
        for (a, &old_a) in line_of.iter().enumerate() {
            for &old_b in &line_of[a + 1..] {
                prop_assert!(old_a < old_b || !conflict(&before[old_a], &before[old_b]));
            }
        }
    }
}
