//! Programs as text, one line for each instance, for `xtrain plan --dump` and for debugging.

use crate::{Lane, Phase, Program, Storage, ValueId, When, WriteMode};
use std::fmt;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in self.ids() {
            match &self.value(id).storage {
                Storage::Transient => {}
                Storage::State { kind, name } => {
                    writeln!(f, "{id:?}: {} = {} {name}", self.ty(id), kind.name())?
                }
                Storage::Constant { name, .. } => writeln!(f, "{id:?}: {} = constant {name}", self.ty(id))?,
                Storage::Input { name } => writeln!(f, "{id:?}: {} = input {name}", self.ty(id))?,
                Storage::Output { name } => writeln!(f, "{id:?}: {} = output {name}", self.ty(id))?,
            }
        }
        let mut phase = None;
        for instance in &self.instances {
            if phase != Some(instance.phase()) {
                phase = Some(instance.phase());
                writeln!(f, "{}:", if instance.phase() == Phase::Micro { "micro-step" } else { "update" })?;
            }
            let outputs = instance.outputs.iter().map(|o| {
                let mark = match o.mode {
                    WriteMode::Assign => "",
                    WriteMode::Add => "+",
                    WriteMode::AddAfterFirst => "*",
                };
                format!("{mark}{}", self.typed(o.value))
            });
            let inputs = instance.inputs.iter().map(|v| format!("{v:?}"));
            write!(f, "  {} = ", outputs.collect::<Vec<_>>().join(", "))?;
            write!(f, "{:?}({})", instance.code.op(), inputs.collect::<Vec<_>>().join(", "))?;
            write!(f, "  # {} {}", instance.origin, instance.origin.role.name())?;
            if instance.lane != Lane::Compute {
                write!(f, ", {} lane", instance.lane.name())?;
            }
            match instance.when {
                When::Always => {}
                When::Last => write!(f, ", last micro-step")?,
                When::BeforeLast => write!(f, ", not in the last micro-step")?,
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Program {
    fn typed(&self, id: ValueId) -> String {
        match self.value(id).storage {
            Storage::Transient => format!("{id:?}: {}", self.ty(id)),
            _ => format!("{id:?}"),
        }
    }
}
