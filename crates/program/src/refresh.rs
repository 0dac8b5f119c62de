//! The pass that refreshes the FP8 copies of parameters, and the program that refreshes all copies after the
//! masters change.

use crate::program::instantiate;
use crate::{
    Code, Delayed, Origin, Parameter, PassOps, Program, Quantized, Role, Stage, StateKind, TraceError,
};

/// Appends the casts of all masters that have FP8 copies, in this stage.
pub fn apply(mut program: Program, stage: Stage) -> Result<Program, TraceError> {
    for parameter in program.parameters.clone() {
        for Quantized { op, origin, values, delayed } in &parameter.quantized {
            let origin = Origin { stage, ..origin.clone() };
            let states = values.iter().copied().chain(delayed.as_ref().map(|d| d.amax));
            let targets: Vec<_> = states.map(Some).collect();
            let inputs: Vec<_> =
                [parameter.master].into_iter().chain(delayed.as_ref().map(|d| d.scale)).collect();
            let code = Code::Plain(op.clone());
            let instance = instantiate(&mut program, code, &inputs, &targets, origin)?;
            program.instances.push(instance);
        }
    }
    Ok(program)
}

/// The program that casts every compute copy and FP8 copy of the parameters of `program` from its master. It
/// is run once after masters are initialised or loaded. Without copies it has no instances.
pub fn program(program: &Program, ops: &dyn PassOps) -> Result<Program, TraceError> {
    let mut out = Program::default();
    for p in &program.parameters {
        let master = out.add_state(StateKind::Master, &p.name, program.ty(p.master));
        let compute = p.compute.map(|c| out.add_state(StateKind::Compute, &p.name, program.ty(c)));
        if let Some(compute) = compute {
            let code = Code::Plain(ops.cast(out.ty(compute).dtype));
            let (role, stage) = (Role::Precision, Stage::Forward);
            let origin = Origin { block: None, site: p.name.clone(), role, stage };
            let instance = instantiate(&mut out, code, &[master], &[Some(compute)], origin)?;
            out.instances.push(instance);
        }
        let mut quantized = Vec::new();
        for copies in &p.quantized {
            let values = copies.values.iter().map(|&v| out.copy_state(program, v)).collect();
            let delayed = copies.delayed.clone().map(|delayed| {
                let [amax, scale] = [delayed.amax, delayed.scale].map(|v| out.copy_state(program, v));
                Delayed { amax, scale, ..delayed }
            });
            quantized.push(Quantized { values, delayed, ..copies.clone() });
        }
        out.parameters.push(Parameter {
            name: p.name.clone(),
            master,
            compute,
            quantized,
            gradient: None,
            shard: p.shard,
        });
    }
    apply(out, Stage::Forward)
}
