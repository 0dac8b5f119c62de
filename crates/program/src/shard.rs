//! The pass that spreads a training step over ranks.
//!
//! Parameters are cut by rows ([`RowShard`]). After the last writer of a parameter's gradient, in the last
//! micro-step, each rank receives its piece of the gradients of all ranks and adds them in the order of
//! ranks. Collectives and sums run on the communication lane, so that no kernel of the backward waits for
//! another rank. The sums are gathered back: every rank then has the whole gradient, with equal bits.
//!
//! The caller passes in the ops. Model code contains nothing about ranks.

use crate::program::instantiate;
use crate::{
    Code, Group, Instance, Lane, Op, Origin, Parallel, Program, Role, RowShard, Stage, TraceError, ValueId,
    When,
};
use std::collections::HashMap;
use std::sync::Arc;

/// The ops that the pass inserts.
pub trait ShardOps {
    /// The op that gathers pieces.
    fn all_gather(&self, shard: RowShard) -> Arc<dyn Op>;
    /// The op that sends each piece of a tensor to its rank.
    fn all_to_all(&self, shard: RowShard) -> Arc<dyn Op>;
    /// The op that adds the tensors of all ranks, in their order.
    fn sum_ranks(&self) -> Arc<dyn Op>;
}

/// Spreads the step over the ranks of `parallel`, given the cut of each parameter by its name.
pub fn apply(
    mut program: Program,
    parallel: &Parallel,
    cuts: &HashMap<String, RowShard>,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    let Group::World { size: 2.. } = parallel.world() else { return Ok(program) };
    for parameter in &mut program.parameters {
        parameter.shard = cuts.get(&*parameter.name).copied();
    }
    let reductions = reductions(&program);
    let instances = std::mem::take(&mut program.instances);
    for (instance, reduced) in instances.into_iter().zip(reductions) {
        program.instances.push(instance);
        for parameter in reduced {
            reduce(&mut program, parameter, ops)?;
        }
    }
    Ok(program)
}

/// For each instance, the parameters whose gradients are complete after it.
fn reductions(program: &Program) -> Vec<Vec<usize>> {
    let mut after = vec![Vec::new(); program.instances.len()];
    for (p, parameter) in program.parameters.iter().enumerate() {
        let writes = |i: &Instance| i.outputs.iter().any(|o| Some(o.value) == parameter.gradient);
        if let Some(last) = program.instances.iter().rposition(writes) {
            after[last].push(p);
        }
    }
    after
}

/// Appends the reduction of a parameter's gradient.
fn reduce(program: &mut Program, parameter: usize, ops: &dyn ShardOps) -> Result<(), TraceError> {
    let parameter = &program.parameters[parameter];
    let (Some(gradient), Some(shard)) = (parameter.gradient, parameter.shard) else { return Ok(()) };
    let site = parameter.name.clone();
    let origin = Origin { block: None, site, role: Role::Reduce, stage: Stage::Backward };
    let mut emit = |op, input, target| -> Result<ValueId, TraceError> {
        let instance = instantiate(program, Code::Plain(op), &[input], &[target], origin.clone())?;
        let output = instance.outputs[0].value;
        program.instances.push(Instance { lane: Lane::Communication, when: When::Last, ..instance });
        Ok(output)
    };
    let pieces = emit(ops.all_to_all(shard), gradient, None)?;
    let sum = emit(ops.sum_ranks(), pieces, None)?;
    emit(ops.all_gather(shard), sum, Some(gradient))?;
    Ok(())
}
