//! The processes that train one run.
//!
//! Rank 0 decides, reports and writes. The other ranks follow its decisions and compute. All ranks call the
//! methods of a group in the same order, because each is an exchange between all of them. In a group of one
//! process, each does what a program without ranks would do.
//!
//! Nothing that only one rank sees decides anything: no clock, no signal, and not how far results have come.

mod facts;
mod folder;
mod settings;
pub mod transport;

pub(crate) use facts::Facts;

use crate::error::RunError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use xtrain_config::Device;
use xtrain_distributed::{
    Alone, Cause, Channel, CommError, Communicator, Control, Environment, Fault, Secret, StartOptions,
    TcpCommunicator,
};
use xtrain_evaluation::Gather;
use xtrain_rank::Rank;
use xtrain_runtime::EngineError;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;

/// Time-out of collectives until the first step of a process is done, in which it compiles kernels.
const FIRST_STEP: Duration = Duration::from_secs(600);

/// Time in which rank 0 reports an error that all ranks have.
const VERDICT: Duration = Duration::from_secs(2);

/// The processes that train one run, as one of them sees them.
#[derive(Clone, Debug, Default)]
pub struct ProcessGroup {
    ranks: Option<Arc<JoinedRanks>>,
}

#[derive(Debug)]
struct JoinedRanks {
    environment: Environment,
    control: Arc<Control>,
    /// For the collectives of programs.
    programs: Arc<TcpCommunicator>,
    /// For the messages that ranks exchange between steps.
    messages: TcpCommunicator,
    /// Time-out of a step.
    timeout: Duration,
}

impl ProcessGroup {
    /// A process that trains alone.
    pub fn alone() -> ProcessGroup {
        ProcessGroup::default()
    }

    /// Joins the other processes of `environment`, and returns when all are there. `build` names the version
    /// and the sources of this program, which must be those of all ranks. A step of theirs may take `timeout`
    /// without progress. `ended` is called on a thread of its own if another rank ends the run.
    ///
    /// # Errors
    /// A rank does not come in time, has another build of this program, or cannot be reached.
    pub fn join(
        environment: Environment,
        secret: &Secret,
        start: StartOptions,
        build: &str,
        timeout: Duration,
        ended: impl FnOnce(Fault) + Send + 'static,
    ) -> Result<ProcessGroup, RunError> {
        if environment.world.rank.world_size == 1 {
            return Ok(ProcessGroup::alone());
        }
        let control = Arc::new(Control::start(&environment.world, secret, start)?);
        let connected = || -> Result<_, CommError> {
            control.watch(ended)?;
            control.handshake(&[("build of xtrain".to_owned(), build.to_owned())])?;
            let first_step = FIRST_STEP.max(timeout);
            let programs = Arc::new(TcpCommunicator::connect(&control, first_step)?);
            Ok((programs, TcpCommunicator::connect(&control, first_step)?))
        };
        let (programs, messages) = connected().map_err(|error| reported_to_all(&control, error.into()))?;
        Ok(ProcessGroup {
            ranks: Some(Arc::new(JoinedRanks { environment, control, programs, messages, timeout })),
        })
    }

    /// This process among those of the run.
    pub fn rank(&self) -> Rank {
        self.ranks.as_ref().map_or(Rank::ALONE, |ranks| ranks.environment.world.rank)
    }

    /// True for rank 0, which decides, reports and writes.
    pub fn is_first(&self) -> bool {
        self.rank().is_first()
    }

    /// True for a process that trains alone.
    pub fn is_alone(&self) -> bool {
        self.ranks.is_none()
    }

    /// The number of processes of the run on this node.
    pub fn processes_here(&self) -> usize {
        self.ranks.as_ref().map_or(1, |ranks| ranks.environment.world.local_rank.world_size)
    }

    /// The index of the GPU of this process among those that it sees; 0 for a CPU.
    ///
    /// # Errors
    /// There are fewer GPUs than ranks of this node.
    pub fn gpu(&self, device: Device) -> Result<usize, RunError> {
        let visible = if device == Device::Cpu { 0 } else { Processor::visible_gpus() };
        let ranks = self.ranks.as_ref().filter(|_| visible > 0);
        let index = ranks.map_or(Ok(0), |ranks| ranks.environment.gpu(visible));
        index.map_err(|error| RunError::Refused(error.to_string()))
    }

