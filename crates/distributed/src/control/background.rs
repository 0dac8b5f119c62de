//! The background thread of a control connection. It alone touches the sockets, so that heartbeats and the
//! end of a run need no one else: the other threads may compute or hang.

use super::StartOptions;
use super::link::{Link, LinkEvent};
use super::message::{Data, Message};
use super::shared::{ControlPhase, Shared};
use crate::error::{Cause, Fault};
use crate::limits;
use crate::net::authenticate::Caller;
use crate::net::gate::Gate;
use crate::net::poll::{self, Interest, Ready};
use crate::world::World;
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for sockets: the resolution of all timers here.
const TICK: Duration = Duration::from_millis(100);

/// Time for others to take the last messages.
const PARTING: Duration = Duration::from_secs(2);

pub(super) struct Background {
    pub(super) shared: Arc<Shared>,
    pub(super) wake: UnixStream,
    pub(super) world: World,
    pub(super) host: String,
    pub(super) options: StartOptions,
    /// On rank 0, the links with all ranks that have come; else the link with rank 0.
    pub(super) links: Vec<Link>,
    /// On rank 0, while ranks come in.
    pub(super) gate: Option<Gate>,
    pub(super) since: Instant,
    pub(super) reports: u32,
    pub(super) beaten: Instant,
    /// The time at which this thread last looked at the clock.
    pub(super) looked: Instant,
    /// The time since when this rank waits for the others to take its last messages.
    pub(super) parting: Option<Instant>,
}

impl Background {
    /// Runs until the end of the control connection.
    pub(super) fn run(mut self) {
        while !self.is_over() {
            for message in self.shared.lock().take_outbox() {
                self.links.iter_mut().for_each(|link| link.send(message.clone()));
            }
            match self.wait() {
                Ok((gate, links)) => self.advance(&gate, &links),
                Err(e) => {
                    self.fail(&format!("cannot wait for sockets: {e}"));
                    break;
                }
            }
            self.keep_time();
            if self.links.iter().all(Link::is_sent) {
                self.shared.note_sent();
            }
        }
    }

    /// True once this rank has taken leave. A rank whose connection is dropped sends what it has to send. At
    /// the orderly end, rank 0 waits until all have finished and until each, knowing that, has closed its
    /// connection: if rank 0 closed first, that message could be lost.
    fn is_over(&mut self) -> bool {
        let (closes, finishes, has_failed, has_outbox) = {
            let state = self.shared.lock();
            (state.closes, state.finishes, state.fault.is_some(), state.has_outbox())
        };
        let is_root = self.world.rank.index == 0;
        if self.parting.is_none() {
            let all_finish = is_root && finishes && !has_failed && self.links.iter().all(|l| l.is_finished);
            if all_finish {
                self.links.iter_mut().for_each(|link| link.send(Message::Finished.encode()));
            }
            if all_finish || closes {
                self.parting = Some(Instant::now());
            }
        }
        let Some(since) = self.parting else { return false };
        let is_done = match is_root && !closes {
            true => self.links.is_empty(),
            // Ranks that come in late learn why the start failed.
            false => self.gate.is_none() && !has_outbox && self.links.iter().all(Link::is_sent),
        };
        is_done || since.elapsed() > PARTING
    }

    /// Waits for sockets. Returns the states of the gate's and of the links'.
    fn wait(&mut self) -> std::io::Result<(Vec<Ready>, Vec<bool>)> {
        let mut interests = vec![Interest { socket: self.wake.as_fd(), reads: true, writes: false }];
        interests.extend(self.links.iter().map(|link| Interest {
            socket: link.socket.as_fd(),
            reads: true,
            writes: !link.is_sent(),
        }));
        interests.extend(self.gate.iter().flat_map(Gate::interests));
        let ready = poll::wait(&interests, TICK)?;
        let (own, gate) = ready.split_at(1 + self.links.len());
        if own[0].reads {
            // One read empties it but for a flood of requests, which wakes it again.
            let _ = (&self.wake).read(&mut [0; 256]);
        }
        let links = own[1..].iter().map(|ready| ready.reads || ready.writes).collect();
        Ok((gate.to_vec(), links))
    }

