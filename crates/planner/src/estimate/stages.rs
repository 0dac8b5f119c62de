//! The stages of a pipeline: those that decide a step's memory and time, and the figures of each.

use super::{Passes, Timeline};
use crate::tunable::recomputing_blocks;
use serde::Serialize;
use xtrain_model::{Layer, PipelineStage, StagePass};
use xtrain_report::lanes::{Bar, Work};
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
    /// Its number of chunks.
    pub chunks: usize,
    /// Seconds of a forward of a micro-batch through a chunk: of the longest, if there are several.
    pub forward_seconds: f64,
    /// Seconds of its backward, likewise.
    pub backward_seconds: f64,
    /// Seconds of its last backward, which may exchange the gradients of all.
    pub last_backward_seconds: f64,
    /// Seconds of its update.
    pub update_seconds: f64,
}

impl StageCost {
    /// The figures of the stage of `spec`, which needs so many bytes and takes the time of `timeline`.
    pub fn new(spec: &TrainingSpec, bytes: u64, timeline: &Timeline) -> StageCost {
        let Passes { forward, backward, last_backward, .. } = timeline.passes();
        StageCost {
            blocks: (0..spec.model.layers.len()).filter(|&block| spec.stage().has_block(block)).count(),
            bytes,
            chunks: spec.parallel.chunks,
            busy_seconds: timeline.seconds() - timeline.bubble_seconds(),
            forward_seconds: forward,
            backward_seconds: backward,
            last_backward_seconds: last_backward,
            update_seconds: timeline.update_seconds(),
        }
    }
}

/// Bars of a picture of a schedule, about.
const BARS: usize = 4096;

/// The schedule of a step of so many micro-batches: the work of each stage, in order, of as many
/// micro-batches as can be seen, and their number. Stages run their passes in the order of
/// [`PipelineStage::passes`], and each takes its own times.
pub fn schedule(stages: &[StageCost], micro_steps: usize) -> (Vec<Vec<Bar>>, usize) {
    let (count, chunks) = (stages.len().max(1), stages.first().map_or(1, |stage| stage.chunks));
    let parts = count * chunks;
    let mut shown = micro_steps.min((BARS / parts).max(count));
    if chunks > 1 {
        shown = shown / count * count;
    }
    let split = vec![1; parts];
    let order = |index: usize| PipelineStage::of(index, count, &split).passes(shown);
    let orders: Vec<Vec<StagePass>> = (0..count).map(order).collect();
    let mut lanes: Vec<Vec<Bar>> = (0..count).map(|_| Vec::new()).collect();
    let mut ends = vec![[vec![f64::NAN; shown], vec![f64::NAN; shown]]; parts];
    loop {
        let mut moved = false;
        for stage in 0..stages.len() {
            while let Some(&StagePass { is_forward, chunk, micro_step: n }) =
                orders[stage].get(lanes[stage].len())
            {
                let part = chunk * count + stage;
                let before = match is_forward {
                    true => part.checked_sub(1).map_or(0.0, |other| ends[other][0][n]),
                    false if part + 1 == parts => 0.0,
                    false => ends[part + 1][1][n],
                };
                if before.is_nan() {
                    break;
                }
                let of = &stages[stage];
                let (kind, seconds) = match is_forward {
                    true => (Work::Forward, of.forward_seconds),
                    false if n + 1 == shown && chunk == 0 => (Work::Backward, of.last_backward_seconds),
                    false => (Work::Backward, of.backward_seconds),
                };
                let begin = lanes[stage].last().map_or(0.0, |bar| bar.end).max(before);
                let end = begin + seconds;
                ends[part][usize::from(!is_forward)][n] = end;
                lanes[stage].push(Bar { kind, group: Some(n as u32), begin, end });
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (lane, stage) in lanes.iter_mut().zip(stages) {
        let begin = lane.last().map_or(0.0, |bar| bar.end);
        lane.push(Bar { kind: Work::Update, group: None, begin, end: begin + stage.update_seconds });
    }
    (lanes, shown)
}

/// Stages that take the same time: those of one place (first, between or last), with equal blocks, as many of
/// which recompute.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct StageKind<'a> {
    is_first: bool,
    is_last: bool,
    blocks: &'a [Layer],
    recomputing: usize,
}

impl StageKind<'_> {
    /// The kind of the stage of `spec`; `None` if the numbers of its blocks matter, too.
    pub(crate) fn of(spec: &TrainingSpec) -> Option<StageKind<'_>> {
        let index = spec.parallel.stage();
        let stage = spec.stage();
        let fp8 = &spec.fp8;
        let by_number = !fp8.skip.is_empty() || fp8.bf16_first_layers + fp8.bf16_last_layers > 0;
        if by_number || spec.split.is_empty() || spec.parallel.chunks > 1 {
            return None;
        }
        let first: usize = spec.split[..index].iter().sum();
        let count = spec.split[index];
        let recomputing = recomputing_blocks(spec, first..first + count);
        let blocks = spec.model.layers.get(first..first + count)?;
        Some(StageKind { is_first: stage.is_first(), is_last: stage.is_last(), blocks, recomputing })
    }
}

