//! Asynchronous copies to shared memory (section 9.7.9.25).

use super::form::Form;
use super::{Device, Grid, arguments, random};

const THREADS: usize = 64;

pub(super) fn forms() -> Vec<Form> {
    vec![
        Form::by("cp.async.ca.shared.global", |opcode| {
            [4, 8, 16].into_iter().try_for_each(|bytes| check(opcode, bytes, "cp.async.wait_all;"))
        }),
        Form::by("cp.async.cg.shared.global", |opcode| check(opcode, 16, "cp.async.wait_all;")),
        Form::by("cp.async.wait_all", |opcode| check("cp.async.ca.shared.global", 16, &format!("{opcode};"))),
        Form::by("cp.async.commit_group", groups_are_waited_for_in_order),
        Form::by("cp.async.wait_group", |_| groups_are_waited_for_in_order("cp.async.commit_group")),
    ]
}

/// Copies of `bytes` bytes, of which each thread's own number comes from global memory and the rest is zeros.
fn check(opcode: &str, bytes: usize, wait: &str) -> Result<(), String> {
    for has_source_bytes in [true, false] {
        let mut random = random(opcode);
        let source: Vec<u8> = (0..THREADS * 16).map(|_| random.draw() as u8).collect();
        // Thread by thread: where it copies from and to, how much of that comes from there, and whether it
        // copies.
        let mut targets: Vec<usize> = (0..THREADS).collect();
        for n in (1..THREADS).rev() {
            targets.swap(n, random.below(n + 1));
        }
        let threads: Vec<[u64; 4]> = targets
            .iter()
            .map(|target| {
                let from = random.below(THREADS * 16 / bytes) * bytes;
                let count = if has_source_bytes { random.below(bytes + 1) } else { bytes };
                [from as u64, (target * bytes) as u64, count as u64, (random.below(6) > 0).into()]
            })
            .collect();
        let count = if has_source_bytes { ", %n" } else { "" };
        let text = format!(
            ".visible .entry copies(.param .u64 from, .param .u64 rows, .param .u64 to)\n{{\n.reg .pred %g;\n\
             .reg .b32 %t, %n, %s, %v;\n.reg .b64 %from, %rows, %to, %o, %own;\n\
             .shared .align 16 .b8 before[16];\n.shared .align 16 .b8 area[{area}];\n\
             ld.param.u64 %from, [from];\nld.param.u64 %rows, [rows];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n\
             mul.wide.u32 %o, %t, {bytes};\nadd.s64 %to, %to, %o;\nmov.u64 %own, area;\nadd.s64 %own, %own, %o;\n\
             mov.u32 %v, 0xEEEEEEEE;\n{fill}bar.sync 0;\n\
             mul.wide.u32 %o, %t, 32;\nadd.s64 %rows, %rows, %o;\nld.global.u64 %o, [%rows];\nadd.s64 %from, %from, %o;\n\
             ld.global.u32 %n, [%rows+8];\nmov.u32 %s, area;\nadd.s32 %s, %s, %n;\nld.global.u32 %n, [%rows+24];\n\
             setp.ne.s32 %g, %n, 0;\nld.global.u32 %n, [%rows+16];\n\
             @%g {opcode} [%s], [%from], {bytes}{count};\n{wait}\nbar.sync 0;\n{dump}ret;\n}}\n",
            area = THREADS * bytes,
            fill = (0..bytes)
                .step_by(4)
                .map(|at| format!("st.shared.u32 [%own+{at}], %v;\n"))
                .collect::<String>(),
            dump = (0..bytes)
                .step_by(4)
                .map(|at| format!("ld.shared.u32 %v, [%own+{at}];\nst.global.u32 [%to+{at}], %v;\n"))
                .collect::<String>(),
        );
        let mut device = Device::new();
        let from = device.store(&source);
        let rows =
            device.store(&threads.as_flattened().iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let to = device.allocate(THREADS * bytes);
        device.run(&text, Grid::row(1, THREADS), &arguments(&[from, rows, to]))?;
        let mut expected = vec![0xEE; THREADS * bytes];
        for [from, to, count, copies] in threads.iter().map(|row| row.map(|x| x as usize)) {
            if copies != 0 {
                expected[to..to + bytes].fill(0);
                expected[to..to + count].copy_from_slice(&source[from..from + count]);
            }
        }
        let found = device.load(to, THREADS * bytes)?;
        if let Some(n) = (0..found.len()).find(|&n| found[n] != expected[n]) {
            return Err(format!("of {bytes} bytes, byte {n} is {:#x} and not {:#x}", found[n], expected[n]));
        }
    }
    Ok(())
}

/// Waiting for all groups but the last leaves that one; its bytes come with the next wait.
fn groups_are_waited_for_in_order(commit: &str) -> Result<(), String> {
    let text = format!(
        ".visible .entry groups(.param .u64 from, .param .u64 to)\n{{\n.reg .b32 %t, %s, %v;\n.reg .b64 %from, %to, %o;\n\
         .shared .align 16 .b8 area[{}];\nld.param.u64 %from, [from];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n\
         mul.wide.u32 %o, %t, 8;\nadd.s64 %from, %from, %o;\nadd.s64 %to, %to, %o;\nshl.b32 %t, %t, 3;\n\
         mov.u32 %s, area;\nadd.s32 %s, %s, %t;\n\
         cp.async.ca.shared.global [%s], [%from], 4;\n{commit};\n\
         cp.async.ca.shared.global [%s+4], [%from+4], 4;\n{commit};\n\
         cp.async.wait_group 1;\nld.shared.u32 %v, [%s];\nst.global.u32 [%to], %v;\n\
         cp.async.wait_group 0;\nld.shared.u32 %v, [%s+4];\nst.global.u32 [%to+4], %v;\nret;\n}}\n",
        8 * THREADS
    );
    let mut random = random("groups");
    let source: Vec<u8> = (0..8 * THREADS).map(|_| random.draw() as u8).collect();
    let mut device = Device::new();
    let (from, to) = (device.store(&source), device.allocate(8 * THREADS));
    device.run(&text, Grid::row(1, THREADS), &arguments(&[from, to]))?;
    if device.load(to, 8 * THREADS)? == source { Ok(()) } else { Err("bytes differ".into()) }
}
