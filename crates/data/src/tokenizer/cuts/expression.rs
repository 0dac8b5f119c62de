//! Parser of the expressions whose cuts can be proven: a subset of Oniguruma's syntax.
//!
//! A match of such an expression depends only on the text from its start on, so look-behind, `^`, `\b` and
//! backreferences are left out. The result is the order in which parts of the expression read characters.
//! The characters that a part matches are left to the engine itself, which compiles its source.

use std::collections::BTreeSet;

/// An expression as the parts that match one character, and the transitions between them.
#[derive(Debug, Default)]
pub(super) struct Expression {
    /// Source of each part, such as `[^\r\n]` or `(?i:s)`.
    pub(super) parts: Vec<String>,
    pub(super) edges: BTreeSet<Edge>,
    /// Parts that can match the last character.
    pub(super) last: BTreeSet<usize>,
    /// True if the expression matches the empty text.
    pub(super) is_nullable: bool,
    /// Sources of the alternatives at the top that assert nothing about the text after them.
    pub(super) plain_alternatives: Vec<String>,
}

/// A transition: after `from` has matched the character before a position, `to` reads there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Edge {
    /// `None` at the start of a match.
    pub(super) from: Option<usize>,
    pub(super) to: CharacterTest,
}

/// A part of an expression that depends on the character at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CharacterTest {
    /// A part that matches a character; `ahead` if it begins a look-ahead.
    Part { part: usize, ahead: bool },
    /// `$`, which also looks for the end of the text.
    End,
}

/// Maximum length of an expression. Published ones have at most 1 KiB.
const MAX_BYTES: usize = 8 << 10;
/// Maximum depth of groups.
const MAX_DEPTH: usize = 20;
/// Maximum number of parts.
pub(super) const MAX_PARTS: usize = 128;
/// Maximum number of visits of parts in computing the transitions.
const MAX_VISITS: usize = 100_000;

impl Expression {
    /// Parses an expression; `None` if it is not in the subset.
    pub(super) fn parse(source: &str) -> Option<Expression> {
        if source.len() > MAX_BYTES {
            return None;
        }
        let (rest, ignores_case) = match source.strip_prefix("(?i)") {
            Some(rest) => (rest, true),
            None => (source, false),
        };
        let mut parser = Parser { rest, parts: Vec::new(), depth: 0 };
        let mut alternatives = Vec::new();
        let mut plain_alternatives = Vec::new();
        loop {
            let start = parser.rest;
            let sequence = parser.sequence(ignores_case)?;
            if !sequence.asserts() {
                let text = &start[..start.len() - parser.rest.len()];
                plain_alternatives.push(if ignores_case { format!("(?i:{text})") } else { text.to_owned() });
            }
            alternatives.push(sequence);
            if !parser.eat("|") {
                break;
            }
        }
        if !parser.rest.is_empty() || parser.parts.len() > MAX_PARTS {
            return None;
        }
        let mut flow = Flow { edges: BTreeSet::new(), visits: 0 };
        let after = flow.through(&SyntaxNode::OneOf(alternatives), &BTreeSet::from([Before::START]))?;
        Some(Expression {
            parts: parser.parts,
            edges: flow.edges,
            last: after.iter().filter_map(|before| before.part).collect(),
            is_nullable: after.contains(&Before::START),
            plain_alternatives,
        })
    }

    /// The expression that matches `text` literally.
    pub(super) fn literal(text: &str) -> Option<Expression> {
        Expression::parse(&escape(text))
    }
}

/// `text` with every character written as a code point.
pub(super) fn escape(text: &str) -> String {
    text.chars().map(|c| format!("\\x{{{:X}}}", c as u32)).collect()
}

/// A part of the syntax tree.
enum SyntaxNode {
    Part(usize),
    Sequence(Vec<SyntaxNode>),
    OneOf(Vec<SyntaxNode>),
    Repeat { node: Box<SyntaxNode>, can_skip: bool, can_repeat: bool },
    Ahead(Box<SyntaxNode>),
    End,
}

impl SyntaxNode {
    /// True if it contains a look-ahead or `$`.
    fn asserts(&self) -> bool {
        match self {
            SyntaxNode::Part(_) => false,
            SyntaxNode::Sequence(nodes) | SyntaxNode::OneOf(nodes) => nodes.iter().any(SyntaxNode::asserts),
            SyntaxNode::Repeat { node, .. } => node.asserts(),
            SyntaxNode::Ahead(_) | SyntaxNode::End => true,
        }
    }
}

struct Parser<'s> {
    rest: &'s str,
    parts: Vec<String>,
    depth: usize,
}

