//! The feed-forward of experts and its gradients on ranks that share the experts, against one rank that has
//! all of them and takes the ranks' tokens as micro-batches: equal bits.

use super::{SelectOwner, SumOwners};
use crate::dispatch::DispatchOwn;
use crate::grouped_linear::{GroupedDgrad, GroupedLinear, GroupedWgrad};
use crate::groups::Groups;
use crate::permute::{Permute, PermuteGates, UnpermuteGates, UnpermuteTree};
use crate::run_op::{normal, run};
use crate::sum_ranks::{SumRanks, SumSources};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_tensor::{DType, HostTensor, Philox, Shape, TensorType};

const EXPERTS: usize = 16;
const TOP_K: usize = 3;
const WIDTH: usize = 24;
const FFN: usize = 10;
const GROUPS: Groups = Groups { experts: EXPERTS, align: 16, live_rows: 1 };

/// x, the gradient of the output, gates and ids of some tokens.
type Tokens = [HostTensor; 4];

/// The results of a rank: parts of the output and of the gradient of x, gradients of gates, and of the two
/// weights of its experts.
type Computed = [HostTensor; 5];

/// Tensors one after the other, as one of this shape.
fn joined(tensors: &[HostTensor], shape: &[usize]) -> HostTensor {
    let bytes: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.bytes().to_vec()).collect();
    let mut all = HostTensor::zeros(TensorType { dtype: tensors[0].ty().dtype, shape: Shape::new(shape) });
    all.bytes_mut().copy_from_slice(&bytes);
    all
}

/// The n-th of `count` equal parts of a tensor's rows.
fn part(of: &HostTensor, n: usize, count: usize) -> HostTensor {
    let (rows, cols) = of.ty().shape.rows_cols();
    let mut part = HostTensor::zeros(TensorType::new(of.ty().dtype, [rows / count, cols]));
    let len = part.bytes().len();
    part.bytes_mut().copy_from_slice(&of.bytes()[n * len..][..len]);
    part
}

/// Tokens of which some are padding; expert 0 has none.
fn tokens(count: usize, dtype: DType) -> Tokens {
    let rng = Philox::new(3, 0, 0);
    let id = |n: usize| {
        let draw = rng.word((n / TOP_K) as u64) as usize;
        let id = 1 + (draw + n % TOP_K * (1 + draw / 16 % 3)) % (EXPERTS - 1);
        if draw.is_multiple_of(6) { -1.0 } else { id as f64 }
    };
    let ids: Vec<f64> = (0..count * TOP_K).map(id).collect();
    [
        normal(dtype, [count, WIDTH], 1.0, 1),
        normal(dtype, [count, WIDTH], 1.0, 2),
        normal(DType::F32, [count, TOP_K], 0.3, 4),
        HostTensor::from_f64(TensorType::new(DType::I32, [count, TOP_K]), &ids),
    ]
}

fn computed(
    [x, dout, gates, ids]: &Tokens,
    weights: [&HostTensor; 2],
    ranks: usize,
    place: usize,
) -> Computed {
    let experts = EXPERTS / ranks;
    let dispatch = DispatchOwn { experts, ranks, align: GROUPS.align, room: None, by_source: true };
    let place_word = HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[place as f64]);
    let routing = run(&dispatch, &[ids, &place_word]);
    let [starts, rows, sources, by_source] = [0, 2, 3, 5].map(|n| &routing[n]);
    let [gate_up, down] = weights.map(|weight| part(weight, place, ranks));
    let groups = Groups { experts, ..GROUPS };
    let one = |mut outputs: Vec<HostTensor>| outputs.remove(0);
    let tree = UnpermuteTree { experts, groups: UnpermuteTree::groups_of(EXPERTS) / ranks, rounded: false };

    let x_c = one(run(&Permute::default(), &[x, sources, rows]));
    let gates_c = one(run(&PermuteGates, &[gates, sources, rows]));
    let both = one(run(&GroupedLinear::new(groups), &[&x_c, &gate_up, starts]));
    let activated = one(run(&Swiglu::WEIGHTED, &[&both, &gates_c, starts]));
    let y_c = one(run(&GroupedLinear::new(groups), &[&activated, &down, starts]));
    let out = one(run(&tree, &[&y_c, sources, rows, ids]));

    let dy_c = one(run(&Permute::default(), &[dout, sources, rows]));
    let da = one(run(&GroupedDgrad::new(groups), &[&dy_c, &down, starts]));
    let [dboth, dgates_c, ..] = &run(&SwigluGrad::WEIGHTED, &[&da, &both, &gates_c, starts])[..] else {
        panic!("two gradients")
    };
    let dx_c = one(run(&GroupedDgrad::new(groups), &[dboth, &gate_up, starts]));
    let dx = one(run(&tree, &[&dx_c, sources, rows, ids]));
    let dgates = one(run(&UnpermuteGates, &[dgates_c, sources, rows]));

    let wgrad = GroupedWgrad { groups: Groups { experts: experts * ranks, ..groups }, out: DType::F32 };
    let sum = SumSources { experts, ranks };
    let [dgate_up, ddown] = [[dboth, &x_c], [&dy_c, &activated]]
        .map(|[dy, x]| one(run(&sum, &[&one(run(&wgrad, &[dy, x, by_source]))])));
    [out, dx, dgates, dgate_up, ddown]
}

