//! FP8 matrices with block scales: exported bytes and scales are right, and import returns the dequantized
//! values.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use xtrain_checkpoint::CheckpointError;
use xtrain_checkpoint::hf::{
    ExportDtype, ExportOptions, Fp8Scales, NameEntry, NameMap, NamePart, export, import, lossless_dtype,
};
use xtrain_checkpoint::tensor_file::{StoredDtype, StoredTensor, TensorFile, TensorFileWriter};
use xtrain_tensor::formats::{from_e4m3, round_bf16, to_e4m3};

type Tensors = HashMap<String, Vec<f32>>;

const COLS: usize = 200;

/// A fused matrix whose parts do not consist of full blocks, a matrix of full blocks, an embedding and a
/// norm.
fn names(scales: Option<Fp8Scales>) -> NameMap {
    let entry = |name: &str, shape: &[usize], parts: &[(&str, usize)], fp8| NameEntry {
        name: name.to_owned(),
        shape: shape.to_vec(),
        parts: parts.iter().map(|&(hf_name, rows)| NamePart { hf_name: hf_name.to_owned(), rows }).collect(),
        fp8,
    };
    let qkv = [("q.weight", 130), ("k.weight", 64), ("v.weight", 300)];
    NameMap {
        entries: vec![
            entry("embed", &[5, COLS], &[("embed.weight", 5)], None),
            entry("qkv", &[494, COLS], &qkv, scales),
            entry("norm", &[COLS], &[("norm.weight", COLS)], None),
            entry("down", &[128, 256], &[("down.weight", 128)], scales),
        ],
        ..NameMap::default()
    }
}

/// Values of many magnitudes, so that blocks have different scales; a block of zeros; a large value at the
/// end of a part.
fn values() -> Tensors {
    let mut state = 7u32;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let one = |entry: &NameEntry| {
        let numel: usize = entry.shape.iter().product();
        let cols = *entry.shape.last().expect("a shape");
        let magnitude = |i: usize| 2f32.powi((i / cols / 50 * 3 + i % cols / 60) as i32 - 9);
        (entry.name.clone(), (0..numel).map(|i| next() * magnitude(i)).collect::<Vec<f32>>())
    };
    let mut all: Tensors = names(None).entries.iter().map(one).collect();
    let qkv = all.get_mut("qkv").expect("there");
    // The last row of q precedes the first of k: they belong to different blocks.
    qkv[129 * COLS] = 999.5;
    qkv[130 * COLS..194 * COLS].chunks_mut(COLS).for_each(|row| row[..128].fill(0.0));
    all
}

fn options(dtype: ExportDtype, max_shard_bytes: u64) -> ExportOptions {
    ExportOptions { dtype, max_shard_bytes, ..ExportOptions::default() }
}

fn export_to(
    folder: &Path,
    names: &NameMap,
    tensors: &Tensors,
    options: &ExportOptions,
) -> Result<(), CheckpointError> {
    export(folder, names, &mut |name| Ok(tensors[name].clone()), &[], options)
}

fn import_from(folder: &Path) -> Result<Tensors, CheckpointError> {
    let mut tensors = HashMap::new();
    import(folder, &names(None), &mut |name, values| {
        tensors.insert(name.to_owned(), values.to_vec());
        Ok(())
    })?;
    Ok(tensors)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Reference cast, element by element: bytes, inverse scales and dequantized values of a matrix.
fn by_hand(values: &[f32], cols: usize, pow2: bool) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
    let rows = values.len() / cols;
    let (down, across) = (rows.div_ceil(128), cols.div_ceil(128));
    let block = |i: usize| i / cols / 128 * across + i % cols / 128;
    let mut scales = Vec::new();
    for n in 0..down * across {
        let in_block = values.iter().enumerate().filter(|(i, _)| block(*i) == n);
        let amax = in_block.fold(0f32, |a, (_, x)| a.max(x.abs()));
        let scale = if amax == 0.0 { 1.0 } else { 448.0 / amax };
        scales.push(if pow2 { f64::from(scale).log2().floor().exp2() as f32 } else { scale });
    }
    let bytes: Vec<u8> = values.iter().enumerate().map(|(i, x)| to_e4m3(x * scales[block(i)])).collect();
    let inverse: Vec<f32> = scales.iter().map(|scale| 1.0 / scale).collect();
    let meant = bytes.iter().enumerate().map(|(i, &b)| from_e4m3(b) * inverse[block(i)]).collect();
    (bytes, inverse, meant)
}

