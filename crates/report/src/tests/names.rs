use crate::names::{Labels, for_legend, of_group, of_groups, title};

fn labels(names: &[&str]) -> Vec<String> {
    for_legend(names).labels
}

#[test]
fn short_names_and_single_ones_are_kept() {
    assert_eq!(labels(&["run-a", "run-b"]), ["run-a", "run-b"]);
    assert_eq!(labels(&["one-run-with-a-name-of-many-words"]), ["one-run-with-a-name-of-many-words"]);
    assert_eq!(labels(&[]), [""; 0]);
}

#[test]
fn long_names_lose_the_words_that_all_share() {
    let names = ["qwen3-on-a-mixture-bf16-seed1-final", "qwen3-on-a-mixture-bf16-seed2-final"];
    let Labels { labels: found, left_out } = for_legend(&names);
    assert_eq!(found, ["…seed1…", "…seed2…"]);
    assert_eq!(left_out, ["qwen3-on-a-mixture-bf16-", "-final"]);
    // Words are not cut.
    assert_eq!(labels(&["learning-rate=0.0010-and", "learning-rate=0.0015-or"]), ["…0010-and", "…0015-or"]);
    assert_eq!(labels(&["größenänderungen/ä/eins", "größenänderungen/ä/zwei"]), ["…eins", "…zwei"]);
}

#[test]
fn nothing_is_left_out_where_a_name_would_be_empty_or_nothing_is_shared() {
    let one_in_the_other = ["a-rather-long-name-of-a-run", "a-rather-long-name-of-a-"];
    assert_eq!(labels(&one_in_the_other), one_in_the_other);
    let equal = ["/the/same/long/path/of/a/run", "/the/same/long/path/of/a/run"];
    assert_eq!(labels(&equal), ["…run", "…run"]);
    let others = ["some-name-that-is-long-enough", "another-name-that-is-long-as-well"];
    assert_eq!(labels(&others), others);
}

#[test]
fn a_title_lists_names_only_while_it_stays_short() {
    assert_eq!(title(&["a", "b"]), "a · b");
    let long = "a-name-of-which-three-are-too-many";
    assert_eq!(title(&[long, long, long]), "3 runs");
    let group = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let (one, two) = (group(&["fp8"]), group(&["row-1", "row-2"]));
    assert_eq!(of_group(&two), "row-1 and 1 more");
    assert_eq!(of_groups(&[&one, &two]), "fp8, row-1 and 1 more");
    let three = group(&[long, long, long]);
    assert_eq!(of_groups(&[&three, &two, &three]), "8 runs");
}
