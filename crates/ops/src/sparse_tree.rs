//! Device code of sums as a tree in which leaves may be absent; [`crate::host::tree`] is its specification.

use xtrain_cuda::Header;

/// Device code of `sparse_tree` and `sparse_counter`.
pub(crate) const SPARSE_TREE: Header = Header::new("sparse_tree.cuh", include_str!("sparse_tree.cuh"));
