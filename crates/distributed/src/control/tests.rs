//! Ranks as threads of this process, and strangers at the port of rank 0.

use super::message::{Call, check_size};
use super::*;
use crate::channel::Channel;
use crate::net::authenticate::Caller;
use crate::net::dial::dial;
use crate::net::frame::{Outgoing, Packet};
use crate::testing::{LONG, fault, on_ranks, on_threads, options, secret, secret_file, until, worlds};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, mpsc};
use std::time::Instant;

/// A deadline that passes.
const SOON: Duration = Duration::from_millis(1500);

fn start(world: &World) -> Result<Control, CommError> {
    Control::start(world, &secret(), options())
}

fn start_soon(world: &World) -> Result<Control, CommError> {
    Control::start(world, &secret(), StartOptions { deadline: SOON, ..options() })
}

/// A process that knows the secret and introduces itself as `rank`, but is no rank.
fn impostor(world: &World, rank: u32) -> TcpStream {
    impostor_with(world, rank, None)
}

/// As [`impostor`]; one that then sends `message`.
fn impostor_with(world: &World, rank: u32, message: Option<&[u8]>) -> TcpStream {
    let (at, key) =
        (format!("127.0.0.1:{}", world.port).parse().expect("an address"), secret().key().expect("a key"));
    let socket = loop {
        match dial(&[at], &key, Caller { purpose: 0, rank }, LONG) {
            Ok(socket) => break socket,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    let hello =
        Message::Hello { world_size: world.rank.world_size as u32, process: 1, host: "elsewhere".into() };
    let mut outgoing = Outgoing::default();
    outgoing.push(hello.encode());
    message.into_iter().for_each(|bytes| outgoing.push(Packet::new(bytes.to_vec())));
    // Rank 0 may have closed it already.
    let _ = outgoing.send(&socket);
    socket
}

#[test]
fn calls_carry_bytes_between_one_to_five_ranks() {
    for n in 1..=5 {
        let results = on_ranks(n, |control| {
            let rank = control.world().rank.index;
            let own = vec![rank as u8; rank * 3];
            let gathered = control.gather(&own).expect("a gather");
            control.barrier().expect("a barrier");
            let broadcast =
                control.broadcast(if rank == 0 { b"decision" } else { b"" }).expect("a broadcast");
            assert_eq!(control.hosts(), vec![host_name(); n]);
            control.finish().expect("an orderly end");
            (gathered, broadcast)
        });
        for (rank, (gathered, broadcast)) in results.into_iter().enumerate() {
            let all: Vec<_> = (0..n).map(|r| vec![r as u8; r * 3]).collect();
            assert_eq!(gathered, if rank == 0 { all } else { vec![] });
            assert_eq!(broadcast, b"decision");
        }
    }
}

#[test]
fn calls_on_two_channels_do_not_wait_for_each_other() {
    let results = on_ranks(3, |control| {
        let (rank, channel) = (control.world().rank.index, control.channel());
        let aside = || channel.gather(&[rank as u8]).expect("a gather");
        // Rank 1 makes its calls in another order than the others.
        let early = (rank == 1).then(aside);
        let gathered = control.gather(&[rank as u8 + 10]).expect("a gather");
        control.barrier().expect("a barrier");
        let late = early.unwrap_or_else(aside);
        let received = channel.broadcast(&[7]).expect("a broadcast");
        control.finish().expect("an orderly end");
        (gathered, late, received)
    });
    assert_eq!(results[0], (vec![vec![10], vec![11], vec![12]], vec![vec![0], vec![1], vec![2]], vec![7]));
    assert_eq!(results[2], (vec![], vec![], vec![7]));
}

#[test]
fn large_messages_arrive_whole() {
    let bytes: Vec<u8> = (0..20_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
    let equal = on_ranks(3, |control| {
        let is_equal = control.broadcast(&bytes).expect("a broadcast") == bytes;
        let gathered = control.gather(&bytes).expect("a gather");
        control.finish().expect("an orderly end");
        is_equal && gathered.iter().all(|other| *other == bytes)
    });
    assert_eq!(equal, [true; 3]);
}

#[test]
fn ranks_wait_for_rank_0_and_report_that_they_wait() {
    let worlds = worlds(2);
    let (to, reports) = mpsc::channel();
    let (to, reports) = (Mutex::new(to), Mutex::new(reports));
    let first = Mutex::new(String::new());
    let results = on_threads(&worlds, |world| {
        let to = to.lock().expect("no panic").clone();
        // Later reports have no reader.
        let report = Arc::new(move |line: &str| drop(to.send(line.to_owned())));
        let report_every = Duration::from_millis(100);
        if world.rank.index == 0 {
            let line = reports.lock().expect("no panic").recv().expect("a report");
            *first.lock().expect("no panic") = line;
        }
        let options = StartOptions { report, report_every, ..options() };
        Control::start(world, &secret(), options).and_then(|control| control.finish())
    });
    assert_eq!(results, [Ok(()), Ok(())]);
    let line = first.into_inner().expect("no panic");
    let start = format!("rank 1 waits for rank 0 at 127.0.0.1:{} (", worlds[0].port);
    assert!(line.starts_with(&start) && line.contains(" of 30 s): "), "{line}");
}

#[test]
fn a_rank_that_never_comes_is_named_on_all_ranks() {
    let worlds = worlds(4);
    let results = on_threads(&worlds[..3], |world| {
        if world.rank.index == 0 { start_soon(world).map(drop) } else { start(world).map(drop) }
    });
    for result in results {
        let line = fault(result);
        assert!(line.starts_with("rank 0 (") && line.contains("rank 3 did not come within 1.5 s"), "{line}");
    }
}

#[test]
fn without_rank_0_the_others_say_where_they_looked() {
    let worlds = worlds(2);
    let error = start_soon(&worlds[1]).expect_err("no rank 0").to_string();
    let expected = format!("rank 1 did not reach rank 0 at 127.0.0.1:{} within 1.5 s", worlds[1].port);
    assert!(error.starts_with(&expected), "{error}");
}

#[test]
fn a_rank_0_that_says_nothing_and_one_that_is_not_known_are_told_apart() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut world = worlds(2).remove(1);
    world.port = silent.local_addr().expect("an address").port();
    let answer = Duration::from_millis(300);
    let options = StartOptions { deadline: SOON, answer, ..options() };
    let error = Control::start(&world, &secret(), options.clone()).expect_err("no rank 0").to_string();
    assert!(error.contains("sent nothing for 0.3 s: another program may listen there"), "{error}");
    // Its name is looked up before the file of its secret, which cannot be there.
    world.address = "no-such-host.invalid".into();
    let file = secret_file("/nonexistent/run.secret".as_ref());
    let error = Control::start(&world, &file, options).expect_err("no rank 0").to_string();
    assert!(error.contains("no-such-host.invalid, is not known") && error.contains("MASTER_ADDR"), "{error}");
}

#[test]
fn a_port_in_use_is_one_line_at_once() {
    let world = &worlds(2)[0];
    let _taken = TcpListener::bind(("127.0.0.1", world.port)).expect("a free port");
    let error = start(world).expect_err("a taken port");
    assert!(matches!(&error, CommError::Start(line) if line.contains("XTRAIN_PORT")), "{error}");
}

#[test]
fn a_rank_with_another_secret_does_not_come_in() {
    let other = Secret::value("another secret of 16 bytes or more").expect("a long secret");
    let results = on_threads(&worlds(2), |world| {
        let secret = if world.rank.index == 0 { secret() } else { other.clone() };
        Control::start(world, &secret, StartOptions { deadline: SOON, ..options() }).map(drop)
    });
    assert!(fault(results[0].clone()).contains("rank 1 did not come"));
    assert!(matches!(&results[1], Err(CommError::Start(line)) if line.contains("rank 0")), "{results:?}");
}

#[test]
fn a_file_of_an_earlier_run_is_read_again_until_it_is_right() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.secret");
    let secret = secret_file(&path);
    secret.create().expect("the secret of an earlier run");
    let results = on_threads(&worlds(3), |world| {
        if world.rank.index == 0 {
            thread::sleep(Duration::from_millis(300));
        }
        Control::start(world, &secret, options()).and_then(|control| control.finish())
    });
    assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
    assert!(!path.exists(), "the secret stays after the start");
}

#[test]
fn a_second_rank_0_leaves_the_secret_of_the_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = secret_file(&folder.path().join("run.secret"));
    let worlds = worlds(2);
    let results = on_threads(&worlds, |world| {
        if world.rank.index == 1 {
            until(|| secret.key().is_ok());
            let second = Control::start(&worlds[0], &secret, options()).map(drop);
            assert!(matches!(&second, Err(CommError::Start(line)) if line.contains("in use")), "{second:?}");
        }
        Control::start(world, &secret, options()).and_then(|control| control.finish())
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn two_processes_of_one_rank_end_the_start() {
    let mut worlds = worlds(3);
    worlds[2].rank.index = 1;
    let lines = on_threads(&worlds, |world| fault(start(world)));
    assert!(
        lines.iter().all(|line| line.contains("two processes are rank 1") && *line == lines[0]),
        "{lines:?}"
    );
}

#[test]
fn a_rank_with_another_world_size_is_named() {
    let mut worlds = worlds(3);
    worlds[2].rank.world_size = 4;
    let lines = on_threads(&worlds, |world| fault(start(world)));
    let is_right =
        |line: &String| line.starts_with("rank 2 (") && line.contains("size is 4, but rank 0 has 3");
    assert!(lines.iter().all(is_right), "{lines:?}");
}

#[test]
fn a_rank_beyond_the_world_ends_the_start() {
    let mut worlds = worlds(2);
    worlds[1].rank.index = 7;
    let lines = on_threads(&worlds, |world| fault(start(world)));
    assert!(lines.iter().all(|line| line.contains("says that it is rank 7")), "{lines:?}");
}

#[test]
fn a_difference_ends_all_ranks_with_the_same_line() {
    let lines = on_ranks(4, |control| {
        let config = if control.world().rank.index == 2 { "0xdef" } else { "0xabc" };
        let values = [("version", "1"), ("config", config)].map(|(k, v)| (k.to_owned(), v.to_owned()));
        fault(control.handshake(&values))
    });
    let host = host_name();
    let expected = format!("rank 2 ({host}): its config differs: `0xdef` here, `0xabc` on rank 0 ({host})");
    assert_eq!(lines, vec![expected; 4]);
}

#[test]
fn equal_ranks_shake_hands() {
    let results = on_ranks(3, |control| {
        control.handshake(&[("version".into(), "1".into())])?;
        control.finish()
    });
    assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn the_first_cause_reaches_all_ranks() {
    for culprit in [0, 2] {
        let lines = on_ranks(4, |control| {
            if control.world().rank.index == culprit {
                return control.abort(Cause::Failure, "disk full\nat /data").to_string();
            }
            let fault = control.wait_for_fault(LONG).expect("a fault");
            // A later fault does not replace it.
            assert_eq!(control.abort(Cause::Failure, "I am lost"), fault);
            assert_eq!(control.barrier(), Err(CommError::Aborted(fault.clone())));
            fault.to_string()
        });
        assert_eq!(lines, vec![format!("rank {culprit} ({}): disk full at /data", host_name()); 4]);
    }
}

#[test]
fn a_rank_that_leaves_ends_the_calls_of_the_others_within_a_second() {
    for culprit in [0, 1] {
        let left = Mutex::new(None);
        let times = on_threads(&worlds(3), |world| {
            let control = start(world);
            if world.rank.index == culprit {
                left.lock().expect("no panic").replace(Instant::now());
                return Duration::ZERO;
            }
            let line = fault(control.and_then(|control| control.barrier()));
            assert!(
                line.starts_with(&format!("rank {culprit} (")) && line.contains("left the run"),
                "{line}"
            );
            left.lock().expect("no panic").expect("it has left").elapsed()
        });
        // A second, and what a loaded machine adds.
        assert!(times.iter().all(|time| *time < Duration::from_secs(6)), "{times:?}");
    }
}

#[test]
fn a_panic_is_the_cause_that_the_others_learn() {
    let result = std::panic::catch_unwind(|| {
        on_ranks(2, |control| {
            if control.world().rank.index == 1 {
                panic!("of this test");
            }
            assert!(fault(control.barrier()).ends_with("it panicked"));
        })
    });
    assert!(result.is_err());
}

#[test]
fn a_fault_reaches_a_rank_that_computes() {
    let seen = on_ranks(2, |control| {
        let (to, from) = mpsc::channel();
        if control.world().rank.index == 1 {
            control.abort(Cause::Failure, "out of memory");
            return true;
        }
        control.watch(move |fault| to.send(fault).expect("a reader")).expect("a thread");
        let fault = from.recv_timeout(LONG).expect("a fault");
        fault.rank == 1 && fault.message == "out of memory"
    });
    assert_eq!(seen, [true, true]);
}

#[test]
fn all_ranks_know_that_the_user_can_correct_a_fault() {
    let seen = on_ranks(3, |control| {
        let fault = match control.world().rank.index {
            2 => control.abort(Cause::User, "disk full"),
            _ => control.wait_for_fault(LONG).expect("a fault"),
        };
        (fault.rank, fault.is_users())
    });
    assert_eq!(seen, [(2, true); 3]);
}

#[test]
fn an_orderly_end_is_no_fault_however_late_the_last_rank() {
    let results = on_ranks(4, |control| {
        let (to, from) = mpsc::channel::<Fault>();
        control.watch(move |fault| to.send(fault).expect("a reader")).expect("a thread");
        thread::sleep(Duration::from_millis(150 * control.world().rank.index as u64));
        control.finish()?;
        // The watch ends without a call: its end of the channel closes.
        assert!(from.recv_timeout(LONG) == Err(mpsc::RecvTimeoutError::Disconnected));
        Ok::<(), CommError>(())
    });
    assert_eq!(results, vec![Ok(()); 4]);
}

#[test]
fn a_silent_rank_is_lost() {
    let worlds = worlds(2);
    let times = StartOptions {
        heartbeat: Duration::from_millis(50),
        silence: Duration::from_millis(600),
        ..options()
    };
    thread::scope(|scope| {
        let silent = scope.spawn(|| impostor(&worlds[0], 1));
        let control = Control::start(&worlds[0], &secret(), times).expect("a run");
        let _socket = silent.join().expect("a socket");
        let line = fault(control.gather(&[]));
        assert_eq!(line, "rank 1 (elsewhere): nothing came from it for 0.6 s");
    });
}

#[test]
fn a_rank_that_sends_garbage_is_lost() {
    for (message, line) in [(Some(&[99][..]), "malformed message"), (None, "a checksum does not match")] {
        let worlds = worlds(2);
        thread::scope(|scope| {
            let rank = scope.spawn(|| impostor_with(&worlds[0], 1, message));
            let control = start(&worlds[0]);
            let mut socket = rank.join().expect("a socket");
            // Rank 0 may have closed it already.
            let _ = socket.write_all(&[99; 30]);
            assert!(fault(control.and_then(|control| control.gather(&[]))).contains(line));
        });
    }
}

#[test]
fn different_calls_are_a_mismatch() {
    let results = on_ranks(2, |control| match control.world().rank.index {
        0 => {
            control.broadcast(b"x").expect("it is sent");
            let result = control.gather(&[]).map(drop);
            control.abort(Cause::Failure, "mismatch");
            result
        }
        _ => {
            control.gather(&[]).expect("it is sent");
            let _ = control.wait_for_fault(LONG);
            Ok(())
        }
    });
    let Err(CommError::Mismatch(line)) = &results[0] else { panic!("{results:?}") };
    assert_eq!(
        line,
        "gather, number 1 of channel 0 of the control connection, but rank 1 called gather, number 0"
    );
}

#[test]
fn messages_that_are_too_large_are_refused_before_they_are_sent() {
    assert!(check_size(Call::Broadcast, 256 << 20).is_err());
    assert!(check_size(Call::Gather, 255 << 20).is_ok());
}

#[test]
fn strangers_do_not_disturb_the_start() {
    let worlds = worlds(2);
    let at = ("127.0.0.1", worlds[0].port);
    thread::scope(|scope| {
        let root = scope.spawn(|| start(&worlds[0]));
        until(|| TcpStream::connect(at).is_ok());
        let idle: Vec<_> = (0..1000).filter_map(|_| TcpStream::connect(at).ok()).collect();
        let mut garbage = TcpStream::connect(at).expect("a listener");
        garbage.write_all(&[0xff; 100_000]).expect("an open socket");
        let mut web = TcpStream::connect(at).expect("a listener");
        web.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("an open socket");
        web.set_read_timeout(Some(LONG)).expect("a socket");
        let answer = web.read(&mut [0; 16]).unwrap_or(0);
        assert_eq!(answer, 0, "a stranger gets no byte");
        let rank = start(&worlds[1]).expect("a run");
        let root = root.join().expect("no panic").expect("a run");
        assert!(TcpStream::connect(at).is_err(), "the port is open after the start");
        drop(idle);
        thread::scope(|scope| {
            scope.spawn(|| rank.finish().expect("an orderly end"));
            root.finish().expect("an orderly end");
        });
    });
}
