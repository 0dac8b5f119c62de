//! Tests of [`SumOwners`] and [`SelectOwner`], and of the sum of a token's experts on several ranks.

use super::{SelectOwner, SumOwners};
use crate::dispatch::DispatchOwn;
use crate::dispatch::samples::distinct_experts;
use crate::permute::{PermuteGates, Unpermute, UnpermuteGates, UnpermuteTree};
use crate::run_op::{run, tensor};
use proptest::prelude::*;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

#[test]
fn ranks_without_an_expert_of_a_token_are_left_out() {
    let ids = tensor(DType::I32, &[4, 2], &[0.0, 5.0, 3.0, 2.0, -1.0, -1.0, 4.0, -1.0]);
    let nan = f64::NAN;
    // Three ranks with two experts each, four tokens, one column.
    let x = [1.0, nan, nan, nan, nan, 8.0, nan, nan, 2.0, nan, nan, -0.0];
    let x = tensor(DType::F32, &[3, 4, 1], &x);
    let op = SumOwners { experts: 2, out: None, like: false };
    let sum = run(&op, &[&x, &ids]).remove(0).to_f64();
    assert_eq!(sum, [3.0, 8.0, 0.0, 0.0]);
    assert!(sum[3].is_sign_negative() && sum[2].is_sign_positive(), "nothing is added to -0: {sum:?}");
    let shared = tensor(DType::F32, &[4, 1], &[0.5, -8.0, -0.0, 1.0]);
    let sum = run(&op, &[&x, &ids, &shared]).remove(0).to_f64();
    assert_eq!(sum, [3.5, 0.0, 0.0, 1.0]);
    assert!(sum[2].is_sign_negative(), "padding has what is shared alone: {sum:?}");
}

#[test]
fn sums_are_a_tree_over_the_ranks_that_are_there_and_rounded_once() {
    let large = 16_777_216.0;
    let op = SumOwners { experts: 1, out: None, like: false };
    let sum_of = |x: &[f64], ids: &[f64], shared: Option<f64>, dtype| {
        let x = tensor(DType::F32, &[x.len(), 1, 1], x);
        let ids = tensor(DType::I32, &[1, ids.len()], ids);
        let shared = shared.map(|shared| tensor(dtype, &[1, 1], &[shared]));
        let inputs: Vec<_> = [&x, &ids].into_iter().chain(&shared).collect();
        run(&op, &inputs).remove(0)
    };
    // (large) + (1 + 1): rank 1 is left out of the left half.
    let x = [large, f64::NAN, 1.0, 1.0];
    assert_eq!(sum_of(&x, &[0.0, 2.0, 3.0], None, DType::F32).to_f64(), [large + 2.0]);
    // In bf16, 257 would be rounded before 1 is added.
    let sum = sum_of(&[256.0, 1.0], &[1.0, 0.0], Some(1.0), DType::BF16);
    assert_eq!((sum.ty().dtype, sum.to_f64()), (DType::BF16, vec![258.0]));
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let (x, ids) = (TensorType::new(DType::F32, [2, 3, 8]), TensorType::new(DType::I32, [3, 4]));
    let op = SumOwners { experts: 2, out: None, like: false };
    let of = |op: &dyn Op, inputs: &[TensorType]| op.infer(inputs).expect_err("a mistake").to_string();
    let bf16 = TensorType::new(DType::BF16, [3, 8]);
    for (error, says) in [
        (of(&op, &[x]), "2 or 3 inputs, not 1"),
        (of(&op, &[x, ids.with_dtype(DType::F32)]), "ids must be i32"),
        (of(&op, &[TensorType::new(DType::F32, [2, 4, 8]), ids]), "for 3 tokens"),
        (of(&op, &[TensorType::new(DType::F32, [65, 3, 8]), ids]), "1 to 64 ranks"),
        (of(&op, &[x.with_dtype(DType::E4M3), ids]), "x must be f32 or bf16"),
        (of(&op, &[x.with_dtype(DType::F64), ids, bf16]), "for a sum in bf16"),
        (of(&SumOwners { out: Some(DType::F32), ..op }, &[x, ids, bf16]), "shared must be f32[3, 8]"),
        (of(&SumOwners { experts: 0, ..op }, &[x, ids]), "at least 1 expert"),
        (of(&SelectOwner { experts: 2 }, &[x, ids]), "the copies in ids"),
    ] {
        assert!(error.contains(says), "{error}");
    }
}

/// Tokens of all ranks, and their experts.
#[derive(Debug)]
struct Batch {
    tokens: usize,
    experts: usize,
    top_k: usize,
    width: usize,
    /// Experts of tokens; -1 for padding.
    ids: Vec<f64>,
    /// The output of each copy of a token.
    y: Vec<f64>,
}

