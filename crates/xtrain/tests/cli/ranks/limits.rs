//! Ranks under limits of the system, and leftovers of ranks that were killed.

use super::{SHARED, environment, free_port};
use crate::place::{Place, Ran, finish};
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs xtrain after a command of the shell, as a rank of two if `rank` names one.
fn after(place: &Place, shell: &str, arguments: &str, rank: Option<usize>) -> Ran {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{shell}; exec {} {arguments}", env!("CARGO_BIN_EXE_xtrain"))]);
    if let Some(rank) = rank {
        environment(&mut command, rank, 2, free_port());
    }
    finish(place.settle(command), shell)
}

#[test]
fn too_few_open_files_are_refused_at_once_and_a_soft_limit_is_raised() {
    let place = Place::new();
    let since = Instant::now();
    let run = format!("train run.toml --out out {SHARED} --ranks 2");
    after(&place, "ulimit -n 24", &run, None).refuses(&[
        "2 ranks needs up to 38 open files",
        "24",
        "ulimit -n",
    ]);
    let run = format!("train run.toml --out out {SHARED}");
    for rank in [0, 1] {
        after(&place, "ulimit -n 30", &run, Some(rank)).refuses(&["needs up to 38 open files"]);
    }
    assert!(since.elapsed() < Duration::from_secs(60), "{:?}", since.elapsed());
    assert!(!place.exists("out"));
    after(&place, "ulimit -S -n 13", &format!("{run} --ranks 2"), None).succeeds();
}

#[test]
fn a_leftover_of_a_killed_rank_0_is_removed() {
    let place = Place::new();
    // The number of a process that cannot be, and one of this machine.
    for number in [4_194_305, 1] {
        place.write(&format!(".out.secret.tmp-{number}"), b"half of a secret");
    }
    place.run(&format!("train run.toml --out out {SHARED} --ranks 2")).succeeds();
    let left: Vec<String> = place.names(".").into_iter().filter(|name| name.contains("secret")).collect();
    assert!(left.is_empty(), "{left:?}");
}
