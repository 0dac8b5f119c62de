//! Clusters, mbarriers, bulk and tensor copies (sections 9.7.9.25, 9.7.9.27, 9.7.13.15 and others), and
//! matrices that a warp stores.

use super::form::Form;
use super::{Device, Grid, arguments, random};
use crate::tensor_map::TensorMap;

pub(super) fn forms() -> Vec<Form> {
    let by_clusters = [
        "barrier.cluster.arrive.release.aligned",
        "barrier.cluster.wait.acquire.aligned",
        "mapa.shared::cluster.u32",
        "mbarrier.init.shared::cta.b64",
        "mbarrier.arrive.shared::cluster.b64",
        "mbarrier.try_wait.parity.shared::cta.b64",
        "mbarrier.arrive.expect_tx.shared::cta.b64",
        "fence.mbarrier_init.release.cluster",
        "st.shared::cluster.u32",
    ];
    let mut forms: Vec<Form> =
        by_clusters.map(|opcode| Form::by(opcode, |_| numbers_go_round_a_cluster(["", ""]))).into();
    for opcode in [
        "mbarrier.arrive.release.cluster.shared::cluster.b64",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
    ] {
        forms
            .push(Form::by(opcode, |_| numbers_go_round_a_cluster([".release.cluster", ".acquire.cluster"])));
    }
    for opcode in ["cvta.param.u64", "cp.async.bulk.prefetch.tensor.2d.L2.global"] {
        forms.push(Form::by(opcode, |_| copies_a_box(2, 0, false)));
    }
    forms.push(Form::by("cp.async.bulk.prefetch.L2.global", |_| bulk_copies(BULK, false)));
    for (opcode, multicasts) in [(BULK, false), (BULK_MULTICAST, true)] {
        forms.push(Form::by(opcode, move |opcode| bulk_copies(opcode, multicasts)));
    }
    for dimensions in 1..=5 {
        for multicasts in [false, true] {
            let opcode = format!(
                "cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.mbarrier::complete_tx::bytes{}",
                if multicasts { ".multicast::cluster" } else { "" }
            );
            let check = move |_: &str| (0..4).try_for_each(|bits| copies_a_box(dimensions, bits, multicasts));
            forms.push(Form::by(opcode.leak(), check));
        }
        let opcode = format!("cp.async.bulk.tensor.{dimensions}d.global.shared::cta.bulk_group");
        forms.push(Form::by(opcode.leak(), move |opcode| {
            (0..4).try_for_each(|bits| stores_a_box(opcode, dimensions, bits))
        }));
        let opcode = format!("cp.reduce.async.bulk.tensor.{dimensions}d.global.shared::cta.add.bulk_group");
        forms.push(Form::by(opcode.leak(), move |opcode| {
            (0..4).try_for_each(|bits| adds_a_box(opcode, dimensions, bits))
        }));
    }
    for opcode in [
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    ] {
        forms.push(Form::by(opcode, bulk_stores));
        forms.push(Form::by(opcode, bulk_store_across_allocations));
    }
    for opcode in [
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group",
        "cp.async.bulk.wait_group.read",
        "fence.proxy.async.shared::cta",
    ] {
        forms.push(Form::by(opcode, |_| bulk_stores("cp.async.bulk.global.shared::cta.bulk_group")));
    }
    for opcode in [
        "mbarrier.try_wait.shared::cta.b64",
        "mbarrier.test_wait.shared::cta.b64",
        "mbarrier.test_wait.parity.shared::cta.b64",
        "mbarrier.arrive.shared::cta.b64",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
        "mbarrier.inval.shared::cta.b64",
        "fence.proxy.async",
    ] {
        forms.push(Form::by(opcode, |_| phases_follow_one_another()));
    }
    for opcode in ["setmaxnreg.dec.sync.aligned.u32", "setmaxnreg.inc.sync.aligned.u32", "elect.sync"] {
        forms.push(Form::by(opcode, |_| registers_move_to_another_group()));
    }
    // Alone they have no effect; `tests/dependent.rs` tests what they do between two launches.
    for opcode in ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] {
        forms.push(Form::by(opcode, |_| registers_move_to_another_group()));
    }
    for (count, transposition) in [1, 2, 4].into_iter().flat_map(|count| [(count, ""), (count, ".trans")]) {
        let opcode = format!("stmatrix.sync.aligned.m8n8.x{count}{transposition}.shared.b16").leak();
        forms.push(Form::by(opcode, move |opcode| stores_matrices(opcode, count, !transposition.is_empty())));
    }
    forms
}

