//! Modules and kernels that are loaded on a device.

use crate::compile::compile;
use crate::kernel::{Code, Symbols};
use crate::machine::Machine;
use crate::ptx::{Module, Space};
use crate::status::{self, Status};
use std::io::Write;
use std::sync::Arc;

pub(crate) struct LoadedModule {
    device: usize,
    /// The name and defines of its source.
    source: String,
    parsed: Module,
    globals: Symbols,
    allocations: Vec<u64>,
    functions: Vec<usize>,
}

pub(crate) struct Function {
    pub(crate) code: Arc<Code>,
    /// The maximum dynamic shared memory of a launch.
    pub(crate) most_shared_bytes: u64,
    /// The maximum number of blocks of a cluster.
    pub(crate) most_blocks: u32,
    /// The log line of the first launch.
    pub(crate) log_entry: Option<String>,
}

/// The most blocks of a cluster on every GPU that has clusters.
pub(crate) const PORTABLE_CLUSTER: u32 = 8;

impl Machine {
    /// Parses a module and allocates its global variables.
    pub(crate) fn load(&mut self, device: usize, text: &str) -> Result<usize, Status> {
        let parsed = crate::ptx::parse(text).map_err(|error| {
            eprintln!("emulated GPU: {error}");
            status::INVALID_IMAGE
        })?;
        let target = parsed.target.trim_start_matches("sm_").trim_end_matches('a');
        let arch = self.settings.arch;
        if target != format!("{}{}", arch.major, arch.minor) {
            eprintln!("emulated GPU: a module for {} on {arch}", parsed.target);
            return Err(status::NO_BINARY);
        }
        let (mut globals, mut allocations) = (Symbols::new(), Vec::new());
        for variable in parsed.variables.iter().filter(|variable| variable.space == Space::Global) {
            let start = self.allocate(device, variable.bytes.max(1))?;
            let bytes =
                self.devices[device].memory.bytes(start, variable.bytes).ok_or(status::OUT_OF_MEMORY)?;
            bytes.fill(0);
            for (n, byte) in variable.initial.iter().enumerate() {
                bytes.write(n, [*byte]);
            }
            globals.insert(variable.name.clone(), (Space::Global, start));
            allocations.push(start);
        }
        let handle = self.handle();
        let source = crate::ptx::source_of(text).to_owned();
        for kernel in &parsed.kernels {
            self.log(&format!("loaded {source} {}", kernel.name));
            self.log(&format!("forms {}", kernel.forms().join(" ")));
        }
        let functions = Vec::new();
        self.modules.insert(handle, LoadedModule { device, source, parsed, globals, allocations, functions });
        Ok(handle)
    }

    /// Prepares a kernel.
    pub(crate) fn function(&mut self, module: usize, name: &str) -> Result<usize, Status> {
        let handle = self.handle();
        let loaded = self.modules.get_mut(&module).ok_or(status::INVALID_HANDLE)?;
        let kernel =
            loaded.parsed.kernels.iter().find(|kernel| kernel.name == name).ok_or(status::NOT_FOUND)?;
        let code = compile(&loaded.parsed, kernel, &loaded.globals).map_err(|problem| {
            eprintln!("emulated GPU: kernel {name}: {problem}");
            status::NOT_SUPPORTED
        })?;
        loaded.functions.push(handle);
        let log_entry = format!("launched {} {name}", loaded.source);
        let most_shared_bytes = (48u64 << 10).saturating_sub(code.shared_bytes);
        let (code, log_entry) = (Arc::new(code), Some(log_entry));
        let most_blocks = PORTABLE_CLUSTER;
        self.functions.insert(handle, Function { code, most_shared_bytes, most_blocks, log_entry });
        Ok(handle)
    }

    pub(crate) fn unload(&mut self, module: usize) -> Result<(), Status> {
        let LoadedModule { device, allocations, functions, .. } =
            self.modules.remove(&module).ok_or(status::INVALID_HANDLE)?;
        functions.iter().for_each(|function| {
            self.functions.remove(function);
        });
        allocations.into_iter().try_for_each(|start| self.free(device, start))
    }

    /// Writes a line to the log, if there is one.
    pub(crate) fn log(&self, line: &str) {
        let Some(path) = &self.settings.log else { return };
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        // One write: other processes may append to the file at the same time.
        if let Err(error) = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())) {
            eprintln!("emulated GPU: {path}: {error}");
        }
    }
}
