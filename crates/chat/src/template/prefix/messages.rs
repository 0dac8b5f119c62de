//! The list of messages that notes what a template learns of its length, and the functions of the second
//! source.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::PrefixText;
use crate::template::refuse;

/// A rendering of the second source.
#[derive(Debug)]
pub(in crate::template) struct Observed {
    messages: Vec<Value>,
    /// By number of messages: true if the rendering with the generation prompt is needed, and that without.
    needed: Vec<[bool; 2]>,
    /// Number of bytes that are written.
    pub(in crate::template) written: AtomicUsize,
    state: Mutex<LoopPosition>,
}

#[derive(Debug, Default)]
struct LoopPosition {
    /// Least number of messages whose rendering has read the same values up to here.
    same_from: usize,
    /// True for numbers of messages for which a loop that gathers leaves something else.
    differs: Vec<bool>,
    /// First message of the loop that gathers, and what it had left before each step.
    gathered: Option<(usize, Vec<Left>)>,
    /// First message of the loop, once it runs.
    loop_from: Option<usize>,
    /// Message whose turn it is in the loop.
    at: Option<usize>,
    /// True if the rendering of the messages before `at` is the same up to its turn.
    is_same: bool,
    /// Number of messages of the copy of the tail that is rendered.
    tail_of: Option<usize>,
    texts: Vec<PrefixText>,
}

/// Size of the text before a step of a loop, and attributes of namespaces.
type Left = (usize, Vec<Value>);

impl Observed {
    /// A rendering of messages. `needed` has, for each number of messages, whether its rendering with the
    /// generation prompt is needed, and that without it.
    pub(in crate::template) fn new(messages: Vec<Value>, needed: Vec<[bool; 2]>) -> Observed {
        Observed { messages, needed, written: AtomicUsize::new(0), state: Mutex::default() }
    }

    /// The texts that were found, by number of messages.
    pub(super) fn texts(&self) -> Vec<PrefixText> {
        self.with(|progress| std::mem::take(&mut progress.texts))
    }

    fn with<T>(&self, run: impl FnOnce(&mut LoopPosition) -> T) -> T {
        run(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Number of messages that the template is to see.
    fn len(&self, progress: &LoopPosition) -> usize {
        progress.tail_of.unwrap_or(self.messages.len())
    }

    /// Notes a value that is the same for any number of messages from `len` on.
    fn note(progress: &mut LoopPosition, len: usize) {
        if progress.tail_of.is_none() {
            progress.same_from = progress.same_from.max(len);
        }
    }
}

/// The messages from `from` on. Reading one shows that it exists; anything else shows the number of all.
#[derive(Debug)]
pub(super) struct Messages {
    pub(super) observed: Arc<Observed>,
    pub(super) from: usize,
    /// True for a slice, which is no sequence in `minijinja`.
    pub(super) is_slice: bool,
}

impl Object for Messages {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if self.is_slice { ObjectRepr::Iterable } else { ObjectRepr::Seq }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.from.checked_add(key.as_usize()?)?;
        self.observed.with(|progress| {
            let found = (at < self.observed.len(progress)).then(|| self.observed.messages[at].clone())?;
            Observed::note(progress, at + 1);
            Some(found)
        })
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.enumerator_len().unwrap_or_default())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.observed.with(|progress| {
            Observed::note(progress, usize::MAX);
            Some(self.observed.len(progress).saturating_sub(self.from))
        })
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.observed.with(|progress| {
            let is_true = self.from < self.observed.len(progress);
            if is_true {
                Observed::note(progress, self.from + 1);
            }
            is_true
        })
    }
}

/// The messages that the loop runs over. Only the loop has this value, and its steps are noted as they begin.
#[derive(Debug)]
struct LoopMessages {
    observed: Arc<Observed>,
    from: usize,
}

impl Object for LoopMessages {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.observed.messages.get(self.from.checked_add(key.as_usize()?)?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.observed.messages.len().saturating_sub(self.from))
    }
}

/// The functions that the second source calls.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) observed: Arc<Observed>,
}

impl Object for Functions {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let messages = args.first().and_then(Value::downcast_object_ref::<Messages>);
        let number = |at: usize| args.get(at).and_then(Value::as_usize).ok_or_else(|| refuse("no number"));
        Ok(match method {
            "is_messages" => Value::from(messages.is_some()),
            "rest" => {
                let messages = messages.ok_or_else(|| refuse("no messages"))?;
                // A slice of a list costs as much.
                state.consume_fuel(self.observed.messages.len() as u64)?;
                let from = messages.from.saturating_add(number(1)?);
                Value::from_object(Messages { observed: self.observed.clone(), from, is_slice: true })
            }
            "loop_over" => self.loop_over(state, messages)?,
            "gather_over" => self.gather_over(state, messages, args)?,
            "gather" => self.gather(number(0)?, args)?,
            "gathered" => self.end_gathering(args)?,
            "with_prompt" => Value::from(self.begin_message(number(0)?)),
            "without_prompt" => Value::from(self.begin_tail(1)),
            "end_with_prompt" => self.end_tail(0, args),
            "end_without_prompt" => self.end_tail(1, args),
            // The message after this one is known, or the number of all.
            "next" => self.look(args, 2),
            "all" => self.look(args, usize::MAX),
            "never" => return Err(refuse("the generation prompt is set by the template")),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        })
    }
}