const BULK: &str = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
const BULK_MULTICAST: &str =
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster";

/// Parameters, directives, declarations and body of a kernel whose threads know their index %t and `to`.
fn kernel(parameters: &str, cluster: usize, declarations: &str, body: &str) -> String {
    format!(
        ".visible .entry form({parameters}.param .u64 to)\n.explicitcluster\n.reqnctapercluster {cluster}, 1, 1\n{{\n\
         .reg .pred %p, %q;\n.reg .b16 %h;\n.reg .b32 %t, %b, %c, %s, %v, %w, %x, %k<5>;\n.reg .b64 %to, %o, %m, %from, %state;\n\
         .shared .align 8 .b8 bar[16];\n{declarations}\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\nmov.u32 %b, %ctaid.x;\n\
         {body}ret;\n}}\n"
    )
}

/// Waits for the phase of parity `parity` of the barrier at `bar`.
fn wait(name: &str, parity: u32) -> String {
    format!("{name}:\nmbarrier.try_wait.parity.shared::cta.b64 %p, [bar], {parity};\n@!%p bra {name};\n")
}

const CLUSTER_SYNC: &str = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n";

/// Copies `bytes` bytes of `area` to `to + bytes * block`, by a block of 32 threads.
fn dump(bytes: usize) -> String {
    format!(
        "mad.lo.u32 %v, %b, {bytes}, 0;\ncvt.u64.u32 %o, %v;\nadd.s64 %to, %to, %o;\nmov.u32 %s, area;\nshl.b32 %v, %t, 2;\n\
         add.s32 %s, %s, %v;\ncvt.u64.u32 %o, %v;\nadd.s64 %to, %to, %o;\nmov.u32 %c, 0;\n\
         DUMP:\nsetp.ge.u32 %p, %v, {bytes};\n@%p bra DUMPED;\nld.shared.u32 %x, [%s];\nst.global.u32 [%to], %x;\n\
         add.s32 %s, %s, 128;\nadd.s32 %v, %v, 128;\nadd.s64 %to, %to, 128;\nbra.uni DUMP;\nDUMPED:\n"
    )
}

/// Each block of a cluster writes a number into the next one, for a few rounds, and tells it by its mbarrier,
/// with these orders of arrival and wait. Without a scope, these order accesses within a block only, so there
/// are fences.
fn numbers_go_round_a_cluster([releases, acquires]: [&str; 2]) -> Result<(), String> {
    const ROUNDS: u32 = 5;
    let fence = if releases.is_empty() { "fence.acq_rel.cluster;\n" } else { "" };
    for blocks in [1, 2, 4, 8] {
        let body = format!(
            "mov.u32 %s, bar;\nsetp.ne.s32 %q, %t, 0;\n@%q bra READY;\nmov.u32 %v, 1;\nmbarrier.init.shared::cta.b64 [%s], %v;\n\
             fence.mbarrier_init.release.cluster;\nREADY:\n{CLUSTER_SYNC}\
             mov.u32 %c, %cluster_ctarank;\nmov.u32 %w, %cluster_nctarank;\nadd.s32 %x, %c, 1;\nrem.u32 %x, %x, %w;\n\
             mapa.shared::cluster.u32 %w, %s, %x;\nmov.u32 %v, area;\nmapa.shared::cluster.u32 %v, %v, %x;\nmov.u32 %c, 0;\nmov.u32 %x, %b;\n\
             AGAIN:\nadd.s32 %x, %x, 3;\n@!%q st.shared::cluster.u32 [%v], %x;\n{fence}\
             @!%q mbarrier.arrive{releases}.shared::cluster.b64 _, [%w];\nand.b32 %b, %c, 1;\n\
             SPIN:\nmbarrier.try_wait.parity{acquires}.shared::cta.b64 %p, [%s], %b;\n@!%p bra SPIN;\n{fence}\
             ld.shared.u32 %x, [area];\n{CLUSTER_SYNC}add.s32 %c, %c, 1;\nsetp.lt.u32 %p, %c, {ROUNDS};\n@%p bra AGAIN;\n\
             @%q bra END;\nmov.u32 %b, %ctaid.x;\nmul.wide.u32 %o, %b, 4;\nadd.s64 %to, %to, %o;\nst.global.u32 [%to], %x;\nEND:\n"
        );
        let text = kernel("", blocks, ".shared .align 16 .b8 area[16];", &body);
        let mut device = Device::new();
        let to = device.allocate(4 * 2 * blocks);
        device.run(&text, Grid::row(2 * blocks, 32), &arguments(&[to]))?;
        let expected = (0..2 * blocks).flat_map(|block| {
            let (cluster, rank) = (block / blocks, block % blocks);
            let origin = cluster * blocks + (rank + ROUNDS as usize * (blocks - 1)) % blocks;
            (origin as u32 + 3 * ROUNDS).to_le_bytes()
        });
        if device.load(to, 4 * 2 * blocks)? != expected.collect::<Vec<u8>>() {
            return Err(format!("numbers of {blocks} blocks differ"));
        }
    }
    Ok(())
}

