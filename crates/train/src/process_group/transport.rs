//! The path on which GPUs exchange data: copies to each other's memory where NVLink connects all, else NCCL
//! where all ranks have it, else host memory.

use super::{ProcessGroup, decoded, encoded};
use crate::error::RunError;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use xtrain_config::{ParallelConfig, Transport};
use xtrain_cuda::{CudaDevice, CudaError, Gpu, Installed, Library, NcclId};
use xtrain_distributed::CommError;
use xtrain_program::Reduce;
use xtrain_runtime::{MessagePair, NcclGroups, groups_of_run, message_pairs};
use xtrain_step::engine::{DataPath, Processor};

/// The paths, before ranks are connected.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum TransportChoice {
    Host,
    Copies,
    Nccl,
}

/// The paths that a rank can use. An error is the reason for which a path cannot be used.
#[derive(Serialize, Deserialize)]
struct UsablePaths {
    /// Copies.
    copies: Result<(), String>,
    /// NCCL, with its version.
    nccl: Result<String, String>,
}

impl ProcessGroup {
    /// The path between the GPUs of all ranks. All ranks agree, and rank 0 warns of the reason if data pass
    /// through host memory.
    ///
    /// # Errors
    /// A path is requested that a rank cannot use; ranks have different versions of NCCL; the ranks are not
    /// connected within `parallel.start_timeout`.
    pub fn data_path(&self, processor: &Processor, parallel: &ParallelConfig) -> Result<DataPath, RunError> {
        let Some(ranks) = &self.ranks else { return Ok(DataPath::Host) };
        let on_gpus = matches!(processor, Processor::Cuda(_));
        check(parallel, on_gpus, ranks.control.world().spans_nodes())?;
        let gpu = match (processor, parallel.transport) {
            (Processor::Cpu, _) | (_, Transport::Host) => return Ok(DataPath::Host),
            (_, transport) if parallel.chunks(ranks.control.world().rank.world_size) > 1 => {
                let why = "messages of parallel.pipeline_chunks do not go around the stages by it yet";
                if transport != Transport::Auto {
                    return Err(requested(transport, why));
                }
                tracing::warn!("collectives between GPUs pass through host memory, which is slow: {why}");
                return Ok(DataPath::Host);
            }
            (Processor::Cuda(gpu), _) => gpu,
        };
        let nccl = Installed::open(Library::Nccl).map(|found| found.version).map_err(missing);
        let found = UsablePaths { copies: self.copies(gpu)?, nccl };
        let all = ranks.control.gather(&encoded(&found)?)?;
        let choice = self.decide(|| {
            let all =
                all.iter().map(|found| decoded(found)).collect::<Result<Vec<UsablePaths>, RunError>>()?;
            self.choose(&all, parallel)
        })?;
        match choice {
            TransportChoice::Host => Ok(DataPath::Host),
            TransportChoice::Copies => Ok(DataPath::Copies { names: parallel.name_collectives }),
            TransportChoice::Nccl => Ok(DataPath::Nccl(self.nccl(gpu, parallel)?)),
        }
    }

    /// The path, from what each rank has found.
    fn choose(&self, all: &[UsablePaths], parallel: &ParallelConfig) -> Result<TransportChoice, RunError> {
        let hosts = self.ranks.as_ref().map(|ranks| ranks.control.hosts()).unwrap_or_default();
        let of_rank = |(rank, why): (usize, &String)| format!("rank {rank} ({}): {why}", hosts[rank]);
        let by_nccl = (parallel.reduce == Reduce::Fast).then(|| {
            "it does not add gradients, and parallel.reduce = \"fast\" asks for NCCL's sums".to_owned()
        });
        let mut errors =
            all.iter().enumerate().filter_map(|(n, found)| Some((n, found.copies.as_ref().err()?)));
        let no_copies = by_nccl.or_else(|| errors.next().map(of_rank));
        match (no_copies, parallel.transport) {
            (None, Transport::Auto | Transport::Copy) => return Ok(TransportChoice::Copies),
            (Some(why), Transport::Copy) => return Err(requested(Transport::Copy, &why)),
            (Some(why), _) => tracing::debug!("GPUs do not copy to each other's memory: {why}"),
            (None, _) => {}
        }
        match (self.obstacle(all)?, parallel.transport) {
            (None, _) => Ok(TransportChoice::Nccl),
            (Some(why), Transport::Nccl) => Err(requested(Transport::Nccl, &why)),
            (Some(why), _) => {
                tracing::warn!("collectives between GPUs pass through host memory, which is slow: {why}");
                Ok(TransportChoice::Host)
            }
        }
    }

