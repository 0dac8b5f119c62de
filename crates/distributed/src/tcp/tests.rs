//! Collectives between threads over real sockets, compared with a plain loop.

use super::*;
use crate::net::address::host_name;
use crate::testing::{LONG, check, fault, on_ranks};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// Runs `rank` on all ranks of a run with a communicator, which ends in order.
fn on_communicators<T: Send>(
    n: usize,
    timeout: Duration,
    rank: impl Fn(&TcpCommunicator) -> T + Sync,
) -> Vec<T> {
    on_ranks(n, |control| {
        let control = Arc::new(control);
        let communicator = TcpCommunicator::connect(&control, timeout).expect("connections");
        let result = rank(&communicator);
        if control.fault().is_none() {
            // It fails if another rank has met an error.
            let _ = control.finish();
        }
        result
    })
}

fn run(
    communicator: &TcpCommunicator,
    kind: CallKind,
    first: usize,
    input: &[u8],
) -> Result<Vec<u8>, CommError> {
    let n = communicator.world_size();
    let mut output = vec![0; if kind == CallKind::AllGather { n * input.len() } else { input.len() }];
    match kind {
        CallKind::AllGather => communicator.all_gather(communicator.world(), first, input, &mut output)?,
        _ => communicator.all_to_all(communicator.world(), first, input, &mut output)?,
    }
    Ok(output)
}

const BOTH: [CallKind; 2] = [CallKind::AllGather, CallKind::AllToAll];

/// The groups of which there are some among `n` ranks: all ranks, each alone, and halves of both kinds.
fn groups_of(n: usize) -> Vec<Groups> {
    let of = |size| [Groups { size, stride: 1 }, Groups { size, stride: n / size }];
    (1..=n).filter(|size| n.is_multiple_of(*size)).flat_map(of).collect()
}