/// Issues a copy in thread 0 of each block, or of the first one, and dumps what the blocks have received.
fn received(parameters: &str, cluster: usize, bytes: usize, only_first: bool, copy: &str) -> String {
    let issuer = if only_first { "setp.ne.s32 %q, %c, 0;\n@%q bra ISSUED;\n" } else { "" };
    let body = format!(
        "mov.u32 %s, bar;\nmov.u32 %c, %cluster_ctarank;\nsetp.ne.s32 %q, %t, 0;\n@%q bra READY;\nmov.u32 %v, 1;\n\
         mbarrier.init.shared::cta.b64 [%s], %v;\nfence.mbarrier_init.release.cluster;\n\
         mov.u32 %v, {bytes};\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], %v;\nREADY:\n{CLUSTER_SYNC}\
         @%q bra ISSUED;\n{issuer}mov.u32 %w, area;\n{copy}ISSUED:\n{}{}{CLUSTER_SYNC}",
        wait("ARRIVED", 0),
        dump(bytes)
    );
    kernel(parameters, cluster, &format!(".shared .align 1024 .b8 area[{bytes}];"), &body)
}

fn bulk_copies(opcode: &str, multicasts: bool) -> Result<(), String> {
    for bytes in [16, 160, 4096] {
        let (blocks, mask) = if multicasts { (4, ", %h") } else { (1, "") };
        let copy = format!(
            "ld.param.u64 %from, [from];\nmov.u16 %h, 15;\ncp.async.bulk.prefetch.L2.global [%from], {bytes};\n{opcode} [%w], [%from], {bytes}, [%s]{mask};\n"
        );
        let text = received(".param .u64 from, ", blocks, bytes, multicasts, &copy);
        let mut random = random(opcode);
        let source: Vec<u8> = (0..bytes).map(|_| random.draw() as u8).collect();
        let mut device = Device::new();
        let (from, to) = (device.store(&source), device.allocate(bytes * blocks));
        device.run(&text, Grid::row(blocks, 32), &arguments(&[from, to]))?;
        if device.load(to, bytes * blocks)? != source.repeat(blocks) {
            return Err(format!("{bytes} bytes differ"));
        }
    }
    Ok(())
}

/// A tensor of `dimensions` dimensions with random content, a box of it, and coordinates that are partly
/// outside.
struct Case {
    map: TensorMap,
    content: Vec<u8>,
    at: Vec<i32>,
}

impl Case {
    fn new(dimensions: usize, swizzle_bits: u32, is_load: bool, seed: usize) -> Case {
        let mut random = random(&format!("box {dimensions} {swizzle_bits} {seed}"));
        let element_bytes = 1 << random.below(3);
        let width = if swizzle_bits == 0 { 48 } else { 16 << swizzle_bits };
        let mut extents = vec![(48 + random.below(200)) as u64];
        let (mut boxed, mut strides) = (vec![width / element_bytes], Vec::new());
        let mut bytes = extents[0] * element_bytes;
        for _ in 1..dimensions {
            bytes = bytes.next_multiple_of(16) + 16 * random.below(3) as u64;
            strides.push(bytes);
            extents.push(2 + random.below(6) as u64);
            boxed.push(1 + random.below(4) as u64);
            bytes *= extents[extents.len() - 1];
        }
        // A GPU loads boxes from negative coordinates, but stores none there.
        let at = extents.iter().zip(&boxed).map(|(&extent, &width)| {
            let before = if is_load { width } else { 0 };
            random.below((extent + before + width) as usize) as i32 - before as i32
        });
        let mut at: Vec<i32> = at.collect();
        // A box begins at a multiple of 16 bytes.
        at[0] -= at[0].rem_euclid(16 / element_bytes as i32);
        let content = (0..bytes.next_multiple_of(16)).map(|_| random.draw() as u8).collect();
        Case {
            map: TensorMap { address: 0, element_bytes, swizzle_bits, extents, strides, boxed },
            content,
            at,
        }
    }

