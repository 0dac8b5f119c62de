//! GPU memory that grows without moving, so that addresses in a captured graph stay valid.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_LOCATION_TYPE_DEVICE, CuDevicePtr, CuMemAccessDesc, CuMemAllocationProp, CuMemHandle,
    CuMemLocation,
};
use crate::memory::DeviceSpan;
use std::ops::Range;

/// A range of addresses as long as the GPU's memory, the first bytes of which are backed by memory.
pub struct GrowingMemory {
    context: Context,
    pointer: CuDevicePtr,
    reserved: usize,
    granularity: usize,
    /// The allocations that back it, in order, with their lengths.
    pieces: Vec<(CuMemHandle, usize)>,
    bytes: usize,
}

impl GrowingMemory {
    /// An empty range.
    pub fn new(context: &Context) -> Result<GrowingMemory, CudaError> {
        let (_, total) = context.memory()?;
        let driver = context.driver();
        let mut granularity = 0;
        let prop = properties(context);
        let option = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: writes one integer; `prop` lives here.
        let status = unsafe { (driver.cuMemGetAllocationGranularity)(&mut granularity, &prop, option) };
        context.check("cuMemGetAllocationGranularity", status)?;
        let granularity = granularity.max(1);
        let reserved = total.next_multiple_of(granularity);
        let mut pointer = 0;
        // SAFETY: writes one pointer; addresses alone are taken.
        let status = unsafe { (driver.cuMemAddressReserve)(&mut pointer, reserved, 0, 0, 0) };
        context.check("cuMemAddressReserve", status)?;
        Ok(GrowingMemory {
            context: context.clone(),
            pointer,
            reserved,
            granularity,
            pieces: Vec::new(),
            bytes: 0,
        })
    }

    /// The bytes `range`. Their addresses never change.
    ///
    /// # Panics
    /// If the range ends after the backed bytes.
    pub fn span(&self, range: Range<usize>) -> DeviceSpan<'_> {
        DeviceSpan::new(&self.context, self.pointer, self.bytes, range)
    }

    /// The number of backed bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Backs at least the first `bytes` bytes. Backed bytes keep their contents.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if the GPU has too little memory; the backed length is then unchanged.
    pub fn grow(&mut self, bytes: usize) -> Result<(), CudaError> {
        let more = bytes.saturating_sub(self.bytes).next_multiple_of(self.granularity);
        if more == 0 {
            return Ok(());
        }
        let (free, total) = self.context.memory()?;
        if self.bytes + more > self.reserved {
            return Err(CudaError::Memory { bytes: more, free, total });
        }
        let _no_capture = capture_lock::exclude_capture();
        let (driver, prop) = (self.context.driver(), properties(&self.context));
        let mut handle = 0;
        // SAFETY: writes one number; `prop` lives here.
        let status = unsafe { (driver.cuMemCreate)(&mut handle, more, &prop, 0) };
        self.context.check_allocation("cuMemCreate", status, more)?;
        let at = self.pointer + self.bytes as u64;
        // SAFETY: the addresses are reserved above and not backed yet; the memory is as long.
        let status = unsafe { (driver.cuMemMap)(at, more, 0, handle, 0) };
        if let Err(error) = self.context.check_allocation("cuMemMap", status, more) {
            // SAFETY: created above, and nothing uses it.
            self.context.release("cuMemRelease", unsafe { (driver.cuMemRelease)(handle) });
            return Err(error);
        }
        let access = CuMemAccessDesc { location: prop.location, flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: these addresses are backed now; `access` lives here.
        let status = unsafe { (driver.cuMemSetAccess)(at, more, &access, 1) };
        if let Err(error) = self.context.check_allocation("cuMemSetAccess", status, more) {
            // SAFETY: mapped above, and nothing can have used it.
            self.context.release("cuMemUnmap", unsafe { (driver.cuMemUnmap)(at, more) });
            // SAFETY: created above, and no longer mapped.
            self.context.release("cuMemRelease", unsafe { (driver.cuMemRelease)(handle) });
            return Err(error);
        }
        self.pieces.push((handle, more));
        self.bytes += more;
        Ok(())
    }
}

/// The properties of ordinary memory of the context's GPU.
fn properties(context: &Context) -> CuMemAllocationProp {
    let location = CuMemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: context.device().ordinal() as i32 };
    CuMemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types: 0,
        location,
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

impl Drop for GrowingMemory {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_err() {
            return;
        }
        let driver = self.context.driver();
        let mut at = self.pointer;
        for &(handle, bytes) in &self.pieces {
            // SAFETY: mapped here by `grow`, unmapped once; callers that enqueued work on it have waited for
            // that work.
            self.context.release("cuMemUnmap", unsafe { (driver.cuMemUnmap)(at, bytes) });
            // SAFETY: created by `grow`, released once.
            self.context.release("cuMemRelease", unsafe { (driver.cuMemRelease)(handle) });
            at += bytes as u64;
        }
        // SAFETY: reserved by `new`, and nothing is mapped in it any more.
        self.context
            .release("cuMemAddressFree", unsafe { (driver.cuMemAddressFree)(self.pointer, self.reserved) });
    }
}
