//! The layer over ranks that share its experts: each with tokens and experts of its own.

use super::{
    LAYER, Layer, Named, Outputs, SIGMOID, add, assert_near, differentiated, normal, sum_over_all_experts,
};
use std::sync::Arc;
use std::thread;
use xtrain_distributed::{Communicator, ThreadCommunicator};
use xtrain_ops::dispatch::DispatchOwn;
use xtrain_ops::grouped_linear::GroupedLinear;
use xtrain_ops::groups::Groups;
use xtrain_ops::linear::UnroundedLinear;
use xtrain_ops::owners::{GatherGates, GatherTokens, Sharing, SumOwners};
use xtrain_ops::permute::{Permute, PermuteByTree, PermuteGates, Unpermute, UnpermuteTree};
use xtrain_ops::registry::cpu_kernels;
use xtrain_ops::route::{Route, Router};
use xtrain_ops::swiglu::Swiglu;
use xtrain_program::{Code, Differentiable, Groups as RankGroups, Program, Tail, Tracer, ValueId};
use xtrain_runtime::CpuEngine;
use xtrain_tensor::{DType, HostTensor, TensorType};

/// A layer whose experts so many ranks share. Sums are those of any world if there is a tree.
#[derive(Clone, Copy)]
struct Shared {
    layer: Layer,
    ranks: usize,
    tree: bool,
}

impl Shared {
    fn sharing(&self) -> Sharing {
        Sharing { groups: RankGroups::world(self.ranks), experts: self.layer.e / self.ranks }
    }

    /// The layer of a rank with its tokens. Returns its output.
    fn trace(&self, tracer: &mut Tracer, value: &dyn Fn(&str) -> Option<ValueId>) -> ValueId {
        let Shared { layer, ranks, tree: has_tree } = *self;
        let [x, router, gate_up, down, place] =
            ["x", "router", "gate_up", "down", "place"].map(|name| value(name).expect("an input"));
        let (sharing, experts) = (self.sharing(), layer.e / ranks);
        let apply = |tracer: &mut Tracer, op: Arc<dyn Differentiable>, inputs: &[ValueId]| {
            tracer.apply_code(Code::Forward(op), inputs).expect("operands that fit")
        };
        let tree = has_tree.then_some(UnpermuteTree {
            experts,
            groups: UnpermuteTree::groups_of(layer.e) / ranks,
            rounded: false,
        });
        let logits = apply(tracer, Arc::new(UnroundedLinear { in_fp8: false }), &[x, router])[0];
        let route: Vec<_> = [logits].into_iter().chain(value("bias")).chain(value("targets")).collect();
        let routed = apply(tracer, Arc::new(Route(layer.router)), &route);
        let (gates, ids) = (routed[0], routed[1]);
        tracer.output("ids", ids);
        let ids_all = tracer.emit(sharing.gather(layer.t), &[ids]).expect("a gather")[0];
        let gates = apply(tracer, Arc::new(GatherGates(sharing)), &[gates, ids])[0];
        let x_all = apply(tracer, Arc::new(GatherTokens(sharing)), &[x, ids])[0];
        let dispatch = DispatchOwn { experts, ranks, align: layer.align, room: None, by_source: has_tree };
        let dispatched = apply(tracer, Arc::new(dispatch), &[ids_all, place]);
        let [starts, rows, sources] = [0, 2, 3].map(|n| dispatched[n]);
        let x_c = match tree {
            Some(tree) => {
                let permute = PermuteByTree { tree, tail: Tail::Zeros };
                apply(tracer, Arc::new(permute), &[x_all, sources, rows, ids_all])[0]
            }
            None => apply(tracer, Arc::new(Permute::default()), &[x_all, sources, rows])[0],
        };
        let gates_c = apply(tracer, Arc::new(PermuteGates), &[gates, sources, rows])[0];
        let live_rows = layer.t * layer.router.top_k;
        let linear = || Arc::new(GroupedLinear::new(Groups { experts, align: layer.align, live_rows }));
        let gate_up = apply(tracer, linear(), &[x_c, gate_up, starts])[0];
        let activated = apply(tracer, Arc::new(Swiglu::WEIGHTED), &[gate_up, gates_c, starts])[0];
        let y_c = apply(tracer, linear(), &[activated, down, starts])[0];
        let part = match tree {
            Some(tree) => apply(tracer, Arc::new(tree), &[y_c, sources, rows, ids_all])[0],
            None => apply(tracer, Arc::new(Unpermute), &[y_c, sources, rows])[0],
        };
        let sent = tracer.emit(sharing.exchange(layer.t), &[part]).expect("an exchange")[0];
        let inputs: Vec<_> = [sent, ids].into_iter().chain(value("shared")).collect();
        apply(tracer, Arc::new(SumOwners { experts, out: None, like: false }), &inputs)[0]
    }

