//! Operands that pass through filters: those of `==`, which pay for what is compared; those of `~`, which
//! become text as in Python; what a loop runs over; and what a namespace stores. A comparison with `<` or
//! `in` becomes a test.

use super::order::{COMPARED_FILTER, NUMBER_FILTER};
use super::scan::{TagKind, TemplateToken};

/// Filter that refuses what Python cannot iterate.
pub(super) const ITERATE_FILTER: &str = "xtrain_iterate";
/// Filter that turns an operand of `~` into text, as Python does.
pub(super) const TEXT_FILTER: &str = "xtrain_text";
/// Filter that refuses values nested so deeply that freeing them would overflow the stack.
pub(super) const DEPTH_FILTER: &str = "xtrain_depth";

/// Tokens of a tag without white space, each with its position in the output.
pub(super) type Placed = [(TemplateToken, usize)];

/// Operators of comparisons that compare any two values.
const EQUALITIES: [&str; 2] = ["==", "!="];
/// Operators of comparisons that refuse some values, with the tests that do the same; beside `not in`.
const ORDERS: [(&str, &str); 5] = [("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge"), ("in", "in")];
/// Tokens between expressions, beside names such as `and`.
const SEPARATORS: [&str; 3] = [",", ":", "="];

/// Tokens at one level of brackets.
#[derive(Default)]
struct Level {
    /// True for the arguments of `loop.changed`, which are compared with those before.
    compares_all: bool,
    /// True for a dictionary, whose keys are compared.
    is_dict: bool,
    comparison: Chain,
    /// Operators of the comparison.
    operators: Vec<usize>,
    concatenation: Chain,
}

/// Text around the tokens of an operand.
struct Wrapping {
    operand: (usize, usize),
    open: &'static str,
    close: String,
}

impl Wrapping {
    fn filter(operand: (usize, usize), filter: &str) -> Wrapping {
        Wrapping { operand, open: "(", close: format!(")|{filter}") }
    }
}

/// Changes of the tokens of a tag.
#[derive(Default)]
struct Changes {
    /// The inner ones first.
    wrapped: Vec<Wrapping>,
    /// Texts of operators.
    operators: Vec<(usize, String)>,
}

/// Operands of a chain of operators of one kind: first and last token of each.
#[derive(Default)]
struct Chain {
    done: Vec<(usize, usize)>,
    open: Option<(usize, usize)>,
}

impl Chain {
    fn extend(&mut self, at: usize) {
        self.open = Some((self.open.map_or(at, |(first, _)| first), at));
    }

    fn next_operand(&mut self) {
        self.done.extend(self.open.take());
    }

    /// The operands, if there is an operator between them.
    fn finish(&mut self) -> Vec<(usize, usize)> {
        let is_chain = !self.done.is_empty();
        self.next_operand();
        let operands = std::mem::take(&mut self.done);
        if is_chain { operands } else { Vec::new() }
    }
}

