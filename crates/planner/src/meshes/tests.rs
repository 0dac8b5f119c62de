use super::*;
use crate::advice::{Advice, Planner};
use crate::estimate::Limit;
use crate::planned::plan_alone;
use std::path::Path;
use xtrain_config::Config;
use xtrain_rank::Rank;
use xtrain_step::engine::Room;

/// A run whose open settings are given, so that plans take little time.
fn run(model: &str, batch_size: usize) -> String {
    format!(
        "[model]\n{model}\n[data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 4096\n\
         [train]\nsteps = 1\nbatch_size = {batch_size}\nmicro_batch_size = 1\nrecompute = 'block'\nloss_chunk = 4096\n\
         [precision]\nrecipe = 'bf16'\n"
    )
}

const SMALL: &str = "dim = 1024\nlayers = 12\nheads = 8\nkv_heads = 8\nvocab_size = 32000";
const DENSE: &str = "family = 'llama'\ndim = 4096\nlayers = 32\nheads = 32\nkv_heads = 8\nffn_dim = 14336\nvocab_size = 128256";
const LARGE: &str = "family = 'llama'\ndim = 8192\nlayers = 80\nheads = 64\nkv_heads = 8\nffn_dim = 28672\nvocab_size = 128256";
const MIXTURE: &str = "family = 'mixtral'\ndim = 4096\nlayers = 32\nheads = 32\nkv_heads = 8\nvocab_size = 32000\n\
                       [experts]\ncount = 8\nffn_dim = 14336";

const SMALL_MIXTURE: &str = "family = 'mixtral'\ndim = 2048\nlayers = 16\nheads = 16\nkv_heads = 8\nvocab_size = 32000\n\
                             [experts]\ncount = 8\nffn_dim = 7168";

/// The plan of a run on so many ranks, as `train` checks it.
fn replan(run: &str, ranks: usize, sets: &[String]) -> Result<Planned, PlanError> {
    let parsed = Config::parse(Path::new("run.toml"), run.as_bytes(), sets)?;
    parsed.check_shared(ranks)?;
    plan_alone(&parsed, Target::Cuda, Rank::first_of(ranks))
}

fn h100() -> Device {
    let device = Device::model("h100").expect("it is in the table");
    Device { network: device.network.with_bandwidths(Some(50e9), None), ..device }
}

/// The advice for a run on so many H100; `None` if no mesh can share its batch.
fn advice(run: &str, ranks: usize) -> Option<Advice> {
    let device = h100();
    let replan = |ranks: usize, sets: &[String]| replan(run, ranks, sets);
    let room = Some(Room::new(device.usable_bytes.expect("memory")));
    let planner = Planner { device: &device, processor: None, room, replan: &replan };
    match replan(ranks, &[]) {
        Ok(open) => Some(planner.advise(&open).expect("advice")),
        Err(error) => {
            let alone = replan(1, &[]).expect("a plan");
            planner.advise_refused(&alone, ranks, &error.to_string()).expect("advice").ok()
        }
    }
}

#[test]
fn every_proposed_mesh_is_one_that_a_run_takes_with_the_same_time_and_memory() {
    let device = h100();
    for (model, batch_size, ranks) in [
        (DENSE, 64, 8),
        (SMALL_MIXTURE, 64, 8),
        (MIXTURE, 512, 64),
        (LARGE, 512, 64),
        (LARGE, 512, 1024),
        (SMALL, 16, 64),
    ] {
        let run = run(model, batch_size);
        let advice = advice(&run, ranks).expect("meshes");
        assert!(advice.meshes.len() >= 3, "{ranks} ranks, {model}: {:?}", advice.meshes);
        assert_eq!(advice.refused.is_some(), batch_size < ranks);
        for row in &advice.meshes {
            assert!(row.tensor <= 8 && row.tensor * row.pipeline * row.data == ranks, "{row:?}");
            let planned = replan(&run, ranks, &row.set).expect("a run takes it");
            let candidate = Candidate::choose(planned, &device).expect("a step");
            let found = (candidate.needed_bytes, candidate.timeline.seconds(), candidate.stages.len());
            let stages = if row.pipeline > 1 { row.pipeline } else { 0 };
            assert_eq!(found, (row.needed_bytes, row.seconds, stages), "{row:?}");
            let most = row.stages.iter().map(|stage| stage.bytes).max();
            assert!(most.is_none_or(|most| most == row.needed_bytes), "{row:?}");
            assert_eq!(row.fits == Some(false), matches!(row.limits.first(), Some(Limit::Memory { .. })));
        }
        // What fits comes first, and the first is no slower than the others but for what estimates tell.
        let fitting: Vec<&MeshRow> = advice.meshes.iter().take_while(|row| row.fits == Some(true)).collect();
        assert!(!fitting.is_empty(), "{ranks} ranks");
        assert!(fitting.iter().all(|row| 0.98 * fitting[0].seconds <= row.seconds), "{:?}", advice.meshes);
        if let Some(proposal) = &advice.proposal {
            assert!(fitting[0].is_proposed && fitting[0].set == proposal.settings, "{fitting:?}");
        }
    }
}

