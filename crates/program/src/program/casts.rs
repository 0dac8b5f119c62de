//! The casts that a program lists: FP8 copies of parameters, tensors with delayed scales, and measured casts.

use crate::{CastOperand, LinearGemm, LinearOperand, Origin, Quantization, ValueId};
use std::sync::Arc;
use xtrain_tensor::{DType, Scaling};

/// The FP8 copies of a parameter that one cast of its master writes.
#[derive(Clone)]
pub struct Quantized {
    /// The formats of the cast.
    pub quantization: Quantization,
    /// The layouts that it writes: row-major, transposed.
    pub layouts: [bool; 2],
    /// The layer that reads them first, and the role of the cast.
    pub origin: Origin,
    /// The copies, which are state: numbers and scales of each layout.
    pub values: Vec<ValueId>,
    /// The delayed scale, if the recipe uses one.
    pub delayed: Option<Delayed>,
}

/// The FP8 numbers of this rank's rows of a parameter, of which ranks gather the whole.
#[derive(Clone)]
pub struct QuantizedRows {
    /// The formats of the cast.
    pub quantization: Quantization,
    /// True if scales belong to columns of the parameter, so that they depend on the rows of all ranks.
    pub by_column: bool,
    /// The layer that reads the copies first, and the role of the cast.
    pub origin: Origin,
    /// The numbers, in the layout of the parameter.
    pub numbers: ValueId,
    /// Their scales.
    pub scales: ValueId,
    /// The delayed scale, if the recipe uses one.
    pub delayed: Option<Delayed>,
}

impl QuantizedRows {
    /// True if its scales depend on the rows of all ranks. `unset` says that delayed scales may not be set.
    pub(crate) fn needs_amaxes_of_all(&self, unset: bool) -> bool {
        let of_tensor = self.quantization.scaling == Scaling::Tensor && (unset || self.delayed.is_none());
        self.by_column || of_tensor
    }
}

/// A tensor with a delayed or a static scale. Its amax and a delayed scale are state, found by `name`.
#[derive(Clone, Debug)]
pub struct Delayed {
    /// The parameter, or the layer that reads the tensor first and the operand there.
    pub name: Arc<str>,
    /// The layer that reads the tensor first: block and site.
    pub layer: Origin,
    /// The operand there.
    pub operand: CastOperand,
    /// The format that it is cast to.
    pub format: DType,
    /// True if its scale is a power of two.
    pub pow2_scales: bool,
    /// [`StateKind::Amax`](crate::StateKind::Amax), `f32[1]`: the amax of the current step.
    pub amax: ValueId,
    /// `f32[1, 1]`. A delayed scale is [`StateKind::Scale`](crate::StateKind::Scale), and 0 means "not set";
    /// a static one is a constant.
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
