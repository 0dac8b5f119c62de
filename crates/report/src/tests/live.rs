use std::fs;

use super::*;
use crate::live::LiveReport;

fn summary() -> RunSummary {
    RunSummary { outcome: Some("running, step 7 of 9".into()), ..RunSummary::default() }
}

#[test]
fn the_page_is_there_from_the_first_report_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = LiveReport::open(folder.path(), "[train]\nsteps = 9\n".into()).unwrap();
    live.renew(summary);
    live.wait();
    assert!(!folder.path().join(REPORT_FILE).exists(), "there is nothing to show");
    live.add(&run("r", 1).records[0]);
    live.renew(summary);
    live.wait();
    let page = fs::read_to_string(folder.path().join(REPORT_FILE)).unwrap();
    let page = markup::read(&page).unwrap();
    for said in ["running, step 7 of 9", "Steps1", "steps = 9"] {
        assert!(page.text.contains(said), "{said} in {}", page.text);
    }
    // The next one waits its turn, unless the run ends.
    live.add(&run("r", 2).records[1]);
    live.renew(summary);
    let steps = |said: &str| fs::read_to_string(folder.path().join(REPORT_FILE)).unwrap().contains(said);
    live.wait();
    assert!(steps("running"));
    live.end(RunSummary { outcome: Some("ended by an error: lr".into()), ..RunSummary::default() });
    assert!(steps("ended by an error: lr") && !steps("running"));
}

#[test]
fn a_run_that_goes_on_has_the_history_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut lines: String =
        run("r", 30).records.iter().map(|record| crate::metrics::jsonl::encode(record) + "\n").collect();
    lines += "{\"kind\":\"st";
    fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
    let live = LiveReport::open(folder.path(), String::new()).unwrap();
    assert_eq!(live.page(summary()).history().last_step(), 30);
}

#[test]
fn a_page_that_cannot_be_written_does_not_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join(REPORT_FILE)).unwrap();
    let mut live = LiveReport::open(folder.path(), String::new()).unwrap();
    live.add(&run("r", 1).records[0]);
    live.renew(summary);
    live.wait();
}

#[test]
fn a_page_of_a_long_run_draws_no_more_than_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = LiveReport::open(folder.path(), String::new()).unwrap();
    for mut record in run("long", 100_000).records {
        if let Event::Step(metrics) = &mut record.event
            && metrics.step == 33_333
        {
            (metrics.loss, metrics.grad_norm) = (77.5, 88.25);
        }
        live.add(&record);
    }
    let page = live.page(summary());
    let history = page.history();
    assert!(history.steps.len() < 25_000, "{} steps are kept", history.steps.len());
    let html = render(&page);
    assert!(html.len() < 1_000_000, "{} bytes", html.len());
    let text = markup::read(&html).unwrap().text;
    assert!(text.contains("Steps100,000"), "{}", &text[..2000]);
    // A curve is smoothed over as many reports as that of all steps, nearly.
    let smoothed = text.split("smoothed over ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let smoothed: f64 = smoothed.replace(',', "").parse().unwrap();
    assert!((smoothed / 2025.0 - 1.0).abs() < 0.15, "{smoothed}");
    // What stands out stays.
    assert!(html.contains(",77.50,") && html.contains(",88.25,"));
}