    /// The inputs of a rank, of those of the whole layer.
    fn inputs(&self, rank: usize, whole: &[Named; 2]) -> [Named; 2] {
        let place = HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[rank as f64]);
        let piece = |(name, tensor): &(&'static str, HostTensor)| {
            let is_cut = !["router", "bias"].contains(name);
            (*name, if is_cut { rows(tensor, rank, self.ranks) } else { tensor.clone() })
        };
        let [differentiated, others] =
            whole.each_ref().map(|named| named.iter().map(piece).collect::<Named>());
        [differentiated, others.into_iter().chain([("place", place)]).collect()]
    }

    /// The outputs of all ranks.
    fn run(&self, whole: &[Named; 2], dout: &HostTensor) -> Vec<Outputs> {
        thread::scope(|scope| {
            let run_rank = |communicator: ThreadCommunicator| {
                let rank = communicator.rank();
                let inputs = self.inputs(rank, whole);
                let program: Program =
                    differentiated(&inputs, |tracer, value| (self.trace(tracer, value), None));
                let engine =
                    CpuEngine::new(Arc::new(cpu_kernels())).with_communicator(Arc::new(communicator));
                Outputs::by(engine, program, &inputs, &rows(dout, rank, self.ranks))
            };
            let spawn = |communicator| scope.spawn(move || run_rank(communicator));
            let handles: Vec<_> = ThreadCommunicator::world(self.ranks).into_iter().map(spawn).collect();
            handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
        })
    }
}

/// The rows of a tensor that belong to one of several ranks.
fn rows(tensor: &HostTensor, rank: usize, ranks: usize) -> HostTensor {
    let (ty, numbers) = (tensor.ty(), tensor.to_f64());
    let mut shape = ty.shape.to_vec();
    shape[0] /= ranks;
    let piece = TensorType { dtype: ty.dtype, shape: xtrain_tensor::Shape::new(&shape) };
    HostTensor::from_f64(piece, &numbers[rank * piece.numel()..][..piece.numel()])
}

#[test]
fn the_layer_over_ranks_is_the_sum_over_all_experts_with_gates() {
    let layers = [
        ("two of eight", Layer { e: 8, ..LAYER }),
        ("an expert of each rank", Layer { e: 4, align: 1, ..LAYER }),
        ("fewer copies than experts", Layer { t: 1, e: 16, ..LAYER }),
        (
            "all tokens to one expert",
            Layer { e: 4, router: Router { top_k: 1, normalise: false, ..SIGMOID }, favour: 9.0, ..LAYER },
        ),
        (
            "padding and a shared expert",
            Layer {
                e: 8,
                router: Router { groups: 4, top_groups: 2, ..SIGMOID },
                padded: true,
                shared: true,
                ..LAYER
            },
        ),
    ];
    for (name, layer) in layers {
        for (ranks, tree) in [(2, false), (2, true), (4, false), (4, true)] {
            let shared = Shared { layer, ranks, tree };
            let whole = Layer { t: ranks * layer.t, ..layer };
            // Sums over the ranks of tokens are f32.
            let (dtype, bar) = if tree { (DType::F32, 1e-5) } else { (DType::F64, 1e-9) };
            let inputs = whole.inputs(dtype);
            let dout = normal(dtype, &[whole.t, layer.d], 6);
            let of_ranks = shared.run(&inputs, &dout);
            let found =
                |output: &str| -> Vec<f64> { of_ranks.iter().flat_map(|rank| rank.get(output)).collect() };
            let [mut out, dx, drouter, dgate_up, ddown] =
                sum_over_all_experts(&whole, &inputs[0], &dout.to_f64(), &found("ids"));
            if layer.shared {
                add(&mut out, &inputs[0][4].1.to_f64());
            }
            let name = format!("{name} on {ranks} ranks, tree {tree}");
            for (output, expected) in [("out", out), ("dx", dx), ("dgate_up", dgate_up), ("ddown", ddown)] {
                assert_near(&format!("{name}: {output}"), &found(output), &expected, bar);
            }
            // Each rank has the gradient of its tokens.
            let mut sum = vec![0.0; drouter.len()];
            of_ranks.iter().for_each(|rank| add(&mut sum, &rank.get("drouter")));
            assert_near(&format!("{name}: drouter"), &sum, &drouter, bar);
        }
    }
}
