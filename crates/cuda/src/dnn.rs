//! cuDNN on a card: operation graphs built from descriptors, and the plans that run them.
//!
//! A descriptor is an object of the library's, given attributes and then finalised. A graph is a list of operations over tensors; the
//! library's heuristics propose engines for it, and the first that fits is planned once, whatever places its tensors then have.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::cudnn::{
    CUDNN_STATUS_SUCCESS, Cudnn, CudnnDescriptor, CudnnHandle, DATA_BOOLEAN, DATA_FLOAT, DATA_INT32,
    HEUR_MODE_A, MOST_NOTES, NOT_PROPAGATE_NAN, NOTE_NONDETERMINISTIC, attribute, kind, ty,
};
use crate::ffi::open::{c_string, cudnn};
use crate::memory::DevicePtr;
use crate::stream::Stream;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that every tensor begins at a multiple of.
const ALIGNMENT: i64 = 16;
/// Engines that are tried, the best first.
const MOST_ENGINES: usize = 8;

/// The library, opened for one card.
pub(crate) struct Dnn {
    context: Context,
    cudnn: &'static Cudnn,
    handle: CudnnHandle,
    /// The handle is used by one at a time: to plan, and to run, before which its stream is set.
    running: Mutex<()>,
}

// SAFETY: the handle may be used from any thread by one at a time, which `running` sees to; descriptors are their owners'.
unsafe impl Send for Dnn {}
// SAFETY: as above.
unsafe impl Sync for Dnn {}

impl Dnn {
    pub(crate) fn open(context: &Context) -> Result<Dnn, CudaError> {
        let cudnn = &cudnn()?.table;
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check(cudnn, "cudnnCreate", unsafe { (cudnn.cudnnCreate)(&mut handle) })?;
        Ok(Dnn { context: context.clone(), cudnn, handle, running: Mutex::new(()) })
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: created once, destroyed once; plans keep the `Dnn`.
            unsafe { (self.cudnn.cudnnDestroy)(self.handle) };
        }
    }
}

fn check(cudnn: &Cudnn, call: &'static str, status: c_int) -> Result<(), CudaError> {
    if status == CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: returns a string of the library's own for any number.
    let name = c_string(unsafe { (cudnn.cudnnGetErrorString)(status) });
    let mut words = [0 as c_char; 512];
    // SAFETY: writes at most as many characters, the last of which is zero.
    unsafe { (cudnn.cudnnGetLastErrorString)(words.as_mut_ptr(), words.len()) };
    let words = c_string(words.as_ptr()).unwrap_or_default();
    let text = format!("{}: {words}", name.unwrap_or_else(|| format!("status {status}")));
    Err(CudaError::Library { call, text })
}

/// A descriptor.
struct Descriptor {
    handle: CudnnDescriptor,
    dnn: Arc<Dnn>,
}

// SAFETY: a descriptor is used by its owner alone, and the library ties none to a thread.
unsafe impl Send for Descriptor {}
// SAFETY: shared references only hand the handle to calls that read it.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    fn new(dnn: &Arc<Dnn>, kind: c_int) -> Result<Descriptor, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (dnn.cudnn.cudnnBackendCreateDescriptor)(kind, &mut handle) };
        check(dnn.cudnn, "cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor { handle, dnn: dnn.clone() })
    }

    /// Sets an attribute to `values`, whose type is the one that `ty` names.
    fn set<T>(&self, name: c_int, ty: c_int, values: &[T]) -> Result<(), CudaError> {
        // SAFETY: the library copies as many elements as the slice has, of the type that the callers below pair `ty` with.
        let status = unsafe {
            (self.dnn.cudnn.cudnnBackendSetAttribute)(
                self.handle,
                name,
                ty,
                values.len() as i64,
                values.as_ptr().cast::<c_void>(),
            )
        };
        check(self.dnn.cudnn, "cudnnBackendSetAttribute", status)
    }

    fn set_int(&self, name: c_int, ty: c_int, value: c_int) -> Result<(), CudaError> {
        self.set(name, ty, &[value])
    }

    fn set_descriptors(&self, name: c_int, of: &[&Descriptor]) -> Result<(), CudaError> {
        let handles: Vec<CudnnDescriptor> = of.iter().map(|d| d.handle).collect();
        self.set(name, ty::DESCRIPTOR, &handles)
    }

    fn finalize(self) -> Result<Descriptor, CudaError> {
        // SAFETY: the descriptor lives here.
        let status = unsafe { (self.dnn.cudnn.cudnnBackendFinalize)(self.handle) };
        check(self.dnn.cudnn, "cudnnBackendFinalize", status)?;
        Ok(self)
    }

    /// Reads up to `values.len()` elements of an attribute; how many there were.
    fn get<T>(&self, name: c_int, ty: c_int, values: &mut [T]) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: writes at most as many elements as the slice has, of the type that the callers below pair `ty` with.
        let status = unsafe {
            (self.dnn.cudnn.cudnnBackendGetAttribute)(
                self.handle,
                name,
                ty,
                values.len() as i64,
                &mut count,
                values.as_mut_ptr().cast::<c_void>(),
            )
        };
        check(self.dnn.cudnn, "cudnnBackendGetAttribute", status)?;
        Ok((count.max(0) as usize).min(values.len()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.dnn.cudnn.cudnnBackendDestroyDescriptor)(self.handle) };
    }
}

