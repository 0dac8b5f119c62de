//! Tests of [`Dispatch`], [`DispatchOwn`] and [`CountExperts`].

use super::{CountExperts, Dispatch, DispatchOwn};
use crate::run_op::run;
use crate::tail::first_row;
use proptest::prelude::*;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

/// Experts of tokens, `top_k` a token.
fn tensor(top_k: usize, ids: &[i32]) -> HostTensor {
    let values: Vec<f64> = ids.iter().map(|&id| id.into()).collect();
    HostTensor::from_f64(TensorType::new(DType::I32, [ids.len() / top_k, top_k]), &values)
}

/// Starts, counts, rows and sources.
fn dispatched(op: Dispatch, top_k: usize, ids: &[i32]) -> [Vec<i64>; 4] {
    let outputs = run(&op, &[&tensor(top_k, ids)]);
    [0, 1, 2, 3].map(|n| whole_numbers(&outputs[n]))
}

fn whole_numbers(of: &HostTensor) -> Vec<i64> {
    of.to_f64().into_iter().map(|x| x as i64).collect()
}

/// Starts, counts, rows, sources, needed and, if any, starts by source on the rank at this place.
fn of_own(op: DispatchOwn, place: usize, top_k: usize, ids: &[i32]) -> Vec<Vec<i64>> {
    let place = HostTensor::from_f64(TensorType::new(DType::U32, [1]), &[place as f64]);
    run(&op, &[&tensor(top_k, ids), &place]).iter().map(whole_numbers).collect()
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
        let end = starts[experts] as usize;
        let tail = first_row(end).min(sources.len());
        prop_assert!(sources[end..tail].iter().all(|&source| source == -1));
        prop_assert!(sources[tail..].iter().all(|&source| source == -2));
    }
}

const OWN: DispatchOwn = DispatchOwn { experts: 2, ranks: 2, align: 4, room: None, by_source: false };

#[test]
fn padding_is_not_counted() {
    let counts = run(&CountExperts { experts: 4 }, &[&tensor(2, &[3, 0, -1, -1, 0, 3, 0, 1])]);
    assert_eq!(counts[0].to_f64(), [3.0, 1.0, 0.0, 2.0]);
}

#[test]
fn a_rank_has_rows_for_its_own_experts() {
    let ids = [3, 0, 2, -1, 0, 3, 3, 1];
    let outputs = of_own(OWN, 1, 2, &ids);
    assert_eq!(outputs[..2], [vec![0, 4, 8], vec![1, 3]]);
    assert_eq!(outputs[2], [4, -1, 0, -1, -1, 5, 6, -1]);
    assert_eq!(outputs[3], [[2, -1, -1, -1, 0, 5, 6, -1], [-1; 8]].concat()[..outputs[3].len()]);
    assert_eq!(outputs[4], [8]);
    assert_eq!(outputs.len(), 5);
}

#[test]
fn the_rows_of_an_expert_are_divided_by_the_rank_of_their_tokens() {
    // Expert 3 has a token of the first rank and two of the second one.
    let ids = [3, 0, 2, -1, 0, 3, 3, 1];
    let outputs = of_own(DispatchOwn { by_source: true, ..OWN }, 1, 2, &ids);
    assert_eq!(outputs[0], [0, 4, 12]);
    assert_eq!(outputs[1], [1, 3]);
    assert_eq!(outputs[2], [4, -1, 0, -1, -1, 8, 9, -1]);
    assert_eq!(outputs[4], [12]);
    assert_eq!(outputs[5], [0, 4, 4, 8, 12]);
}