    /// For each byte of the box, its place in shared memory and its index in the tensor, if it is inside.
    /// Stores write rows up to a multiple of 16 bytes.
    fn places(&self, is_load: bool) -> Vec<(usize, Option<usize>)> {
        let TensorMap { element_bytes, swizzle_bits, extents, strides, boxed, .. } = &self.map;
        let row_bytes = boxed[0] * element_bytes;
        let byte = |n: u64| {
            let (row, within) = (n / row_bytes, n % row_bytes);
            // Chunks are permuted among rows that fill 128 bytes together.
            let line = row * row_bytes / 128;
            let chunk = (within / 16) ^ (line % (1 << swizzle_bits));
            let mut index = (i64::from(self.at[0]) * *element_bytes as i64) + within as i64;
            let inner = extents[0] * element_bytes;
            let end = if is_load { inner } else { inner.next_multiple_of(16) };
            let mut is_inside = (0..end as i64).contains(&index);
            let mut rest = row;
            for n in 1..boxed.len() {
                let at = i64::from(self.at[n]) + (rest % boxed[n]) as i64;
                rest /= boxed[n];
                is_inside &= (0..extents[n] as i64).contains(&at);
                index += at * strides[n - 1] as i64;
            }
            ((row * row_bytes + chunk * 16 + within % 16) as usize, is_inside.then_some(index as usize))
        };
        (0..self.map.box_bytes()).map(byte).collect()
    }

    /// Instructions that set %m to the map and %k0, %k1, ... to the coordinates, and the operand of the box.
    fn operand(&self) -> (String, String) {
        let set =
            self.at.iter().enumerate().map(|(n, at)| format!("mov.s32 %k{n}, {at};\n")).collect::<String>();
        let registers: Vec<String> = (0..self.at.len()).map(|n| format!("%k{n}")).collect();
        let set = format!("mov.b64 %m, map;\ncvta.param.u64 %m, %m;\n{set}");
        (set, format!("[%m, {{{}}}]", registers.join(", ")))
    }
}

const MAP: &str = ".param .align 64 .b8 map[128], ";

fn copies_a_box(dimensions: usize, swizzle_bits: u32, multicasts: bool) -> Result<(), String> {
    for seed in 0..6 {
        let mut case = Case::new(dimensions, swizzle_bits, true, seed);
        let bytes = case.map.box_bytes() as usize;
        let (blocks, cast, mask) = if multicasts { (2, ".multicast::cluster", ", %h") } else { (1, "", "") };
        let (set, of_box) = case.operand();
        let copy = format!(
            "{set}mov.u16 %h, 3;\ncp.async.bulk.prefetch.tensor.{dimensions}d.L2.global {of_box};\n\
             cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.mbarrier::complete_tx::bytes{cast} \
             [%w], {of_box}, [%s]{mask};\n",
        );
        let mut device = Device::new();
        case.map.address = device.store(&case.content);
        let to = device.allocate(bytes * blocks);
        let mut parameters = device.tensor_map(&case.map);
        parameters.extend(arguments(&[to]));
        let text = received(MAP, blocks, bytes, multicasts, &copy);
        device.run(&text, Grid::row(blocks, 32), &parameters)?;
        let mut expected = vec![0; bytes];
        for (place, index) in case.places(true) {
            expected[place] = index.map_or(0, |index| case.content[index]);
        }
        if device.load(to, bytes * blocks)? != expected.repeat(blocks) {
            return Err(format!("{:?} at {:?} differs", case.map, case.at));
        }
    }
    Ok(())
}