impl<'s> Parser<'s> {
    fn eat(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn take(&mut self, len: usize) -> &'s str {
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        taken
    }

    fn alternatives(&mut self, ignores_case: bool) -> Option<SyntaxNode> {
        let mut alternatives = vec![self.sequence(ignores_case)?];
        while self.eat("|") {
            alternatives.push(self.sequence(ignores_case)?);
        }
        Some(SyntaxNode::OneOf(alternatives))
    }

    fn sequence(&mut self, ignores_case: bool) -> Option<SyntaxNode> {
        let mut nodes = Vec::new();
        while !self.rest.is_empty() && !self.rest.starts_with(['|', ')']) {
            let node = self.atom(ignores_case)?;
            nodes.push(self.quantified(node)?);
        }
        Some(SyntaxNode::Sequence(nodes))
    }

    fn atom(&mut self, ignores_case: bool) -> Option<SyntaxNode> {
        let first = self.rest.chars().next()?;
        let len = match first {
            '(' => return self.group(ignores_case),
            '$' => {
                self.take(1);
                return Some(SyntaxNode::End);
            }
            '[' => class_len(self.rest)?,
            '\\' => escape_len(self.rest)?,
            '^' | '*' | '+' | '?' | '{' => return None,
            _ => first.len_utf8(),
        };
        let text = self.take(len);
        self.parts.push(if ignores_case { format!("(?i:{text})") } else { text.to_owned() });
        Some(SyntaxNode::Part(self.parts.len() - 1))
    }

    fn group(&mut self, ignores_case: bool) -> Option<SyntaxNode> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let is_ahead = self.eat("(?=") || self.eat("(?!");
        let mut ignores_case = ignores_case;
        if !is_ahead && !self.eat("(?:") && !self.eat("(?>") {
            if self.eat("(?i:") {
                ignores_case = true;
            } else if self.eat("(?-i:") {
                ignores_case = false;
            } else if !self.eat("(") || self.rest.starts_with(['?', '*']) {
                return None;
            }
        }
        let node = self.alternatives(ignores_case)?;
        self.depth -= 1;
        self.eat(")").then_some(())?;
        Some(if is_ahead { SyntaxNode::Ahead(Box::new(node)) } else { node })
    }

    fn quantified(&mut self, mut node: SyntaxNode) -> Option<SyntaxNode> {
        loop {
            // Copies of copies could be many.
            if self.parts.len() > MAX_PARTS {
                return None;
            }
            let (can_skip, can_repeat) = match self.rest.chars().next() {
                Some('*') => (true, true),
                Some('+') => (false, true),
                Some('?') => (true, false),
                Some('{') => {
                    let (len, least, most) = interval(self.rest)?;
                    self.take(len);
                    // In Oniguruma's syntax `{n}?` is `(?:{n})?`.
                    let can_skip = self.eat("?") || least == 0;
                    let first = (least > 1).then(|| self.copy(&node));
                    let rest = SyntaxNode::Repeat {
                        node: Box::new(node),
                        can_skip: false,
                        can_repeat: most != Some(1),
                    };
                    let all = SyntaxNode::Sequence(first.into_iter().chain([rest]).collect());
                    node = SyntaxNode::Repeat { node: Box::new(all), can_skip, can_repeat: false };
                    continue;
                }
                _ => return Some(node),
            };
            if matches!(node, SyntaxNode::Ahead(_) | SyntaxNode::End) {
                return None;
            }
            self.take(1);
            // Reluctant and possessive forms read the same characters.
            let _ = self.eat("?") || self.eat("+");
            node = SyntaxNode::Repeat { node: Box::new(node), can_skip, can_repeat };
        }
    }
}

impl Parser<'_> {
    /// `node` with parts of its own.
    fn copy(&mut self, node: &SyntaxNode) -> SyntaxNode {
        let mut copies = |nodes: &[SyntaxNode]| nodes.iter().map(|node| self.copy(node)).collect();
        match node {
            SyntaxNode::Part(part) => {
                self.parts.push(self.parts[*part].clone());
                SyntaxNode::Part(self.parts.len() - 1)
            }
            SyntaxNode::Sequence(nodes) => SyntaxNode::Sequence(copies(nodes)),
            SyntaxNode::OneOf(nodes) => SyntaxNode::OneOf(copies(nodes)),
            SyntaxNode::Repeat { node, can_skip, can_repeat } => {
                let (can_skip, can_repeat) = (*can_skip, *can_repeat);
                SyntaxNode::Repeat { node: Box::new(self.copy(node)), can_skip, can_repeat }
            }
            SyntaxNode::Ahead(node) => SyntaxNode::Ahead(Box::new(self.copy(node))),
            SyntaxNode::End => SyntaxNode::End,
        }
    }
}

