//! Tests of [`RowsNeeded`] and [`CheckRoom`].

use super::{CheckRoom, RowsNeeded, SKIPPED};
use crate::run_op::{run, tensor};
use xtrain_tensor::{CpuKernel, DType, HostTensor, View, ViewMut};

#[test]
fn rows_are_those_of_the_micro_batch_with_the_most() {
    let mut most = HostTensor::zeros(tensor(DType::F32, &[1], &[0.0]).ty());
    for (micro_step, (rows, expected)) in [(5.0, 5.0), (9.0, 9.0), (7.0, 9.0)].into_iter().enumerate() {
        let needed = tensor(DType::I32, &[1], &[rows]);
        let (input, ty) = (View::new(needed.ty(), needed.bytes()), most.ty());
        RowsNeeded.run(&[input], &mut [ViewMut::new(ty, most.bytes_mut(), micro_step > 0)]);
        assert_eq!(most.to_f64(), [expected]);
    }
}

#[test]
fn a_block_without_room_halts_all_later_steps() {
    let op = CheckRoom { room: 128 };
    let after = |rows: &[f64], halted: f64| {
        let inputs = [tensor(DType::F32, &[rows.len()], rows), tensor(DType::U32, &[1], &[halted])];
        let outputs = run(&op, &inputs.each_ref());
        (outputs[0].to_f64()[0], outputs[1].to_f64()[0])
    };
    assert_eq!(after(&[128.0, 0.0], 0.0), (0.0, 0.0));
    assert_eq!(after(&[1.0, 129.0], 0.0), (1.0, f64::from(SKIPPED)));
    assert_eq!(after(&[1.0, 2.0], 1.0), (1.0, f64::from(SKIPPED)));
}
