//! `libcuda.so.1`: the driver's functions that xtrain calls.

use crate::machine::{self, Event, Machine};
use crate::memory::PAGE;
use crate::settings::Arch;
use crate::status::{self, STATUSES, Status};
use crate::work::{HostAddress, HostSource, KernelLaunch, Work};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// A handle: a number that looks like a pointer.
pub(super) type Handle = usize;

thread_local! {
    /// The device of the thread's current context.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The device of the thread's current context.
pub(super) fn current() -> Option<usize> {
    CURRENT.get()
}

/// Runs a call; `c_int` is what it returns.
fn call(body: impl FnOnce(&mut Machine) -> Result<(), Status>) -> c_int {
    let mut machine = machine::lock();
    let Some(machine) = &mut *machine else { return status::NO_DEVICE.0 };
    body(machine).err().unwrap_or(status::SUCCESS).0
}

/// As [`call`], of something that needs a context whose work has not failed.
fn on_device(body: impl FnOnce(&mut Machine, usize) -> Result<(), Status>) -> c_int {
    call(|machine| {
        let device = CURRENT.get().ok_or(status::INVALID_CONTEXT)?;
        machine.check(device)?;
        body(machine, device)
    })
}

/// As [`on_device`], of something that may wait for all work of the device.
fn synchronizing(body: impl FnOnce(&mut Machine, usize) -> Result<(), Status>) -> c_int {
    on_device(|machine, device| {
        machine.may_synchronize(std::thread::current().id())?;
        body(machine, device)
    })
}

/// Writes a result.
///
/// # Safety
/// `to` is null or valid for a write.
pub(super) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Status> {
    if to.is_null() {
        return Err(status::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Each function of the header, with the unsafe parts that its signature asks for.
macro_rules! export {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "NVIDIA's names")]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int $body
    )*};
}

pub(super) use export;

