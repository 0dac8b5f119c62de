//! Work of a stream, recorded once and replayed in one call.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CuGraph, CuGraphExec};
use crate::stream::Stream;

/// Recorded work.
pub struct Graph {
    context: Context,
    handle: CuGraph,
}

// SAFETY: the handle is used by one owner at a time; the driver does not tie it to a thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` puts into `stream` instead of running it. Work on other streams joins the recording where they wait for
    /// an event of this one, and must be waited for again before the end.
    ///
    /// # Errors
    /// Those of `work`, and of calls that cannot be recorded (allocation, synchronisation).
    pub fn record<E: From<CudaError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let context = stream.context.clone();
        context.enter()?;
        let driver = context.driver();
        let _exclusive = capture_lock::exclusive();
        // SAFETY: the stream lives; recording is ended below in any case.
        let status =
            unsafe { (driver.cuStreamBeginCapture_v2)(stream.handle, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) };
        context.check("cuStreamBeginCapture", status)?;
        let put_in = work();
        let mut handle = std::ptr::null_mut();
        // SAFETY: the stream is being recorded; writes one pointer, null where recording failed.
        let status = unsafe { (driver.cuStreamEndCapture)(stream.handle, &mut handle) };
        let graph = Graph { context: context.clone(), handle };
        put_in?;
        context.check("cuStreamEndCapture", status)?;
        Ok(graph)
    }

    /// How many launches and copies it holds.
    pub fn nodes(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        let driver = self.context.driver();
        // SAFETY: a null array asks for the number alone.
        let status = unsafe { (driver.cuGraphGetNodes)(self.handle, std::ptr::null_mut(), &mut count) };
        self.context.check("cuGraphGetNodes", status)?;
        Ok(count)
    }

    /// Makes it ready to run.
    pub fn instantiate(&self) -> Result<GraphExec, CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        self.context.enter()?;
        let mut handle = std::ptr::null_mut();
        let driver = self.context.driver();
        // SAFETY: writes one pointer; the graph lives here and need not outlive what is made.
        let status = unsafe { (driver.cuGraphInstantiateWithFlags)(&mut handle, self.handle, 0) };
        self.context.check("cuGraphInstantiate", status)?;
        Ok(GraphExec { context: self.context.clone(), handle })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.handle.is_null() && self.context.enter().is_ok() {
            // SAFETY: made by `record`, destroyed once.
            let status = unsafe { (self.context.driver().cuGraphDestroy)(self.handle) };
            self.context.release("cuGraphDestroy", status);
        }
    }
}

/// Recorded work, ready to run. The memory that it uses must live until it has run for the last time.
pub struct GraphExec {
    context: Context,
    handle: CuGraphExec,
}

// SAFETY: the handle is used by one owner at a time; the driver does not tie it to a thread.
unsafe impl Send for GraphExec {}
// SAFETY: a shared reference reaches no handle: launching takes the owner's.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// Puts it into `stream` once more.
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
            // SAFETY: made by `instantiate`, destroyed once; the driver lets a run under way end.
            let status = unsafe { (self.context.driver().cuGraphExecDestroy)(self.handle) };
            self.context.release("cuGraphExecDestroy", status);
        }
    }
}
