//! GPU memory that grows without moving, so that addresses in a captured graph stay valid. Other processes
//! can map it, and write to it directly.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_HANDLE_TYPE_NONE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
    CuDevicePtr, CuMemAccessDesc, CuMemAllocationProp, CuMemHandle, CuMemLocation,
};
use crate::memory::{DevicePtr, DeviceSpan};
use std::ffi::c_int;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A range of addresses, the first bytes of which are backed by memory.
pub struct GrowingMemory {
    context: Context,
    pointer: CuDevicePtr,
    reserved: usize,
    granularity: usize,
    is_shared: bool,
    /// The allocations that back it, in order, with their lengths.
    pieces: Vec<(CuMemHandle, usize)>,
    bytes: usize,
}

impl GrowingMemory {
    /// An empty range that can grow to all of the GPU's memory. If `is_shared`, other processes can map it.
    pub fn new(context: &Context, is_shared: bool) -> Result<GrowingMemory, CudaError> {
        let (_, total) = context.memory()?;
        GrowingMemory::with_room(context, total, is_shared)
    }

    /// Memory of at least `bytes` bytes, not initialised.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if the GPU has too little memory.
    pub fn allocate(context: &Context, bytes: usize, is_shared: bool) -> Result<GrowingMemory, CudaError> {
        let mut memory = GrowingMemory::with_room(context, bytes, is_shared)?;
        memory.grow(bytes)?;
        Ok(memory)
    }

    /// A range of addresses for `bytes` bytes, empty.
    pub fn with_room(context: &Context, bytes: usize, is_shared: bool) -> Result<GrowingMemory, CudaError> {
        context.enter()?;
        let driver = context.driver();
        let mut granularity = 0;
        let prop = properties(context, is_shared);
        let option = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: writes one integer; `prop` lives here.
        let status = unsafe { (driver.cuMemGetAllocationGranularity)(&mut granularity, &prop, option) };
        context.check("cuMemGetAllocationGranularity", status)?;
        let granularity = granularity.max(1);
        let reserved = bytes.max(1).next_multiple_of(granularity);
        let mut pointer = 0;
        // SAFETY: writes one pointer; addresses alone are taken.
        let status = unsafe { (driver.cuMemAddressReserve)(&mut pointer, reserved, 0, 0, 0) };
        context.check("cuMemAddressReserve", status)?;
        Ok(GrowingMemory {
            context: context.clone(),
            pointer,
            reserved,
            granularity,
            is_shared,
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

    /// The number of bytes that the range has addresses for.
    pub fn room(&self) -> usize {
        self.reserved
    }

    /// The address of the first byte.
    pub fn pointer(&self) -> DevicePtr {
        DevicePtr(self.pointer)
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
        self.context.enter()?;
        let prop = properties(&self.context, self.is_shared);
        let mut handle = 0;
        // SAFETY: writes one number; `prop` lives here.
        let status = unsafe { (self.context.driver().cuMemCreate)(&mut handle, more, &prop, 0) };
        self.context.check_allocation("cuMemCreate", status, more)?;
        self.map(handle, more)
    }

    /// The lengths of the pieces of memory that back the range, in their order.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = usize> {
        self.pieces.iter().map(|(_, bytes)| *bytes)
    }

    /// A file that names the piece of this number to other processes. The memory is shared.
    pub fn share(&self, piece: usize) -> Result<OwnedFd, CudaError> {
        self.context.enter()?;
        let (handle, _) = self.pieces[piece];
        let (mut file, kind): (c_int, _) = (-1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        let to = (&raw mut file).cast();
        // SAFETY: writes one integer, the number of a file.
        let status = unsafe { (self.context.driver().cuMemExportToShareableHandle)(to, handle, kind, 0) };
        self.context.check("cuMemExportToShareableHandle", status)?;
        // SAFETY: the driver opened the file for its caller, who closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// Backs the next `bytes` bytes with a piece of memory of another process, maybe of another GPU, that it
    /// named by [`GrowingMemory::share`]. The memory stays as long as a process maps it.
    ///
    /// # Errors
    /// The GPUs cannot access each other's memory.
    pub fn join(&mut self, file: BorrowedFd<'_>, bytes: usize) -> Result<(), CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        self.context.enter()?;
        let (mut handle, kind) = (0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        // The driver takes the number of the file as a pointer.
        let file = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
        // SAFETY: writes one number; the file stays open during the call.
        let status =
            unsafe { (self.context.driver().cuMemImportFromShareableHandle)(&mut handle, file, kind) };
        self.context.check("cuMemImportFromShareableHandle", status)?;
        self.map(handle, bytes)
    }

    /// Backs the next `more` bytes with the memory of `handle`, which is released here if that fails.
    fn map(&mut self, handle: CuMemHandle, more: usize) -> Result<(), CudaError> {
        let (driver, prop) = (self.context.driver(), properties(&self.context, self.is_shared));
        assert!(self.bytes + more <= self.reserved, "{more} bytes after {}", self.bytes);
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
fn properties(context: &Context, is_shared: bool) -> CuMemAllocationProp {
    let location = CuMemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: context.device().ordinal() as i32 };
    CuMemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types: if is_shared {
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            CU_MEM_HANDLE_TYPE_NONE
        },
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