export! {
    fn cuInit(_flags: c_uint) {
        call(|machine| if machine.devices.is_empty() { Err(status::NO_DEVICE) } else { Ok(()) })
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        // SAFETY: the caller's pointer.
        unsafe { put(version, 13_000) }.err().unwrap_or(status::SUCCESS).0
    }

    fn cuGetErrorName(error: c_int, name: *mut *const c_char) {
        let known = STATUSES.iter().find(|(number, ..)| *number == error);
        let text = known.map_or(std::ptr::null(), |(_, name, _)| name.as_ptr());
        // SAFETY: the caller's pointer.
        unsafe { put(name, text) }.err().unwrap_or(status::SUCCESS).0
    }

    fn cuGetErrorString(error: c_int, text: *mut *const c_char) {
        call(|machine| {
            let known = STATUSES.iter().find(|(number, ..)| *number == error);
            let general = known.map_or(std::ptr::null(), |(.., text)| text.as_ptr());
            let failures = machine.devices.iter().filter_map(|device| device.failure.as_ref());
            let latest = failures.filter(|failure| failure.status.0 == error).last();
            let text_of = latest.map_or(general, |failure| lasting(&failure.text).as_ptr());
            // SAFETY: the caller's pointer.
            unsafe { put(text, text_of) }
        })
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        // SAFETY: the caller's pointer.
        call(|machine| unsafe { put(count, machine.devices.len() as c_int) })
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        call(|machine| {
            if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < machine.devices.len()) {
                // SAFETY: the caller's pointer.
                unsafe { put(device, ordinal) }
            } else {
                Err(status::INVALID_DEVICE)
            }
        })
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) {
        call(|machine| {
            let text = format!("Emulated GPU {}", machine.settings.arch);
            let length = text.len().min((len.max(1) - 1) as usize);
            // SAFETY: the caller's buffer of `len` bytes.
            unsafe { name.cast::<u8>().copy_from(text.as_ptr(), length) };
            let end = name.wrapping_add(length);
            // SAFETY: as above.
            unsafe { end.write(0) };
            Ok(())
        })
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        let mut number = *b"emulated GPU 000";
        number[15] = device as u8;
        // SAFETY: the caller's pointer.
        unsafe { put(uuid, number) }.err().unwrap_or(status::SUCCESS).0
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        // SAFETY: the caller's pointer.
        call(|machine| unsafe { put(value, attribute_of(machine.settings.arch, attribute).ok_or(status::INVALID_VALUE)?) })
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        call(|machine| {
            let device = machine.devices.get(device as usize).ok_or(status::INVALID_DEVICE)?;
            // SAFETY: the caller's pointer.
            unsafe { put(bytes, device.memory.free_and_total().1 as usize) }
        })
    }

    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) {
        call(|machine| {
            machine.devices.get_mut(device as usize).ok_or(status::INVALID_DEVICE)?.holders += 1;
            // SAFETY: the caller's pointer.
            unsafe { put(context, device as usize + 1) }
        })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        call(|machine| {
            machine.may_synchronize(std::thread::current().id())?;
            let of = machine.devices.get_mut(device as usize).ok_or(status::INVALID_DEVICE)?;
            of.holders = of.holders.checked_sub(1).ok_or(status::INVALID_CONTEXT)?;
            if of.holders == 0 {
                machine.finish_all();
                // A new context starts without the failure.
                machine.devices[device as usize].failure = None;
            }
            Ok(())
        })
    }

    fn cuCtxSetCurrent(context: Handle) {
        CURRENT.set(context.checked_sub(1));
        status::SUCCESS.0
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        on_device(|machine, device| {
            let (is_free, all) = machine.devices[device].memory.free_and_total();
            // SAFETY: the caller's pointers.
            unsafe { put(free, is_free as usize) }?;
            // SAFETY: as above.
            unsafe { put(total, all as usize) }
        })
    }

    fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) {
        synchronizing(|machine, device| {
            if bytes == 0 {
                return Err(status::INVALID_VALUE);
            }
            let start = machine.allocate(device, bytes as u64)?;
            // SAFETY: the caller's pointer.
            unsafe { put(pointer, start) }
        })
    }

    fn cuMemFree_v2(pointer: u64) {
        synchronizing(|machine, device| machine.free(device, pointer))
    }

    fn cuMemGetAllocationGranularity(bytes: *mut usize, _prop: *const c_void, _option: c_int) {
        // SAFETY: the caller's pointer.
        unsafe { put(bytes, PAGE as usize) }.err().unwrap_or(status::SUCCESS).0
    }

    fn cuMemAddressReserve(pointer: *mut u64, bytes: usize, _align: usize, _wished: u64, _flags: c_ulonglong) {
        on_device(|machine, device| {
            if !(bytes as u64).is_multiple_of(PAGE) {
                return Err(status::INVALID_VALUE);
            }
            let of = &mut machine.devices[device];
            let start = of.memory.reserve(bytes as u64).map_err(|_| status::OUT_OF_MEMORY)?;
            of.reservations.insert(start, bytes as u64);
            // SAFETY: the caller's pointer.
            unsafe { put(pointer, start) }
        })
    }

    fn cuMemAddressFree(pointer: u64, bytes: usize) {
        on_device(|machine, device| {
            let of = &mut machine.devices[device];
            match of.reservations.get(&pointer) {
                Some(&reserved) if reserved == bytes as u64 => {
                    let is_mapped = (0..reserved).step_by(PAGE as usize).any(|at| of.memory.allocation(pointer + at).is_some());
                    if is_mapped {
                        return Err(status::INVALID_VALUE);
                    }
                    of.reservations.remove(&pointer);
                    Ok(())
                }
                _ => Err(status::INVALID_VALUE),
            }
        })
    }

    fn cuMemCreate(handle: *mut c_ulonglong, bytes: usize, _prop: *const c_void, _flags: c_ulonglong) {
        synchronizing(|machine, device| {
            if bytes == 0 || !(bytes as u64).is_multiple_of(PAGE) {
                return Err(status::INVALID_VALUE);
            }
            let number = machine.handle() as u64;
            let of = &mut machine.devices[device];
            let physical = of.memory.create(bytes as u64).map_err(|_| status::OUT_OF_MEMORY)?;
            of.physical.insert(number, (physical, 0));
            // SAFETY: the caller's pointer.
            unsafe { put(handle, number) }
        })
    }

    fn cuMemRelease(handle: c_ulonglong) {
        on_device(|machine, device| {
            let of = &mut machine.devices[device];
            let (physical, mapped) = of.physical.remove(&handle).ok_or(status::INVALID_VALUE)?;
            if mapped > 0 {
                // The driver would free it with the last mapping; xtrain does not need that.
                of.physical.insert(handle, (physical, mapped));
                return Err(status::NOT_SUPPORTED);
            }
            of.memory.release(physical);
            Ok(())
        })
    }

    fn cuMemMap(pointer: u64, bytes: usize, offset: usize, handle: c_ulonglong, _flags: c_ulonglong) {
        synchronizing(|machine, device| {
            let of = &mut machine.devices[device];
            let (physical, mapped) = of.physical.get_mut(&handle).ok_or(status::INVALID_VALUE)?;
            let is_reserved = of.reservations.range(..=pointer).next_back().is_some_and(|(start, length)| {
                pointer + bytes as u64 <= start + length
            });
            let is_free = of.memory.is_free(pointer, bytes as u64);
            if !is_reserved || !is_free || offset != 0 || bytes as u64 != physical.bytes {
                return Err(status::INVALID_VALUE);
            }
            *mapped += 1;
            of.memory.map(pointer, *physical);
            Ok(())
        })
    }

    fn cuMemUnmap(pointer: u64, bytes: usize) {
        synchronizing(|machine, device| {
            if let Some(user) = machine.user_of(pointer, bytes as u64) {
                let text = format!("cuMemUnmap of memory that {user} uses, which is queued and has not run");
                return Err(machine.fail(device, crate::work::Failure { status: status::ILLEGAL_ADDRESS, text }));
            }
            let of = &mut machine.devices[device];
            match of.memory.allocation(pointer) {
                Some((start, length)) if (start, length) == (pointer, bytes as u64) => {}
                _ => return Err(status::INVALID_VALUE),
            }
            let physical = of.memory.unmap(pointer).ok_or(status::INVALID_VALUE)?;
            for (_, mapped) in of.physical.values_mut().filter(|(held, _)| *held == physical) {
                *mapped -= 1;
            }
            Ok(())
        })
    }

    fn cuMemSetAccess(pointer: u64, bytes: usize, _access: *const c_void, _count: usize) {
        on_device(|machine, device| {
            let is_mapped = machine.devices[device].memory.allow_access(pointer, bytes as u64);
            if is_mapped { Ok(()) } else { Err(status::INVALID_VALUE) }
        })
    }

    fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        synchronizing(|machine, _| {
            if bytes == 0 {
                return Err(status::INVALID_VALUE);
            }
            // Poison, so that uninitialised bytes show.
            let memory: Box<[u8]> = vec![crate::poison::POISON; bytes].into();
            let start = Box::into_raw(memory).cast::<c_void>();
            machine.pinned.insert(start as usize, bytes);
            // SAFETY: the caller's pointer.
            unsafe { put(pointer, start) }
        })
    }

    fn cuMemFreeHost(pointer: *mut c_void) {
        synchronizing(|machine, _| {
            let bytes = machine.pinned.remove(&(pointer as usize)).ok_or(status::INVALID_VALUE)?;
            // The driver waits for copies that use it.
            machine.finish_all();
            let memory = std::ptr::slice_from_raw_parts_mut(pointer.cast::<u8>(), bytes);
            // SAFETY: it came from a box of this many bytes in `cuMemHostAlloc`, and is taken back once.
            drop(unsafe { Box::from_raw(memory) });
            Ok(())
        })
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) {
        on_device(|machine, _| {
            let source = if is_pinned(machine, from as usize, bytes) {
                HostSource::Pinned(HostAddress(from as usize), bytes as u64)
            } else {
                if machine.streams.get(&stream).is_some_and(|stream| stream.captured.is_some()) {
                    return Err(status::NOT_SUPPORTED);
                }
                // SAFETY: the caller's memory, of this many bytes.
                HostSource::Taken(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.into())
            };
            machine.put(stream, Work::Upload { target: to, source })
        })
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) {
        on_device(|machine, _| {
            let is_pinned = is_pinned(machine, to as usize, bytes);
            if !is_pinned && machine.streams.get(&stream).is_some_and(|stream| stream.captured.is_some()) {
                return Err(status::NOT_SUPPORTED);
            }
            machine.put(stream, Work::Download { target: HostAddress(to as usize), source: from, bytes: bytes as u64 })?;
            // A copy to pageable memory has ended when the call returns.
            if is_pinned { Ok(()) } else { machine.finish_stream(stream) }
        })
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        on_device(|machine, _| machine.put(stream, Work::Copy { target: to, source: from, bytes: bytes as u64 }))
    }

    fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: Handle) {
        on_device(|machine, _| machine.put(stream, Work::Fill { target: to, byte, bytes: bytes as u64 }))
    }

    fn cuStreamCreate(stream: *mut Handle, _flags: c_uint) {
        on_device(|machine, device| {
            let handle = machine.new_stream(device);
            // SAFETY: the caller's pointer.
            unsafe { put(stream, handle) }
        })
    }

    fn cuStreamDestroy_v2(stream: Handle) {
        call(|machine| {
            // Its work still runs.
            machine.streams.remove(&stream).map(|_| ()).ok_or(status::INVALID_HANDLE)
        })
    }

    fn cuStreamSynchronize(stream: Handle) {
        on_device(|machine, _| {
            if let Some((capture, _)) = machine.streams.get(&stream).and_then(|stream| stream.captured.clone()) {
                return Err(machine.invalidate_capture(capture, status::CAPTURE_UNSUPPORTED));
            }
            machine.finish_stream(stream)
        })
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        on_device(|machine, _| machine.wait(stream, event))
    }

    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        on_device(|machine, _| {
            // Only thread-local captures are emulated.
            if mode != 1 {
                return Err(status::NOT_SUPPORTED);
            }
            machine.begin_capture(stream, std::thread::current().id())
        })
    }

    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        on_device(|machine, _| {
            let ended = machine.end_capture(stream, std::thread::current().id());
            // SAFETY: the caller's pointer.
            unsafe { put(graph, ended.unwrap_or(0)) }?;
            ended.map(|_| ())
        })
    }

    fn cuEventCreate(event: *mut Handle, _flags: c_uint) {
        on_device(|machine, _| {
            let handle = machine.handle();
            machine.events.insert(handle, Event::default());
            // SAFETY: the caller's pointer.
            unsafe { put(event, handle) }
        })
    }

    fn cuEventRecord(event: Handle, stream: Handle) {
        on_device(|machine, _| machine.record(event, stream, false))
    }

    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: c_uint) {
        on_device(|machine, _| machine.record(event, stream, flags & 1 != 0))
    }

    fn cuEventQuery(event: Handle) {
        on_device(|machine, device| {
            let has_completed = machine.has_completed(event)?;
            machine.check(device)?;
            if has_completed { Ok(()) } else { Err(status::NOT_READY) }
        })
    }

    fn cuEventSynchronize(event: Handle) {
        on_device(|machine, device| {
            if let Some((capture, _)) = machine.events.get(&event).and_then(|event| event.captured.clone()) {
                return Err(machine.invalidate_capture(capture, status::CAPTURED_EVENT));
            }
            machine.finish_event(event)?;
            machine.check(device)
        })
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        on_device(|machine, _| {
            let time = |event| machine.events.get(&event).ok_or(status::INVALID_HANDLE)?.time.ok_or(status::NOT_READY);
            let seconds = time(end)? - time(start)?;
            // SAFETY: the caller's pointer.
            unsafe { put(milliseconds, (seconds * 1e3) as f32) }
        })
    }

    fn cuEventDestroy_v2(event: Handle) {
        call(|machine| machine.events.remove(&event).map(|_| ()).ok_or(status::INVALID_HANDLE))
    }

    fn cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, _flags: c_ulonglong) {
        synchronizing(|machine, _| {
            let graph = machine.graphs.get(&graph).ok_or(status::INVALID_HANDLE)?.clone();
            let handle = machine.handle();
            machine.graphs.insert(handle, graph);
            // SAFETY: the caller's pointer.
            unsafe { put(exec, handle) }
        })
    }

    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        call(|machine| {
            if !nodes.is_null() {
                return Err(status::NOT_SUPPORTED);
            }
            let graph = machine.graphs.get(&graph).ok_or(status::INVALID_HANDLE)?;
            // SAFETY: the caller's pointer.
            unsafe { put(count, graph.nodes.len()) }
        })
    }

    fn cuGraphLaunch(exec: Handle, stream: Handle) {
        on_device(|machine, _| machine.launch(exec, stream))
    }

    fn cuGraphExecDestroy(exec: Handle) {
        synchronizing(|machine, _| machine.graphs.remove(&exec).map(|_| ()).ok_or(status::INVALID_HANDLE))
    }

    fn cuGraphDestroy(graph: Handle) {
        call(|machine| machine.graphs.remove(&graph).map(|_| ()).ok_or(status::INVALID_HANDLE))
    }

    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) {
        synchronizing(|machine, device| {
            // SAFETY: an image of the emulated compiler's is text that ends with a zero.
            let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| status::INVALID_IMAGE)?;
            let handle = machine.load(device, text)?;
            // SAFETY: the caller's pointer.
            unsafe { put(module, handle) }
        })
    }

    fn cuModuleUnload(module: Handle) {
        synchronizing(|machine, _| machine.unload(module))
    }

    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) {
        on_device(|machine, _| {
            // SAFETY: the caller's string.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            let handle = machine.function(module, &name)?;
            // SAFETY: the caller's pointer.
            unsafe { put(function, handle) }
        })
    }

    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) {
        call(|machine| {
            let most = shared_per_block(machine.settings.arch);
            let function = machine.functions.get_mut(&function).ok_or(status::INVALID_HANDLE)?;
            let bytes = u64::try_from(value).map_err(|_| status::INVALID_VALUE)?;
            // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            if attribute != 8 || function.code.shared_bytes + bytes > most {
                return Err(status::INVALID_VALUE);
            }
            function.most_shared_bytes = bytes;
            Ok(())
        })
    }

    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Handle) {
        call(|machine| {
            let code = &machine.functions.get(&function).ok_or(status::INVALID_HANDLE)?.code;
            let number = match attribute {
                1 => code.shared_bytes,
                3 => code.local_bytes,
                4 => (code.slots.b32 + 2 * code.slots.b64).min(255) as u64,
                _ => return Err(status::INVALID_VALUE),
            };
            // SAFETY: the caller's pointer.
            unsafe { put(value, number as c_int) }
        })
    }

    fn cuLaunchKernelEx(config: *const LaunchConfig, function: Handle, arguments: *const *const u8, _extra: *mut c_void) {
        on_device(|machine, _| {
            // SAFETY: the caller's pointer.
            let config = unsafe { &*config };
            let function = machine.functions.get_mut(&function).ok_or(status::INVALID_HANDLE)?;
            let (log_entry, most_shared_bytes) = (function.log_entry.take(), function.most_shared_bytes);
            let code = function.code.clone();
            if let Some(entry) = log_entry {
                machine.log(&entry);
            }
            let threads = config.block.iter().map(|&n| u64::from(n)).product::<u64>();
            let fits = code.max_threads.is_none_or(|most| threads <= most.iter().map(|&n| u64::from(n)).product());
            let limits = [(config.grid, [i32::MAX as u32, 65_535, 65_535]), (config.block, [1024, 1024, 64])];
            let is_within = limits.iter().all(|(n, most)| n.iter().zip(most).all(|(n, most)| (1..=*most).contains(n)));
            if !fits || !is_within || threads > 1024 || u64::from(config.shared_bytes) > most_shared_bytes {
                return Err(status::INVALID_VALUE);
            }
            let mut cluster = [1; 3];
            for n in 0..config.attribute_count as usize {
                // SAFETY: as many attributes as the configuration says.
                let attribute = unsafe { &*config.attributes.wrapping_add(n) };
                // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                if attribute.id != 4 || machine.settings.arch < (Arch { major: 9, minor: 0 }) {
                    return Err(status::NOT_SUPPORTED);
                }
                cluster.copy_from_slice(&attribute.value[..3]);
            }
            if config.grid.iter().zip(&cluster).any(|(grid, cluster)| *cluster == 0 || grid % cluster != 0) {
                return Err(status::INVALID_VALUE);
            }
            let mut parameters = vec![0; code.parameter_bytes as usize];
            for (n, &(offset, bytes)) in code.parameters.iter().enumerate() {
                // SAFETY: an argument for each parameter.
                let argument = unsafe { *arguments.wrapping_add(n) };
                // SAFETY: the argument has as many bytes as the parameter.
                let argument = unsafe { std::slice::from_raw_parts(argument, bytes as usize) };
                parameters[offset as usize..][..bytes as usize].copy_from_slice(argument);
            }
            let shared_bytes = code.shared_bytes + u64::from(config.shared_bytes);
            let LaunchConfig { grid, block, stream, .. } = *config;
            machine.put(stream, Work::Launch(Arc::new(KernelLaunch { code, grid, block, cluster, shared_bytes, parameters })))
        })
    }

    fn cuTensorMapEncodeTiled(
        _map: *mut c_void, _data_type: c_int, _rank: c_uint, _address: *mut c_void, _extents: *const c_ulonglong,
        _strides: *const c_ulonglong, _boxed: *const c_uint, _steps: *const c_uint, _interleave: c_int,
        _swizzle: c_int, _promotion: c_int, _fill: c_int,
    ) {
        status::NOT_SUPPORTED.0
    }
}

