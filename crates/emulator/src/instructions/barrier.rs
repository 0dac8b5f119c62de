//! Barriers of a block and of a warp (PTX ISA, section 9.7.13).

use super::{Decoded, Decoder, unknown};
use crate::kernel::{Action, Barrier, Execute, Reduction, ReductionKind, Target};
use crate::ptx::{Instruction, Operand};
use crate::races::Races;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let barrier = |number: &Operand, threads: Option<&Operand>, waits, reduction| {
        let threads = threads.map(|threads| d.source(threads)).transpose()?;
        Ok(Action::Barrier(Barrier { number: d.source(number)?, threads, waits, reduction }))
    };
    match (parts, &instruction.operands[..]) {
        (&["warp", "sync"], [members]) => {
            let meet: Execute = Box::new(|cx| {
                cx.observe(Races::meet);
                Ok(())
            });
            Ok(Action::Together(d.source(members)?, meet))
        }
        (&["sync"], [number]) => barrier(number, None, true, None),
        (&["sync"], [number, threads]) => barrier(number, Some(threads), true, None),
        (&["arrive"], [number, threads]) => barrier(number, Some(threads), false, None),
        (&["red", operation, _], [target, number, threads @ .., predicate]) if threads.len() < 2 => {
            let (kind, target) = match operation {
                "and" => (ReductionKind::And, Target::Predicate(d.predicate_target(target)?)),
                "or" => (ReductionKind::Or, Target::Predicate(d.predicate_target(target)?)),
                "popc" => (ReductionKind::Count, Target::Number(d.target::<u32>(target)?)),
                _ => return unknown(instruction),
            };
            let reduction = Reduction { kind, predicate: d.predicate(predicate)?, target };
            barrier(number, threads.first(), true, Some(reduction))
        }
        _ => unknown(instruction),
    }
}
