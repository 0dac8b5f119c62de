//! Open MPI's variables, which `mpirun` sets.

use super::{chosen_port, mpi_address, mpi_place, port_of_name, variables::Variables};
use crate::world::{World, WorldError};

pub(super) const NAME: &str = "Open MPI";

const NEEDED: [&str; 4] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];

/// The place of this process, if Open MPI's variables are set.
pub(super) fn world(variables: &Variables) -> Result<Option<World>, WorldError> {
    if !NEEDED.iter().any(|name| variables.has(name)) {
        return Ok(None);
    }
    let world = mpi_place(NAME, variables, NEEDED)?;
    if world.rank.world_size == 1 {
        return Ok(Some(world));
    }
    let address = mpi_address(NAME, variables, world.spans_nodes(), "mpirun -x MASTER_ADDR=...")?;
    Ok(Some(World { address, port: port(variables)?, ..world }))
}

/// A port that the ranks of one `mpirun` have in common, and that differs between runs. It depends on the
/// name that PMIx gives to the run.
fn port(variables: &Variables) -> Result<u16, WorldError> {
    if let Some(port) = chosen_port(variables)? {
        return Ok(port);
    }
    let name = variables.get("PMIX_NAMESPACE").or(variables.get("OMPI_MCA_ess_base_jobid"));
    let message = "Open MPI sets no PMIX_NAMESPACE to derive a port from: `mpirun -x MASTER_PORT=...`";
    name.map(port_of_name).ok_or_else(|| WorldError(message.to_owned()))
}
