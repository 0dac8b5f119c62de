//! PTX as NVRTC emits it, parsed into kernels of instructions.
//!
//! The grammar is that of the PTX ISA (NVIDIA, version 9.0, section 4), of which NVRTC emits a part: no
//! calls, no textures, no debugging information but `.loc`. Instructions stay as written; `instructions`
//! defines their meaning.

mod lexer;
mod parser;

pub(crate) use parser::parse;
use std::collections::BTreeSet;
use std::fmt;

/// A syntax error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SyntaxError {
    line: u32,
    problem: String,
}

impl SyntaxError {
    pub(crate) fn new(line: u32, problem: impl Into<String>) -> SyntaxError {
        SyntaxError { line, problem: problem.into() }
    }
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.problem)
    }
}

/// A translation unit.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// The architecture that it was compiled for: `sm_90a`.
    pub(crate) target: String,
    /// Source files by their number in `.loc`.
    pub(crate) files: Vec<(u32, String)>,
    /// Variables in global memory, and shared ones that several kernels may name.
    pub(crate) variables: Vec<Variable>,
    pub(crate) kernels: Vec<Kernel>,
}

/// A state space (PTX ISA, section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    /// Shared memory of all blocks of a cluster.
    Cluster,
    Local,
    Param,
}

/// A variable or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) space: Space,
    pub(crate) align: u64,
    /// Size in bytes; 0 for an `.extern` array, which starts at the dynamic shared memory.
    pub(crate) bytes: u64,
    /// Initial bytes, followed by zeros.
    pub(crate) initial: Vec<u8>,
}

/// The width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Predicate,
    B16,
    B32,
    B64,
}

/// A register: an index into [`Kernel::registers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Register(pub(crate) u32);

/// An entry function.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Variable>,
    /// Maximum threads of a block along x, y, z, if `.maxntid` sets it.
    pub(crate) max_threads: Option<[u32; 3]>,
    /// Maximum registers of a thread, if `.maxnreg` sets it.
    pub(crate) max_registers: Option<u32>,
    /// Minimum resident blocks of a multiprocessor, if `.minnctapersm` sets it.
    pub(crate) min_blocks: u32,
    /// Blocks of a cluster along x, y, z, if `.reqnctapercluster` sets them.
    pub(crate) cluster: Option<[u32; 3]>,
    pub(crate) registers: Vec<Class>,
    /// Shared and local variables.
    pub(crate) variables: Vec<Variable>,
    pub(crate) body: Vec<Statement>,
    /// Source positions, which `Instruction::location` indexes.
    pub(crate) locations: Vec<Location>,
}

/// A line of the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) file: u32,
    pub(crate) line: u32,
    /// File and line of the call, if the function of the line was inlined.
    pub(crate) inlined_at: Option<(u32, u32)>,
}

impl Location {
    /// File and line, and those of the call into which it was inlined. `files` are numbers and names.
    pub(crate) fn describe(self, files: &[(u32, String)]) -> String {
        let name = |file| files.iter().find(|(number, _)| *number == file).map_or("?", |(_, name)| name);
        let place = format!("{}:{}", name(self.file), self.line);
        match self.inlined_at {
            Some((at_file, at_line)) => format!("{place} (inlined at {}:{at_line})", name(at_file)),
            None => place,
        }
    }
}

/// A part of a kernel's body.
#[derive(Debug)]
pub(crate) enum Statement {
    /// The target of branches; a number within the kernel.
    Label(u32),
    Instruction(Instruction),
}

/// An instruction as written.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    /// The guard predicate; true if it is negated.
    pub(crate) guard: Option<(Register, bool)>,
    /// The opcode with its modifiers: `add.rn.f32`.
    pub(crate) opcode: String,
    pub(crate) operands: Vec<Operand>,
    /// An index into [`Kernel::locations`].
    pub(crate) location: u32,
}

impl Kernel {
    /// The distinct opcodes.
    pub(crate) fn forms(&self) -> Vec<&str> {
        let opcodes = self.body.iter().filter_map(|statement| match statement {
            Statement::Instruction(instruction) => Some(instruction.opcode.as_str()),
            Statement::Label(_) => None,
        });
        opcodes.collect::<BTreeSet<&str>>().into_iter().collect()
    }
}

impl Instruction {
    /// The opcode's parts: `["add", "rn", "f32"]`.
    pub(crate) fn parts(&self) -> Vec<&str> {
        self.opcode.split('.').collect()
    }
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(Register),
    /// A negated predicate.
    Not(Register),
    Integer(i64),
    Single(u32),
    Double(u64),
    /// The address of a variable or parameter.
    Symbol(String),
    /// A predefined register: `%tid.x`.
    Special(String),
    Label(u32),
    /// `[base + offset]`.
    Address(Box<Operand>, i64),
    /// `[map, {x, y, ...}]`: a box of a tensor.
    Box(Box<Operand>, Vec<Operand>),
    /// `{a, b, ...}`.
    Vector(Vec<Operand>),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `_`: discards a result.
    Sink,
}

/// Prefix of the line that the emulated NVRTC appends to PTX: name and defines of the program.
pub(crate) const COMPILED_FROM: &str = "// compiled from ";

/// Name and defines of the program that a piece of PTX was compiled from.
pub(crate) fn source_of(ptx: &str) -> &str {
    ptx.rsplit_once(COMPILED_FROM).map_or("unknown", |(_, source)| source.trim_end())
}
