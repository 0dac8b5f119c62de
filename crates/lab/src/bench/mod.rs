//! Speed of training steps, of their ops one by one, and of ops by themselves.
//!
//! A step is measured as a run makes it, on the run's data if that is token shards.

mod attention;
mod comm;
mod copy_rate;
mod fp8;
mod gemm;
mod op_bench;
mod operands;
mod step;
mod step_ops;
mod tokens;

pub use attention::{AttentionShape, AttentionSpeed, attention, attention_of, common_attention};
pub use comm::{CommOptions, CommSpeed, CommSpeeds, comm};
pub use fp8::{
    BreakEven, Fp8Speed, Fp8Speeds, LinearSeconds, LinearShape, RecipeSpeed, fp8, fp8_recipes, fp8_shapes,
};
pub use gemm::{ExpertRows, GemmShape, GemmSpeed, common_gemms, expert_gemms, gemms, gemms_of};
pub use op_bench::{Ceiling, OpBenchOptions, OpRates, OpSpeeds};
pub use step::{BenchOptions, RankOf, RankSpeed, Routing, StepSpeed, step};
pub use step_ops::{OpSpeed, ops};
