//! Peak memory of an export: the values of one entry of the name map.
#![cfg(target_os = "linux")]

use std::fs;

use xtrain_checkpoint::hf::{
    ExportDtype, ExportOptions, Fp8Scales, NameEntry, NameMap, NamePart, export, peak_bytes,
};

/// A line of `/proc/self/status` in bytes.
fn status(name: &str) -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let kib: usize = line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

#[test]
fn an_export_holds_one_entry_at_a_time() {
    let entry = |name: &str| NameEntry {
        name: name.to_string(),
        shape: vec![4096, 4096],
        parts: vec![NamePart { hf_name: format!("{name}.weight"), rows: 4096 }],
        fp8: Some(Fp8Scales::PowersOfTwo),
    };
    let names = NameMap { entries: ["a", "b", "c"].map(entry).to_vec(), ..NameMap::default() };
    assert_eq!(peak_bytes(&names), 64 << 20);
    let dir = tempfile::tempdir().unwrap();
    for dtype in ExportDtype::ALL {
        let before = status("VmRSS");
        let options = ExportOptions { dtype, max_shard_bytes: 40_000_000, overwrite: true };
        export(dir.path(), &names, &mut |_| Ok(vec![1.5; 4096 * 4096]), &[], &options).unwrap();
        let more = status("VmHWM").saturating_sub(before);
        assert!(more < peak_bytes(&names) + (40 << 20), "{} takes {} MiB", dtype.name(), more >> 20);
    }
}