/// Four extents, or the elements between neighbours along each.
pub(crate) type Four = [i64; 4];

/// A tensor of a graph, by its place in the list.
#[derive(Clone, Copy)]
pub(crate) struct Tensor(usize);

/// What an elementwise operation computes; numbers of `cudnnPointwiseMode_t`.
#[derive(Clone, Copy)]
pub(crate) enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    GreaterOrEqual = 303,
}

/// How a dimension is summed up; numbers of `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy)]
pub(crate) enum Reduce {
    Add = 0,
    Max = 3,
}

/// What a tensor of a run stands for.
enum Data {
    /// Never in memory.
    Virtual,
    /// In memory, at the place with this number among those that a run is given.
    At(usize),
    /// A number, which the library reads from here.
    Value(Box<f32>),
}

/// An operation graph being built.
pub(crate) struct GraphBuilder {
    dnn: Arc<Dnn>,
    tensors: Vec<(Descriptor, Data, Four)>,
    /// The last of each operation's own descriptors is the operation; those before it are what it needs.
    operations: Vec<(Vec<Descriptor>, Descriptor)>,
}

impl GraphBuilder {
    pub(crate) fn new(dnn: &Arc<Dnn>) -> GraphBuilder {
        GraphBuilder { dnn: dnn.clone(), tensors: Vec::new(), operations: Vec::new() }
    }

    fn tensor(&mut self, dtype: c_int, dims: Four, strides: Four, data: Data) -> Result<Tensor, CudaError> {
        let d = Descriptor::new(&self.dnn, kind::TENSOR)?;
        d.set_int(attribute::TENSOR_DATA_TYPE, ty::DATA_TYPE, dtype)?;
        d.set(attribute::TENSOR_DIMENSIONS, ty::INT64, &dims)?;
        d.set(attribute::TENSOR_STRIDES, ty::INT64, &strides)?;
        d.set(attribute::TENSOR_UNIQUE_ID, ty::INT64, &[self.tensors.len() as i64])?;
        d.set(attribute::TENSOR_ALIGNMENT, ty::INT64, &[ALIGNMENT])?;
        match &data {
            Data::Virtual => d.set(attribute::TENSOR_IS_VIRTUAL, ty::BOOLEAN, &[true])?,
            Data::Value(_) => d.set(attribute::TENSOR_IS_BY_VALUE, ty::BOOLEAN, &[true])?,
            Data::At(_) => {}
        }
        self.tensors.push((d.finalize()?, data, dims));
        Ok(Tensor(self.tensors.len() - 1))
    }

    /// A tensor in memory: of the places that a run is given, at the one with the number `place`.
    pub(crate) fn at(
        &mut self,
        dtype: c_int,
        dims: Four,
        strides: Four,
        place: usize,
    ) -> Result<Tensor, CudaError> {
        self.tensor(dtype, dims, strides, Data::At(place))
    }

    /// A tensor that passes from one operation to the next, its rows one behind the other.
    pub(crate) fn passing(&mut self, dtype: c_int, dims: Four) -> Result<Tensor, CudaError> {
        self.tensor(dtype, dims, packed(dims), Data::Virtual)
    }

    /// The same with these strides.
    pub(crate) fn passing_with(
        &mut self,
        dtype: c_int,
        dims: Four,
        strides: Four,
    ) -> Result<Tensor, CudaError> {
        self.tensor(dtype, dims, strides, Data::Virtual)
    }

    /// A number.
    pub(crate) fn number(&mut self, value: f32) -> Result<Tensor, CudaError> {
        self.tensor(DATA_FLOAT, [1; 4], [1; 4], Data::Value(Box::new(value)))
    }

    /// `to = a b`, row by column in the last two dimensions, summed in f32.
    pub(crate) fn matmul(&mut self, a: Tensor, b: Tensor, to: Tensor) -> Result<(), CudaError> {
        let m = Descriptor::new(&self.dnn, kind::MATMUL)?;
        m.set_int(attribute::MATMUL_COMP_TYPE, ty::DATA_TYPE, DATA_FLOAT)?;
        let m = m.finalize()?;
        let op = Descriptor::new(&self.dnn, kind::OPERATION_MATMUL)?;
        op.set_descriptors(attribute::OP_MATMUL_A, &[self.of(a)])?;
        op.set_descriptors(attribute::OP_MATMUL_B, &[self.of(b)])?;
        op.set_descriptors(attribute::OP_MATMUL_C, &[self.of(to)])?;
        op.set_descriptors(attribute::OP_MATMUL_DESCRIPTOR, &[&m])?;
        self.add(vec![m], op)
    }