impl Functions {
    /// The messages of the loop. An error ends a rendering that finds no text.
    fn loop_over(&self, state: &State<'_, '_>, messages: Option<&Messages>) -> Result<Value, Error> {
        let from = messages.ok_or_else(|| refuse("the loop runs over another list"))?.from;
        state.consume_fuel(self.observed.messages.len() as u64)?;
        self.observed.with(|progress| {
            progress.loop_from = Some(from);
            match progress.same_from < self.observed.messages.len() {
                true => Ok(()),
                false => Err(refuse("the number of messages is known before the loop")),
            }
        })?;
        Ok(Value::from_object(LoopMessages { observed: self.observed.clone(), from }))
    }

    /// The messages of a loop that gathers, or the items of any other.
    fn gather_over(
        &self,
        state: &State<'_, '_>,
        messages: Option<&Messages>,
        args: &[Value],
    ) -> Result<Value, Error> {
        self.observed.with(|progress| {
            progress.gathered = messages.map(|messages| (messages.from, Vec::new()));
        });
        let Some(Messages { from, .. }) = messages else {
            return Ok(args.first().cloned().unwrap_or_default());
        };
        state.consume_fuel(self.observed.messages.len() as u64)?;
        Ok(Value::from_object(LoopMessages { observed: self.observed.clone(), from: *from }))
    }

    /// Notes what a loop that gathers has left before its step `index`.
    fn gather(&self, index: usize, args: &[Value]) -> Result<Value, Error> {
        let left = self.left(args.get(1))?;
        self.observed.with(|progress| match &mut progress.gathered {
            Some((_, before)) if before.len() == index => before.push(left),
            Some(_) => progress.same_from = usize::MAX,
            None => {}
        });
        Ok(Value::from(false))
    }

    /// Ends a loop that gathers. Of n messages it leaves what it had left before its step for message n.
    fn end_gathering(&self, args: &[Value]) -> Result<Value, Error> {
        let left = self.left(args.first())?;
        self.observed.with(|progress| {
            let Some((from, before)) = progress.gathered.take() else { return };
            progress.differs.resize(self.observed.messages.len() + 1, false);
            for (index, before) in before.iter().enumerate() {
                let is_same = before.0 == left.0 && before.1.iter().zip(&left.1).all(|(a, b)| is_same(a, b));
                // Fewer messages than the first of the loop take no step, either.
                let first = if index == 0 { 0 } else { from + index };
                progress.differs[first..=from + index].iter_mut().for_each(|differs| *differs |= !is_same);
            }
        });
        Ok(Value::from(false))
    }

    fn left(&self, attributes: Option<&Value>) -> Result<Left, Error> {
        let attributes = attributes.map(Value::try_iter).transpose()?.into_iter().flatten().collect();
        Ok((self.observed.written.load(Ordering::Relaxed), attributes))
    }

    /// Begins the loop's step `index`, and the tail with the generation prompt if it is needed.
    fn begin_message(&self, index: usize) -> bool {
        self.observed.with(|progress| {
            let at = progress.loop_from.unwrap_or_default() + index;
            progress.at = Some(at);
            let differs = progress.differs.get(at).copied().unwrap_or_default();
            progress.is_same = progress.same_from <= at && !differs;
            Observed::note(progress, at + 1);
            if progress.is_same {
                let written = self.observed.written.load(Ordering::Relaxed);
                progress.texts.push(PrefixText { len: at, written, tails: [None, None] });
            }
        });
        self.begin_tail(0)
    }

    /// Begins a copy of the tail with the generation prompt (0) or without it (1), if it is needed.
    fn begin_tail(&self, copy: usize) -> bool {
        self.observed.with(|progress| {
            let at = progress.at.filter(|_| progress.is_same);
            progress.tail_of =
                at.filter(|&at| self.observed.needed.get(at).is_some_and(|needed| needed[copy]));
            progress.tail_of.is_some()
        })
    }

    /// Ends a copy of the tail, whose text is the argument.
    fn end_tail(&self, copy: usize, args: &[Value]) -> Value {
        self.observed.with(|progress| {
            progress.tail_of = None;
            if let Some(found) = progress.texts.last_mut() {
                found.tails[copy] = args.first().and_then(Value::as_str).map(str::to_owned);
            }
        });
        Value::from(false)
    }

    /// Returns the argument, which tells of so many messages from the present one on.
    fn look(&self, args: &[Value], messages: usize) -> Value {
        self.observed.with(|progress| {
            if let Some(at) = progress.at {
                Observed::note(progress, at.saturating_add(messages));
            }
        });
        args.first().cloned().unwrap_or_default()
    }
}

/// True for values that nothing can tell apart. Lists and dictionaries are not compared.
fn is_same(one: &Value, other: &Value) -> bool {
    let is_alike = one.kind() == other.kind() && one.is_integer() == other.is_integer();
    let is_plain = match one.kind() {
        ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::String => true,
        ValueKind::Number => one.is_integer(),
        _ => false,
    };
    is_alike && is_plain && one == other
}
