//! Decoder-only language models: their sizes, their parameters, how they are traced, and how they are called elsewhere.
//!
//! Invariants: model code names neither a device nor a precision nor a parallelism; those are passes over the program that
//! [`decoder`] traces. A family differs from another only by data ([`Architecture`]) and by names ([`hf`]).

mod config;
pub mod decoder;
pub mod hf;
mod numerics;
mod parameters;
mod pattern;
mod recipe;

pub use config::{Architecture, Family, ModelError};
pub use numerics::{DelayedScales, Fp8Overrides, Kept, Numerics, SlowerLayer};
pub use parameters::{Init, ParameterSpec, Part};
pub use pattern::ProductPattern;
pub use recipe::Recipe;
pub use xtrain_ops::qk_norm_rope::RopeScaling;
