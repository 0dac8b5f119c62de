//! The source of a cast: a tensor, or a value that the cast computes itself and never writes.

use super::{Dequantize, Quantize, saved_types};
use crate::permute::Permute;
use crate::rms_norm::{norm_from_rstd, norm_from_rstd_type};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_program::{Op, OpError};
use xtrain_tensor::{CpuKernel, DType, HostTensor, Scaling, TensorType, View, ViewMut};

/// The value that [`Quantize`] casts, with its inputs, which come first. It is rounded as its op would store
/// it, so that the cast is equal to the bit. If `weighted`, the weights of rows and the starts of experts are
/// two more inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CastSource {
    /// `x`: the tensor x.
    Input,
    /// `gate_up[, weights, starts]`: the output of [`Swiglu`]. If `restored`, gate and up are two inputs,
    /// numbers and scales in E4M3 by tiles, from which they are restored in bf16.
    Swiglu {
        /// True if gate and up were saved in FP8.
        restored: bool,
        /// True if each row has a weight.
        weighted: bool,
    },
    /// `gate_up[, weights, starts]`: the output of [`Swiglu`]. The op also saves gate and up in E4M3 by tiles
    /// with power-of-two scales: numbers and scales are its last outputs.
    SwigluSaving {
        /// True if each row has a weight.
        weighted: bool,
    },
    /// `dy, gate_up[, weights, starts]`: the output of [`SwigluGrad`]. If `restored`, gate and up are two
    /// inputs, as above, and are restored in the type of dy. If `weighted`, the gradient of the weights is
    /// the last output.
    SwigluGrad {
        /// True if gate and up were saved in FP8.
        restored: bool,
        /// True if each row has a weight.
        weighted: bool,
    },
    /// `x_td, rstd_t, w_d`: x * rstd * w, the output of a norm.
    Norm,
    /// `x_td, sources_c, rows_tk`: the output of [`Permute`], rows of x by experts.
    Permute,
}

impl CastSource {
    /// The number of its inputs.
    pub const fn inputs(self) -> usize {
        match self {
            CastSource::Input => 1,
            CastSource::SwigluSaving { weighted } => 1 + 2 * weighted as usize,
            CastSource::Swiglu { restored, weighted } => 1 + restored as usize + 2 * weighted as usize,
            CastSource::SwigluGrad { restored, weighted } => 2 + restored as usize + 2 * weighted as usize,
            CastSource::Norm | CastSource::Permute => 3,
        }
    }

    /// The index of the weights of rows, if it has such an input; the starts of experts come after it.
    pub(super) fn weights(self) -> Option<usize> {
        self.is_weighted().then(|| self.inputs() - 2)
    }

    /// True if each row has a weight.
    pub(super) const fn is_weighted(self) -> bool {
        match self {
            CastSource::SwigluSaving { weighted }
            | CastSource::Swiglu { weighted, .. }
            | CastSource::SwigluGrad { weighted, .. } => weighted,
            CastSource::Input | CastSource::Norm | CastSource::Permute => false,
        }
    }

    /// True if it also computes the gradient of the weights of rows.
    pub(super) const fn has_dweights(self) -> bool {
        matches!(self, CastSource::SwigluGrad { weighted: true, .. })
    }

    /// The types of the outputs after those of the cast, for valid inputs.
    pub(super) fn further_outputs(self, inputs: &[TensorType]) -> Vec<TensorType> {
        match self {
            CastSource::SwigluSaving { .. } => saved_types(inputs[0]).into(),
            CastSource::SwigluGrad { weighted: true, .. } => vec![inputs[self.inputs() - 2]],
            _ => Vec::new(),
        }
    }

    /// The input that holds gate and up saved in FP8, if any; their scales are the next input.
    pub(super) const fn restored(self) -> Option<usize> {
        match self {
            CastSource::Swiglu { restored: true, .. } => Some(0),
            CastSource::SwigluGrad { restored: true, .. } => Some(1),
            _ => None,
        }
    }

    /// The element type in which its op would store the value.
    pub(super) fn dtype(self, inputs: &[TensorType]) -> DType {
        if self.restored() == Some(0) { DType::BF16 } else { inputs[0].dtype }
    }

    /// The types of the inputs after gate and up are restored.
    fn restored_types(self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let mut types = inputs.to_vec();
        if let Some(q) = self.restored() {
            OpError::ensure(inputs[q].dtype == DType::E4M3, || {
                format!("a saved gate_up must be e4m3, not {}", inputs[q])
            })?;
            let restore = Dequantize { out: self.dtype(inputs), scaling: Scaling::Tile };
            types.splice(q..q + 2, restore.infer(&inputs[q..q + 2])?);
        }
        Ok(types)
    }

    /// The type of the value, or an error about the inputs.
    pub(super) fn infer(self, inputs: &[TensorType]) -> Result<TensorType, OpError> {
        let types = self.restored_types(inputs)?;
        match self {
            CastSource::Input => Ok(types[0]),
            CastSource::Swiglu { weighted, .. } | CastSource::SwigluSaving { weighted } => {
                Ok(Swiglu { weighted, ..Swiglu::PLAIN }.infer(&types)?[0])
            }
            CastSource::SwigluGrad { weighted, .. } => {
                Ok(SwigluGrad { weighted, ..SwigluGrad::PLAIN }.infer(&types)?[0])
            }
            CastSource::Norm => norm_from_rstd_type(&types),
            CastSource::Permute => Ok(Permute::default().infer(&types)?[0]),
        }
    }

