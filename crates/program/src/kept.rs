//! The pass that keeps the inputs of activations in FP8 from forward to backward.
//!
//! The input of SwiGLU is the largest tensor of a block. Behind the forward, all that reads it or what was made of it reads what is restored
//! of an FP8 copy, and the activation is made again of that (DeepSeek-V3, arXiv 2412.19437, section 3.3.3). It is not made again to the bit,
//! unlike what is recomputed: the gradients are those of the restored input, whatever is recomputed.
//!
//! What restores stands in front of each reader of its own, so that it can become a part of it ([`crate::fuse`]).

use crate::quantized::{Quantization, QuantizedOps};
use crate::trace::instantiate;
use crate::{Code, Instance, Origin, Program, Role, Stage, Storage, TraceError, ValueId};
use std::collections::HashMap;

/// What is kept of an activation's input.
struct Kept {
    /// Numbers and scales.
    copy: [ValueId; 2],
    /// The activation, and what it made.
    of: Instance,
}

/// Keeps what may be kept so as `choose` says, which is shown where the activation is and how many columns its input has; what nothing in the
/// backward reads is left alone.
pub fn apply(
    program: Program,
    ops: &dyn QuantizedOps,
    choose: &dyn Fn(&Origin, usize) -> Option<Quantization>,
) -> Result<Program, TraceError> {
    let mut out = Program { instances: Vec::new(), ..program.clone() };
    let is_backward = |instance: &Instance| instance.origin.stage == Stage::Backward;
    let backward: Vec<_> = program.instances.iter().filter(|i| is_backward(i)).collect();
    // By the activation's input, and by its output.
    let mut kept: HashMap<ValueId, usize> = HashMap::new();
    let mut all: Vec<Kept> = Vec::new();
    for mut instance in program.instances.iter().cloned() {
        if instance.origin.stage == Stage::Forward && instance.code.op().may_keep_in_fp8() {
            let (input, output) = (instance.inputs[0], instance.outputs[0].value);
            let is_read = backward.iter().any(|i| i.inputs.iter().any(|v| [input, output].contains(v)));
            let lasts = !matches!(program.value(input).storage, Storage::Transient);
            if let Some(quantization) =
                choose(&instance.origin, program.ty(input).shape.rows_cols().1).filter(|_| is_read && !lasts)
            {
                let of = instance.clone();
                let copy = match of.code.op().keeping(quantization) {
                    Some(op) => {
                        let code = Code::Plain(op);
                        instance =
                            instantiate(&mut out, code, &of.inputs, &[Some(output)], of.origin.clone())?;
                        [1, 2].map(|n| instance.outputs[n].value)
                    }
                    None => {
                        let origin = Origin { role: Role::Precision, ..of.origin.clone() };
                        let quantize = Code::Plain(ops.quantize(quantization, [true, false]));
                        let cast = instantiate(&mut out, quantize, &[input], &[], origin)?;
                        out.instances.push(cast.clone());
                        [0, 1].map(|n| cast.outputs[n].value)
                    }
                };
                kept.extend([(input, all.len()), (output, all.len())]);
                all.push(Kept { copy, of });
            }
        }
        if is_backward(&instance) {
            for v in &mut instance.inputs {
                if let Some(&at) = kept.get(v) {
                    *v = restored(&mut out, ops, &all[at], *v)?;
                }
            }
        }
        out.instances.push(instance);
    }
    Ok(out)
}

/// The activation's input as it is restored, or, where `v` is its output, that made again.
fn restored(
    program: &mut Program,
    ops: &dyn QuantizedOps,
    kept: &Kept,
    v: ValueId,
) -> Result<ValueId, TraceError> {
    let input = kept.of.inputs[0];
    let origin = |role| Origin { role, stage: Stage::Backward, ..kept.of.origin.clone() };
    let restore = Code::Plain(ops.dequantize(program.ty(input).dtype));
    let restore = instantiate(program, restore, &kept.copy, &[], origin(Role::Precision))?;
    let mut made = restore.outputs[0].value;
    program.instances.push(restore);
    if v != input {
        let again = instantiate(program, kept.of.code.clone(), &[made], &[], origin(Role::Recompute))?;
        made = again.outputs[0].value;
        program.instances.push(again);
    }
    Ok(made)
}