#[test]
fn collectives_equal_a_plain_loop_for_all_sizes_and_groups() {
    for n in 1..=6 {
        on_communicators(n, LONG, |communicator| {
            for is_gather in [true, false] {
                for bytes in [0, 1, 3, 32, 1001, 70_000] {
                    for groups in groups_of(n) {
                        for first in [0, 1, groups.size - 1, groups.size + 3] {
                            check(communicator, groups, is_gather, first, bytes).expect("a collective");
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn a_group_does_not_wait_for_another() {
    let pairs = Groups { size: 2, stride: 1 };
    // Rank 3 begins when both ranks of the other pair are done, and rank 2 waits for it.
    let (done, is_done) = mpsc::channel();
    let is_done = Mutex::new(is_done);
    let has_begun = AtomicBool::new(false);
    on_communicators(4, LONG, |communicator| {
        let rank = communicator.rank();
        if rank == 3 {
            let is_done = is_done.lock().expect("no panic");
            (0..2).for_each(|_| is_done.recv_timeout(LONG).expect("a pair that waits for no other"));
            has_begun.store(true, Ordering::SeqCst);
        }
        check(communicator, pairs, false, 1, 100).expect("a collective");
        match rank {
            0 | 1 => done.send(()).expect("rank 3"),
            _ => assert!(has_begun.load(Ordering::SeqCst), "rank {rank} did not wait for rank 3"),
        }
        check(communicator, communicator.world(), false, 1, 100).expect("a collective");
    });
}

#[test]
fn sizes_beyond_all_buffers_do_not_deadlock() {
    let sums = on_communicators(3, LONG, |communicator| {
        let own = vec![communicator.rank() as u8; 3 * 20_000_000];
        let output = run(communicator, CallKind::AllToAll, 1, &own).expect("a collective");
        output.len()
    });
    assert_eq!(sums, [60_000_000; 3]);
}

/// The next and the previous rank of all.
fn neighbours(communicator: &TcpCommunicator) -> [usize; 2] {
    let (n, rank) = (communicator.world_size(), communicator.rank());
    [(rank + 1) % n, (rank + n - 1) % n]
}

#[test]
fn messages_arrive_in_order_between_collectives() {
    on_communicators(3, LONG, |communicator| {
        let (world, [next, previous]) = (communicator.world(), neighbours(communicator));
        for round in 0..20u8 {
            // All send before one receives, and a message may be empty.
            let bytes = [0, 1, 1001, 70_000][usize::from(round) % 4];
            for n in 0..3 {
                communicator.send(world, next, &vec![round + n; bytes]).expect("a message");
            }
            communicator.send(world, previous, &[round]).expect("a message");
            for n in 0..3 {
                let mut message = vec![0; bytes];
                communicator.receive(world, previous, &mut message).expect("a message");
                assert!(message.iter().all(|&byte| byte == round + n));
            }
            communicator.receive(world, next, &mut [0]).expect("a message");
            check(communicator, world, true, 0, 100).expect("a collective");
        }
        assert_eq!(communicator.sent_bytes(), 20 * 201 + 5 * 3 * (1 + 1001 + 70_000));
    });
}

#[test]
fn messages_beyond_all_buffers_do_not_wait_for_the_receiver() {
    let (received, is_received) = mpsc::channel();
    let is_received = Mutex::new(is_received);
    on_communicators(2, LONG, |communicator| {
        let (world, other) = (communicator.world(), 1 - communicator.rank());
        let message = vec![communicator.rank() as u8; 40_000_000];
        communicator.send(world, other, &message).expect("a message");
        communicator.send(world, other, &message).expect("a message");
        let mut from_other = message.clone();
        // Rank 0 makes no call until rank 1 has all that it sent.
        if communicator.rank() == 0 {
            is_received.lock().expect("no panic").recv_timeout(LONG).expect("both messages");
        }
        for _ in 0..2 {
            communicator.receive(world, other, &mut from_other).expect("a message");
            assert!(from_other.iter().all(|&byte| usize::from(byte) == other));
        }
        received.send(()).expect("rank 0");
    });
}

#[test]
fn a_message_of_another_length_is_a_mismatch() {
    let results = on_communicators(2, LONG, |communicator| {
        let world = communicator.world();
        if communicator.rank() == 0 {
            communicator.send(world, 1, &[1, 2]).expect("a message");
            return communicator.control.wait_for_fault(LONG).expect("the abort of rank 1").message;
        }
        let error = communicator.receive(world, 0, &mut [0; 3]).expect_err("another length");
        communicator.control.abort(Cause::Failure, &error.to_string());
        error.to_string()
    });
    let call = "receive number 0 (2 ranks at a distance of 1, first 0,";
    let line = format!(
        "the ranks called different collectives: rank 1 {call} 3 bytes a rank), rank 0 {call} 2 bytes a rank)"
    );
    assert_eq!(results, [line.clone(), line]);
}

#[test]
fn a_rank_that_leaves_ends_the_wait_for_its_message() {
    let lines = on_ranks(2, |control| {
        let control = Arc::new(control);
        let communicator = TcpCommunicator::connect(&control, LONG).expect("connections");
        match control.world().rank.index {
            0 => String::new(),
            _ => fault(communicator.receive(communicator.world(), 0, &mut [0; 8])),
        }
    });
    assert_eq!(lines[1], format!("rank 0 ({}): it left the run before its end", host_name()));
}

#[test]
fn sent_bytes_are_counted() {
    let counts = on_communicators(3, LONG, |communicator| {
        run(communicator, CallKind::AllGather, 0, &[0; 10]).expect("a collective");
        run(communicator, CallKind::AllToAll, 0, &[0; 12]).expect("a collective");
        let alone = Groups { size: 1, stride: 1 };
        communicator.all_to_all(alone, 0, &[0; 9], &mut [0; 9]).expect("a collective");
        communicator.sent_bytes()
    });
    // 10 to each of two ranks, then a piece of 4 to each.
    assert_eq!(counts, [28; 3]);
}

#[test]
fn a_slow_rank_is_waited_for() {
    let results = on_communicators(3, LONG, |communicator| {
        if communicator.rank() == 1 {
            thread::sleep(Duration::from_millis(400));
        }
        run(communicator, CallKind::AllGather, 0, &[communicator.rank() as u8])
    });
    assert_eq!(results, vec![Ok(vec![0, 1, 2]); 3]);
}

#[test]
fn a_rank_that_does_not_come_is_named_after_the_timeout() {
    let timeout = Duration::from_millis(700);
    let results = on_communicators(2, timeout, |communicator| {
        run(communicator, CallKind::AllGather, 0, &[1]).expect("a collective");
        if communicator.rank() == 0 {
            let error = run(communicator, CallKind::AllToAll, 0, &[1, 2]).expect_err("a timeout");
            let again = run(communicator, CallKind::AllToAll, 0, &[1, 2]);
            assert_eq!(again, Err(error.clone()));
            communicator.control.abort(Cause::Failure, &error.to_string());
            return error.to_string();
        }
        communicator.control.wait_for_fault(LONG).expect("the abort of rank 0").message
    });
    let line = "all_to_all number 1 waits for rank 1, from which nothing came for 0.7 s; see the output of that rank, or raise parallel.timeout";
    assert_eq!(results, [line, line]);
}

#[test]
fn different_calls_are_a_mismatch_on_each_rank_that_sees_them() {
    type Change = fn(&TcpCommunicator) -> Result<Vec<u8>, CommError>;
    let changes: [Change; 3] = [
        |c| run(c, CallKind::AllToAll, 0, &[0; 3]),
        |c| run(c, CallKind::AllGather, 1, &[0; 3]),
        |c| run(c, CallKind::AllGather, 0, &[0; 4]),
    ];
    for change in changes {
        let results = on_communicators(3, LONG, |communicator| {
            run(communicator, CallKind::AllGather, 0, &[5; 3]).expect("a collective");
            let result = match communicator.rank() {
                1 => change(communicator),
                _ => run(communicator, CallKind::AllGather, 0, &[0; 3]),
            };
            if let Err(error) = &result {
                communicator.control.abort(Cause::Failure, &error.to_string());
            }
            result
        });
        let is_seen = |result: &Result<Vec<u8>, CommError>| match result {
            Err(CommError::Mismatch(line)) => line.contains("number 1"),
            Err(CommError::Aborted(fault)) => fault.message.contains("different collectives"),
            _ => false,
        };
        assert!(results.iter().all(is_seen), "{results:?}");
        assert!(results.iter().any(|r| matches!(r, Err(CommError::Mismatch(_)))), "{results:?}");
    }
}

#[test]
fn a_rank_that_leaves_ends_each_collective_of_the_others() {
    for collective in BOTH {
        for culprit in [0, 2] {
            // A rank has its bytes of a collective when others may still wait for theirs.
            let together = Barrier::new(3);
            let lines = on_ranks(3, |control| {
                let control = Arc::new(control);
                let communicator = TcpCommunicator::connect(&control, LONG).expect("connections");
                run(&communicator, collective, 0, &[0; 6]).expect("a collective");
                together.wait();
                if control.world().rank.index == culprit {
                    return String::new();
                }
                let since = Instant::now();
                let line = fault(run(&communicator, collective, 0, &[0; 600_000]));
                assert!(since.elapsed() < LONG / 2);
                line
            });
            let expected = format!("rank {culprit} ({}): it left the run before its end", host_name());
            let lines: Vec<_> = lines.into_iter().filter(|line| !line.is_empty()).collect();
            assert_eq!(lines, [expected.clone(), expected]);
        }
    }
}

#[test]
fn an_abort_wakes_a_blocked_collective_within_a_second() {
    let aborted = Mutex::new(None);
    let times = on_communicators(3, LONG, |communicator| {
        if communicator.rank() == 2 {
            thread::sleep(Duration::from_millis(300));
            aborted.lock().expect("no panic").replace(Instant::now());
            communicator.control.abort(Cause::Failure, "disk full");
            return Duration::ZERO;
        }
        let blocked = run(communicator, CallKind::AllGather, 0, &[0; 4_000_000]);
        assert_eq!(fault(blocked), format!("rank 2 ({}): disk full", host_name()));
        aborted.lock().expect("no panic").expect("it has aborted").elapsed()
    });
    // A second, and what a loaded machine adds.
    assert!(times.iter().all(|time| *time < Duration::from_secs(6)), "{times:?}");
}

#[test]
fn a_shorter_time_holds_for_later_collectives() {
    let results = on_communicators(2, LONG, |communicator| {
        run(communicator, CallKind::AllGather, 0, &[1]).expect("a collective");
        communicator.set_timeout(Duration::from_millis(300));
        match communicator.rank() {
            0 => run(communicator, CallKind::AllGather, 0, &[1]).map(drop),
            _ => {
                // It comes late.
                thread::sleep(Duration::from_millis(900));
                Ok(())
            }
        }
    });
    let waited = Duration::from_millis(300);
    let expected = CommError::Timeout { call: "all_gather", number: 1, rank: 1, waited };
    assert_eq!(results, [Err(expected), Ok(())]);
}

#[test]
fn several_communicators_do_not_mix() {
    let results = on_ranks(3, |control| {
        let control = Arc::new(control);
        let [a, b] = [(); 2].map(|()| TcpCommunicator::connect(&control, LONG).expect("connections"));
        let rank = control.world().rank.index as u8;
        let first = run(&b, CallKind::AllGather, 0, &[rank + 10]).expect("a collective");
        let second = run(&a, CallKind::AllGather, 0, &[rank]).expect("a collective");
        control.finish().expect("an orderly end");
        [first, second].concat()
    });
    assert_eq!(results, vec![vec![10, 11, 12, 0, 1, 2]; 3]);
}
