//! cuDNN on a GPU: operation graphs built from descriptors, and the plans that run them.
//!
//! A graph is a list of operations over tensors. The library's heuristics propose engines for it; the first
//! one that meets the limits is planned once and serves all tensors of the same shapes.

mod descriptor;
mod graph;
mod plan;

pub(crate) use descriptor::Dnn;
pub(crate) use graph::{BOOLEAN_TYPE, Dims, GraphBuilder, INDEX_TYPE, Pointwise, Reduce, Tensor, packed};
pub(crate) use plan::GraphPlan;

/// The two directions of attention. Each has a cuDNN handle of its own, so that both are planned at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    /// From queries, keys and values to the output.
    Forward,
    /// From the output's gradient to those of queries, keys and values.
    Backward,
}