/// Fills shared memory with byte n at place n mod 251.
fn stores_a_box(opcode: &str, dimensions: usize, swizzle_bits: u32) -> Result<(), String> {
    for seed in 0..6 {
        let mut case = Case::new(dimensions, swizzle_bits, false, seed);
        let bytes = case.map.box_bytes() as usize;
        let content: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
        let (set, of_box) = case.operand();
        let body = format!(
            "setp.ne.s32 %q, %t, 0;\n@%q bra END;\nmov.u32 %s, area;\nmov.u32 %v, 0;\nFILL:\nrem.u32 %x, %v, 251;\n\
             st.shared.u8 [%s], %x;\nadd.s32 %s, %s, 1;\nadd.s32 %v, %v, 1;\nsetp.lt.u32 %p, %v, {bytes};\n@%p bra FILL;\n\
             fence.proxy.async.shared::cta;\n{set}mov.u32 %s, area;\n{opcode} {of_box}, [%s];\n\
             cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n"
        );
        let text = kernel(MAP, 1, &format!(".shared .align 1024 .b8 area[{bytes}];"), &body);
        let mut device = Device::new();
        case.map.address = device.store(&case.content);
        let mut parameters = device.tensor_map(&case.map);
        parameters.extend(arguments(&[case.map.address]));
        device.run(&text, Grid::row(1, 32), &parameters)?;
        let mut expected = case.content.clone();
        for (place, index) in case.places(false) {
            if let Some(index) = index {
                expected[index] = content[place];
            }
        }
        if device.load(case.map.address, expected.len())? != expected {
            return Err(format!("{:?} at {:?} differs", case.map, case.at));
        }
    }
    Ok(())
}

/// Fills shared memory with the number n mod 251 at place n, and adds it to a tensor of numbers.
fn adds_a_box(opcode: &str, dimensions: usize, swizzle_bits: u32) -> Result<(), String> {
    let cases = (0..).map(|seed| Case::new(dimensions, swizzle_bits, false, seed));
    for mut case in cases.filter(|case| case.map.element_bytes == 4).take(4) {
        let bytes = case.map.box_bytes() as usize;
        let number = |n: usize| (n % 251) as f32;
        let mut expected: Vec<f32> = (0..case.content.len() / 4).map(|n| 0.5 + number(7 * n)).collect();
        let as_bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (set, of_box) = case.operand();
        let body = format!(
            "setp.ne.s32 %q, %t, 0;\n@%q bra END;\nmov.u32 %s, area;\nmov.u32 %v, 0;\nFILL:\nrem.u32 %x, %v, 251;\n\
             cvt.rn.f32.u32 %f, %x;\nst.shared.f32 [%s], %f;\nadd.s32 %s, %s, 4;\nadd.s32 %v, %v, 1;\nsetp.lt.u32 %p, %v, {};\n@%p bra FILL;\n\
             fence.proxy.async.shared::cta;\n{set}mov.u32 %s, area;\n{opcode} {of_box}, [%s];\n\
             cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n",
            bytes / 4
        );
        let text = kernel(MAP, 1, &format!(".shared .align 1024 .b8 area[{bytes}];\n.reg .f32 %f;"), &body);
        let mut device = Device::new();
        case.map.address = device.store(&as_bytes(&expected));
        let mut parameters = device.tensor_map(&case.map);
        parameters.extend(arguments(&[case.map.address]));
        device.run(&text, Grid::row(1, 32), &parameters)?;
        for (place, index) in case.places(false).into_iter().step_by(4) {
            if let Some(index) = index {
                expected[index / 4] += number(place / 4);
            }
        }
        if device.load(case.map.address, 4 * expected.len())? != as_bytes(&expected) {
            return Err(format!("{:?} at {:?} differs", case.map, case.at));
        }
    }
    Ok(())
}

/// Threads write numbers, which copies store in two groups, and then other numbers.
fn bulk_stores(opcode: &str) -> Result<(), String> {
    let body = format!(
        "mov.u32 %s, area;\nshl.b32 %v, %t, 4;\nadd.s32 %s, %s, %v;\nadd.s32 %v, %t, 1;\ncvt.rn.f32.u32 %f, %v;\n\
         st.shared.v4.f32 [%s], {{%f, %f, %f, %f}};\nmul.wide.u32 %o, %t, 16;\nadd.s64 %to, %to, %o;\n\
         fence.proxy.async.shared::cta;\n{opcode} [%to], [%s], 16;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n\
         add.f32 %f, %f, 0f42C80000;\nst.shared.v4.f32 [%s], {{%f, %f, %f, %f}};\nfence.proxy.async.shared::cta;\n\
         cp.async.bulk.wait_group 0;\n{opcode} [%to+512], [%s], 16;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
    );
    let text = kernel("", 1, ".shared .align 16 .b8 area[512];\n.reg .f32 %f;", &body);
    let mut device = Device::new();
    let to = device.store(&0.5f32.to_le_bytes().repeat(256));
    device.run(&text, Grid::row(1, 32), &arguments(&[to]))?;
    let before = if opcode.contains("add") { 0.5 } else { 0.0 };
    let number =
        |n: u32| (before + (n / 4 % 32 + 1) as f32 + if n < 128 { 0.0 } else { 100.0 }).to_le_bytes();
    let expected: Vec<u8> = (0..256).flat_map(number).collect();
    if device.load(to, 1024)? == expected { Ok(()) } else { Err("numbers differ".into()) }
}