    /// `to = mode(x)` or `mode(x, b)`, in f32 (a comparison: as truth values).
    pub(crate) fn pointwise(
        &mut self,
        mode: Pointwise,
        x: Tensor,
        b: Option<Tensor>,
        to: Tensor,
    ) -> Result<(), CudaError> {
        let precision = if matches!(mode, Pointwise::GreaterOrEqual) { DATA_BOOLEAN } else { DATA_FLOAT };
        let p = self.pointwise_descriptor(mode as c_int, precision, None)?;
        let op = self.pointwise_operation(&p, x, to)?;
        if let Some(b) = b {
            op.set_descriptors(attribute::OP_POINTWISE_B, &[self.of(b)])?;
        }
        self.add(vec![p], op)
    }

    /// `to` = each element's index along `axis` of `x`.
    pub(crate) fn index(&mut self, axis: i64, x: Tensor, to: Tensor) -> Result<(), CudaError> {
        let p = self.pointwise_descriptor(GEN_INDEX, DATA_FLOAT, Some(axis))?;
        let op = self.pointwise_operation(&p, x, to)?;
        self.add(vec![p], op)
    }

    /// `to` = `x` where `mask` is true, else `other`.
    pub(crate) fn select(
        &mut self,
        mask: Tensor,
        x: Tensor,
        other: Tensor,
        to: Tensor,
    ) -> Result<(), CudaError> {
        let p = self.pointwise_descriptor(BINARY_SELECT, DATA_FLOAT, None)?;
        let op = self.pointwise_operation(&p, x, to)?;
        op.set_descriptors(attribute::OP_POINTWISE_B, &[self.of(other)])?;
        op.set_descriptors(attribute::OP_POINTWISE_T, &[self.of(mask)])?;
        self.add(vec![p], op)
    }

    /// `to` = `x` summed up along the dimensions in which `to` has one element (or fewer: groups).
    pub(crate) fn reduce(&mut self, operator: Reduce, x: Tensor, to: Tensor) -> Result<(), CudaError> {
        let r = Descriptor::new(&self.dnn, kind::REDUCTION)?;
        r.set_int(attribute::REDUCTION_OPERATOR, ty::REDUCTION_OPERATOR, operator as c_int)?;
        r.set_int(attribute::REDUCTION_COMP_TYPE, ty::DATA_TYPE, DATA_FLOAT)?;
        let r = r.finalize()?;
        let op = Descriptor::new(&self.dnn, kind::OPERATION_REDUCTION)?;
        op.set_descriptors(attribute::OP_REDUCTION_X, &[self.of(x)])?;
        op.set_descriptors(attribute::OP_REDUCTION_Y, &[self.of(to)])?;
        op.set_descriptors(attribute::OP_REDUCTION_DESCRIPTOR, &[&r])?;
        self.add(vec![r], op)
    }

    /// `to` = `x` with other strides or of another type.
    pub(crate) fn reshape(&mut self, x: Tensor, to: Tensor) -> Result<(), CudaError> {
        let op = Descriptor::new(&self.dnn, kind::OPERATION_RESHAPE)?;
        op.set_descriptors(attribute::OP_RESHAPE_X, &[self.of(x)])?;
        op.set_descriptors(attribute::OP_RESHAPE_Y, &[self.of(to)])?;
        self.add(Vec::new(), op)
    }

    fn pointwise_descriptor(
        &self,
        mode: c_int,
        precision: c_int,
        axis: Option<i64>,
    ) -> Result<Descriptor, CudaError> {
        let p = Descriptor::new(&self.dnn, kind::POINTWISE)?;
        p.set_int(attribute::POINTWISE_MODE, ty::POINTWISE_MODE, mode)?;
        p.set_int(attribute::POINTWISE_MATH_PREC, ty::DATA_TYPE, precision)?;
        p.set_int(attribute::POINTWISE_NAN_PROPAGATION, ty::NAN_PROPAGATION, NOT_PROPAGATE_NAN)?;
        if let Some(axis) = axis {
            p.set(attribute::POINTWISE_AXIS, ty::INT64, &[axis])?;
        }
        p.finalize()
    }

