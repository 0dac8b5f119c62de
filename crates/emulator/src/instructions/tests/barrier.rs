//! Barriers of a block and of a warp (section 9.7.13).

use super::form::Form;
use super::{Device, Grid, arguments, random};

pub(super) fn forms() -> Vec<Form> {
    vec![
        Form::by("bar.sync", |opcode| [32, 80, 256].into_iter().try_for_each(|n| values_go_round(opcode, n))),
        Form::by("bar.arrive", |_| producers_do_not_wait()),
        Form::by("bar.red.or.pred", |opcode| reductions(opcode, |all| all.contains(&true).into())),
        Form::by("bar.red.and.pred", |opcode| reductions(opcode, |all| (!all.contains(&false)).into())),
        Form::by("bar.red.popc.u32", |opcode| {
            reductions(opcode, |all| all.iter().filter(|&&holds| holds).count() as u32)
        }),
        Form::by("bar.warp.sync", lanes_meet_apart),
    ]
}

/// Each thread passes its index through shared memory, mostly to a thread of another warp. Odd threads take a
/// longer path to the barrier.
fn values_go_round(opcode: &str, threads: usize) -> Result<(), String> {
    const ROUNDS: usize = 5;
    let text = format!(
        ".visible .entry round(.param .u64 to)\n{{\n.reg .pred %p, %more;\n.reg .b32 %t, %n, %x, %i, %other;\n\
         .reg .b64 %to, %o, %own, %next;\n.shared .align 4 .b8 area[{bytes}];\nld.param.u64 %to, [to];\n\
         mov.u32 %t, %tid.x;\nmul.wide.u32 %o, %t, 4;\nadd.s64 %to, %to, %o;\nmov.u64 %own, area;\nadd.s64 %own, %own, %o;\n\
         add.s32 %other, %t, 33;\nrem.u32 %other, %other, {threads};\nmul.wide.u32 %o, %other, 4;\nmov.u64 %next, area;\n\
         add.s64 %next, %next, %o;\nmov.u32 %x, %t;\nand.b32 %n, %t, 1;\nsetp.eq.s32 %p, %n, 0;\nmov.u32 %i, 0;\n\
         AGAIN:\nst.shared.u32 [%own], %x;\n@%p bra SHORT;\nmul.lo.s32 %n, %n, 3;\nadd.s32 %n, %n, 1;\nSHORT:\n\
         {opcode} 0;\nld.shared.u32 %x, [%next];\nmad.lo.s32 %x, %x, 3, 1;\n{opcode} 1;\n\
         add.s32 %i, %i, 1;\nsetp.lt.s32 %more, %i, {ROUNDS};\n@%more bra AGAIN;\nst.global.u32 [%to], %x;\nret;\n}}\n",
        bytes = 4 * threads
    );
    let mut expected: Vec<u32> = (0..threads as u32).collect();
    for _ in 0..ROUNDS {
        expected =
            (0..threads).map(|n| expected[(n + 33) % threads].wrapping_mul(3).wrapping_add(1)).collect();
    }
    let mut device = Device::new();
    let to = device.allocate(2 * 4 * threads);
    device.run(&text, Grid::row(1, threads), &arguments(&[to]))?;
    let found = device.load(to, 4 * threads)?;
    let expected: Vec<u8> = expected.iter().flat_map(|x| x.to_le_bytes()).collect();
    if found == expected { Ok(()) } else { Err(format!("{threads} threads: numbers differ")) }
}

/// Two warps write and arrive; two others wait for them, at a barrier of these four warps alone.
fn producers_do_not_wait() -> Result<(), String> {
    let text = ".visible .entry pair(.param .u64 to)\n{\n.reg .pred %p, %q;\n.reg .b32 %t, %x;\n\
         .reg .b64 %to, %o, %s;\n.shared .align 4 .b8 area[256];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n\
         setp.ge.u32 %q, %t, 128;\n@%q bra OTHERS;\nand.b32 %x, %t, 63;\nmul.wide.u32 %o, %x, 4;\nmov.u64 %s, area;\n\
         add.s64 %s, %s, %o;\nadd.s64 %to, %to, %o;\nsetp.ge.u32 %p, %t, 64;\n@%p bra CONSUMER;\n\
         mad.lo.s32 %x, %x, 5, 2;\nst.shared.u32 [%s], %x;\nbar.arrive 3, 128;\nbra.uni END;\n\
         CONSUMER:\nbar.sync 3, 128;\nld.shared.u32 %x, [%s];\nst.global.u32 [%to], %x;\nbra.uni END;\n\
         OTHERS:\nbar.sync 4, 64;\nEND:\nret;\n}\n";
    let mut device = Device::new();
    let to = device.allocate(256);
    device.run(text, Grid::row(1, 192), &arguments(&[to]))?;
    let expected: Vec<u8> = (0..64u32).flat_map(|n| (5 * n + 2).to_le_bytes()).collect();
    if device.load(to, 256)? == expected { Ok(()) } else { Err("numbers differ".into()) }
}

