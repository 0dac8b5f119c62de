//! Work of a stream, captured once and replayed by one call.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{
    CU_GRAPH_INSTANTIATE_USE_NODE_PRIORITY, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CuGraph, CuGraphExec,
};
use crate::stream::Stream;

/// Captured work.
pub struct Graph {
    context: Context,
    handle: CuGraph,
}

// SAFETY: the handle is used by one owner at a time; the driver does not tie it to a thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `work` enqueues on `stream` instead of running it. Work on another stream joins
    /// the capture if that stream waits for an event of this one; this one must wait for it again before the
    /// end.
    ///
    /// # Errors
    /// Those of `work`, and of calls that cannot be captured (allocation, synchronisation).
    pub fn record<E: From<CudaError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let context = stream.context.clone();
        context.enter()?;
        let driver = context.driver();
        let _exclusive = capture_lock::exclusive();
        // SAFETY: the stream lives; the capture is ended below in any case.
        let status =
            unsafe { (driver.cuStreamBeginCapture_v2)(stream.handle, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) };
        context.check("cuStreamBeginCapture", status)?;
        let put_in = work();
        let mut handle = std::ptr::null_mut();
        // SAFETY: the stream is being captured; writes one pointer, null if the capture failed.
        let status = unsafe { (driver.cuStreamEndCapture)(stream.handle, &mut handle) };
        let graph = Graph { context: context.clone(), handle };
        put_in?;
        context.check("cuStreamEndCapture", status)?;
        Ok(graph)
    }

    /// The number of launches, copies and other nodes.
    pub fn nodes(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        let driver = self.context.driver();
        // SAFETY: with a null array only the number is written.
        let status = unsafe { (driver.cuGraphGetNodes)(self.handle, std::ptr::null_mut(), &mut count) };
        self.context.check("cuGraphGetNodes", status)?;
        Ok(count)
    }

    /// Prepares the graph for launching. Each kernel has the priority of the stream from which it was
    /// captured.
    pub fn instantiate(&self) -> Result<GraphExec, CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        self.context.enter()?;
        let mut handle = std::ptr::null_mut();
        let driver = self.context.driver();
        // SAFETY: writes one pointer; the graph lives here and need not outlive the executable graph.
        let status = unsafe {
            (driver.cuGraphInstantiateWithFlags)(
                &mut handle,
                self.handle,
                CU_GRAPH_INSTANTIATE_USE_NODE_PRIORITY,
            )
        };
        self.context.check("cuGraphInstantiate", status)?;
        Ok(GraphExec { context: self.context.clone(), handle })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.handle.is_null() && self.context.enter().is_ok() {
            // SAFETY: created by `record`, destroyed once.
            let status = unsafe { (self.context.driver().cuGraphDestroy)(self.handle) };
            self.context.release("cuGraphDestroy", status);
        }
    }
}

/// Captured work, ready to launch. The memory that it uses must live until the last launch has finished.
pub struct GraphExec {
    context: Context,
    handle: CuGraphExec,
}

// SAFETY: the handle is used by one owner at a time; the driver does not tie it to a thread.
unsafe impl Send for GraphExec {}
// SAFETY: a shared reference reaches no handle: launching takes the owner's.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// Enqueues one launch on `stream`.
    pub fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both live here.
        let status = unsafe { (self.context.driver().cuGraphLaunch)(self.handle, stream.handle) };
        self.context.check("cuGraphLaunch", status)
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: created by `instantiate`, destroyed once; the driver lets a run in progress finish.
            let status = unsafe { (self.context.driver().cuGraphExecDestroy)(self.handle) };
            self.context.release("cuGraphExecDestroy", status);
        }
    }
}