    /// The communicator for the collectives of programs.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        match &self.ranks {
            None => Arc::new(Alone),
            Some(ranks) => ranks.programs.clone(),
        }
    }

    /// A channel for calls of another thread. All ranks open their channels in the same order.
    pub fn channel(&self) -> Arc<dyn Channel> {
        match &self.ranks {
            None => Arc::new(Alone),
            Some(ranks) => Arc::new(ranks.control.channel()),
        }
    }

    /// The result of `decide` on rank 0, on all ranks. Others wait for it, however long it takes.
    ///
    /// # Errors
    /// `decide` failed, or the run has ended.
    pub(crate) fn decide<T: Serialize + DeserializeOwned>(
        &self,
        decide: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let Some(ranks) = &self.ranks else { return decide() };
        if self.is_first() {
            let decided = decide()?;
            ranks.control.broadcast(&encoded(&decided)?)?;
            return Ok(decided);
        }
        decoded(&ranks.control.broadcast(&[])?)
    }

    /// Runs `work` on rank 0, then on the others, which receive `message`, computed from rank 0's result.
    ///
    /// # Errors
    /// `work` failed, or the run has ended.
    pub fn after_first<T, N: Serialize + DeserializeOwned>(
        &self,
        work: impl FnOnce(Option<N>) -> Result<T, RunError>,
        message: impl FnOnce(&mut T) -> N,
    ) -> Result<T, RunError> {
        let Some(ranks) = &self.ranks else { return work(None) };
        if !self.is_first() {
            return work(Some(decoded(&ranks.control.broadcast(&[])?)?));
        }
        let mut done = work(None)?;
        ranks.control.broadcast(&encoded(&message(&mut done))?)?;
        Ok(done)
    }

    /// Runs `work` on one rank of each node, then on the others: what the first has written into the node's
    /// cache, the others find there. `None` on all ranks if it fails on any with an error that `is_shared`
    /// accepts.
    ///
    /// # Errors
    /// `work` failed with another error, or the run has ended.
    pub(crate) fn after_first_of_node<T>(
        &self,
        mut work: impl FnMut() -> Result<T, RunError>,
        is_shared: impl Fn(&RunError) -> bool,
    ) -> Result<Option<T>, RunError> {
        let is_first = self.ranks.as_ref().is_none_or(|ranks| ranks.environment.world.local_rank.index == 0);
        let mut done = None;
        for is_turn_of_first in [true, false] {
            if is_first == is_turn_of_first {
                done = match work() {
                    Err(error) if is_shared(&error) => None,
                    worked => Some(worked?),
                };
            }
            // The others have nothing to show in the turn of the first.
            let is_cut = done.is_none() && (is_first || !is_turn_of_first);
            if self.any(is_cut)? {
                return Ok(None);
            }
        }
        Ok(done)
    }

    /// True if `own` is true on any rank. Waits for all, however long they take.
    ///
    /// # Errors
    /// The run has ended.
    pub(crate) fn any(&self, own: bool) -> Result<bool, RunError> {
        let Some(ranks) = &self.ranks else { return Ok(own) };
        let all = ranks.control.gather(&[u8::from(own)])?;
        let any = u8::from(all.concat().contains(&1));
        Ok(ranks.control.broadcast(&[any])? == [1])
    }

    /// Waits for all ranks, however long they take.
    ///
    /// # Errors
    /// The run has ended.
    pub fn barrier(&self) -> Result<(), RunError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        Ok(ranks.control.barrier()?)
    }

    /// The messages of all ranks, in their order. All have the same length.
    ///
    /// # Errors
    /// The run has ended; a rank does not come within the time of a step.
    pub(crate) fn gather(&self, own: &[u64]) -> Result<Vec<Vec<u64>>, RunError> {
        Ok(Gather::gather(self, own)?)
    }

    /// From now on, a step may take only the time that the run file allows.
    pub(crate) fn first_step_is_done(&self) {
        if let Some(ranks) = &self.ranks {
            ranks.programs.set_timeout(ranks.timeout);
            ranks.messages.set_timeout(ranks.timeout);
        }
    }

    /// Tells the other ranks of the error that ends this one, and returns the first cause of the end: this
    /// error, or that of the rank that failed first.
    pub fn fail(&self, error: RunError) -> RunError {
        let Some(ranks) = &self.ranks else { return error };
        if matches!(error, RunError::Diverged(_)) && !self.is_first() {
            // All ranks see the same losses, and rank 0 reports them.
            let _ = ranks.control.wait_for_fault(VERDICT);
        }
        reported_to_all(&ranks.control, error)
    }

    /// Ends the run in order, when all ranks have finished.
    ///
    /// # Errors
    /// A rank has failed.
    pub fn finish(&self) -> Result<(), RunError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        Ok(ranks.control.finish()?)
    }
}

impl Gather for ProcessGroup {
    fn rank(&self) -> Rank {
        ProcessGroup::rank(self)
    }

    fn gather(&self, own: &[u64]) -> Result<Vec<Vec<u64>>, CommError> {
        let Some(ranks) = &self.ranks else { return Ok(vec![own.to_vec()]) };
        let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut all = vec![0; bytes.len() * self.rank().world_size];
        ranks.messages.all_gather(ranks.messages.world(), 0, &bytes, &mut all)?;
        let all: Vec<u64> = all.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Ok(all.chunks(own.len()).map(<[u64]>::to_vec).collect())
    }
}

/// As [`ProcessGroup::fail`].
fn reported_to_all(control: &Control, error: RunError) -> RunError {
    if let Some(fault) = fault_of(&error) {
        return RunError::Ranks(CommError::Aborted(fault.clone()));
    }
    let cause = if error.is_users() { Cause::User } else { Cause::Failure };
    let fault = control.abort(cause, &error.to_string());
    if fault.rank != control.world().rank.index { RunError::Ranks(CommError::Aborted(fault)) } else { error }
}

/// The fault that ended the run, if this error is its consequence.
fn fault_of(error: &RunError) -> Option<&Fault> {
    let communication = match error {
        RunError::Ranks(error) | RunError::Learn(LearnError::Collective(error)) => error,
        RunError::Learn(LearnError::Engine(
            EngineError::Collective { error, .. } | EngineError::Communication(error),
        )) => error,
        _ => return None,
    };
    match communication {
        CommError::Aborted(fault) => Some(fault),
        _ => None,
    }
}

fn encoded(value: &impl Serialize) -> Result<Vec<u8>, RunError> {
    serde_json::to_vec(value).map_err(malformed)
}

fn decoded<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RunError> {
    serde_json::from_slice(bytes).map_err(malformed)
}

fn malformed(error: serde_json::Error) -> RunError {
    CommError::System(format!("a decision of rank 0 cannot be sent: {error}")).into()
}

#[cfg(test)]
pub(crate) mod tests;