    /// An error with the reason if this rank's GPU cannot copy to the memory of all others.
    fn copies(&self, gpu: &Gpu) -> Result<Result<(), String>, RunError> {
        let Some(ranks) = &self.ranks else { return Ok(Ok(())) };
        let uuids = ranks.control.gather(&encoded(&gpu.info().uuid)?)?;
        let uuids: Vec<[u8; 16]> =
            self.decide(|| uuids.iter().map(|uuid| decoded(uuid)).collect::<Result<_, RunError>>())?;
        if ranks.control.world().spans_nodes() {
            return Ok(Err("the run has ranks on other hosts".to_owned()));
        }
        let find = || -> Result<Result<(), String>, CudaError> {
            let own = gpu.context().device();
            if !own.shares_memory()? {
                return Ok(Err("the driver does not share the GPU's memory between processes".to_owned()));
            }
            let visible = CudaDevice::all()?;
            for (rank, uuid) in uuids.iter().enumerate().filter(|(_, uuid)| **uuid != gpu.info().uuid) {
                let is_this = |device: &&CudaDevice| device.info().is_ok_and(|info| info.uuid == *uuid);
                match visible.iter().find(is_this) {
                    None => return Ok(Err(format!("the GPU of rank {rank} is not visible to it"))),
                    Some(peer) if own.is_linked_to(*peer)? => {}
                    Some(_) => {
                        return Ok(Err(format!("no NVLink connects its GPU with that of rank {rank}")));
                    }
                }
            }
            let sharing = uuids.iter().filter(|uuid| **uuid == gpu.info().uuid).count();
            Ok(if sharing > 1 { Err("ranks share a GPU".to_owned()) } else { Ok(()) })
        };
        Ok(find().unwrap_or_else(|error| Err(error.to_string())))
    }

    /// NCCL's communicators between the GPUs of all ranks.
    fn nccl(&self, gpu: &Gpu, parallel: &ParallelConfig) -> Result<NcclGroups, RunError> {
        let Some(ranks) = &self.ranks else { unreachable!("ranks have chosen NCCL") };
        let rank = self.rank();
        let of_run = parallel.parallel(rank, 1);
        let (kinds, pairs) = (groups_of_run(&of_run), message_pairs(&of_run));
        let of_groups = kinds.iter().map(|groups| groups.ranks(rank.index).next().unwrap_or(rank.index));
        let firsts: Vec<usize> = of_groups.chain(pairs.iter().map(|pair| pair.from)).collect();
        let ids = self.nccl_ids(&firsts)?;
        let (ids, of_pairs) = ids.split_at(kinds.len());
        let pairs: Vec<(MessagePair, NcclId)> = pairs.into_iter().zip(of_pairs.iter().copied()).collect();
        let (began, limit) = (Instant::now(), parallel.start_timeout.duration());
        let poll = || match ranks.control.fault() {
            Some(fault) => Err(Ended::Ranks(CommError::Aborted(fault))),
            None if began.elapsed() < limit => Ok(()),
            None => Err(Ended::Ranks(CommError::Start(format!(
                "NCCL has not connected all ranks within {} s; NCCL_DEBUG=INFO shows why, and \
                 parallel.transport = \"host\" does without it",
                limit.as_secs_f32()
            )))),
        };
        let joined = NcclGroups::join(gpu.context(), rank.index, &kinds, ids, &poll);
        match joined.and_then(|groups| groups.with_messages(gpu.context(), rank.index, &pairs, &poll)) {
            Ok(groups) => Ok(groups.naming(parallel.name_collectives)),
            Err(Ended::Ranks(error)) => Err(error.into()),
            Err(Ended::Cuda(error)) => Err(refused(error)),
        }
    }

    /// The id of each of the run's communicators, as many on each rank. The rank `firsts` makes it.
    fn nccl_ids(&self, firsts: &[usize]) -> Result<Vec<NcclId>, RunError> {
        let Some(ranks) = &self.ranks else { return Ok(Vec::new()) };
        let rank = self.rank().index;
        let make = |first: &usize| match *first == rank {
            true => Ok(NcclId::new().map_err(refused)?.bytes().to_vec()),
            false => Ok(Vec::new()),
        };
        let own = firsts.iter().map(make).collect::<Result<Vec<Vec<u8>>, RunError>>()?;
        let gathered = ranks.control.gather(&encoded(&own)?)?;
        let all: Vec<Vec<Vec<u8>>> = self.decide(|| gathered.iter().map(|ids| decoded(ids)).collect())?;
        let of = |(number, &first): (usize, &usize)| {
            let id = <[u8; 128]>::try_from(all[first][number].as_slice());
            let malformed = |_| CommError::System(format!("rank {first} sent no id for NCCL"));
            Ok(NcclId::from(id.map_err(malformed)?))
        };
        firsts.iter().enumerate().map(of).collect()
    }

    /// The reason for which a rank cannot use NCCL, from what each has found.
    fn obstacle(&self, all: &[UsablePaths]) -> Result<Option<String>, RunError> {
        let all: Vec<_> = all.iter().map(|found| &found.nccl).collect();
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

/// Refuses a `parallel.transport` that several ranks cannot use, wherever they run: the ranks of a run, and
/// those of a plan.
///
/// # Errors
/// The path is between GPUs and ranks are on CPUs, or within a host and ranks are on several.
pub fn check(parallel: &ParallelConfig, on_gpus: bool, spans_nodes: bool) -> Result<(), RunError> {
    let why = match parallel.transport {
        Transport::Copy | Transport::Nccl if !on_gpus => {
            "ranks on the CPU have no GPU; leave it out, or train on GPUs"
        }
        Transport::Copy if spans_nodes => {
            "GPUs copy to the memory of those on their own host, and the run has several hosts; leave it out, or use \"nccl\""
        }
        _ => return Ok(()),
    };
    Err(requested(parallel.transport, why))
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

fn requested(transport: Transport, why: &str) -> RunError {
    RunError::Refused(format!("[parallel] transport = {:?}: {why}", transport.name()))
}

fn refused(error: CudaError) -> RunError {
    RunError::Refused(format!(
        "{error}; NCCL_DEBUG=INFO shows more, and parallel.transport = \"host\" does without NCCL"
    ))
}
