//! Posts: the calls of a group on one rank, as bytes, and the comparison of those of all ranks.

use std::fmt;
use std::sync::Arc;

/// The kind of a call. Ranks are those of the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    AllGather,
    Broadcast { root: usize },
    ReduceScatter,
    Reduce { root: usize },
    Send { to: usize },
    Receive { from: usize },
}

/// A place in device memory: an offset in an allocation of this many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MemoryPlace {
    pub(crate) offset: u64,
    pub(crate) of: u64,
}

/// A call, with the bytes that the rank sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PostedCall {
    pub(crate) kind: CallKind,
    pub(crate) element: i32,
    pub(crate) count: u64,
    pub(crate) source: Option<MemoryPlace>,
    pub(crate) target: Option<MemoryPlace>,
    pub(crate) bytes: Vec<u8>,
}

/// The calls of a rank's group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Post {
    /// The number of the group, from 0.
    pub(crate) number: u64,
    pub(crate) calls: Vec<PostedCall>,
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallKind::AllGather => f.write_str("an all-gather"),
            CallKind::Broadcast { root } => write!(f, "a broadcast from rank {root}"),
            CallKind::ReduceScatter => f.write_str("a reduce-scatter"),
            CallKind::Reduce { root } => write!(f, "a reduction to rank {root}"),
            CallKind::Send { to } => write!(f, "a send to rank {to}"),
            CallKind::Receive { from } => write!(f, "a receive from rank {from}"),
        }
    }
}

impl fmt::Display for PostedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}", self.kind, self.count, element_name(self.element))
    }
}

impl fmt::Display for MemoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} of an allocation of {}", self.offset, self.of)
    }
}

/// The name of an `ncclDataType_t`.
fn element_name(element: i32) -> &'static str {
    let names =
        ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"];
    let fp8 = ["float8e4m3", "float8e5m2"];
    names.iter().chain(&fp8).nth(element as usize).copied().unwrap_or("elements of an unknown type")
}

/// The first difference between the posts of all ranks, in words.
pub(super) fn difference(posts: &[Arc<Post>]) -> Option<String> {
    let number = posts[0].number;
    let disagree = |ranks: [usize; 2], words: [String; 2]| {
        Some(format!(
            "the ranks disagree on group {number} of their communicator: \
             rank {} calls {}, but rank {} calls {}",
            ranks[0], words[0], ranks[1], words[1]
        ))
    };
    // Collectives of the whole communicator are the same calls on all ranks.
    let is_collective =
        |call: &&PostedCall| !matches!(call.kind, CallKind::Send { .. } | CallKind::Receive { .. });
    let collectives = |rank: usize| posts[rank].calls.iter().filter(is_collective);
    let same = |a: &PostedCall, b: &PostedCall| (a.kind, a.element, a.count) == (b.kind, b.element, b.count);
    for rank in 1..posts.len() {
        let (mut first, mut other) = (collectives(0), collectives(rank));
        loop {
            match (first.next(), other.next()) {
                (None, None) => break,
                (Some(a), Some(b)) if same(a, b) => {}
                (a, b) => return disagree([0, rank], [words(a, &posts[0]), words(b, &posts[rank])]),
            }
        }
    }
    // What a rank sends to another is what that one receives.
    for (from, to) in (0..posts.len()).flat_map(|from| (0..posts.len()).map(move |to| (from, to))) {
        let mut sends = posts[from].calls.iter().filter(|call| call.kind == CallKind::Send { to });
        let mut receives = posts[to].calls.iter().filter(|call| call.kind == CallKind::Receive { from });
        loop {
            match (sends.next(), receives.next()) {
                (None, None) => break,
                (Some(a), Some(b)) if (a.element, a.count) == (b.element, b.count) => {}
                (a, b) => return disagree([from, to], [words(a, &posts[from]), words(b, &posts[to])]),
            }
        }
    }
    // Calls of one kind use the same places in the same order on all ranks. What a rank receives from another
    // may be less than what a third one receives from that.
    let kinds = posts.iter().flat_map(|post| &post.calls).map(|call| call.kind);
    for kind in kinds {
        let of_kind = |rank: usize| posts[rank].calls.iter().filter(move |call| call.kind == kind);
        let sources = |rank| of_kind(rank).filter_map(|call| call.source).collect();
        let targets = |rank| of_kind(rank).filter_map(|call| call.target).collect();
        for (does, places) in [
            ("sends from", (0..posts.len()).map(sources).collect::<Vec<Vec<MemoryPlace>>>()),
            ("receives into", (0..posts.len()).map(targets).collect()),
        ] {
            // The root of a broadcast is the only one that sends, that of a reduction the only one that
            // receives.
            let Some(first) = places.iter().position(|places| !places.is_empty()) else { continue };
            let ranks = (first + 1..posts.len()).filter(|&rank| !places[rank].is_empty());
            if let Some((rank, a, b)) = ranks
                .into_iter()
                .find_map(|rank| other_place(&places[first], &places[rank]).map(|(a, b)| (rank, a, b)))
            {
                return Some(format!(
                    "the ranks disagree on group {number} of their communicator, {} on all of them: \
                     rank {first} {does} {a}, but rank {rank} {does} {b}",
                    words(of_kind(first).next(), &posts[first])
                ));
            }
        }
    }
    None
}

