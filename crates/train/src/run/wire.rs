//! The format in which tokens travel to the ranks of their experts, in a run that is resumed.

use crate::error::RunError;
use xtrain_config::{Config, Parsed, Wire};

const KEY: &str = "experts.wire";

/// Sets the format with which a run goes on, in its resolved configuration: that of its checkpoint, whose
/// configuration was `before`, unless an argument names another. In another recipe it is chosen again.
///
/// # Errors
/// The run file names another.
pub(super) fn resume(parsed: &Parsed, before: &Config, config: &mut Config) -> Result<(), RunError> {
    let is_of_recipe = before.precision.recipe == config.precision.recipe;
    let kept = before.experts.wire.filter(|wire| is_of_recipe && *wire != Wire::Auto);
    let Some(kept) = kept.filter(|_| config.experts.wire.is_some() && !parsed.is_argument(KEY)) else {
        return Ok(());
    };
    let name = |wire: Wire| serde_json::json!(wire);
    match config.experts.wire.filter(|wire| ![kept, Wire::Auto].contains(wire)) {
        Some(now) => Err(RunError::Refused(format!(
            "the run began with {KEY} = {}, and now it is {}, which rounds otherwise; resume with the former, or ask for the \
             latter with --set {KEY}={}",
            name(kept),
            name(now),
            name(now).as_str().unwrap_or_default()
        ))),
        None => {
            config.experts.wire = Some(kept);
            Ok(())
        }
    }
}

/// Records in the configuration of a mixture that tokens travel in FP8, or not.
pub(super) fn record(config: &mut Config, is_fp8: bool) {
    if let Some(wire) = &mut config.experts.wire {
        *wire = if is_fp8 { Wire::Fp8 } else { Wire::Bf16 };
    }
}
