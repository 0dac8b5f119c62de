//! Exchanges among the lanes of a warp (sections 9.7.9.6 and 9.7.13), converged and diverged.

use super::form::Form;
use super::{Device, Grid, arguments, random};
use crate::random::Random;

/// Warps of a block.
const WARPS: usize = 4;

/// Operands of a lane: the value, two numbers, and the mask of participating lanes.
type Lane = [u32; 4];

/// The definition of an instruction: a lane's value and predicate, as a function of the participating lanes,
/// of all lanes' operands and of the lane. `None` if the ISA leaves them undefined.
type Model = fn(&[usize], &[Lane], usize) -> Option<(u32, bool)>;

/// Control flow that leads the lanes of a warp to the instruction.
#[derive(Clone, Copy, Debug)]
enum Arrival {
    /// All lanes together, in one group.
    Together,
    /// All lanes at once, each group with a mask of its own.
    CommitGroups,
    /// Each group at a place of its own.
    Places,
    /// Each group in a loop with its number of iterations, which feeds results back.
    Loops,
    /// Group 0, under a predicate.
    Guarded,
    /// The lanes of group 1 have exited before, and the mask names them.
    Exited,
    /// The lanes of group 1 exit while others wait.
    Exiting,
}

const ARRIVALS: [Arrival; 7] = [
    Arrival::Together,
    Arrival::CommitGroups,
    Arrival::Places,
    Arrival::Loops,
    Arrival::Guarded,
    Arrival::Exited,
    Arrival::Exiting,
];

/// CommitGroups of a warp.
const GROUPS: u32 = 3;

pub(super) fn forms() -> Vec<Form> {
    let shuffle = "%d|%q, %a, %b, %c, %m";
    let all = |opcode: &'static str, operands: &'static str, model: Model| {
        Form::by(opcode, move |opcode| check(opcode, operands, model))
    };
    vec![
        all("shfl.sync.up.b32", shuffle, |members, lanes, lane| shuffled(members, lanes, lane, "up")),
        all("shfl.sync.down.b32", shuffle, |members, lanes, lane| shuffled(members, lanes, lane, "down")),
        all("shfl.sync.bfly.b32", shuffle, |members, lanes, lane| shuffled(members, lanes, lane, "bfly")),
        all("shfl.sync.idx.b32", shuffle, |members, lanes, lane| shuffled(members, lanes, lane, "idx")),
        all("vote.sync.ballot.b32", "%d, %p, %m", |members, lanes, _| {
            Some((members.iter().filter(|&&n| lanes[n][0] & 1 != 0).map(|n| 1 << n).sum(), false))
        }),
        all("vote.sync.any.pred", "%q, %p, %m", |members, lanes, lane| {
            Some((lanes[lane][0], members.iter().any(|&n| lanes[n][0] & 1 != 0)))
        }),
        all("vote.sync.all.pred", "%q, %p, %m", |members, lanes, lane| {
            Some((lanes[lane][0], members.iter().all(|&n| lanes[n][0] & 1 != 0)))
        }),
        all("match.any.sync.b32", "%d, %a, %m", |members, lanes, lane| {
            Some((members.iter().filter(|&&n| lanes[n][0] == lanes[lane][0]).map(|n| 1 << n).sum(), false))
        }),
        all("redux.sync.add.u32", "%d, %a, %m", |members, lanes, _| {
            let sum: u64 = members.iter().map(|&n| u64::from(lanes[n][0])).sum();
            Some((sum as u32, false))
        }),
        all("redux.sync.max.u32", "%d, %a, %m", |members, lanes, _| {
            members.iter().map(|&n| lanes[n][0]).max().map(|most| (most, false))
        }),
        all("redux.sync.min.u32", "%d, %a, %m", |members, lanes, _| {
            members.iter().map(|&n| lanes[n][0]).min().map(|least| (least, false))
        }),
        all("redux.sync.max.s32", "%d, %a, %m", |members, lanes, _| {
            members.iter().map(|&n| lanes[n][0] as i32).max().map(|most| (most as u32, false))
        }),
        all("redux.sync.min.s32", "%d, %a, %m", |members, lanes, _| {
            members.iter().map(|&n| lanes[n][0] as i32).min().map(|least| (least as u32, false))
        }),
        all("redux.sync.or.b32", "%d, %a, %m", |members, lanes, _| {
            Some((members.iter().fold(0, |sum, &n| sum | lanes[n][0]), false))
        }),
        all("redux.sync.and.b32", "%d, %a, %m", |members, lanes, _| {
            Some((members.iter().fold(!0, |sum, &n| sum & lanes[n][0]), false))
        }),
        all("redux.sync.xor.b32", "%d, %a, %m", |members, lanes, _| {
            Some((members.iter().fold(0, |sum, &n| sum ^ lanes[n][0]), false))
        }),
    ]
}

