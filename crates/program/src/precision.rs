//! The pass that sets a program's element types: the masters' type and the compute type.
//!
//! A model is traced in f32. The pass rewrites the types: activations follow the compute type through each
//! op's `infer`; operands that an op declares [`Operand::Full`] stay as they are. If the compute type differs
//! from the masters', every parameter that a compute operand reads gets a copy in it
//! ([`crate::StateKind::Compute`]), which the optimizer writes with the master. With `fp32` the program is
//! the traced one, unchanged.

use crate::trace::instantiate;
use crate::{Operand, Program, StateKind, Storage, TraceError, ValueId};
use std::sync::Arc;
use xtrain_tensor::DType;

/// The element types of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// The type of masters, gradients of parameters, and moments.
    pub master: DType,
    /// The type of activations, their gradients, and the copies of parameters that GEMMs read.
    pub compute: DType,
}

impl Precision {
    /// Everything in f32: the program as it was traced.
    pub const FP32: Precision = Precision { master: DType::F32, compute: DType::F32 };
    /// f32 masters, bf16 activations and GEMM operands.
    pub const BF16: Precision = Precision { master: DType::F32, compute: DType::BF16 };
}

/// Rewrites a traced forward program to `precision`. Value ids keep their meaning.
pub fn apply(program: Program, precision: Precision) -> Result<Program, TraceError> {
    if precision == Precision::FP32 {
        return Ok(program);
    }
    let parameters = program.parameters_by_value();
    let mut out = Program { values: program.values, parameters: program.parameters, ..Program::default() };
    for p in &out.parameters {
        retype(&mut out.values[p.master.0 as usize].ty.dtype, precision.master);
    }
    for v in &mut out.values {
        if matches!(v.storage, Storage::State { kind: StateKind::Cache, .. }) {
            retype(&mut v.ty.dtype, precision.compute);
        }
    }
    for instance in program.instances {
        let op = instance.code.op();
        let mut inputs = instance.inputs.clone();
        for (k, v) in inputs.iter_mut().enumerate() {
            if op.operand(k) == Operand::Compute {
                *v = in_compute_type(&mut out, *v, parameters.get(v).copied(), precision);
            }
        }
        let targets: Vec<Option<ValueId>> = instance.outputs.iter().map(|o| Some(o.value)).collect();
        let types: Vec<_> = inputs.iter().map(|&v| out.ty(v)).collect();
        if let Ok(made) = op.infer(&types) {
            for (o, ty) in instance.outputs.iter().zip(&made) {
                out.values[o.value.0 as usize].ty = *ty;
            }
        }
        let mut new = instantiate(&mut out, instance.code, &inputs, &targets, instance.origin)?;
        for (n, o) in new.outputs.iter_mut().zip(&instance.outputs) {
            n.mode = o.mode;
        }
        out.instances.push(new);
    }
    Ok(out)
}

fn retype(dtype: &mut DType, to: DType) {
    if *dtype == DType::F32 {
        *dtype = to;
    }
}

/// The value to read for a compute operand `v`: the copy in the compute type if `v` is a parameter (its
/// index), else `v` itself; an f32 input of the program is retyped.
fn in_compute_type(
    program: &mut Program,
    v: ValueId,
    parameter: Option<usize>,
    precision: Precision,
) -> ValueId {
    let Some(p) = parameter else {
        if matches!(program.value(v).storage, Storage::Input { .. }) {
            retype(&mut program.values[v.0 as usize].ty.dtype, precision.compute);
        }
        return v;
    };
    if precision.compute == precision.master {
        return v;
    }
    if let Some(compute) = program.parameters[p].compute {
        return compute;
    }
    let name: Arc<str> = program.parameters[p].name.clone();
    let ty = program.ty(v).with_dtype(precision.compute);
    let compute = program.add_state(StateKind::Compute, &name, ty);
    program.parameters[p].compute = Some(compute);
    compute
}
