//! One run, trained by several processes.

mod ending;
mod equality;
mod experts;
mod faults;
mod joining;
mod launching;
mod limits;
mod pipeline;
mod resuming;
mod tensor;

use crate::place::{Place, Ran, assert_same_file};
use crate::resume::recorded;
use std::net::TcpListener;
use std::process::Command;

/// Losses of micro-batches of one sequence, so that 1 to 4 ranks share a batch of 12.
const SHARED: &str = "--set train.batch_size=12 --set train.micro_batch_size=1 --set train.steps=10";

/// The variables that torchrun sets for a rank, on this machine.
fn environment(command: &mut Command, rank: usize, ranks: usize, port: u16) {
    let numbers = [
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", ranks),
        ("LOCAL_WORLD_SIZE", ranks),
        ("MASTER_PORT", port.into()),
    ];
    command.envs(numbers.map(|(name, number)| (name, number.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1");
}

/// A port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}

/// Runs the ranks of a run as torchrun would, each with its own arguments. Returns how they ended, by rank.
pub(crate) fn as_ranks(place: &Place, arguments: &[String]) -> Vec<Ran> {
    let (port, ranks) = (free_port(), arguments.len());
    std::thread::scope(|scope| {
        let start = |(rank, arguments): (usize, &String)| {
            let (what, mut command) = (format!("rank {rank}: {arguments}"), place.command(arguments));
            environment(&mut command, rank, ranks, port);
            scope.spawn(move || crate::place::finish(command, &what))
        };
        let started: Vec<_> = arguments.iter().enumerate().map(start).collect();
        started.into_iter().map(|ran| ran.join().expect("it ran")).collect()
    })
}

/// A number of each record of a kind.
fn numbers(place: &Place, out: &str, kind: &str, key: &str) -> Vec<f64> {
    place.records(out, kind).iter().map(|record| record[key].as_f64().expect("a number")).collect()
}

/// Asserts that numbers differ by at most this share.
fn assert_near(a: &[f64], b: &[f64], share: f64) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= share * b.abs(), "{a} and {b}");
    }
}

/// Trains `out` in parts of two steps, each on another mesh of ranks.
fn train_in_parts(place: &Place, out: &str, meshes: impl IntoIterator<Item = String>, sets: &str) {
    for (n, mesh) in meshes.into_iter().enumerate() {
        let (steps, resume) = (2 * n + 2, if n == 0 { "" } else { "--resume" });
        place.train(out, &format!("{sets} --set train.steps={steps} {mesh} {resume}"));
    }
}

/// Asserts that the run "parts" has the bits of the run "whole" after so many steps: those of the export, of
/// the records, and of the moments with which one process makes one more step.
fn assert_parts_are_whole(place: &Place, sets: &str, steps: usize) {
    assert_same_file(&place.path("whole/hf/model.safetensors"), &place.path("parts/hf/model.safetensors"));
    assert_eq!(recorded(place, "parts"), recorded(place, "whole"));
    let next = steps + 1;
    let [whole, parts] = ["whole", "parts"].map(|out| {
        place.train(out, &format!("{sets} --set train.steps={next} --resume"));
        place.path(&format!("{out}/checkpoints/step-{next}/rank-00000-00001.safetensors"))
    });
    assert_same_file(&whole, &parts);
}

/// Asserts that the run `out` on several ranks has the losses of the run "one" in one process, a sample and
/// the files of its export, and that other commands take its checkpoint.
fn assert_like_one_process(place: &Place, out: &str) {
    for (kind, key) in [("step", "loss"), ("step", "grad_norm"), ("eval", "loss"), ("eval", "token_accuracy")]
    {
        let [ours, alone] = [out, "one"].map(|out| numbers(place, out, kind, key));
        assert_near(&ours, &alone, 1e-5);
    }
    assert_eq!(place.records(out, "sample").len(), 1);
    assert_eq!(place.names(&format!("{out}/hf")), place.names("one/hf"));
    for command in ["eval RUN", "generate RUN --prompt the --max-tokens 4", "export RUN --out again-RUN"] {
        place.run(&command.replace("RUN", out)).succeeds();
    }
    assert_same_file(
        &place.path(&format!("{out}/hf/model.safetensors")),
        &place.path(&format!("again-{out}/model.safetensors")),
    );
}

/// Asserts that all ranks end, and leave no folder, if rank 1 has another value of this key.
fn assert_ends_all(place: &Place, options: &str, with_another: &str, key: &str) {
    let train = |options: &str| format!("train run.toml --out out {options}");
    for ran in as_ranks(place, &[train(options), train(with_another)]) {
        ran.refuses(&["rank 1 (", key]);
    }
    assert!(!place.exists("out"));
}

/// Asserts that training with these options is refused with a line that has all `words`, and no folder.
fn assert_refused(place: &Place, options: &str, words: &[&str]) {
    place.run(&format!("train run.toml --out refused {options}")).refuses(words);
    assert!(!place.exists("refused"), "{options} leaves a folder");
}
