//! The room for rows of experts on ranks that share them, and how much of it fits into memory.

use crate::error::PlanError;
use crate::estimate::Device;
use crate::memory::{first_that_fits, needed_bytes};
use crate::tunable::capacity_for_all;
use serde::Serialize;
use xtrain_model::Capacity;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// Room for the rows of a rank's experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowRoom {
    /// Every routing fits.
    EveryRouting,
    /// This `experts.capacity`: a multiple of the rows of equal loads.
    Capacity(f64),
}

impl RowRoom {
    /// The room of a step whose ranks share experts; `None` if each rank has all.
    pub fn from_spec(spec: &TrainingSpec) -> Option<RowRoom> {
        let of_capacity = spec.room().and(spec.capacity).map(|of| RowRoom::Capacity(of.factor()));
        capacity_for_all(spec).map(|_| of_capacity.unwrap_or(RowRoom::EveryRouting))
    }

    /// The largest room, in tenths, with which the step of `spec`, which needs `needed` bytes, needs at most
    /// `available`; `None` if it does not fit with any, or each rank has all experts.
    pub fn largest(
        spec: &TrainingSpec,
        needed: u64,
        available: u64,
        device: &Device,
    ) -> Result<Option<RowRoom>, PlanError> {
        let Some(every) = capacity_for_all(spec) else { return Ok(None) };
        let bytes = |capacity: Option<Capacity>| -> Result<u64, LearnError> {
            let spec = TrainingSpec { capacity, ..spec.clone() };
            needed_bytes(&spec, &programs::training(&spec)?, device.target, device.threads)
        };
        let over = match RowRoom::from_spec(spec) {
            Some(RowRoom::EveryRouting) => needed,
            _ => bytes(None)?,
        };
        if over <= available {
            return Ok(Some(RowRoom::EveryRouting));
        }
        let tenths = (10.0 * every.factor()).ceil() as usize;
        let factors: Vec<f64> = (10..tenths).rev().map(|tenths| tenths as f64 / 10.0).collect();
        let found = first_that_fits(factors.len(), over, available, |n| {
            Ok::<_, LearnError>((bytes(Capacity::from_factor(factors[n]))?, factors[n]))
        })?;
        Ok(found.map(RowRoom::Capacity))
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

    const RUN: &str = "[model]\nfamily = 'mixtral'\ndim = 256\nlayers = 2\nheads = 4\nvocab_size = 1024\n\
                       [experts]\ncount = 8\nper_token = 2\nffn_dim = 512\n[data]\ntrain = 'text'\n\
                       tokenizer = 'bytes'\nseq_len = 2048\n[train]\nsteps = 1\nbatch_size = 8\n\
                       micro_batch_size = 1\nrecompute = 'none'\n[precision]\nrecipe = 'bf16'\n";

    #[test]
    fn the_largest_room_fits_and_a_tenth_more_does_not() {
        let device = Device::model("h100").expect("it is in the table");
        let spec = |expert: usize| {
            let set = [format!("parallel.expert={expert}")];
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &set).expect("a run file");
            plan_alone(&parsed, Target::Cuda, Rank::first_of(8)).expect("a plan").spec
        };
        let of_four = spec(4);
        let needed = |capacity: Option<f64>| {
            let capacity = capacity.and_then(Capacity::from_factor);
            let spec = TrainingSpec { capacity, ..of_four.clone() };
            let program = programs::training(&spec).expect("a program");
            needed_bytes(&spec, &program, Target::Cuda, device.threads).expect("bytes")
        };
        let every = needed(None);
        let largest = |available| RowRoom::largest(&of_four, every, available, &device).expect("plans");
        assert_eq!(largest(needed(None)), Some(RowRoom::EveryRouting));
        for capacity in [1.0, 1.7, 3.0] {
            let (fits, more) = (needed(Some(capacity)), needed(Some(capacity + 0.1)));
            assert!(more > fits, "{capacity}");
            assert_eq!(largest(fits), Some(RowRoom::Capacity(capacity)));
            assert_eq!(largest(more - 1), Some(RowRoom::Capacity(capacity)));
        }
        assert_eq!(largest(needed(Some(1.0)) - 1), None);
        assert_eq!(RowRoom::largest(&spec(1), 1, u64::MAX, &device).expect("plans"), None);
        // A token has both of its experts on one of four ranks: four times the rows of equal loads. So it is
        // with one of eight, which has one of the two.
        for (expert, factor) in [(4, 4.0), (2, 2.0), (8, 4.0)] {
            let of = spec(expert);
            assert_eq!(capacity_for_all(&of).map(Capacity::factor), Some(factor), "{expert}");
            let room = |factor: f64| {
                RowRoom::from_spec(&TrainingSpec { capacity: Capacity::from_factor(factor), ..of.clone() })
            };
            assert_eq!(room(factor), Some(RowRoom::EveryRouting), "{expert}");
            assert_eq!(room(factor - 0.2), Some(RowRoom::Capacity(factor - 0.2)), "{expert}");
        }
        assert_eq!(RowRoom::from_spec(&of_four), Some(RowRoom::EveryRouting));
        let small = TrainingSpec { capacity: Capacity::from_factor(1.5), ..of_four.clone() };
        assert_eq!(RowRoom::from_spec(&small), Some(RowRoom::Capacity(1.5)));
        assert_eq!((RowRoom::from_spec(&spec(1)), capacity_for_all(&spec(1))), (None, None));
    }
}
