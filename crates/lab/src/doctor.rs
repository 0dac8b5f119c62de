//! Examination of the hardware and libraries that a machine has for training, with self-tests of each.

use serde::Serialize;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Instant;
use xtrain_config::{Config, Device};
use xtrain_cuda::{Arch, Context, CudaDevice, CudaError, Gpu, Installed, KernelCache, Library};
use xtrain_data::Batch as TokenBatch;
use xtrain_runtime::Checks;
use xtrain_step::engine::{Processor, RECIPES};
use xtrain_step::learner::Learner;
use xtrain_train::spec::plan_on;

/// Result of an examination.
#[derive(Clone, Debug, Serialize)]
pub struct Examination {
    /// Device that `device = "auto"` trains on, for people.
    pub device: String,
    /// True if training works there.
    pub works: bool,
    /// Reason why no GPU is used; `None` if one is.
    pub no_gpu: Option<String>,
    /// NVIDIA's libraries.
    pub libraries: Vec<LibraryFound>,
    /// Problems of the folders that `XTRAIN_CUDA_LIBRARIES` names.
    pub folder_faults: Vec<String>,
    /// The GPUs that the driver shows.
    #[serde(rename = "cards")]
    pub gpus: Vec<GpuFound>,
    /// The self tests, in order.
    #[serde(rename = "trials")]
    pub self_tests: Vec<SelfTest>,
    /// The recipes, each with the first architecture that runs it.
    pub recipes: Vec<RecipeRow>,
    /// Cache of compiled kernels.
    pub kernel_cache: CacheFound,
    /// CPU and memory.
    pub cpu: CpuFound,
}

/// A library of NVIDIA's.
#[derive(Clone, Debug, Serialize)]
pub struct LibraryFound {
    /// Its name.
    pub name: String,
    /// The file's name.
    pub file: &'static str,
    /// The file that was opened.
    pub path: Option<PathBuf>,
    /// Its version.
    pub version: Option<String>,
    /// Reason why it cannot be used, and the consequence; `None` if it works.
    pub missing: Option<MissingLibrary>,
}

/// A library that cannot be used.
#[derive(Clone, Debug, Serialize)]
pub struct MissingLibrary {
    /// The problem.
    pub problem: String,
    /// Places that were searched.
    pub looked_in: Vec<String>,
    /// Instructions to install it.
    pub remedy: &'static str,
    /// Parts of xtrain that do not work without it.
    pub without_it: &'static str,
}

/// A GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuFound {
    /// Its index among the GPUs that `CUDA_VISIBLE_DEVICES` makes visible; training uses index 0.
    pub ordinal: usize,
    /// NVIDIA's name for it.
    pub name: String,
    /// Compute capability, such as `9.0`.
    pub compute_capability: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Free bytes, not counting the context of this process; `None` if the GPU cannot be opened.
    pub free_bytes: Option<u64>,
    /// The recipes that it supports.
    pub recipes: Vec<&'static str>,
}

/// Result of a self-test.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTest {
    /// Its name.
    #[serde(rename = "what")]
    pub name: String,
    /// True if it passed.
    pub ok: bool,
    /// Reason of the failure.
    pub problem: Option<String>,
    /// Seconds that it took.
    pub seconds: f64,
}

/// A row of the table of recipes.
#[derive(Clone, Debug, Serialize)]
pub struct RecipeRow {
    /// Its name in run files.
    pub recipe: &'static str,
    /// The first compute capability that supports it, such as `8.0`.
    pub from: String,
}

/// The folder of compiled kernels.
#[derive(Clone, Debug, Serialize)]
pub struct CacheFound {
    /// Its path; `None` if none can be determined.
    pub folder: Option<PathBuf>,
    /// Files in it.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Reason why it cannot be written and the remedy, if so.
    pub problem: Option<String>,
}

/// Cores and memory.
#[derive(Clone, Debug, Serialize)]
pub struct CpuFound {
    /// Compute threads.
    pub threads: usize,
    /// Bytes of memory that this process could use if nothing else ran.
    pub memory_bytes: Option<u64>,
    /// Bytes of memory that are available now.
    pub available_bytes: Option<u64>,
}

/// Examines and tests everything.
pub fn examine() -> Examination {
    // Before the self-tests, which use this memory.
    let (kernel_cache, cpu) = (cache(), cpu());
    let libraries = Library::ALL.map(library);
    let gpus = CudaDevice::all().unwrap_or_default();
    let gpus = gpus.into_iter().filter_map(|device| gpu(device).ok()).collect();
    let mut self_tests = Vec::new();
    let begun = Instant::now();
    let (processor, no_gpu) = match Processor::choose(Device::Cuda) {
        Ok(processor) => (processor, None),
        Err(error) => (Processor::Cpu, Some(error)),
    };
    if let Some(error) = no_gpu.as_ref().filter(|error| !error.means_no_device()) {
        self_tests.push(self_test("open the GPU", begun, Err(error)));
    }
    let device = processor.describe();
    if let Processor::Cuda(gpu) = &processor {
        self_tests.push(self_test("open the GPU", begun, Ok::<_, CudaError>(())));
        let parts: [(&str, fn(&Gpu) -> Result<(), CudaError>); 3] = [
            ("compile and run a kernel", Gpu::test_kernel),
            ("multiply matrices by cuBLASLt", Gpu::test_gemm),
            ("attention by cuDNN, forward and backward", Gpu::test_attention),
        ];
        for (name, part) in parts {
            let begun = Instant::now();
            self_tests.push(self_test(name, begun, part(gpu)));
        }
    }
    let begun = Instant::now();
    let trained = train_small_model(processor);
    let works = trained.is_ok();
    self_tests.push(self_test("train a small model", begun, trained));
    Examination {
        device,
        works,
        no_gpu: no_gpu.map(|error| error.to_string()),
        libraries: libraries.into(),
        folder_faults: xtrain_cuda::named_folder_faults(),
        gpus,
        self_tests,
        recipes: RECIPES.map(|(recipe, arch)| RecipeRow { recipe: recipe.name(), from: number(arch) }).into(),
        kernel_cache,
        cpu,
    }
}

