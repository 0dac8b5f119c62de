//! New instances: shape inference, and values for the outputs.

use crate::{Code, Instance, Lane, OpError, Origin, Output, Program, Storage, ValueId, When, WriteMode};
use thiserror::Error;
use xtrain_tensor::TensorType;

/// The error of an op that rejects its operands.
#[derive(Clone, Error, PartialEq, Eq)]
#[error("{site}: {op} cannot take {operands}: {error}")]
pub struct TraceError {
    /// Block and site.
    pub site: String,
    /// The op's name.
    pub op: &'static str,
    /// The operands' types.
    pub operands: String,
    /// The op's error.
    pub error: OpError,
}

xtrain_tensor::debug_as_display!(TraceError);

/// Builds an instance, on the lane of its op. Output `k` is written to the value `targets[k]`, or to a new
/// transient value if that is `None` or absent.
pub(crate) fn instantiate(
    program: &mut Program,
    code: Code,
    inputs: &[ValueId],
    targets: &[Option<ValueId>],
    origin: Origin,
) -> Result<Instance, TraceError> {
    let types: Vec<TensorType> = inputs.iter().map(|&v| program.ty(v)).collect();
    let fail = |error| TraceError {
        site: origin.to_string(),
        op: code.op().name(),
        operands: types.iter().map(TensorType::to_string).collect::<Vec<_>>().join(", "),
        error,
    };
    let output_types = code.op().infer(&types).map_err(fail)?;
    let mut outputs = Vec::with_capacity(output_types.len());
    for (k, &ty) in output_types.iter().enumerate() {
        let value = match targets.get(k).copied().flatten() {
            Some(target) if program.ty(target) == ty => target,
            Some(target) => {
                return Err(fail(OpError(format!(
                    "output {k} is {ty}, but the value to write has the type {}",
                    program.ty(target)
                ))));
            }
            None => program.add_value(ty, Storage::Transient),
        };
        outputs.push(Output { value, mode: WriteMode::Assign });
    }
    let lane = code.op().collective().map_or(Lane::Compute, |_| Lane::Communication);
    Ok(Instance { code, inputs: inputs.to_vec(), outputs, origin, lane, when: When::Always, chunk: 0 })
}