/// Threads write numbers, which one copy stores where it ends in another allocation than it begins in.
fn bulk_store_across_allocations(opcode: &str) -> Result<(), String> {
    let body = format!(
        "mov.u32 %s, area;\nshl.b32 %v, %t, 4;\nadd.s32 %s, %s, %v;\nadd.s32 %v, %t, 1;\ncvt.rn.f32.u32 %f, %v;\n\
         st.shared.v4.f32 [%s], {{%f, %f, %f, %f}};\nfence.proxy.async.shared::cta;\nbar.sync 0;\nsetp.ne.s32 %q, %t, 0;\n@%q bra END;\n\
         mov.u32 %s, area;\n{opcode} [%to], [%s], 512;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n"
    );
    let text = kernel("", 1, ".shared .align 16 .b8 area[512];\n.reg .f32 %f;", &body);
    let mut device = Device::new();
    let to = device.store_in_two(&0.5f32.to_le_bytes().repeat(128));
    device.run(&text, Grid::row(1, 32), &arguments(&[to]))?;
    let before = if opcode.contains("add") { 0.5 } else { 0.0 };
    let expected: Vec<u8> = (0..128).flat_map(|n| (before + (n / 4 + 1) as f32).to_le_bytes()).collect();
    if device.load(to, 512)? == expected { Ok(()) } else { Err("numbers differ".into()) }
}

/// Phases by arrivals and by bytes; waits by state and by parity.
fn phases_follow_one_another() -> Result<(), String> {
    let spin = |name: &str, test: &str| format!("{name}:\nmbarrier.{test};\n@!%p bra {name};\n");
    let body = format!(
        "mov.u32 %s, bar;\nsetp.ne.s32 %q, %t, 0;\n@%q bra END;\nmov.u32 %v, 3;\nmbarrier.init.shared::cta.b64 [%s], %v;\n\
         mbarrier.arrive.shared::cta.b64 %state, [%s], 2;\nmbarrier.arrive.shared::cta.b64 %state, [%s];\n{}{}\
         mbarrier.test_wait.parity.shared::cta.b64 %p, [%s], 1;\nselp.u32 %x, 1, 0, %p;\nst.global.u32 [%to], %x;\n\
         mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 16;\nmbarrier.arrive.shared::cta.b64 %state, [%s], 3;\n\
         mbarrier.test_wait.shared::cta.b64 %p, [%s], %state;\nselp.u32 %x, 1, 0, %p;\nst.global.u32 [%to+4], %x;\n\
         mov.u32 %w, area;\nfence.proxy.async;\n{BULK} [%w], [%to], 16, [%s];\n{}\
         ld.shared.u32 %x, [area+8];\nst.global.u32 [%to+8], %x;\n\
         mbarrier.arrive.shared::cta.b64 _, [%s], 3;\n{}\
         mbarrier.arrive.shared::cta.b64 %state, [%s], 3;\n{}mbarrier.inval.shared::cta.b64 [%s];\nEND:\n",
        spin("A", "try_wait.shared::cta.b64 %p, [%s], %state"),
        spin("B", "test_wait.parity.shared::cta.b64 %p, [%s], 0"),
        spin("C", "test_wait.shared::cta.b64 %p, [%s], %state"),
        spin("D", "try_wait.parity.shared::cta.b64 %p, [%s], 0"),
        spin("E", "try_wait.shared::cta.b64 %p, [%s], %state"),
    );
    let text = kernel("", 1, ".shared .align 16 .b8 area[16];", &body);
    let mut device = Device::new();
    let to = device.store(&7u32.to_le_bytes().repeat(4));
    device.run(&text, Grid::row(1, 32), &arguments(&[to]))?;
    // The previous phase has ended, which has parity 1 before the first one ends; bytes are missing.
    let expected: Vec<u8> = [0u32, 0, 7, 7].iter().flat_map(|x| x.to_le_bytes()).collect();
    let found = device.load(to, 16)?;
    if found == expected { Ok(()) } else { Err(format!("{found:?} is not {expected:?}")) }
}

