//! The GEMMs of linear layers of experts, as their GPU kernels name them.

use crate::ragged::Sizes;

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

    /// Columns of its output.
    pub(super) fn columns(self, sizes: Sizes) -> usize {
        if self == Product::Fprop { sizes.outputs } else { sizes.inputs }
    }
}
