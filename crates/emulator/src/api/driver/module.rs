//! Modules, kernels and their launches.

use super::device::shared_per_block;
use super::{Handle, Out, call, export, on_device, synchronizing};
use crate::machine;
use crate::settings::Arch;
use crate::status;
use crate::work::{KernelLaunch, Work};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

export! {
    fn cuModuleLoadData(module: Out<Handle>, image: *const c_void) {
        synchronizing(|machine, device| {
            // SAFETY: an image of the emulated compiler's is text that ends with a zero.
            let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| status::INVALID_IMAGE)?;
            let handle = machine.load(device, text)?;
            module.set(handle)
        })
    }

    fn cuModuleUnload(module: Handle) {
        synchronizing(|machine, _| machine.unload(module))
    }

    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: *const c_char) {
        on_device(|machine, _| {
            // SAFETY: the caller's string.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            let handle = machine.function(module, &name)?;
            function.set(handle)
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

    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, function: Handle) {
        call(|machine| {
            let code = &machine.functions.get(&function).ok_or(status::INVALID_HANDLE)?.code;
            let number = match attribute {
                1 => code.shared_bytes,
                3 => code.local_bytes,
                4 => (code.slots.b32 + 2 * code.slots.b64).min(255) as u64,
                _ => return Err(status::INVALID_VALUE),
            };
            value.set(number as c_int)
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
