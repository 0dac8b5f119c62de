//! What is cast: a tensor, or what an op would make, which then is not written.

use super::{Dequantize, Quantize};
use crate::rms_norm::{scaled, scaled_type};
use crate::swiglu::{Swiglu, SwigluGrad};
use xtrain_program::{Op, OpError};
use xtrain_tensor::{CpuKernel, DType, HostTensor, Scaling, TensorType, View, ViewMut};

/// What [`Quantize`] casts, of its first inputs. It is rounded as the op would store it, so that the cast is the same to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    /// `x`: that.
    Input,
    /// `gate_up`: what [`Swiglu`] makes. `kept`: of gate and up in E4M3 by tiles, two inputs, numbers and scales, restored in bf16.
    Swiglu {
        /// Whether that is so.
        kept: bool,
    },
    /// `gate_up`: the same, of a plain tensor of which a copy in E4M3 by tiles with scales of powers of two is made too: numbers and scales
    /// are the cast's last outputs.
    SwigluSaving,
    /// `dy, gate_up`: what [`SwigluGrad`] makes. `kept`: the same, restored in the type of dy.
    SwigluGrad {
        /// Whether that is so.
        kept: bool,
    },
    /// `x_td, rstd_t, w_d`: x * rstd * w, a norm's y.
    Norm,
}

impl Of {
    /// How many inputs it is made of.
    pub const fn inputs(self) -> usize {
        match self {
            Of::Input | Of::SwigluSaving => 1,
            Of::Swiglu { kept } => 1 + kept as usize,
            Of::SwigluGrad { kept } => 2 + kept as usize,
            Of::Norm => 3,
        }
    }

    /// Which input gate and up are, where they are kept in FP8, with their scales behind them.
    pub(super) const fn kept(self) -> Option<usize> {
        match self {
            Of::Swiglu { kept: true } => Some(0),
            Of::SwigluGrad { kept: true } => Some(1),
            _ => None,
        }
    }

    /// The type in which what is cast would be stored.
    pub(super) fn dtype(self, inputs: &[TensorType]) -> DType {
        if self == (Of::Swiglu { kept: true }) { DType::BF16 } else { inputs[0].dtype }
    }

    /// The inputs as they are once gate and up are restored.
    fn restored_types(self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let mut types = inputs.to_vec();
        if let Some(at) = self.kept() {
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
            Of::Input => Ok(types[0]),
            Of::Swiglu { .. } | Of::SwigluSaving => Ok(Swiglu.infer(&types)?[0]),
            Of::SwigluGrad { .. } => Ok(SwigluGrad { remake: false }.infer(&types)?[0]),
            Of::Norm => scaled_type(&types),
        }
    }

    /// Rows and columns of what is cast, of inputs that fit.
    pub(super) fn extents(self, inputs: &[TensorType]) -> (usize, usize) {
        let (rows, cols) = inputs[0].shape.rows_cols();
        match self {
            Of::Input | Of::Norm => (rows, cols),
            Of::Swiglu { .. } | Of::SwigluSaving => (rows, cols / 2),
            Of::SwigluGrad { .. } => (rows, cols * 2),
        }
    }

    /// What is cast, where it is not an input, by the kernels of the op that would make it.
    pub(super) fn make(self, inputs: &[View<'_>]) -> Option<HostTensor> {
        let types: Vec<_> = inputs.iter().map(|view| view.ty).collect();
        let (rows, cols) = self.extents(&types);
        let ty = TensorType::new(self.dtype(&types), [rows, cols]);
        let restored = self.kept().map(|at| {
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
            Of::Input => return None,
            Of::Swiglu { .. } | Of::SwigluSaving => {
                Swiglu.run(&[gate_up(0)], &mut [ViewMut::new(ty, made.bytes_mut(), false)]);
            }
            Of::SwigluGrad { .. } => {
                made.bytes_mut().copy_from_slice(gate_up(1).bytes());
                let out = ViewMut::new(ty, made.bytes_mut(), false);
                SwigluGrad { remake: false }.run(&[inputs[0], View::in_output(ty)], &mut [out]);
            }
            Of::Norm => scaled(inputs[0], inputs[1], inputs[2], ViewMut::new(ty, made.bytes_mut(), false)),
        }
        Some(made)
    }
}

/// What of the whole tensor is an input of [`Quantize`], behind what is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Known {
    /// Nothing.
    Nothing,
    /// `f32[1]`: its amax, measured by what made it.
    Amax,
    /// `f32[1, 1]`: its scale, or 0 where there is none yet, and that of its own amax takes its place.
    Scale,
}

impl Known {
    /// The type of the input.
    pub(super) fn ty(self) -> Option<TensorType> {
        match self {
            Known::Nothing => None,
            Known::Amax => Some(TensorType::new(DType::F32, [1])),
            Known::Scale => Some(TensorType::new(DType::F32, [1, 1])),
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
    pub(crate) fn is_on_the_way(&self) -> bool {
        let is_known = self.is_given() || (self.known == Known::Nothing && self.is_within_areas());
        self.format != DType::E5M6 && is_known
    }

    /// Whether its scale is an input.
    pub(crate) fn is_given(&self) -> bool {
        self.known == Known::Scale
    }

    /// How many outputs it has.
    pub(crate) fn outputs(self) -> usize {
        self.amax() + if self.of == Of::SwigluSaving { 3 } else { 1 }
    }

    /// How many inputs it has.
    pub(crate) fn inputs(self) -> usize {
        self.of.inputs() + usize::from(self.known != Known::Nothing)
    }
}
