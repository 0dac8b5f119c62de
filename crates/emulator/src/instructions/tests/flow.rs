//! Branches and returns (section 9.7.12).

use super::form::Form;
use super::{Device, Grid, arguments};

pub(super) fn forms() -> Vec<Form> {
    vec![
        Form::by("bra", |_| each_lane_goes_round_as_often_as_it_must()),
        Form::by("bra.uni", |_| each_lane_goes_round_as_often_as_it_must()),
        Form::by("ret", |_| each_lane_goes_round_as_often_as_it_must()),
        Form::by("exit", |_| each_lane_goes_round_as_often_as_it_must()),
    ]
}

/// Counts the steps of 3 n + 1 until 1 in nested branches. Multiples of 5 return at once, and those of 7
/// exit.
fn each_lane_goes_round_as_often_as_it_must() -> Result<(), String> {
    const THREADS: usize = 300;
    const UNTOUCHED: u32 = 0xDEAD_BEEF;
    let text = ".visible .entry steps(.param .u64 to)\n{\n.reg .pred %p, %odd;\n.reg .b32 %n, %i, %t;\n.reg .b64 %to, %o;\n\
         ld.param.u64 %to, [to];\nmov.u32 %n, %tid.x;\nmul.wide.u32 %o, %n, 4;\nadd.s64 %to, %to, %o;\nadd.s32 %n, %n, 1;\n\
         rem.u32 %t, %n, 5;\nsetp.ne.s32 %p, %t, 0;\n@%p bra STAYS;\nret;\nSTAYS:\nrem.u32 %t, %n, 7;\n\
         setp.eq.s32 %p, %t, 0;\n@%p exit;\nmov.u32 %i, 0;\n\
         AGAIN:\nsetp.eq.s32 %p, %n, 1;\n@%p bra DONE;\nand.b32 %t, %n, 1;\nsetp.ne.s32 %odd, %t, 0;\n@!%odd bra EVEN;\n\
         mad.lo.s32 %n, %n, 3, 1;\nbra.uni NEXT;\nEVEN:\nshr.u32 %n, %n, 1;\nNEXT:\nadd.s32 %i, %i, 1;\nbra AGAIN;\n\
         DONE:\nst.global.u32 [%to], %i;\nret;\n}\n";
    let steps = |mut n: u32| {
        let mut count = 0;
        while n != 1 {
            n = if n % 2 == 1 { 3 * n + 1 } else { n / 2 };
            count += 1;
        }
        count
    };
    let expected = (1..=THREADS as u32).map(|n| if n % 5 == 0 || n % 7 == 0 { UNTOUCHED } else { steps(n) });
    let expected: Vec<u8> = expected.flat_map(|x| x.to_le_bytes()).collect();
    let mut device = Device::new();
    let to = device.store(&UNTOUCHED.to_le_bytes().repeat(THREADS));
    device.run(text, Grid::row(1, THREADS), &arguments(&[to]))?;
    if device.load(to, 4 * THREADS)? == expected { Ok(()) } else { Err("counts differ".into()) }
}