/// The first places that differ between two ranks; of lists of different lengths, those that both have.
fn other_place(a: &[MemoryPlace], b: &[MemoryPlace]) -> Option<(MemoryPlace, MemoryPlace)> {
    let is_common = |place: &&MemoryPlace| a.len() == b.len() || (a.contains(place) && b.contains(place));
    let both = a.iter().filter(is_common).zip(b.iter().filter(is_common));
    both.map(|(a, b)| (*a, *b)).find(|(a, b)| a != b)
}

/// A call of a group in words; those of the whole group where it has none to compare.
fn words(call: Option<&PostedCall>, post: &Post) -> String {
    match (call, post.calls.as_slice()) {
        (Some(call), _) => call.to_string(),
        (None, []) => "nothing".to_owned(),
        (None, [first]) => first.to_string(),
        (None, [first, ..]) => format!("{first} and {} other calls", post.calls.len() - 1),
    }
}

const NO_PLACE: u64 = u64::MAX;

impl Post {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut to = Vec::new();
        let mut put = |word: u64| to.extend(word.to_le_bytes());
        put(self.number);
        put(self.calls.len() as u64);
        for call in &self.calls {
            let (kind, rank) = match call.kind {
                CallKind::AllGather => (0, 0),
                CallKind::Broadcast { root } => (1, root),
                CallKind::Send { to } => (2, to),
                CallKind::Receive { from } => (3, from),
                CallKind::ReduceScatter => (4, 0),
                CallKind::Reduce { root } => (5, root),
            };
            [kind, rank as u64, call.element as u64, call.count].into_iter().for_each(&mut put);
            for place in [call.source, call.target] {
                let place = place.unwrap_or(MemoryPlace { offset: NO_PLACE, of: 0 });
                [place.offset, place.of].into_iter().for_each(&mut put);
            }
            put(call.bytes.len() as u64);
        }
        for call in &self.calls {
            to.extend(&call.bytes);
        }
        to
    }

    /// The post of these bytes; `None` if they are none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Post> {
        let mut rest = bytes;
        let mut word = || {
            let (word, others) = rest.split_first_chunk()?;
            rest = others;
            Some(u64::from_le_bytes(*word))
        };
        let (number, count) = (word()?, word()?);
        let mut calls = Vec::new();
        for _ in 0..count {
            let (kind, rank) = (word()?, word()? as usize);
            let kind = match kind {
                0 => CallKind::AllGather,
                1 => CallKind::Broadcast { root: rank },
                2 => CallKind::Send { to: rank },
                3 => CallKind::Receive { from: rank },
                4 => CallKind::ReduceScatter,
                5 => CallKind::Reduce { root: rank },
                _ => return None,
            };
            let (element, count) = (word()? as i32, word()?);
            let mut place = || {
                let place = MemoryPlace { offset: word()?, of: word()? };
                Some((place.offset != NO_PLACE).then_some(place))
            };
            let (source, target) = (place()?, place()?);
            let bytes = vec![0; word()? as usize];
            calls.push(PostedCall { kind, element, count, source, target, bytes });
        }
        for call in &mut calls {
            let (bytes, others) = rest.split_at_checked(call.bytes.len())?;
            call.bytes.copy_from_slice(bytes);
            rest = others;
        }
        Some(Post { number, calls })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kind: CallKind, count: u64) -> PostedCall {
        let place = Some(MemoryPlace { offset: 256, of: 4096 });
        let (source, target) = match kind {
            CallKind::AllGather | CallKind::ReduceScatter => (place, place),
            CallKind::Reduce { root } => (place, (root == 0).then_some(place).flatten()),
            CallKind::Broadcast { .. } | CallKind::Receive { .. } => (None, place),
            CallKind::Send { .. } => (place, None),
        };
        PostedCall { kind, element: 1, count, source, target, bytes: vec![3; count as usize] }
    }

    fn said(calls: Vec<Vec<PostedCall>>) -> String {
        let posts: Vec<_> = calls.into_iter().map(|calls| Arc::new(Post { number: 4, calls })).collect();
        difference(&posts).unwrap_or_default()
    }

    #[test]
    fn a_post_is_read_as_it_was_written() {
        let post = Post {
            number: 7,
            calls: vec![
                call(CallKind::Send { to: 2 }, 5),
                call(CallKind::Receive { from: 0 }, 3),
                call(CallKind::ReduceScatter, 4),
                call(CallKind::Reduce { root: 1 }, 2),
            ],
        };
        assert_eq!(Post::decode(&post.encode()), Some(post.clone()));
        assert_eq!(Post::decode(&post.encode()[..60]), None);
    }

    #[test]
    fn calls_that_agree_differ_in_nothing() {
        assert_eq!(said(vec![vec![call(CallKind::AllGather, 8)]; 3]), "");
        let exchange = || {
            let both =
                |other| [call(CallKind::Send { to: other }, 4), call(CallKind::Receive { from: other }, 4)];
            (0..2).flat_map(both).collect()
        };
        assert_eq!(said(vec![exchange(), exchange()]), "");
        assert_eq!(said(vec![vec![call(CallKind::Broadcast { root: 1 }, 8)]; 2]), "");
        let receives_nothing = PostedCall { target: None, ..call(CallKind::Reduce { root: 0 }, 8) };
        assert_eq!(said(vec![vec![call(CallKind::Reduce { root: 0 }, 8)], vec![receives_nothing]]), "");
    }

    #[test]
    fn a_difference_names_the_ranks_and_both_calls() {
        let gather = call(CallKind::AllGather, 8);
        for (other, words) in [
            (vec![call(CallKind::AllGather, 9)], "but rank 1 calls an all-gather of 9 uint8"),
            (
                vec![PostedCall { element: 7, ..gather.clone() }],
                "but rank 1 calls an all-gather of 8 float32",
            ),
            (
                vec![call(CallKind::Broadcast { root: 1 }, 8)],
                "but rank 1 calls a broadcast from rank 1 of 8 uint8",
            ),
            (vec![call(CallKind::Send { to: 0 }, 8)], "but rank 1 calls a send to rank 0 of 8 uint8"),
            (vec![call(CallKind::ReduceScatter, 8)], "but rank 1 calls a reduce-scatter of 8 uint8"),
            (
                vec![call(CallKind::Reduce { root: 1 }, 8)],
                "but rank 1 calls a reduction to rank 1 of 8 uint8",
            ),
            (vec![gather.clone(), gather.clone()], "but rank 1 calls an all-gather of 8 uint8"),
        ] {
            let text = said(vec![vec![gather.clone()], other]);
            let begin = "the ranks disagree on group 4 of their communicator: rank 0 calls an all-gather of 8 uint8, ";
            assert_eq!(text, format!("{begin}{words}"));
        }
        let text =
            said(vec![vec![call(CallKind::Send { to: 1 }, 8)], vec![call(CallKind::Receive { from: 0 }, 6)]]);
        assert!(text.ends_with(
            "rank 0 calls a send to rank 1 of 8 uint8, but rank 1 calls a receive from rank 0 of 6 uint8"
        ));
    }

    #[test]
    fn a_rank_may_receive_less_than_another() {
        let [a, b] = [256, 1024].map(|offset| Some(MemoryPlace { offset, of: 4096 }));
        let send = |to, source| PostedCall { source, ..call(CallKind::Send { to }, 4) };
        let receive = |from, target| PostedCall { target, ..call(CallKind::Receive { from }, 4) };
        let sends = [send(0, a), send(0, b), send(1, b)];
        let of_0 = |[a, b]: [Option<MemoryPlace>; 2]| {
            let received = [0, 1].map(|from| [receive(from, a), receive(from, b)]);
            [&sends[..], received.as_flattened()].concat()
        };
        let of_1 = |[a, b]: [Option<MemoryPlace>; 2]| {
            [&[send(0, a), send(0, b), send(1, b)][..], &[receive(0, b), receive(1, b)]].concat()
        };
        assert_eq!(said(vec![of_0([a, b]), of_1([a, b])]), "");
        let text = said(vec![of_0([a, b]), of_1([b, a])]);
        assert!(text.contains(
            "rank 0 sends from byte 256 of an allocation of 4096, but rank 1 sends from byte 1024"
        ));
    }

    #[test]
    fn equal_calls_on_other_buffers_are_another_order() {
        let gather = call(CallKind::AllGather, 8);
        let other = PostedCall { target: Some(MemoryPlace { offset: 512, of: 4096 }), ..gather.clone() };
        let text = said(vec![vec![gather], vec![other]]);
        assert!(text.contains(
            "rank 0 receives into byte 256 of an allocation of 4096, but rank 1 receives into byte 512"
        ));
    }
}
