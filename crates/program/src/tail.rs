//! The tail of a ragged tensor, as an op writes it ([`crate::tails`]).

use crate::{KernelTable, Op};
use std::sync::Arc;

/// The contents of the tails that an op writes: an attribute of the op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tail {
    /// Zeros.
    #[default]
    Zeros,
    /// Whatever was in memory; NaNs on the CPU. Nothing may depend on it.
    Undefined {
        /// The rows that are expected in groups. They determine the cost alone.
        live_rows: usize,
    },
}

impl Tail {
    /// True if it is undefined.
    pub const fn is_undefined(self) -> bool {
        matches!(self, Tail::Undefined { .. })
    }
}

/// An op that knows tails: it reads none of some inputs, or can leave those of its outputs undefined.
pub trait RaggedOp: Op {
    /// True if a result may depend on the tail of this input.
    fn reads_tail(&self, _input: usize) -> bool {
        true
    }

    /// The contents of the tail of this output, if it is a ragged tensor whose tail the op can leave
    /// undefined.
    fn tail(&self, _output: usize) -> Option<Tail> {
        None
    }

    /// The op with such tails of all its outputs.
    fn with_tail(&self, _tail: Tail) -> Option<Arc<dyn Op>> {
        None
    }

    /// The rows that are expected in the groups of the ragged tensors that the op reads.
    fn live_rows(&self) -> Option<usize> {
        None
    }
}

/// The ops that know tails. Others read the tails of all inputs, and write those of all outputs.
pub type RaggedOps = KernelTable<dyn RaggedOp>;

impl RaggedOps {
    /// True if `op` leaves the tail of this output undefined.
    pub fn leaves_undefined(&self, op: &dyn Op, output: usize) -> bool {
        self.find(op).and_then(|op| op.tail(output)).is_some_and(Tail::is_undefined)
    }
}
