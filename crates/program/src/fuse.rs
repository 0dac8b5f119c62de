//! The pass that lets an op and the only reader of one of its outputs become one op, so that what passed between them never exists.
//!
//! Casts to FP8 come out of the norm or activation that they cast: memory that would be written and read again is neither, and what is
//! made is the same to the bit. Which ops can be one, they say themselves ([`crate::Op::fuse`]).

use crate::trace::instantiate;
use crate::{
    Code, Fused, Fusion, Instance, Output, Program, Source, Stage, Storage, TraceError, ValueId, WriteMode,
};

/// Makes one of each op and its reader that can be. Value ids keep their meaning; what nothing makes any more, nothing reads.
pub fn apply(mut program: Program) -> Result<Program, TraceError> {
    let mut reads = vec![0; program.values.len()];
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        reads[v.0 as usize] += 1;
    }
    // By value: the instance that makes it, and as which output.
    let mut made: Vec<Option<(usize, usize)>> = vec![None; program.values.len()];
    let mut done: Vec<Option<Instance>> = Vec::with_capacity(program.instances.len());
    for mut instance in std::mem::take(&mut program.instances) {
        while let Some((at, fusion, position)) = found(&program, &done, &reads, &made, &instance) {
            let Some(maker) = done[at].take() else { unreachable!("it was found there") };
            let (rest, fused) = merged(&mut program, &maker, fusion, &instance, position)?;
            made.resize(program.values.len(), None);
            reads.resize(program.values.len(), 0);
            for v in maker.inputs.iter().chain(&instance.inputs) {
                reads[v.0 as usize] -= 1;
            }
            for v in fused.inputs.iter().chain(rest.iter().flat_map(|rest| &rest.inputs)) {
                reads[v.0 as usize] += 1;
            }
            note(&mut made, at, rest.as_ref());
            done[at] = rest;
            instance = fused;
        }
        note(&mut made, done.len(), Some(&instance));
        done.push(Some(instance));
    }
    program.instances = done.into_iter().flatten().collect();
    Ok(program)
}

/// Notes what an instance makes.
fn note(made: &mut [Option<(usize, usize)>], at: usize, instance: Option<&Instance>) {
    for (k, o) in instance.iter().flat_map(|i| i.outputs.iter().enumerate()) {
        made[o.value.0 as usize] = Some((at, k));
    }
}

/// The maker of an input of `reader` with which it becomes one, how, and which input that is.
fn found(
    program: &Program,
    done: &[Option<Instance>],
    reads: &[usize],
    made: &[Option<(usize, usize)>],
    reader: &Instance,
) -> Option<(usize, Fusion, usize)> {
    if reader.origin.stage == Stage::Update {
        return None;
    }
    reader.inputs.iter().enumerate().find_map(|(position, v)| {
        let value = program.value(*v);
        let passes =
            matches!(value.storage, Storage::Transient) && !value.boundary && reads[v.0 as usize] == 1;
        let (at, output) = made[v.0 as usize].filter(|_| passes)?;
        let maker = done[at].as_ref()?;
        // What the backward reads of a forward value is what was kept of it.
        let is_near =
            maker.origin.stage == reader.origin.stage && maker.outputs[output].mode == WriteMode::Assign;
        let fusion = is_near.then(|| maker.code.op().fuse(output, reader.code.op(), position))??;
        // What else it makes is made later then, so nothing may read it before.
        let moves = fusion.rest.is_none();
        let is_read = |o: &Output| done[at + 1..].iter().flatten().any(|i| i.inputs.contains(&o.value));
        if moves && maker.outputs.iter().any(is_read) {
            return None;
        }
        Some((at, fusion, position))
    })
}

/// What is left of `maker`, and what stands in the place of its `reader`.
fn merged(
    program: &mut Program,
    maker: &Instance,
    fusion: Fusion,
    reader: &Instance,
    position: usize,
) -> Result<(Option<Instance>, Instance), TraceError> {
    let others: Vec<Output> =
        maker.outputs.iter().copied().filter(|o| o.value != reader.inputs[position]).collect();
    let mut beside: Vec<ValueId> = Vec::new();
    let mut rest = None;
    if let Some((op, inputs)) = fusion.rest {
        let inputs: Vec<_> = inputs.into_iter().map(|n| maker.inputs[n]).collect();
        let targets: Vec<_> = others.iter().map(|o| Some(o.value)).collect();
        let mut made = instantiate(program, Code::Plain(op), &inputs, &targets, maker.origin.clone())?;
        beside.extend(made.outputs[others.len()..].iter().map(|o| o.value));
        made.outputs[..others.len()].copy_from_slice(&others);
        rest = Some(made);
    }
    let inputs: Vec<_> = (fusion.inputs.iter())
        .map(|input| match *input {
            Fused::Made(Source::Input(n)) => maker.inputs[n],
            Fused::Made(Source::Output(n)) => maker.outputs[n].value,
            Fused::Beside(n) => beside[n],
            Fused::Read(n) => reader.inputs[n],
        })
        .collect();
    let left = if rest.is_none() { others } else { Vec::new() };
    let outputs: Vec<Output> = reader.outputs.iter().copied().chain(left).collect();
    let targets: Vec<_> = outputs.iter().map(|o| Some(o.value)).collect();
    let code = Code::Plain(fusion.op);
    let fused = instantiate(program, code, &inputs, &targets, reader.origin.clone())?;
    Ok((rest, Instance { outputs, ..fused }))
}
