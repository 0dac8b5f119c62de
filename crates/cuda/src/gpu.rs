//! A GPU that programs run on: its context, its compiled kernels, and the libraries opened on it.

use crate::arch::Arch;
use crate::blas::Blas;
use crate::cache::KernelCache;
use crate::capture_lock;
use crate::compiler::Compiler;
use crate::context::Context;
use crate::device::{CudaDevice, DeviceInfo};
use crate::dnn::{Direction, Dnn, GraphBuilder, GraphPlan};
use crate::error::CudaError;
use crate::ffi::open::{cublaslt, cudnn, driver_library};
use crate::module::{Function, Module};
use crate::preferred::preferred_algorithms;
use crate::source::KernelSource;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

/// The oldest driver that CUDA 13's libraries support.
const OLDEST_DRIVER: u32 = 13_000;

/// A GPU, and the resources that programs on it share.
pub struct Gpu {
    context: Context,
    info: DeviceInfo,
    compiler: Compiler,
    cache: KernelCache,
    /// Loaded modules, by source and compiler options.
    modules: Mutex<HashMap<(&'static str, Vec<String>), Arc<LoadedModule>>>,
    /// The names of preferred algorithms, the first one first.
    preferred: Vec<String>,
    /// The names of the algorithms chosen so far, by key.
    pub(crate) choices: Mutex<BTreeMap<String, String>>,
    /// The algorithms of GEMMs as text, by key; the first thread that needs one chooses it.
    pub(crate) gemm_choices: Mutex<HashMap<String, Arc<GemmChoiceCell>>>,
    /// cuBLASLt, opened by the first GEMM.
    blas: OnceLock<Result<Arc<Blas>, CudaError>>,
    /// cuDNN, opened by the first operation graph. Each direction of attention has a handle, so that both are
    /// planned at the same time.
    dnns: [OnceLock<Result<Arc<Dnn>, CudaError>>; 2],
    /// cuDNN's plans, by key.
    graph_plans: Mutex<HashMap<String, Arc<PlannedGraph>>>,
}

/// The algorithm of a GEMM as text, or why none is known.
pub(crate) type GemmChoiceCell = OnceLock<Result<String, CudaError>>;

/// A module or the reason why it failed; loaded by the first thread that asks.
type LoadedModule = OnceLock<Result<Module, CudaError>>;

/// A plan of cuDNN or the reason why it failed; planned by the first thread that asks.
type PlannedGraph = OnceLock<Result<Arc<GraphPlan>, CudaError>>;

impl Gpu {
    /// Opens the visible GPU of this index.
    ///
    /// # Errors
    /// If there is none, or a required library is missing.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        Gpu::with_cache(ordinal, KernelCache::for_user())
    }

    /// Opens the GPU with a disk cache of its own.
    pub fn with_cache(ordinal: usize, cache: KernelCache) -> Result<Gpu, CudaError> {
        let started = Instant::now();
        // Reports a machine without a driver before any large file is read.
        driver_library()?;
        // Opening libraries of hundreds of MB takes as long as opening the GPU, so both happen at the same
        // time.
        let open_libraries = || -> Result<Compiler, CudaError> {
            let compiler = Compiler::open()?;
            // Nearly every program has GEMMs: report a missing cuBLASLt now, not after minutes of reading
            // data.
            cublaslt()?;
            // Optional: without cuDNN, attention uses other kernels.
            let _ = cudnn();
            Ok(compiler)
        };
        let (device, compiler) = thread::scope(|scope| {
            let libraries = thread::Builder::new().spawn_scoped(scope, open_libraries);
            let device = open_device(ordinal);
            let compiler = match libraries {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => open_libraries(),
            };
            (device, compiler)
        });
        let ((info, context), compiler) = (device?, compiler?);
        tracing::debug!("the GPU and its libraries opened in {:.3} s", started.elapsed().as_secs_f64());
        Ok(Gpu {
            context,
            info,
            compiler,
            cache,
            modules: Mutex::default(),
            preferred: preferred_algorithms(),
            choices: Mutex::default(),
            gemm_choices: Mutex::default(),
            blas: OnceLock::new(),
            dnns: Default::default(),
            graph_plans: Mutex::default(),
        })
    }

    /// The GPU with these preferred algorithms instead of those that `XTRAIN_PREFER` names, for comparisons
    /// of algorithms.
    pub fn preferring(self, names: &[&str]) -> Gpu {
        Gpu { preferred: names.iter().map(|&name| name.to_owned()).collect(), ..self }
    }

    /// The names of preferred algorithms, in order of preference.
    pub fn preferred(&self) -> &[String] {
        &self.preferred
    }

    /// The GPU's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The GPU's properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The compiler of kernels.
    pub(crate) fn compiler(&self) -> Compiler {
        self.compiler
    }

    /// The disk cache.
    pub fn cache(&self) -> &KernelCache {
        &self.cache
    }

    /// cuBLASLt on this GPU.
    pub(crate) fn blas(&self) -> Result<&Arc<Blas>, CudaError> {
        let opened = self.blas.get_or_init(|| {
            let _no_capture = capture_lock::exclude_capture();
            Blas::open(&self.context).map(Arc::new)
        });
        opened.as_ref().map_err(Clone::clone)
    }

    /// cuDNN's version; None if cuDNN is missing.
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

    /// The kernel `name` of `source` with `defines`, compiled for this GPU. The compiled code is cached in
    /// memory and on disk.
    pub fn function(
        &self,
        source: &KernelSource,
        defines: &[(&str, i64)],
        name: &str,
    ) -> Result<Function, CudaError> {
        let options = KernelSource::options(defines);
        let key = (source.name, options.clone());
        // The map stays whole if a thread panics: a module is added in one step.
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = modules.entry(key).or_default().clone();
        drop(modules);
        // The first thread that needs a module compiles it; others wait.
        let module = cell.get_or_init(|| {
            let text = source.full_text();
            let cubin = self.cache.compile(self.compiler, source.name, &text, self.info.arch, &options)?;
            Module::load(&self.context, &cubin)
        });
        let function = module.as_ref().map_err(Clone::clone)?.function(name)?;
        Ok(function.with_structs(source.structs))
    }
}

/// The properties and the context of a GPU that programs can run on.
fn open_device(ordinal: usize) -> Result<(DeviceInfo, Context), CudaError> {
    let device = CudaDevice::get(ordinal)?;
    let version = CudaDevice::driver_version()?;
    if version < OLDEST_DRIVER {
        return Err(CudaError::TooOldDriver { version });
    }
    let info = device.info()?;
    if info.arch < Arch::SM80 {
        return Err(CudaError::TooOldDevice { name: info.name, arch: info.arch });
    }
    Ok((info, Context::new(device)?))
}
