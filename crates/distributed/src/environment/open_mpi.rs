//! Open MPI's variables, which `mpirun` sets.

use super::{HIGH_PORTS, LOOPBACK, host_list, own_port, variables::Variables};
use crate::world::{World, WorldError};

const NAME: &str = "Open MPI";

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
    variables.need_all(NAME, &NEEDED)?;
    let world = World {
        rank: variables.needed(NAME, NEEDED[0])?,
        world_size: variables.needed(NAME, NEEDED[1])?,
        local_rank: variables.needed(NAME, NEEDED[2])?,
        local_world_size: variables.needed(NAME, NEEDED[3])?,
        address: LOOPBACK.to_owned(),
        port: port(variables)?,
    };
    Ok(Some(World { address: address(variables, &world)?, ..world }))
}

/// The address of rank 0, which Open MPI does not tell the ranks. In a job of Slurm, rank 0 is on the first
/// host of the job.
fn address(variables: &Variables, world: &World) -> Result<String, WorldError> {
    if let Some(address) = variables.get("MASTER_ADDR") {
        return Ok(address.to_owned());
    }
    if !world.spans_nodes() {
        return Ok(LOOPBACK.to_owned());
    }
    match variables.get("SLURM_JOB_NODELIST") {
        Some(list) => host_list::first(list),
        None => Err(WorldError(
            "Open MPI does not say where rank 0 is: set the first node's address, `mpirun -x MASTER_ADDR=...`"
                .to_owned(),
        )),
    }
}

/// A port that the ranks of one `mpirun` have in common, and that differs between runs. It depends on the
/// name that PMIx gives to the run.
fn port(variables: &Variables) -> Result<u16, WorldError> {
    if let Some(port) = own_port(variables)?.or(variables.number("MASTER_PORT")?) {
        return Ok(port);
    }
    let name = variables.get("PMIX_NAMESPACE").or(variables.get("OMPI_MCA_ess_base_jobid"));
    let name = name.ok_or_else(|| {
        let message = "Open MPI sets no PMIX_NAMESPACE to derive a port from: `mpirun -x MASTER_PORT=...`";
        WorldError(message.to_owned())
    })?;
    let hash = name.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    Ok(HIGH_PORTS.start + (hash % HIGH_PORTS.len() as u32) as u16)
}
