//! Process groups of threads, each with real connections.

use super::*;
use crate::folder::RunFolder;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use xtrain_data::DataError;
use xtrain_distributed::{Launcher, World};
use xtrain_rank::Rank;

/// Runs `rank` on each of `n` ranks, two of them on each node. Returns the results in their order.
pub(crate) fn on_ranks<T: Send>(n: usize, rank: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    let join = |_: usize, joined: Result<ProcessGroup, RunError>| rank(&joined.expect("it joins"));
    joined(&vec!["one build"; n], join)
}

/// Runs `rank` on ranks of these builds, with the result of joining.
fn joined<T: Send>(
    builds: &[&str],
    rank: impl Fn(usize, Result<ProcessGroup, RunError>) -> T + Sync,
) -> Vec<T> {
    let n = builds.len();
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.expect("a port").port();
    let join = |number: usize| {
        let world = World {
            rank: Rank { index: number, world_size: n },
            local_rank: Rank { index: number % 2, world_size: 2.min(n) },
            address: "127.0.0.1".into(),
            port,
        };
        let environment = Environment { launcher: Launcher::Torchrun, world };
        let secret = Secret::value("0123456789abcdef").expect("a secret");
        let (start, limit) = (StartOptions::default(), Duration::from_secs(30));
        ProcessGroup::join(environment, &secret, start, builds[number], limit, |_| ())
    };
    let (join, rank) = (&join, &rank);
    thread::scope(|scope| {
        let run = |number| scope.spawn(move || rank(number, join(number)));
        let ranks: Vec<_> = (0..n).map(run).collect();
        ranks.into_iter().map(|ended| ended.join().expect("a rank")).collect()
    })
}

#[test]
fn two_builds_do_not_train_together() {
    let ended = joined(&["0.1.0 (sources a)", "0.1.0 (sources a)", "0.1.0 (sources b)"], |_, joined| {
        let error = joined.expect_err("another build");
        (error.to_string(), error.is_users())
    });
    for (line, is_users) in ended {
        assert!(is_users && line.starts_with("rank 2 ("), "{line}");
        assert!(line.contains("build of xtrain differs: `0.1.0 (sources b)` here"), "{line}");
    }
}

#[test]
fn rank_0_decides_for_all() {
    let decided = on_ranks(3, |process_group| {
        let rank = process_group.rank().index;
        let first = process_group.decide(|| Ok(format!("of rank {rank}"))).expect("a decision");
        let second =
            process_group.after_first(|message: Option<usize>| Ok(message.unwrap_or(40) + 2), |first| *first);
        process_group.finish().expect("an orderly end");
        (first, second.expect("work"))
    });
    assert_eq!(decided.iter().map(|(text, _)| text.as_str()).collect::<Vec<_>>(), ["of rank 0"; 3]);
    assert_eq!(decided.iter().map(|(_, made)| *made).collect::<Vec<_>>(), [42, 44, 44]);
}

#[test]
fn one_rank_of_each_node_works_before_the_others() {
    let first = AtomicUsize::new(0);
    let seen = on_ranks(4, |process_group| {
        let is_second = process_group.rank().index % 2 == 1;
        let work = || {
            if !is_second {
                first.fetch_add(1, Ordering::SeqCst);
            }
            Ok(first.load(Ordering::SeqCst))
        };
        let seen = process_group.after_first_of_node(work, |_| false).expect("work").expect("it was not cut");
        process_group.finish().expect("an orderly end");
        is_second.then_some(seen)
    });
    assert_eq!(seen.into_iter().flatten().collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn work_that_is_cut_on_one_rank_is_cut_on_all() {
    // Rank 2 is the first of its node, rank 3 the second.
    for cut in [2, 3] {
        let ended = on_ranks(4, |process_group| {
            let work = || match process_group.rank().index == cut {
                true => Err(DataError::Interrupted.into()),
                false => Ok(()),
            };
            let is_cut = |error: &RunError| matches!(error, RunError::Data(DataError::Interrupted));
            let done = process_group.after_first_of_node(work, is_cut).expect("no failure");
            process_group.finish().expect("an orderly end");
            done
        });
        assert_eq!(ended, [None; 4], "{cut}");
    }
}

#[test]
fn messages_and_stop_requests_reach_all() {
    let seen = on_ranks(3, |process_group| {
        let rank = process_group.rank().index as u64;
        let messages = process_group.gather(&[rank, 10 * rank]).expect("messages");
        let requests = [rank == 2, false].map(|request| process_group.any(request).expect("a request"));
        process_group.barrier().expect("all");
        process_group.finish().expect("an orderly end");
        (messages, requests)
    });
    assert_eq!(seen, vec![(vec![vec![0, 0], vec![1, 10], vec![2, 20]], [true, false]); 3]);
}

#[test]
fn the_error_of_a_rank_is_that_of_all() {
    let said = on_ranks(3, |process_group| {
        let is_cause = process_group.rank().index == 1;
        let error = match is_cause {
            true => RunError::Refused("the disk is full".into()),
            false => process_group.barrier().expect_err("a rank has failed"),
        };
        assert_eq!(fault_of(&error).is_none(), is_cause);
        let error = process_group.fail(error);
        (error.to_string(), error.is_users())
    });
    assert_eq!(said[1], ("the disk is full".into(), true));
    for (text, is_users) in [&said[0], &said[2]] {
        assert!(text.starts_with("rank 1 (") && text.ends_with("): the disk is full") && *is_users, "{text}");
    }
}

#[test]
fn folders_that_are_not_one_are_refused() {
    let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().expect("a folder")).collect();
    let shares = |folder: &(dyn Fn(usize) -> usize + Sync)| {
        on_ranks(2, |process_group| {
            let folder = RunFolder::new(folders[folder(process_group.rank().index)].path());
            let checked =
                process_group.check_shared(&folder).map_err(|error| process_group.fail(error).to_string());
            if checked.is_ok() {
                process_group.finish().expect("an orderly end");
            }
            checked
        })
    };
    assert_eq!(shares(&|_| 0), [Ok(()), Ok(())]);
    for refused in shares(&|rank| rank) {
        let text = refused.expect_err("two folders");
        assert!(text.contains("is not the run folder of rank 0"), "{text}");
    }
    for folder in &folders {
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}

#[test]
fn a_process_alone_does_what_it_is_told() {
    let process_group = ProcessGroup::alone();
    assert_eq!(process_group.rank(), Rank::ALONE);
    assert_eq!(process_group.decide(|| Ok(5)).expect("a decision"), 5);
    assert_eq!(process_group.gather(&[1, 2]).expect("messages"), [[1, 2]]);
    assert!(process_group.any(true).expect("a request") && !process_group.any(false).expect("a request"));
    assert_eq!(process_group.after_first_of_node(|| Ok(7), |_| false).expect("work"), Some(7));
}
