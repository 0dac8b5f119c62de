//! Ranks as threads, each with a run of its own.

use super::run_file;
use crate::crew::tests::on_ranks;
use crate::run::Start;
use crate::run::assemble::Opened;
use crate::run::open::open;
use crate::run::watch::Watch;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use xtrain_program::StateKind;

/// Trains on two ranks where a bit of the weights of the second may differ. Returns how it ended on each.
fn trained(is_changed: bool) -> Vec<Result<u64, String>> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut parsed = run_file(folder.path(), "out");
    parsed.config.log.every = 4;
    on_ranks(2, |crew| {
        let opened = open(&parsed, Start::New, crew, &mut (), &|| false).expect("a run");
        let Opened::Run(mut run) = opened else { panic!("it has steps left") };
        if is_changed && !crew.is_first() {
            let name = "blocks.0.mlp.down_proj.weight";
            let mut bytes = run.learner.read_state(StateKind::Master, name).expect("a master");
            // Not the lowest bit, which the rounding of an update may make equal again.
            bytes[2] ^= 0x40;
            run.learner.write_state(StateKind::Master, name, &bytes).expect("a master");
        }
        let ended = run.go(Watch::new(&AtomicBool::new(false), Instant::now(), None), &mut ());
        let ended = ended.and_then(|_| crew.finish()).map(|()| run.position.step);
        ended.map_err(|error| crew.fail(error).to_string())
    })
}

#[test]
fn one_bit_by_which_the_weights_of_ranks_differ_ends_the_run() {
    assert_eq!(trained(false), [Ok(16), Ok(16)]);
    for ended in trained(true) {
        let text = ended.expect_err("a difference");
        assert!(text.contains("after step 4 the weights of rank 1 differ from those of rank 0"), "{text}");
    }
}
