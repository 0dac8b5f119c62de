//! Forms of instructions with their definitions, and kernels that execute them.

use super::device::{Device, Grid, arguments, random};
use super::types::{Operand, Outcome};
use crate::random::Random;
use rustc_apfloat::ieee::{Double, Single};

/// Operands of an instruction as bits; unused ones are zero.
pub(super) type Row = [u64; 4];

/// Names of the registers with the operands.
const NAMES: [&str; 4] = ["%a", "%b", "%c", "%e"];

/// Threads of a block.
const THREADS: usize = 128;

/// The result register of threads that do not run the instruction.
const SENTINEL: u64 = 0xA5A5_5A5A_C3C3_3C3C;

/// A form of an instruction with its test.
pub(super) struct Form {
    pub(super) opcode: &'static str,
    test: Test,
    /// Tolerance for the results of a GPU.
    pub(super) tolerance: Tolerance,
}

/// A difference that the ISA allows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Tolerance {
    /// Units of the last place.
    pub(super) ulps: u64,
    pub(super) absolute: f64,
    /// True if the order of threads is open, so that only the definition can judge results.
    pub(super) is_of_any_order: bool,
    /// True if the bits of a NaN are open.
    pub(super) any_nan: bool,
}

enum Test {
    /// A function of each thread's own operands.
    Rows(Box<Rows>),
    /// Runs kernels of its own.
    Kernels(Box<dyn Fn(&str) -> Result<(), String>>),
}

/// An instruction that computes a function, and the rows of its operands.
struct Rows {
    /// The operands as written, with `%d`, `%a`, `%b`, `%c`, `%e`, and `%x`, which has the result's class.
    operands: String,
    kinds: Vec<Kind>,
    /// The class of the result.
    class: &'static str,
    more: Vec<Row>,
    keeps: fn(&Row) -> bool,
    /// Compares a result with its definition.
    compare: Box<dyn Fn(&Row, u64) -> Result<(), String>>,
    /// True if the first operand may be an immediate too.
    takes_immediate: bool,
    /// True if operands of this row may be immediates.
    allows_immediates: fn(&Row) -> bool,
}

/// A type of operands.
pub(super) struct Kind {
    class: &'static str,
    edges: Vec<u64>,
    random: fn(&mut Random) -> u64,
    literal: fn(u64) -> String,
}

impl Kind {
    fn of<T: Operand>() -> Kind {
        Kind { class: T::CLASS, edges: T::edges(), random: T::random, literal: T::literal }
    }
}

/// A function of operands that an instruction computes.
pub(super) trait Definition<Operands>: 'static {
    fn kinds() -> Vec<Kind>;
    fn class() -> &'static str;
    fn compare(&self, row: &Row, found: u64) -> Result<(), String>;
}

macro_rules! definitions {
    ($($($operand:ident $n:literal),+;)*) => {$(
        impl<F, R, $($operand),+> Definition<($($operand,)+)> for F
        where
            F: Fn($($operand),+) -> R + 'static,
            R: Outcome,
            $($operand: Operand,)+
        {
            fn kinds() -> Vec<Kind> {
                vec![$(Kind::of::<$operand>()),+]
            }
            fn class() -> &'static str {
                R::CLASS
            }
            fn compare(&self, row: &Row, found: u64) -> Result<(), String> {
                let result = self($($operand::of_bits(row[$n])),+);
                if result.agrees(found) { Ok(()) } else { Err(result.show()) }
            }
        }
    )*};
}

definitions! {
    A 0;
    A 0, B 1;
    A 0, B 1, C 2;
    A 0, B 1, C 2, D 3;
}

/// An instruction that computes a function of its operands.
pub(super) fn form<Operands, D: Definition<Operands>>(opcode: &'static str, definition: D) -> Form {
    let kinds = D::kinds();
    let rows = Rows {
        operands: ["%d"].iter().chain(&NAMES[..kinds.len()]).copied().collect::<Vec<_>>().join(", "),
        class: D::class(),
        more: Vec::new(),
        keeps: |_| true,
        compare: Box::new(move |row, found| definition.compare(row, found)),
        takes_immediate: false,
        allows_immediates: |_| true,
        kinds,
    };
    Form { opcode, test: Test::Rows(rows.into()), tolerance: Tolerance::default() }
}

impl Form {
    /// An instruction with test kernels of its own, which receive its opcode.
    pub(super) fn by(opcode: &'static str, test: impl Fn(&str) -> Result<(), String> + 'static) -> Form {
        Form { opcode, test: Test::Kernels(Box::new(test)), tolerance: Tolerance::default() }
    }

    fn rows(mut self, change: impl FnOnce(&mut Rows)) -> Form {
        match &mut self.test {
            Test::Rows(rows) => change(rows),
            Test::Kernels(_) => panic!("{} has kernels of its own", self.opcode),
        }
        self
    }

