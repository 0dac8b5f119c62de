//! Data types, shapes, host tensors, number formats, the Philox generator, and the trait behind which CPU kernels stand.
//!
//! Invariants: nothing here allocates on or talks to a device; a cast is the same function everywhere in xtrain
//! (`formats` is the specification that GPU casts are compared with).
//! Deliberately absent: arithmetic on tensors. That lives in ops.

mod dtype;
pub mod formats;
pub mod host;
pub mod kernel;
mod minifloat;
mod name_part;
mod normal;
pub mod philox;
mod pool;
mod scaling;
mod shape;
mod simd;

pub use dtype::DType;
pub use host::{AlignedBytes, HostTensor};
pub use kernel::{CpuKernel, Real, Reals, RealsMut, Stored, View, ViewMut};
pub use name_part::NamePart;
pub use philox::Philox;
pub use pool::Pooled;
pub use scaling::{Scaling, TILE};
pub use shape::{Shape, TensorType};
pub use simd::vectorized;
