//! Reading batches ahead on a thread of its own.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::Loader;
use super::batch::Batch;
use crate::error::{DataError, Result};

/// The part of every step's samples that one rank works on, in micro-batches.
///
/// Step s of a run takes samples `s * global_batch .. (s + 1) * global_batch`; a rank takes `count` of them from
/// `offset` on, `micro_batch` at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankSlice {
    /// Samples a step, over all ranks.
    pub global_batch: usize,
    /// The rank's first sample within a step.
    pub offset: usize,
    /// The rank's samples a step.
    pub count: usize,
    /// Samples a batch.
    pub micro_batch: usize,
}

impl RankSlice {
    /// Equal parts for `world_size` ranks.
    ///
    /// # Errors
    /// A global batch that does not divide into whole micro-batches for every rank.
    pub fn of_rank(
        rank: usize,
        world_size: usize,
        global_batch: usize,
        micro_batch: usize,
    ) -> Result<RankSlice> {
        let whole = world_size.checked_mul(micro_batch).filter(|&samples| samples > 0);
        let fits = whole.is_some_and(|samples| global_batch > 0 && global_batch.is_multiple_of(samples));
        if !fits || rank >= world_size {
            return Err(DataError::invalid(
                format!(
                    "a global batch of {global_batch} does not divide into micro-batches of {micro_batch} on \
                     {world_size} ranks (this one is {rank})"
                ),
                "make the global batch a multiple of micro-batch times ranks",
            ));
        }
        let count = global_batch / world_size;
        Ok(RankSlice { global_batch, offset: rank * count, count, micro_batch })
    }

    /// Micro-batches a step.
    pub fn micro_steps(&self) -> usize {
        self.count / self.micro_batch
    }
}

/// A rank's micro-batches in order, read ahead. Dropping it stops its thread.
#[derive(Debug)]
pub struct Prefetcher {
    batches: Option<Receiver<Result<Batch>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts at the step whose first sample is `first_sample`, and stays at most `depth` batches ahead.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        loader: Arc<Loader>,
        slice: RankSlice,
        first_sample: u64,
        depth: usize,
    ) -> Result<Prefetcher> {
        let (sender, batches) = bounded(depth.max(1));
        let thread = std::thread::Builder::new()
            .name("xtrain-data".to_owned())
            .spawn(move || read_ahead(&loader, slice, first_sample, &sender))
            .map_err(|e| DataError::Internal(format!("no thread to read ahead: {e}")))?;
        Ok(Prefetcher { batches: Some(batches), thread: Some(thread) })
    }

    /// The next micro-batch; waits for it where it is not there yet.
    ///
    /// # Errors
    /// What reading it met. After an error there are no more batches.
    pub fn next_batch(&mut self) -> Result<Batch> {
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        received.unwrap_or_else(|| Err(DataError::Internal("the reading thread has ended".to_owned())))
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // Without a receiver the thread's next send fails, and it ends.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_ahead(loader: &Loader, slice: RankSlice, first_sample: u64, sender: &Sender<Result<Batch>>) {
    let mut step_start = first_sample;
    loop {
        for micro_step in 0..slice.micro_steps() {
            let first = step_start + (slice.offset + micro_step * slice.micro_batch) as u64;
            let batch = loader.batch(first, slice.micro_batch);
            let failed = batch.is_err();
            if sender.send(batch).is_err() || failed {
                return;
            }
        }
        step_start += slice.global_batch as u64;
    }
}
