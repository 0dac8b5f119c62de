//! Predictions of the memory and the time of a deep model's step, from steps of fewer of its blocks.
//!
//! Both rise almost linearly with the number of equal blocks, and planning a step of few blocks takes little
//! time. A prediction only spares the plan of a step where the answer is clear: whatever is within [`MARGIN`]
//! of a limit is planned, and so is a step for which three numbers of blocks are not on a line.

use xtrain_step::error::LearnError;
use xtrain_step::training_spec::TrainingSpec;

/// Memory or time that differs from a limit by a smaller share than this is not clear.
pub(super) const MARGIN: f64 = 0.1;

/// Equal blocks of the smallest step that is planned; others have two and four more. With an odd number of
/// blocks there may be other gaps between buffers, so the numbers are odd only if that of the model is.
const SHALLOW: usize = 4;

/// The prediction must be this near to that of the two smaller steps alone.
const STRAIGHT: f64 = 0.02;

/// The least number of equal blocks that is worth a prediction.
const DEEP: usize = 40;

/// Bytes and seconds of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prediction {
    pub(super) bytes: f64,
    pub(super) seconds: f64,
}

impl Prediction {
    /// True if the step surely needs at most `available` bytes, false if it surely needs more; `None` if it
    /// must be planned.
    pub(super) fn fits(&self, available: u64) -> Option<bool> {
        let share = self.bytes / available as f64;
        if share < 1.0 - MARGIN { Some(true) } else { (share > 1.0 + MARGIN).then_some(false) }
    }
}

/// The prediction for `spec`, all blocks of which have one policy; `plan` returns the bytes and seconds of a
/// step. `None` for a model with few equal blocks, or with FP8 in some of them alone.
pub(super) fn predict(
    spec: &TrainingSpec,
    plan: impl Fn(&TrainingSpec) -> Result<Prediction, LearnError>,
) -> Result<Option<Prediction>, LearnError> {
    let layers = &spec.model.layers;
    let Some(last) = layers.last() else { return Ok(None) };
    let before = layers.iter().rposition(|layer| layer != last).map_or(0, |block| block + 1);
    let of_fp8 = &spec.fp8;
    let alike = of_fp8.skip.is_empty() && of_fp8.bf16_first_layers + of_fp8.bf16_last_layers == 0;
    let equal = layers.len() - before;
    if equal < DEEP || !alike {
        return Ok(None);
    }
    let fewest = SHALLOW + equal % 2;
    let of_blocks =
        |blocks: usize| plan(&TrainingSpec { model: spec.model.truncated(before + blocks), ..spec.clone() });
    let [a, b, c] = [of_blocks(fewest)?, of_blocks(fewest + 2)?, of_blocks(fewest + 4)?];
    let line = |a: f64, b: f64, from: usize| b + (b - a) * ((equal - from) / 2) as f64;
    let further = |of: fn(&Prediction) -> f64| {
        let found = line(of(&b), of(&c), fewest + 4);
        let is_straight = (line(of(&a), of(&b), fewest + 2) / found - 1.0).abs() <= STRAIGHT;
        is_straight.then_some(found)
    };
    let found = further(|of| of.bytes).zip(further(|of| of.seconds));
    Ok(found.map(|(bytes, seconds)| Prediction { bytes, seconds }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::{Device, Timeline};
    use crate::memory::needed_bytes;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;
    use xtrain_step::programs;

    const RUN: &str = "[model]\nfamily = 'dots1'\ndim = 512\nlayers = 48\nheads = 8\nvocab_size = 2000\n\
                       [experts]\ncount = 16\nper_token = 4\nffn_dim = 256\ndense_blocks = [0]\n\
                       [data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 512\n\
                       [train]\nsteps = 1\nbatch_size = 64\nmicro_batch_size = 2\nloss_chunk = 512\n\
                       [precision]\nrecipe = 'bf16'\n[parallel]\nshard = 'weights'\n";

    #[test]
    fn steps_of_few_blocks_predict_those_of_many() {
        let device = Device::model("h100").expect("it is in the table");
        let plan = |spec: &TrainingSpec| -> Result<Prediction, LearnError> {
            let program = programs::training(spec)?;
            let bytes = needed_bytes(spec, &program, Target::Cuda, 1)? as f64;
            Ok(Prediction { bytes, seconds: Timeline::new(&program, &device, 4).seconds() })
        };
        for (recompute, expert) in [("none", 1), ("norms", 4), ("block", 1), ("block", 8)] {
            let sets = [format!("train.recompute={recompute}"), format!("parallel.expert={expert}")];
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &sets).expect("a run file");
            let spec = plan_alone(&parsed, Target::Cuda, Rank::first_of(8)).expect("a plan").spec;
            let (found, exact) = (predict(&spec, plan), plan(&spec).expect("a plan"));
            let found = found.expect("plans").expect("a deep model");
            for (found, exact) in [(found.bytes, exact.bytes), (found.seconds, exact.seconds)] {
                assert!((found / exact - 1.0).abs() < 0.02, "{sets:?}: {found} {exact}");
            }
            let shallow = TrainingSpec { model: spec.model.truncated(40), ..spec.clone() };
            assert_eq!(predict(&shallow, plan).expect("plans"), None);
        }
    }

    #[test]
    fn a_step_near_the_limit_is_planned() {
        let fits = |bytes: f64| Prediction { bytes, seconds: 1.0 }.fits(1000);
        assert_eq!([899.0, 901.0, 1099.0, 1101.0].map(fits), [Some(true), None, None, Some(false)]);
    }
}
