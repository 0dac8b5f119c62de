//! The sum of a parameter's gradients over ranks and, for sums that do not depend on the number of ranks,
//! over micro-steps.
//!
//! A reduction follows the last writer of the gradient. It runs on the communication lane, its sums included,
//! so that no kernel of the backward waits for another rank, and the buffers of reductions share memory.

use super::{MICRO_STEP, ShardOps};
use crate::program::instantiate;
use crate::{
    Code, Instance, Lane, Op, Origin, Output, Parallel, Program, Reduce, Role, RowShard, Shard, Stage,
    StateKind, Storage, TraceError, ValueId, When, WriteMode,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use xtrain_tensor::{DType, Shape, TensorType};

/// Appends its reduction to the last writer of each gradient. [`crate::Parameter::gradient`] is then the sum,
/// of this rank's rows alone if the optimizer's state is cut.
pub(super) fn reduce(
    mut program: Program,
    parallel: &Parallel,
    cuts: &HashMap<String, RowShard>,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    let levels = match parallel.reduce {
        Reduce::SameWorld if parallel.world_size == 1 => return Ok(program),
        Reduce::SameWorld => None,
        // The partial sums that exist before the last micro-step.
        Reduce::AnyWorld { micro_steps } => Some(micro_steps.next_power_of_two().ilog2() as usize),
    };
    if levels.is_some() {
        write_afresh(&mut program);
    }
    let reductions = reductions(&program);
    let instances = std::mem::take(&mut program.instances);
    let mut pass = Pass { out: program, parallel, levels, ops, micro_step: None };
    for (instance, complete) in instances.into_iter().zip(reductions) {
        pass.out.instances.push(instance);
        for parameter in complete {
            let cut = cuts[&*pass.out.parameters[parameter].name];
            pass.reduce_parameter(parameter, cut)?;
        }
    }
    Ok(pass.out)
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

/// Makes every micro-step write gradients afresh: the first writer overwrites, the others add.
fn write_afresh(program: &mut Program) {
    let gradients: HashSet<ValueId> = program.parameters.iter().filter_map(|p| p.gradient).collect();
    let outputs = program.instances.iter_mut().flat_map(|i| &mut i.outputs);
    for Output { mode, .. } in outputs.filter(|o| gradients.contains(&o.value)) {
        *mode = if *mode == WriteMode::AddAfterFirst { WriteMode::Assign } else { *mode };
    }
}

struct Pass<'a> {
    out: Program,
    parallel: &'a Parallel,
    /// Levels of the tree over micro-steps, if gradients are added in one.
    levels: Option<usize>,
    ops: &'a dyn ShardOps,
    /// The input [`MICRO_STEP`], once an op reads it.
    micro_step: Option<ValueId>,
}

impl Pass<'_> {
    fn reduce_parameter(&mut self, parameter: usize, cut: RowShard) -> Result<(), TraceError> {
        let Some(gradient) = self.out.parameters[parameter].gradient else { return Ok(()) };
        let name = self.out.parameters[parameter].name.clone();
        let origin = Origin { block: None, site: name.clone(), role: Role::Reduce, stage: Stage::Backward };
        let whole = self.out.ty(gradient);
        let several = self.parallel.world_size > 1;
        let cuts_state = several && self.parallel.shard == Shard::Optimizer;
        let levels = self.levels.unwrap_or(0);
        if !several && levels == 0 {
            return Ok(());
        }
        if self.levels.is_some() {
            self.out.values[gradient.0 as usize].storage = Storage::Transient;
        }
        let total = match (cuts_state, self.levels) {
            (true, _) => self.out.add_state(StateKind::ReducedGradient, &name, cut.piece(whole)),
            (false, Some(_)) => self.out.add_state(StateKind::Gradient, &name, whole),
            (false, None) => gradient,
        };
        // Each rank then gathers the whole sum.
        let gathers = several && !cuts_state;
        let target = (!gathers).then_some(total);
        let when = if self.levels.is_some() { When::Always } else { When::Last };
        let mut sum = gradient;
        if several {
            if self.parallel.reduce_dtype != whole.dtype {
                let cast = self.ops.cast(self.parallel.reduce_dtype);
                sum = self.emit(cast, &[sum], None, when, &origin)?;
            }
            sum = self.emit(self.ops.all_to_all(cut), &[sum], None, when, &origin)?;
            let target = target.filter(|_| levels == 0);
            sum = self.emit(self.ops.sum_ranks(), &[sum], target, when, &origin)?;
        }
        if levels > 0 {
            let of_levels = Shape::new(&[&[levels], &*self.out.ty(sum).shape].concat());
            let ty = TensorType { dtype: DType::F32, shape: of_levels };
            let partial = self.out.add_state(StateKind::PartialSums, &name, ty);
            let inputs = [sum, self.micro_step(), partial];
            self.emit(self.ops.pairwise_add(), &inputs, Some(partial), When::BeforeLast, &origin)?;
            sum = self.emit(self.ops.pairwise_total(), &inputs, target, When::Last, &origin)?;
        }
        if gathers {
            self.emit(self.ops.all_gather(cut), &[sum], Some(total), When::Last, &origin)?;
        }
        self.out.parameters[parameter].gradient = Some(total);
        Ok(())
    }

    fn micro_step(&mut self) -> ValueId {
        let input = || Storage::Input { name: MICRO_STEP.into() };
        let ty = TensorType::new(DType::U32, []);
        *self.micro_step.get_or_insert_with(|| self.out.add_value(ty, input()))
    }

    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        target: Option<ValueId>,
        when: When,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, &[target], origin.clone())?;
        let output = instance.outputs[0].value;
        self.out.instances.push(Instance { lane: Lane::Communication, when, ..instance });
        Ok(output)
    }
}
