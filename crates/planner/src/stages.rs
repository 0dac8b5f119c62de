//! The stages of a pipeline: those that decide a step's memory and time, and the figures of each.

use crate::estimate::Timeline;
use serde::Serialize;
use xtrain_model::{Layer, PipelineStage};
use xtrain_step::training_spec::TrainingSpec;

/// The estimated figures of a stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageCost {
    /// Its number of blocks.
    pub blocks: usize,
    /// Bytes that each of its ranks needs.
    pub bytes: u64,
    /// Seconds of a step in which it does not wait for other stages to begin or to end.
    pub busy_seconds: f64,
    /// Seconds of its longest forward of a micro-batch.
    pub forward_seconds: f64,
    /// Seconds of its longest backward.
    pub backward_seconds: f64,
    /// Seconds of its update.
    pub update_seconds: f64,
}

impl StageCost {
    /// The figures of the stage of `spec`, which needs so many bytes and takes the time of `timeline`.
    pub fn new(spec: &TrainingSpec, bytes: u64, timeline: &Timeline) -> StageCost {
        let [forward_seconds, backward_seconds] = timeline.pass_seconds();
        StageCost {
            blocks: spec.split.get(spec.parallel.stage()).copied().unwrap_or(spec.model.layers.len()),
            bytes,
            busy_seconds: timeline.seconds() - timeline.bubble_seconds(),
            forward_seconds,
            backward_seconds,
            update_seconds: timeline.update_seconds(),
        }
    }
}

/// What the time of a stage depends on: its place (first, between or last), its blocks, and how many of them
/// recompute. `None` if it also depends on the numbers of its blocks.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Kind<'a> {
    is_first: bool,
    is_last: bool,
    blocks: &'a [Layer],
    recomputing: usize,
}

impl Kind<'_> {
    /// The kind of the stage of `spec`.
    pub(crate) fn of(spec: &TrainingSpec) -> Option<Kind<'_>> {
        let index = spec.parallel.stage();
        let stage = PipelineStage::of(index, &spec.split);
        let fp8 = &spec.fp8;
        let by_number = !fp8.skip.is_empty() || fp8.bf16_first_layers + fp8.bf16_last_layers > 0;
        if by_number || spec.split.is_empty() {
            return None;
        }
        let first: usize = spec.split[..index].iter().sum();
        let count = spec.split[index];
        let recomputing = spec.recompute_blocks.map_or(count, |all| all.saturating_sub(first).min(count));
        let blocks = spec.model.layers.get(first..first + count)?;
        Some(Kind { is_first: stage.is_first(), is_last: stage.is_last(), blocks, recomputing })
    }
}

/// The stages of `spec` that decide what it needs and takes: of stages of one kind the first, which keeps the
/// most micro-batches.
pub(crate) fn deciding(spec: &TrainingSpec) -> Vec<TrainingSpec> {
    let mut found: Vec<TrainingSpec> = Vec::new();
    for stage in spec.of_stages() {
        let kind = Kind::of(&stage);
        if kind.is_none() || !found.iter().any(|of| Kind::of(of) == kind) {
            found.push(stage);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::Device;
    use crate::memory::needed_bytes;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;
    use xtrain_step::programs;

    #[test]
    fn deciding_stages_need_and_take_as_much_as_all() {
        let run = "[model]\ndim = 256\nlayers = 14\nheads = 4\nvocab_size = 2000\n\
                   [data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 256\n\
                   [train]\nsteps = 1\nbatch_size = 32\nmicro_batch_size = 1\nloss_chunk = 256\n\
                   [precision]\nrecipe = 'bf16'\n[parallel]\npipeline = 8\n";
        let device = Device::model("h100").expect("it is in the table");
        for (sets, count) in [
            (&["train.recompute=none"][..], 4),
            (&["train.recompute=block", "train.recompute_blocks=5"], 6),
            (&["train.recompute=block", "parallel.shard=weights"], 4),
        ] {
            let parsed = Config::parse(Path::new("run.toml"), run.as_bytes(), sets).expect("a run file");
            let spec = plan_alone(&parsed, Target::Cuda, Rank::first_of(16)).expect("a plan").spec;
            let most = |stages: Vec<TrainingSpec>| {
                let of = stages.iter().map(|spec| {
                    let program = programs::training(spec).expect("a program");
                    let bytes = needed_bytes(spec, &program, Target::Cuda, 1).expect("a plan");
                    (bytes, Timeline::new(&program, &device, 16).seconds())
                });
                of.fold((0, 0.0_f64), |most, of| (most.0.max(of.0), most.1.max(of.1)))
            };
            let deciding = deciding(&spec);
            assert!(deciding.len() <= count, "{sets:?}: {} stages of {:?}", deciding.len(), spec.split);
            assert_eq!(most(deciding), most(spec.of_stages()), "{sets:?}");
        }
    }
}
