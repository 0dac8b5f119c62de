//! Ops without kernels, for tests of passes and plans.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::sync::Arc;
use xtrain_program::{Backward, Differentiable, Op, OpError, PassOps, Role};
use xtrain_tensor::{DType, TensorType};

/// A vector of f32.
pub fn vector(len: usize) -> TensorType {
    TensorType::new(DType::F32, [len])
}

/// Any number of inputs; one output of the type of the first.
#[derive(Clone, Copy, Debug)]
pub struct Fun(pub &'static str);

impl Op for Fun {
    fn name(&self) -> &'static str {
        self.0
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs[0]])
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

impl Differentiable for Fun {
    /// One op for each input that needs a gradient. It reads the output's gradient and all inputs.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        for n in (0..cx.input_count()).filter(|&n| cx.wants(n)).collect::<Vec<_>>() {
            let mut operands = vec![dy];
            operands.extend((0..cx.input_count()).map(|n| cx.input(n)));
            let dx = cx.emit(Role::Dgrad, Grad(cx.ty(cx.input(n))), &operands)?[0];
            cx.set_grad(n, dx)?;
        }
        Ok(())
    }
}

/// The gradient of one input of a [`Fun`], of this type.
#[derive(Clone, Copy, Debug)]
pub struct Grad(pub TensorType);

impl Op for Grad {
    fn name(&self) -> &'static str {
        "grad"
    }

    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![self.0])
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

/// One input in another element type.
#[derive(Clone, Copy, Debug)]
pub struct Cast(pub DType);

impl Op for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs[0].with_dtype(self.0)])
    }
}

/// The ops that passes insert.
pub struct Inserted;

impl PassOps for Inserted {
    fn add(&self) -> Arc<dyn Op> {
        Arc::new(Fun("add"))
    }

    fn cast(&self, dtype: DType) -> Arc<dyn Op> {
        Arc::new(Cast(dtype))
    }
}
