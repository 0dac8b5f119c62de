//! The GEMMs of linear layers of experts, as their GPU kernels name them.

/// The GEMM that an op computes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    Fprop,
    Dgrad,
    Wgrad,
}

impl Product {
    /// The name of its kernels.
    pub(super) fn name(self) -> &'static str {
        match self {
            Product::Fprop => "grouped_linear",
            Product::Dgrad => "grouped_dgrad",
            Product::Wgrad => "grouped_wgrad",
        }
    }
}

/// Sizes of an op: rows of the ragged tensors, experts, the multiple at which their rows begin, outputs and
/// inputs of an expert.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) experts: usize,
    pub(crate) align: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}
