//! One file per section of the run file; one struct field per key.
//!
//! A field is the only place that knows its key: its doc comment is the text of the reference, its
//! attributes carry unit, range and example, and the default follows its `=`. Names of the key in other
//! programs are in the tables of `elsewhere`. The parser, the error messages and docs/configuration.md are
//! all derived from these structs, so a new key is one new field.
//!
//! Invariant: a key whose default depends on other keys, or that excludes another key, is an `Option`;
//! `None` means "not given". Keys of any other type hold their value or their fixed default. So the rules
//! between keys need no record of what was given.

/// Declares a section: `pub key: Type = default,` for each key.
///
/// Expands to the struct, its derives and its `Default`. Attributes that the fields use beyond serde's:
/// `x-unit`, `x-default` (text for a default that is computed) and `x-example`.
macro_rules! section {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$field_meta:meta])* pub $field:ident : $ty:ty = $default:expr, )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $( $(#[$field_meta])* pub $field: $ty, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }
    };
}

mod adapter;
mod chat;
mod checkpoint;
mod data;
mod eval;
mod experts;
mod log;
mod model;
mod optimizer;
mod parallel;
mod precision;
mod schedule;
mod train;

pub use adapter::{AdapterConfig, AdapterTargets};
pub use chat::{ChatPacking, RowContent, TemplateVariables, TooLong, TrainOn};
pub use checkpoint::CheckpointConfig;
pub use data::{DataConfig, DataSource, DataSources, TokenizerChoice};
pub use eval::EvalConfig;
pub use experts::{Balance, ExpertScore, ExpertsConfig, Wire};
pub use log::LogConfig;
pub use model::{ModelConfig, RopeScaling};
pub use optimizer::{MomentFormat, OptimizerConfig, OptimizerKind};
pub use parallel::{ParallelConfig, ReduceDtype, Transport};
pub use precision::{Gemm, PrecisionConfig, Slower};
pub use schedule::{DecayShape, ScheduleConfig, ScheduleKind};
pub use train::{Device, LOSS_CHUNK, Recompute, TrainConfig};