/// `shfl.sync` as the ISA's program computes it.
fn shuffled(members: &[usize], lanes: &[Lane], lane: usize, mode: &str) -> Option<(u32, bool)> {
    let [_, b, c, _] = lanes[lane];
    let (number, by) = (lane as i32, (b & 0x1F) as i32);
    let (clamp, segment) = ((c & 0x1F) as i32, (c >> 8 & 0x1F) as i32);
    let (most, least) = (number & segment | clamp & !segment, number & segment);
    let (source, is_in_range) = match mode {
        "up" => (number - by, number - by >= most),
        "down" => (number + by, number + by <= most),
        "bfly" => (number ^ by, number ^ by <= most),
        _ => (least | by & !segment, (least | by & !segment) <= most),
    };
    let source = if is_in_range { source as usize } else { lane };
    members.contains(&source).then(|| (lanes[source][0], is_in_range))
}

/// Random operands: of shuffles within 32, 16, 8 and 4 lanes, and arbitrary ones.
fn operands(random: &mut Random) -> [u32; 3] {
    let value = match random.below(3) {
        0 => random.below(4) as u32,
        _ => random.draw() as u32,
    };
    let width = 32 >> random.below(5);
    let clamp = [0, 31, random.below(32) as u32][random.below(3)];
    let c = match random.below(4) {
        // Bits that are ignored, too.
        0 => random.draw() as u32,
        _ => (32 - width) << 8 | clamp,
    };
    let b = if random.below(8) == 0 { random.draw() as u32 } else { random.below(32) as u32 };
    [value, b, c]
}

fn check(opcode: &str, operands: &str, model: Model) -> Result<(), String> {
    for arrival in ARRIVALS {
        for round in 0..12 {
            run(opcode, operands, model, arrival, round)
                .map_err(|problem| format!("{arrival:?}: {problem}"))?;
        }
    }
    Ok(())
}

/// The number of times that a lane executes the instruction.
fn times(arrival: Arrival, group: u32) -> u32 {
    match (arrival, group) {
        (Arrival::Loops, _) => group + 1,
        (Arrival::Guarded, 1..) | (Arrival::Exited | Arrival::Exiting, 1) => 0,
        _ => 1,
    }
}

fn run(opcode: &str, written: &str, model: Model, arrival: Arrival, round: usize) -> Result<(), String> {
    let mut random = random(&format!("{opcode} {arrival:?} {round}"));
    let mut warps: Vec<Vec<(Lane, u32)>> = Vec::new();
    // Value and predicate at the end, by warp and lane; `None` for lanes that do not take part.
    let mut expected: Vec<Option<(u32, bool)>> = Vec::new();
    for _ in 0..WARPS {
        let groups: Vec<u32> = (0..32).map(|_| random.below(GROUPS as usize) as u32).collect();
        let group = |lane: usize| if matches!(arrival, Arrival::Together) { 0 } else { groups[lane] };
        let mask = |lane: usize| match arrival {
            Arrival::Together | Arrival::Exited | Arrival::Exiting => u32::MAX,
            _ => (0..32).filter(|&other| group(other) == group(lane)).map(|other| 1 << other).sum(),
        };
        let mut lanes: Vec<Lane> = Vec::new();
        for lane in 0..32 {
            let [a, b, c] = operands(&mut random);
            lanes.push([a, b, c, mask(lane)]);
        }
        let members = |lane: usize| -> Vec<usize> {
            (0..32).filter(|&n| lanes_meet(mask(lane), n) && times(arrival, group(n)) > 0).collect()
        };
        // The ISA leaves the result open if the source lane takes no part; such lanes take their own value.
        for lane in 0..32 {
            if times(arrival, group(lane)) > 0 && model(&members(lane), &lanes, lane).is_none() {
                lanes[lane][1..3].copy_from_slice(&[lane as u32, 0x1F]);
            }
        }
        for lane in 0..32 {
            if times(arrival, group(lane)) > 0 && model(&members(lane), &lanes, lane).is_none() {
                lanes[lane][1..3].copy_from_slice(&[0, 0x1F]);
            }
        }
        warps.push((0..32).map(|lane| (lanes[lane], group(lane))).collect());
        let mut last: Vec<Option<(u32, bool)>> = vec![None; 32];
        for time in 0..GROUPS {
            let results: Vec<_> = (0..32)
                .map(|lane| match time < times(arrival, group(lane)) {
                    true => model(&members(lane), &lanes, lane),
                    false => None,
                })
                .collect();
            for (lane, result) in results.into_iter().enumerate() {
                if let Some((value, _)) = result {
                    lanes[lane][0] = value;
                    last[lane] = result;
                }
            }
        }
        expected.extend(last);
    }

    let text = kernel(opcode, written, arrival);
    let mut device = Device::new();
    let words = warps.as_slice().concat().into_iter().flat_map(|([a, b, c, m], group)| {
        [a, b, c, m, group].into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
    });
    let rows = device.store(&words.collect::<Vec<u8>>());
    let untouched = 0xDEAD_BEEFu64;
    let to = device.store(&untouched.to_le_bytes().repeat(32 * WARPS));
    device.run(&text, Grid::row(1, 32 * WARPS), &arguments(&[rows, to]))?;
    let found = device.load_words(to, 32 * WARPS)?;
    for (n, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        let expected = match (expected, arrival) {
            (Some((value, holds)), _) => u64::from(value) | u64::from(holds) << 32,
            // Lanes that do not execute it keep their value.
            (None, Arrival::Guarded) => warps[n / 32][n % 32].0[0].into(),
            (None, _) => untouched,
        };
        if found != expected {
            let lane = warps[n / 32][n % 32];
            return Err(format!("lane {} of {lane:x?}: {found:#x} is not {expected:#x}", n % 32));
        }
    }
    Ok(())
}