/// True if two stages have the same kernels, but for the micro-batches that they keep.
pub fn are_alike(one: &TrainingSpec, other: &TrainingSpec) -> bool {
    let kind = StageKind::of(one);
    kind.is_some() && kind == StageKind::of(other)
}

/// The stages of `spec` that decide what it needs and takes: of stages of one kind the first, which keeps the
/// most micro-batches.
pub(crate) fn deciding(spec: &TrainingSpec) -> Vec<TrainingSpec> {
    let mut found: Vec<TrainingSpec> = Vec::new();
    for stage in spec.of_stages() {
        let kind = StageKind::of(&stage);
        if kind.is_none() || !found.iter().any(|of| StageKind::of(of) == kind) {
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
    fn a_schedule_of_equal_stages_takes_the_rounds_of_its_micro_batches_and_stages() {
        let stage = StageCost {
            blocks: 1,
            bytes: 0,
            chunks: 1,
            busy_seconds: 0.0,
            forward_seconds: 1.0,
            backward_seconds: 2.0,
            last_backward_seconds: 2.0,
            update_seconds: 0.5,
        };
        for (stages, micro_steps) in [(1, 3), (2, 1), (4, 2), (4, 16), (8, 64)] {
            let (lanes, shown) = schedule(&vec![stage.clone(); stages], micro_steps);
            let end = lanes.iter().flatten().map(|bar| bar.end).fold(0.0, f64::max);
            assert_eq!((end, shown), (3.0 * (micro_steps + stages - 1) as f64 + 0.5, micro_steps));
            for (n, lane) in lanes.iter().enumerate() {
                assert!(lane.windows(2).all(|pair| pair[0].end <= pair[1].begin), "{lane:?}");
                // No more micro-batches are between their passes than a stage keeps.
                let mut on_way = 0_i64;
                for bar in lane.iter().filter(|bar| bar.kind != Work::Update) {
                    on_way += if bar.kind == Work::Forward { 1 } else { -1 };
                    assert!(on_way as usize <= stages - n, "{lane:?}");
                }
                assert_eq!((lane.len(), on_way), (2 * micro_steps + 1, 0));
            }
        }
        assert_eq!(schedule(&vec![stage.clone(); 64], 1000).1, 64);
        // With chunks, whose passes are as long here, stages wait as long for each other as with one.
        for (stages, chunks, micro_steps) in [(2, 2, 2), (4, 2, 4), (4, 3, 16), (8, 4, 8)] {
            let (lanes, shown) = schedule(&vec![StageCost { chunks, ..stage.clone() }; stages], micro_steps);
            let end = lanes.iter().flatten().map(|bar| bar.end).fold(0.0, f64::max);
            let turns = micro_steps * chunks + stages - 1;
            assert_eq!((end, shown), (3.0 * turns as f64 + 0.5, micro_steps), "{stages} x {chunks}");
        }
    }

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
