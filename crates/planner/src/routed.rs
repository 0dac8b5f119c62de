//! The cost of a routing that gives some ranks more tokens than others.
//!
//! Ranks that share experts wait for each other in every block, so the rank with the most rows decides.

use crate::error::PlanError;
use crate::estimate::{Device, Timeline};
use crate::planned::Planned;
use crate::row_room::RowRoom;
use serde::Serialize;
use xtrain_model::FixedRouting;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// The rows of experts on the ranks that share them, and the time of a step, with a fixed routing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoutedStep {
    /// Rows of tokens on the rank with the most, in a block and a micro-step.
    pub most_rows: usize,
    /// Their mean over ranks.
    pub mean_rows: usize,
    /// Rows that a rank allocates.
    pub allocated_rows: usize,
    /// The room with which the run repeats its first step, if that has too few rows.
    pub grown_to: Option<RowRoom>,
    /// Seconds of a step.
    pub seconds: f64,
}

impl RoutedStep {
    /// The step of `planned` with this routing; `None` for a model without experts.
    pub fn estimate(
        planned: &Planned,
        routing: FixedRouting,
        device: &Device,
    ) -> Result<Option<RoutedStep>, PlanError> {
        let spec = &planned.spec;
        let mut blocks = spec.model.layers.iter();
        let Some(experts) = blocks.find_map(|layer| layer.feed_forward.experts()) else { return Ok(None) };
        let (tokens, ranks) = (spec.own_tokens(), spec.expert_ranks());
        let (allocated_rows, mean_rows) = (experts.ragged_rows(tokens, ranks), tokens * experts.router.top_k);
        let needed_rows = experts.needed_rows(tokens, ranks, routing);
        let mut routed = TrainingSpec { fixed_routing: Some(routing), ..spec.clone() };
        let is_grown = ranks.count > 1 && needed_rows > allocated_rows;
        if is_grown {
            routed.grow(needed_rows);
        }
        let program = programs::training(&routed).map_err(LearnError::from)?;
        let seconds = Timeline::new(&program, device, planned.micro_steps()).seconds();
        let grown_to = RowRoom::from_spec(&routed).filter(|_| is_grown);
        let most_rows = experts.most_rows(tokens, ranks, routing);
        Ok(Some(RoutedStep { most_rows, mean_rows, allocated_rows, grown_to, seconds }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;

    const RUN: &str = "[model]\nfamily = 'mixtral'\ndim = 1024\nlayers = 2\nheads = 8\nvocab_size = 2000\n\
                       [experts]\ncount = 8\nper_token = 2\nffn_dim = 4096\n\
                       [data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 1024\n\
                       [train]\nsteps = 1\nbatch_size = 16\nmicro_batch_size = 2\nrecompute = 'none'\n\
                       loss_chunk = 512\n[precision]\nrecipe = 'bf16'\n";

    #[test]
    fn a_room_grows_to_the_rows_that_are_needed_and_a_quarter_more() {
        let sets = ["parallel.expert=4", "experts.capacity=1.0"];
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &sets).expect("a run file");
        let planned = plan_alone(&parsed, Target::Cuda, Rank::first_of(8)).expect("a plan");
        for needed in [5_000, 7_000, 10_000] {
            let mut grown = planned.spec.clone();
            grown.grow(needed);
            let room = grown.room().expect("less than every routing needs");
            assert!((needed * 5 / 4..needed * 5 / 4 + 256).contains(&room), "{needed}: {room}");
        }
        let mut grown = planned.spec.clone();
        grown.grow(16_000);
        assert_eq!((grown.room(), grown.capacity), (None, None), "every routing fits");
    }

    #[test]
    fn the_rank_with_the_most_rows_decides() {
        let device = Device::model("h100").expect("it is in the table");
        let of = |sets: &[&str], skew: f64| {
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), sets).expect("a run file");
            let planned = plan_alone(&parsed, Target::Cuda, Rank::first_of(8)).expect("a plan");
            let program = programs::training(&planned.spec).expect("a program");
            let usual = Timeline::new(&program, &device, planned.micro_steps()).seconds();
            let routed = RoutedStep::estimate(&planned, FixedRouting { skew }, &device).expect("a step");
            (usual, routed)
        };
        let tokens = 2 * 1024;
        for expert in [1, 4, 8] {
            let set = format!("parallel.expert={expert}");
            let (usual, equal) = of(&[&set], 0.0);
            let equal = equal.expect("experts");
            assert_eq!((equal.most_rows, equal.mean_rows), (2 * tokens, 2 * tokens), "{expert}");
            // Ids that no router chooses are gathered a little earlier.
            assert!((equal.seconds / usual - 1.0).abs() < 0.01, "{expert}: {} {usual}", equal.seconds);
            let skewed = of(&[&set], 1.0).1.expect("experts");
            // Of the first expert's share of 2 / 2.718 and of the next one, and so on.
            let harmonic: f64 = (1..=8).map(|n| 1.0 / f64::from(n)).sum();
            let own: f64 = (1..=8 / expert).map(|n| 1.0 / n as f64).sum();
            let rows = (expert * tokens) as f64 * 2.0 * own / harmonic;
            assert!((skewed.most_rows as f64 - rows).abs() <= 1.0, "{expert}: {skewed:?}, not {rows}");
            assert!(skewed.most_rows <= skewed.allocated_rows && skewed.grown_to.is_none());
            let small = of(&[&set, "experts.capacity=1.0"], 1.0).1.expect("experts");
            assert_eq!(small.most_rows, skewed.most_rows, "{expert}");
            // Other zeros are written between rows.
            assert!((0.9..1.1).contains(&(small.seconds / skewed.seconds)), "{expert}: {small:?} {skewed:?}");
            // With a quarter more.
            let grown = skewed.most_rows as f64 / skewed.mean_rows as f64 * 1.25;
            match small.grown_to {
                Some(RowRoom::Capacity(factor)) => {
                    assert!((factor / grown - 1.0).abs() < 0.15, "{expert}: {factor} {grown}");
                }
                other => assert_eq!((expert, other), (1, None)),
            }
            let slower = skewed.seconds / equal.seconds;
            assert_eq!(slower > 1.05, expert > 1, "{expert}: {slower}");
        }
        let dense = ["model.family=mistral", "experts.count=", "experts.per_token=", "experts.ffn_dim="];
        assert_eq!(of(&dense, 1.0).1, None);
    }
}