impl Batch {
    /// `ids` of distinct experts; each of some tokens is padding.
    fn new([tokens, experts, top_k, width]: [usize; 4], seed: u64) -> Batch {
        let rng = Philox::new(seed, 3, 0);
        let is_padding = |copy: usize| rng.word((copy / top_k) as u64).is_multiple_of(7);
        let experts_of = distinct_experts(tokens, top_k, experts, seed).into_iter().enumerate();
        let ids = experts_of.map(|(copy, id)| if is_padding(copy) { -1.0 } else { id as f64 }).collect();
        let mut y = vec![0.0; tokens * top_k * width];
        Philox::new(seed, 1, 0).fill_normal(1.0, &mut y);
        // Some are -0.
        let y = y.into_iter().map(|x: f32| if x.abs() < 0.2 { -0.0 } else { f64::from(x) }).collect();
        Batch { tokens, experts, top_k, width, ids, y }
    }

    /// The inputs of a sum on the rank at this place: rows of its experts, sources, rows and ids.
    fn of_rank(&self, ranks: usize, place: usize, dtype: DType) -> [HostTensor; 4] {
        let experts = self.experts / ranks;
        let op = DispatchOwn { experts, ranks, align: 4, room: None, by_source: place % 2 == 1 };
        let ids = tensor(DType::I32, &[self.tokens, self.top_k], &self.ids);
        let mut outputs = run(&op, &[&ids, &tensor(DType::U32, &[1], &[place as f64])]);
        let (sources, rows) = (outputs.remove(3), outputs.remove(2));
        let y: Vec<f64> = (sources.to_f64().iter())
            .flat_map(|&source| {
                let row = (source >= 0.0).then(|| &self.y[source as usize * self.width..][..self.width]);
                row.map_or_else(|| vec![f64::NAN; self.width], <[f64]>::to_vec)
            })
            .collect();
        [tensor(dtype, &[sources.ty().numel(), self.width], &y), sources, rows, ids]
    }

    /// The sum of tokens' experts on so many ranks, each of which has its own tokens: `part` computes what a
    /// rank sends for all tokens. What is not to be read becomes NaN.
    fn summed(
        &self,
        ranks: usize,
        shared: Option<&HostTensor>,
        op: SumOwners,
        part: impl Fn(usize) -> HostTensor,
    ) -> Vec<u8> {
        let (own, width, top_k) = (self.tokens / ranks, self.width, self.top_k);
        let parts: Vec<HostTensor> = (0..ranks).map(part).collect();
        let mut bytes = Vec::new();
        for home in 0..ranks {
            let ids = &self.ids[home * own * top_k..][..own * top_k];
            let mut x = Vec::new();
            for (rank, part) in parts.iter().enumerate() {
                let part = part.to_f64();
                for token in 0..own {
                    let owns = |id: &f64| *id >= 0.0 && *id as usize / op.experts == rank;
                    let row = &part[(home * own + token) * width..][..width];
                    let is_read = ids[token * top_k..][..top_k].iter().any(owns);
                    x.extend(row.iter().map(|x| if is_read { *x } else { f64::NAN }));
                }
            }
            let x = tensor(parts[0].ty().dtype, &[ranks, own, width], &x);
            let ids = tensor(DType::I32, &[own, top_k], ids);
            let shared = shared.map(|shared| {
                let rows = &shared.to_f64()[home * own * width..][..own * width];
                tensor(shared.ty().dtype, &[own, width], rows)
            });
            let inputs: Vec<_> = [&x, &ids].into_iter().chain(&shared).collect();
            bytes.extend(run(&op, &inputs).remove(0).bytes());
        }
        bytes
    }
}