    fn advance(&mut self, gate: &[Ready], links: &[bool]) {
        let mut ready = links.iter();
        let mut lost = Vec::new();
        for at in 0..self.links.len() {
            let is_ready = ready.next().is_some_and(|ready| *ready);
            if !is_ready && self.links[at].is_sent() {
                continue;
            }
            for event in self.links[at].advance() {
                match event {
                    LinkEvent::Message(message) => self.handle(at, message),
                    LinkEvent::Lost(reason) => {
                        self.lose(at, &reason);
                        lost.push(at);
                    }
                }
            }
        }
        lost.dedup();
        for at in lost.into_iter().rev() {
            // A rank whose messages are of no use learns why it must end.
            let mut link = self.links.remove(at);
            self.send_fault(&mut link);
        }
        if let Some(open) = &mut self.gate {
            match open.advance(gate) {
                Ok(arrived) => arrived.into_iter().for_each(|(caller, socket)| self.admit(caller, socket)),
                Err(e) => self.refuse(&limits::system("cannot accept another rank", &e).to_string()),
            }
        }
    }

    fn handle(&mut self, at: usize, message: Message) {
        let link = &mut self.links[at];
        let is_root = self.world.rank.index == 0;
        match message {
            Message::Heartbeat => {}
            Message::Hello { world_size, process, host } if is_root && !link.is_known => {
                (link.is_known, link.host, link.process) = (true, host, process);
                self.check_arrival(at, world_size as usize);
                self.start_if_complete();
            }
            Message::Started { hosts } if !is_root => {
                link.host = hosts.first().cloned().unwrap_or_default();
                self.shared.change(|state| (state.hosts, state.phase) = (hosts, ControlPhase::Runs));
            }
            Message::Data(data) => self.deliver(at, data),
            Message::Abort(fault) => self.shared.change(|state| {
                if is_root {
                    state.fail(fault);
                } else {
                    state.fault.get_or_insert(fault);
                }
            }),
            Message::Finish if is_root => link.is_finished = true,
            Message::Finished if !is_root => {
                link.is_finished = true;
                self.parting = Some(Instant::now());
            }
            _ => self.lose(at, "it sent an unexpected message"),
        }
    }

    fn deliver(&mut self, at: usize, data: Data) {
        let rank = self.links[at].rank;
        self.shared.change(|state| state.inbox[rank].push_back(data));
    }

    /// Ends the run because a link is lost, if its rank had not finished.
    fn lose(&mut self, at: usize, reason: &str) {
        let link = &self.links[at];
        if link.is_finished {
            return;
        }
        let host = if link.host.is_empty() { "host unknown" } else { &link.host };
        let fault = Fault::new(link.rank, host, reason);
        self.shared.change(|state| {
            // Rank 0 cannot confirm any more what this rank reported.
            let fault = state.own_fault.take().unwrap_or(fault);
            state.fail(fault);
        });
    }

    /// Takes in a process that knows the secret.
    fn admit(&mut self, caller: Caller, socket: TcpStream) {
        let rank = caller.rank as usize;
        if caller.purpose == 0 && (1..self.world.rank.world_size).contains(&rank) {
            let mut link = Link::new(rank, socket);
            if let Some(fault) = self.shared.lock().fault.clone() {
                link.send(Message::Abort(fault).encode());
            }
            self.links.push(link);
        } else if caller.purpose == 0 {
            let size = self.world.rank.world_size;
            self.refuse(&format!("a process says that it is rank {rank}, but the world has {size} ranks"));
            self.send_fault(&mut Link::new(rank, socket));
        }
    }

    /// Sends the cause of the end of the run to a process whose link is not kept.
    fn send_fault(&self, link: &mut Link) {
        if let Some(fault) = self.shared.lock().fault.clone() {
            link.send(Message::Abort(fault).encode());
            link.advance();
        }
    }

    fn check_arrival(&mut self, at: usize, world_size: usize) {
        let new = &self.links[at];
        let own_size = self.world.rank.world_size;
        if world_size != own_size {
            let (rank, host) = (new.rank, &new.host);
            let wrong = format!("its world size is {world_size}, but rank 0 has {own_size}");
            let fault = Fault::new(rank, host, &wrong).caused_by(Cause::User);
            return self.shared.change(|state| state.fail(fault));
        }
        let mut earlier = self.links.iter().enumerate();
        let same = earlier.find(|(i, link)| *i != at && link.is_known && link.rank == new.rank);
        if let Some((_, other)) = same {
            self.refuse(&format!(
                "two processes are rank {}: {} on {} and {} on {}",
                new.rank, other.process, other.host, new.process, new.host
            ));
        }
    }

    fn fail(&self, message: &str) {
        let fault = Fault::new(self.world.rank.index, &self.host, message);
        self.shared.change(|state| state.fail(fault));
    }

    /// Ends the run because of something that the user can correct.
    fn refuse(&self, message: &str) {
        let fault = Fault::new(self.world.rank.index, &self.host, message).caused_by(Cause::User);
        self.shared.change(|state| state.fail(fault));
    }

