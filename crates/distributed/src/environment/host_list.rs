//! Slurm's short form of a list of hosts: `n[001-003,7],gpu-a[1-2]-ib,single`.
//!
//! A name may have several pairs of brackets (`r[1-2]n[01-16]`). Numbers keep the zeros in front of them.
//! Only the first host is of use here, so the list is never written out: a range of a billion hosts costs
//! nothing.

use crate::world::WorldError;

/// The first host of a list.
///
/// # Errors
/// The list is empty or malformed.
pub(super) fn first(list: &str) -> Result<String, WorldError> {
    let wrong = || WorldError(format!("the list of hosts `{list}` is not in Slurm's form: set MASTER_ADDR"));
    first_name(list).ok_or_else(wrong)
}

fn first_name(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list;
    loop {
        match rest.find(['[', ']', ',']) {
            None => {
                name.push_str(rest);
                break;
            }
            Some(at) => {
                name.push_str(&rest[..at]);
                match rest.as_bytes()[at] {
                    b',' => break,
                    b'[' => {
                        let end = at + rest[at..].find(']')?;
                        name.push_str(first_number(&rest[at + 1..end])?);
                        rest = &rest[end + 1..];
                    }
                    _ => return None,
                }
            }
        }
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    (!name.is_empty() && name.chars().all(is_name)).then_some(name)
}

/// The first number of `001-003,7`.
fn first_number(ranges: &str) -> Option<&str> {
    let range = ranges.split(',').next()?;
    let (from, to) = range.split_once('-').unwrap_or((range, range));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(from) && is_number(to)).then_some(from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_host_of_each_form() {
        for (list, host) in [
            ("single", "single"),
            ("a,b", "a"),
            ("n[001-003,7],gpu-a[1-2]-ib,single", "n001"),
            ("gpu-a[1-2]-ib,single", "gpu-a1-ib"),
            ("n[7]", "n7"),
            ("r[1-2]n[01-16].cluster", "r1n01.cluster"),
            ("node-1-2,node-3", "node-1-2"),
            ("n[0-999999999999999999999]", "n0"),
        ] {
            assert_eq!(first(list), Ok(host.to_owned()), "{list}");
        }
    }

    #[test]
    fn malformed_lists_are_refused() {
        for list in ["", ",a", "n[", "n]", "n[]", "n[a-b]", "n[1-", "n[-2]", "a b", "$(id)"] {
            let error = first(list).expect_err(list).to_string();
            assert!(error.contains("MASTER_ADDR"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_gives_a_host_or_an_error(list in "[a-c0-2\\[\\],-]{0,12}") {
            if let Ok(host) = first(&list) {
                prop_assert!(!host.is_empty() && !host.contains(['[', ']', ',']), "{list}: {host}");
            }
        }
    }
}
