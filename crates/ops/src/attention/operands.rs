//! Arguments of our attention kernels: the structures of `kernel.cu` and `flash/common.cuh`.

use super::Attention;
use xtrain_cuda::{CudaTensor, DevicePtr, Operands, kernel_struct};

kernel_struct! {
    struct Shape {
        seq_len: i32,
        heads: i32,
        kv_heads: i32,
        doc_start: DevicePtr,
    }
}

impl Shape {
    fn new(op: &Attention, doc_start: Option<&CudaTensor>) -> Shape {
        Shape {
            seq_len: op.seq_len as i32,
            heads: op.heads as i32,
            kv_heads: op.kv_heads as i32,
            doc_start: doc_start.map_or(DevicePtr(0), |t| t.place),
        }
    }
}

kernel_struct! {
    pub(super) struct Forward {
        qkv: DevicePtr,
        o: DevicePtr,
        lse: DevicePtr,
        shape: Shape,
    }
}

impl Forward {
    pub(super) fn new(op: &Attention, operands: &Operands<'_>) -> Forward {
        let [o, lse] = [0, 1].map(|n| operands.outputs[n].place);
        let shape = Shape::new(op, operands.inputs.get(1));
        Forward { qkv: operands.inputs[0].place, o, lse, shape }
    }
}

kernel_struct! {
    pub(super) struct Backward {
        d_o: DevicePtr,
        qkv: DevicePtr,
        o: DevicePtr,
        lse: DevicePtr,
        delta: DevicePtr,
        dqkv: DevicePtr,
        shape: Shape,
    }
}

impl Backward {
    /// Delta lies at the start of the workspace.
    pub(super) fn new(op: &Attention, operands: &Operands<'_>) -> Backward {
        let [d_o, qkv, o, lse] = [0, 1, 2, 3].map(|n| operands.inputs[n].place);
        let delta = operands.workspace[0].place;
        let dqkv = operands.outputs[0].place;
        Backward { d_o, qkv, o, lse, delta, dqkv, shape: Shape::new(op, operands.inputs.get(4)) }
    }
}
