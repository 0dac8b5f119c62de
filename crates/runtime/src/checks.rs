//! Checks that engines perform while they run, for tests and for finding bugs.

use crate::error::EngineError;
use xtrain_program::{Instance, Op, Program, WriteMode, tails};
use xtrain_tensor::host::decode;

/// The checks that an engine performs around each op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// After each op, fails if an output is not finite, and names the first such output. Set it before
    /// programs are loaded: the tails of their ragged tensors are then zeros.
    pub numerics: bool,
    /// Before each op, fills the outputs that it must overwrite with NaNs, so that an unwritten element
    /// shows. On a GPU it also fills the padding after each output, and fails if the op writes there.
    pub poison: bool,
}

impl Checks {
    /// The program as an engine with these checks runs it: all numbers are written if they are checked.
    pub(crate) fn prepared(&self, program: Program) -> Program {
        if self.numerics { tails::written(program) } else { program }
    }
}

/// Fails if a floating-point output of `instance` is not finite. `bytes` returns the bytes of an output.
pub(crate) fn check_finite<B: AsRef<[u8]>>(
    program: &Program,
    instance: &Instance,
    bytes: impl Fn(usize) -> Result<B, EngineError>,
) -> Result<(), EngineError> {
    for (output, o) in instance.outputs.iter().enumerate() {
        let ty = program.ty(o.value);
        if ty.dtype.is_float() && decode(ty, bytes(output)?.as_ref()).iter().any(|x| !x.is_finite()) {
            return Err(EngineError::NonFinite {
                op: instance.code.op().name(),
                site: instance.origin.to_string(),
                role: instance.origin.role.name(),
                output,
                ty: ty.into(),
            });
        }
    }
    Ok(())
}

/// True if `op` must overwrite this output: it neither adds to it nor finds an input there.
pub(crate) fn is_overwritten(op: &dyn Op, output: usize, mode: WriteMode, first: bool) -> bool {
    !mode.accumulates(first) && !op.in_place().iter().any(|&(o, _)| o == output)
}