/// All safetensors files of a folder.
fn files(folder: &Path) -> Vec<TensorFile> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    paths.iter().map(|path| TensorFile::open(path).unwrap()).collect()
}

fn stored(folder: &Path, name: &str) -> (StoredDtype, Vec<usize>, Vec<u8>) {
    let files = files(folder);
    let (file, tensor) = files.iter().find_map(|file| Some((file, file.tensor(name)?))).expect(name);
    let mut bytes = vec![0; tensor.range.len()];
    file.read_bytes(tensor, &mut bytes).unwrap();
    (tensor.dtype, tensor.shape.clone(), bytes)
}

#[test]
fn each_exported_matrix_has_its_own_blocks_and_imports_as_its_dequantized_values() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = values();
    // One file, a file for each tensor, and shards that separate a matrix from its scales.
    for (kind, max_shard_bytes) in [
        (Fp8Scales::PowersOfTwo, 1 << 30),
        (Fp8Scales::PowersOfTwo, 0),
        (Fp8Scales::Exact, 1 << 30),
        (Fp8Scales::Exact, 130 * COLS as u64 + 2000),
    ] {
        let folder = dir.path().join(format!("{kind:?}-{max_shard_bytes}"));
        export_to(&folder, &names(Some(kind)), &tensors, &options(ExportDtype::Fp8, max_shard_bytes))
            .unwrap();
        let found = import_from(&folder).unwrap();
        let (mut meant, mut at) = (Vec::new(), 0);
        for (name, rows, down) in [("q.weight", 130, 2), ("k.weight", 64, 1), ("v.weight", 300, 3)] {
            let part = &tensors["qkv"][at..at + rows * COLS];
            at += rows * COLS;
            let (bytes, inverse, numbers) = by_hand(part, COLS, kind == Fp8Scales::PowersOfTwo);
            assert_eq!(stored(&folder, name), (StoredDtype::F8_E4M3, vec![rows, COLS], bytes), "{name}");
            let scales: Vec<u8> = inverse.iter().flat_map(|x| x.to_le_bytes()).collect();
            let scales = (StoredDtype::F32, vec![down, 2], scales);
            assert_eq!(stored(&folder, &format!("{name}_scale_inv")), scales, "{name}");
            meant.extend(numbers);
        }
        assert_eq!(bits(&found["qkv"]), bits(&meant));
        let down = by_hand(&tensors["down"], 256, kind == Fp8Scales::PowersOfTwo).2;
        assert_eq!(bits(&found["down"]), bits(&down));
        for name in ["embed", "norm"] {
            let rounded: Vec<f32> = tensors[name].iter().map(|&x| round_bf16(x)).collect();
            assert_eq!(stored(&folder, &format!("{name}.weight")).0, StoredDtype::BF16);
            assert_eq!(bits(&found[name]), bits(&rounded));
        }
    }
}

#[test]
fn with_powers_of_two_a_second_export_is_equal_and_bf16_is_exact() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second, bf16] = ["first", "second", "bf16"].map(|name| dir.path().join(name));
    let names = names(Some(Fp8Scales::PowersOfTwo));
    export_to(&first, &names, &values(), &options(ExportDtype::Fp8, 1 << 30)).unwrap();
    let once = import_from(&first).unwrap();
    export_to(&second, &names, &once, &options(ExportDtype::Fp8, 1 << 30)).unwrap();
    export_to(&bf16, &names, &once, &options(ExportDtype::Bf16, 1 << 30)).unwrap();
    for again in [import_from(&second).unwrap(), import_from(&bf16).unwrap()] {
        for (name, values) in &once {
            assert_eq!(bits(&again[name]), bits(values), "{name}");
        }
    }
}