/// Passes the operands of `==` and `~` through filters, and turns comparisons with `<` or `in` into tests.
pub(super) fn pass(tokens: &Placed, statement: Option<&str>, out: &mut [String]) {
    let mut changes = Changes::default();
    let mut levels = vec![Level::default()];
    let mut awaits_in = statement == Some("for");
    for at in usize::from(statement.is_some())..tokens.len() {
        let token = &tokens[at].0;
        let before = |back: usize| at.checked_sub(back).map(|at| &tokens[at].0);
        let is_before = |back: usize, text: &str| before(back).is_some_and(|token| token.is(text));
        let is_name = token.kind == TagKind::Name;
        // Names of attributes, filters and tests are no operators.
        let is_member = is_name
            && (is_before(1, ".")
                || is_before(1, "|")
                || is_before(1, "is")
                || is_before(1, "not") && is_before(2, "is"));
        let is_word = |words: &[&str]| is_name && !is_member && words.contains(&token.text.as_str());
        let is_operator =
            |operators: &[&str]| token.kind == TagKind::Operator && operators.contains(&token.text.as_str());
        let is_top = levels.len() == 1;
        let Some(level) = levels.last_mut() else { return };
        let negates_in = is_word(&["not"]) && tokens.get(at + 1).is_some_and(|(next, _)| next.is("in"));
        if is_operator(&["(", "[", "{"]) {
            level.comparison.extend(at);
            level.concatenation.extend(at);
            let compares_all = is_before(1, "changed") && is_before(2, ".");
            levels.push(Level { compares_all, is_dict: token.is("{"), ..Level::default() });
        } else if is_operator(&[")", "]", "}"]) {
            finish(level, tokens, &mut changes, false);
            levels.pop();
            if let Some(level) = levels.last_mut() {
                level.comparison.extend(at);
                level.concatenation.extend(at);
            }
        } else if is_word(&["in"]) && is_top && std::mem::take(&mut awaits_in) {
            *level = Level::default();
        } else if is_operator(&EQUALITIES)
            || is_operator(&ORDERS.map(|(operator, _)| operator))
            || negates_in
            || is_word(&["in"])
        {
            text(level, tokens, &mut changes);
            level.comparison.next_operand();
            // `not in` is one operator.
            if level.operators.last().is_none_or(|&last| last + 1 != at || !tokens[last].0.is("not")) {
                level.operators.push(at);
            }
        } else if is_operator(&["~"]) {
            level.concatenation.next_operand();
            level.comparison.extend(at);
        } else if is_operator(&SEPARATORS)
            || is_word(&["and", "or", "not", "if", "else"])
            || is_word(&["recursive"]) && is_top && statement == Some("for")
        {
            let is_key = level.is_dict && token.is(":");
            finish(level, tokens, &mut changes, is_key);
        } else {
            let is_binary = is_operator(&["+", "-"]) && before(1).is_some_and(ends_operand);
            if is_binary {
                text(level, tokens, &mut changes);
            } else {
                level.concatenation.extend(at);
            }
            level.comparison.extend(at);
        }
    }
    for level in levels.iter_mut().rev() {
        finish(level, tokens, &mut changes, false);
    }
    for (at, operator) in changes.operators {
        out[tokens[at].1] = operator;
    }
    for Wrapping { operand: (first, last), open, close } in changes.wrapped {
        out[tokens[first].1].insert_str(0, open);
        out[tokens[last].1].push_str(&close);
    }
}

/// Ends the expression of a level.
fn finish(level: &mut Level, tokens: &Placed, changes: &mut Changes, is_key: bool) {
    text(level, tokens, changes);
    let whole = level.comparison.open.filter(|_| level.comparison.done.is_empty());
    let operands = level.comparison.finish();
    let operators = std::mem::take(&mut level.operators);
    if operators.iter().any(|&at| EQUALITIES.iter().all(|equality| !tokens[at].0.is(equality))) {
        return ordered(tokens, &operands, &operators, changes);
    }
    let are_literal = |pair: &[(usize, usize)]| pair.iter().any(|&operand| is_literal(operand, tokens));
    let is_cheap = operands.windows(2).all(are_literal);
    let compared =
        operands.into_iter().filter(|_| !is_cheap).chain(whole.filter(|_| is_key || level.compares_all));
    let compared = compared.filter(|&operand| !is_literal(operand, tokens));
    changes.wrapped.extend(compared.map(|operand| Wrapping::filter(operand, COMPARED_FILTER)));
}

/// Turns a comparison with `<` or `in` into a test. A chain of them, which would need an operand twice, is
/// left to numbers.
fn ordered(tokens: &Placed, operands: &[(usize, usize)], operators: &[usize], changes: &mut Changes) {
    let (&[first, second], &[at]) = (operands, operators) else {
        changes.wrapped.extend(operands.iter().map(|&operand| Wrapping::filter(operand, NUMBER_FILTER)));
        return;
    };
    let is_negated = tokens[at].0.is("not");
    let test = ORDERS.iter().find(|(operator, _)| tokens[at].0.is(operator)).map_or("in", |(_, test)| test);
    changes.operators.push((at, format!(") is {}{test}(", if is_negated { "not " } else { "" })));
    if is_negated {
        changes.operators.push((at + 1, String::new()));
    }
    let operand = (first.0, second.1);
    changes.wrapped.push(Wrapping { operand, open: "((", close: "))".to_owned() });
}

