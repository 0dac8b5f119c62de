//! Environment variables as a value, so that a launcher's variables are read by pure functions.

use crate::world::WorldError;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

/// The variables that place a rank whatever launcher started it.
pub(super) const BY_HAND: &str =
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT on each";

/// The variables of a process by name. A variable with an empty value counts as not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables(BTreeMap<String, String>);

impl Variables {
    /// The variables of this process. Those that are not UTF-8 are left out; no launcher sets any.
    pub fn of_process() -> Self {
        let text =
            std::env::vars_os().filter_map(|(n, v)| Some((n.into_string().ok()?, v.into_string().ok()?)));
        Variables(text.collect())
    }

    /// The value of a variable, without spaces around it.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// True if the variable has a value.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The variables whose name begins with `prefix`, in the order of names.
    pub fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .filter(move |(name, _)| name.starts_with(prefix))
    }

    /// The value of a variable as a number, if it is set.
    ///
    /// # Errors
    /// The value is not a number of this type.
    pub(super) fn number<T: FromStr + Bounds>(&self, name: &str) -> Result<Option<T>, WorldError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.parse().ok().filter(|number| T::is_valid(number));
        let error =
            || WorldError(format!("{name}={value} is wrong: it must be a number from {}", T::range()));
        number.ok_or_else(error).map(Some)
    }

    /// The largest number of nodes that a variable allows: 4 for `4`, and for `1:4` as torchrun writes it.
    ///
    /// # Errors
    /// The value is not of this form.
    pub(super) fn nodes(&self, name: &str) -> Result<usize, WorldError> {
        match self.get(name).and_then(|value| value.rsplit_once(':')) {
            Some((_, most)) => [(name, most)].into_iter().collect::<Variables>().needed(name),
            None => self.needed(name),
        }
    }

    /// The value of a variable that is set, as a number.
    ///
    /// # Errors
    /// It is not a number of this type, or not set after all.
    pub(super) fn needed<T: FromStr + Bounds>(&self, name: &str) -> Result<T, WorldError> {
        self.number(name)?.ok_or_else(|| WorldError(format!("{name} is not set")))
    }

    /// # Errors
    /// Some of `names` are not set.
    pub(super) fn need_all(&self, launcher: &str, names: &[&str]) -> Result<(), WorldError> {
        let absent: Vec<&str> = names.iter().copied().filter(|name| !self.has(name)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        let advice = format!(
            "pass all variables of the launcher to each rank, as a container or `env -i` does not, or set {BY_HAND}"
        );
        Err(Variables::missing(launcher, &absent, &advice))
    }

    /// An error that names variables which are not set.
    pub(super) fn missing(launcher: &str, names: &[&str], advice: &str) -> WorldError {
        let verb = if names.len() == 1 { "is" } else { "are" };
        let names = names.join(", ");
        WorldError(format!("the environment of {launcher} is incomplete: {names} {verb} not set; {advice}"))
    }

    /// True if the variable `size` states that this process is the only one.
    ///
    /// # Errors
    /// `rank` states that it is another one; a value is not a number.
    pub(super) fn is_world_of_one(&self, rank: &str, size: &str) -> Result<bool, WorldError> {
        if self.number(size)? != Some(1usize) {
            return Ok(false);
        }
        match self.number(rank)? {
            None | Some(0usize) => Ok(true),
            Some(number) => Err(WorldError(format!(
                "{rank}={number} does not exist in a world of {size}=1: ranks count from 0"
            ))),
        }
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Variables {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(variables: I) -> Self {
        Variables(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

/// Numbers that a variable may hold.
pub(super) trait Bounds: Sized {
    fn is_valid(&self) -> bool;
    fn range() -> impl Display;
}

/// Ranks and their number.
impl Bounds for usize {
    fn is_valid(&self) -> bool {
        true
    }

    fn range() -> impl Display {
        "0 on"
    }
}

/// Numbers of jobs.
impl Bounds for u64 {
    fn is_valid(&self) -> bool {
        true
    }

    fn range() -> impl Display {
        "0 on"
    }
}

/// Ports.
impl Bounds for u16 {
    fn is_valid(&self) -> bool {
        *self > 0
    }

    fn range() -> impl Display {
        "1 to 65535"
    }
}
