//! Streams and events: the order of work on a GPU.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{
    CU_EVENT_DISABLE_TIMING, CU_EVENT_RECORD_EXTERNAL, CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_READY, CuEvent,
    CuStream,
};
use std::ffi::c_int;

/// A queue of work on a GPU, which runs in order.
pub struct Stream {
    pub(crate) context: Context,
    pub(crate) handle: CuStream,
}

// SAFETY: a stream may be used from any thread; each call makes the context current first, and the driver
// locks the queue.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, independent of the default stream.
    pub fn new(context: &Context) -> Result<Stream, CudaError> {
        Stream::with_priority(context, 0)
    }

    /// A new stream whose kernels, also those of its graphs, take multiprocessors that become free before the
    /// kernels of other streams do.
    pub fn before_others(context: &Context) -> Result<Stream, CudaError> {
        // The driver takes the greatest priority that there is; smaller numbers are greater priorities.
        Stream::with_priority(context, c_int::MIN)
    }

    fn with_priority(context: &Context, priority: c_int) -> Result<Stream, CudaError> {
        context.enter()?;
        let (mut handle, driver) = (std::ptr::null_mut(), context.driver());
        // SAFETY: writes one pointer.
        let status =
            unsafe { (driver.cuStreamCreateWithPriority)(&mut handle, CU_STREAM_NON_BLOCKING, priority) };
        context.check("cuStreamCreateWithPriority", status)?;
        Ok(Stream { context: context.clone(), handle })
    }

    /// The context of the stream's GPU.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The driver's handle, for libraries that take one.
    pub fn raw(&self) -> *mut std::ffi::c_void {
        self.handle
    }

    /// Waits until all enqueued work has run.
    ///
    /// # Errors
    /// Also those of the work: a kernel that accessed memory out of bounds is reported here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let status = unsafe { (self.context.driver().cuStreamSynchronize)(self.handle) };
        self.context.check("cuStreamSynchronize", status)
    }

    /// Makes work that is enqueued from now on wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both live here.
        let status = unsafe { (self.context.driver().cuStreamWaitEvent)(self.handle, event.handle, 0) };
        self.context.check("cuStreamWaitEvent", status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: created by `new`, destroyed once; the driver lets enqueued work finish.
            let status = unsafe { (self.context.driver().cuStreamDestroy_v2)(self.handle) };
            self.context.release("cuStreamDestroy", status);
        }
    }
}

/// A point in a stream.
pub struct Event {
    context: Context,
    pub(crate) handle: CuEvent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Event {
    /// An event for ordering only.
    pub fn new(context: &Context) -> Result<Event, CudaError> {
        Event::with_flags(context, CU_EVENT_DISABLE_TIMING)
    }

    /// An event that also records the time.
    pub fn timed(context: &Context) -> Result<Event, CudaError> {
        Event::with_flags(context, 0)
    }

    fn with_flags(context: &Context, flags: u32) -> Result<Event, CudaError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (context.driver().cuEventCreate)(&mut handle, flags) };
        context.check("cuEventCreate", status)?;
        Ok(Event { context: context.clone(), handle })
    }

    /// Records the current end of `stream`'s queue.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both live here.
        let status = unsafe { (self.context.driver().cuEventRecord)(self.handle, stream.handle) };
        self.context.check("cuEventRecord", status)
    }

    /// Records the event in a captured stream: each replay of the graph records it again.
    pub fn record_in_graph(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        let driver = self.context.driver();
        // SAFETY: both live here.
        let status =
            unsafe { (driver.cuEventRecordWithFlags)(self.handle, stream.handle, CU_EVENT_RECORD_EXTERNAL) };
        self.context.check("cuEventRecordWithFlags", status)
    }

    /// True if the stream has passed the point.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        match unsafe { (self.context.driver().cuEventQuery)(self.handle) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            status => self.context.check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until the stream has passed the point.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        let status = unsafe { (self.context.driver().cuEventSynchronize)(self.handle) };
        self.context.check("cuEventSynchronize", status)
    }

    /// Seconds from this event to a later one. Both must be timed and passed.
    pub fn seconds_until(&self, end: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one number; both events live here.
        let status =
            unsafe { (self.context.driver().cuEventElapsedTime)(&mut milliseconds, self.handle, end.handle) };
        self.context.check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `with_flags`, destroyed once.
            let status = unsafe { (self.context.driver().cuEventDestroy_v2)(self.handle) };
            self.context.release("cuEventDestroy", status);
        }
    }
}
