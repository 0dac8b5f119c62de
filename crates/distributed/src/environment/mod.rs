//! The environment in which a launcher starts the processes of a run: torchrun, Open MPI or Slurm.
//!
//! Reading it is a pure function of the variables. A part of a launcher's variables is an error, never a run
//! of one process: a rank that trains alone is a worse surprise than a message.

mod host_list;
mod open_mpi;
mod slurm;
mod torchrun;
mod variables;

pub use variables::Variables;

use crate::world::{World, WorldError};
use std::fmt;
use std::ops::Range;

const LOOPBACK: &str = "127.0.0.1";

/// Ports that are derived from the number of a job. Linux gives ports from 32768 on to outgoing connections.
const HIGH_PORTS: Range<u16> = 20_000..30_000;

/// The program that started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, or another program that sets its variables.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `srun` of Slurm.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Slurm => "Slurm",
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
    /// Reads the variables of the launchers, in this order: torchrun, Open MPI, Slurm. Later ones can start
    /// earlier ones: `torchrun` runs in a step of Slurm, and in a job of Slurm `mpirun` starts its daemons
    /// with `srun`, whose ranks number nodes. `None` if no launcher started this process.
    ///
    /// # Errors
    /// A launcher's variables are incomplete, malformed, or do not agree.
    pub fn detect(variables: &Variables) -> Result<Option<Self>, WorldError> {
        type Read = fn(&Variables) -> Result<Option<World>, WorldError>;
        let launchers: [(Launcher, Read); 3] = [
            (Launcher::Torchrun, torchrun::world),
            (Launcher::OpenMpi, open_mpi::world),
            (Launcher::Slurm, slurm::world),
        ];
        for (launcher, read) in launchers {
            if let Some(world) = read(variables)? {
                return Ok(Some(Environment { launcher, world: world.checked()? }));
            }
        }
        Ok(None)
    }

    /// The number of the GPU that this rank takes, among the `visible` ones: the local rank. Slurm can give
    /// each task a GPU of its own (`--gpus-per-task=1`), which is then the only one that the task sees.
    ///
    /// CUDA_VISIBLE_DEVICES stays as it is: numbers count the GPUs that it leaves visible.
    ///
    /// # Errors
    /// There are fewer GPUs than the local rank needs.
    pub fn gpu(&self, visible: usize) -> Result<usize, WorldError> {
        let World { rank, local_rank, local_world_size, .. } = self.world;
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

/// The port that the user chose.
fn own_port(variables: &Variables) -> Result<Option<u16>, WorldError> {
    variables.number("XTRAIN_PORT")
}

#[cfg(test)]
mod tests;
