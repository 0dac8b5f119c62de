//! The sources of kernels: CUDA C++ that is compiled on the machine that runs it.

use crate::arch::Arch;

/// The beginning of every kernel's source: element types, vectors, reductions, random numbers. Nothing is included from elsewhere.
const PRELUDE: Header = Header::new("prelude.cuh", include_str!("prelude.cuh"));

/// Tensor-core instructions and asynchronous copies, for [`KernelSource::headers`].
pub const TENSOR_CORES: Header = Header::new("tensor_cores.cuh", include_str!("tensor_cores.cuh"));

/// A piece of source that several kernels share.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    name: &'static str,
    text: &'static str,
}

impl Header {
    /// A header; `name` stands in the compiler's messages.
    pub const fn new(name: &'static str, text: &'static str) -> Header {
        Header { name, text }
    }
}

/// A file of kernels. Its `extern "C"` functions take one structure each, by value.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// Its name in messages, e.g. `rms_norm/kernel.cu`.
    pub name: &'static str,
    /// Headers between the prelude and the text.
    pub headers: &'static [Header],
    /// The text.
    pub text: &'static str,
    /// The architectures that it is written for, each of which tests compile it for; a card compiles it for its own.
    pub archs: &'static [Arch],
    /// The sets of numbers that stand for names in it, which tests compile; a source without has the empty set.
    pub variants: &'static [Defines],
}

/// Numbers that stand for names in a source.
pub type Defines = &'static [(&'static str, i64)];

impl KernelSource {
    /// A file for every architecture, without variants.
    pub const fn new(name: &'static str, text: &'static str) -> KernelSource {
        KernelSource { name, headers: &[], text, archs: &Arch::ALL, variants: &[&[]] }
    }

    /// The whole source, with the file and line of each part for the compiler's messages.
    pub fn full_text(&self) -> String {
        let own = Header::new(self.name, self.text);
        let parts = [PRELUDE].into_iter().chain(self.headers.iter().copied()).chain([own]);
        parts.map(|Header { name, text }| format!("#line 1 \"{name}\"\n{text}\n")).collect()
    }

    /// The compiler's options for a variant.
    pub fn options(defines: &[(&str, i64)]) -> Vec<String> {
        let mut options = vec!["--std=c++17".to_owned()];
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}
