//! Tests of [`Dispatch`].

use super::Dispatch;
use crate::run_op::run;
use proptest::prelude::*;
use xtrain_tensor::{DType, HostTensor, TensorType};

/// Experts of tokens, `top_k` a token.
fn tensor(top_k: usize, ids: &[i32]) -> HostTensor {
    let values: Vec<f64> = ids.iter().map(|&id| id.into()).collect();
    HostTensor::from_f64(TensorType::new(DType::I32, [ids.len() / top_k, top_k]), &values)
}

/// Starts, counts, rows and sources.
fn dispatched(op: Dispatch, top_k: usize, ids: &[i32]) -> [Vec<i64>; 4] {
    let outputs = run(&op, &[&tensor(top_k, ids)]);
    [0, 1, 2, 3].map(|n| outputs[n].to_f64().into_iter().map(|x| x as i64).collect())
}

fn op(experts: usize, align: usize) -> Dispatch {
    Dispatch { experts, align }
}

#[test]
fn experts_begin_at_multiples() {
    let op = op(4, 4);
    let [starts, counts, rows, sources] = dispatched(op, 2, &[3, 0, 3, -1, 0, 3]);
    assert_eq!(starts, [0, 4, 4, 4, 8]);
    assert_eq!(counts, [2, 0, 0, 3]);
    assert_eq!(rows, [4, 0, 5, -1, 1, 6]);
    assert_eq!(op.capacity(6), 16);
    assert_eq!(sources, [[1, 4, -1, -1, 0, 2, 5, -1], [-1; 8]].concat());
}

#[test]
fn the_capacity_is_reached() {
    for (experts, align, tokens) in [(4, 4, vec![1, 1, 1, 3]), (30, 128, vec![1; 3]), (9, 16, vec![2; 9])] {
        let each = tokens.iter().enumerate();
        let ids: Vec<i32> = each.flat_map(|(id, &count)| std::iter::repeat_n(id as i32, count)).collect();
        let [starts, _, _, sources] = dispatched(op(experts, align), 1, &ids);
        assert_eq!(starts[experts] as usize, sources.len(), "{tokens:?} of {experts} experts");
    }
}

proptest! {
    /// With few tokens, experts without tokens, and at times all tokens of one expert.
    #[test]
    fn any_routing_is_a_stable_permutation_within_the_capacity(
        experts in 1usize..20,
        align in prop::sample::select(vec![1usize, 3, 16, 128]),
        top_k in 1usize..4,
        draws in prop::collection::vec(-3i32..1000, 3..200),
        reached in 1i32..20,
    ) {
        let reached = reached.min(experts as i32);
        let ids: Vec<i32> = draws.iter().map(|&draw| if draw < 0 { -1 } else { draw % reached }).collect();
        let ids = &ids[..ids.len() / top_k * top_k];
        let op = op(experts, align);
        let [starts, counts, rows, sources] = dispatched(op, top_k, ids);
        prop_assert_eq!(sources.len(), op.capacity(ids.len()));
        prop_assert!(starts[experts] as usize <= sources.len());
        prop_assert!(starts.iter().all(|&start| (start as usize).is_multiple_of(align)));
        for (copy, (&id, &row)) in ids.iter().zip(&rows).enumerate() {
            if id < 0 {
                prop_assert_eq!(row, -1);
                continue;
            }
            let (first, count) = (starts[id as usize], counts[id as usize]);
            prop_assert!((first..first + count).contains(&row));
            prop_assert_eq!(sources[row as usize], copy as i64);
        }
        let held = sources.iter().filter(|source| **source >= 0).count();
        prop_assert_eq!(held, ids.iter().filter(|id| **id >= 0).count());
        for expert in 0..experts {
            let own = &sources[starts[expert] as usize..starts[expert + 1] as usize];
            let (tokens, rest) = own.split_at(counts[expert] as usize);
            prop_assert!(tokens.is_sorted() && rest.iter().all(|&source| source == -1));
        }
        prop_assert!(sources[starts[experts] as usize..].iter().all(|&source| source == -1));
    }
}
