//! Tests of [`Permute`], [`Unpermute`] and the ops of gates. Those of
//! [`UnpermuteTree`](super::UnpermuteTree) are with [`SumOwners`](crate::owners::SumOwners).

use super::{Permute, PermuteGates, Unpermute, UnpermuteGates};
use crate::dispatch::Dispatch;
use crate::run_op::{normal, run};
use proptest::prelude::*;
use xtrain_tensor::{DType, HostTensor, TensorType};

proptest! {
    /// Among the routings: one token, all experts chosen, fewer copies than experts, tokens without rows.
    #[test]
    fn a_token_comes_back_as_often_as_it_has_experts(
        experts in 1usize..9,
        top_k in 1usize..9,
        align in prop::sample::select(vec![1usize, 8, 128]),
        tokens in prop::collection::vec((0usize..9, prop::bool::weighted(0.9)), 1..40),
        seed in any::<u64>(),
    ) {
        let top_k = top_k.min(experts);
        let ids_of = |&(first, is_live): &(usize, bool)| {
            (0..top_k).map(move |k| if is_live { ((first + k) % experts) as f64 } else { -1.0 })
        };
        let ids: Vec<f64> = tokens.iter().flat_map(ids_of).collect();
        let ids = HostTensor::from_f64(TensorType::new(DType::I32, [tokens.len(), top_k]), &ids);
        let routing = run(&Dispatch { experts, align }, &[&ids]);
        let [rows, sources] = [&routing[2], &routing[3]];
        let (x, gates) = (normal(DType::F64, [tokens.len(), 7], 1.0, seed), normal(DType::F64, ids.ty().shape, 1.0, seed));

        let y = run(&Permute::default(), &[&x, sources, rows]).remove(0);
        let back = run(&Unpermute, &[&y, sources, rows]).remove(0).to_f64();
        let gates_c = run(&PermuteGates, &[&gates, sources, rows]).remove(0);
        let gates_back = run(&UnpermuteGates, &[&gates_c, sources, rows]).remove(0).to_f64();
        for (t, &(_, is_live)) in tokens.iter().enumerate() {
            let (copies, one) = if is_live { (top_k as f64, 1.0) } else { (0.0, 0.0) };
            for (back, x) in back[7 * t..][..7].iter().zip(&x.to_f64()[7 * t..]) {
                prop_assert!((back - copies * x).abs() < 1e-12, "{} is not {} x {}", back, copies, x);
            }
            for (back, gate) in gates_back[top_k * t..][..top_k].iter().zip(&gates.to_f64()[top_k * t..]) {
                prop_assert_eq!(*back, one * gate);
            }
        }
        let (y, gates_c) = (y.to_f64(), gates_c.to_f64());
        for (row, _) in sources.to_f64().iter().enumerate().filter(|(_, source)| **source < 0.0) {
            prop_assert!(y[7 * row..][..7].iter().all(|y| *y == 0.0) && gates_c[row] == 0.0, "row {}", row);
        }
    }
}
