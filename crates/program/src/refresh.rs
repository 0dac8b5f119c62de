//! The pass that refreshes the copies of parameters after the update, and the program that refreshes all
//! copies after the masters change.
//!
//! If masters are cut among ranks, copies are gathered from the rows of all ranks. FP8 copies are cast from
//! the whole master, as in one process, so they have the same bits. That master exists for a moment only: it
//! is gathered to one of two slots, so a gather waits until the cast before the last has read its slot.

use crate::program::instantiate;
use crate::shard::ShardOps;
use crate::{
    Code, Delayed, Gathered, Op, Origin, Parameter, Program, Quantized, Role, Stage, Storage, TraceError,
    ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::TensorType;

/// Appends, in this stage and in the order of parameters, the gathers of all copies and the casts of all
/// masters that have FP8 copies.
pub fn apply(program: Program, stage: Stage, ops: &dyn ShardOps) -> Result<Program, TraceError> {
    let parameters = program.parameters.clone();
    let mut pass = Pass { out: program, stage, ops, slots: HashMap::new() };
    for parameter in &parameters {
        pass.refresh(parameter)?;
    }
    Ok(pass.out)
}

struct Pass<'a> {
    out: Program,
    stage: Stage,
    ops: &'a dyn ShardOps,
    /// For each type, the slot of the next gathered master and the other one.
    slots: HashMap<TensorType, [ValueId; 2]>,
}

impl Pass<'_> {
    fn refresh(&mut self, parameter: &Parameter) -> Result<(), TraceError> {
        for &Gathered { piece, whole } in &parameter.gathered {
            self.gather(parameter, piece, whole)?;
        }
        if parameter.quantized.is_empty() {
            return Ok(());
        }
        let master = self.whole_master(parameter)?;
        for Quantized { op, origin, values, delayed } in &parameter.quantized {
            let states = values.iter().copied().chain(delayed.as_ref().map(|d| d.amax));
            let targets: Vec<_> = states.map(Some).collect();
            let inputs: Vec<_> = [master].into_iter().chain(delayed.as_ref().map(|d| d.scale)).collect();
            self.emit(op.clone(), &inputs, &targets, origin.clone())?;
        }
        Ok(())
    }

    /// All rows of the master, for its casts.
    fn whole_master(&mut self, parameter: &Parameter) -> Result<ValueId, TraceError> {
        let master = parameter.master;
        if parameter.shard.is_none() {
            return Ok(master);
        }
        if let Some(held) = parameter.gathered.iter().find(|gathered| gathered.piece == master) {
            return Ok(held.whole);
        }
        let ty = self.out.whole_type(parameter);
        let out = &mut self.out;
        let slots =
            self.slots.entry(ty).or_insert_with(|| [(); 2].map(|()| out.add_value(ty, Storage::Transient)));
        let [slot, other] = *slots;
        *slots = [other, slot];
        self.gather(parameter, master, slot)?;
        Ok(slot)
    }

    fn gather(&mut self, parameter: &Parameter, piece: ValueId, whole: ValueId) -> Result<(), TraceError> {
        let Some(cut) = parameter.shard else { return Ok(()) };
        let (site, role) = (parameter.name.clone(), Role::Gather);
        let origin = Origin { block: None, site, role, stage: self.stage };
        self.emit(self.ops.all_gather(cut), &[piece], &[Some(whole)], origin)
    }

    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        targets: &[Option<ValueId>],
        origin: Origin,
    ) -> Result<(), TraceError> {
        let origin = Origin { stage: self.stage, ..origin };
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, targets, origin)?;
        self.out.instances.push(instance);
        Ok(())
    }
}

/// The program that refreshes every copy of the parameters of `program` from its master. It is run once after
/// masters are initialised or loaded. Without copies it has no instances.
pub fn program(program: &Program, ops: &dyn ShardOps) -> Result<Program, TraceError> {
    let mut out = Program::default();
    for p in &program.parameters {
        let master = out.copy_value(program, p.master);
        let compute = p.compute.map(|c| out.copy_value(program, c));
        if let Some(compute) = compute {
            let code = Code::Plain(ops.cast(out.ty(compute).dtype));
            let (role, stage) = (Role::Precision, Stage::Forward);
            let origin = Origin { block: None, site: p.name.clone(), role, stage };
            let instance = instantiate(&mut out, code, &[master], &[Some(compute)], origin)?;
            out.instances.push(instance);
        }
        let mut quantized = Vec::new();
        for copies in &p.quantized {
            let values = copies.values.iter().map(|&v| out.copy_value(program, v)).collect();
            let delayed = copies.delayed.clone().map(|delayed| {
                let [amax, scale] = [delayed.amax, delayed.scale].map(|v| out.copy_value(program, v));
                Delayed { amax, scale, ..delayed }
            });
            quantized.push(Quantized { values, delayed, ..copies.clone() });
        }
        let copied = |piece| if piece == p.master { Some(master) } else { compute };
        let mut gathered = Vec::new();
        for of in &p.gathered {
            let whole = out.copy_value(program, of.whole);
            gathered.extend(copied(of.piece).map(|piece| Gathered { piece, whole }));
        }
        let parameter = Parameter { master, compute, quantized, gradient: None, gathered, ..p.clone() };
        out.parameters.push(parameter);
    }
    apply(out, Stage::Forward, ops)
}
