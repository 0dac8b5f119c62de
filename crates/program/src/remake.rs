//! What is made again is made by a gradient on its way, where one reads the same values anyway ([`crate::Op::remaking`]).
//!
//! The recompute pass runs a norm or an activation again before the products that need its output. Its own gradient reads its inputs a
//! little later; so the products wait for that, and what they need costs one write instead of a pass of its own.

use crate::{Code, Instance, Output, Program, Role, ValueId};
use std::collections::{HashSet, VecDeque};

pub(crate) fn apply(mut program: Program) -> Program {
    let mut unread = vec![0; program.values.len()];
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        unread[v.0 as usize] += 1;
    }
    let mut to_come = VecDeque::from(std::mem::take(&mut program.instances));
    while let Some(instance) = to_come.pop_front() {
        for v in &instance.inputs {
            unread[v.0 as usize] -= 1;
        }
        if instance.origin.role != Role::Recompute || !merge(&instance, &mut to_come, &unread) {
            program.instances.push(instance);
        }
    }
    program
}

/// Lets a gradient among those `to_come` make what `again` makes, if there is one that can; then `again` is needed no more. Each value
/// is `unread` so many times, by those to come.
fn merge(again: &Instance, to_come: &mut VecDeque<Instance>, unread: &[usize]) -> bool {
    let made = again.outputs[0].value;
    if again.outputs[1..].iter().any(|o| unread[o.value.0 as usize] > 0) {
        return false;
    }
    // What reads nothing has no input that a gradient reads anyway.
    let Some(first) = again.inputs.first() else { return false };
    let readers = to_come.iter().enumerate().filter(|(_, i)| i.inputs.contains(first));
    let found = readers.take(unread[first.0 as usize]).find_map(|(offset, gradient)| {
        let position = |v: &ValueId| gradient.inputs.iter().position(|i| i == v);
        let positions: Vec<usize> = again.inputs.iter().map(position).collect::<Option<_>>()?;
        Some((offset, gradient.code.op().remaking(again.code.op(), &positions)?))
    });
    let Some((offset, op)) = found else { return false };
    // Those that need it wait, and so do those that need what they make; the gradient must not be among them.
    let mut late: HashSet<ValueId> = HashSet::from([made]);
    let waits: Vec<bool> = to_come
        .range(..=offset)
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
    let mut waiting = Vec::new();
    let mut rest = Vec::new();
    for (instance, waits) in to_come.drain(..=offset).zip(waits) {
        if waits { waiting.push(instance) } else { rest.push(instance) }
    }
    if let Some(gradient) = rest.last_mut() {
        gradient.code = Code::Plain(op);
        gradient.outputs.push(Output { value: made, mode: again.outputs[0].mode });
    }
    rest.into_iter().chain(waiting).rev().for_each(|instance| to_come.push_front(instance));
    true
}