/// Warp instructions executed so far; the benchmark reads it.
#[unsafe(no_mangle)]
extern "C" fn xtrain_emulator_steps() -> u64 {
    machine::lock().as_ref().map_or(0, |machine| machine.steps)
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: c_uint,
    pad: u32,
    value: [u32; 16],
}

/// True if the whole range is pinned.
fn is_pinned(machine: &Machine, start: usize, bytes: usize) -> bool {
    let before = machine.pinned.range(..=start).next_back();
    before.is_some_and(|(begin, length)| start + bytes <= begin + length)
}

/// A string that is never freed, like the driver's.
fn lasting(text: &str) -> &'static CStr {
    static TEXTS: Mutex<Vec<&'static CStr>> = Mutex::new(Vec::new());
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = texts.iter().find(|known| known.to_bytes() == text.as_bytes()) {
        return known;
    }
    let text: &'static CStr = Box::leak(CString::new(text).unwrap_or_default().into_boxed_c_str());
    texts.push(text);
    text
}

/// The maximum shared memory of a block (CUDA programming guide, table of compute capabilities).
fn shared_per_block(arch: Arch) -> u64 {
    let kib = match (arch.major, arch.minor) {
        (8, 0 | 7) => 163,
        (8, _) | (12, _) => 99,
        _ => 227,
    };
    kib << 10
}

/// A `CUdevice_attribute`. The clock and memory rates are nominal.
fn attribute_of(arch: Arch, attribute: c_int) -> Option<c_int> {
    Some(match attribute {
        // MAX_THREADS_PER_BLOCK
        1 => 1024,
        // CLOCK_RATE, in kHz
        13 => 1_000_000,
        // MULTIPROCESSOR_COUNT
        16 => crate::grid::MULTIPROCESSORS as c_int,
        // MEMORY_CLOCK_RATE, in kHz, and GLOBAL_MEMORY_BUS_WIDTH, in bits
        36 => 1_000_000,
        37 => 1024,
        // L2_CACHE_SIZE
        38 => 512 << 10,
        // COMPUTE_CAPABILITY_MAJOR and _MINOR
        75 => arch.major as c_int,
        76 => arch.minor as c_int,
        // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        97 => shared_per_block(arch) as c_int,
        _ => return None,
    })
}