fn library(library: Library) -> LibraryFound {
    let (name, file) = (library.to_string(), library.file_name());
    match Installed::open(library) {
        Ok(Installed { path, version }) => {
            LibraryFound { name, file, path: Some(path), version: Some(version), missing: None }
        }
        Err(error) => {
            let problem = match error {
                CudaError::Missing(missing) => missing.problem,
                other => other.to_string(),
            };
            let (remedy, without_it) = (library.remedy(), library.without());
            let missing = MissingLibrary { problem, looked_in: library.places(), remedy, without_it };
            LibraryFound { name, file, path: None, version: None, missing: Some(missing) }
        }
    }
}

fn gpu(device: CudaDevice) -> Result<GpuFound, CudaError> {
    let info = device.info()?;
    let free = Context::new(device).and_then(|context| context.memory()).map(|(free, _)| free as u64);
    Ok(GpuFound {
        ordinal: device.ordinal(),
        compute_capability: number(info.arch),
        multiprocessors: info.multiprocessors,
        memory_bytes: info.memory_bytes as u64,
        free_bytes: free.ok(),
        recipes: RECIPES.iter().filter(|(_, from)| info.arch >= *from).map(|(r, _)| r.name()).collect(),
        name: info.name,
    })
}

fn number(arch: Arch) -> String {
    format!("{}.{}", arch.major, arch.minor)
}

fn cache() -> CacheFound {
    let cache = KernelCache::for_user();
    let (files, bytes) = cache.size();
    CacheFound { folder: cache.folder().map(Path::to_owned), files, bytes, problem: cache.problem() }
}

fn cpu() -> CpuFound {
    CpuFound {
        threads: rayon::current_num_threads(),
        memory_bytes: xtrain_tensor::total_bytes(),
        available_bytes: xtrain_tensor::available_bytes(),
    }
}

fn self_test(name: &str, begun: Instant, result: Result<(), impl Display>) -> SelfTest {
    let seconds = begun.elapsed().as_secs_f64();
    let problem = result.err().map(|error| error.to_string());
    SelfTest { name: name.into(), ok: problem.is_none(), problem, seconds }
}

/// A model that trains quickly and exercises everything: grouped queries, several heads, wide enough for the
/// GPU's kernels.
const RUN: &str = "[model]\ndim = 128\nlayers = 2\nheads = 2\nkv_heads = 1\nhead_dim = 64\nffn_dim = 256\n\
                   [data]\ntrain = 'none'\ntokenizer = 'bytes'\nseq_len = 64\n[train]\nsteps = 1\nbatch_size = 4\n";

/// Enough steps to run op by op, be recorded, and be replayed.
const STEPS: u64 = 4;

/// Trains a small model on one batch, whose loss must fall.
fn train_small_model(processor: Processor) -> Result<(), String> {
    let text = |error: &dyn Display| error.to_string();
    let parsed = Config::parse::<&str>(Path::new("doctor"), RUN.as_bytes(), &[]).map_err(|e| text(&e))?;
    let spec = plan_on(&parsed, processor.target()).map_err(|e| text(&e))?.spec;
    let engine = processor.engine(Checks::default()).map_err(|e| text(&e))?;
    let (sequences, seq_len) = (spec.batch.sequences, spec.batch.seq_len);
    let mut learner = Learner::new(engine, spec, 0).map_err(|e| text(&e))?;
    learner.weights().initialize(0, 0.02).map_err(|e| text(&e))?;
    let count = sequences * seq_len;
    let token = |i: usize| (i * i % 31) as i32;
    let batch = TokenBatch {
        batch_size: sequences,
        seq_len,
        tokens: (0..count).map(token).collect(),
        targets: (1..=count).map(token).collect(),
        positions: (0..count).map(|i| (i % seq_len) as i32).collect(),
        doc_start: vec![0; count],
        valid_targets: count,
        row_inputs: vec![seq_len; sequences],
    };
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let result = learner.step(step, 1e-3, std::slice::from_ref(&batch)).map_err(|e| text(&e))?;
        losses.push(result.loss);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    // NaN counts as no decrease.
    if last < first { Ok(()) } else { Err(format!("the loss went from {first} to {last} in {STEPS} steps")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_model_learns_on_the_cpu() {
        train_small_model(Processor::Cpu).expect("the loss falls");
    }

    #[test]
    fn every_recipe_is_in_the_table() {
        let listed: Vec<_> = RECIPES.iter().map(|(recipe, _)| *recipe).collect();
        assert_eq!(listed, xtrain_model::Recipe::ALL);
    }
}
