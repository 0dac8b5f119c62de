//! Modules, kernels and their launches.

use super::device::shared_per_block;
use super::{Handle, Out, call, export, on_device, synchronizing};
use crate::machine::{self, Function, PORTABLE_CLUSTER};
use crate::status;
use crate::tensor_map::{MOST_DIMENSIONS, TensorMap};
use crate::work::{KernelLaunch, WorkItem};
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
            // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            if attribute == 14 {
                function.most_blocks = if value == 0 { PORTABLE_CLUSTER } else { 16 };
                return Ok(());
            }
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
            let Function { most_shared_bytes, most_blocks, .. } = *function;
            let log_entry = function.log_entry.take();
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
            let (mut cluster, mut begins_early) = (None, false);
            for n in 0..config.attribute_count as usize {
                // SAFETY: as many attributes as the configuration says.
                let attribute = unsafe { &*config.attributes.wrapping_add(n) };
                match attribute.id {
                    _ if machine.settings.arch.major < 9 => return Err(status::NOT_SUPPORTED),
                    // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                    4 => cluster = attribute.value[..3].try_into().ok(),
                    // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                    6 => begins_early = attribute.value[0] != 0,
                    _ => return Err(status::NOT_SUPPORTED),
                }
            }
            // The kernel's own size and that of the launch must agree.
            let is_other = cluster.is_some() && code.cluster.is_some() && cluster != code.cluster;
            let cluster = cluster.or(code.cluster).unwrap_or([1; 3]);
            let is_whole = config.grid.iter().zip(&cluster).all(|(grid, cluster)| *cluster > 0 && grid % cluster == 0);
            if is_other || !is_whole || cluster.iter().product::<u32>() > most_blocks {
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
            let launch = KernelLaunch { code, grid, block, cluster, shared_bytes, parameters };
            machine.put(stream, WorkItem::Launch(Arc::new(launch), begins_early))
        })
    }

    fn cuTensorMapEncodeTiled(
        map: Out<[u64; 16]>, data_type: c_int, rank: c_uint, address: u64, extents: *const c_ulonglong,
        strides: *const c_ulonglong, boxed: *const c_uint, steps: *const c_uint, interleave: c_int,
        swizzle: c_int, promotion: c_int, fill: c_int,
    ) {
        call(|machine| {
            let rank = rank as usize;
            let is_enumerated = (0..=9).contains(&data_type) && (0..=3).contains(&swizzle) && (0..=3).contains(&promotion);
            if machine.settings.arch.major < 9 || !(1..=MOST_DIMENSIONS).contains(&rank) || !is_enumerated {
                return Err(status::INVALID_VALUE);
            }
            // CU_TENSOR_MAP_DATA_TYPE_UINT8 to BFLOAT16.
            let element_bytes = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2][data_type as usize];
            let map_of = TensorMap {
                address,
                element_bytes,
                swizzle_bits: swizzle as u32,
                extents: numbers(extents, rank),
                strides: numbers(strides, rank - 1),
                boxed: numbers(boxed, rank),
            };
            let is_plain = numbers(steps, rank).iter().all(|step| *step == 1) && interleave == 0 && fill == 0;
            let checked = if is_plain { map_of.check() } else { Err("steps, interleaving and NaN are not emulated".into()) };
            checked.map_err(|problem| {
                eprintln!("emulated GPU: cuTensorMapEncodeTiled: {problem}");
                status::INVALID_VALUE
            })?;
            map.set(map_of.encode())
        })
    }
}

/// Numbers of the caller's array.
fn numbers<T: Copy + Into<u64>>(array: *const T, count: usize) -> Vec<u64> {
    // SAFETY: the caller promises as many numbers.
    let numbers = (0..count).map(|n| unsafe { *array.wrapping_add(n) });
    numbers.map(Into::into).collect()
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
