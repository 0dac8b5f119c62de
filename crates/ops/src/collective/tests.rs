//! Tests of the shapes of collectives, and of the programs that contain them.

use super::{AllGather, AllToAll, Receive, ReduceScatter, Send};
use crate::messages::assert_message;
use xtrain_program::{Groups, Lane, Op, Tracer};
use xtrain_tensor::{DType, TensorType};

const GROUPS: Groups = Groups::world(4);

fn gather(first: usize, rows: usize) -> AllGather {
    AllGather { groups: GROUPS, first, rows }
}

fn exchange(first: usize, piece_rows: usize) -> AllToAll {
    AllToAll { groups: GROUPS, first, piece_rows }
}

fn reduction(first: usize, piece_rows: usize, as_summand: bool) -> ReduceScatter {
    ReduceScatter { groups: GROUPS, first, piece_rows, as_summand }
}

fn refusal(op: &dyn Op, ty: TensorType) -> String {
    op.infer(&[ty]).expect_err("it is refused").to_string()
}

#[test]
fn pieces_are_rows_of_the_tensor_of_all_ranks() {
    let matrix = |rows| TensorType::new(DType::BF16, [rows, 6]);
    assert_eq!(gather(3, 10).infer(&[matrix(3)]), Ok(vec![matrix(10)]));
    let pieces = TensorType::new(DType::BF16, [4, 3, 6]);
    assert_eq!(exchange(3, 3).infer(&[matrix(10)]), Ok(vec![pieces]));
    let gradient =
        |shape: &[usize]| TensorType { dtype: DType::F32, shape: xtrain_tensor::Shape::new(shape) };
    assert_eq!(reduction(3, 3, false).infer(&[gradient(&[10, 6])]), Ok(vec![gradient(&[3, 6])]));
    assert_eq!(reduction(3, 3, true).infer(&[gradient(&[10, 6])]), Ok(vec![gradient(&[1, 3, 6])]));
    let words = |shape: &[usize]| TensorType { dtype: DType::F64, shape: xtrain_tensor::Shape::new(shape) };
    assert_eq!(gather(0, 4).infer(&[words(&[1])]), Ok(vec![words(&[4])]));
    assert_eq!(exchange(0, 1).infer(&[words(&[2])]), Ok(vec![words(&[4, 1])]));
}

#[test]
fn messages_have_an_input_or_an_output() {
    let ty = TensorType::new(DType::E4M3, [3, 5]);
    let (send, receive) = (Send { groups: GROUPS, to: 3 }, Receive { groups: GROUPS, from: 0, ty });
    assert_eq!((send.infer(&[ty]), receive.infer(&[])), (Ok(vec![]), Ok(vec![ty])));
    assert_eq!([send.cost(&[ty], &[]).sent_bytes, receive.cost(&[], &[ty]).sent_bytes], [15.0, 0.0]);
    let absent = "place 4 of 4 ranks";
    assert!(refusal(&Send { to: 4, ..send }, ty).contains(absent));
    let refused = Receive { from: 4, ..receive }.infer(&[]).expect_err("it is refused").to_string();
    assert!(refused.contains(absent), "{refused}");
}

#[test]
fn tensors_that_cannot_be_cut_are_refused() {
    let f32_of = |shape: &[usize]| TensorType { dtype: DType::F32, shape: xtrain_tensor::Shape::new(shape) };
    assert_message("tensors that cannot be cut are refused", refusal(&gather(4, 10), f32_of(&[3, 6])));
    assert_message("tensors that cannot be cut are refused, 2", refusal(&gather(0, 13), f32_of(&[3, 6])));
    assert_message("tensors that cannot be cut are refused, 3", refusal(&exchange(0, 2), f32_of(&[9, 6])));
    assert!(refusal(&gather(0, 1), f32_of(&[])).contains("f32[] has none"));
    assert!(refusal(&exchange(0, 1), f32_of(&[2, 2, 2, 2])).contains("no further extent"));
    assert_message(
        "tensors that cannot be cut are refused, 4",
        refusal(&reduction(0, 2, false), f32_of(&[9, 6])),
    );
    assert!(refusal(&reduction(0, 1, true), f32_of(&[2, 2, 2, 2])).contains("no further extent"));
    let half = TensorType::new(DType::BF16, [4, 6]);
    assert_message("tensors that cannot be cut are refused, 5", refusal(&reduction(0, 1, false), half));
    let packed = TensorType::new(DType::E5M6, [3, 5]);
    assert_message("tensors that cannot be cut are refused, 6", refusal(&gather(0, 10), packed));
}

#[test]
fn every_other_rank_is_sent_a_piece() {
    let sent = |op: &dyn Op, ty: TensorType| op.cost(&[ty], &op.infer(&[ty]).expect("it fits")).sent_bytes;
    assert_eq!(sent(&gather(0, 10), TensorType::new(DType::BF16, [3, 6])), 3.0 * 36.0);
    assert_eq!(sent(&exchange(1, 3), TensorType::new(DType::BF16, [10, 6])), 3.0 * 36.0);
    assert_eq!(sent(&reduction(1, 3, false), TensorType::new(DType::F32, [10, 6])), 3.0 * 72.0);
}

#[test]
fn collectives_are_traced_on_the_communication_lane() {
    let mut tracer = Tracer::default();
    let x = tracer.input("x", TensorType::new(DType::F32, [10, 6]));
    let pieces = tracer.site("gradients").emit(exchange(1, 3), &[x]).expect("it fits")[0];
    tracer.output("pieces", pieces);
    let program = tracer.finish();
    assert_eq!(program.instances[0].lane, Lane::Communication);
    let dump = program.to_string();
    let line = "AllToAll { groups: Groups { size: 4, stride: 1 }, first: 1, piece_rows: 3 }(%0)  \
                # gradients fprop, communication lane";
    assert!(dump.contains(line), "{dump}");
}