/// All threads receive one result of all predicates, of which none, one, some or all hold.
fn reductions(opcode: &str, expected: fn(&[bool]) -> u32) -> Result<(), String> {
    const THREADS: usize = 96;
    let (result, number) = match opcode.ends_with(".pred") {
        true => ("%q", "selp.u32 %x, 1, 0, %q;\n"),
        false => ("%x", ""),
    };
    let mut random = random(opcode);
    for kind in 0..8 {
        for negation in ["", "!"] {
            let holds: Vec<bool> = match kind {
                0 => vec![false; THREADS],
                1 => vec![true; THREADS],
                2 | 3 => (0..THREADS).map(|n| (n == 70) == (kind == 2)).collect(),
                _ => (0..THREADS).map(|_| random.below(kind) == 0).collect(),
            };
            let text = format!(
                ".visible .entry reduce(.param .u64 from, .param .u64 to)\n{{\n.reg .pred %p, %q;\n.reg .b32 %t, %x;\n\
                 .reg .b64 %from, %to, %o;\nld.param.u64 %from, [from];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n\
                 mul.wide.u32 %o, %t, 4;\nadd.s64 %from, %from, %o;\nadd.s64 %to, %to, %o;\nld.global.u32 %x, [%from];\n\
                 setp.ne.s32 %p, %x, 0;\n{opcode} {result}, 0, {negation}%p;\n{number}st.global.u32 [%to], %x;\nret;\n}}\n"
            );
            let mut device = Device::new();
            let words: Vec<u8> = holds.iter().flat_map(|&holds| u32::from(holds).to_le_bytes()).collect();
            let (from, to) = (device.store(&words), device.allocate(4 * THREADS));
            device.run(&text, Grid::row(1, THREADS), &arguments(&[from, to]))?;
            let seen: Vec<bool> = holds.iter().map(|&holds| holds == negation.is_empty()).collect();
            let found = device.load(to, 4 * THREADS)?;
            if found != expected(&seen).to_le_bytes().repeat(THREADS) {
                return Err(format!("of {seen:?}: {:?} is not {}", &found[..4], expected(&seen)));
            }
        }
    }
    Ok(())
}

/// Lanes of each half exchange values through shared memory, in separate code, and then all lanes do.
fn lanes_meet_apart(opcode: &str) -> Result<(), String> {
    // Lane n reads the value of lane n + 1, or of n - 1 if that is in the other half.
    let exchange = |mask: &str, by: u32| {
        format!(
            "st.shared.u32 [%own], %x;\n{opcode} {mask};\nxor.b32 %i, %t, {by};\nmul.wide.u32 %o, %i, 4;\n\
             add.s64 %o, %o, %area;\nld.shared.u32 %x, [%o];\n{opcode} {mask};\nmad.lo.s32 %x, %x, 7, 3;\n"
        )
    };
    let text = format!(
        ".visible .entry halves(.param .u64 to)\n{{\n.reg .pred %p;\n.reg .b32 %t, %x, %i, %m;\n.reg .b64 %to, %o, %own, %area;\n\
         .shared .align 4 .b8 area[128];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\nmul.wide.u32 %o, %t, 4;\n\
         add.s64 %to, %to, %o;\nmov.u64 %area, area;\nadd.s64 %own, %area, %o;\nmov.u32 %x, %t;\nsetp.lt.u32 %p, %t, 16;\n\
         @%p bra LOW;\n{}{}bra.uni END;\nLOW:\n{}END:\n{}\
         selp.b32 %m, 65535, 0xffff0000, %p;\n{}st.global.u32 [%to], %x;\nret;\n}}\n",
        exchange("0xffff0000", 1),
        exchange("0xffff0000", 2),
        exchange("65535", 8),
        exchange("-1", 16),
        // Both halves at one place.
        exchange("%m", 4),
    );
    let step = |x: &[u32], by: usize, of: std::ops::Range<usize>| -> Vec<u32> {
        (0..32)
            .map(|n| if of.contains(&n) { x[n ^ by].wrapping_mul(7).wrapping_add(3) } else { x[n] })
            .collect()
    };
    let mut expected: Vec<u32> = (0..32).collect();
    for (by, of) in [(1, 16..32), (2, 16..32), (8, 0..16), (16, 0..32), (4, 0..32)] {
        expected = step(&expected, by, of);
    }
    let mut device = Device::new();
    let to = device.allocate(128);
    device.run(&text, Grid::row(1, 32), &arguments(&[to]))?;
    let expected: Vec<u8> = expected.iter().flat_map(|x| x.to_le_bytes()).collect();
    if device.load(to, 128)? == expected { Ok(()) } else { Err("numbers differ".into()) }
}
