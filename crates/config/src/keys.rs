//! Keys by the names that users try as options: `--lr`, `--batch-size`, `--optimizer.lr`.

use super::schema::sections;
use super::suggest::nearest;

/// The keys that an option of this name, without its dashes, probably means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeysLike {
    /// The keys as `section.key`: several if sections share the name, none if no key is similar.
    pub keys: Vec<String>,
    /// True if the name is exactly theirs, here or in another program; false if it is only similar.
    pub exact: bool,
}

/// The keys of the run file that `name` may mean: those of that name, else those for which other programs use
/// the name, else those with the most similar name.
pub fn keys_like(name: &str) -> KeysLike {
    let name = name.replace('-', "_");
    let all = || sections().iter().flat_map(|section| section.keys.iter().map(move |key| (section, key)));
    let of = |is_meant: &dyn Fn(&str, &super::schema::Key) -> bool| -> Vec<String> {
        let meant = all().filter(|(section, key)| is_meant(&section.name, key));
        meant.map(|(section, key)| format!("{}.{}", section.name, key.name)).collect()
    };
    let whole: Vec<String> = of(&|_, _| true);
    if name.contains('.') {
        let near = nearest(&name, whole.iter().map(String::as_str)).map(str::to_owned);
        return KeysLike { exact: whole.contains(&name), keys: near.into_iter().collect() };
    }
    let named = of(&|_, key| key.name == name);
    let called = if named.is_empty() { of(&|_, key| key.is_called(&name)) } else { named };
    if !called.is_empty() {
        return KeysLike { keys: called, exact: true };
    }
    let near = nearest(&name, all().map(|(_, key)| key.name.as_str()));
    KeysLike { keys: near.map_or(Vec::new(), |near| of(&|_, key| key.name == near)), exact: false }
}

/// Names that say nothing without their section.
pub(super) const MEANS_ANYTHING: [&str; 2] = ["name", "type"];

/// The reason why the run file has no key of this name, where other programs have one: `gpus`, `lora_r`.
pub fn absent(name: &str) -> Option<&'static str> {
    let name = name.replace('-', "_");
    if MEANS_ANYTHING.contains(&name.as_str()) {
        return None;
    }
    sections().iter().find_map(|section| section.why_absent(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_known_by_the_key_that_it_means() {
        for (name, keys, exact) in [
            ("lr", &["optimizer.lr"][..], true),
            ("batch-size", &["train.batch_size"], true),
            ("optimizer.lr", &["optimizer.lr"], true),
            ("tokens", &["train.tokens", "eval.tokens"], true),
            ("learning-rate", &["optimizer.lr"], true),
            ("warmup-step", &["schedule.warmup_steps"], false),
            ("optimiser.lr", &["optimizer.lr"], false),
            ("colour", &[], false),
        ] {
            assert_eq!(
                keys_like(name),
                KeysLike { keys: keys.iter().map(|&key| key.into()).collect(), exact },
                "{name}"
            );
        }
    }
}
