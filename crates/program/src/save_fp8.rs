//! The pass that saves the inputs of some ops for the backward in fewer bits (DeepSeek-V3, arXiv 2412.19437,
//! section 3.3.3).
//!
//! The input of SwiGLU is the largest tensor of a block. The pass saves an FP8 copy of it. In the backward,
//! the readers of the input read the tensor restored from that copy, and the readers of SwiGLU's output read
//! the output of SwiGLU run again on the restored tensor. The input of a linear layer is saved in this form
//! if an op other than the layer's own gradient reads it too: attention's output, which the gradient of
//! attention reads. (For the layer's own gradient the cast of its operand is enough.) A restored tensor
//! differs from the input in its last bits, so the gradients are those of the restored input, under any
//! recompute policy.
//!
//! The input of an activation is restored before each of its readers, so that each can be fused with the op
//! that restores it ([`crate::fuse`]). That of a linear layer is restored once, before the first reader.

use crate::program::instantiate;
use crate::quantize::QuantizeOps;
use crate::{
    Code, Instance, LinearGemm, Op, Origin, Program, Quantization, Role, Stage, Storage, TraceError, ValueId,
};
use std::collections::{HashMap, HashSet};

/// The kind of an op whose input may be saved in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// An activation, which the backward then recomputes.
    Activation,
    /// A linear layer.
    Linear,
}

/// An input that may be saved in fewer bits, for the caller's decision.
#[derive(Clone, Copy, Debug)]
pub struct SaveCandidate<'a> {
    /// The origin of the op that reads it.
    pub origin: &'a Origin,
    /// The op that reads it.
    pub op: &'a dyn Op,
    /// The kind of that op.
    pub reader: Reader,
    /// Columns of the input.
    pub columns: usize,
}

/// An input that is saved in fewer bits.
struct Saved {
    /// Numbers and scales.
    copy: [ValueId; 2],
    /// The forward instance that reads the input.
    instance: Instance,
    reader: Reader,
    /// The restored input, if all readers share one.
    restored: Option<ValueId>,
}

/// Saves the inputs for which `choose` returns a format, except those that the backward does not read.
pub fn apply(
    program: Program,
    ops: &dyn QuantizeOps,
    choose: &dyn Fn(SaveCandidate<'_>) -> Option<Quantization>,
) -> Result<Program, TraceError> {
    let mut out = program;
    let instances = std::mem::take(&mut out.instances);
    let is_backward = |instance: &Instance| instance.origin.stage == Stage::Backward;
    let backward = instances.iter().filter(|i| is_backward(i));
    let read: HashSet<ValueId> = backward.flat_map(|i| i.inputs.iter().copied()).collect();
    // The index in `all`, by the input and by the output of an activation.
    let mut index_of: HashMap<ValueId, usize> = HashMap::new();
    let mut all: Vec<Saved> = Vec::new();
    for mut instance in instances {
        if let Some(reader) = reader(&out, &instance) {
            let input = instance.inputs[0];
            let mut values = vec![input];
            if reader == Reader::Activation {
                values.push(instance.outputs[0].value);
            }
            let is_read = values.iter().any(|v| read.contains(v));
            let is_transient = matches!(out.value(input).storage, Storage::Transient);
            let columns = out.ty(input).shape.rows_cols().1;
            let candidate =
                SaveCandidate { origin: &instance.origin, op: instance.code.op(), reader, columns };
            if let Some(quantization) = choose(candidate).filter(|_| is_read && is_transient) {
                let origin = Origin { role: Role::Precision, ..instance.origin.clone() };
                let quantize = Code::Plain(ops.quantize(quantization, [true, false]));
                let cast = instantiate(&mut out, quantize, &[input], &[], origin)?;
                let copy = [0, 1].map(|n| cast.outputs[n].value);
                out.instances.push(cast);
                index_of.extend(values.into_iter().map(|value| (value, all.len())));
                all.push(Saved { copy, instance: instance.clone(), reader, restored: None });
            }
        }
        if is_backward(&instance) {
            for v in &mut instance.inputs {
                if let Some(&index) = index_of.get(v) {
                    *v = restored(&mut out, ops, &mut all[index], *v)?;
                }
            }
        }
        out.instances.push(instance);
    }
    Ok(out)
}

/// The kind of a forward instance, if its input may be saved in fewer bits.
fn reader(program: &Program, instance: &Instance) -> Option<Reader> {
    let op = instance.code.op();
    if instance.origin.stage != Stage::Forward {
        return None;
    }
    let gemm = op.gemms(&program.input_types(instance)).and_then(|gemms| gemms.only());
    if gemm.is_some_and(|gemm| gemm.kind == LinearGemm::Fprop) {
        return Some(Reader::Linear);
    }
    let is_activation = !instance.inputs.is_empty() && instance.outputs.len() == 1 && op.is_cheap(0);
    is_activation.then_some(Reader::Activation)
}

/// The value that the backward reads for `v`: the restored input, or, if `v` is the output of an activation,
/// the output of the activation run again.
fn restored(
    program: &mut Program,
    ops: &dyn QuantizeOps,
    saved: &mut Saved,
    v: ValueId,
) -> Result<ValueId, TraceError> {
    let input = saved.instance.inputs[0];
    let origin = |role| Origin { role, stage: Stage::Backward, ..saved.instance.origin.clone() };
    let restored = match saved.restored {
        Some(restored) => restored,
        None => {
            let restore = Code::Plain(ops.dequantize(program.ty(input).dtype));
            let restore = instantiate(program, restore, &saved.copy, &[], origin(Role::Precision))?;
            let restored = restore.outputs[0].value;
            program.instances.push(restore);
            saved.restored = (saved.reader == Reader::Linear).then_some(restored);
            restored
        }
    };
    if v == input {
        return Ok(restored);
    }
    let mut inputs = saved.instance.inputs.clone();
    inputs[0] = restored;
    let code = saved.instance.code.clone();
    let again = instantiate(program, code, &inputs, &[], origin(Role::Recompute))?;
    let output = again.outputs[0].value;
    program.instances.push(again);
    Ok(output)
}
