//! What is made again is made by a gradient on its way, where one reads the same values anyway ([`crate::Op::remaking`]).
//!
//! The recompute pass runs a norm or an activation again before the products that need its output. Its own gradient reads its inputs a
//! little later; so the products wait for that, and what they need costs one write instead of a pass of its own.

use crate::{Code, Instance, Output, Program, Role, ValueId};
use std::collections::HashSet;

pub(crate) fn apply(mut program: Program) -> Program {
    let mut index = 0;
    while index < program.instances.len() {
        match program.instances[index].origin.role == Role::Recompute && merge(&mut program, index) {
            // What follows moved here.
            true => {}
            false => index += 1,
        }
    }
    program
}

/// Lets a later gradient make what the instance at `index` makes, if there is one that can; then that instance is gone.
fn merge(program: &mut Program, index: usize) -> bool {
    let again = &program.instances[index];
    let made = again.outputs[0].value;
    let reads = |i: &Instance, v: ValueId| i.inputs.contains(&v);
    let later = &program.instances[index + 1..];
    if again.outputs[1..].iter().any(|o| later.iter().any(|i| reads(i, o.value))) {
        return false;
    }
    let found = later.iter().enumerate().find_map(|(offset, gradient)| {
        let position = |v: &ValueId| gradient.inputs.iter().position(|i| i == v);
        let positions: Vec<usize> = again.inputs.iter().map(position).collect::<Option<_>>()?;
        Some((offset, gradient.code.op().remaking(again.code.op(), &positions)?))
    });
    let Some((offset, op)) = found else { return false };
    // Those that need it wait, and so do those that need what they make; the gradient must not be among them.
    let mut late: HashSet<ValueId> = HashSet::from([made]);
    let waits: Vec<bool> = later[..=offset]
        .iter()
        .map(|i| {
            // What is added to is read.
            let touches = i.inputs.iter().copied().chain(i.outputs.iter().map(|o| o.value));
            let waits = touches.into_iter().any(|v| late.contains(&v));
            late.extend(i.outputs.iter().filter(|_| waits).map(|o| o.value));
            waits
        })
        .collect();
    if waits[offset] {
        return false;
    }
    let again = program.instances.remove(index);
    let mut waiting = Vec::new();
    let mut rest = Vec::new();
    for (instance, waits) in program.instances.drain(index..=index + offset).zip(waits) {
        if waits { waiting.push(instance) } else { rest.push(instance) }
    }
    if let Some(gradient) = rest.last_mut() {
        gradient.code = Code::Plain(op);
        gradient.outputs.push(Output { value: made, mode: again.outputs[0].mode });
    }
    program.instances.splice(index..index, rest.into_iter().chain(waiting));
    true
}
