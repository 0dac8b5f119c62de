//! Building blocks of CPU kernels: GEMMs, parallel loops over rows, and vectorised elementary functions.
//!
//! Invariant: results do not depend on the number of threads. Work is split by shape alone, and partial sums
//! are added in a fixed order.

pub(crate) mod amax;
pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod groups;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod rows;
pub(crate) mod tree;
