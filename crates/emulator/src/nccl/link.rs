//! A rank's connection to the other ranks of a communicator.

use super::frame::{CommunicatorName, Tag, read_frame, write_frame};
use super::post::Post;
use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// The connection.
pub(crate) struct RankLink {
    rank: usize,
    inbox: Mutex<Inbox>,
    /// Locked apart from the inbox, which is filled while a send waits.
    socket: Mutex<Option<UnixStream>>,
}

struct Inbox {
    state: LinkState,
    /// The ranks that have called their first group.
    called: Vec<bool>,
    /// The posts of the groups that are not complete, by rank.
    posts: HashMap<u64, Vec<Option<Arc<Post>>>>,
    /// The number of groups after which each rank has finished.
    finished: Vec<Option<u64>>,
    gone: Option<usize>,
}

/// How far the ranks have come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    Connecting,
    Ready,
    Refused(String),
}

impl RankLink {
    /// Connects `rank` of `size` with the others in a thread of its own.
    pub(crate) fn connect(name: CommunicatorName, rank: usize, size: usize, gpu: [u8; 16]) -> Arc<RankLink> {
        let inbox = Inbox {
            state: LinkState::Connecting,
            called: vec![false; size],
            posts: HashMap::new(),
            finished: vec![None; size],
            gone: None,
        };
        let link = Arc::new(RankLink { rank, inbox: Mutex::new(inbox), socket: Mutex::new(None) });
        let reader = link.clone();
        let hello = [&(size as u64).to_le_bytes()[..], &gpu].concat();
        let run = move || match name.address().and_then(|address| UnixStream::connect_addr(&address)) {
            Ok(socket) => reader.read(socket, &hello),
            Err(error) => {
                reader.lock().state = LinkState::Refused(format!("there is no such communicator: {error}"))
            }
        };
        if thread::Builder::new().name("emulated NCCL".into()).spawn(run).is_err() {
            link.lock().state = LinkState::Refused("the system refuses a thread".into());
        }
        link
    }

    /// Takes what comes until the connection ends.
    fn read(&self, mut socket: UnixStream, hello: &[u8]) {
        write_frame(&mut socket, Tag::Hello, self.rank, hello);
        *self.socket() = socket.try_clone().ok();
        while let Some((tag, rank, bytes)) = read_frame(&mut socket) {
            let mut inbox = self.lock();
            match tag {
                Tag::Ready => inbox.state = LinkState::Ready,
                Tag::Refused => {
                    inbox.state = LinkState::Refused(String::from_utf8_lossy(&bytes).into_owned())
                }
                Tag::Called => inbox.called[rank] = true,
                Tag::Post => {
                    if let Some(post) = Post::decode(&bytes) {
                        inbox.put(rank, Arc::new(post));
                    }
                }
                Tag::Finished => {
                    let count = bytes.first_chunk().map_or(0, |count| u64::from_le_bytes(*count));
                    inbox.finished[rank] = Some(count);
                }
                Tag::Gone if inbox.finished[rank].is_none() => inbox.gone = inbox.gone.or(Some(rank)),
                Tag::Gone | Tag::Hello => {}
            }
        }
        let mut inbox = self.lock();
        // The process that passes on messages has ended.
        if inbox.state == LinkState::Connecting {
            inbox.state = LinkState::Refused("rank 0 has left".into());
        }
        if inbox.finished.iter().any(Option::is_none) {
            inbox.gone = inbox.gone.or(Some(0));
        }
    }

    pub(crate) fn state(&self) -> LinkState {
        self.lock().state.clone()
    }

    /// The first rank that left without finishing.
    pub(crate) fn gone(&self) -> Option<usize> {
        self.lock().gone
    }

    /// Tells the others that this rank has called a group. True once all have.
    pub(crate) fn call(&self) -> bool {
        if !std::mem::replace(&mut self.lock().called[self.rank], true) {
            self.send(Tag::Called, &[]);
        }
        self.lock().called.iter().all(|called| *called)
    }

    /// Sends this rank's part of a group.
    pub(crate) fn post(&self, post: Post) {
        let frame = post.encode();
        self.lock().put(self.rank, Arc::new(post));
        self.send(Tag::Post, &frame);
    }

    /// True if all ranks have sent their parts of a group.
    pub(crate) fn has_all(&self, number: u64) -> bool {
        self.lock().posts.get(&number).is_some_and(|posts| posts.iter().all(Option::is_some))
    }

    /// A rank that has finished before this group, and the number of its groups.
    pub(crate) fn finished_before(&self, number: u64) -> Option<(usize, u64)> {
        let inbox = self.lock();
        let finished = inbox.finished.iter().enumerate().filter_map(|(rank, count)| Some((rank, (*count)?)));
        finished.into_iter().find(|(_, count)| *count <= number)
    }

    /// Takes all ranks' parts of a group.
    pub(crate) fn take(&self, number: u64) -> Vec<Arc<Post>> {
        self.lock().posts.remove(&number).into_iter().flatten().flatten().collect()
    }

    /// Tells the others that this rank has no groups after this many.
    pub(crate) fn finish(&self, count: u64) {
        self.lock().finished[self.rank] = Some(count);
        self.send(Tag::Finished, &count.to_le_bytes());
    }

    /// True if this rank has finished.
    pub(crate) fn has_finished(&self) -> bool {
        self.lock().finished[self.rank].is_some()
    }

    /// True if all ranks have finished or left.
    pub(crate) fn is_over(&self) -> bool {
        let inbox = self.lock();
        inbox.gone.is_some() || inbox.finished.iter().all(Option::is_some)
    }

    /// Leaves the others.
    pub(crate) fn leave(&self) {
        if let Some(socket) = self.socket().take() {
            // It may have ended already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn send(&self, tag: Tag, bytes: &[u8]) {
        if let Some(socket) = &mut *self.socket() {
            write_frame(socket, tag, self.rank, bytes);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbox {
    fn put(&mut self, rank: usize, post: Arc<Post>) {
        let size = self.finished.len();
        let of_group = self.posts.entry(post.number).or_insert_with(|| vec![None; size]);
        of_group[rank] = Some(post);
    }
}