    /// Sets the text of the operands.
    pub(super) fn written(self, operands: &str) -> Form {
        self.rows(|rows| rows.operands = operands.to_owned())
    }

    /// Adds rows.
    pub(super) fn at(self, more: impl IntoIterator<Item = Row>) -> Form {
        self.rows(|rows| rows.more.extend(more))
    }

    /// Omits rows whose result is undefined.
    pub(super) fn only(self, keeps: fn(&Row) -> bool) -> Form {
        self.rows(|rows| rows.keeps = keeps)
    }

    /// Allows immediates only in rows that pass `allows`.
    pub(super) fn immediates(self, allows: fn(&Row) -> bool) -> Form {
        self.rows(|rows| rows.allows_immediates = allows)
    }

    /// An approximation: results of a GPU may differ by so many units of the last place.
    pub(super) fn within(mut self, ulps: u64) -> Form {
        self.tolerance.ulps = ulps;
        self
    }

    /// As [`Form::within`], or by this absolute difference.
    pub(super) fn at_most(mut self, absolute: f64) -> Form {
        self.tolerance.absolute = absolute;
        self
    }

    /// A GPU's NaN may have other bits, because ptxas may choose another instruction, or because the ISA does
    /// not say whose bits it has.
    pub(super) fn any_nan(mut self) -> Form {
        self.tolerance.any_nan = true;
        self
    }

    /// Threads access memory in an undefined order.
    pub(super) fn of_any_order(mut self) -> Form {
        self.tolerance.is_of_any_order = true;
        self
    }

    /// Its only operand may be an immediate.
    pub(super) fn or_immediate(self) -> Form {
        self.rows(|rows| rows.takes_immediate = true)
    }

    /// Executes the form and compares the results.
    pub(super) fn check(self) -> Result<(), String> {
        let opcode = self.opcode;
        match self.test {
            Test::Rows(rows) => rows.check(opcode),
            Test::Kernels(test) => test(opcode),
        }
        .map_err(|problem| format!("{opcode}: {problem}"))
    }
}

impl Rows {
    fn check(&self, opcode: &str) -> Result<(), String> {
        let mut random = random(opcode);
        let rows = self.all(&mut random);
        self.execute(opcode, &rows, &self.operands, false)?;
        self.execute(opcode, &rows, &self.operands, true)?;
        // Immediates in the place of all operands but the first, or of one.
        let first = if self.takes_immediate { 0 } else { 1 };
        for round in 0..12 {
            let chosen: Vec<usize> = match round % 3 {
                0 => (first..self.kinds.len()).collect(),
                _ if self.kinds.len() == first => break,
                _ => vec![first + random.below(self.kinds.len() - first)],
            };
            let source = rows[random.below(rows.len())];
            if !(self.allows_immediates)(&source) {
                continue;
            }
            let (mut operands, mut some) = (self.operands.clone(), Vec::new());
            for &n in &chosen {
                // Moves and selections treat operands as bits, but immediates have the type of the
                // instruction.
                let literal = match (opcode.rsplit('.').next(), self.kinds[n].class) {
                    (Some("f32"), "b32") => Single::literal(source[n]),
                    (Some("f64"), "b64") => Double::literal(source[n]),
                    _ => (self.kinds[n].literal)(source[n]),
                };
                operands = operands.replace(NAMES[n], &literal);
            }
            for _ in 0..THREADS {
                let mut row = rows[random.below(rows.len())];
                chosen.iter().for_each(|&n| row[n] = source[n]);
                some.push(row);
            }
            some.retain(self.keeps);
            if !chosen.is_empty() && !some.is_empty() {
                self.execute(opcode, &some, &operands, false)?;
            }
        }
        Ok(())
    }

    /// All combinations of edges, random rows, and the rows of the form.
    fn all(&self, random: &mut Random) -> Vec<Row> {
        let mut rows = self.more.clone();
        let kinds = &self.kinds;
        if kinds.len() == 1 && kinds[0].class == "b16" {
            rows.extend((0..1 << 16).map(|bits| [bits, 0, 0, 0]));
        }
        let limit = [usize::MAX, 256, 20, 8][kinds.len() - 1];
        let mut combined = vec![Row::default()];
        for (n, kind) in kinds.iter().enumerate() {
            let step = kind.edges.len().div_ceil(limit);
            // Another part of the edges for each operand.
            let part: Vec<u64> = kind.edges.iter().copied().skip(n % step).step_by(step).collect();
            let extended = combined.iter().flat_map(|row| {
                part.iter().map(move |&edge| {
                    let mut row = *row;
                    row[n] = edge;
                    row
                })
            });
            combined = extended.collect();
        }
        rows.extend(combined);
        rows.extend((0..8192).map(|_| {
            let mut row = Row::default();
            for (n, kind) in kinds.iter().enumerate() {
                row[n] = match random.below(4) {
                    0 => kind.edges[random.below(kind.edges.len())],
                    _ => (kind.random)(random),
                };
            }
            row
        }));
        rows.retain(self.keeps);
        rows
    }

