//! The key under which the algorithm of a GEMM is recorded.

use super::matmul::alignment;
use super::{Gemm, GemmOperands, OperandLayout};
use crate::device::DeviceInfo;
use crate::tuning_cache::ChoiceKey;
use xtrain_tensor::{DType, Scaling};

/// Everything that the choice of an algorithm depends on. `block_scaled` says that the kernel of
/// [`super::block_scaled`] is a candidate: it belongs to a version of xtrain.
pub(super) fn choice_key(
    info: &DeviceInfo,
    cublaslt: usize,
    gemm: &Gemm,
    operands: &GemmOperands,
    block_scaled: bool,
) -> ChoiceKey {
    let own = if block_scaled { concat!(" or xtrain ", env!("CARGO_PKG_VERSION")) } else { "" };
    let device =
        format!("{} with {} multiprocessors, cuBLASLt {cublaslt}{own}", info.name, info.multiprocessors);
    let alignments = [Some(operands.a), Some(operands.b), Some(operands.d), operands.bias]
        .map(|place| place.map(alignment));
    let workspace = Gemm::WORKSPACE_BYTES;
    let [text, former] = [alignment_text, former_alignment].map(|spell| alignments.map(spell).join(", "));
    ChoiceKey {
        text: format!(
            "{device}: {}, aligned to {text} bytes, workspace of {workspace} bytes",
            gemm_text(gemm)
        ),
        former: format!(
            "{device}: {}, aligned to [{former}] bytes, working in {workspace}",
            former_gemm(gemm)
        ),
    }
}

fn gemm_text(gemm: &Gemm) -> String {
    let Gemm { m, n, k, a, b, d, d_stride, accumulate, fast_accumulation } = gemm;
    let added = if *accumulate { " added to" } else { "" };
    let fast = if *fast_accumulation { ", fast accumulation" } else { "" };
    let (a, b) = (operand_text(a), operand_text(b));
    format!("gemm {m}x{n}x{k}, a {a}, b {b}, d {d} stride {d_stride}{added}{fast}")
}

fn operand_text(operand: &OperandLayout) -> String {
    let OperandLayout { dtype, transposed, stride, scaling } = operand;
    let transposed = if *transposed { " transposed" } else { "" };
    let scaling = scaling.map_or(String::new(), |scaling| format!(" scaled by {}", scaling.name()));
    format!("{dtype}{transposed} stride {stride}{scaling}")
}

fn alignment_text(bytes: Option<u32>) -> String {
    bytes.map_or("none".to_owned(), |bytes| bytes.to_string())
}

fn former_gemm(gemm: &Gemm) -> String {
    let Gemm { m, n, k, a, b, d, d_stride, accumulate, fast_accumulation } = gemm;
    let (a, b, d) = (former_operand(a), former_operand(b), former_dtype(*d));
    format!(
        "Gemm {{ m: {m}, n: {n}, k: {k}, a: {a}, b: {b}, d: {d}, d_stride: {d_stride}, accumulate: {accumulate}, \
         fast_accumulation: {fast_accumulation} }}"
    )
}

fn former_operand(operand: &OperandLayout) -> String {
    let OperandLayout { dtype, transposed, stride, scaling } = operand;
    let (dtype, scaling) = (former_dtype(*dtype), former_scaling(*scaling));
    format!("Factor {{ dtype: {dtype}, transposed: {transposed}, stride: {stride}, scaling: {scaling} }}")
}

fn former_dtype(dtype: DType) -> String {
    dtype.name().to_uppercase()
}

fn former_scaling(scaling: Option<Scaling>) -> &'static str {
    match scaling {
        None => "None",
        Some(Scaling::Tensor) => "Some(Tensor)",
        Some(Scaling::Row) => "Some(Row)",
        Some(Scaling::Tile) => "Some(Tile)",
        Some(Scaling::Block) => "Some(Block)",
    }
}

fn former_alignment(bytes: Option<u32>) -> String {
    bytes.map_or("None".to_owned(), |bytes| format!("Some({bytes})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use crate::cache::KernelCache;
    use crate::memory::DevicePtr;
    use crate::tuning_cache::decode;

    /// The emulated GPU on which the files in `tests/former` were written.
    fn info(name: &str) -> DeviceInfo {
        DeviceInfo {
            name: name.into(),
            uuid: [0; 16],
            arch: Arch::SM90,
            multiprocessors: 8,
            memory_bytes: 0,
            l2_bytes: 0,
            shared_bytes_per_block: 0,
            threads_per_block: 0,
            memory_bandwidth: 0.0,
            clock_hz: 0.0,
        }
    }

    fn operands() -> GemmOperands {
        let place = DevicePtr(0x7000_0100);
        GemmOperands { a: place, b: place, d: place, bias: None, scales: None, workspace: place }
    }

    #[test]
    fn a_key_spells_everything_that_a_choice_depends_on() {
        let plain = Gemm::new([256, 384, 512], DType::BF16, [false, true], DType::F32);
        let scaling = [(DType::E4M3, Scaling::Tile), (DType::E5M2, Scaling::Block)];
        let scaled = Gemm::scaled([48, 160, 96], scaling, DType::BF16, true);
        let key = |gemm: &Gemm| choice_key(&info("GPU"), 7, gemm, &operands(), false).text;
        assert_eq!(
            key(&plain.accumulate(true)),
            "GPU with 8 multiprocessors, cuBLASLt 7: gemm 256x384x512, a bf16 stride 512, b bf16 transposed stride 512, \
             d f32 stride 384 added to, aligned to 256, 256, 256, none bytes, workspace of 33554432 bytes"
        );
        assert_eq!(
            key(&scaled),
            "GPU with 8 multiprocessors, cuBLASLt 7: gemm 48x160x96, a e4m3 stride 96 scaled by tile, b e5m2 transposed \
             stride 96 scaled by block, d bf16 stride 160, fast accumulation, aligned to 256, 256, 256, none bytes, \
             workspace of 33554432 bytes"
        );
    }

    /// Files that xtrain wrote when keys were `Debug` output.
    #[test]
    fn an_algorithm_that_an_older_run_cached_is_found() {
        let cache =
            KernelCache::in_folder(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/former"));
        let by_row = [(DType::E4M3, Scaling::Row); 2];
        let by_block = [(DType::E4M3, Scaling::Tile), (DType::E4M3, Scaling::Block)];
        for (sizes, scaling) in [([48, 160, 96], by_row), ([192, 96, 160], by_block)] {
            let gemm = Gemm::scaled(sizes, scaling, DType::BF16, false);
            let key = choice_key(&info("Emulated GPU sm_90a"), 130_100, &gemm, &operands(), false);
            let entry =
                cache.get(&key.former, super::super::choose::EXTENSION).expect("the file of an older run");
            assert!(decode(&entry, &key.former).is_some_and(|text| text.starts_with("656d756c61746564")));
        }
    }
}