/// The first four warps give registers to the others. The elected lane of each warp counts, and so does the
/// lane whose number all lanes have.
fn registers_move_to_another_group() -> Result<(), String> {
    let text = ".visible .entry form(.param .u64 to)\n.maxntid 256, 1, 1\n.maxnreg 128\n{\n.reg .pred %p, %q;\n.reg .b32 %t, %x;\n\
         .reg .b64 %to;\nld.param.u64 %to, [to];\ngriddepcontrol.launch_dependents;\ngriddepcontrol.wait;\nmov.u32 %t, %tid.x;\n\
         setp.lt.u32 %p, %t, 128;\n@%p bra GIVES;\nsetmaxnreg.inc.sync.aligned.u32 208;\nbra.uni COUNT;\n\
         GIVES:\nsetmaxnreg.dec.sync.aligned.u32 48;\nCOUNT:\nbar.sync 0;\nelect.sync %x|%q, -1;\n\
         @%q red.global.add.u32 [%to], 1;\nmov.u32 %t, %laneid;\nsetp.eq.u32 %p, %x, %t;\n@%p red.global.add.u32 [%to+4], 1;\nret;\n}\n";
    let mut device = Device::new();
    let to = device.store(&[0; 8]);
    device.run(text, Grid::row(1, 256), &arguments(&[to]))?;
    let expected: Vec<u8> = [8u32, 8].iter().flat_map(|x| x.to_le_bytes()).collect();
    let found = device.load(to, 8)?;
    if found == expected { Ok(()) } else { Err(format!("{found:?} is not {expected:?}")) }
}

/// The inverse of `ldmatrix`: lanes 8 n to 8 n + 7 hold the addresses of the rows of matrix n, and thread t
/// stores numbers 2 (t mod 4) and the next one of row t / 4, or of column t / 4 if transposed.
fn stores_matrices(opcode: &str, count: usize, is_transposed: bool) -> Result<(), String> {
    let registers: Vec<String> = (0..count).map(|n| format!("%r{n}")).collect();
    let loads: String = (0..count).map(|n| format!("ld.global.u32 %r{n}, [%from+{}];\n", 4 * n)).collect();
    let body = format!(
        "ld.param.u64 %from, [from];\nmul.wide.u32 %o, %t, 16;\nadd.s64 %from, %from, %o;\n{loads}mov.u32 %s, area;\n\
         xor.b32 %v, %t, 5;\nmad.lo.s32 %w, %v, 16, %s;\nmov.u32 %x, 0;\nst.shared.v4.u32 [%w], {{%x, %x, %x, %x}};\nbar.sync 0;\n\
         {opcode} [%w], {{{}}};\nbar.sync 0;\n{}",
        registers.join(", "),
        dump(512)
    );
    let text = kernel(".param .u64 from, ", 1, ".shared .align 16 .b8 area[512];\n.reg .b32 %r<4>;", &body);
    let mut random = random(opcode);
    let source: Vec<u16> = (0..32 * 8).map(|_| random.draw() as u16).collect();
    let mut device = Device::new();
    let from = device.store(&source.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let to = device.allocate(512);
    device.run(&text, Grid::row(1, 32), &arguments(&[from, to]))?;
    let mut expected = vec![0u16; 256];
    for (matrix, lane, half) in (0..count).flat_map(|m| (0..32).flat_map(move |l| [(m, l, 0), (m, l, 1)])) {
        let (row, column) = (lane / 4, 2 * (lane % 4) + half);
        let (row, column) = if is_transposed { (column, row) } else { (row, column) };
        expected[((8 * matrix + row) ^ 5) * 8 + column] = source[8 * lane + 2 * matrix + half];
    }
    let expected: Vec<u8> = expected.iter().flat_map(|x| x.to_le_bytes()).collect();
    if device.load(to, 512)? == expected { Ok(()) } else { Err("numbers differ".into()) }
}
