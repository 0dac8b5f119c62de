//! The GPUs that the driver reports.

use crate::arch::Arch;
use crate::error::CudaError;
use crate::ffi::driver::{self as ffi, CuDevice, Driver};
use crate::ffi::open::{check, driver, driver_library};
use std::ffi::{CStr, c_char, c_int};

/// A GPU, by its index among those that `CUDA_VISIBLE_DEVICES` makes visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    pub(crate) handle: CuDevice,
    ordinal: usize,
}

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// NVIDIA's name of the model, e.g. `NVIDIA H200`.
    pub name: String,
    /// The identity of the device, which survives renumbering.
    pub uuid: [u8; 16],
    /// Compute capability.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// Bytes of its L2 cache.
    pub l2_bytes: usize,
    /// The largest shared memory of a block, in bytes.
    pub shared_bytes_per_block: usize,
    /// The largest number of threads in a block.
    pub threads_per_block: u32,
    /// The memory's peak bandwidth in bytes a second, from its clock and bus width. It is an upper bound.
    pub memory_bandwidth: f64,
    /// The highest clock of the multiprocessors, in Hz.
    pub clock_hz: f64,
}

/// Peak bf16 operations a second of dense tensor-core GEMMs with f32 sums, from NVIDIA's data sheets. The
/// first name that the device's name contains applies.
const PEAK_BF16_FLOPS: [(&str, f64); 12] = [
    ("H200", 989.4e12),
    ("H100 PCIe", 756.0e12),
    ("H100 NVL", 835.0e12),
    ("H100", 989.4e12),
    ("GH200", 989.4e12),
    ("B200", 2250.0e12),
    ("A100", 312.0e12),
    ("A40", 149.7e12),
    ("L40S", 362.0e12),
    ("L4", 121.0e12),
    ("RTX 4090", 165.2e12),
    ("RTX 5090", 209.5e12),
];

impl DeviceInfo {
    /// Peak bf16 operations a second with f32 sums, which MFU is relative to; None if no data sheet is known.
    pub fn peak_bf16_flops(&self) -> Option<f64> {
        peak_bf16_flops(&self.name)
    }
}

/// Peak bf16 operations a second of the GPU of this name, as [`DeviceInfo::peak_bf16_flops`].
pub fn peak_bf16_flops(name: &str) -> Option<f64> {
    PEAK_BF16_FLOPS.iter().find(|(part, _)| name.contains(part)).map(|(_, flops)| *flops)
}

impl CudaDevice {
    /// The driver's version in NVIDIA's form: 13000 is CUDA 13.0, which driver 580 supports. It needs no GPU.
    pub fn driver_version() -> Result<u32, CudaError> {
        let driver = &driver_library()?.table;
        let mut version = 0;
        // SAFETY: writes one integer.
        check(driver, "cuDriverGetVersion", unsafe { (driver.cuDriverGetVersion)(&mut version) })?;
        Ok(version as u32)
    }

    /// All visible GPUs.
    pub fn all() -> Result<Vec<CudaDevice>, CudaError> {
        let driver = &driver()?.table;
        let mut count = 0;
        // SAFETY: writes one integer.
        check(driver, "cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
        (0..count).map(|ordinal| CudaDevice::from_ordinal(driver, ordinal)).collect()
    }

    /// The GPU of this index.
    pub fn get(ordinal: usize) -> Result<CudaDevice, CudaError> {
        CudaDevice::all()?.get(ordinal).copied().ok_or(CudaError::NoDevice)
    }

    fn from_ordinal(driver: &Driver, ordinal: c_int) -> Result<CudaDevice, CudaError> {
        let mut handle = 0;
        // SAFETY: writes one integer; the driver checks the ordinal.
        check(driver, "cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut handle, ordinal) })?;
        Ok(CudaDevice { handle, ordinal: ordinal as usize })
    }

    /// The index.
    pub fn ordinal(self) -> usize {
        self.ordinal
    }

    /// True if other processes can map this GPU's memory.
    pub fn shares_memory(self) -> Result<bool, CudaError> {
        let driver = &driver()?.table;
        let (mut shares, attribute) = (0, ffi::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
        // SAFETY: writes one integer.
        let status = unsafe { (driver.cuDeviceGetAttribute)(&mut shares, attribute, self.handle) };
        check(driver, "cuDeviceGetAttribute", status)?;
        Ok(shares != 0)
    }

    /// True if NVLink connects both GPUs, directly or through a switch. Atomic operations on each other's
    /// memory, which PCIe lacks, tell it.
    pub fn is_linked_to(self, peer: CudaDevice) -> Result<bool, CudaError> {
        let driver = &driver()?.table;
        let (mut linked, attribute) = (0, ffi::P2P_NATIVE_ATOMIC_SUPPORTED);
        // SAFETY: writes one integer.
        let status =
            unsafe { (driver.cuDeviceGetP2PAttribute)(&mut linked, attribute, self.handle, peer.handle) };
        check(driver, "cuDeviceGetP2PAttribute", status)?;
        Ok(linked != 0)
    }

    /// The properties.
    pub fn info(self) -> Result<DeviceInfo, CudaError> {
        let driver = &driver()?.table;
        let mut name = [0 as c_char; 256];
        // SAFETY: writes at most 256 characters, the last of which is zero.
        let status = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr(), 256, self.handle) };
        check(driver, "cuDeviceGetName", status)?;
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        let status = unsafe { (driver.cuDeviceGetUuid_v2)(&mut uuid, self.handle) };
        check(driver, "cuDeviceGetUuid", status)?;
        let mut memory_bytes = 0;
        // SAFETY: writes one integer.
        let status = unsafe { (driver.cuDeviceTotalMem_v2)(&mut memory_bytes, self.handle) };
        check(driver, "cuDeviceTotalMem", status)?;
        let attribute = |attribute: c_int| -> Result<u32, CudaError> {
            let mut value = 0;
            // SAFETY: writes one integer; the driver refuses attributes that it does not know.
            let status = unsafe { (driver.cuDeviceGetAttribute)(&mut value, attribute, self.handle) };
            check(driver, "cuDeviceGetAttribute", status)?;
            Ok(value.max(0) as u32)
        };
        // Double data rate: two transfers a clock.
        let clock = f64::from(attribute(ffi::MEMORY_CLOCK_RATE_KHZ)?) * 1e3;
        let bus_bytes = f64::from(attribute(ffi::GLOBAL_MEMORY_BUS_WIDTH_BITS)?) / 8.0;
        // SAFETY: the buffer ends with a zero: the driver fills at most 255 characters and ends them with
        // one.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Ok(DeviceInfo {
            name: name.to_string_lossy().into_owned(),
            uuid,
            arch: Arch::new(
                attribute(ffi::COMPUTE_CAPABILITY_MAJOR)?,
                attribute(ffi::COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(ffi::MULTIPROCESSOR_COUNT)?,
            memory_bytes,
            l2_bytes: attribute(ffi::L2_CACHE_BYTES)? as usize,
            shared_bytes_per_block: attribute(ffi::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            threads_per_block: attribute(ffi::MAX_THREADS_PER_BLOCK)?,
            memory_bandwidth: 2.0 * clock * bus_bytes,
            clock_hz: f64::from(attribute(ffi::CLOCK_RATE_KHZ)?) * 1e3,
        })
    }
}