    fn start_if_complete(&mut self) {
        if self.gate.is_none() || !self.missing().is_empty() {
            return;
        }
        let mut hosts = vec![self.host.clone(); self.world.rank.world_size];
        for link in &self.links {
            hosts[link.rank].clone_from(&link.host);
        }
        // No port is open while the run trains.
        self.gate = None;
        self.shared.change(|state| {
            if state.fault.is_none() {
                state.send(Message::Started { hosts: hosts.clone() }.encode());
                (state.hosts, state.phase) = (hosts, ControlPhase::Runs);
            }
        });
    }

    /// Ranks that have not introduced themselves.
    fn missing(&self) -> Vec<usize> {
        let is_here = |rank: &usize| self.links.iter().any(|link| link.is_known && link.rank == *rank);
        (1..self.world.rank.world_size).filter(|rank| !is_here(rank)).collect()
    }

    fn keep_time(&mut self) {
        let now = Instant::now();
        let own_pause = now - std::mem::replace(&mut self.looked, now);
        if own_pause > TICK + self.options.heartbeat {
            // This process was stopped, or got no processor: the silence of the others was its own. What has
            // arrived since may be newer than the end of the pause.
            self.links.iter_mut().for_each(|link| link.heard = now.min(link.heard + own_pause));
        }
        if now - self.beaten >= self.options.heartbeat {
            self.beaten = now;
            self.links.iter_mut().for_each(Link::beat);
        }
        let silence = self.options.silence;
        let is_silent = |link: &Link| now - link.heard > silence && !link.is_finished;
        while let Some(at) = self.links.iter().position(is_silent) {
            self.lose(at, &format!("nothing came from it for {} s", silence.as_secs_f32()));
            let mut link = self.links.remove(at);
            // A stopped process that goes on learns why it must end.
            self.send_fault(&mut link);
        }
        let Some(gate) = self.gate.as_ref().filter(|_| self.shared.lock().fault.is_none()) else { return };
        let (waited, deadline) = (now - self.since, self.options.deadline);
        if waited >= deadline {
            let ranks = ranges(&self.missing());
            self.refuse(&format!(
                "rank {ranks} did not come within {} s: check that all ranks are started, reach {}:{} and have \
                 the same secret",
                deadline.as_secs_f32(),
                self.world.address,
                self.world.port
            ));
        } else if waited >= self.options.report_every * (self.reports + 1) {
            self.reports += 1;
            let refused = match gate.refused() {
                0 => String::new(),
                count => format!("; {count} connections did not show that they know the secret of the run"),
            };
            let World { address, port, rank, .. } = &self.world;
            (self.options.report)(&format!(
                "waiting at {address}:{port} for rank {} of {} ({:.0} of {:.0} s){refused}",
                ranges(&self.missing()),
                rank.world_size,
                waited.as_secs_f32(),
                deadline.as_secs_f32()
            ));
        }
    }
}

/// The end of the thread, whatever its reason, ends the waits of the others.
impl Drop for Background {
    fn drop(&mut self) {
        // Sockets close before anyone learns of the end.
        self.links.clear();
        self.gate = None;
        if std::thread::panicking() {
            self.fail("the thread of the control connection panicked");
        }
        self.shared.change(|state| state.phase = ControlPhase::Ended);
    }
}

/// Ranks in short: `2, 5-7`.
fn ranges(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b);
    let texts = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.iter().map(usize::to_string).collect(),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_pause_of_this_process_excuses_no_silence_after_it() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = TcpStream::connect(listener.local_addr().expect("an address")).expect("a listener");
        let (wakes, wake) = UnixStream::pair().expect("a pair of sockets");
        let now = Instant::now();
        let mut background = Background {
            shared: Arc::new(Shared::new(2, wakes)),
            wake,
            world: World { rank: xtrain_rank::Rank::first_of(2), ..World::single() },
            host: "node-a".into(),
            options: StartOptions { heartbeat: Duration::from_millis(10), ..StartOptions::default() },
            links: vec![Link::new(1, socket)],
            gate: None,
            since: now,
            reports: 0,
            beaten: now,
            looked: now,
            parting: None,
        };
        std::thread::sleep(2 * TICK);
        // A message of rank 1 was waiting at the end of the pause.
        background.links[0].heard = Instant::now();
        background.keep_time();
        assert!(background.links[0].heard <= Instant::now());
    }

    #[test]
    fn ranks_are_listed_in_short() {
        assert_eq!(ranges(&[2, 5, 6, 7, 9, 10]), "2, 5-7, 9-10");
    }
}
