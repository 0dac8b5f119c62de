//! What is cast: a tensor, or what an op would make, which then is not written.

use super::Quantize;
use crate::rms_norm::{scaled, scaled_type};
use crate::swiglu::{Swiglu, SwigluGrad};
use std::any::Any;
use std::ops::Range;
use xtrain_program::{Op, OpError};
use xtrain_tensor::{CpuKernel, DType, HostTensor, TensorType, View, ViewMut};

/// What [`Quantize`] casts, of its first inputs. It is rounded as the op would store it, so that the cast is the same to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    /// `x`: that.
    Input,
    /// `gate_up`: what [`Swiglu`] makes.
    Swiglu,
    /// `dy, gate_up`: what [`SwigluGrad`] makes.
    SwigluGrad,
    /// `x_td, rstd_t, w_d`: x * rstd * w, a norm's y.
    Norm,
}

impl Of {
    /// How many inputs it is made of.
    pub const fn inputs(self) -> usize {
        match self {
            Of::Input | Of::Swiglu => 1,
            Of::SwigluGrad => 2,
            Of::Norm => 3,
        }
    }

    /// The type of what is cast, or what is wrong with the inputs.
    pub(super) fn infer(self, inputs: &[TensorType]) -> Result<TensorType, OpError> {
        match self {
            Of::Input => Ok(inputs[0]),
            Of::Swiglu => Ok(Swiglu.infer(inputs)?[0]),
            Of::SwigluGrad => Ok(SwigluGrad { remake: false }.infer(inputs)?[0]),
            Of::Norm => scaled_type(inputs),
        }
    }

    /// Rows and columns of what is cast, of inputs that fit.
    pub(super) fn extents(self, inputs: &[TensorType]) -> (usize, usize) {
        let (rows, cols) = inputs[0].shape.rows_cols();
        match self {
            Of::Input | Of::Norm => (rows, cols),
            Of::Swiglu => (rows, cols / 2),
            Of::SwigluGrad => (rows, cols * 2),
        }
    }

    /// What is cast, where it is not an input, by the kernels of the op that would make it.
    pub(super) fn make(self, inputs: &[View<'_>]) -> Option<HostTensor> {
        let (rows, cols) = self.extents(&inputs.iter().map(|view| view.ty).collect::<Vec<_>>());
        let ty = TensorType::new(inputs[0].ty.dtype, [rows, cols]);
        let mut made = HostTensor::zeros(ty);
        match self {
            Of::Input => return None,
            Of::Swiglu => Swiglu.run(inputs, &mut [ViewMut::new(ty, made.bytes_mut(), false)]),
            Of::SwigluGrad => {
                made.bytes_mut().copy_from_slice(inputs[1].bytes());
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
    /// The same cast as that of `reader` at this input, of what is made on the way.
    pub(crate) fn of_made(of: Of, reader: &dyn Op, position: usize) -> Option<Self> {
        let cast = *(reader as &dyn Any).downcast_ref::<Quantize>()?;
        let casts = position == 0 && cast.of == Of::Input && cast.format != DType::E5M6;
        casts.then_some(Quantize { of, ..cast })
    }

    /// How many inputs it has.
    pub(super) fn inputs(self) -> usize {
        self.of.inputs() + usize::from(self.known != Known::Nothing)
    }

    /// Which inputs of the cast of a tensor are behind the tensor.
    pub(crate) fn beside(self) -> Range<usize> {
        1..1 + self.inputs() - self.of.inputs()
    }
}
