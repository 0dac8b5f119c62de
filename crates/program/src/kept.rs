//! The pass that keeps the inputs of some ops in fewer bits from forward to backward (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).
//!
//! The input of SwiGLU is the largest tensor of a block. Behind the forward, all that reads it or what was made of it reads what is restored
//! of an FP8 copy, and the activation is made again of that. The input of a linear layer is kept so where more than the layer's own
//! gradient reads it, which a cast of its factors would do for: attention's output, of which attention's gradient is made. None of it is
//! made again to the bit, unlike what is recomputed: the gradients are those of the restored input, whatever is recomputed.
//!
//! What restores an activation's input stands in front of each reader of its own, so that it can become a part of it ([`crate::fuse`]); a linear
//! layer's is restored once, in front of the first.

use crate::quantized::{LinearGemm, Quantization, QuantizedOps};
use crate::trace::instantiate;
use crate::{Code, Instance, Origin, Program, Role, Stage, Storage, TraceError, ValueId};
use std::collections::HashMap;

/// Whose input may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// An activation, whose output is then made again.
    Activation,
    /// A linear layer.
    Linear,
}

/// An input as whoever chooses is shown it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Where what reads it is.
    pub origin: &'a Origin,
    /// And what that is.
    pub reader: Reader,
    /// Columns of the input.
    pub columns: usize,
}

/// What is kept of an input.
struct Kept {
    /// Numbers and scales.
    copy: [ValueId; 2],
    /// The activation or linear layer, and what it made.
    of: Instance,
    reader: Reader,
    /// Where one restored value is for all.
    restored: Option<ValueId>,
}

/// Keeps what may be kept so as `choose` says; what nothing in the backward reads is left alone.
pub fn apply(
    program: Program,
    ops: &dyn QuantizedOps,
    choose: &dyn Fn(Candidate<'_>) -> Option<Quantization>,
) -> Result<Program, TraceError> {
    let mut out = Program { instances: Vec::new(), ..program.clone() };
    let is_backward = |instance: &Instance| instance.origin.stage == Stage::Backward;
    let backward: Vec<_> = program.instances.iter().filter(|i| is_backward(i)).collect();
    // By the input, and by an activation's output.
    let mut kept: HashMap<ValueId, usize> = HashMap::new();
    let mut all: Vec<Kept> = Vec::new();
    for mut instance in program.instances.iter().cloned() {
        if let Some(reader) = reader(&instance) {
            let input = instance.inputs[0];
            let mut values = vec![input];
            if reader == Reader::Activation {
                values.push(instance.outputs[0].value);
            }
            let is_read = backward.iter().any(|i| i.inputs.iter().any(|v| values.contains(v)));
            let lasts = !matches!(program.value(input).storage, Storage::Transient);
            let columns = program.ty(input).shape.rows_cols().1;
            let candidate = Candidate { origin: &instance.origin, reader, columns };
            if let Some(quantization) = choose(candidate).filter(|_| is_read && !lasts) {
                let of = instance.clone();
                let copy = match of.code.op().keeping(quantization) {
                    Some(op) => {
                        let (code, targets) = (Code::Plain(op), [Some(of.outputs[0].value)]);
                        instance = instantiate(&mut out, code, &of.inputs, &targets, of.origin.clone())?;
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
                kept.extend(values.into_iter().map(|value| (value, all.len())));
                all.push(Kept { copy, of, reader, restored: None });
            }
        }
        if is_backward(&instance) {
            for v in &mut instance.inputs {
                if let Some(&at) = kept.get(v) {
                    *v = restored(&mut out, ops, &mut all[at], *v)?;
                }
            }
        }
        out.instances.push(instance);
    }
    Ok(out)
}

/// As what a forward instance reads an input that may be kept.
fn reader(instance: &Instance) -> Option<Reader> {
    let op = instance.code.op();
    let reads_so = [
        (Reader::Activation, op.may_keep_in_fp8()),
        (Reader::Linear, op.linear_gemm() == Some(LinearGemm::Fprop)),
    ];
    let is_forward = instance.origin.stage == Stage::Forward;
    reads_so.into_iter().find_map(|(reader, is_so)| (is_so && is_forward).then_some(reader))
}

/// The input as it is restored, or, where `v` is an activation's output, that made again.
fn restored(
    program: &mut Program,
    ops: &dyn QuantizedOps,
    kept: &mut Kept,
    v: ValueId,
) -> Result<ValueId, TraceError> {
    if let Some(restored) = kept.restored {
        return Ok(restored);
    }
    let input = kept.of.inputs[0];
    let origin = |role| Origin { role, stage: Stage::Backward, ..kept.of.origin.clone() };
    let restore = Code::Plain(ops.dequantize(program.ty(input).dtype));
    let restore = instantiate(program, restore, &kept.copy, &[], origin(Role::Precision))?;
    let mut made = restore.outputs[0].value;
    program.instances.push(restore);
    if kept.reader == Reader::Linear {
        kept.restored = Some(made);
    }
    if v != input {
        let again = instantiate(program, kept.of.code.clone(), &[made], &[], origin(Role::Recompute))?;
        made = again.outputs[0].value;
        program.instances.push(again);
    }
    Ok(made)
}