/// Ends a chain of `~`.
fn text(level: &mut Level, tokens: &Placed, changes: &mut Changes) {
    let is_text =
        |(first, last): (usize, usize)| first == last && matches!(tokens[first].0.kind, TagKind::Text(_));
    let operands = level.concatenation.finish().into_iter().filter(|&operand| !is_text(operand));
    changes.wrapped.extend(operands.map(|operand| Wrapping::filter(operand, TEXT_FILTER)));
}

/// True for an operand that names no variable.
fn is_literal((first, last): (usize, usize), tokens: &Placed) -> bool {
    const NAMES: [&str; 6] = ["true", "false", "none", "True", "False", "None"];
    const OPERATORS: [&str; 6] = ["(", ")", "[", "]", ",", "-"];
    tokens[first..=last].iter().all(|(token, _)| match token.kind {
        TagKind::Name => NAMES.contains(&token.text.as_str()),
        TagKind::Operator => OPERATORS.contains(&token.text.as_str()),
        // A float may print with an exponent, and is an object then.
        TagKind::Number => !token.text.contains(['.', 'e', 'E']),
        _ => true,
    })
}

/// True for a token after which a sign is an operator.
fn ends_operand(token: &TemplateToken) -> bool {
    match token.kind {
        TagKind::Operator => [")", "]", "}"].contains(&token.text.as_str()),
        TagKind::Name => !["and", "or", "not", "if", "else", "in", "is"].contains(&token.text.as_str()),
        _ => true,
    }
}

/// Passes what a loop runs over through a filter: the expression between `in` and `if`, `recursive` or the
/// end.
pub(super) fn pass_iterable(tokens: &Placed, out: &mut [String]) {
    let mut depth = 0_usize;
    let (mut first, mut last) = (None, None);
    for (token, place) in tokens {
        match token.text.as_str() {
            "(" | "[" | "{" if token.kind == TagKind::Operator => depth += 1,
            ")" | "]" | "}" if token.kind == TagKind::Operator => depth = depth.saturating_sub(1),
            "in" if depth == 0 && first.is_none() && token.kind == TagKind::Name => {
                first = Some(*place);
                continue;
            }
            "if" | "recursive" if depth == 0 && first.is_some() && token.kind == TagKind::Name => break,
            _ => {}
        }
        if first.is_some() {
            last = Some(*place);
        }
    }
    if let (Some(first), Some(last)) = (first, last) {
        out[first].push_str(" (");
        out[last].push_str(&format!(")|{ITERATE_FILTER} "));
    }
}

/// Passes what is stored in a namespace through a filter: the expression after `=`.
pub(super) fn pass_stored(tokens: &Placed, out: &mut [String]) {
    let Some(equals) = tokens.iter().position(|(token, _)| token.is("=")) else { return };
    let has_attribute = tokens[..equals].iter().any(|(token, _)| token.is("."));
    if let (true, Some((_, last))) = (has_attribute && equals + 1 < tokens.len(), tokens.last()) {
        out[tokens[equals].1].push_str(" (");
        out[*last].push_str(&format!(")|{DEPTH_FILTER} "));
    }
}

/// True for a token after which `[` looks an item up.
pub(super) fn is_operand(token: &TemplateToken) -> bool {
    const WORDS: [&str; 8] = ["in", "not", "and", "or", "is", "if", "else", "elif"];
    match &token.kind {
        TagKind::Name => !WORDS.contains(&token.text.as_str()),
        TagKind::Text(_) => true,
        _ => token.is(")") || token.is("]"),
    }
}