#[test]
fn sharded_weights_are_preferred_within_a_node_and_tensor_ranks_for_few_sequences() {
    let shape = |model: &str, batch_size: usize, ranks: usize| {
        let advice = advice(&run(model, batch_size), ranks)?;
        advice.meshes.first().map(|row| (row.tensor, row.pipeline, row.data))
    };
    assert_eq!(shape(DENSE, 64, 8), Some((1, 1, 8)));
    let few = shape(SMALL, 16, 64).expect("a mesh");
    assert!(few.0 > 1 && few.2 <= 16, "{few:?}");
    // The state of a large mixture alone needs more than 8 GPUs have, so meshes are those of more.
    let more = advice(&run(MIXTURE, 64), 8).expect("advice");
    let gpus = more.proposal.and_then(|proposal| proposal.gpus).expect("more GPUs");
    let [first, ..] = &more.meshes[..] else { panic!("no meshes of {gpus} GPUs") };
    assert!(gpus > 8 && first.is_proposed && first.tensor * first.pipeline * first.data == gpus, "{first:?}");
    // 61 is no multiple of stages or tensor ranks that share 16 sequences.
    assert_eq!(shape(SMALL, 16, 61), None);
}

#[test]
fn meshes_with_fewer_micro_batches_than_stages_are_planned_if_there_are_no_others() {
    let advice = advice(&run(DENSE, 64), 1024).expect("meshes");
    let row = advice.meshes.first().expect("a mesh");
    assert!(row.is_proposed && row.micro_steps < row.pipeline, "{row:?}");
    assert_eq!(advice.left_out.micro_batches, 0);
}

/// A run that fits on no number of data ranks alone fits in a mesh of more GPUs, and on fewer in one with
/// stages than with sharded weights.
#[test]
fn the_gpus_on_which_a_run_fits_are_those_of_any_mesh() {
    let advice = advice(&run(LARGE, 48), 16).expect("advice");
    let proposal = advice.proposal.as_ref().expect("a proposal");
    assert_eq!(proposal.gpus, Some(24), "{:?}", proposal.settings);
    assert!(advice.shown().needed_bytes <= h100().usable_bytes.expect("memory"));
}

#[test]
fn reasons_are_shares_of_the_step() {
    let run = run(SMALL, 64);
    let sets = ["parallel.pipeline=4".to_owned(), "train.recompute=none".to_owned()];
    let candidate = Candidate::choose(replan(&run, 8, &sets).expect("a plan"), &h100()).expect("a step");
    let Candidate { planned, program, timeline, stages, .. } = &candidate;
    let limits = Limit::all(program, timeline, &h100(), planned.micro_steps(), stages);
    let bubble = limits.iter().find_map(|limit| match limit {
        Limit::Bubble { share, micro_steps, stages } => Some((*share, *micro_steps, *stages)),
        _ => None,
    });
    let (share, micro_steps, stages) = bubble.expect("a bubble");
    assert_eq!((micro_steps, stages), (32, 4));
    // 3 of 35 rounds, less what a step takes besides them.
    assert!((0.05..=3.0 / 35.0 + 0.005).contains(&share), "{limits:?}");
}
