//! The memory of the GPUs of a host that their ranks map: each rank's own, and that of the others.

use super::communicator::DeviceCommError;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::AsFd;
use xtrain_cuda::{Context, GrowingMemory};
use xtrain_distributed::{CommError, Communicator, exchange_files};

/// The memory of the other ranks, in chunks that have the same number on their owner.
#[derive(Default)]
pub(super) struct PeerMemory {
    /// The number of pieces of each chunk of this rank that the others have mapped.
    shared: Vec<usize>,
    /// Chunks by rank and number.
    chunks: HashMap<(usize, usize), GrowingMemory>,
}

/// A piece of a chunk that other ranks map: the number of the chunk, the bytes that it may grow to, and those
/// of the piece.
type SharedPiece = [u64; 3];

impl PeerMemory {
    /// Shares what `own`, the chunks of this rank, has allocated since the last call, and maps what the
    /// others have. All ranks call it.
    pub(super) fn share(
        &mut self,
        host: &dyn Communicator,
        own: &[&GrowingMemory],
        context: &Context,
    ) -> Result<(), DeviceCommError> {
        self.shared.resize(own.len().max(self.shared.len()), 0);
        let (mut pieces, mut files) = (Vec::<SharedPiece>::new(), Vec::new());
        for (number, (memory, shared)) in own.iter().zip(&mut self.shared).enumerate() {
            for (piece, bytes) in memory.pieces().enumerate().skip(*shared) {
                pieces.push([number as u64, memory.room() as u64, bytes as u64]);
                files.push(memory.share(piece)?);
            }
            *shared = memory.pieces().len();
        }
        let all = gather(host, pieces.as_flattened())?;
        let all: Vec<&[SharedPiece]> = all.iter().map(|pieces| pieces.as_chunks().0).collect();
        let counts: Vec<usize> = all.iter().map(|pieces| pieces.len()).collect();
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let received = exchange_files(host, &files, &counts)?;
        for (rank, (pieces, files)) in all.into_iter().zip(&received).enumerate() {
            for (&[number, room, bytes], file) in pieces.iter().zip(files) {
                let chunk = match self.chunks.entry((rank, number as usize)) {
                    Entry::Occupied(chunk) => chunk.into_mut(),
                    Entry::Vacant(place) => {
                        place.insert(GrowingMemory::with_room(context, room as usize, false)?)
                    }
                };
                chunk.join(file.as_fd(), bytes as usize)?;
            }
        }
        Ok(())
    }

    /// A chunk of another rank.
    pub(super) fn chunk(&self, rank: usize, number: usize) -> &GrowingMemory {
        self.chunks.get(&(rank, number)).expect("memory that the rank has shared")
    }
}

/// The numbers of each rank, in their order. Ranks may have different counts.
pub(super) fn gather(host: &dyn Communicator, own: &[u64]) -> Result<Vec<Vec<u64>>, CommError> {
    let gather = |own: &[u64]| {
        let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut all = vec![0; bytes.len() * host.world_size()];
        host.all_gather(host.world(), 0, &bytes, &mut all)?;
        Ok::<Vec<u64>, CommError>(all.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes)).collect())
    };
    let counts = gather(&[own.len() as u64])?;
    let longest = counts.iter().copied().max().unwrap_or_default() as usize;
    if longest == 0 {
        return Ok(vec![Vec::new(); counts.len()]);
    }
    let padded: Vec<u64> = own.iter().copied().chain(std::iter::repeat(0)).take(longest).collect();
    let all = gather(&padded)?;
    let of_ranks = all.chunks(longest).zip(counts);
    Ok(of_ranks.map(|(numbers, count)| numbers[..count as usize].to_vec()).collect())
}
