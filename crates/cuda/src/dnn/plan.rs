//! Plans: graphs with the engine that computes them.

use super::descriptor::{Descriptor, Dnn, check};
use super::graph::{Data, GraphBuilder};
use crate::capture_lock;
use crate::error::CudaError;
use crate::ffi::cudnn::{
    CudnnDescriptor, HEUR_MODE_A, MOST_NOTES, NOTE_NONDETERMINISTIC, attribute, kind, ty,
};
use crate::memory::DevicePtr;
use crate::stream::Stream;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, PoisonError};

/// The number of proposed engines that are tried, best first.
const MOST_ENGINES: usize = 8;

impl GraphBuilder {
    /// Plans the graph for the first engine that needs at most `workspace_bytes` and, if `deterministic`,
    /// computes the same bits in every run. Planning takes a good part of a second; one plan serves all
    /// tensors of these shapes.
    ///
    /// # Errors
    /// If the library has no such engine.
    pub(crate) fn plan(self, workspace_bytes: usize, deterministic: bool) -> Result<GraphPlan, CudaError> {
        let dnn = self.dnn.clone();
        // Timed work would wait for the handle.
        let _no_capture = capture_lock::exclude_capture();
        let _running = dnn.running.lock().unwrap_or_else(PoisonError::into_inner);
        let graph = Descriptor::new(&dnn, kind::OPERATION_GRAPH)?;
        let operations: Vec<&Descriptor> = self.operations.iter().map(|(_, op)| op).collect();
        graph.set_descriptors(attribute::GRAPH_OPS, &operations)?;
        graph.set(attribute::GRAPH_HANDLE, ty::HANDLE, &[dnn.handle])?;
        let graph = graph.finalize()?;
        let heuristic = Descriptor::new(&dnn, kind::ENGINE_HEURISTIC)?;
        heuristic.set_descriptors(attribute::HEURISTIC_GRAPH, &[&graph])?;
        heuristic.set_int(attribute::HEURISTIC_MODE, ty::HEURISTIC_MODE, HEUR_MODE_A)?;
        let heuristic = heuristic.finalize()?;
        let configs = (0..MOST_ENGINES)
            .map(|_| Descriptor::new(&dnn, kind::ENGINE_CONFIG))
            .collect::<Result<Vec<_>, _>>()?;
        let mut handles: Vec<CudnnDescriptor> = configs.iter().map(|c| c.handle).collect();
        let count = heuristic.get(attribute::HEURISTIC_RESULTS, ty::DESCRIPTOR, &mut handles)?;
        let mut refusal = None;
        for config in configs.into_iter().take(count) {
            match plan_engine(&dnn, config, workspace_bytes, deterministic) {
                Ok(plan) => return Ok(GraphPlan { plan, _graph: graph, builder: self }),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        Err(refusal.unwrap_or_else(|| no_engine("the heuristics propose none")))
    }
}

fn no_engine(why: &str) -> CudaError {
    CudaError::Library { call: "cuDNN", text: format!("no engine for this graph: {why}") }
}

/// A plan for the engine of `config`.
///
/// # Errors
/// If the engine exceeds the workspace or is not deterministic although it must be.
fn plan_engine(
    dnn: &Arc<Dnn>,
    config: Descriptor,
    workspace_bytes: usize,
    deterministic: bool,
) -> Result<Descriptor, CudaError> {
    if deterministic {
        let engine = Descriptor::new(dnn, kind::ENGINE)?;
        config.get(attribute::CONFIG_ENGINE, ty::DESCRIPTOR, &mut [engine.handle])?;
        let mut notes = [-1 as c_int; MOST_NOTES];
        let count = engine.get(attribute::ENGINE_NUMERICAL_NOTE, ty::NUMERICAL_NOTE, &mut notes)?;
        if notes[..count].contains(&NOTE_NONDETERMINISTIC) {
            return Err(no_engine("it adds in an order of its own"));
        }
    }
    let plan = Descriptor::new(dnn, kind::EXECUTION_PLAN)?;
    plan.set_descriptors(attribute::PLAN_CONFIG, &[&config])?;
    plan.set(attribute::PLAN_HANDLE, ty::HANDLE, &[dnn.handle])?;
    let plan = plan.finalize()?;
    let mut bytes = [0i64];
    plan.get(attribute::PLAN_WORKSPACE_SIZE, ty::INT64, &mut bytes)?;
    if bytes[0] > workspace_bytes as i64 {
        return Err(no_engine(&format!("it needs {} bytes, not {workspace_bytes}", bytes[0])));
    }
    Ok(plan)
}

/// A planned graph.
pub(crate) struct GraphPlan {
    plan: Descriptor,
    _graph: Descriptor,
    /// Owns the numbers that runs read.
    builder: GraphBuilder,
}

/// A planned graph with the addresses of its tensors.
pub(crate) struct BoundGraph {
    graph: Arc<GraphPlan>,
    pack: Descriptor,
}

impl GraphPlan {
    /// The graph over tensors at these addresses, with its workspace.
    ///
    /// # Panics
    /// If a tensor's index is not among `addresses`: a bug of the code that built the graph.
    pub(crate) fn bind(
        self: &Arc<Self>,
        addresses: &[DevicePtr],
        workspace: DevicePtr,
    ) -> Result<BoundGraph, CudaError> {
        let pack = Descriptor::new(&self.builder.dnn, kind::VARIANT_PACK)?;
        let (mut ids, mut pointers) = (Vec::new(), Vec::new());
        for (id, (_, data, _)) in self.builder.tensors.iter().enumerate() {
            let pointer = match data {
                Data::Virtual => continue,
                Data::At(index) => addresses[*index].0 as *mut c_void,
                Data::Value(value) => std::ptr::from_ref(&**value).cast_mut().cast::<c_void>(),
            };
            ids.push(id as i64);
            pointers.push(pointer);
        }
        pack.set(attribute::PACK_UNIQUE_IDS, ty::INT64, &ids)?;
        pack.set(attribute::PACK_DATA_POINTERS, ty::VOID_PTR, &pointers)?;
        pack.set(attribute::PACK_WORKSPACE, ty::VOID_PTR, &[workspace.0 as *mut c_void])?;
        Ok(BoundGraph { graph: self.clone(), pack: pack.finalize()? })
    }
}

impl BoundGraph {
    /// Enqueues one run on `stream`.
    pub(crate) fn enqueue(&self, stream: &Stream) -> Result<(), CudaError> {
        let GraphPlan { plan, builder, .. } = &*self.graph;
        let dnn = &builder.dnn;
        let _running = dnn.running.lock().unwrap_or_else(PoisonError::into_inner);
        dnn.context.enter()?;
        // SAFETY: both live here.
        let status = unsafe { (dnn.cudnn.cudnnSetStream)(dnn.handle, stream.handle) };
        check(dnn.cudnn, "cudnnSetStream", status)?;
        // SAFETY: plan and pack are final; the addresses in the pack live as long as the caller promised, its
        // numbers as long as `self`.
        let status = unsafe { (dnn.cudnn.cudnnBackendExecute)(dnn.handle, plan.handle, self.pack.handle) };
        check(dnn.cudnn, "cudnnBackendExecute", status)
    }
}