/// Length, minimum and maximum of an interval such as `{1,3}`.
fn interval(text: &str) -> Option<(usize, u32, Option<u32>)> {
    let end = text.find('}')?;
    let inside = &text[1..end];
    let number = |digits: &str| {
        let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|_| is_number)
    };
    let (least, most) = match inside.split_once(',') {
        None => (number(inside)?, Some(number(inside)?)),
        Some(("", most)) => (0, Some(number(most)?)),
        Some((least, "")) => (number(least)?, None),
        Some((least, most)) => (number(least)?, Some(number(most)?)),
    };
    // A maximum below the minimum is possessive.
    let (least, most) = match most {
        Some(most) if most < least => (most, Some(least)),
        _ => (least, most),
    };
    Some((end + 1, least, most))
}

/// Length of the escape at the start of `text`, for those that match one character.
fn escape_len(text: &str) -> Option<usize> {
    let escaped = text.chars().nth(1)?;
    match escaped {
        's' | 'S' | 'd' | 'D' | 'w' | 'W' | 'h' | 'H' | 't' | 'v' | 'n' | 'r' | 'f' | 'a' | 'e' => Some(2),
        'p' | 'P' => text[2..].starts_with('{').then(|| text.find('}').map(|end| end + 1))?,
        'x' if text[2..].starts_with('{') => {
            let end = text.find('}')?;
            text[3..end].bytes().all(|b| b.is_ascii_hexdigit()).then_some(end + 1)
        }
        'u' => text.get(2..6)?.bytes().all(|b| b.is_ascii_hexdigit()).then_some(6),
        c if c.is_ascii_alphanumeric() => None,
        c => Some(1 + c.len_utf8()),
    }
}

/// Length of the character class at the start of `text`.
fn class_len(text: &str) -> Option<usize> {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let c = rest.chars().next()?;
        match c {
            '[' if depth > 0 && rest.starts_with("[:") => {
                // A POSIX bracket. Without its end it would be a nested class.
                at += rest.find(":]").filter(|&end| is_bracket_name(&rest[2..end]))? + 2;
                continue;
            }
            '[' => {
                depth += 1;
                // A bracket that closes at once is a literal one.
                if rest[1..].trim_start_matches('^').starts_with(']') {
                    return None;
                }
            }
            ']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            '\\' => at += rest[1..].chars().next()?.len_utf8(),
            _ => {}
        }
        at += c.len_utf8();
    }
    None
}

fn is_bracket_name(name: &str) -> bool {
    let name = name.strip_prefix('^').unwrap_or(name);
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase())
}

/// The part that matched the character before a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Before {
    /// `None` at the start of a match.
    part: Option<usize>,
    /// True if a look-ahead begins at the position.
    ahead: bool,
}

impl Before {
    const START: Before = Before { part: None, ahead: false };
}

struct Flow {
    edges: BTreeSet<Edge>,
    visits: usize,
}

impl Flow {
    /// Adds the transitions of `node` after `before`; returns the parts before the position after it.
    fn through(&mut self, node: &SyntaxNode, before: &BTreeSet<Before>) -> Option<BTreeSet<Before>> {
        self.visits += before.len() + 1;
        if self.visits > MAX_VISITS {
            return None;
        }
        match node {
            SyntaxNode::Part(part) => {
                self.edges.extend(before.iter().map(|&Before { part: from, ahead }| Edge {
                    from,
                    to: CharacterTest::Part { part: *part, ahead },
                }));
                Some(BTreeSet::from([Before { part: Some(*part), ahead: false }]))
            }
            SyntaxNode::Sequence(nodes) => {
                nodes.iter().try_fold(before.clone(), |before, node| self.through(node, &before))
            }
            SyntaxNode::OneOf(nodes) => {
                let mut after = BTreeSet::new();
                for node in nodes {
                    after.extend(self.through(node, before)?);
                }
                Some(after)
            }
            SyntaxNode::Repeat { node, can_skip, can_repeat } => {
                let mut after = self.through(node, before)?;
                if *can_repeat {
                    after.extend(self.through(node, &after)?);
                }
                if *can_skip {
                    after.extend(before);
                }
                Some(after)
            }
            SyntaxNode::Ahead(node) => {
                let entered = before.iter().map(|before| Before { ahead: true, ..*before }).collect();
                self.through(node, &entered)?;
                Some(before.clone())
            }
            SyntaxNode::End => {
                self.edges
                    .extend(before.iter().map(|before| Edge { from: before.part, to: CharacterTest::End }));
                Some(before.clone())
            }
        }
    }
}
