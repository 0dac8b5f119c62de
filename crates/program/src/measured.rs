//! The pass that has a tensor's largest magnitude come out of what makes the tensor, where a cast needs it for a scale of the whole: what was
//! read to be measured is read no more. It is the same number, so the cast is the same to the bit.

use crate::trace::instantiate;
use crate::{Code, Instance, Program, TraceError, ValueId, WriteMode};
use std::collections::HashMap;

/// What last wrote a value.
struct Written {
    /// Which instance, and as which output.
    by: (usize, usize),
    /// Its largest magnitude, once that is made.
    amax: Option<ValueId>,
}

/// Tells casts the largest magnitudes of what they cast, where what makes it can measure it.
pub fn apply(mut program: Program) -> Result<Program, TraceError> {
    let mut written: HashMap<ValueId, Written> = HashMap::new();
    let mut done: Vec<Instance> = Vec::with_capacity(program.instances.len());
    for mut reader in std::mem::take(&mut program.instances) {
        let informed = reader.code.op().with_known_amax();
        let read = reader.inputs.first().and_then(|v| written.get_mut(v));
        if let (Some(op), Some(of)) = (informed, read) {
            let (at, output) = of.by;
            if of.amax.is_none() && done[at].outputs[output].mode == WriteMode::Assign {
                of.amax = measured(&mut program, &mut done[at], output)?;
            }
            if let Some(amax) = of.amax {
                reader.inputs.push(amax);
                reader.code = Code::Plain(op);
            }
        }
        let makes = reader.outputs.iter().enumerate();
        written.extend(makes.map(|(k, o)| (o.value, Written { by: (done.len(), k), amax: None })));
        done.push(reader);
    }
    program.instances = done;
    Ok(program)
}

/// Has an instance measure an output too, if it can.
fn measured(
    program: &mut Program,
    maker: &mut Instance,
    output: usize,
) -> Result<Option<ValueId>, TraceError> {
    let Some(op) = maker.code.op().measuring(output) else { return Ok(None) };
    let targets: Vec<_> = maker.outputs.iter().map(|o| Some(o.value)).collect();
    let made = instantiate(program, Code::Plain(op), &maker.inputs, &targets, maker.origin.clone())?;
    let amax = made.outputs[targets.len()];
    maker.code = made.code;
    maker.outputs.push(amax);
    Ok(Some(amax.value))
}
