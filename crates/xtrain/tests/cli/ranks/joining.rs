//! Differences between ranks, which end the run before its first step.

use super::{SHARED, as_ranks};
use crate::fragments::assert_says;
use crate::place::{Place, Ran};
use std::fs;

/// The line with which a rank ended, as the user's error.
fn said(ran: &Ran) -> String {
    assert_eq!(ran.code(), Some(2), "{}", ran.stderr);
    let lines: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("error: ")).collect();
    assert_eq!(lines.len(), 1, "{}", ran.stderr);
    lines[0].to_owned()
}

#[test]
fn ranks_of_torchrun_are_one_run() {
    let place = Place::new();
    let arguments = format!("train run.toml --out out {SHARED}");
    let ranks = as_ranks(&place, &vec![arguments; 3]);
    for ran in ranks {
        let ran = ran.succeeds();
        assert_eq!(ran.stderr.matches("[rank").count(), 0, "{}", ran.stderr);
    }
    place.train("alone", &format!("{SHARED} --ranks 3"));
    let [a, b] = ["alone", "out"].map(|out| place.path(&format!("{out}/hf/model.safetensors")));
    crate::place::assert_same_file(&a, &b);
    assert!(!place.exists(".out.secret"));
}

#[test]
fn a_rank_with_other_settings_ends_all_with_the_key_and_both_values() {
    let place = Place::new();
    let same = format!("train run.toml --out out {SHARED}");
    let other = format!("{same} --set optimizer.lr=1e-4");
    let ranks = as_ranks(&place, &[same.clone(), same, other]);
    for ran in &ranks {
        let line = said(ran);
        for word in ["rank 2 (", "optimizer.lr", "0.0001", "0.003", "rank 0"] {
            assert!(line.contains(word), "{word}: {line}");
        }
    }
    assert!(!place.exists("out"));
}

#[test]
fn a_rank_that_measures_something_else_ends_all() {
    let place = Place::new();
    let same = "bench comm --size 1KiB --runs 1 --gemm 32 --repeats 1";
    for (option, value, other) in [
        ("--repeats", "--repeats 1", "--repeats 3"),
        ("--runs", "--runs 1", "--runs 2"),
        ("--size", "--size 1KiB", "--size 2KiB"),
        ("--gemm", "--gemm 32", "--gemm 64"),
    ] {
        let other = same.replace(value, other);
        for ran in &as_ranks(&place, &[same.to_owned(), other]) {
            let line = said(ran);
            assert!(line.contains("rank 1 (") && line.contains(option), "{option}: {line}");
        }
    }
}

#[test]
fn a_rank_with_another_text_ends_all() {
    let place = Place::new();
    let same = format!("train run.toml --out out {SHARED} --set data.cache_dir=");
    // A folder of its own for the last rank, in which the text of the same name is another one.
    fs::create_dir(place.path("other")).expect("a folder");
    fs::copy(place.path("b.txt"), place.path("other/a.txt")).expect("a copy");
    let at = |folder: &str| {
        let folder = place.path(folder).display().to_string();
        format!("{same}{folder}/cache --set train.started_in={folder}")
    };
    let ranks = as_ranks(&place, &[at("."), at("other")]);
    for ran in &ranks {
        let line = said(ran);
        assert!(line.contains("rank 1 (") && line.contains("training data differs"), "{line}");
    }
    assert!(!place.exists("out"));
}

#[test]
fn a_run_folder_that_ranks_do_not_share_is_refused() {
    let place = Place::new();
    let port = super::free_port();
    fs::create_dir(place.path("node-b")).expect("a folder");
    for file in ["run.toml", "a.txt"] {
        fs::copy(place.path(file), place.path("node-b").join(file)).expect("a copy");
    }
    let arguments =
        format!("train run.toml --out out {SHARED} --set data.cache_dir={}", place.path("cache").display());
    let ran: Vec<Ran> = std::thread::scope(|scope| {
        let started: Vec<_> = [".", "node-b"]
            .into_iter()
            .enumerate()
            .map(|(rank, folder)| {
                let mut command = place.command(&arguments);
                super::environment(&mut command, rank, 2, port);
                command
                    .current_dir(place.path(folder))
                    .env("XTRAIN_SECRET", "0123456789abcdef0123456789abcdef");
                let what = arguments.clone();
                scope.spawn(move || crate::place::finish(command, &what))
            })
            .collect();
        started.into_iter().map(|ran| ran.join().expect("it ran")).collect()
    });
    for ran in &ran {
        let line = said(ran);
        assert_says("train, a run folder of one node", line);
    }
}
