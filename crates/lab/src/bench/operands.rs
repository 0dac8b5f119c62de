//! Small programs on random operands, which are measured op by op.

use xtrain_ops::linear::Linear;
use xtrain_program::{Program, Role, Stage, StateKind, TraceError, Tracer, ValueId};
use xtrain_step::error::LearnError;
use xtrain_step::error::ProgramError;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// Normal numbers of this standard deviation, repeated. Their values matter, because they determine the power
/// that a GEMM draws.
pub(super) fn filled(ty: TensorType, site: u32, std: f32) -> Vec<u8> {
    const BLOCK: usize = 1 << 18;
    let mut values = vec![0.0; BLOCK.min(ty.numel())];
    Philox::new(0, 0, site).fill_normal(std, &mut values);
    let values: Vec<f64> = values.into_iter().map(f64::from).collect();
    let block = HostTensor::from_f64(TensorType::new(ty.dtype, [values.len()]), &values);
    let mut bytes = block.bytes().repeat(ty.bytes().div_ceil(block.bytes().len().max(1)));
    bytes.truncate(ty.bytes());
    bytes
}

/// Adds to `program` what `trace` traces, as of this stage and role.
pub(super) fn traced<T>(
    program: Program,
    stage: Stage,
    role: Role,
    trace: impl FnOnce(&mut Tracer) -> Result<T, TraceError>,
) -> Result<(Program, T), LearnError> {
    let mut tracer = Tracer::new(program, stage, role);
    let made = trace(&mut tracer).map_err(ProgramError::from)?;
    Ok((tracer.finish(), made))
}

/// An operand that lasts and is not to be recomputed: an activation, a weight or a gradient.
pub(super) fn operand<const N: usize>(
    t: &mut Tracer,
    name: &str,
    dtype: DType,
    shape: [usize; N],
) -> ValueId {
    t.state(StateKind::Compute, name, TensorType::new(dtype, shape))
}

/// fprop of a linear layer, and its x and w.
pub(super) fn linear_forward(
    m: usize,
    n: usize,
    k: usize,
    dtype: DType,
) -> Result<(Program, (ValueId, ValueId)), LearnError> {
    traced(Program::default(), Stage::Forward, Role::Forward, |t| {
        let (x, w) = (operand(t, "x", dtype, [m, k]), operand(t, "w", dtype, [n, k]));
        t.apply(Linear, &[x, w])?;
        Ok((x, w))
    })
}
