//! Sources of kernels: CUDA C++, compiled on the machine that runs it.

use crate::arch::Arch;

/// The beginning of every source: element types, vectors, reductions, random numbers. Sources include no
/// other files.
const PRELUDE: Header = Header::new("prelude.cuh", include_str!("prelude.cuh"));

/// Tensor-core instructions and asynchronous copies, for [`KernelSource::headers`].
pub const TENSOR_CORES: Header = Header::new("tensor_cores.cuh", include_str!("tensor_cores.cuh"));

/// Source text that several kernels share.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    name: &'static str,
    text: &'static str,
}

impl Header {
    /// A header. `name` is its file name in the compiler's messages.
    pub const fn new(name: &'static str, text: &'static str) -> Header {
        Header { name, text }
    }
}

/// A file of kernels. Each `extern "C"` function takes one structure by value.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// The file name in messages, e.g. `rms_norm/kernel.cu`.
    pub name: &'static str,
    /// Headers between the prelude and this text.
    pub headers: &'static [Header],
    /// The source text.
    pub text: &'static str,
    /// The architectures that the file is written for. Tests compile it for each; a GPU compiles it for its
    /// own.
    pub archs: &'static [Arch],
    /// The sets of definitions that tests compile. A file without variants has one empty set.
    pub variants: &'static [Defines],
}

/// Definitions of numeric macros.
pub type Defines = &'static [(&'static str, i64)];

impl KernelSource {
    /// A file for every architecture, without variants.
    pub const fn new(name: &'static str, text: &'static str) -> KernelSource {
        KernelSource { name, headers: &[], text, archs: &Arch::ALL, variants: &[&[]] }
    }

    /// The whole source, with `#line` directives that name the file of each part.
    pub fn full_text(&self) -> String {
        let own = Header::new(self.name, self.text);
        let parts = [PRELUDE].into_iter().chain(self.headers.iter().copied()).chain([own]);
        parts.map(|Header { name, text }| format!("#line 1 \"{name}\"\n{text}\n")).collect()
    }

    /// The compiler options of a variant.
    pub fn options(defines: &[(&str, i64)]) -> Vec<String> {
        let mut options = vec!["--std=c++17".to_owned()];
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}
