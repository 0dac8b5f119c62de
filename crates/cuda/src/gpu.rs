//! A card that programs run on: its context, the kernels compiled for it, and the libraries opened on it.

use crate::cache::KernelCache;
use crate::compiler::Compiler;
use crate::context::Context;
use crate::device::{Device, DeviceInfo};
use crate::error::CudaError;
use crate::module::{Function, Module};
use crate::source::KernelSource;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// A card, and what is kept for all that runs on it.
pub struct Gpu {
    context: Context,
    info: DeviceInfo,
    compiler: Compiler,
    cache: KernelCache,
    /// By source and options.
    modules: Mutex<HashMap<(&'static str, Vec<String>), Module>>,
}

impl Gpu {
    /// The card at this place among those that can be seen.
    ///
    /// # Errors
    /// Where there is none, or a library without which nothing runs on it.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        let device = Device::at(ordinal)?;
        let info = device.info()?;
        let compiler = Compiler::open()?;
        Ok(Gpu {
            context: Context::new(device)?,
            info,
            compiler,
            cache: KernelCache::of_user(),
            modules: Mutex::default(),
        })
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What it says of itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The kernel `name` of `source`, compiled for this card with `defines`; compiled once, here and on the disk.
    pub fn function(
        &self,
        source: &KernelSource,
        defines: &[(&str, i64)],
        name: &str,
    ) -> Result<Function, CudaError> {
        let options = KernelSource::options(defines);
        let key = (source.name, options.clone());
        // What a thread that panicked left is whole: modules are added in one step.
        let known = self.modules.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(module) = known {
            return module.function(name);
        }
        let cubin =
            self.cache.compile(self.compiler, source.name, &source.full_text(), self.info.arch, &options)?;
        let module = Module::load(&self.context, &cubin)?;
        self.modules.lock().unwrap_or_else(PoisonError::into_inner).insert(key, module.clone());
        module.function(name)
    }
}
