//! The variables of Hydra, the `mpiexec` of MPICH and of Intel MPI.
//!
//! `srun` sets `PMI_RANK` and `PMI_SIZE` too, and so do other launchers. The numbers of the processes of a
//! node are Hydra's alone.

use super::{chosen_port, mpi_address, mpi_place, port_of_name, unsupported, variables::Variables};
use crate::world::{World, WorldError};

pub(super) const NAME: &str = "MPICH or Intel MPI";

const NEEDED: [&str; 4] = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];

/// Names that the ranks of one `mpiexec` have in common: Intel's of the run, and those of batch jobs.
const COMMON_NAMES: [&str; 4] = ["I_MPI_HYDRA_UUID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"];

/// The port where no name is known: that of torch's examples. A second run that starts at the same moment on
/// the same node finds it in use, and says so.
const PORT: u16 = 29_500;

/// The place of this process, if Hydra's variables are set.
pub(super) fn world(variables: &Variables) -> Result<Option<World>, WorldError> {
    if !NEEDED.iter().any(|name| variables.has(name)) {
        return Ok(None);
    }
    let is_hydras = variables.has(NEEDED[2]) || variables.has(NEEDED[3]);
    if !is_hydras && (variables.has("SLURM_STEP_NUM_TASKS") || unsupported::is_named(variables)) {
        return Ok(None);
    }
    let world = mpi_place(NAME, variables, NEEDED)?;
    if world.rank.world_size == 1 {
        return Ok(Some(world));
    }
    let address = mpi_address(NAME, variables, world.spans_nodes(), "mpiexec -genv MASTER_ADDR ...")?;
    let name = COMMON_NAMES.iter().find_map(|name| variables.get(name));
    let port = chosen_port(variables)?.or(name.map(port_of_name)).unwrap_or(PORT);
    Ok(Some(World { address, port, ..world }))
}
