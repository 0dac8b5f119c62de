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

use crate::place::{Place, Ran};
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
