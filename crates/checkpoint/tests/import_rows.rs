//! A rank that imports its rows of a Hugging Face folder gets the values that an import of the whole has
//! there.

#[path = "../../../tests/messages.rs"]
mod messages;

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use messages::assert_message;
use proptest::prelude::*;
use xtrain_checkpoint::CheckpointError;
use xtrain_checkpoint::hf::{
    ExportDtype, ExportOptions, Fp8Scales, NameEntry, NameMap, NamePart, TiedName, export, import,
    import_rows,
};
use xtrain_checkpoint::tensor_file::{StoredDtype, StoredTensor, TensorFileWriter};

const COLS: usize = 200;

fn entry(name: &str, shape: &[usize], parts: &[(&str, usize)], fp8: Option<Fp8Scales>) -> NameEntry {
    let parts = parts.iter().map(|&(hf_name, rows)| NamePart { hf_name: hf_name.to_owned(), rows }).collect();
    NameEntry { name: name.to_owned(), shape: shape.to_vec(), parts, fp8 }
}

/// A tied embedding, a fused matrix whose parts are not whole blocks, a norm and a scalar.
fn names() -> NameMap {
    let qkv = [("q.weight", 130), ("k.weight", 64), ("v.weight", 300)];
    NameMap {
        entries: vec![
            entry("embed", &[9, 3], &[("embed.weight", 9)], None),
            entry("qkv", &[494, COLS], &qkv, Some(Fp8Scales::Exact)),
            entry("norm", &[7], &[("norm.weight", 7)], None),
            entry("scale", &[], &[("scale", 1)], None),
        ],
        tied: vec![TiedName { hf_name: "head.weight".to_owned(), same_as: "embed.weight".to_owned() }],
        ..NameMap::default()
    }
}

fn write(folder: &Path, dtype: ExportDtype) {
    let names = names();
    let shapes: HashMap<_, usize> =
        names.entries.iter().map(|entry| (entry.name.as_str(), entry.shape.iter().product())).collect();
    let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) * 2f32.powi((i / 3000 % 9) as i32 - 9);
    let mut source = |name: &str| Ok((0..shapes[name]).map(value).collect());
    let options = ExportOptions { dtype, ..ExportOptions::default() };
    export(folder, &names, &mut source, &[], &options).unwrap();
}

/// Values by entry, which come once and in order.
fn values(read: impl FnOnce(&mut Sink<'_>) -> Result<(), CheckpointError>) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    read(&mut |name, values| {
        assert_eq!(name, names().entries[all.len()].name);
        all.push(values.to_vec());
        Ok(())
    })
    .unwrap();
    all
}

type Sink<'a> = dyn FnMut(&str, &[f32]) -> Result<(), xtrain_checkpoint::BoxError> + 'a;

#[test]
fn rows_have_the_values_of_the_whole_also_inside_of_blocks_and_across_parts() {
    for dtype in ExportDtype::ALL {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model");
        write(&folder, dtype);
        let whole = values(|sink| import(&folder, &names(), sink));
        let check = |rows: Vec<Range<usize>>| {
            let found = values(|sink| import_rows(&folder, &names(), &rows, sink));
            for (n, entry) in names().entries.iter().enumerate() {
                let row = whole[n].len() / entry.rows();
                let expected = &whole[n][rows[n].start * row..rows[n].end * row];
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found[n]), bits(expected), "{dtype:?}: {:?} of {}", rows[n], entry.name);
            }
        };
        check(vec![0..0, 494..494, 7..7, 0..0]);
        check(vec![9..9, 128..194, 0..7, 0..1]);
        let cut = |rows: usize| (0..=rows, 0..=rows).prop_map(|(a, b)| a.min(b)..a.max(b));
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(24));
        let cuts = (cut(9), cut(494), cut(7), cut(1));
        runner
            .run(&cuts, |(embed, qkv, norm, scale)| {
                check(vec![embed, qkv, norm, scale]);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn rows_of_a_tied_tensor_and_of_values_that_are_not_finite_are_checked_where_they_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let names =
        NameMap { entries: vec![names().entries[0].clone()], tied: names().tied, ..NameMap::default() };
    let write = |embed: &[f32], head: &[f32]| {
        let stored =
            |name: &str| StoredTensor { name: name.into(), dtype: StoredDtype::F32, shape: vec![9, 3] };
        let file = dir.path().join("model.safetensors");
        let _ = fs::remove_file(&file);
        let layout = [stored("embed.weight"), stored("head.weight")];
        let mut writer = TensorFileWriter::create(&file, &layout, &[]).unwrap();
        writer.write(bytemuck::cast_slice(embed)).unwrap();
        writer.write(bytemuck::cast_slice(head)).unwrap();
        writer.finish().unwrap();
    };
    let refusal = |rows: Range<usize>| {
        let error = import_rows(dir.path(), &names, std::slice::from_ref(&rows), &mut |_, _| Ok(())).err();
        error.map(|error| error.to_string()).unwrap_or_default()
    };
    let mut changed = vec![1.0f32; 27];
    changed[4 * 3] = 2.0;
    write(&[1.0; 27], &changed);
    assert_message(
        "rows of a tied tensor and of values that are not finite are checked where they are read",
        refusal(4..5),
    );
    assert_eq!([refusal(0..4), refusal(5..9)], ["", ""]);
    changed[4 * 3] = f32::NAN;
    write(&changed, &changed);
    assert_message(
        "rows of a tied tensor and of values that are not finite are checked where they are read, 2",
        refusal(3..9),
    );
    assert_eq!([refusal(0..4), refusal(5..9)], ["", ""]);
    let message = refusal(5..10);
    assert_message(
        "rows of a tied tensor and of values that are not finite are checked where they are read, 3",
        &message,
    );
}
