//! The places in the memory of other ranks to which this one copies.
//!
//! The ranks of a stage of a pipeline run one program, but those of another stage run another one, with other
//! places. So each rank publishes where the output of each of its collectives is. Collectives of one kind of
//! groups have one order on all ranks of a group, and messages from one rank to another have one on both; so
//! the n-th of a rank belongs to the n-th of the other.

use super::arena::ArenaSpan;
use super::loaded::Loaded;
use super::peer_memory::gather;
use crate::part::MicroSlot;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use xtrain_distributed::{CommError, Communicator};
use xtrain_program::{Collective, Groups, ValueId};

/// The place in the memory of a rank that another one writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PeerPlace {
    pub(super) rank: usize,
    /// The number of the chunk of memory, and the first byte there in the first slot.
    pub(super) chunk: usize,
    pub(super) offset: usize,
    /// Bytes from a slot to the next; 0 if the place is in no slots.
    pub(super) stride: usize,
    /// The first of the two words that order a message.
    pub(super) words: usize,
}

/// The order in which ranks count their collectives.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Queue {
    /// Those of the groups of a kind.
    Groups(Groups),
    /// Messages from one rank to another.
    From(usize, usize),
    /// Messages between two ranks in both directions, the smaller one first.
    Between(usize, usize),
}

impl Queue {
    fn from_collective(collective: Collective, groups: Groups, rank: usize) -> Queue {
        let at = |place| groups.rank_at(rank, place);
        match collective {
            Collective::Send { to } => Queue::From(rank, at(to)),
            Collective::Receive { from } => Queue::From(at(from), rank),
            Collective::SendReceive { with } => Queue::Between(rank.min(at(with)), rank.max(at(with))),
            Collective::AllGather { .. } | Collective::AllToAll { .. } | Collective::ReduceScatter { .. } => {
                Queue::Groups(groups)
            }
        }
    }
}

/// A collective of a program of this rank.
pub(super) struct OwnCollective {
    /// The index of the instance.
    pub(super) instance: usize,
    pub(super) collective: Collective,
    pub(super) groups: Groups,
    pub(super) queue: Queue,
    /// The collectives of the queue before it.
    pub(super) number: usize,
    /// Bytes of the input and of the output.
    pub(super) bytes: [usize; 2],
    /// The place of the output, if there is one, and bytes between slots.
    pub(super) output: Option<(ArenaSpan, usize)>,
}

impl OwnCollective {
    /// The bytes of a message.
    pub(super) fn message_bytes(&self) -> usize {
        self.bytes[0].max(self.bytes[1])
    }

    /// A description that must be equal on the ranks that take part.
    fn about(&self) -> u64 {
        match self.collective.is_message() {
            true => hash(&self.message_bytes()),
            false => hash(&(self.collective, self.bytes)),
        }
    }
}

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The collectives of a program, in list order.
pub(super) fn collectives_of(loaded: &Loaded, rank: usize) -> Vec<OwnCollective> {
    let mut counts: HashMap<Queue, usize> = HashMap::new();
    let program = &loaded.program;
    let own = program.instances.iter().enumerate().filter_map(|(index, instance)| {
        let (collective, groups) = instance.code.op().collective()?;
        let (input, output) = (instance.inputs.first(), instance.outputs.first().map(|o| o.value));
        let bytes = |value: Option<ValueId>| value.map_or(0, |value| program.ty(value).bytes());
        let queue = Queue::from_collective(collective, groups, rank);
        let slot = MicroSlot { chunk: instance.chunk, number: 0 };
        let count = counts.entry(queue).or_default();
        *count += 1;
        Some(OwnCollective {
            instance: index,
            collective,
            groups,
            queue,
            number: *count - 1,
            bytes: [bytes(input.copied()), bytes(output)],
            output: output.map(|value| (loaded.span(value, slot), loaded.slot_stride(value, slot.chunk))),
        })
    });
    own.collect()
}

/// A line of the table that a rank publishes: the queue and the description of a collective, and its place.
type PlaceRow = [u64; 6];

/// Publishes the places `own` of the collectives `of` a program, and returns those on the other ranks of
/// each: of a message on one rank, of other collectives on all of the group, in their order. All ranks call
/// it.
///
/// # Errors
/// The collectives of another rank are others.
pub(super) fn exchange(
    host: &dyn Communicator,
    of: &[OwnCollective],
    own: &[PeerPlace],
) -> Result<Vec<Vec<PeerPlace>>, CommError> {
    let row = |(of, at): (&OwnCollective, &PeerPlace)| {
        let place = [at.chunk, at.offset, at.stride, at.words].map(|number| number as u64);
        let [chunk, offset, stride, words] = place;
        [hash(&of.queue), of.about(), chunk, offset, stride, words]
    };
    let rows: Vec<PlaceRow> = of.iter().zip(own).map(row).collect();
    let tables = gather(host, rows.as_flattened())?;
    let tables: Vec<&[PlaceRow]> = tables.iter().map(|table| table.as_chunks().0).collect();
    let place_on = |of: &OwnCollective, rank: usize| {
        let queue = hash(&of.queue);
        let found = tables[rank].iter().filter(|row| row[0] == queue).nth(of.number);
        match found {
            Some(&[_, about, chunk, offset, stride, words]) if about == of.about() => {
                let [chunk, offset, stride, words] =
                    [chunk, offset, stride, words].map(|number| number as usize);
                Ok(PeerPlace { rank, chunk, offset, stride, words })
            }
            other => Err(CommError::System(format!(
                "rank {rank} has {} in place of {} {} ({} and {} bytes) of this rank's program; this is a bug of xtrain, and \
                 parallel.transport = \"host\" does without places in the memory of other ranks",
                if other.is_some() { "another collective" } else { "no collective" },
                of.collective.name(),
                of.number,
                of.bytes[0],
                of.bytes[1]
            ))),
        }
    };
    let places = |of: &OwnCollective| match of.collective.other_place() {
        Some(place) => Ok(vec![place_on(of, of.groups.rank_at(host.rank(), place))?]),
        None => of.groups.ranks(host.rank()).map(|rank| place_on(of, rank)).collect(),
    };
    of.iter().map(places).collect()
}
