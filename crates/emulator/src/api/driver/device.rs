//! Devices, their attributes and contexts, and the names of errors.

use super::{CURRENT, Handle, Out, call, export, number};
use crate::machine;
use crate::settings::Arch;
use crate::status::{self, STATUSES};
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::sync::{Mutex, PoisonError};

export! {
    fn cuInit(_flags: c_uint) {
        call(|machine| if machine.devices.is_empty() { Err(status::NO_DEVICE) } else { Ok(()) })
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        number(version.set(13_000))
    }

    fn cuGetErrorName(error: c_int, name: Out<*const c_char>) {
        let known = STATUSES.iter().find(|(number, ..)| *number == error);
        let text = known.map_or(std::ptr::null(), |(_, name, _)| name.as_ptr());
        number(name.set(text))
    }

    fn cuGetErrorString(error: c_int, text: Out<*const c_char>) {
        let known = STATUSES.iter().find(|(number, ..)| *number == error);
        let general = known.map_or(std::ptr::null(), |(.., text)| text.as_ptr());
        let machine = machine::lock();
        let failures = machine.iter().flat_map(|machine| &machine.devices).filter_map(|device| device.failure.as_ref());
        let latest = failures.filter(|failure| failure.status.0 == error).last();
        number(text.set(latest.map_or(general, |failure| lasting(&failure.text).as_ptr())))
    }

    fn cuDeviceGetCount(count: Out<c_int>) {
        call(|machine| count.set(machine.devices.len() as c_int))
    }

    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        call(|machine| {
            if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < machine.devices.len()) {
                device.set(ordinal)
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

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) {
        let mut bytes = *b"emulated GPU 000";
        bytes[15] = device as u8;
        number(uuid.set(bytes))
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, _device: c_int) {
        call(|machine| value.set(attribute_of(machine.settings.arch, attribute).ok_or(status::INVALID_VALUE)?))
    }

    fn cuDeviceGetP2PAttribute(value: Out<c_int>, _attribute: c_int, device: c_int, peer: c_int) {
        call(|machine| {
            let is_known = |of: c_int| usize::try_from(of).is_ok_and(|of| of < machine.devices.len());
            if is_known(device) && is_known(peer) && device != peer {
                value.set(c_int::from(machine.settings.has_nvlink))
            } else {
                Err(status::INVALID_DEVICE)
            }
        })
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        call(|machine| {
            let device = machine.devices.get(device as usize).ok_or(status::INVALID_DEVICE)?;
            bytes.set(device.memory.free_and_total().1 as usize)
        })
    }

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) {
        call(|machine| {
            machine.devices.get_mut(device as usize).ok_or(status::INVALID_DEVICE)?.holders += 1;
            context.set(device as usize + 1)
        })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let mut is_last = false;
        let released = call(|machine| {
            machine.may_synchronize(std::thread::current().id())?;
            let of = machine.devices.get_mut(device as usize).ok_or(status::INVALID_DEVICE)?;
            of.holders = of.holders.checked_sub(1).ok_or(status::INVALID_CONTEXT)?;
            is_last = of.holders == 0;
            Ok(())
        });
        if is_last {
            machine::finish_device(device as usize);
        }
        call(|machine| {
            if is_last {
                // A new context starts without the failure.
                machine.devices[device as usize].failure = None;
            }
            Ok(())
        });
        released
    }

    fn cuCtxSetCurrent(context: Handle) {
        CURRENT.set(context.checked_sub(1));
        status::SUCCESS.0
    }
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
pub(super) fn shared_per_block(arch: Arch) -> u64 {
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
        // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        103 => 1,
        // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        97 => shared_per_block(arch) as c_int,
        _ => return None,
    })
}
