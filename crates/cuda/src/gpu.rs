//! A card that programs run on: its context, the kernels compiled for it, and the libraries opened on it.

use crate::blas::Blas;
use crate::cache::KernelCache;
use crate::compiler::{Arch, Compiler};
use crate::context::Context;
use crate::device::{Device, DeviceInfo};
use crate::dnn::{Dnn, GraphBuilder, GraphPlan};
use crate::error::CudaError;
use crate::ffi::open::cublaslt;
use crate::module::{Function, Module};
use crate::sdpa::{Direction, Sdpa};
use crate::source::KernelSource;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The version of the driver that runs what CUDA 13's libraries make.
const OLDEST_DRIVER: u32 = 13_000;

/// A card, and what is kept for all that runs on it.
pub struct Gpu {
    context: Context,
    info: DeviceInfo,
    compiler: Compiler,
    cache: KernelCache,
    /// By source and options.
    modules: Mutex<HashMap<(&'static str, Vec<String>), Module>>,
    /// Which of several ways was the fastest, by what it is a way to do.
    choices: Mutex<HashMap<String, String>>,
    /// Opened by the first product.
    blas: OnceLock<Result<Arc<Blas>, CudaError>>,
    /// Opened by the first operation graph.
    dnn: OnceLock<Result<Arc<Dnn>, CudaError>>,
    /// What cuDNN has planned, or why it has not.
    attentions: Mutex<HashMap<(Sdpa, Direction), Result<Arc<GraphPlan>, CudaError>>>,
}

impl Gpu {
    /// The card at this place among those that can be seen.
    ///
    /// # Errors
    /// Where there is none, or a library without which nothing runs on it.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        Gpu::with_cache(ordinal, KernelCache::of_user())
    }

    /// The same, what is found out about it kept in `cache`.
    pub fn with_cache(ordinal: usize, cache: KernelCache) -> Result<Gpu, CudaError> {
        let device = Device::at(ordinal)?;
        let version = Device::driver_version()?;
        if version < OLDEST_DRIVER {
            return Err(CudaError::TooOldDriver { version });
        }
        let info = device.info()?;
        if info.arch < Arch::SM80 {
            return Err(CudaError::TooOldCard { name: info.name, arch: info.arch });
        }
        let compiler = Compiler::open()?;
        // Nearly every program has products: better missed here than after minutes of reading.
        cublaslt()?;
        Ok(Gpu {
            context: Context::new(device)?,
            info,
            compiler,
            cache,
            modules: Mutex::default(),
            choices: Mutex::default(),
            blas: OnceLock::new(),
            dnn: OnceLock::new(),
            attentions: Mutex::default(),
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

    /// The compiler of its kernels.
    pub(crate) fn compiler(&self) -> Compiler {
        self.compiler
    }

    /// Where what is found out about it is kept.
    pub fn cache(&self) -> &KernelCache {
        &self.cache
    }

    pub(crate) fn choices(&self) -> &Mutex<HashMap<String, String>> {
        &self.choices
    }

    /// cuBLASLt on this card.
    pub(crate) fn blas(&self) -> Result<&Arc<Blas>, CudaError> {
        let opened = self.blas.get_or_init(|| Blas::open(&self.context).map(Arc::new));
        opened.as_ref().map_err(Clone::clone)
    }

    /// cuDNN on this card.
    pub(crate) fn dnn(&self) -> Result<&Arc<Dnn>, CudaError> {
        self.dnn.get_or_init(|| Dnn::open(&self.context).map(Arc::new)).as_ref().map_err(Clone::clone)
    }

    /// cuDNN's plan for attention of these sizes, as `plan` makes it the first time: a model's layers share it.
    pub(crate) fn attention(
        &self,
        sizes: Sdpa,
        direction: Direction,
        plan: impl FnOnce(GraphBuilder) -> Result<GraphPlan, CudaError>,
    ) -> Result<Arc<GraphPlan>, CudaError> {
        let builder = GraphBuilder::new(self.dnn()?);
        // Locked while a plan is made, so that no two make the same. What a thread that panicked left is whole.
        let mut all = self.attentions.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry((sizes, direction)).or_insert_with(|| plan(builder).map(Arc::new)).clone()
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