#[test]
fn the_worst_routing_takes_the_whole_capacity() {
    // Each of six tokens has both experts of this rank.
    let ids: Vec<i32> = (0..6).flat_map(|_| [2, 3, 0]).collect();
    for by_source in [false, true] {
        let op = DispatchOwn { align: 1, by_source, ..OWN };
        let outputs = of_own(op, 1, 3, &ids);
        assert_eq!((outputs[4][0] as usize, op.capacity(6, 3)), (12, 12), "{op:?}");
    }
    // A token of each rank for each expert: padding is the most.
    let op = DispatchOwn { align: 128, by_source: true, ..OWN };
    assert_eq!(of_own(op, 1, 2, &[2, 3, 3, 2])[4][0] as usize, op.capacity(2, 2));
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let (ids, place) = (TensorType::new(DType::I32, [6, 2]), TensorType::new(DType::U32, [1]));
    let of = |op: DispatchOwn, inputs: [TensorType; 2]| op.infer(&inputs).expect_err("a mistake").to_string();
    for (error, says) in [
        (of(OWN, [ids.with_dtype(DType::F32), place]), "ids must be i32, not f32[6, 2]"),
        (of(OWN, [ids, place.with_dtype(DType::I32)]), "place must be u32[1]"),
        (
            of(DispatchOwn { ranks: 4, ..OWN }, [ids, place]),
            "equally many tokens of 4 ranks, not of 6 tokens",
        ),
        (of(DispatchOwn { room: Some(6), ..OWN }, [ids, place]), "room of 6 rows must be a multiple of 4"),
        (of(DispatchOwn { experts: 0, ..OWN }, [ids, place]), "0 experts of 2 ranks"),
    ] {
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn more_tokens_than_are_counted_exactly_are_refused() {
    let place = TensorType::new(DType::U32, [1]);
    let ids = |tokens, top_k| TensorType::new(DType::I32, [tokens, top_k]);
    let ops: [(&dyn Op, &[TensorType]); 3] =
        [(&op(4, 1), &[]), (&DispatchOwn { align: 1, ..OWN }, &[place]), (&CountExperts { experts: 4 }, &[])];
    for (op, others) in ops {
        let infer = |ids| op.infer(&[&[ids], others].concat()).map_err(|error| error.to_string());
        let refused = |ids, parts: [&str; 3]| {
            let error = infer(ids).expect_err("too many");
            assert!(parts.iter().all(|part| error.contains(part)) && error.contains(op.name()), "{error}");
        };
        // f32 has 2^24, and not the next whole number.
        assert!(infer(ids(1 << 24, 2)).is_ok(), "{op:?}");
        let advice = "smaller micro-batches or fewer ranks";
        refused(ids((1 << 24) + 2, 1), ["up to 16777216 tokens of all ranks", "16777218", advice]);
        refused(ids(1 << 24, 128), ["up to 2147483647", "16777216 tokens of 128 experts", advice]);
    }
}

#[test]
fn more_rows_than_are_numbered_are_refused() {
    let (ids, place) = (TensorType::new(DType::I32, [6, 2]), TensorType::new(DType::U32, [1]));
    let all = op(2, 1 << 30).infer(&[ids]);
    let own = DispatchOwn { align: 1 << 30, ..OWN }.infer(&[ids, place]);
    for found in [all, own] {
        let error = found.expect_err("too many").to_string();
        assert!(error.contains("up to 2147483648 rows"), "{error}");
    }
}

#[test]
fn a_room_of_the_least_copies_has_the_rows_and_one_of_a_copy_less_has_not() {
    for (align, by_source) in [(1, false), (128, false), (128, true)] {
        let op = DispatchOwn { align, by_source, experts: 4, ranks: 2, room: None };
        for rows in [1usize, 127, 128, 129, 1_000, 4_352] {
            let least = op.least_copies(rows, 10_000);
            assert!(op.room_for(least, 10_000) >= rows, "{align}: {rows} rows, {least} copies");
            let is_least = least == 0 || op.room_for(least - 1, 10_000) < rows;
            assert!(is_least, "{align}: {rows} rows, {least} copies");
        }
    }
}

proptest! {
    /// Among the routings: padding alone, one expert alone, ranks without tokens. A room of 0 is none.
    #[test]
    fn ranks_share_the_rows_of_all_experts(
        experts in 1usize..6,
        ranks in 1usize..5,
        align in prop::sample::select(vec![1usize, 4, 128]),
        by_source in any::<bool>(),
        room in 0usize..20,
        top_k in 1usize..5,
        draws in prop::collection::vec(-2i32..1000, 4..160),
        reached in 1i32..20,
    ) {
        let top_k = top_k.min(experts * ranks);
        let reached = (reached as usize).clamp(top_k, experts * ranks) as i32;
        let tokens = draws.len() / ranks * ranks;
        // Distinct experts of each token.
        let of_token = |&draw: &i32| (0..top_k as i32).map(move |k| if draw < 0 { -1 } else { (draw + k) % reached });
        let ids: Vec<i32> = draws[..tokens].iter().flat_map(of_token).collect();
        let all = DispatchOwn { experts, ranks, align, room: None, by_source };
        let op = DispatchOwn { room: (room > 0).then_some(room * align), ..all };
        for place in 0..ranks {
            let first = (place * experts) as i32;
            let local: Vec<i32> =
                ids.iter().map(|id| if (first..first + experts as i32).contains(id) { id - first } else { -1 }).collect();
            let counted = run(&CountExperts { experts }, &[&tensor(top_k, &local)]);
            let whole = of_own(all, place, top_k, &ids);
            let found = of_own(op, place, top_k, &ids);
            let within = op.ragged_rows(tokens, top_k);
            prop_assert_eq!(found[3].len(), within);
            prop_assert_eq!(&found[1], &whole_numbers(&counted[0]));
            prop_assert!(whole[4][0] as usize <= all.capacity(tokens, top_k));
            if !by_source {
                let [starts, counts, rows, _] = dispatched(Dispatch { experts, align }, top_k, &local);
                prop_assert_eq!(&whole[..3], &[starts, counts, rows]);
            } else {
                // Each rank's rows are those that it would have alone.
                let each = tokens / ranks * top_k;
                for (rank, local) in local.chunks(each.max(1)).enumerate() {
                    let [starts, _, rows, _] = dispatched(Dispatch { experts, align }, top_k, local);
                    for (n, (&id, row)) in local.iter().zip(rows).enumerate().filter(|(_, (id, _))| **id >= 0) {
                        let within_group = row - starts[id as usize];
                        let start = whole[5][id as usize * ranks + rank];
                        prop_assert_eq!(whole[2][rank * each + n], start + within_group);
                    }
                }
                prop_assert!(whole[5].iter().all(|start| start % align as i64 == 0));
                let of_experts: Vec<i64> = found[5].iter().step_by(ranks).copied().collect();
                prop_assert_eq!(&of_experts, &found[0]);
            }
            // A smaller room has the rows up to its end.
            let clipped = |starts: &[i64]| starts.iter().map(|row| (*row).min(within as i64)).collect::<Vec<_>>();
            prop_assert_eq!(&found[0], &clipped(&whole[0]));
            prop_assert_eq!(&found[4], &whole[4]);
            prop_assert_eq!(whole[4][0], whole[0][experts]);
            let kept = whole[2].iter().map(|row| if *row < within as i64 { *row } else { -1 }).collect::<Vec<_>>();
            prop_assert_eq!(&found[2], &kept);
            let mut sources = vec![-1; within];
            sources[first_row(found[0][experts] as usize).min(within)..].fill(-2);
            kept.iter().enumerate().filter(|(_, row)| **row >= 0).for_each(|(n, row)| sources[*row as usize] = n as i64);
            prop_assert_eq!(&found[3], &sources);
        }
    }
}
