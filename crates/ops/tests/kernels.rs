//! Every kernel compiles for every architecture that it declares, spills no registers, and has matrix
//! instructions that overlap. With `XTRAIN_TEST_SAMPLE=1` it is compiled for Hopper; the first variant of
//! each source, and one in six others, also for one other architecture, which is drawn. Needs NVRTC but no
//! GPU; without NVRTC the tests count as ignored.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use xtrain_cuda::{Arch, Compiler, Defines, KernelSource};
use xtrain_ops::registry::kernel_sources;
use xtrain_tensor::Philox;

/// Compiles one variant of a source. Fails if registers are spilled or `wgmma` instructions wait for each
/// other.
fn compile(compiler: Compiler, source: &KernelSource, arch: Arch, variant: &Defines) -> Result<(), Failed> {
    let mut options = KernelSource::options(variant);
    options.push("--ptxas-options=-v".into());
    let compiled = compiler.compile(source.name, &source.full_text(), arch, &options)?;
    if compiled.log.contains("wgmma.mma_async instructions are serialized") {
        return Err(format!("matrix instructions do not overlap:\n{}", compiled.log).into());
    }
    // ptxas prints "12 bytes spill stores" for each kernel.
    let spills = compiled.log.lines().filter(|line| line.contains("bytes spill stores"));
    let spilled: Vec<&str> = spills.filter(|line| !line.contains(" 0 bytes spill stores")).collect();
    match spilled.is_empty() {
        true => Ok(()),
        false => Err(format!("registers are spilled:\n{}", compiled.log).into()),
    }
}

/// In a sample, one in this many variants is compiled for another architecture than Hopper.
const OTHERS: usize = 6;

/// The architectures for which to compile the `n`-th variant.
fn drawn(archs: &[Arch], n: u64, is_first: bool) -> Vec<Arch> {
    let (mut drawn, others): (Vec<Arch>, Vec<Arch>) =
        archs.iter().copied().partition(|arch| *arch == Arch::SM90);
    if !common::is_sampled() {
        return archs.to_vec();
    }
    let word = Philox::new(common::seed(), 0, 0).word(n) as usize;
    if !others.is_empty() && (drawn.is_empty() || is_first || word.is_multiple_of(OTHERS)) {
        drawn.push(others[word / OTHERS % others.len()]);
    }
    drawn
}

fn main() {
    let arguments = Arguments::from_args();
    let compiler = Compiler::open();
    if let Err(reason) = &compiler {
        eprintln!("tests of kernels are ignored, NVRTC is missing: {reason}");
    }
    let mut tests = Vec::new();
    let mut variants = 0;
    for source in kernel_sources() {
        for (n, variant) in source.variants().into_iter().enumerate() {
            variants += 1;
            for arch in drawn(source.archs, variants, n == 0) {
                let defines: Vec<String> = variant.iter().map(|(k, v)| format!("{k}={v}")).collect();
                let name = format!("{} {arch} {}", source.name, defines.join(","));
                let (compiler, variant) = (compiler.clone(), variant.clone());
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