/// The output, the gradient of x and that of gates of the tokens of one rank.
fn at_home(of_ranks: &[Computed], home: usize, ids: &HostTensor, dtype: DType) -> [HostTensor; 3] {
    let (ranks, own) = (of_ranks.len(), ids.ty().shape[0]);
    let experts = EXPERTS / ranks;
    let received = |n: usize, width| {
        let pieces: Vec<_> = of_ranks.iter().map(|computed| part(&computed[n], home, ranks)).collect();
        joined(&pieces, &[ranks, own, width])
    };
    let sum = SumOwners { experts, out: Some(dtype), like: false };
    let [out, dx] = [0, 1].map(|n| run(&sum, &[&received(n, WIDTH), ids]).remove(0));
    [out, dx, run(&SelectOwner { experts }, &[&received(2, TOP_K), ids]).remove(0)]
}

#[test]
fn ranks_that_share_experts_compute_the_bits_of_one_rank() {
    for dtype in [DType::F32, DType::BF16] {
        let gate_up = normal(dtype, [EXPERTS * 2 * FFN, WIDTH], 0.3, 5);
        let down = normal(dtype, [EXPERTS * WIDTH, FFN], 0.3, 6);
        for ranks in [2, 4, 8] {
            let what = format!("{ranks} ranks in {dtype}");
            let all = tokens(ranks * 21, dtype);
            let own = |home: usize| all.each_ref().map(|tensor| part(tensor, home, ranks));
            // One rank: the tokens of each rank are a micro-batch.
            let batches: Vec<Computed> =
                (0..ranks).map(|home| computed(&own(home), [&gate_up, &down], 1, 0)).collect();
            let of_ranks: Vec<Computed> =
                (0..ranks).map(|place| computed(&all, [&gate_up, &down], ranks, place)).collect();
            for (home, batch) in batches.iter().enumerate() {
                let ids = &own(home)[3];
                let expected = at_home(std::slice::from_ref(batch), 0, ids, dtype);
                let found = at_home(&of_ranks, home, ids, dtype);
                for (n, name) in ["the output", "dx", "dgates"].into_iter().enumerate() {
                    assert!(expected[n].to_f64().iter().any(|x| *x != 0.0), "{name} of {what}");
                    assert!(found[n].bytes() == expected[n].bytes(), "{name} of {what} at rank {home}");
                }
            }
            for (n, name) in [(3, "dgate_up"), (4, "ddown")] {
                let (rows, cols) = batches[0][n].ty().shape.rows_cols();
                let of_batches: Vec<_> = batches.iter().map(|batch| part(&batch[n], 0, 1)).collect();
                let expected = run(&SumRanks, &[&joined(&of_batches, &[ranks, rows, cols])]).remove(0);
                for (place, computed) in of_ranks.iter().enumerate() {
                    let expected = part(&expected, place, ranks);
                    assert!(computed[n].bytes() == expected.bytes(), "{name} of {what} at rank {place}");
                }
            }
        }
    }
}
