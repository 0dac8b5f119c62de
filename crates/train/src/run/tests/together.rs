//! Ranks as threads, each with a run of its own.

use super::run_file;
use crate::process_group::tests::on_ranks;
use crate::run::Start;
use crate::run::open::{Opened, open};
use crate::run::watch::Watch;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use xtrain_program::StateKind;

/// Trains on ranks of which one may have another bit in its weights. Returns how it ended on each.
fn trained(ranks: usize, [shard, replicas]: [&str; 2], changed: Option<usize>) -> Vec<Result<u64, String>> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut parsed = run_file(folder.path(), "out");
    parsed.config.log.every = 4;
    parsed.config.train.batch_size = ranks;
    parsed.config.parallel.shard = serde_json::from_value(shard.into()).expect("a mode");
    parsed.config.parallel.replicas = replicas.parse().expect("a number");
    on_ranks(ranks, |process_group| {
        let opened = open(&parsed, Start::New, process_group, &mut (), &|| false).expect("a run");
        let Opened::Run(mut run) = opened else { panic!("it has steps left") };
        if changed == Some(process_group.rank().index) {
            let name = "blocks.0.mlp.down_proj.weight";
            let mut bytes = run.learner.read_state(StateKind::Master, name).expect("a master");
            // Not the lowest bit, which the rounding of an update may make equal again.
            bytes[2] ^= 0x40;
            run.learner.write_state(StateKind::Master, name, &bytes).expect("a master");
        }
        let ended = run.go(Watch::new(&AtomicBool::new(false), Instant::now(), None), &mut ());
        let ended = ended.and_then(|_| process_group.finish()).map(|()| run.position.step);
        ended.map_err(|error| process_group.fail(error).to_string())
    })
}

#[test]
fn one_bit_by_which_the_weights_of_ranks_differ_ends_the_run() {
    assert_eq!(trained(2, ["none", "1"], None), [Ok(16), Ok(16)]);
    for ended in trained(2, ["none", "1"], Some(1)) {
        let text = ended.expect_err("a difference");
        assert!(text.contains("after step 4 the weights of rank 1 differ from those of rank 0"), "{text}");
    }
}

#[test]
fn a_replica_whose_rows_differ_is_named() {
    for shard in ["optimizer", "weights"] {
        assert_eq!(trained(4, [shard, "2"], None), vec![Ok(16); 4]);
        for ended in trained(4, [shard, "2"], Some(3)) {
            let text = ended.expect_err("a difference");
            assert!(text.contains("the weights of rank 3 differ from those of rank 1"), "{text}");
        }
    }
}