    fn pointwise_operation(&self, p: &Descriptor, x: Tensor, to: Tensor) -> Result<Descriptor, CudaError> {
        let op = Descriptor::new(&self.dnn, kind::OPERATION_POINTWISE)?;
        op.set_descriptors(attribute::OP_POINTWISE_DESCRIPTOR, &[p])?;
        op.set_descriptors(attribute::OP_POINTWISE_X, &[self.of(x)])?;
        op.set_descriptors(attribute::OP_POINTWISE_Y, &[self.of(to)])?;
        Ok(op)
    }

    fn of(&self, tensor: Tensor) -> &Descriptor {
        &self.tensors[tensor.0].0
    }

    /// The extents of a tensor.
    pub(crate) fn dims(&self, tensor: Tensor) -> Four {
        self.tensors[tensor.0].2
    }

    fn add(&mut self, needs: Vec<Descriptor>, op: Descriptor) -> Result<(), CudaError> {
        self.operations.push((needs, op.finalize()?));
        Ok(())
    }

    /// Plans the graph for an engine that needs at most `workspace_bytes`, and, where `deterministic` says so, gives the same bits in every
    /// run. That takes long: a plan serves all tensors of these shapes.
    ///
    /// # Errors
    /// Where the library has no such engine.
    pub(crate) fn plan(self, workspace_bytes: usize, deterministic: bool) -> Result<GraphPlan, CudaError> {
        let dnn = self.dnn.clone();
        // What is timed would wait for the handle.
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
            match plan_for(&dnn, config, workspace_bytes, deterministic) {
                Ok(plan) => return Ok(GraphPlan { plan, _graph: graph, builder: self }),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        Err(refusal.unwrap_or_else(|| no_engine("the heuristics propose none")))
    }
}

/// `CUDNN_POINTWISE_GEN_INDEX`.
const GEN_INDEX: c_int = 501;
/// `CUDNN_POINTWISE_BINARY_SELECT`.
const BINARY_SELECT: c_int = 601;
/// The element types of what comparisons need.
pub(crate) const INDEX: c_int = DATA_INT32;
pub(crate) const TRUTH: c_int = DATA_BOOLEAN;

/// Strides of rows one behind the other.
pub(crate) const fn packed(dims: Four) -> Four {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}

fn no_engine(why: &str) -> CudaError {
    CudaError::Library { call: "cuDNN", text: format!("no engine for this graph: {why}") }
}

/// A plan for the engine of `config`, where it keeps to the terms.
fn plan_for(
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
    /// Holds the numbers that runs read.
    builder: GraphBuilder,
}

/// A planned graph with the places of its tensors.
pub(crate) struct PlacedGraph {
    graph: Arc<GraphPlan>,
    pack: Descriptor,
}

impl GraphPlan {
    /// The graph over tensors at these places, working at `workspace`.
    ///
    /// # Panics
    /// If a tensor was declared at a place that is not among them: a bug of whoever built the graph.
    pub(crate) fn placed(
        self: &Arc<Self>,
        places: &[DevicePtr],
        workspace: DevicePtr,
    ) -> Result<PlacedGraph, CudaError> {
        let pack = Descriptor::new(&self.builder.dnn, kind::VARIANT_PACK)?;
        let (mut ids, mut pointers) = (Vec::new(), Vec::new());
        for (id, (_, data, _)) in self.builder.tensors.iter().enumerate() {
            let pointer = match data {
                Data::Virtual => continue,
                Data::At(place) => places[*place].0 as *mut c_void,
                Data::Value(value) => std::ptr::from_ref(&**value).cast_mut().cast::<c_void>(),
            };
            ids.push(id as i64);
            pointers.push(pointer);
        }
        pack.set(attribute::PACK_UNIQUE_IDS, ty::INT64, &ids)?;
        pack.set(attribute::PACK_DATA_POINTERS, ty::VOID_PTR, &pointers)?;
        pack.set(attribute::PACK_WORKSPACE, ty::VOID_PTR, &[workspace.0 as *mut c_void])?;
        Ok(PlacedGraph { graph: self.clone(), pack: pack.finalize()? })
    }
}

impl PlacedGraph {
    /// Puts one run into `stream`.
    pub(crate) fn enqueue(&self, stream: &Stream) -> Result<(), CudaError> {
        let GraphPlan { plan, builder, .. } = &*self.graph;
        let dnn = &builder.dnn;
        let _running = dnn.running.lock().unwrap_or_else(PoisonError::into_inner);
        dnn.context.enter()?;
        // SAFETY: both live here.
        let status = unsafe { (dnn.cudnn.cudnnSetStream)(dnn.handle, stream.handle) };
        check(dnn.cudnn, "cudnnSetStream", status)?;
        // SAFETY: plan and pack are final; the places in the pack live as long as the caller promised, its numbers as long as `self`.
        let status = unsafe { (dnn.cudnn.cudnnBackendExecute)(dnn.handle, plan.handle, self.pack.handle) };
        check(dnn.cudnn, "cudnnBackendExecute", status)
    }
}