fn lanes_meet(mask: u32, lane: usize) -> bool {
    mask >> lane & 1 != 0
}

fn kernel(opcode: &str, written: &str, arrival: Arrival) -> String {
    // Results without a predicate or a number keep the old one.
    let instruction = format!(
        "and.b32 %t, %a, 1;\nsetp.ne.s32 %p, %t, 0;\nmov.pred %q, 0;\nmov.u32 %d, %a;\n{opcode} {written};\nmov.u32 %a, %d;\n"
    );
    let finish = "selp.u32 %t, 1, 0, %q;\nst.global.v2.u32 [%to], {%a, %t};\nret;\n";
    let steps = match arrival {
        Arrival::Together | Arrival::CommitGroups => instruction + finish,
        Arrival::Guarded => format!(
            "mov.pred %q, 0;\nmov.u32 %d, %a;\nand.b32 %t, %a, 1;\nsetp.ne.s32 %p, %t, 0;\n\
             setp.eq.s32 %g, %group, 0;\n@%g {opcode} {written};\nmov.u32 %a, %d;\n{finish}"
        ),
        Arrival::Exited => {
            format!("setp.eq.s32 %g, %group, 1;\n@!%g bra STAYS;\nret;\nSTAYS:\n{instruction}{finish}")
        }
        Arrival::Exiting => format!(
            "setp.eq.s32 %g, %group, 1;\n@%g bra LEAVES;\n{instruction}{finish}LEAVES:\nadd.s32 %a, %a, 1;\nret;\n"
        ),
        Arrival::Loops => format!(
            "mov.u32 %i, %group;\nAGAIN:\n{instruction}setp.ne.s32 %g, %i, 0;\nadd.s32 %i, %i, -1;\n@%g bra AGAIN;\n{finish}"
        ),
        Arrival::Places => {
            let branches: String =
                (1..GROUPS).map(|n| format!("setp.eq.s32 %g, %group, {n};\n@%g bra PLACE{n};\n")).collect();
            let places: String = (0..GROUPS)
                .map(|n| {
                    // Some lanes take longer than others.
                    let idle = "add.s32 %i, %i, 1;\n".repeat(5 * n as usize % 7);
                    format!("PLACE{n}:\n{idle}{instruction}bra.uni END;\n")
                })
                .collect();
            format!("mov.u32 %i, 0;\n{branches}{places}END:\n{finish}")
        }
    };
    format!(
        ".visible .entry exchange(.param .u64 rows, .param .u64 to)\n{{\n.reg .pred %p, %q, %g;\n\
         .reg .b32 %a, %b, %c, %m, %d, %t, %i, %group;\n.reg .b64 %rows, %to, %o;\nld.param.u64 %rows, [rows];\n\
         ld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\nmul.wide.u32 %o, %t, 20;\nadd.s64 %rows, %rows, %o;\n\
         mul.wide.u32 %o, %t, 8;\nadd.s64 %to, %to, %o;\nld.global.u32 %a, [%rows];\nld.global.u32 %b, [%rows+4];\n\
         ld.global.u32 %c, [%rows+8];\nld.global.u32 %m, [%rows+12];\nld.global.u32 %group, [%rows+16];\n{steps}}}\n"
    )
}
