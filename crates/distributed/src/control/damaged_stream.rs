//! Tests: a run whose control connection passes through a proxy that flips a bit.

use super::*;
use crate::channel::Channel;
use crate::testing::{LONG, secret, worlds};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::time::Instant;

/// Bytes that pass while a rank authenticates itself, in the direction that sends more.
const AUTHENTICATION: usize = 80;

/// Bytes that pass in each direction in any case.
const SURE: usize = 1200;

/// A bit to flip: the direction, the byte of the stream, and the bit.
#[derive(Clone, Copy, Debug)]
struct Flip {
    to_root: bool,
    at: usize,
    bit: u8,
}

/// Passes bytes on, and flips the bit when its byte comes. `passed` counts bytes over all connections.
fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<Flip>, passed: &AtomicUsize) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let first = passed.fetch_add(count, Ordering::SeqCst);
        if let Some(byte) = flip.and_then(|flip| flip.at.checked_sub(first)).filter(|byte| *byte < count) {
            bytes[byte] ^= flip.map_or(0, |flip| 1 << flip.bit);
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // The other end may have closed it.
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Starts a proxy of the port of rank 0, and returns its own port. It ends with the tests.
fn proxy(port: u16, flip: Flip) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        let passed: Arc<[AtomicUsize; 2]> = Arc::default();
        for caller in listener.incoming().map_while(Result::ok) {
            // Rank 0 may not listen yet; then its caller finds a closed connection.
            let Ok(root) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            for (to_root, from, to) in [(true, &caller, &root), (false, &root, &caller)] {
                let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                let (flip, passed) = (Some(flip).filter(|flip| flip.to_root == to_root), passed.clone());
                thread::spawn(move || pass(from, to, flip, &passed[usize::from(to_root)]));
            }
        }
    });
    own
}

/// Calls on two channels, whose results are checked, and the end.
fn work(world: &World) -> Result<(), CommError> {
    let heartbeat = Duration::from_millis(20);
    let options = StartOptions { heartbeat, silence: LONG / 10, deadline: LONG / 3, ..Default::default() };
    let control = Control::start(world, &secret(), options)?;
    let channel = control.channel();
    for round in 0..8u8 {
        let gathered = control.gather(&[round; 100])?;
        assert!(world.rank.index > 0 || gathered == [[round; 100]; 2], "{gathered:?}");
        let received = control.broadcast(&[round + 1; 200])?;
        assert_eq!(received, [round + 1; 200]);
        assert!(world.rank.index > 0 || channel.gather(&[round])? == [[round]; 2]);
        if world.rank.index > 0 {
            channel.gather(&[round])?;
        }
    }
    control.finish()
}

/// The ends of both ranks of a run in which a bit is flipped.
fn attacked(flip: Flip) -> Vec<Result<(), CommError>> {
    let mut worlds = worlds(2);
    worlds[1].port = proxy(worlds[0].port, flip);
    let (to, ended) = mpsc::channel();
    for world in worlds {
        let to = to.clone();
        thread::spawn(move || to.send(work(&world)).expect("a test that waits"));
    }
    let begun = Instant::now();
    let end = |_| ended.recv_timeout(LONG.saturating_sub(begun.elapsed())).expect("a rank that ends");
    (0..2).map(end).collect()
}

fn flips(bytes: Range<usize>) -> impl Strategy<Value = Flip> {
    (any::<bool>(), bytes, 0u8..8).prop_map(|(to_root, at, bit)| Flip { to_root, at, bit })
}

/// Cases of a test, `few` unless all are asked for.
fn cases(few: u32) -> ProptestConfig {
    let cases = if std::env::var_os("XTRAIN_TEST_ALL").is_some() { 15 * few } else { few };
    ProptestConfig { cases, max_shrink_iters: 0, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(25))]

    #[test]
    fn a_flipped_bit_ends_the_run_and_changes_no_result(flip in flips(AUTHENTICATION..SURE)) {
        let ends = attacked(flip);
        prop_assert!(ends.iter().all(Result::is_err), "{:?}", ends);
        let lines: Vec<String> = ends.into_iter().filter_map(Result::err).map(|e| e.to_string()).collect();
        prop_assert!(lines.iter().any(|line| line.contains("a checksum does not match")), "{lines:?}");
    }
}

proptest! {
    #![proptest_config(cases(6))]

    #[test]
    fn a_flipped_bit_of_the_authentication_changes_no_result(flip in flips(0..AUTHENTICATION)) {
        // A rank that is refused tries again, so the run may succeed. Its ranks check the results.
        attacked(flip);
    }
}
