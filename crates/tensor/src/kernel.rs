//! The trait of CPU kernels.
//!
//! A kernel computes in f32, or in f64 if its inputs are f64 (gradient checks). It widens a bf16 operand on
//! reading and rounds it once on writing, exactly as GPU kernels do; so bf16 training on the CPU is the GPU's
//! arithmetic up to the order of sums. A kernel widens one task's part of an operand at a time: the part
//! stays in a core's cache, and its buffer is reused ([`Pooled`](crate::Pooled)).

use crate::TensorType;
use crate::view::{View, ViewMut};

/// The CPU kernel of an op: the specification that every other kernel is compared with.
pub trait CpuKernel: Send + Sync {
    /// Computes all outputs from the inputs. Shapes and types are those that the op's `infer` accepted and
    /// returned. After the outputs come the tensors of the [`workspace`](CpuKernel::workspace),
    /// uninitialised.
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]);

    /// The tensors that a run uses as workspace, planned with the operands.
    fn workspace(&self, _inputs: &[TensorType]) -> Vec<TensorType> {
        Vec::new()
    }

    /// An upper bound of a run's memory beyond its operands and workspace, in bytes, on this many threads, as
    /// far as it grows with the inputs. The rest is bounded by a few blocks of some MiB per thread.
    fn work_bytes(&self, _inputs: &[TensorType], _threads: usize) -> usize {
        0
    }
}
