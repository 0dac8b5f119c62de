//! The public face of xtrain: `use xtrain::prelude::*`.
//!
//! The crates behind it hold the logic; this one names what a program that embeds training needs.

/// What a program that trains or runs models needs.
pub mod prelude {
    pub use xtrain_data::{Dataset, Loader, Tokenizer, Validation};
    pub use xtrain_model::{Architecture, Family, Recipe};
    pub use xtrain_program::{Plan, Program, Recompute, Tracer};
    pub use xtrain_runtime::{CpuEngine, Engine};
    pub use xtrain_tensor::{DType, HostTensor, Shape, TensorType};
    pub use xtrain_train::config::Config;
    pub use xtrain_train::generate::{Generator, Sampling};
    pub use xtrain_train::learner::Learner;
    pub use xtrain_train::opened::{OpenedModel, Which, open};
    pub use xtrain_train::run::{Outcome, Start, train};
    pub use xtrain_train::weights::Weights;
}

pub use {
    xtrain_checkpoint as checkpoint, xtrain_data as data, xtrain_model as model, xtrain_ops as ops,
    xtrain_program as program, xtrain_runtime as runtime, xtrain_tensor as tensor, xtrain_train as train,
};
