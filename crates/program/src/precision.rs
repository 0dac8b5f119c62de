//! The pass that sets a program's element types: the masters' type and the compute type.
//!
//! A model is traced in f32. The pass rewrites the types: each op's `infer` passes the compute type on from
//! its inputs to its outputs. Inputs that an op declares [`Operand::Full`] keep their type. If the compute
//! type differs from the masters', every parameter that is read as a compute operand gets a copy in the
//! compute type ([`crate::StateKind::Compute`]), which the optimizer writes together with the master. One
//! that is not trained is in the compute type itself. With `fp32` the program stays as it was traced.

use crate::program::instantiate;
use crate::{Operand, Program, StateKind, Storage, TraceError, ValueId};
use std::sync::Arc;
use xtrain_tensor::DType;

/// The element types of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// The type of masters, of the gradients of parameters, and of moments.
    pub master: DType,
    /// The type of activations, of their gradients, and of the copies of parameters that GEMMs read.
    pub compute: DType,
}

impl Precision {
    /// Everything in f32, as traced.
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
    for p in 0..out.parameters.len() {
        let master = out.parameters[p].master;
        if !out.is_frozen(&out.parameters[p]) {
            retype(&mut out.values[master.0 as usize].ty.dtype, precision.master);
        }
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
        if let Ok(output_types) = op.infer(&types) {
            for (o, ty) in instance.outputs.iter().zip(&output_types) {
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

/// The value that replaces the compute operand `v`. For a parameter (given its index) that is the copy in the
/// compute type. For other values it is `v` itself; if `v` is an f32 input of the program, its type changes.
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
    if program.is_frozen(&program.parameters[p]) {
        retype(&mut program.values[v.0 as usize].ty.dtype, precision.compute);
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
