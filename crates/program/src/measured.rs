//! The pass that has what makes a tensor also make its cast to FP8, or else the largest magnitude that the cast needs for a scale of the
//! whole. What was read for that is read no more. It is the same number, so the cast is the same to the bit.

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

/// Has what makes a tensor cast it too, where it can; else tells casts the largest magnitudes of what they cast, where that can be measured.
pub fn apply(mut program: Program) -> Result<Program, TraceError> {
    let mut written: HashMap<ValueId, Written> = HashMap::new();
    let mut done: Vec<Instance> = Vec::with_capacity(program.instances.len());
    for mut reader in std::mem::take(&mut program.instances) {
        let read = reader.inputs.first().and_then(|v| written.get_mut(v));
        if let Some(at) =
            read.as_ref().and_then(|of| cast(&mut program, &mut done, of.by.0, &reader).transpose())
        {
            let (at, first) = at?;
            let makes = reader.outputs.iter().enumerate();
            written.extend(makes.map(|(k, o)| (o.value, Written { by: (at, first + k), amax: None })));
            continue;
        }
        let informed = reader.code.op().with_known_amax();
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

/// Has the instance that made what `reader` reads make what that makes, if it can: which one, and its first output of those.
fn cast(
    program: &mut Program,
    done: &mut [Instance],
    at: usize,
    reader: &Instance,
) -> Result<Option<(usize, usize)>, TraceError> {
    let (before, since) = done.split_at_mut(at + 1);
    let maker = &mut before[at];
    // The cast moves up to what makes the tensor: nothing between may touch what it writes or make what it reads, and the stage is one.
    let made_by = |v| maker.outputs.iter().position(|o| o.value == v);
    let made: Vec<Option<usize>> = reader.inputs.iter().map(|&v| made_by(v)).collect();
    let others = reader.inputs.iter().zip(&made).filter(|(_, made)| made.is_none()).map(|(&v, _)| v);
    let others: Vec<ValueId> = others.collect();
    let touches = |i: &Instance| {
        let mut touched = i.inputs.iter().copied().chain(i.outputs.iter().map(|o| o.value));
        touched.any(|v| reader.outputs.iter().any(|o| o.value == v))
    };
    let makes = |i: &Instance| i.outputs.iter().any(|o| reader.inputs.contains(&o.value));
    let is_assigned = made.iter().flatten().all(|&output| maker.outputs[output].mode == WriteMode::Assign);
    let is_near = maker.origin.stage == reader.origin.stage && is_assigned;
    if !is_near || touches(maker) || since.iter().any(|i| touches(i) || makes(i)) {
        return Ok(None);
    }
    let Some(op) = maker.code.op().casting(&made, reader.code.op()) else { return Ok(None) };
    maker.inputs.extend(others);
    let first = maker.outputs.len();
    maker.outputs.extend(&reader.outputs);
    let targets: Vec<_> = maker.outputs.iter().map(|o| Some(o.value)).collect();
    maker.code = instantiate(program, Code::Plain(op), &maker.inputs, &targets, maker.origin.clone())?.code;
    Ok(Some((at, first)))
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
