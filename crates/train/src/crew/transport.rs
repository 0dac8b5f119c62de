//! The path on which GPUs exchange data: NCCL where all ranks have it, else host memory.

use super::{Crew, decoded, encoded};
use crate::engine::Processor;
use crate::error::RunError;
use std::time::Instant;
use xtrain_config::{ParallelConfig, Transport};
use xtrain_cuda::{CudaError, Installed, Library, NcclId};
use xtrain_distributed::{CommError, Groups};
use xtrain_runtime::{NcclGroups, groups_of_run};

impl Crew {
    /// NCCL's communicators between the GPUs of all ranks; `None` if collectives pass through host memory.
    /// All ranks agree, and rank 0 warns of the reason.
    ///
    /// # Errors
    /// NCCL is requested, and a rank cannot use it; ranks have different versions of it; the ranks are not
    /// connected within `parallel.start_timeout`.
    pub fn nccl(
        &self,
        processor: &Processor,
        parallel: &ParallelConfig,
    ) -> Result<Option<NcclGroups>, RunError> {
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
        let is_used = self.decide(|| {
            let all = all.iter().map(|found| decoded(found)).collect::<Result<Vec<_>, RunError>>()?;
            match (self.obstacle(&all)?, parallel.transport) {
                (None, _) => Ok(true),
                (Some(why), Transport::Nccl) => Err(requested(&why)),
                (Some(why), _) => {
                    tracing::warn!("collectives between GPUs pass through host memory, which is slow: {why}");
                    Ok(false)
                }
            }
        })?;
        if !is_used {
            return Ok(None);
        }
        let member = self.member();
        let kinds = groups_of_run(member.world_size, parallel.replicas);
        let ids = self.nccl_ids(&kinds)?;
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
        match NcclGroups::join(gpu.context(), member.rank, &kinds, &ids, &go_on) {
            Ok(groups) => Ok(Some(groups.naming(parallel.name_collectives))),
            Err(Ended::Ranks(error)) => Err(error.into()),
            Err(Ended::Cuda(error)) => Err(refused(error)),
        }
    }

    /// The id of this rank's group of each kind, which the first rank of the group makes.
    fn nccl_ids(&self, kinds: &[Groups]) -> Result<Vec<NcclId>, RunError> {
        let Some(ranks) = &self.ranks else { return Ok(Vec::new()) };
        let rank = self.member().rank;
        let make = |groups: &Groups| match groups.place(rank) {
            0 => Ok(NcclId::new().map_err(refused)?.bytes().to_vec()),
            _ => Ok(Vec::new()),
        };
        let own = kinds.iter().map(make).collect::<Result<Vec<Vec<u8>>, RunError>>()?;
        let gathered = ranks.control.gather(&encoded(&own)?)?;
        let all: Vec<Vec<Vec<u8>>> = self.decide(|| gathered.iter().map(|ids| decoded(ids)).collect())?;
        let of = |(kind, groups): (usize, &Groups)| {
            let first = groups.ranks(rank).next().unwrap_or(rank);
            let id = <[u8; 128]>::try_from(all[first][kind].as_slice());
            let malformed = |_| CommError::System(format!("rank {first} sent no id for NCCL"));
            Ok(NcclId::from(id.map_err(malformed)?))
        };
        kinds.iter().enumerate().map(of).collect()
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
