//! The environment in which a launcher starts the processes of a run: torchrun, Open MPI, MPICH, Intel MPI or
//! Slurm.
//!
//! Reading it is a pure function of the variables. A part of a launcher's variables is an error, never a run
//! of one process, and so are those of other launchers: a rank that trains alone is a worse surprise than a
//! message. Only a world of one process has no open question.

mod host_list;
mod hydra;
mod of_a_launch;
mod open_mpi;
mod slurm;
mod torchrun;
mod unsupported;
mod variables;

pub(crate) use of_a_launch::is_of_a_launch;
pub use variables::Variables;

use crate::world::{World, WorldError};
use std::fmt;
use std::ops::Range;
use xtrain_rank::Rank;

const LOOPBACK: &str = "127.0.0.1";

/// Ports that are derived from the number of a job. Linux gives ports from 32768 on to outgoing connections.
const HIGH_PORTS: Range<u16> = 20_000..30_000;

/// Variable with the process number of the [`RankLauncher`](crate::RankLauncher) that started a rank.
pub(crate) const LAUNCHER_VARIABLE: &str = "XTRAIN_LAUNCHER";

/// Variable with the soft limit on open files that the process had which started this one and raised it.
pub(crate) const OPEN_FILES_VARIABLE: &str = "XTRAIN_OPEN_FILES";

/// The program that started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// This program itself, which sets torchrun's variables.
    Xtrain,
    /// torchrun, or another program that sets its variables.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH or Intel MPI.
    Hydra,
    /// `srun` of Slurm.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Xtrain => "xtrain",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => open_mpi::NAME,
            Launcher::Hydra => hydra::NAME,
            Launcher::Slurm => slurm::NAME,
        })
    }
}

/// The place that a launcher gave to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The launcher.
    pub launcher: Launcher,
    /// The place of this process.
    pub world: World,
}

impl Environment {
    /// Reads the variables of the launchers. `None` for a process that trains alone: no launcher started it,
    /// or it is the only one.
    ///
    /// All six variables of torchrun decide, whatever else is set: `torchrun` runs in a step of Slurm. Then
    /// come Open MPI, MPICH and Slurm, because in a job of Slurm `mpirun` starts its daemons with `srun`,
    /// whose ranks number nodes. Some of torchrun's variables must agree with them.
    ///
    /// # Errors
    /// A launcher's variables are incomplete, malformed, or do not agree; an unsupported launcher started
    /// several processes.
    pub fn detect(variables: &Variables) -> Result<Option<Self>, WorldError> {
        let environment = match torchrun::world(variables)? {
            Some(world) if variables.has(LAUNCHER_VARIABLE) => {
                Some(Environment { launcher: Launcher::Xtrain, world })
            }
            Some(world) => Some(Environment { launcher: Launcher::Torchrun, world }),
            None => Environment::of_other_launchers(variables)?,
        };
        let Some(environment) = environment else { return Ok(None) };
        let world = environment.world.checked()?;
        Ok((world.rank.world_size > 1).then_some(Environment { world, ..environment }))
    }

    fn of_other_launchers(variables: &Variables) -> Result<Option<Self>, WorldError> {
        type Read = fn(&Variables) -> Result<Option<World>, WorldError>;
        let launchers: [(Launcher, Read); 3] = [
            (Launcher::OpenMpi, open_mpi::world),
            (Launcher::Hydra, hydra::world),
            (Launcher::Slurm, slurm::world),
        ];
        let mut found = None;
        for (launcher, read) in launchers {
            if let Some(world) = read(variables)? {
                found = Some(Environment { launcher, world });
                break;
            }
        }
        if !matches!(&found, Some(Environment { launcher: Launcher::OpenMpi | Launcher::Hydra, .. })) {
            unsupported::refuse(variables, found.as_ref().map(|found| &found.world))?;
        }
        torchrun::check_agreement(variables, found.as_ref())?;
        Ok(found)
    }

    /// The number of the GPU that this rank takes, among the `visible` ones: the local rank. Slurm can give
    /// each task a GPU of its own (`--gpus-per-task=1`), which is then the only one that the task sees.
    ///
    /// CUDA_VISIBLE_DEVICES stays as it is: numbers count the GPUs that it leaves visible.
    ///
    /// # Errors
    /// There are fewer GPUs than the local rank needs.
    pub fn gpu(&self, visible: usize) -> Result<usize, WorldError> {
        let World { rank: Rank { index: rank, .. }, local_rank, .. } = self.world;
        let Rank { index: local_rank, world_size: local_world_size } = local_rank;
        if self.launcher == Launcher::Slurm && visible == 1 {
            return Ok(0);
        }
        if local_rank < visible {
            return Ok(local_rank);
        }
        Err(WorldError(format!(
            "rank {rank} needs GPU {local_rank} of its node, but sees {visible}; {} started {local_world_size} \
             processes on this node: start one for each GPU, or check CUDA_VISIBLE_DEVICES",
            self.launcher
        )))
    }
}

/// The variables that NCCL reads, for the log of a run.
pub fn nccl_variables(variables: &Variables) -> Vec<(String, String)> {
    variables.with_prefix("NCCL_").map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The port that the user chose for a launcher that knows none.
fn chosen_port(variables: &Variables) -> Result<Option<u16>, WorldError> {
    Ok(variables.number("XTRAIN_PORT")?.or(variables.number("MASTER_PORT")?))
}

/// The place that four variables give: rank, world size, local rank and local world size. Address and port
/// are left to the caller.
///
/// # Errors
/// A variable is not set or not a number.
fn place(variables: &Variables, names: [&str; 4]) -> Result<World, WorldError> {
    let [rank, world_size, local_rank, local_world_size] = names;
    let rank_of = |index: &str, world_size: &str| {
        Ok(Rank { index: variables.needed(index)?, world_size: variables.needed(world_size)? })
    };
    let (rank, local_rank) = (rank_of(rank, world_size)?, rank_of(local_rank, local_world_size)?);
    Ok(World { rank, local_rank, ..World::single() })
}

/// As [`place`], for an MPI launcher. In a world of one, its size is enough.
fn mpi_place(launcher: &str, variables: &Variables, names: [&str; 4]) -> Result<World, WorldError> {
    if variables.is_world_of_one(names[0], names[1])? {
        return Ok(World::single());
    }
    variables.need_all(launcher, &names)?;
    place(variables, names)
}

/// A port that all processes derive from a name that they have in common.
fn port_of_name(name: &str) -> u16 {
    let hash = name.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    HIGH_PORTS.start + (hash % HIGH_PORTS.len() as u32) as u16
}

/// The address of rank 0 for MPI launchers, which do not set it. In a job of Slurm, rank 0 is on the first
/// host of the job. `how` says how to pass a variable to all ranks.
fn mpi_address(
    launcher: &str,
    variables: &Variables,
    spans_nodes: bool,
    how: &str,
) -> Result<String, WorldError> {
    if let Some(address) = variables.get("MASTER_ADDR") {
        return Ok(address.to_owned());
    }
    if !spans_nodes {
        return Ok(LOOPBACK.to_owned());
    }
    match variables.get("SLURM_JOB_NODELIST") {
        Some(list) => host_list::first(list),
        None => Err(WorldError(format!(
            "{launcher} does not say where rank 0 is: set the first node's address, `{how}`"
        ))),
    }
}

#[cfg(test)]
mod tests;
