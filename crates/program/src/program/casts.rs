//! The casts that a program lists: FP8 copies of parameters, tensors with delayed scales, and measured casts.

use crate::{LinearGemm, LinearOperand, Op, Origin, Quantization, ValueId};
use std::sync::Arc;
use xtrain_tensor::DType;

/// The FP8 copies of a parameter that one cast of its master writes.
#[derive(Clone)]
pub struct Quantized {
    /// The cast.
    pub op: Arc<dyn Op>,
    /// The layer that reads them first, and the role of the cast.
    pub origin: Origin,
    /// The copies, which are state: numbers and scales of each layout.
    pub values: Vec<ValueId>,
    /// The delayed scale, if the recipe uses one.
    pub delayed: Option<Delayed>,
}

/// A tensor with a delayed scale. Its amax and its scale are state, found by `name`.
#[derive(Clone, Debug)]
pub struct Delayed {
    /// The parameter, or the layer that reads the tensor first and the operand there.
    pub name: Arc<str>,
    /// The format that it is cast to.
    pub format: DType,
    /// True if its scale is a power of two.
    pub pow2_scales: bool,
    /// [`StateKind::Amax`](crate::StateKind::Amax), `f32[1]`: the amax of the current step.
    pub amax: ValueId,
    /// [`StateKind::Scale`](crate::StateKind::Scale), `f32[1, 1]`. 0 means "not set".
    pub scale: ValueId,
}

/// A cast whose error the program measures ([`crate::measure_casts`]).
#[derive(Clone, Debug)]
pub struct MeasuredCast {
    /// The layer: block and site.
    pub layer: Origin,
    /// The GEMM that would read the cast.
    pub gemm: LinearGemm,
    /// The operand that is cast.
    pub operand: LinearOperand,
    /// Its format.
    pub quantization: Quantization,
    /// The number of elements of the operand.
    pub elements: usize,
    /// The names of the program's outputs with the result: counts and sizes. Equal casts share them.
    pub outputs: [Arc<str>; 2],
}
