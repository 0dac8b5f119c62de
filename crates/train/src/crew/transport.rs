//! The path on which GPUs exchange data: NCCL where all ranks have it, else host memory.

use super::{Crew, decoded, encoded};
use crate::engine::Processor;
use crate::error::RunError;
use std::time::Instant;
use xtrain_config::{ParallelConfig, Transport};
use xtrain_cuda::{CudaError, Installed, Library, NcclCommunicator, NcclId};
use xtrain_distributed::CommError;

impl Crew {
    /// NCCL's communicator between the GPUs of all ranks; `None` if collectives pass through host memory.
    /// All ranks agree, and rank 0 warns of the reason.
    ///
    /// # Errors
    /// NCCL is requested, and a rank cannot use it; ranks have different versions of it; the ranks are not
    /// connected within `parallel.start_timeout`.
    pub(crate) fn nccl(
        &self,
        processor: &Processor,
        parallel: &ParallelConfig,
    ) -> Result<Option<NcclCommunicator>, RunError> {
        let Some(ranks) = &self.ranks else { return Ok(None) };
        let gpu = match processor {
            Processor::Cuda(gpu) if parallel.transport != Transport::Host => gpu,
            Processor::Cpu if parallel.transport == Transport::Nccl => {
                return Err(requested("ranks on the CPU have no GPU; leave it out, or train on GPUs"));
            }
            Processor::Cuda(_) | Processor::Cpu => return Ok(None),
        };
        let found = Installed::open(Library::Nccl).map(|found| found.version).map_err(missing);
        let all = ranks.control.gather(&encoded(&found)?)?;
        let id: Option<Vec<u8>> = self.decide(|| {
            let all = all.iter().map(|found| decoded(found)).collect::<Result<Vec<_>, RunError>>()?;
            match (self.obstacle(&all)?, parallel.transport) {
                (None, _) => Ok(Some(NcclId::new().map_err(refused)?.bytes().to_vec())),
                (Some(why), Transport::Nccl) => Err(requested(&why)),
                (Some(why), _) => {
                    tracing::warn!("collectives between GPUs pass through host memory, which is slow: {why}");
                    Ok(None)
                }
            }
        })?;
        let Some(id) = id.and_then(|id| <[u8; 128]>::try_from(id).ok()) else { return Ok(None) };
        let (began, limit) = (Instant::now(), parallel.start_timeout.duration());
        let go_on = || match ranks.control.fault() {
            Some(fault) => Err(Ended::Ranks(CommError::Aborted(fault))),
            None if began.elapsed() < limit => Ok(()),
            None => Err(Ended::Ranks(CommError::Start(format!(
                "NCCL has not connected all ranks within {} s; NCCL_DEBUG=INFO shows why, and \
                 parallel.transport = \"host\" does without it",
                limit.as_secs_f32()
            )))),
        };
        let member = self.member();
        let joined =
            NcclCommunicator::join(gpu.context(), &NcclId::from(id), member.rank, member.world_size, &go_on);
        match joined {
            Ok(communicator) => Ok(Some(communicator)),
            Err(Ended::Ranks(error)) => Err(error.into()),
            Err(Ended::Cuda(error)) => Err(refused(error)),
        }
    }

    /// The reason for which a rank cannot use NCCL, from what each has found.
    fn obstacle(&self, all: &[Result<String, String>]) -> Result<Option<String>, RunError> {
        let hosts = self.ranks.as_ref().map(|ranks| ranks.control.hosts()).unwrap_or_default();
        let place = |rank: usize| format!("rank {rank} ({})", hosts[rank]);
        if let Some((rank, why)) =
            all.iter().enumerate().find_map(|(rank, found)| Some((rank, found.as_ref().err()?)))
        {
            return Ok(Some(format!("{}: {why}", place(rank))));
        }
        match (1..all.len()).find(|rank| all[*rank] != all[0]) {
            None => Ok(None),
            Some(rank) => {
                let version = |rank: usize| all[rank].as_deref().unwrap_or_default();
                Err(RunError::Refused(format!(
                    "NCCL is {} on {}, but {} on {}; install the same release everywhere, or set \
                     parallel.transport = \"host\"",
                    version(0),
                    place(0),
                    version(rank),
                    place(rank)
                )))
            }
        }
    }
}

/// The error that ends the connection.
enum Ended {
    Ranks(CommError),
    Cuda(CudaError),
}

impl From<CudaError> for Ended {
    fn from(error: CudaError) -> Self {
        Ended::Cuda(error)
    }
}

/// Why NCCL cannot be used, with the places that were searched if it was not found.
fn missing(error: CudaError) -> String {
    let places = match &error {
        CudaError::Missing(missing) => format!(" (looked in {})", missing.library.places().join(", ")),
        _ => String::new(),
    };
    format!("{error}{places}")
}

fn requested(why: &str) -> RunError {
    RunError::Refused(format!("[parallel] transport = \"nccl\": {why}"))
}

fn refused(error: CudaError) -> RunError {
    RunError::Refused(format!(
        "{error}; NCCL_DEBUG=INFO shows more, and parallel.transport = \"host\" does without NCCL"
    ))
}
