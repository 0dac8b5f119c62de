//! Experts on the page of a run.

use super::markup::{self, Document};
use super::*;
use crate::fragments::assert_says;
use crate::history::History;
use crate::live::LiveReport;
use crate::loads::Loads;

/// Experts in `blocks` blocks, the second of which becomes uneven.
fn experts(step: u64, blocks: u64) -> ExpertMetrics {
    let load = |block| if block == 1 { 1.5 + step as f64 / 1000.0 } else { 1.25 };
    ExpertMetrics {
        step,
        balance: 2.03,
        z_loss: 4.12,
        blocks: (0..blocks).collect(),
        max_load: (0..blocks).map(load).collect(),
        min_tokens: (0..blocks).map(|block| 40 + block).collect(),
        rank_load: Vec::new(),
    }
}

/// A run with experts at each step.
fn mixture(steps: u64, blocks: u64) -> RunData {
    let mut run = run("moe", steps);
    run.records.extend((1..=steps).map(|step| record(experts(step, blocks))));
    run
}

fn document(runs: &[RunData]) -> Document {
    let page = render_all(runs);
    markup::read(&page).unwrap_or_else(|problem| panic!("{problem}\n{page}"))
}

fn cells(page: &Document) -> usize {
    page.tags.iter().filter(|(name, _)| name == "rect").count()
}

#[test]
fn a_run_with_experts_has_their_curves_and_a_map_by_block() {
    let page = document(&[mixture(20, 3)]);
    for expected in [
        "Experts",
        "Largest loadof an expert",
        "worst block 1.520",
        "mean block 1.340",
        "equal loads",
        "Balance lossmean over blocks",
        "Router z-lossmean over blocks",
        "Largest load by block",
        "1, equal loads",
        "3 or more",
        "block 1, step 20: 1.52, least used expert 41 tokens",
        "Equal loads give the number of experts of a token",
    ] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    assert_eq!(cells(&page), 3 * 20);
}

#[test]
fn ranks_that_share_experts_have_a_curve_of_their_largest_load() {
    let mut run = mixture(20, 3);
    let page = document(std::slice::from_ref(&run));
    assert!(!page.text.contains("of a rank"), "{}", page.text);
    for record in &mut run.records {
        if let Event::Experts(m) = &mut record.event {
            m.rank_load = vec![1.125, 1.0 + m.step as f64 / 100.0, 1.0];
        }
    }
    let page = document(&[run]);
    for expected in ["Largest loadof a rank", "times the mean load of the ranks"] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
}

#[test]
fn other_pages_say_nothing_of_experts() {
    for runs in [vec![run("dense", 20)], vec![mixture(20, 3), mixture(20, 3)]] {
        let page = document(&runs);
        assert!(!page.text.contains("Experts") && !page.text.contains("Largest load"), "{}", page.text);
    }
}

#[test]
fn a_column_of_many_reports_shows_their_extremes() {
    let mut run = mixture(1000, 3);
    for record in &mut run.records {
        if let Event::Experts(m) = &mut record.event
            && m.step == 333
        {
            (m.max_load[2], m.min_tokens[2]) = (7.5, 3);
            m.max_load[0] = f64::NAN;
        }
    }
    let page = document(&[run]);
    assert_says("experts, the extremes of a column", &page.text);
    assert_says("experts, a column with a value that is not finite", &page.text);
    assert_eq!(cells(&page), 3 * 16);
}

#[test]
fn loads_that_are_not_finite_are_question_marks() {
    let mut run = run("moe", 2);
    run.records.push(record(ExpertMetrics { max_load: vec![f64::NAN, f64::INFINITY], ..experts(1, 2) }));
    let page = document(&[run]);
    for block in [0, 1] {
        assert!(page.text.contains(&format!("block {block}, step 1: ?,")), "{}", page.text);
    }
    assert!(!page.text.contains("Largest loadof an expert"), "there is no value to draw");
}

#[test]
fn a_model_of_any_depth_has_a_bounded_map() {
    for (blocks, most) in [(1, 28), (94, 21), (500, 4), (5000, 2)] {
        let mut loads = Loads::default();
        for step in 1..=3000 {
            loads.add(&experts(step, blocks));
            assert!(loads.columns.len() as u64 <= most, "{blocks} blocks: {} columns", loads.columns.len());
        }
        assert_eq!((loads.columns[0].first, loads.columns.last().unwrap().last), (1, 3000));
        let gaps = loads.columns.windows(2).filter(|pair| pair[0].last + 1 != pair[1].first).count();
        assert_eq!(gaps, 0);
    }
}

#[test]
fn steps_that_were_lost_do_not_count() {
    let records: Vec<Record> = (1..=20).map(|step| record(experts(step, 2))).collect();
    let resumed = [&records[..], &[record(Resumed::after(12))]].concat();
    let expected = History::new(&records[..12]);
    let found = History::new(&resumed);
    assert_eq!((&found.experts, &found.loads), (&expected.experts, &expected.loads));
    // Steps that repeat without a resume count once, as reported last.
    let repeated = History::new(&[&records[..], &records[12..]].concat());
    let whole = History::new(&records);
    assert_eq!((repeated.experts, repeated.loads), (whole.experts, whole.loads));
}

#[test]
fn a_page_of_a_long_run_draws_no_more_than_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = LiveReport::open(folder.path(), String::new()).unwrap();
    for step in run("long", 60_000).records {
        let is_step = matches!(step.event, Event::Step(_));
        live.add(&step);
        if is_step {
            let mut experts = experts(step.event.step(), 48);
            if experts.step == 33_333 {
                (experts.max_load[7], experts.balance) = (77.5, 88.25);
            }
            live.add(&record(experts));
        }
    }
    let page = live.page(RunSummary::default());
    let history = page.history();
    assert!(history.experts.len() < 25_000, "{} reports are kept", history.experts.len());
    let html = render(&page);
    assert!(html.len() < 1_000_000, "{} bytes", html.len());
    let text = markup::read(&html).unwrap().text;
    // What stands out stays.
    assert!(html.contains(",77.50,") && html.contains(",88.25,"));
    assert_says("experts, an extreme of a long run", text);
}
