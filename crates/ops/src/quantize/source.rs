//! What is cast: a tensor, or what an op would make, which then is not written.

use super::{Dequantize, Quantize};
use crate::rms_norm::{scaled, scaled_type};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_program::{Op, OpError};
use xtrain_tensor::{CpuKernel, DType, HostTensor, Scaling, TensorType, View, ViewMut};

/// What [`Quantize`] casts, of its first inputs. It is rounded as the op would store it, so that the cast is the same to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CastSource {
    /// `x`: that.
    Input,
    /// `gate_up`: what [`Swiglu`] makes. `kept`: of gate and up in E4M3 by tiles, two inputs, numbers and scales, restored in bf16.
    Swiglu {
        /// Whether that is so.
        restored: bool,
    },
    /// `gate_up`: the same, of a plain tensor of which a copy in E4M3 by tiles with scales of powers of two is made too: numbers and scales
    /// are the cast's last outputs.
    SwigluSaving,
    /// `dy, gate_up`: what [`SwigluGrad`] makes. `kept`: the same, restored in the type of dy.
    SwigluGrad {
        /// Whether that is so.
        restored: bool,
    },
    /// `x_td, rstd_t, w_d`: x * rstd * w, a norm's y.
    Norm,
}

impl CastSource {
    /// How many inputs it is made of.
    pub const fn inputs(self) -> usize {
        match self {
            CastSource::Input | CastSource::SwigluSaving => 1,
            CastSource::Swiglu { restored } => 1 + restored as usize,
            CastSource::SwigluGrad { restored } => 2 + restored as usize,
            CastSource::Norm => 3,
        }
    }

    /// Which input gate and up are, where they are kept in FP8, with their scales behind them.
    pub(super) const fn restored(self) -> Option<usize> {
        match self {
            CastSource::Swiglu { restored: true } => Some(0),
            CastSource::SwigluGrad { restored: true } => Some(1),
            _ => None,
        }
    }

    /// The type in which what is cast would be stored.
    pub(super) fn dtype(self, inputs: &[TensorType]) -> DType {
        if self == (CastSource::Swiglu { restored: true }) { DType::BF16 } else { inputs[0].dtype }
    }

    /// The inputs as they are once gate and up are restored.
    fn restored_types(self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let mut types = inputs.to_vec();
        if let Some(at) = self.restored() {
            OpError::ensure(inputs[at].dtype == DType::E4M3, || {
                format!("gate_up that is kept must be e4m3, not {}", inputs[at])
            })?;
            let restore = Dequantize { out: self.dtype(inputs), scaling: Scaling::Tile };
            types.splice(at..at + 2, restore.infer(&inputs[at..at + 2])?);
        }
        Ok(types)
    }

    /// The type of what is cast, or what is wrong with the inputs.
    pub(super) fn infer(self, inputs: &[TensorType]) -> Result<TensorType, OpError> {
        let types = self.restored_types(inputs)?;
        match self {
            CastSource::Input => Ok(types[0]),
            CastSource::Swiglu { .. } | CastSource::SwigluSaving => Ok(Swiglu.infer(&types)?[0]),
            CastSource::SwigluGrad { .. } => Ok(SwigluGrad { rematerialise: false }.infer(&types)?[0]),
            CastSource::Norm => scaled_type(&types),
        }
    }

    /// Rows and columns of what is cast, of inputs that fit.
    pub(super) fn extents(self, inputs: &[TensorType]) -> (usize, usize) {
        let (rows, cols) = inputs[0].shape.rows_cols();
        match self {
            CastSource::Input | CastSource::Norm => (rows, cols),
            CastSource::Swiglu { .. } | CastSource::SwigluSaving => (rows, cols / 2),
            CastSource::SwigluGrad { .. } => (rows, cols * 2),
        }
    }

    /// What is cast, where it is not an input, by the kernels of the op that would make it.
    pub(super) fn make(self, inputs: &[View<'_>]) -> Option<HostTensor> {
        let types: Vec<_> = inputs.iter().map(|view| view.ty).collect();
        let (rows, cols) = self.extents(&types);
        let ty = TensorType::new(self.dtype(&types), [rows, cols]);
        let restored = self.restored().map(|at| {
            let out = inputs[at].ty.with_dtype(ty.dtype);
            let mut restored = HostTensor::zeros(out);
            let view = ViewMut::new(out, restored.bytes_mut(), false);
            Dequantize { out: out.dtype, scaling: Scaling::Tile }.run(&inputs[at..at + 2], &mut [view]);
            restored
        });
        let gate_up = |at: usize| match &restored {
            Some(restored) => View::new(restored.ty(), restored.bytes()),
            None => inputs[at],
        };
        let mut made = HostTensor::zeros(ty);
        match self {
            CastSource::Input => return None,
            CastSource::Swiglu { .. } | CastSource::SwigluSaving => {
                Swiglu.run(&[gate_up(0)], &mut [ViewMut::new(ty, made.bytes_mut(), false)]);
            }
            CastSource::SwigluGrad { .. } => {
                made.bytes_mut().copy_from_slice(gate_up(1).bytes());
                let out = ViewMut::new(ty, made.bytes_mut(), false);
                SwigluGrad { rematerialise: false }.run(&[inputs[0], View::in_output(ty)], &mut [out]);
            }
            CastSource::Norm => {
                scaled(inputs[0], inputs[1], inputs[2], ViewMut::new(ty, made.bytes_mut(), false))
            }
        }
        Some(made)
    }
}

/// What of the whole tensor is an input of [`Quantize`], behind what is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Given {
    /// Nothing.
    Nothing,
    /// `f32[1]`: its amax, measured by what made it.
    Amax,
    /// `f32[1, 1]`: its scale, or 0 where there is none yet, and that of its own amax takes its place.
    Scale,
}

impl Given {
    /// The type of the input.
    pub(super) fn ty(self) -> Option<TensorType> {
        match self {
            Given::Nothing => None,
            Given::Amax => Some(TensorType::new(DType::F32, [1])),
            Given::Scale => Some(TensorType::new(DType::F32, [1, 1])),
        }
    }
}

impl Quantize {
    /// Which output amax is; behind it is a copy that is kept.
    pub(crate) fn amax(self) -> usize {
        2 * self.layouts.made().into_iter().filter(|&made| made).count()
    }

    /// Whether no region that shares a scale is larger than an area of a block.
    pub(super) fn is_within_areas(&self) -> bool {
        matches!(self.scaling, Scaling::Tile | Scaling::Block)
    }

    /// Whether it casts by tiles or blocks, or with a scale that is given, so that whatever makes the tensor by blocks can cast it.
    pub(crate) fn is_local(&self) -> bool {
        let is_known = self.is_given() || (self.given == Given::Nothing && self.is_within_areas());
        self.format != DType::E5M6 && is_known
    }

    /// Whether its scale is an input.
    pub(crate) fn is_given(&self) -> bool {
        self.given == Given::Scale
    }

    /// How many outputs it has.
    pub(crate) fn outputs(self) -> usize {
        self.amax() + if self.source == CastSource::SwigluSaving { 3 } else { 1 }
    }

    /// How many inputs it has.
    pub(crate) fn inputs(self) -> usize {
        self.source.inputs() + usize::from(self.given != Given::Nothing)
    }
}