    /// Runs the instruction on all rows, under a predicate if it `is_guarded`, and compares.
    fn execute(&self, opcode: &str, rows: &[Row], operands: &str, is_guarded: bool) -> Result<(), String> {
        // Rows of 40 bytes: operands and the predicate.
        let mut random = super::random(operands);
        let mut rows = rows.to_vec();
        rows.resize(rows.len().next_multiple_of(THREADS), rows[0]);
        let guards: Vec<bool> = rows.iter().map(|_| !is_guarded || random.below(3) > 0).collect();
        let words = rows.iter().zip(&guards).flat_map(|(row, &guard)| {
            row.iter().copied().chain([guard.into()]).flat_map(u64::to_le_bytes).collect::<Vec<_>>()
        });
        let mut device = Device::new();
        let from = device.store(&words.collect::<Vec<u8>>());
        let to = device.allocate(8 * rows.len());
        let text = self.kernel(opcode, operands, is_guarded);
        device.run(&text, Grid::row(rows.len() / THREADS, THREADS), &arguments(&[from, to]))?;
        let found = device.load_words(to, rows.len())?;
        let mut problems = Vec::new();
        for ((row, guard), found) in rows.iter().zip(guards).zip(found) {
            let result = match guard {
                true => (self.compare)(row, found),
                false if found == self.sentinel() => Ok(()),
                false => Err(format!("{:#x}, as it does not run", self.sentinel())),
            };
            if let Err(expected) = result {
                let row: Vec<String> =
                    row[..self.kinds.len()].iter().map(|bits| format!("{bits:#x}")).collect();
                problems.push(format!("{operands} of {}: {found:#x} is not {expected}", row.join(", ")));
            }
        }
        match problems.len() {
            0 => Ok(()),
            count => Err(format!("{count} of {}:\n  {}", rows.len(), problems[..count.min(5)].join("\n  "))),
        }
    }

    fn sentinel(&self) -> u64 {
        match self.class {
            "pred" => 1,
            "b16" => SENTINEL & 0xFFFF,
            "b32" => SENTINEL & 0xFFFF_FFFF,
            _ => SENTINEL,
        }
    }

    /// A kernel whose threads each load a row, execute the instruction and store the result.
    fn kernel(&self, opcode: &str, operands: &str, is_guarded: bool) -> String {
        let declared = |name: &str, class: &str| format!(".reg .{class} {name};\n");
        let mut text = String::from(
            ".visible .entry form(.param .u64 from, .param .u64 to)\n{\n\
             .reg .b32 %i, %n, %t;\n.reg .b64 %o, %from, %to, %w;\n.reg .pred %g;\n\
             mov.u32 %i, %ctaid.x;\nmov.u32 %n, %ntid.x;\nmov.u32 %t, %tid.x;\nmad.lo.s32 %i, %i, %n, %t;\n\
             ld.param.u64 %from, [from];\nld.param.u64 %to, [to];\n\
             mul.wide.u32 %o, %i, 40;\nadd.s64 %from, %from, %o;\n\
             mul.wide.u32 %o, %i, 8;\nadd.s64 %to, %to, %o;\n\
             ld.global.b32 %t, [%from+32];\nsetp.ne.s32 %g, %t, 0;\n",
        );
        for (n, kind) in self.kinds.iter().enumerate() {
            text += &declared(NAMES[n], kind.class);
            text += &match kind.class {
                "pred" => {
                    format!("ld.global.b32 %t, [%from+{}];\nsetp.ne.s32 {}, %t, 0;\n", 8 * n, NAMES[n])
                }
                class => format!("ld.global.{class} {}, [%from+{}];\n", NAMES[n], 8 * n),
            };
        }
        text += &(declared("%d", self.class) + &declared("%x", self.class));
        if is_guarded {
            text += &match self.class {
                "pred" => "mov.pred %d, -1;\n".to_owned(),
                class => format!("mov.{class} %d, {};\n", self.sentinel()),
            };
        }
        text += &format!("{}{opcode} {operands};\n", if is_guarded { "@%g " } else { "" });
        text += match self.class {
            "pred" => "selp.b64 %w, 1, 0, %d;\n",
            "b16" => "cvt.u64.u16 %w, %d;\n",
            "b32" => "cvt.u64.u32 %w, %d;\n",
            _ => "mov.b64 %w, %d;\n",
        };
        text + "st.global.u64 [%to], %w;\nret;\n}\n"
    }
}
