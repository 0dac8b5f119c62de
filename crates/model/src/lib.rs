//! Decoder-only language models and how they are trained: layers, parameters, tracing, families and their
//! files, precision recipes, optimizers.
//!
//! Invariants: model code names neither a device nor a precision nor a rank. Precision and the cut of state
//! are passes over the program that [`decoder`] traces. Where tokens travel to the experts of other ranks,
//! and which part of a matrix multiplies them, is traced, for all ranks alike ([`ModelRanks`]). A model is
//! data, layer by layer ([`Architecture`]); a [`Family`] is one file of `families/`.

mod adapted;
mod adapter;
mod architecture;
pub mod decoder;
mod description;
mod error;
mod expert_ranks;
mod families;
mod family;
mod first_scales;
mod fixed_routing;
pub mod hf;
mod init;
mod keys;
mod layer;
mod mixture;
mod numerics;
pub mod optimizer;
mod parameters;
mod pattern;
pub mod peft;
mod pipeline_schedule;
mod pipeline_stage;
mod recipe;
mod static_scales;

pub use adapted::AdaptedLinear;
pub use adapter::{Adapter, Targets};
pub use architecture::Architecture;
pub use description::Description;
pub use error::ModelError;
pub use expert_ranks::{Capacity, ExpertRanks};
pub use family::Family;
pub use first_scales::first_scales;
pub use fixed_routing::FixedRouting;
pub use init::Init;
pub use layer::{
    Activation, EXPERTS, ExpertShare, Experts, FeedForward, HEAD, Layer, LinearSpec, Mixer, Mlp, Norm,
    ROUTER, Rotary, SelfAttention,
};
pub use mixture::{BlockSet, Mixture};
pub use numerics::{Bf16Reason, DelayedScales, Fp8Overrides, Numerics, SlowerLayer};
pub use parameters::{HfParts, ParameterGroup, ParameterSpec, in_block};
pub use pattern::GemmPattern;
pub use pipeline_schedule::StagePass;
pub use pipeline_stage::{ModelRanks, PipelineStage};
pub use recipe::Recipe;
pub use static_scales::{LayerScales, ScalesSource, StaticScales};
pub use xtrain_ops::qk_norm_rope::RopeScaling;
pub use xtrain_ops::route::{Router, Score};
