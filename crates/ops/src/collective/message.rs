//! Messages from one rank of a group to another, and between two ranks in both directions.

use xtrain_program::{Collective, Cost, Groups, Op, OpError, Operand};
use xtrain_tensor::TensorType;

/// `x -> ()`: sends x, of any type, to the rank at the place `to` of the group, which runs a [`Receive`] of
/// its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Send {
    /// The ranks of which both are.
    pub groups: Groups,
    /// The place of the receiver.
    pub to: usize,
}

/// `() -> x`: receives x from the rank at the place `from` of the group, which runs a [`Send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    /// The ranks of which both are.
    pub groups: Groups,
    /// The place of the sender.
    pub from: usize,
    /// The type of x.
    pub ty: TensorType,
}

/// `x -> y`: sends x, of any type, to the rank at the place `with` of the group, and receives y, of its type,
/// from that rank, which runs one of these too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendReceive {
    /// The ranks of which both are.
    pub groups: Groups,
    /// The place of the other rank.
    pub with: usize,
}

impl Op for Send {
    fn name(&self) -> &'static str {
        "send"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("send", inputs, 1)?;
        OpError::ensure(self.to < self.groups.size, || {
            format!("a message to place {} of {} ranks", self.to, self.groups.size)
        })?;
        Ok(Vec::new())
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::Send { to: self.to }, self.groups))
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        Cost::of_message(inputs[0].bytes())
    }
}

impl Op for Receive {
    fn name(&self) -> &'static str {
        "receive"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("receive", inputs, 0)?;
        OpError::ensure(self.from < self.groups.size, || {
            format!("a message from place {} of {} ranks", self.from, self.groups.size)
        })?;
        Ok(vec![self.ty])
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::Receive { from: self.from }, self.groups))
    }

    fn cost(&self, _: &[TensorType], _: &[TensorType]) -> Cost {
        Cost::of_message(0)
    }
}

impl Op for SendReceive {
    fn name(&self) -> &'static str {
        "send_receive"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("send_receive", inputs, 1)?;
        OpError::ensure(self.with < self.groups.size, || {
            format!("messages with place {} of {} ranks", self.with, self.groups.size)
        })?;
        Ok(vec![inputs[0]])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::SendReceive { with: self.with }, self.groups))
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        Cost::of_message(inputs[0].bytes())
    }
}