#[test]
fn fp8_is_lossless_if_scales_and_choice_of_matrices_match() {
    let dir = tempfile::tempdir().unwrap();
    let folder = |name: &str, fp8: &NameMap, dtype| {
        let folder = dir.path().join(name);
        export_to(&folder, fp8, &values(), &options(dtype, 1 << 30)).unwrap();
        folder
    };
    let powers = names(Some(Fp8Scales::PowersOfTwo));
    let whole = folder("whole", &powers, ExportDtype::Fp8);
    assert_eq!(lossless_dtype(&whole, &powers).unwrap(), ExportDtype::Fp8);
    // The folder and the map differ in which matrices are FP8.
    let mut other = powers.clone();
    other.entries[3].fp8 = None;
    assert_eq!(lossless_dtype(&whole, &other).unwrap(), ExportDtype::Bf16);
    let part = folder("part", &other, ExportDtype::Fp8);
    assert_eq!(lossless_dtype(&part, &powers).unwrap(), ExportDtype::Bf16);
    let exact = folder("exact", &names(Some(Fp8Scales::Exact)), ExportDtype::Fp8);
    assert_eq!(lossless_dtype(&exact, &powers).unwrap(), ExportDtype::Fp32);
    let bf16 = folder("bf16", &powers, ExportDtype::Bf16);
    assert_eq!(lossless_dtype(&bf16, &powers).unwrap(), ExportDtype::Bf16);
}

#[test]
fn weights_that_are_not_finite_are_not_exported_as_fp8() {
    let dir = tempfile::tempdir().unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        let mut tensors = values();
        tensors.get_mut("qkv").unwrap()[131 * COLS + 3] = bad;
        let folder = dir.path().join("model");
        let names = names(Some(Fp8Scales::PowersOfTwo));
        let error = export_to(&folder, &names, &tensors, &options(ExportDtype::Fp8, 1 << 30)).unwrap_err();
        let text = error.to_string();
        assert!(error.is_users() && text.contains("'k.weight': element 203 of [64, 200] is"), "{text}");
    }
}

