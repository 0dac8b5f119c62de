//! Safetensors files agree with the reference crate, and damage of any kind is an error.

#[path = "../../../tests/messages.rs"]
mod messages;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use messages::assert_message;
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use xtrain_checkpoint::CheckpointError;
use xtrain_checkpoint::tensor_file::{
    Header, StoredDtype, StoredTensor, TensorFile, TensorFileWriter, TensorInfo,
};

const DTYPES: [StoredDtype; 7] = [
    StoredDtype::F64,
    StoredDtype::F32,
    StoredDtype::U32,
    StoredDtype::BF16,
    StoredDtype::F16,
    StoredDtype::F8_E4M3,
    StoredDtype::U8,
];

/// Tensors of any type and shape, including scalars and empty ones, with random bytes.
fn tensors() -> impl Strategy<Value = Vec<(StoredTensor, Vec<u8>)>> {
    let one = ("[a-z\"\\\\é.]{1,9}", 0..DTYPES.len(), prop::collection::vec(0usize..5, 0..4), any::<u64>());
    prop::collection::vec(one, 0..7).prop_map(|tensors| {
        let mut by_name = HashMap::new();
        for (name, dtype, shape, seed) in tensors {
            let len = shape.iter().product::<usize>() * DTYPES[dtype].bitsize() / 8;
            let bytes = (0..len as u64).map(|i| (seed.wrapping_mul(2 * i + 1) >> 40) as u8).collect();
            by_name.insert(name.clone(), (StoredTensor { name, dtype: DTYPES[dtype], shape }, bytes));
        }
        by_name.into_values().collect()
    })
}

fn write(path: &Path, tensors: &[(StoredTensor, Vec<u8>)]) {
    let layout: Vec<StoredTensor> = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
    let mut writer = TensorFileWriter::create(path, &layout, &[("format", "pt")]).unwrap();
    for (_, bytes) in tensors {
        writer.write(bytes).unwrap();
    }
    assert_eq!(writer.finish().unwrap(), fs::metadata(path).unwrap().len());
}

fn bytes_of(file: &TensorFile, tensor: &TensorInfo) -> Vec<u8> {
    let mut bytes = vec![0; tensor.range.len()];
    file.read_bytes(tensor, &mut bytes).unwrap();
    bytes
}