    /// Rows and columns of the value, for valid inputs.
    pub(super) fn extents(self, inputs: &[TensorType]) -> (usize, usize) {
        let (rows, cols) = inputs[0].shape.rows_cols();
        match self {
            CastSource::Input | CastSource::Norm => (rows, cols),
            CastSource::Swiglu { .. } | CastSource::SwigluSaving { .. } => (rows, cols / 2),
            CastSource::SwigluGrad { .. } => (rows, cols * 2),
            CastSource::Permute => (inputs[1].numel(), cols),
        }
    }

    /// The value, computed by the CPU kernels of its op; None for `Input`. `dweights` is the gradient of the
    /// weights of rows, if the source computes it.
    pub(super) fn compute(self, inputs: &[View<'_>], dweights: Option<ViewMut<'_>>) -> Option<HostTensor> {
        let types: Vec<_> = inputs.iter().map(|view| view.ty).collect();
        let (rows, cols) = self.extents(&types);
        let ty = TensorType::new(self.dtype(&types), [rows, cols]);
        let restored = self.restored().map(|q| {
            let out = inputs[q].ty.with_dtype(ty.dtype);
            let mut restored = HostTensor::zeros(out);
            let view = ViewMut::new(out, restored.bytes_mut(), false);
            Dequantize { out: out.dtype, scaling: Scaling::Tile }.run(&inputs[q..q + 2], &mut [view]);
            restored
        });
        let gate_up = |input: usize| match &restored {
            Some(restored) => View::new(restored.ty(), restored.bytes()),
            None => inputs[input],
        };
        let of_rows = &inputs[self.weights().unwrap_or(self.inputs())..self.inputs()];
        let mut value = HostTensor::zeros(ty);
        match self {
            CastSource::Input => return None,
            CastSource::Swiglu { weighted, .. } | CastSource::SwigluSaving { weighted } => {
                let operands = [&[gate_up(0)], of_rows].concat();
                Swiglu { weighted, ..Swiglu::PLAIN }
                    .run(&operands, &mut [ViewMut::new(ty, value.bytes_mut(), false)]);
            }
            CastSource::SwigluGrad { weighted, .. } => {
                value.bytes_mut().copy_from_slice(gate_up(1).bytes());
                let out = ViewMut::new(ty, value.bytes_mut(), false);
                let operands = [&[inputs[0], View::in_output(ty)], of_rows].concat();
                let mut outputs: Vec<_> = [out].into_iter().chain(dweights).collect();
                SwigluGrad { weighted, ..SwigluGrad::PLAIN }.run(&operands, &mut outputs);
            }
            CastSource::Permute => {
                Permute::default().run(&inputs[..3], &mut [ViewMut::new(ty, value.bytes_mut(), false)]);
            }
            CastSource::Norm => {
                let y = ViewMut::new(ty, value.bytes_mut(), false);
                norm_from_rstd(inputs[0], inputs[1], inputs[2], y);
            }
        }
        Some(value)
    }
}

/// Further inputs of [`Quantize`], after those of its source: scales or amaxes that it does not compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Given {
    /// None.
    Nothing,
    /// The amax of the whole tensor, `f32[1]`, or those of the rows of the layout that is written, `f32[n]`.
    Amax,
    /// `f32[1, 1]`: the tensor's delayed scale. 0 means "not set"; the tensor's own amax then gives the
    /// scale.
    Scale,
    /// The delayed scale, and the amax `f32[1]` that gives the scale if that is not set.
    ScaleOrAmax,
}

impl Given {
    /// The index of the scale among these inputs.
    pub(super) fn scale(self) -> Option<usize> {
        matches!(self, Given::Scale | Given::ScaleOrAmax).then_some(0)
    }

    /// The index of the amax.
    pub(super) fn amax(self) -> Option<usize> {
        match self {
            Given::Nothing | Given::Scale => None,
            Given::Amax => Some(0),
            Given::ScaleOrAmax => Some(1),
        }
    }

    /// The number of these inputs.
    fn count(self) -> usize {
        match self {
            Given::Nothing => 0,
            Given::Amax | Given::Scale => 1,
            Given::ScaleOrAmax => 2,
        }
    }
}

impl Quantize {
    /// The index of the output amax; further outputs of the source come after it.
    pub(crate) fn amax(self) -> usize {
        2 * self.layouts.written().into_iter().filter(|&is_written| is_written).count()
    }

    /// True if no region is larger than the area that a thread block casts.
    pub(super) fn is_within_areas(&self) -> bool {
        matches!(self.scaling, Scaling::Tile | Scaling::Block)
    }

    /// True if each area can be cast on its own: by tiles or blocks, or with a given scale. A kernel that
    /// computes the tensor by areas can then cast it.
    pub(crate) fn is_local(&self) -> bool {
        let is_local = self.is_given() || (self.given == Given::Nothing && self.is_within_areas());
        self.format != DType::E5M6 && is_local
    }

    /// True if a delayed scale is an input, and the tensor's own amax replaces one that is not set.
    pub(crate) fn is_given(&self) -> bool {
        self.given == Given::Scale
    }

    /// The number of its outputs.
    pub(crate) fn outputs(self) -> usize {
        let further = match self.source {
            CastSource::SwigluSaving { .. } => 2,
            source => source.has_dweights() as usize,
        };
        self.amax() + 1 + further
    }

    /// The number of its inputs.
    pub(crate) fn inputs(self) -> usize {
        self.source.inputs() + self.given.count()
    }
}