/// A tensor of a file: name, type, shape, and the bytes that every element has.
type RawTensor = (&'static str, StoredDtype, Vec<usize>, Vec<u8>);

/// A change that breaks a folder.
type Change = fn(&mut Vec<RawTensor>);

const ONE: [u8; 4] = 1f32.to_le_bytes();

/// A valid folder: every FP8 element is 0x38, which is 1, and every scale is 1.
fn good() -> Vec<RawTensor> {
    let (fp8, f32) = (StoredDtype::F8_E4M3, StoredDtype::F32);
    vec![
        ("embed.weight", StoredDtype::BF16, vec![5, COLS], vec![0x80, 0x3F]),
        ("q.weight", fp8, vec![130, COLS], vec![0x38]),
        ("q.weight_scale_inv", f32, vec![2, 2], ONE.to_vec()),
        ("k.weight", fp8, vec![64, COLS], vec![0x38]),
        ("k.weight_scale_inv", StoredDtype::BF16, vec![1, 2], vec![0x80, 0x3F]),
        ("v.weight", StoredDtype::BF16, vec![300, COLS], vec![0x80, 0x3F]),
        ("norm.weight", f32, vec![COLS], ONE.to_vec()),
        ("down.weight", fp8, vec![128, 256], vec![0x38]),
        ("down.weight_scale_inv", f32, vec![1, 2], ONE.to_vec()),
    ]
}

fn read(tensors: &[RawTensor]) -> Result<Tensors, CheckpointError> {
    let dir = tempfile::tempdir().unwrap();
    let layout: Vec<StoredTensor> = tensors
        .iter()
        .map(|(name, dtype, shape, _)| StoredTensor {
            name: (*name).to_owned(),
            dtype: *dtype,
            shape: shape.clone(),
        })
        .collect();
    let mut writer = TensorFileWriter::create(&dir.path().join("model.safetensors"), &layout, &[]).unwrap();
    for (_, _, shape, element) in tensors {
        writer.write(&element.repeat(shape.iter().product())).unwrap();
    }
    writer.finish().unwrap();
    import_from(dir.path())
}

#[test]
fn invalid_folders_are_refused_in_one_line() {
    let found = read(&good()).expect("scales in bf16, and matrices of both types");
    assert!(found.values().flatten().all(|&x| x == 1.0));
    let cases: [(&str, Change, &[&str]); 13] = [
        ("no scales", |t| drop(t.remove(2)), &["'q.weight'", "there is no 'q.weight_scale_inv'", "bf16"]),
        ("no matrix", |t| drop(t.remove(1)), &["missing: 'q.weight'"]),
        (
            "other blocks",
            |t| t[2].2 = vec![130, 2],
            &["'q.weight_scale_inv': is [130, 2]", "blocks of 128 x 128 of [130, 200] need [2, 2]"],
        ),
        ("a scale for all", |t| t[2].2 = vec![], &["is []", "need [2, 2]"]),
        ("rows in place of columns", |t| t[8].2 = vec![2, 1], &["is [2, 1]", "need [1, 2]"]),
        (
            "another matrix",
            |t| t[1].2 = vec![131, COLS],
            &["'q.weight' is [131, 200] but should be [130, 200]"],
        ),
        (
            "scales of a bf16 matrix",
            |t| t[1] = ("q.weight", StoredDtype::BF16, vec![130, COLS], vec![0, 0]),
            &["'q.weight_scale_inv': holds scales for 'q.weight', which is BF16"],
        ),
        (
            "a vector",
            |t| {
                t[6] = ("norm.weight", StoredDtype::F8_E4M3, vec![COLS], vec![0x38]);
                t.push(("norm.weight_scale_inv", StoredDtype::F32, vec![2], ONE.to_vec()));
            },
            &["'norm.weight'", "must be matrices"],
        ),
        (
            "scales of an unknown matrix",
            |t| t.push(("o.weight_scale_inv", StoredDtype::F32, vec![2], ONE.to_vec())),
            &["no place in the model: 'o.weight_scale_inv'"],
        ),
        ("another format", |t| t[1].1 = StoredDtype::F8_E5M2, &["'q.weight': has F8_E5M2 elements"]),
        (
            "scales of E4M3",
            |t| t[2] = ("q.weight_scale_inv", StoredDtype::F8_E4M3, vec![2, 2], vec![127]),
            &["'q.weight_scale_inv': has F8_E4M3 elements"],
        ),
        (
            "E8M0 weights",
            |t| t[6] = ("norm.weight", StoredDtype::F8_E8M0, vec![COLS], vec![127]),
            &["'norm.weight': has F8_E8M0 elements"],
        ),
        ("another name of scales", |t| t[2].0 = "q.weight_scale", &["there is no 'q.weight_scale_inv'"]),
    ];
    for (case, change, named) in cases {
        let mut tensors = good();
        change(&mut tensors);
        let text = refusal(&tensors, case);
        assert!(named.iter().all(|part| text.contains(part)), "{case}: {text}");
    }
}

#[test]
fn scales_of_e8m0_are_powers_of_two() {
    for (code, factor) in
        [(127, 1.0), (0, 2f32.powi(-127)), (1, 2f32.powi(-126)), (100, 2f32.powi(-27)), (250, 2f32.powi(123))]
    {
        let mut tensors = good();
        tensors[2] = ("q.weight_scale_inv", StoredDtype::F8_E8M0, vec![2, 2], vec![code]);
        let found = read(&tensors).expect("scales in E8M0");
        assert!(found["qkv"][..130 * COLS].iter().all(|&x| x == factor), "{code}");
        assert!(found["qkv"][130 * COLS..].iter().all(|&x| x == 1.0));
    }
}

#[test]
fn fp8_values_that_are_not_finite_are_refused_with_their_element() {
    let cases: [(&str, Change, &[&str]); 5] = [
        (
            "an E8M0 scale that is NaN",
            |t| t[2] = ("q.weight_scale_inv", StoredDtype::F8_E8M0, vec![2, 2], vec![255]),
            &["'q.weight_scale_inv': element 0 of [2, 2] is NaN"],
        ),
        ("an element that is NaN", |t| t[1].3 = vec![0x7F], &["'q.weight': element 0 of [130, 200] is NaN"]),
        (
            "a scale that is NaN",
            |t| t[8].3 = f32::NAN.to_le_bytes().to_vec(),
            &["'down.weight_scale_inv': element 0 of [1, 2] is NaN", "finite"],
        ),
        (
            "a negative scale",
            |t| t[8].3 = (-1f32).to_le_bytes().to_vec(),
            &["'down.weight_scale_inv': element 0 of [1, 2] is -1"],
        ),
        (
            "448 times a scale, which overflows",
            |t| (t[7].3, t[8].3) = (vec![0x7E], 3e38f32.to_le_bytes().to_vec()),
            &["'down.weight': element 0 of [128, 256] is inf"],
        ),
    ];
    for (case, change, named) in cases {
        let mut tensors = good();
        change(&mut tensors);
        let text = refusal(&tensors, case);
        assert!(named.iter().all(|part| text.contains(part)), "{case}: {text}");
    }
}

/// The error message for a folder of these tensors.
fn refusal(tensors: &[RawTensor], case: &str) -> String {
    let error = read(tensors).map(drop).expect_err(case);
    let text = error.to_string();
    assert!(error.is_users() && !text.contains('\n') && text.contains("; "), "{case}: {text}");
    text
}

#[test]
fn a_matrix_larger_than_a_chunk_has_the_bytes_and_scales_of_its_blocks() {
    let cols = 5000;
    let matrix = |rows: usize| NameEntry {
        name: "w".to_owned(),
        shape: vec![rows, cols],
        parts: vec![NamePart { hf_name: "w".to_owned(), rows }],
        fp8: Some(Fp8Scales::PowersOfTwo),
    };
    let value = |row: usize, col: usize| ((row * 31 + col * 7) % 97) as f32 * 2f32.powi((row / 100) as i32);
    let dir = tempfile::tempdir().unwrap();
    // Each block row in an export of its own, and all in one.
    let exported = |name: &str, rows: std::ops::Range<usize>| {
        let values: Vec<f32> = rows.clone().flat_map(|r| (0..cols).map(move |c| value(r, c))).collect();
        let names = NameMap { entries: vec![matrix(rows.len())], ..NameMap::default() };
        let folder = dir.path().join(name);
        export(&folder, &names, &mut |_| Ok(values.clone()), &[], &options(ExportDtype::Fp8, u64::MAX))
            .unwrap();
        let file = TensorFile::open(&folder.join("model.safetensors")).unwrap();
        ["w", "w_scale_inv"].map(|name| {
            let tensor = file.tensor(name).unwrap();
            let mut bytes = vec![0; tensor.range.len()];
            file.read_bytes(tensor, &mut bytes).unwrap();
            bytes
        })
    };
    let whole = exported("whole", 0..400);
    let mut parts = [Vec::new(), Vec::new()];
    for start in [0, 128, 256, 384] {
        let part = exported(&format!("part-{start}"), start..400.min(start + 128));
        parts.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
    }
    assert!(whole == parts);
}