/// Ranks, experts of a rank, and tokens of all ranks, equally many of each.
fn batches(width: usize) -> impl Strategy<Value = (usize, usize, Batch)> {
    let sizes = (1usize..6, 1usize..4, 1usize..7, 1usize..5, any::<u64>());
    sizes.prop_map(move |(ranks, experts, top_k, own, seed)| {
        let all = experts * ranks;
        (ranks, experts, Batch::new([ranks * own, all, top_k.min(all), width], seed))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn trees_of_any_number_of_ranks_have_equal_bits(
        experts in prop::sample::select(vec![1usize, 5, 6, 8, 12, 16, 24, 40]),
        top_k in 1usize..9,
        own in 1usize..5,
        width in 1usize..6,
        has_shared in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let batch = Batch::new([8 * own, experts, top_k.min(experts), width], seed);
        let groups = UnpermuteTree::groups_of(experts);
        let mut values = vec![0.0; 8 * own * width];
        Philox::new(seed, 2, 0).fill_normal(1.0, &mut values);
        let values: Vec<f64> = values.into_iter().map(f64::from).collect();
        for dtype in [DType::F32, DType::BF16] {
            let shared = has_shared.then(|| tensor(dtype, &[8 * own, width], &values));
            // One rank that has all experts and adds what is shared itself.
            let whole = UnpermuteTree { experts, groups, rounded: true };
            let y = batch.of_rank(1, 0, dtype);
            let inputs: Vec<_> = y.iter().chain(&shared).collect();
            let whole = run(&whole, &inputs).remove(0);
            for ranks in [1, 2, 4, 8].into_iter().filter(|ranks| *ranks <= groups) {
                let op = SumOwners { experts: experts / ranks, out: Some(dtype), like: false };
                let sum = batch.summed(ranks, shared.as_ref(), op, |place| {
                    let tree = UnpermuteTree { experts: experts / ranks, groups: groups / ranks, rounded: false };
                    let part = run(&tree, &batch.of_rank(ranks, place, dtype).each_ref()).remove(0);
                    assert_eq!(part.ty().dtype, DType::F32);
                    part
                });
                prop_assert_eq!(whole.bytes(), &sum[..], "{} of {} ranks", dtype, ranks);
            }
            let bound = if dtype == DType::F32 { 1e-6 } else { 1.0 / 64.0 };
            for (n, sum) in whole.to_f64().iter().enumerate() {
                let (token, column) = (n / width, n % width);
                let mut operands: Vec<f64> = (0..batch.top_k)
                    .filter(|k| batch.ids[token * batch.top_k + k] >= 0.0)
                    .map(|k| batch.y[(token * batch.top_k + k) * width + column])
                    .collect();
                operands.extend(has_shared.then(|| values[n]));
                let (expected, size): (f64, f64) =
                    operands.iter().fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                prop_assert!((sum - expected).abs() <= bound * size, "{} instead of {}", sum, expected);
            }
        }
    }

    /// With a part that is a plain sum, rounded to the type of rows, as without the promise of equal bits.
    #[test]
    fn plain_parts_add_up_to_the_sum_of_all_experts((ranks, experts, batch) in batches(3)) {
        let of = |ranks, place| {
            let [y, sources, rows, ids] = batch.of_rank(ranks, place, DType::F64);
            // Rows without a token are not read.
            (run(&Unpermute, &[&y, &sources, &rows]).remove(0), ids, rows)
        };
        let (whole, ..) = of(1, 0);
        let op = SumOwners { experts, out: None, like: false };
        let sum = batch.summed(ranks, None, op, |place| {
            let (part, _, rows) = of(ranks, place);
            for (part, rows) in part.to_f64().chunks(3).zip(rows.to_f64().chunks(batch.top_k)) {
                let is_empty = rows.iter().all(|row| *row < 0.0);
                assert!(!is_empty || part.iter().all(|x| *x == 0.0), "a token without rows: {part:?}");
            }
            part
        });
        let mut summed = HostTensor::zeros(whole.ty());
        summed.bytes_mut().copy_from_slice(&sum);
        for (found, expected) in summed.to_f64().iter().zip(whole.to_f64()) {
            prop_assert!((found - expected).abs() < 1e-12, "{} instead of {}", found, expected);
        }
    }

    /// A gate goes to the rank of its expert with its token, and its gradient returns to the token's rank.
    #[test]
    fn gate_gradients_return_to_the_rank_of_the_token((ranks, experts, batch) in batches(1)) {
        let own = batch.tokens / ranks;
        let copies = own * batch.top_k;
        let gates = tensor(DType::F32, &[batch.tokens, batch.top_k], &batch.y);
        // A gradient of -2 times the gate.
        let of_ranks: Vec<Vec<f64>> = (0..ranks)
            .map(|place| {
                let [_, sources, rows, _] = batch.of_rank(ranks, place, DType::F32);
                let gates = run(&PermuteGates, &[&gates, &sources, &rows]).remove(0);
                let dgates: Vec<f64> = gates.to_f64().iter().map(|gate| -2.0 * gate).collect();
                let dgates = tensor(DType::F32, &[dgates.len()], &dgates);
                run(&UnpermuteGates, &[&dgates, &sources, &rows]).remove(0).to_f64()
            })
            .collect();
        for home in 0..ranks {
            let tokens = home * copies..(home + 1) * copies;
            let x: Vec<f64> = of_ranks.iter().flat_map(|of| of[tokens.clone()].to_vec()).collect();
            let x = tensor(DType::F32, &[ranks, own, batch.top_k], &x);
            let ids = tensor(DType::I32, &[own, batch.top_k], &batch.ids[tokens.clone()]);
            let found = run(&SelectOwner { experts }, &[&x, &ids]).remove(0).to_f64();
            for ((found, gate), id) in found.iter().zip(&batch.y[tokens.clone()]).zip(&batch.ids[tokens]) {
                prop_assert_eq!(*found, if *id < 0.0 { 0.0 } else { -2.0 * gate });
            }
        }
    }
}

#[test]
fn groups_are_the_largest_power_of_two_up_to_8_that_divides_the_experts() {
    let groups = [1, 2, 5, 6, 8, 12, 16, 48, 128].map(UnpermuteTree::groups_of);
    assert_eq!(groups, [1, 2, 1, 2, 8, 4, 8, 8, 8]);
}
