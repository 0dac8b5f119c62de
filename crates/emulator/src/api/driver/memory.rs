//! Memory of devices and pinned memory of the host: allocations, mappings and copies.

use super::{Handle, Out, call, export, number, on_device, synchronizing, waiting};
use crate::machine::{self, Machine};
use crate::memory::PAGE;
use crate::poison::POISON;
use crate::status;
use crate::work::{Failure, HostAddress, HostSource, WorkItem};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FILE: c_int = 1;

export! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        on_device(|machine, device| {
            let (is_free, all) = machine.devices[device].memory.free_and_total();
            free.set(is_free as usize)?;
            total.set(all as usize)
        })
    }

    fn cuMemAlloc_v2(pointer: Out<u64>, bytes: usize) {
        synchronizing(|machine, device| {
            if bytes == 0 {
                return Err(status::INVALID_VALUE);
            }
            let start = machine.allocate(device, bytes as u64)?;
            pointer.set(start)
        })
    }

    fn cuMemFree_v2(pointer: u64) {
        synchronizing(|machine, device| machine.free(device, pointer))
    }

    fn cuMemGetAllocationGranularity(bytes: Out<usize>, _prop: *const c_void, _option: c_int) {
        number(bytes.set(PAGE as usize))
    }

    fn cuMemAddressReserve(pointer: Out<u64>, bytes: usize, _align: usize, _requested: u64, _flags: c_ulonglong) {
        on_device(|machine, device| {
            if !(bytes as u64).is_multiple_of(PAGE) {
                return Err(status::INVALID_VALUE);
            }
            let of = &mut machine.devices[device];
            let start = of.memory.reserve(bytes as u64).map_err(|_| status::OUT_OF_MEMORY)?;
            of.reservations.insert(start, bytes as u64);
            pointer.set(start)
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

    fn cuMemCreate(handle: Out<c_ulonglong>, bytes: usize, _prop: *const c_void, _flags: c_ulonglong) {
        synchronizing(|machine, device| {
            if bytes == 0 || !(bytes as u64).is_multiple_of(PAGE) {
                return Err(status::INVALID_VALUE);
            }
            let number = machine.handle() as u64;
            let of = &mut machine.devices[device];
            let physical = of.memory.create(bytes as u64).map_err(|_| status::OUT_OF_MEMORY)?;
            of.physical.insert(number, (physical, 0));
            handle.set(number)
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

    fn cuMemExportToShareableHandle(file: Out<c_int>, handle: c_ulonglong, kind: c_int, _flags: c_ulonglong) {
        on_device(|machine, device| {
            let of = &machine.devices[device];
            let (physical, _) = of.physical.get(&handle).ok_or(status::INVALID_VALUE)?;
            if kind != POSIX_FILE {
                return Err(status::NOT_SUPPORTED);
            }
            file.set(of.memory.export(*physical).into_raw_fd())
        })
    }

    fn cuMemImportFromShareableHandle(handle: Out<c_ulonglong>, file: usize, kind: c_int) {
        on_device(|machine, device| {
            if kind != POSIX_FILE {
                return Err(status::NOT_SUPPORTED);
            }
            let number = machine.handle() as u64;
            let of = &mut machine.devices[device];
            // SAFETY: the caller's file, which stays open during the call.
            let file = unsafe { BorrowedFd::borrow_raw(file as c_int) };
            let physical = of.memory.import(file).ok_or(status::INVALID_VALUE)?;
            of.physical.insert(number, (physical, 0));
            handle.set(number)
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
                return Err(machine.fail(device, Failure { status: status::ILLEGAL_ADDRESS, text }));
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

    fn cuMemHostAlloc(pointer: Out<*mut c_void>, bytes: usize, _flags: c_uint) {
        synchronizing(|machine, _| {
            if bytes == 0 {
                return Err(status::INVALID_VALUE);
            }
            // Poison, so that uninitialised bytes show.
            let memory: Box<[u8]> = vec![POISON; bytes].into();
            let start = Box::into_raw(memory).cast::<c_void>();
            machine.pinned.insert(start as usize, bytes);
            pointer.set(start)
        })
    }

    fn cuMemFreeHost(pointer: *mut c_void) {
        let mut of = None;
        let checked = synchronizing(|machine, device| {
            of = Some(device);
            machine.pinned.get(&(pointer as usize)).map(|_| ()).ok_or(status::INVALID_VALUE)
        });
        if checked != status::SUCCESS.0 {
            return checked;
        }
        // The driver waits for copies that use it.
        of.into_iter().for_each(machine::finish_device);
        call(|machine| {
            let bytes = machine.pinned.remove(&(pointer as usize)).ok_or(status::INVALID_VALUE)?;
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
            machine.put(stream, WorkItem::Upload { target: to, source })
        })
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) {
        waiting(|machine| {
            let is_pinned = is_pinned(machine, to as usize, bytes);
            if !is_pinned && machine.streams.get(&stream).is_some_and(|stream| stream.captured.is_some()) {
                return Err(status::NOT_SUPPORTED);
            }
            machine.put(stream, WorkItem::Download { target: HostAddress(to as usize), source: from, bytes: bytes as u64 })?;
            // A copy to pageable memory has ended when the call returns.
            if is_pinned { Ok(None) } else { machine.tail_of(stream) }
        })
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        on_device(|machine, _| machine.put(stream, WorkItem::Copy { target: to, source: from, bytes: bytes as u64 }))
    }

    fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: Handle) {
        on_device(|machine, _| machine.put(stream, WorkItem::Fill { target: to, byte, bytes: bytes as u64 }))
    }
}

/// True if the whole range is pinned.
fn is_pinned(machine: &Machine, start: usize, bytes: usize) -> bool {
    let before = machine.pinned.range(..=start).next_back();
    before.is_some_and(|(begin, length)| start + bytes <= begin + length)
}
