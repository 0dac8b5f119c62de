//! Every kernel compiles for every architecture that it declares, and spills no registers. Needs NVRTC but no
//! GPU; without NVRTC the tests count as ignored.

use libtest_mimic::{Arguments, Failed, Trial};
use xtrain_cuda::{Arch, Compiler, Defines, KernelSource};
use xtrain_ops::registry::kernel_sources;

/// Compiles one variant of a source. Fails if registers are spilled.
fn compile(compiler: Compiler, source: &KernelSource, arch: Arch, variant: &Defines) -> Result<(), Failed> {
    let mut options = KernelSource::options(variant);
    options.push("--ptxas-options=-v".into());
    let compiled = compiler.compile(source.name, &source.full_text(), arch, &options)?;
    // ptxas prints "12 bytes spill stores" for each kernel.
    let spills = compiled.log.lines().filter(|line| line.contains("bytes spill stores"));
    let spilled: Vec<&str> = spills.filter(|line| !line.contains(" 0 bytes spill stores")).collect();
    match spilled.is_empty() {
        true => Ok(()),
        false => Err(format!("registers are spilled:\n{}", compiled.log).into()),
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let compiler = Compiler::open();
    if let Err(reason) = &compiler {
        eprintln!("tests of kernels are ignored, NVRTC is missing: {reason}");
    }
    let mut tests = Vec::new();
    for source in kernel_sources() {
        for &arch in source.archs {
            for variant in source.variants() {
                let defines: Vec<String> = variant.iter().map(|(k, v)| format!("{k}={v}")).collect();
                let name = format!("{} {arch} {}", source.name, defines.join(","));
                let compiler = compiler.clone();
                let test = Trial::test(name.trim_end(), move || match compiler {
                    Ok(compiler) => compile(compiler, &source, arch, &variant),
                    Err(reason) => Err(reason.into()),
                });
                tests.push(test.with_ignored_flag(Compiler::open().is_err()));
            }
        }
    }
    libtest_mimic::run(&arguments, tests).exit();
}
