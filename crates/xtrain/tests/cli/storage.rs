//! Disks that are full and files that may not be read.

use crate::place::{Place, Ran, finish};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Runs `xtrain` with files limited to `blocks` of 512 bytes, which stands for a full disk and needs no rights. Ignored, the
/// limit's signal becomes an error.
fn on_a_small_disk(place: &Place, blocks: usize, arguments: &str) -> Ran {
    let mut shell = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec {} {arguments}", env!("CARGO_BIN_EXE_xtrain"));
    shell.args(["-c", &script]);
    finish(place.settle(shell), arguments)
}

#[test]
fn a_full_disk_ends_a_run_with_its_last_checkpoint_whole() {
    let place = Place::new();
    let keep_all = "--set checkpoint.keep_last=20 --set schedule.kind=constant";
    place.train("peace", keep_all);
    place.train("out", &format!("{keep_all} --set train.steps=3"));
    let state = place.read("out/checkpoints/step-3/state-00001.safetensors");
    // The metrics still fit, a checkpoint does not.
    let small = state.len() / 512 - 1;
    let ran = on_a_small_disk(&place, small, "train run.toml --out out --resume");
    ran.refuses(&["out/checkpoints/step-6", "write", "File too large"]);
    assert_eq!(place.names("out/checkpoints"), ["step-3"]);
    assert_eq!(place.read("out/checkpoints/step-3/state-00001.safetensors"), state);
    // Nothing at all fits.
    on_a_small_disk(&place, 0, "train run.toml --out out --resume").refuses(&["out"]);
    assert_eq!(place.names("out/checkpoints"), ["step-3"]);
    // With room again, the run goes on and ends as if nothing had been.
    place.train("out", &format!("--resume {keep_all}"));
    let last = "checkpoints/step-40/state-00001.safetensors";
    assert!(place.read(&format!("out/{last}")) == place.read(&format!("peace/{last}")));
}

#[test]
fn a_full_disk_under_each_verb_is_one_line_and_leaves_nothing_half_made() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    on_a_small_disk(&place, 2, "tokenize a.txt --bytes --out shards").refuses(&["shards"]);
    assert!(!place.exists("shards/dataset.json"));
    on_a_small_disk(&place, 2, "export out --out hf").refuses(&["hf"]);
    assert!(!place.exists("hf"));
    let report = place.read("out/report.html");
    on_a_small_disk(&place, 2, "report out").refuses(&["report.html"]);
    assert_eq!(place.read("out/report.html"), report);
    on_a_small_disk(&place, 2, "train run.toml --out new").refuses(&["new/tokenizer"]);
    // The same commands, once there is room.
    place.run("tokenize a.txt --bytes --out shards").succeeds();
    place.run("export out --out hf").succeeds();
    place.train("new", "--set train.steps=3");
}

#[test]
fn files_that_may_not_be_read_are_named() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    let forbid = |name: &str| fs::set_permissions(place.path(name), Permissions::from_mode(0)).expect("permissions");
    for name in ["b.txt", "out/config.toml", "run.toml"] {
        forbid(name);
    }
    if fs::read(place.path("b.txt")).is_ok() {
        eprintln!("this user may read everything: nothing to test");
        return;
    }
    place.run("eval out --data a.txt").refuses(&["out/config.toml", "Permission denied"]);
    place.run("tokenize b.txt --bytes --out shards").refuses(&["b.txt", "Permission denied", "check the permissions"]);
    place.run("plan run.toml").refuses(&["run.toml", "Permission denied"]);
}
