//! The parser of PTX.

use super::lexer::{Token, tokens};
use super::{
    Class, Instruction, Kernel, Location, Module, Operand, Register, Space, Statement, SyntaxError, Variable,
};
use std::collections::HashMap;

/// Parses a translation unit.
pub(crate) fn parse(text: &str) -> Result<Module, SyntaxError> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0 };
    let mut module = Module::default();
    while parser.at < parser.tokens.len() {
        parser.top_level(&mut module)?;
    }
    Ok(module)
}

struct Parser<'t> {
    tokens: Vec<(Token<'t>, u32)>,
    at: usize,
}

/// Names of a kernel by scope, the innermost last: inline assembly declares its own within braces.
#[derive(Default)]
struct Names {
    registers: Vec<HashMap<String, Register>>,
    labels: Vec<HashMap<String, u32>>,
    label_count: u32,
}

impl<'t> Parser<'t> {
    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.at).map(|(token, _)| *token)
    }

    fn error(&self, problem: impl Into<String>) -> SyntaxError {
        let last = self.tokens.last().map_or(0, |(_, line)| *line);
        SyntaxError::new(self.tokens.get(self.at).map_or(last, |(_, line)| *line), problem)
    }

    fn next(&mut self) -> Result<Token<'t>, SyntaxError> {
        let token = self.peek().ok_or_else(|| self.error("unexpected end of the PTX"))?;
        self.at += 1;
        Ok(token)
    }

    fn take(&mut self, mark: char) -> bool {
        let is_there = self.peek() == Some(Token::Mark(mark));
        self.at += usize::from(is_there);
        is_there
    }

    fn expect(&mut self, mark: char) -> Result<(), SyntaxError> {
        if self.take(mark) { Ok(()) } else { Err(self.error(format!("`{mark}` is missing"))) }
    }

    fn name(&mut self) -> Result<&'t str, SyntaxError> {
        match self.next()? {
            Token::Name(name) => Ok(name),
            _ => Err(self.error("a name is missing")),
        }
    }

    fn integer(&mut self) -> Result<i64, SyntaxError> {
        let is_negative = self.take('-');
        match self.next()? {
            Token::Integer(value) if is_negative => Ok((value as i64).wrapping_neg()),
            Token::Integer(value) => Ok(value as i64),
            _ => Err(self.error("an integer is missing")),
        }
    }

    /// Skips the tokens up to the end of this line.
    fn skip_line(&mut self) {
        let line = self.tokens[self.at - 1].1;
        while self.tokens.get(self.at).is_some_and(|(_, l)| *l == line) {
            self.at += 1;
        }
    }

    fn top_level(&mut self, module: &mut Module) -> Result<(), SyntaxError> {
        match self.name()? {
            ".version" | ".address_size" => self.skip_line(),
            ".target" => {
                module.target = self.name()?.to_owned();
                self.skip_line();
            }
            ".file" => {
                let number = self.integer()? as u32;
                let Token::Text(name) = self.next()? else {
                    return Err(self.error("a file's name is missing"));
                };
                // NVRTC makes names absolute, and no such file exists.
                let folder = std::env::current_dir().unwrap_or_default();
                let name = std::path::Path::new(name).strip_prefix(folder).unwrap_or(name.as_ref());
                module.files.push((number, name.display().to_string()));
                self.skip_line();
            }
            ".section" => {
                self.name()?;
                self.expect('{')?;
                while !self.take('}') {
                    self.at += 1;
                }
            }
            ".visible" | ".weak" | ".extern" => {}
            ".entry" => module.kernels.push(self.kernel()?),
            space @ (".global" | ".const" | ".shared") => {
                let variable = self.variable(space)?;
                module.variables.push(variable);
            }
            ".func" => {
                let what =
                    "functions that are not inlined, and `printf`, are not emulated; `trace` prints values";
                return Err(self.error(what.to_owned()));
            }
            other => return Err(self.error(format!("`{other}` is not supported"))),
        }
        Ok(())
    }

    /// Parses a variable after its state space: alignment, type, name, extent and initial values.
    fn variable(&mut self, space: &str) -> Result<Variable, SyntaxError> {
        let space = match space {
            ".global" | ".const" => Space::Global,
            ".shared" => Space::Shared,
            ".local" => Space::Local,
            _ => Space::Param,
        };
        let (mut align, mut name) = (0, self.name()?);
        if name == ".align" {
            align = self.integer()? as u64;
            name = self.name()?;
        }
        let element = type_bytes(name).ok_or_else(|| self.error(format!("`{name}` is not a type")))?;
        let name = self.name()?.to_owned();
        let mut bytes = element;
        if self.take('[') {
            let count = if self.peek() == Some(Token::Mark(']')) { 0 } else { self.integer()? as u64 };
            bytes = element * count;
            self.expect(']')?;
        }
        let mut initial = Vec::new();
        if self.take('=') {
            let is_list = self.take('{');
            loop {
                let value = match self.peek() {
                    Some(Token::Single(bits)) => (self.at += 1, u64::from(bits)).1,
                    Some(Token::Double(bits)) => (self.at += 1, bits).1,
                    _ => self.integer()? as u64,
                };
                initial.extend_from_slice(&value.to_le_bytes()[..element as usize]);
                if !(is_list && self.take(',')) {
                    break;
                }
            }
            if is_list {
                self.expect('}')?;
            }
        }
        // Parameters are separated by commas.
        if space != Space::Param {
            self.expect(';')?;
        }
        Ok(Variable { name, space, align: align.max(element.min(8)).max(1), bytes, initial })
    }

    fn kernel(&mut self) -> Result<Kernel, SyntaxError> {
        let mut kernel = Kernel {
            name: self.name()?.to_owned(),
            parameters: Vec::new(),
            max_threads: None,
            max_registers: None,
            min_blocks: 1,
            cluster: None,
            registers: Vec::new(),
            variables: Vec::new(),
            body: Vec::new(),
            locations: vec![Location::default()],
        };
        self.expect('(')?;
        while !self.take(')') {
            self.name()?;
            let parameter = self.variable(".param")?;
            kernel.parameters.push(parameter);
            self.take(',');
        }
        while !self.take('{') {
            match self.name()? {
                ".maxntid" | ".reqntid" => kernel.max_threads = Some(self.extents()?),
                ".reqnctapercluster" => kernel.cluster = Some(self.extents()?),
                ".explicitcluster" => {}
                ".maxclusterrank" => _ = self.integer()?,
                ".maxnreg" => kernel.max_registers = Some(self.integer()? as u32),
                ".minnctapersm" => kernel.min_blocks = self.integer()? as u32,
                other => return Err(self.error(format!("`{other}` is not supported"))),
            }
        }
        let mut names = Names::default();
        names.open_scope();
        while !names.registers.is_empty() {
            self.statement(&mut kernel, &mut names)?;
        }
        Ok(kernel)
    }

    /// Up to three extents, separated by commas.
    fn extents(&mut self) -> Result<[u32; 3], SyntaxError> {
        let mut extents = [1; 3];
        for extent in &mut extents {
            *extent = self.integer()? as u32;
            if !self.take(',') {
                break;
            }
        }
        Ok(extents)
    }

    fn statement(&mut self, kernel: &mut Kernel, names: &mut Names) -> Result<(), SyntaxError> {
        if self.take('{') {
            names.open_scope();
            return Ok(());
        }
        if self.take('}') {
            names.close_scope();
            return Ok(());
        }
        if self.take(';') {
            return Ok(());
        }
        let guard = match self.take('@') {
            true => {
                let negated = self.take('!');
                let name = self.name()?;
                Some((names.register(name).ok_or_else(|| self.error("an unknown predicate"))?, negated))
            }
            false => None,
        };
        match self.name()? {
            ".loc" => {
                let location = self.location()?;
                kernel.locations.push(location);
            }
            ".reg" => self.registers(kernel, names)?,
            ".pragma" => {
                while !self.take(';') {
                    self.at += 1;
                }
            }
            space @ (".shared" | ".local") => {
                let variable = self.variable(space)?;
                kernel.variables.push(variable);
            }
            name if self.take(':') => kernel.body.push(Statement::Label(names.define_label(name))),
            opcode => {
                let mut operands = Vec::new();
                while !self.take(';') {
                    operands.push(self.operand(names)?);
                    self.take(',');
                }
                if opcode.starts_with("bra")
                    && let Some(Operand::Symbol(name)) = operands.first()
                {
                    operands = vec![Operand::Label(names.label(name))];
                }
                let location = kernel.locations.len() as u32 - 1;
                let opcode = opcode.to_owned();
                kernel.body.push(Statement::Instruction(Instruction { guard, opcode, operands, location }));
            }
        }
        Ok(())
    }

    /// `.loc file line column [, function_name label[+offset] , inlined_at file line column]`
    fn location(&mut self) -> Result<Location, SyntaxError> {
        let (file, line) = (self.integer()? as u32, self.integer()? as u32);
        self.integer()?;
        let mut inlined_at = None;
        while self.take(',') {
            match self.name()? {
                "function_name" => {
                    self.name()?;
                    if self.take('+') {
                        self.integer()?;
                    }
                }
                _ => {
                    inlined_at = Some((self.integer()? as u32, self.integer()? as u32));
                    self.integer()?;
                }
            }
        }
        Ok(Location { file, line, inlined_at })
    }

    fn registers(&mut self, kernel: &mut Kernel, names: &mut Names) -> Result<(), SyntaxError> {
        let class = match self.name()? {
            ".pred" => Class::Predicate,
            ".b16" | ".u16" | ".s16" | ".f16" => Class::B16,
            ".b32" | ".u32" | ".s32" | ".f32" => Class::B32,
            ".b64" | ".u64" | ".s64" | ".f64" => Class::B64,
            other => return Err(self.error(format!("registers of type `{other}` are not understood"))),
        };
        loop {
            let name = self.name()?;
            let count = if self.take('<') { Some(self.integer()?) } else { None };
            let mut declare = |name: String| {
                let scope = names.registers.last_mut().expect("a kernel's body is a scope");
                scope.insert(name, Register(kernel.registers.len() as u32));
                kernel.registers.push(class);
            };
            match count {
                Some(count) => {
                    (0..count).for_each(|n| declare(format!("{name}{n}")));
                    self.expect('>')?;
                }
                None => declare(name.to_owned()),
            }
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn operand(&mut self, names: &mut Names) -> Result<Operand, SyntaxError> {
        let operand = self.simple_operand(names)?;
        if self.take('|') {
            let second = self.simple_operand(names)?;
            return Ok(Operand::Pair(operand.into(), second.into()));
        }
        Ok(operand)
    }

    fn simple_operand(&mut self, names: &mut Names) -> Result<Operand, SyntaxError> {
        Ok(match self.next()? {
            Token::Mark('[') => {
                let base = self.simple_operand(names)?;
                let offset = if self.take('+') { self.integer()? } else { 0 };
                if self.take(',') {
                    let Operand::Vector(coordinates) = self.simple_operand(names)? else {
                        return Err(self.error("coordinates are missing"));
                    };
                    self.expect(']')?;
                    return Ok(Operand::Box(base.into(), coordinates));
                }
                self.expect(']')?;
                Operand::Address(base.into(), offset)
            }
            Token::Mark('{') => {
                let mut all = Vec::new();
                while !self.take('}') {
                    all.push(self.simple_operand(names)?);
                    self.take(',');
                }
                Operand::Vector(all)
            }
            Token::Mark('!') => {
                let name = self.name()?;
                Operand::Not(names.register(name).ok_or_else(|| self.error("an unknown predicate"))?)
            }
            Token::Mark('-') => {
                self.at -= 1;
                Operand::Integer(self.integer()?)
            }
            Token::Integer(value) => Operand::Integer(value as i64),
            Token::Single(bits) => Operand::Single(bits),
            Token::Double(bits) => Operand::Double(bits),
            Token::Name("_") => Operand::Sink,
            Token::Name(name) => match names.register(name) {
                Some(register) => Operand::Register(register),
                None if name.starts_with('%') => Operand::Special(name.to_owned()),
                None => Operand::Symbol(name.to_owned()),
            },
            other => return Err(self.error(format!("{other:?} is not an operand"))),
        })
    }
}

impl Names {
    fn open_scope(&mut self) {
        self.registers.push(HashMap::new());
        self.labels.push(HashMap::new());
    }

    fn close_scope(&mut self) {
        self.registers.pop();
        self.labels.pop();
    }

    fn register(&self, name: &str) -> Option<Register> {
        self.registers.iter().rev().find_map(|scope| scope.get(name).copied())
    }

    /// The label of a branch: one that an enclosing scope has defined, else one that the kernel defines
    /// later.
    fn label(&mut self, name: &str) -> u32 {
        let known = self.labels.iter().rev().find_map(|scope| scope.get(name).copied());
        known.unwrap_or_else(|| self.new_label(name, 0))
    }

    fn define_label(&mut self, name: &str) -> u32 {
        let innermost = self.labels.len() - 1;
        let known = self.labels[innermost].get(name).copied();
        known.unwrap_or_else(|| self.new_label(name, innermost))
    }

    fn new_label(&mut self, name: &str, scope: usize) -> u32 {
        self.label_count += 1;
        self.labels[scope].insert(name.to_owned(), self.label_count - 1);
        self.label_count - 1
    }
}

fn type_bytes(name: &str) -> Option<u64> {
    Some(match name {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
.version 9.0
.target sm_90a
.address_size 64
.global .align 4 .u32 TABLE[3] = {1, 2, 0x10};
.extern .shared .align 16 .b8 space[];
.visible .entry scale(.param .align 8 .b8 scale_param_0[16], .param .u32 n)
.maxntid 256, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<3>;
	.shared .align 16 .b8 tile[128];
	.loc	1 3 5, function_name $L__info_string0, inlined_at 1 9 1
	ld.param.v2.u32 	{%r1, %r2}, [scale_param_0+8];
	{ .reg .pred p; setp.eq.s32 p, %r1, 0; @!p bra $L__BB0_1; }
	mov.u32 %r1, %tid.x;
$L__BB0_1:
	ret;
}
	.file	1 "scale.cu"
	.section	.debug_str
	{
$L__info_string0:
.b8 95,90,0
	}
"#;

    #[test]
    fn a_module_is_read_whole() {
        let module = parse(TEXT).unwrap();
        assert_eq!((module.target.as_str(), module.files.len()), ("sm_90a", 1));
        assert_eq!(module.variables[0].initial, [1, 0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0]);
        assert_eq!((module.variables[1].space, module.variables[1].bytes), (Space::Shared, 0));
        let kernel = &module.kernels[0];
        assert_eq!(kernel.parameters.iter().map(|p| p.bytes).collect::<Vec<_>>(), [16, 4]);
        assert_eq!(kernel.max_threads, Some([256, 1, 1]));
        assert_eq!(kernel.registers.len(), 6);
        assert_eq!(kernel.locations[1], Location { file: 1, line: 3, inlined_at: Some((1, 9)) });
        let Statement::Instruction(branch) = &kernel.body[2] else { panic!("{:?}", kernel.body) };
        assert_eq!((branch.guard, branch.opcode.as_str()), (Some((Register(5), true)), "bra"));
        assert_eq!(branch.operands, [Operand::Label(0)]);
        assert!(matches!(kernel.body[4], Statement::Label(0)));
    }

    #[test]
    fn what_is_not_ptx_is_named_with_its_line() {
        let error = parse("\n\n.visible .func f();").unwrap_err().to_string();
        assert!(error.starts_with("PTX line 3: functions that are not inlined"), "{error}");
        let error = parse("\n.alias f, g;").unwrap_err().to_string();
        assert!(error.starts_with("PTX line 2: `.alias`"), "{error}");
    }
}
