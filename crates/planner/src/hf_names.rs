//! Names and formats of a model's tensors in a Hugging Face folder.

use crate::error::PlanError;
use xtrain_checkpoint::hf::{FolderKind, Fp8Scales, NameEntry, NameMap, NamePart, TiedName, WholeName};
use xtrain_model::hf::IGNORABLE_SUFFIXES;
use xtrain_model::{Architecture, Bf16Reason, Numerics, ParameterSpec, ROUTER};
use xtrain_program::Quantization;
use xtrain_step::linear_gemms::fprops;
use xtrain_tensor::{NameWhole, Scaling, TILE};

/// Names of the parameters of `model` in a Hugging Face folder.
pub fn name_map(model: &Architecture) -> NameMap {
    let whole = |p: &ParameterSpec| {
        let NameWhole { hf_name, groups } = p.whole.clone()?;
        let groups = groups.map(|groups| [groups, p.shape[0] / groups]);
        let shape = groups.map_or(p.shape.clone(), |groups| [&groups, &p.shape[1..]].concat());
        Some(WholeName { entry: p.name.clone(), hf_name, shape })
    };
    let parameters = model.parameters();
    let wholes = parameters.iter().filter_map(whole).collect();
    let in_fp32 = parameters.iter().filter(|p| !p.group.has_gradient()).map(|p| p.name.clone()).collect();
    let entry =
        |p: ParameterSpec| NameEntry { name: p.name, shape: p.shape, parts: p.parts.list(), fp8: None };
    let tied = TiedName { hf_name: "lm_head.weight".into(), same_as: "model.embed_tokens.weight".into() };
    NameMap {
        kind: FolderKind::Model,
        entries: parameters.into_iter().map(entry).collect(),
        in_fp32,
        whole: wholes,
        base: "model.".into(),
        tied: if model.tie_embeddings { vec![tied] } else { Vec::new() },
        ignorable_suffixes: IGNORABLE_SUFFIXES.map(String::from).to_vec(),
    }
}

/// Names of the adapters of `model` in a folder of PEFT's.
pub fn adapter_names(model: &Architecture) -> NameMap {
    let adapters = model.parameters().into_iter().filter(ParameterSpec::is_adapter);
    let entry =
        |p: ParameterSpec| NameEntry { name: p.name, shape: p.shape, parts: p.parts.list(), fp8: None };
    NameMap { kind: FolderKind::Adapter, entries: adapters.map(entry).collect(), ..NameMap::default() }
}

/// Names of an FP8 export. The linear layers of the blocks are FP8, except those that an FP8 recipe leaves in
/// bf16 in the forward and those that do not consist of whole blocks of 128 x 128.
///
/// Readers differ on partial blocks: transformers 5 infers the block size from the number of scales, and so
/// reads 192 rows as two blocks of 96; vLLM and SGLang refuse most such layers. Parts that form one layer
/// there (q, k, v; gate, up) must have one type.
pub fn fp8_names(model: &Architecture, numerics: &Numerics) -> NameMap {
    let fprops = fprops(model, numerics);
    let mut names = name_map(model);
    for entry in &mut names.entries {
        entry.fp8 = match fprops.get(&entry.name) {
            _ if partial_part(entry).is_some() => None,
            Some(Ok(gemm)) => Some(scales(gemm.operands[1])),
            Some(Err(Bf16Reason::Recipe)) => Some(Fp8Scales::PowersOfTwo),
            Some(Err(_)) | None => None,
        };
    }
    names
}

/// Scales of FP8 weights: those of training if they were per block; else powers of two, which lose the least:
/// another cast gives the same numbers, bf16 holds them exactly, and some GPUs accept no other scales.
fn scales(trained: Quantization) -> Fp8Scales {
    match trained.scaling == Scaling::Block && !trained.pow2_scales {
        true => Fp8Scales::Exact,
        false => Fp8Scales::PowersOfTwo,
    }
}

/// Refuses an FP8 export that would contain no FP8 layer.
pub fn check_fp8(names: &NameMap) -> Result<(), PlanError> {
    if names.entries.iter().any(|entry| entry.fp8.is_some()) {
        return Ok(());
    }
    Err(PlanError::Refused(format!(
        "exported as \"fp8\", none of the linear layers of this model would be FP8: {}; use \"bf16\"",
        why_bf16(&without_routers(linear_in_bf16(names)))
    )))
}

/// Warns of the linear layers that an export as FP8 holds in bf16. Those of routers always are.
pub fn warn_of_bf16(names: &NameMap) {
    let linears = names.entries.iter().filter(|entry| is_linear(entry) && !is_router(entry));
    let (kept, all) = (without_routers(linear_in_bf16(names)), linears.count());
    if !kept.is_empty() {
        tracing::warn!("{} of {all} linear layers are exported as bf16: {}", kept.len(), why_bf16(&kept));
    }
}

/// The linear layers of the blocks that are not in FP8.
fn linear_in_bf16(names: &NameMap) -> Vec<&NameEntry> {
    names.entries.iter().filter(|entry| is_linear(entry) && entry.fp8.is_none()).collect()
}

/// The layers but for routers.
fn without_routers(mut layers: Vec<&NameEntry>) -> Vec<&NameEntry> {
    layers.retain(|entry| !is_router(entry));
    layers
}

/// The reasons why `layers` are exported as bf16, each with the name of a layer.
fn why_bf16(layers: &[&NameEntry]) -> String {
    let partial: Vec<_> = layers.iter().filter_map(|entry| Some((entry, partial_part(entry)?))).collect();
    let mut reasons = Vec::new();
    if let [(entry, part), ..] = partial.as_slice() {
        let (name, rows, columns) = (&part.hf_name, part.rows, entry.shape.get(1).copied().unwrap_or(1));
        let others = match entry.parts.len() {
            1 => "",
            _ => "; parts of one fused layer share one type",
        };
        reasons.push(format!(
            "{} with sizes that are not multiples of {TILE} ({name} is {rows} x {columns}{others})",
            partial.len()
        ));
    }
    if let Some(left) = layers.iter().find(|entry| partial_part(entry).is_none()) {
        let count = layers.len() - partial.len();
        reasons.push(format!("{count} that the run computed in bf16 ({})", left.name));
    }
    reasons.join("; ")
}

/// The first part of a layer that does not consist of whole blocks of 128 x 128.
fn partial_part(entry: &NameEntry) -> Option<&NamePart> {
    let is_whole = |size: usize| size.is_multiple_of(TILE);
    let columns = entry.shape.get(1).copied().unwrap_or(TILE);
    entry.parts.iter().find(|part| !is_whole(part.rows) || !is_whole(columns))
}

/// True for the matrix of a linear layer in a block.
fn is_linear(entry: &NameEntry) -> bool {
    entry.name.starts_with("blocks.") && entry.shape.len() == 2
}

/// True for the matrix of a router.
fn is_router(entry: &NameEntry) -> bool {
    entry.name.ends_with(&format!(".{ROUTER}.weight"))
}

/// Hugging Face's names of the linear layers that `names` does not export in FP8. The head is always among
/// them, even if it is tied.
pub fn modules_in_bf16(names: &NameMap) -> Vec<String> {
    let parts = linear_in_bf16(names).into_iter().flat_map(|entry| &entry.parts);
    let module = |part: &NamePart| part.hf_name.strip_suffix(".weight").unwrap_or(&part.hf_name).to_owned();
    std::iter::once("lm_head".to_owned()).chain(parts.map(module)).collect()
}
