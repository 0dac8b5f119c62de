//! The oldest architecture of each instruction (PTX ISA, "Target ISA Notes").
//!
//! NVRTC does not check inline assembly; on a real system ptxas refuses it.

/// The oldest architecture that has an instruction with these parts, e.g. 89. All emulated instructions exist
/// since 80 unless listed here.
pub(crate) fn oldest(parts: &[&str]) -> u32 {
    let has = |names: &[&str]| parts.iter().any(|part| names.contains(part));
    let is_vector_atomic = has(&["atom", "red"]) && has(&["v2", "v4"]);
    let is_packed_integer = has(&["min", "max", "add"]) && has(&["s16x2", "u16x2"]);
    let is_hopper = ["mapa", "elect", "setmaxnreg", "wgmma", "stmatrix", "griddepcontrol"]
        .contains(&parts[0])
        || has(&["bulk", "cluster", "shared::cluster", "expect_tx", "try_wait"]);
    let is_fp8 = has(&["e4m3x2", "e5m2x2", "e4m3", "e5m2"]);
    match (is_vector_atomic || is_packed_integer || is_hopper, is_fp8) {
        (true, _) => 90,
        (false, true) => 89,
        (false, false) => 80,
    }
}

#[cfg(test)]
mod tests {
    use super::oldest;

    #[test]
    fn instructions_know_their_oldest_architecture() {
        for (opcode, expected) in [
            ("cvt.rn.satfinite.e4m3x2.f32", 89),
            ("cvt.rn.f16x2.e5m2x2", 89),
            ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", 89),
            ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 80),
            ("red.global.add.v4.f32", 90),
            ("red.global.add.f32", 80),
            ("ld.global.v4.f32", 80),
            ("max.s16x2", 90),
            ("barrier.cluster.wait.acquire.aligned", 90),
        ] {
            assert_eq!(oldest(&opcode.split('.').collect::<Vec<_>>()), expected, "{opcode}");
        }
    }
}
