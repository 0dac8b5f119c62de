//! A run of one process.

use crate::channel::Channel;
use crate::communicator::Communicator;
use crate::error::CommError;
use xtrain_rank::Groups;

/// The communicator and channel of a run of one process: its collectives are copies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Communicator for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn sent_bytes(&self) -> u64 {
        0
    }

    fn all_gather(&self, _: Groups, _: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError> {
        output.copy_from_slice(input);
        Ok(())
    }

    fn all_to_all(&self, _: Groups, _: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError> {
        output.copy_from_slice(input);
        Ok(())
    }

    fn send(&self, _: Groups, to: usize, _: &[u8]) -> Result<(), CommError> {
        Err(CommError::Left { rank: to })
    }

    fn receive(&self, _: Groups, from: usize, _: &mut [u8]) -> Result<(), CommError> {
        Err(CommError::Left { rank: from })
    }
}

impl Channel for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        Ok(bytes.to_vec())
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![bytes.to_vec()])
    }
}
