//! The sources of kernels: CUDA C++ that is compiled on the machine that runs it.

use crate::compiler::Arch;

/// What every kernel's source begins with: element types, vectors, reductions, random numbers. Nothing is included from elsewhere.
const PRELUDE: &str = include_str!("prelude.cuh");

/// Instructions of tensor cores and copies beside them, for [`KernelSource::headers`].
pub const TENSOR_CORES: &str = include_str!("tensor_cores.cuh");

/// A file of kernels. Its `extern "C"` functions take one structure each, by value.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// Its name in messages, e.g. `rms_norm/kernel.cu`.
    pub name: &'static str,
    /// What stands between the prelude and the text.
    pub headers: &'static [&'static str],
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

    /// What the compiler is given.
    pub fn full_text(&self) -> String {
        format!("{PRELUDE}\n{}\n#line 1 \"{}\"\n{}", self.headers.join("\n"), self.name, self.text)
    }

    /// The compiler's options for a variant.
    pub fn options(defines: &[(&str, i64)]) -> Vec<String> {
        let mut options = vec!["--std=c++17".to_owned()];
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}
