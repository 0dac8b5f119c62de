//! A card that programs run on: its context, the kernels compiled for it, and the libraries opened on it.

use crate::arch::Arch;
use crate::blas::Blas;
use crate::cache::KernelCache;
use crate::capture_lock;
use crate::compiler::Compiler;
use crate::context::Context;
use crate::device::{Device, DeviceInfo};
use crate::dnn::{Direction, Dnn, GraphBuilder, GraphPlan};
use crate::error::CudaError;
use crate::ffi::open::{cublaslt, cudnn, driver_library};
use crate::module::{Function, Module};
use crate::source::KernelSource;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

/// The version of the driver that runs what CUDA 13's libraries make.
const OLDEST_DRIVER: u32 = 13_000;

/// A card, and what is kept for all that runs on it.
pub struct Gpu {
    context: Context,
    info: DeviceInfo,
    compiler: Compiler,
    cache: KernelCache,
    /// By source and options.
    modules: Mutex<HashMap<(&'static str, Vec<String>), Arc<LoadedModule>>>,
    /// The names of the algorithms chosen so far, by key.
    pub(crate) choices: Mutex<BTreeMap<String, String>>,
    /// The algorithms of GEMMs as text, by key; each is chosen by the first thread that asks for it.
    pub(crate) gemm_choices: Mutex<HashMap<String, Arc<GemmChoiceCell>>>,
    /// Opened by the first product.
    blas: OnceLock<Result<Arc<Blas>, CudaError>>,
    /// cuDNN, opened by the first operation graph; once for each direction of attention, as each plans for a good part of a second.
    dnns: [OnceLock<Result<Arc<Dnn>, CudaError>>; 2],
    /// cuDNN's plans, by key.
    graph_plans: Mutex<HashMap<String, Arc<PlannedGraph>>>,
}

/// The algorithm of a GEMM as text, or why none is known.
pub(crate) type GemmChoiceCell = OnceLock<Result<String, CudaError>>;

/// A module, or why there is none; loaded by the first who asks.
type LoadedModule = OnceLock<Result<Module, CudaError>>;

/// What cuDNN has planned, or why it has not; planned by the first who asks.
type PlannedGraph = OnceLock<Result<Arc<GraphPlan>, CudaError>>;

impl Gpu {
    /// The card at this place among those that can be seen.
    ///
    /// # Errors
    /// Where there is none, or a library without which nothing runs on it.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        Gpu::with_cache(ordinal, KernelCache::for_user())
    }

    /// The same, what is found out about it kept in `cache`.
    pub fn with_cache(ordinal: usize, cache: KernelCache) -> Result<Gpu, CudaError> {
        let begun = Instant::now();
        // A machine without a driver is told before anything large is read.
        driver_library()?;
        // Libraries are files of hundreds of MB: they are opened beside the card, which takes as long.
        let (card, compiler) = std::thread::scope(|scope| {
            let libraries = scope.spawn(|| -> Result<Compiler, CudaError> {
                let compiler = Compiler::open()?;
                // Nearly every program has products: better missed here than after minutes of reading.
                cublaslt()?;
                // Where it is missing, attention does without it.
                let _ = cudnn();
                Ok(compiler)
            });
            let card = open_card(ordinal);
            (card, libraries.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let ((info, context), compiler) = (card?, compiler?);
        tracing::debug!("the GPU and its libraries opened in {:.3} s", begun.elapsed().as_secs_f64());
        Ok(Gpu {
            context,
            info,
            compiler,
            cache,
            modules: Mutex::default(),
            choices: Mutex::default(),
            gemm_choices: Mutex::default(),
            blas: OnceLock::new(),
            dnns: Default::default(),
            graph_plans: Mutex::default(),
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

    /// cuBLASLt on this card.
    pub(crate) fn blas(&self) -> Result<&Arc<Blas>, CudaError> {
        let opened = self.blas.get_or_init(|| {
            let _no_capture = capture_lock::exclude_capture();
            Blas::open(&self.context).map(Arc::new)
        });
        opened.as_ref().map_err(Clone::clone)
    }

    /// cuDNN's version, where it is found.
    pub(crate) fn dnn_version(&self) -> Option<usize> {
        let opened = cudnn().ok()?;
        // SAFETY: takes nothing and returns a number.
        Some(unsafe { (opened.table.cudnnGetVersion)() })
    }

    /// cuDNN's plan of the graph with this key; `plan` makes it for the first caller.
    pub(crate) fn graph_plan(
        &self,
        key: String,
        direction: Direction,
        plan: impl FnOnce(GraphBuilder) -> Result<GraphPlan, CudaError>,
    ) -> Result<Arc<GraphPlan>, CudaError> {
        // The map stays whole if a thread panics: a plan is added in one step.
        let mut all = self.graph_plans.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = all.entry(key).or_default().clone();
        drop(all);
        let planned = cell.get_or_init(|| {
            let dnn = self.dnns[direction as usize].get_or_init(|| {
                let _no_capture = capture_lock::exclude_capture();
                Dnn::open(&self.context).map(Arc::new)
            });
            let dnn = dnn.as_ref().map_err(Clone::clone)?;
            plan(GraphBuilder::new(dnn)).map(Arc::new)
        });
        planned.clone()
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
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = modules.entry(key).or_default().clone();
        drop(modules);
        // Compiled by the first who asks; those who ask meanwhile wait, and others go on.
        let module = cell.get_or_init(|| {
            let text = source.full_text();
            let cubin = self.cache.compile(self.compiler, source.name, &text, self.info.arch, &options)?;
            Module::load(&self.context, &cubin)
        });
        module.as_ref().map_err(Clone::clone)?.function(name)
    }
}

/// What a card says of itself, and its context, where it is one that programs can run on.
fn open_card(ordinal: usize) -> Result<(DeviceInfo, Context), CudaError> {
    let device = Device::at(ordinal)?;
    let version = Device::driver_version()?;
    if version < OLDEST_DRIVER {
        return Err(CudaError::TooOldDriver { version });
    }
    let info = device.info()?;
    if info.arch < Arch::SM80 {
        return Err(CudaError::TooOldDevice { name: info.name, arch: info.arch });
    }
    Ok((info, Context::new(device)?))
}