/// Opens a file and reads all tensors.
fn read_all(path: &Path) -> Result<(), CheckpointError> {
    let file = TensorFile::open(path)?;
    for tensor in &file.header().tensors {
        file.read_bytes(tensor, &mut vec![0; tensor.range.len()])?;
        let _ = file.read_f32(tensor, &mut vec![0.0; tensor.shape.iter().product()]);
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_reference_and_our_reader_read_what_our_writer_wrote(tensors in tensors()) {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("x.safetensors");
        write(&path, &tensors);
        prop_assert_eq!(fs::read_dir(dir.path())?.count(), 1, "no temporary remains");
        let bytes = fs::read(&path)?;
        let reference = SafeTensors::deserialize(&bytes)?;
        let file = TensorFile::open(&path).unwrap();
        prop_assert_eq!(reference.len(), tensors.len());
        prop_assert_eq!(file.header().tensors.len(), tensors.len());
        prop_assert_eq!(&file.header().metadata, &[("format".to_string(), "pt".to_string())]);
        for (tensor, bytes) in &tensors {
            let view = reference.tensor(&tensor.name)?;
            prop_assert_eq!((view.dtype(), view.shape(), view.data()), (tensor.dtype, &tensor.shape[..], &bytes[..]));
            let found = file.tensor(&tensor.name).unwrap();
            prop_assert_eq!((found.dtype, &found.shape), (tensor.dtype, &tensor.shape));
            prop_assert_eq!(&bytes_of(&file, found), bytes);
        }
    }

    #[test]
    fn our_reader_reads_what_the_reference_wrote(tensors in tensors()) {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("x.safetensors");
        let views = tensors.iter().map(|(t, bytes)| {
            (t.name.as_str(), TensorView::new(t.dtype, t.shape.clone(), bytes).unwrap())
        });
        fs::write(&path, safetensors::serialize(views, None)?)?;
        let file = TensorFile::open(&path).unwrap();
        for (tensor, bytes) in &tensors {
            let found = file.tensor(&tensor.name).unwrap();
            prop_assert_eq!((found.dtype, &found.shape), (tensor.dtype, &tensor.shape));
            prop_assert_eq!(&bytes_of(&file, found), bytes);
        }
    }

    #[test]
    fn a_truncated_file_or_one_with_trailing_bytes_is_an_error(
        tensors in tensors(), cut: prop::sample::Index, more in prop::collection::vec(any::<u8>(), 1..9)
    ) {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("x.safetensors");
        write(&path, &tensors);
        let mut bytes = fs::read(&path)?;
        fs::write(&path, &bytes[..cut.index(bytes.len())])?;
        prop_assert!(read_all(&path).is_err());
        bytes.extend(more);
        fs::write(&path, &bytes)?;
        let error = read_all(&path).unwrap_err();
        prop_assert!(error.is_users());
    }

    #[test]
    fn a_flipped_bit_in_the_header_never_panics_nor_moves_bytes(tensors in tensors(), at: prop::sample::Index) {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("x.safetensors");
        write(&path, &tensors);
        let mut bytes = fs::read(&path)?;
        let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let at = at.index(header * 8);
        bytes[at / 8] ^= 1 << (at % 8);
        fs::write(&path, &bytes)?;
        if let Ok(file) = TensorFile::open(&path) {
            // A flip can change a name, or a type or shape to one of equal size, but never the byte ranges.
            let total: usize = file.header().tensors.iter().map(|t| t.range.len()).sum();
            prop_assert_eq!(total, tensors.iter().map(|(_, bytes)| bytes.len()).sum::<usize>());
            read_all(&path).unwrap();
        }
    }

    #[test]
    fn no_bytes_make_the_header_parser_panic(json in ".{0,200}", any in prop::collection::vec(any::<u8>(), 0..99)) {
        let path = Path::new("x");
        let _ = Header::parse(path, &any, any.len());
        let bytes = with_header(&json);
        let _ = Header::parse(path, &bytes, bytes.len());
    }

    #[test]
    fn headers_of_the_right_form_with_any_numbers_never_panic(
        shape in prop::collection::vec(prop_oneof![0usize..5, Just(usize::MAX), any::<usize>()], 0..4),
        offsets in prop::collection::vec(prop_oneof![0usize..64, Just(usize::MAX), any::<usize>()], 2)
    ) {
        let json = format!(r#"{{"a":{{"dtype":"F32","shape":{shape:?},"data_offsets":{offsets:?}}}}}"#);
        let mut bytes = with_header(&json);
        bytes.extend([0; 64]);
        if let Ok(header) = Header::parse(Path::new("x"), &bytes, bytes.len()) {
            prop_assert_eq!(header.tensors[0].range.len(), 64);
        }
    }
}

fn with_header(json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes
}

#[test]
fn each_fault_of_a_header_is_reported_with_its_tensor() {
    let cases = [
        (r#"[]"#, "does not start with '{'"),
        (r#"{"a":"#, "not valid at 'a'"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} x"#, "not valid JSON"),
        (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, "not valid at 'a'"),
        (r#"{"a":{"dtype":"F32","shape":[1]}}"#, "missing field `data_offsets`"),
        (r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#, "unknown element type 'F31'"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, "takes 8 bytes, but its range has 4"),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
            "has the byte range 4 to 12, but the data has 8 bytes",
        ),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, "has the byte range 4 to 0"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, "leaves a gap"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, "has 4 bytes more"),
        (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, "not a whole number of bytes"),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            "tensor 'b': starts at byte",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            "appears twice",
        ),
        (r#"{"__metadata__":{"a":1}}"#, "not valid at '__metadata__'"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, "appears twice"),
    ];
    for (json, expected) in cases {
        let mut bytes = with_header(json);
        bytes.extend([0; 8]);
        let error =
            Header::parse(Path::new("file.safetensors"), &bytes, bytes.len()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.starts_with("file.safetensors, "), "{json}: {error}");
    }
}

#[test]
fn files_of_another_kind_are_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n").unwrap();
    assert!(read_all(&path).unwrap_err().to_string().contains("git lfs pull"));
    fs::write(&path, "").unwrap();
    assert!(read_all(&path).unwrap_err().to_string().contains("0 bytes"));
    assert!(read_all(dir.path()).unwrap_err().to_string().contains("is not a file"));
    let missing = read_all(&dir.path().join("y")).unwrap_err();
    assert!(matches!(missing, CheckpointError::Io { .. }) && missing.to_string().contains("check the path"));
}

#[test]
fn a_file_that_shrinks_while_it_is_open_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let tensor =
        |name: &str| StoredTensor { name: name.to_string(), dtype: StoredDtype::BF16, shape: vec![2000] };
    write(&path, &[(tensor("a"), vec![1; 4000]), (tensor("b"), vec![2; 4000])]);
    let file = TensorFile::open(&path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(5_000).unwrap();
    let (first, second) = (&file.header().tensors[0], &file.header().tensors[1]);
    assert_eq!(bytes_of(&file, first), [1; 4000], "the bytes before the cut can be read");
    let read = file.read_bytes(second, &mut [0; 4000]);
    assert!(matches!(read, Err(CheckpointError::Shrunk { now_bytes: 5_000, .. })));
    let read = file.read_f32(second, &mut [0.0; 2000]);
    assert!(matches!(read, Err(CheckpointError::Shrunk { .. })));
}

#[test]
fn every_f16_and_bf16_pattern_widens_exactly_and_f64_rounds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let doubles = [0.1f64, -1e-320, 3.4e38, f64::NEG_INFINITY, 16777217.0, 5e-324];
    let named = |name: &str, dtype, n| StoredTensor { name: name.to_string(), dtype, shape: vec![n] };
    write(
        &path,
        &[
            (named("f64", StoredDtype::F64, 6), doubles.iter().flat_map(|x| x.to_le_bytes()).collect()),
            (named("f16", StoredDtype::F16, 65536), patterns.clone()),
            (named("bf16", StoredDtype::BF16, 65536), patterns),
            (named("fp8", StoredDtype::F8_E4M3, 6), vec![0; 6]),
        ],
    );
    let file = TensorFile::open(&path).unwrap();
    let read = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let mut export_to = vec![0.0f32; tensor.shape[0]];
        file.read_f32(tensor, &mut export_to).map(|()| export_to)
    };
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    for (bits, (half, brain)) in
        (0..=u16::MAX).zip(read("f16").unwrap().into_iter().zip(read("bf16").unwrap()))
    {
        assert!(same(half, half::f16::from_bits(bits).to_f32()), "{bits:04x}");
        assert!(same(brain, half::bf16::from_bits(bits).to_f32()), "{bits:04x}");
    }
    assert_eq!(read("f64").unwrap(), doubles.map(|x| x as f32));
    assert_message(
        "every f16 and bf16 pattern widens exactly and f64 rounds",
        read("fp8").unwrap_err().to_string(),
    );
}

#[test]
fn a_tensor_is_read_in_several_pieces_and_the_first_f64_that_overflows_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let n = 2_000_003;
    let value = |i: usize| (i as f64 * 0.731).sin();
    let mut doubles: Vec<f64> = (0..n).map(value).collect();
    let halves: Vec<u8> = doubles.iter().flat_map(|x| half::bf16::from_f64(*x).to_le_bytes()).collect();
    let singles: Vec<u8> = doubles.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
    let tensor = |name: &str, dtype| StoredTensor { name: name.to_string(), dtype, shape: vec![n] };
    let write_with = |doubles: &[f64]| {
        let wide = doubles.iter().flat_map(|x| x.to_le_bytes()).collect();
        write(
            &path,
            &[
                (tensor("f64", StoredDtype::F64), wide),
                (tensor("f32", StoredDtype::F32), singles.clone()),
                (tensor("bf16", StoredDtype::BF16), halves.clone()),
            ],
        );
        TensorFile::open(&path).unwrap()
    };
    let read = |file: &TensorFile, name: &str| {
        let mut export_to = vec![0.0f32; n];
        file.read_f32(file.tensor(name).unwrap(), &mut export_to).map(|()| export_to)
    };
    let file = write_with(&doubles);
    assert!(read(&file, "f64").unwrap().iter().enumerate().all(|(i, x)| *x == value(i) as f32));
    assert!(read(&file, "f32").unwrap().iter().enumerate().all(|(i, x)| *x == value(i) as f32));
    let rounded = |i| half::bf16::from_f64(value(i)).to_f32();
    assert!(read(&file, "bf16").unwrap().iter().enumerate().all(|(i, x)| *x == rounded(i)));
    assert_eq!(bytes_of(&file, file.tensor("bf16").unwrap()), halves);
    (doubles[1_900_000], doubles[1_200_001]) = (1e300, -3.5e38);
    let error = read(&write_with(&doubles), "f64").unwrap_err();
    let text = error.to_string();
    assert!(error.is_users(), "{}", text);
    assert_message("a tensor is read in several pieces and the first f64 that overflows is named", &text);
}

#[test]
fn a_dropped_writer_leaves_nothing_and_wrong_bytes_are_an_internal_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let tensor = StoredTensor { name: "a".to_string(), dtype: StoredDtype::F32, shape: vec![2] };
    let mut writer = TensorFileWriter::create(&path, std::slice::from_ref(&tensor), &[]).unwrap();
    assert!(!writer.write(&[0; 7]).unwrap_err().is_users());
    drop(writer);
    assert!(TensorFileWriter::create(&path, &[tensor.clone(), tensor], &[]).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
