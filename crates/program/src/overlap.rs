//! The pass that begins collectives of tokens early, so that kernels run beside them.
//!
//! Kernels wait for the tokens that ranks exchange (those that share experts or matrices). Each of these
//! collectives moves up, together with the instances that nothing else needs, past instances on which they do
//! not depend: wgrad, sums and exchanges of gradients. If too few FLOPs are then between it and the first
//! reader of its output, the reader moves down, past what is recomputed without it. The operands of what is
//! passed live longer, so it ends where `FLOPS_PER_BYTE` are enough.
//!
//! Collectives of parameters and of their gradients have their places by [`crate::shard`]; messages, by the
//! schedule of the pipeline.

use crate::wire::WireOps;
use crate::{Code, Collective, Instance, Lane, Phase, Program, Role, Storage, ValueId};

/// FLOPs beside a collective that hide a byte that it sends: a GPU of today performs 1,000 to 6,000 while
/// NVLink moves one (H200: some 700 TFLOP/s in bf16, and 350 GB/s).
const FLOPS_PER_BYTE: f64 = 4096.0;

/// Moves collectives up, and the readers of their outputs down.
pub fn apply(mut program: Program, ops: &dyn WireOps) -> Program {
    leave_out_ids(&mut program, ops);
    let collectives = program.instances.iter().filter(|i| is_of_tokens(i));
    let exchanged: Vec<ValueId> = collectives.map(|i| i.outputs[0].value).collect();
    if exchanged.is_empty() {
        return program;
    }
    let mut reads = vec![0; program.values.len()];
    program.instances.iter().flat_map(|i| &i.inputs).for_each(|v| reads[v.0 as usize] += 1);
    let mut instances = std::mem::take(&mut program.instances);
    for output in exchanged {
        let writes = |i: &Instance| i.outputs.iter().any(|o| o.value == output);
        let Some(at) = instances.iter().position(writes) else { continue };
        let (needed, mut beside) = (FLOPS_PER_BYTE * program.cost(&instances[at]).sent_bytes, 0.0);
        let Some(reader) = (at + 1..instances.len()).find(|&n| instances[n].inputs.contains(&output)) else {
            continue;
        };
        beside += instances[at..reader].iter().map(|i| flops(&program, i)).sum::<f64>();
        move_up(&program, &mut instances, at, needed, &mut beside, &reads);
        move_down(&program, &mut instances, reader, needed, beside);
    }
    program.instances = instances;
    program
}

/// Leaves out the second inputs of gathers, which only their backward reads: ids of experts, for which the
/// tokens would wait.
fn leave_out_ids(program: &mut Program, ops: &dyn WireOps) {
    let values = &program.values;
    for instance in program.instances.iter_mut().filter(|i| i.inputs.len() == 2) {
        let Some((Collective::AllGather { first: 0 }, groups)) = instance.code.op().collective() else {
            continue;
        };
        let rows = values[instance.outputs[0].value.0 as usize].ty.shape[0];
        instance.code = Code::Plain(ops.gather_rows(groups, rows));
        instance.inputs.truncate(1);
    }
}

/// True if it is a collective of tokens or of their gradients.
fn is_of_tokens(instance: &Instance) -> bool {
    let is_of_parameters = matches!(instance.origin.role, Role::Reduce | Role::Gather | Role::Update);
    let collective = instance.code.op().collective();
    instance.phase() == Phase::Micro
        && !is_of_parameters
        && collective.is_some_and(|(collective, _)| !collective.is_message())
}

/// Moves the instance `at`, with the producers that serve it alone, up to where enough FLOPs are `beside` it.
fn move_up(
    program: &Program,
    instances: &mut [Instance],
    at: usize,
    needed: f64,
    beside: &mut f64,
    reads: &[usize],
) {
    let stage = instances[at].origin.stage;
    // What moves, and what it passes, each from the last to the first.
    let (mut moved, mut passed) = (vec![at], Vec::new());
    let mut first = at;
    while first > 0 && instances[first - 1].origin.stage == stage {
        let (n, instance) = (first - 1, &instances[first - 1]);
        let serves = |others: &[usize]| serves_only(program, instance, others, instances, reads);
        let conflicts = || moved.iter().any(|&m| conflict(instance, &instances[m]));
        // Operands that only passed instances read need not be there before.
        if *beside >= needed && !serves(&passed) {
            break;
        } else if serves(&moved) {
            moved.push(n);
        } else if conflicts() {
            break;
        } else {
            *beside += flops(program, instance);
            passed.push(n);
        }
        first = n;
    }
    let order: Vec<Instance> =
        moved.iter().rev().chain(passed.iter().rev()).map(|&n| instances[n].clone()).collect();
    instances[first..=at].clone_from_slice(&order);
}

/// Moves recomputed instances that follow `reader` and do not depend on it in front of it, until enough FLOPs
/// are `beside` the collective that it waits for.
fn move_down(program: &Program, instances: &mut [Instance], reader: usize, needed: f64, mut beside: f64) {
    // Instances from `reader` on that do not move up, and so stay in this order.
    let mut end = reader + 1;
    let mut first = reader;
    while beside < needed
        && let Some(next) = instances.get(end)
        && next.origin.role == Role::Recompute
        && next.origin.stage == instances[first].origin.stage
    {
        if !instances[first..end].iter().any(|i| conflict(i, next)) {
            beside += flops(program, next);
            instances[first..=end].rotate_right(1);
            first += 1;
        }
        end += 1;
    }
}

/// True if only the instances at `others` read what `instance` writes, at least one of them.
fn serves_only(
    program: &Program,
    instance: &Instance,
    others: &[usize],
    instances: &[Instance],
    reads: &[usize],
) -> bool {
    let mut any = false;
    let all = instance.outputs.iter().all(|output| {
        let value = program.value(output.value);
        let of_others = others.iter().flat_map(|&n| &instances[n].inputs).filter(|v| **v == output.value);
        let count = of_others.count();
        any |= count > 0;
        matches!(value.storage, Storage::Transient)
            && !value.boundary
            && count == reads[output.value.0 as usize]
    });
    all && any
}

/// True if two instances cannot change places: one writes what the other reads or writes.
fn conflict(a: &Instance, b: &Instance) -> bool {
    let touches = |i: &Instance, v: ValueId| i.inputs.contains(&v) || i.outputs.iter().any(|o| o.value == v);
    a.outputs.iter().any(|o| touches(b, o.value)) || b.outputs.iter().any(|o| a.inputs.contains(&o.value))
}

/// FLOPs of an instance on the compute lane.
fn flops(program: &Program, instance: &Instance) -> f64 {
    let is_kernel = instance.lane == Lane::Compute;
    if is_kernel { program.cost(instance).flops() } else { 0.0 }
}
