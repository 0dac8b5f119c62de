//! Sources of kernels: CUDA C++, compiled on the machine that runs it.

use crate::arch::Arch;
use crate::layout::{StructLayout, assertions};

/// The beginning of every source: element types, vectors, reductions, random numbers. Sources include no
/// other files.
const PRELUDE: Header = Header::new("prelude.cuh", include_str!("prelude.cuh"));

/// Tensor-core instructions and asynchronous copies, for [`KernelSource::headers`].
pub const TENSOR_CORES: Header = Header::new("tensor_cores.cuh", include_str!("tensor_cores.cuh"));

/// TMA, mbarriers and clusters of Hopper, for [`KernelSource::headers`].
pub const HOPPER: Header = Header::new("hopper.cuh", include_str!("hopper.cuh"));

/// FP8 GEMMs on Hopper, for [`KernelSource::headers`] after [`HOPPER`].
pub const HOPPER_FP8: Header = Header::new("hopper_fp8.cuh", include_str!("hopper_fp8.cuh"));

/// Source text that several kernels share.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    name: &'static str,
    text: &'static str,
    constants: &'static [Constants],
}

impl Header {
    /// A header. `name` is its file name in the compiler's messages.
    pub const fn new(name: &'static str, text: &'static str) -> Header {
        Header { name, text, constants: &[] }
    }

    /// The header with the numbers that it shares with Rust code.
    pub const fn with_constants(self, constants: &'static [Constants]) -> Header {
        Header { constants, ..self }
    }
}

/// A file of kernels. Each `extern "C"` function takes one structure by value.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// The file name in messages, e.g. `rms_norm/kernel.cu`.
    pub name: &'static str,
    /// Numbers that Rust code and the kernels share, defined as macros after the prelude with those of the
    /// headers.
    pub constants: &'static [Constants],
    /// Headers between the constants and this text.
    pub headers: &'static [Header],
    /// The source text.
    pub text: &'static str,
    /// The structures that kernels take or read from memory. Assertions after the text compare their layouts.
    pub structs: &'static [&'static StructLayout],
    /// The architectures that the file is written for. Tests compile it for each; a GPU compiles it for its
    /// own.
    pub archs: &'static [Arch],
    /// The variants that tests compile. A file without variants has one empty set.
    pub variants: fn() -> Vec<Defines>,
}

/// Numeric macros of a source.
pub type Constants = &'static [(&'static str, i64)];

/// Numeric macros of a variant.
pub type Defines = Vec<(&'static str, i64)>;

impl KernelSource {
    /// A file for every architecture, without variants.
    pub const fn new(name: &'static str, text: &'static str) -> KernelSource {
        let variants = || vec![Vec::new()];
        KernelSource { name, constants: &[], headers: &[], text, structs: &[], archs: &Arch::ALL, variants }
    }

    /// The variants that tests compile.
    pub fn variants(&self) -> Vec<Defines> {
        (self.variants)()
    }

    /// The whole source, with `#line` directives that name the file of each part.
    pub fn full_text(&self) -> String {
        let part = |name: &str, text: &str| format!("#line 1 \"{name}\"\n{text}\n");
        let of_headers = self.headers.iter().flat_map(|header| header.constants);
        let constants = of_headers.chain(self.constants).copied().flatten();
        let constants: String = constants.map(|(name, value)| format!("#define {name} {value}\n")).collect();
        let headers: String = self.headers.iter().map(|header| part(header.name, header.text)).collect();
        [
            part(PRELUDE.name, PRELUDE.text),
            part("constants.cuh", &constants),
            headers,
            part(self.name, self.text),
            part("layouts.cuh", &assertions(self.structs)),
        ]
        .concat()
    }

    /// The compiler options of a variant.
    pub fn options(defines: &[(&str, i64)]) -> Vec<String> {
        let mut options = vec!["--std=c++17".to_owned()];
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}
