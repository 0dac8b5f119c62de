//! Data types, shapes, host tensors, number formats, the Philox generator, the trait of CPU kernels, and the
//! memory of the host.
//!
//! Invariants: nothing here allocates on a device or talks to one. A cast is the same function everywhere in
//! xtrain: `formats` is the specification that GPU casts are compared with.
//!
//! Deliberately absent: arithmetic on tensors, which lives in ops.

mod available;
mod dtype;
mod error_debug;
pub mod formats;
pub mod host;
mod kernel;
mod minifloat;
mod name_part;
mod normal;
pub mod philox;
mod pool;
pub mod real;
mod refusable;
mod scaling;
mod shape;
mod simd;
mod view;

pub use available::{available_bytes, total_bytes};
pub use dtype::DType;
pub use host::{AlignedBytes, HostTensor};
pub use kernel::CpuKernel;
pub use name_part::{NamePart, NameWhole};
pub use philox::Philox;
pub use pool::{Poolable, Pooled};
pub use real::{Real, Stored};
pub use refusable::{is_refusable, refusable};
pub use scaling::{Scaling, TILE};
pub use shape::{Shape, TensorType};
pub use simd::vectorized;
pub use view::{Reals, RealsMut, View, ViewMut};
