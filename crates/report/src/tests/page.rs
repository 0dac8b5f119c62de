use crate::fragments::assert_says;
use proptest::prelude::*;

use super::markup::{self, Document};
use super::*;

fn document(runs: &[RunData]) -> Document {
    let page = render_all(runs);
    markup::read(&page).unwrap_or_else(|problem| panic!("{problem}\n{page}"))
}

/// Values of the attribute `key` on tags named `tag`.
fn attributes<'a>(document: &'a Document, tag: &'a str, key: &'a str) -> Vec<&'a str> {
    let tags = document.tags.iter().filter(|(name, _)| name == tag);
    tags.flat_map(|(_, attributes)| attributes)
        .filter(|(name, _)| name == key)
        .map(|(_, value)| value.as_str())
        .collect()
}

#[test]
fn a_run_has_its_figures_curves_and_configuration() {
    let page = document(&[run("first", 200)]);
    for expected in [
        "first",
        "Validation loss2.1254the lowest of the run",
        "Perplexity8.381.500 bits per byte",
        "Training loss2.0004mean of the last 5 reports2.0004 in the last one",
        // The same number in the legend.
        "training, smoothed over 5 reports 2.000validation",
        "Tokens200k",
        "Training time4.0s20ms per step",
        "Tokens per second50.0k",
        "Memory256 MiB",
        "Steps200",
        "steps = 200",
    ] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    let curves = attributes(&page, "path", "data-name");
    assert_eq!(curves[..3], ["training, each report", "training, smoothed over 5 reports", "validation"]);
    let spoken = attributes(&page, "svg", "aria-label");
    assert!(
        spoken.iter().any(|label| label.starts_with("Loss, mean cross-entropy, in nats per token. training")),
        "{spoken:?}"
    );
    for chart in ["Loss", "Learning rate", "Gradient norm", "Throughput"] {
        assert!(spoken.iter().any(|label| label.starts_with(chart)), "{chart}");
    }
}

#[test]
fn a_smoothed_loss_is_the_mean_of_the_last_reports_also_after_a_resume() {
    let mut resumed = run("resumed", 43);
    let last = [3.1222, 2.8165, 3.4113, 3.1653, 3.3862];
    resumed.records.retain(|record| record.event.step() <= 38 || !matches!(record.event, Event::Eval(_)));
    resumed.records.truncate(resumed.records.iter().take_while(|record| record.event.step() <= 38).count());
    for (step, loss) in (39..).zip(last) {
        if step == 41 {
            resumed.records.push(record(Resumed::after(40)));
        }
        resumed.records.push(record(StepMetrics { step, loss, ..StepMetrics::default() }));
    }
    let page = document(&[resumed]);
    for said in [
        "Training loss3.1803mean of the last 5 reports3.3862 in the last one",
        "smoothed over 5 reports 3.180",
    ] {
        assert!(page.text.contains(said), "{said} in {}", page.text);
    }
}

#[test]
fn the_summary_completes_the_figures() {
    let summary = RunSummary {
        parameters: Some(1_352_704),
        total_steps: Some(500),
        train_seconds: Some(161.0),
        unigram_entropy: Some(3.3),
        outcome: Some("stopped at the time limit".into()),
        ..RunSummary::default()
    };
    let page = document(&[RunData { summary, ..run("r", 200) }]);
    for expected in [
        "1.35M256 MiB of memory",
        "200of 500",
        "2m41s",
        "1.17 nats below the unigram entropy",
        "stopped at the time limit",
    ] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
}

#[test]
fn the_page_loads_nothing() {
    let html = render_all(&[run("a", 50), run("b", 50)]);
    for outside in ["http:", "https:", "src=", "@import", "url(", "<link"] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn a_run_without_steps_says_so() {
    let page = document(&[RunData { name: "empty".into(), ..RunData::default() }]);
    assert_says("page, no steps", page.text);
    assert!(document(&[]).text.contains("No runs were named."));
}

#[test]
fn a_single_evaluation_is_not_marked_as_the_lowest() {
    let marked = |steps| attributes(&document(&[run("r", steps)]), "tr", "class").contains(&"best");
    assert_eq!([marked(10), marked(20)], [false, true]);
}

#[test]
fn a_run_of_one_step_is_a_page() {
    assert!(document(&[run("one", 1)]).text.contains("Steps1"));
}

#[test]
fn a_run_that_was_never_finite_is_a_page() {
    let mut run = run("nan", 60);
    for record in &mut run.records {
        if let Event::Step(metrics) = &mut record.event {
            (metrics.loss, metrics.grad_norm) = (f64::NAN, f64::INFINITY);
        }
    }
    let page = document(&[run.clone()]);
    assert_says("page, values that are not finite", page.text);
    run.records.retain(|record| matches!(record.event, Event::Step(_)));
    assert!(document(&[run]).text.contains("No loss is finite"));
}

#[test]
fn what_a_run_says_is_text_and_never_markup() {
    let evil = "</pre></script><script>alert('&amp;')</script>\u{0}\u{1b}[2J\"";
    let mut run = run(evil, 20);
    run.config = Some(evil.into());
    run.sample = Some(evil.into());
    run.problems = vec![evil.into()];
    run.summary = RunSummary {
        model: Some(evil.into()),
        precision: Some(evil.into()),
        device: Some(evil.into()),
        outcome: Some(evil.into()),
        ..RunSummary::default()
    };
    run.records.push(record(CheckpointSaved { step: 20, path: evil.into() }));
    run.records.push(record(Sample { step: 20, prompt: evil.into(), text: evil.into(), is_chat: false }));
    let harmless = document(&[super::run("plain", 20)]);
    let scripts = |page: &Document| page.tags.iter().filter(|(name, _)| name == "script").count();
    for runs in [vec![run.clone()], vec![run.clone(), run]] {
        let page = document(&runs);
        assert_eq!(scripts(&page), scripts(&harmless));
        assert!(page.text.contains("</pre></script><script>alert('&amp;')</script>\u{FFFD}\u{FFFD}[2J\""));
    }
}

#[test]
fn skipped_steps_and_resumes_are_marked_and_listed() {
    let mut run = run("r", 100);
    run.records.push(record(SkippedStep { step: 101, loss: f64::NAN, grad_norm: 1.0, skipped: 1 }));
    run.records.push(record(Resumed::after(101)));
    run.records.push(record(StepMetrics { step: 102, loss: 2.0, ..StepMetrics::default() }));
    let page = document(&[run]);
    assert_says("page, a skipped step", &page.text);
    assert!(page.text.contains("resumed after step 101"));
    let classes = attributes(&page, "path", "class");
    assert!(classes.contains(&"skip") && classes.contains(&"resume"));
}

#[test]
fn steps_that_were_lost_do_not_count() {
    let mut run = run("r", 100);
    run.records.push(record(Resumed::after(40)));
    let page = document(&[run]);
    assert!(page.text.contains("Steps40resumed once"), "{}", page.text);
    assert!(page.text.contains("Tokens40.0k"), "{}", page.text);
}

#[test]
fn a_report_of_two_runs_shows_where_they_differ() {
    let (first, second) = (run("first", 200), run("second", 300));
    let page = document(&[first, second]);
    assert!(page.text.contains("train.steps200300"), "{}", page.text);
    assert!(!page.text.contains("train.seed"));
    let curves = attributes(&page, "path", "data-name");
    assert_eq!(curves[..4], ["first", "second", "first, validation", "second, validation"]);
    assert!(attributes(&page, "figure", "data-xname").iter().all(|&name| name == "step"));
}

#[test]
fn a_run_shows_bits_per_byte_tokens_and_what_it_began_with() {
    let mut run = run("continued", 200);
    run.records.insert(
        0,
        record(EvalMetrics { step: 0, loss: 8.02, bits_per_byte: Some(3.5), ..EvalMetrics::default() }),
    );
    run.summary.unigram_entropy = Some(6.29);
    let page = document(&[run]);
    for expected in [
        "8.0200 before training",
        "Bits per byteof the validation text",
        "knows the frequency of each token",
        "StepsTokens",
        "nats below the unigram entropy",
    ] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    // Each chart of steps has the ticks of tokens too.
    assert!(attributes(&page, "figure", "data-tokens").iter().all(|&tokens| tokens == "1000"));
    let rows = attributes(&page, "div", "class");
    let count = |class: &str| rows.iter().filter(|&&row| row == class).count();
    assert!(count("x by-token") == count("x by-step") && count("x by-token") > 3);
}

#[test]
fn the_sources_of_a_mixture_have_their_tokens_and_losses() {
    let mut run = run("mixed", 100);
    for step in [50, 100] {
        for (name, tokens, loss) in [("books", 3 * step, 2.5), ("<web>", step, 3.5)] {
            let (tokens, epoch, loss) = (Some(tokens * 1000), Some(0.5), Some(loss));
            let train_loss = (name == "books").then_some(2.25);
            run.records.push(record(SourceMetrics {
                step,
                name: name.into(),
                tokens,
                epoch,
                train_loss,
                loss,
                token_accuracy: None,
            }));
        }
    }
    let page = document(&[run]);
    for expected in
        ["Sources", "books300k75.0%0.502.25002.5000", "<web>100k25.0%0.50–3.5000", "Loss by source"]
    {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    let curves = attributes(&page, "path", "data-name");
    // Without a training loss, the validation loss stands for its source.
    for name in ["books", "books, validation", "<web>"] {
        assert!(curves.contains(&name), "{name} in {curves:?}");
    }
}

#[test]
fn warnings_stand_at_the_top_and_among_the_events() {
    let mut run = run("r", 50);
    run.records.push(record(Warning { step: 40, text: "the loss is above <guessing>".into() }));
    let page = document(&[run]);
    assert_says("page, a warning at the top", &page.text);
    assert_says("page, a warning among the events", &page.text);
}

/// The runs, with these lines in their configurations and losses in the ratio of bits to nats.
fn evaluated(name: &str, config: &str, loss: f64, bits: f64) -> RunData {
    let mut run = run(name, 20);
    run.records.push(record(EvalMetrics {
        step: 20,
        loss,
        bits_per_byte: Some(bits),
        ..EvalMetrics::default()
    }));
    run.config = Some(config.to_owned());
    run
}

fn bold(runs: &[RunData]) -> Vec<String> {
    let html = render_all(runs);
    let table = &html[html.find("<h2>Runs</h2>").unwrap()..];
    let table = &table[..table.find("</table>").unwrap()];
    table.split("<b>").skip(1).map(|rest| rest.split("</b>").next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn the_best_run_is_marked_only_by_figures_that_compare() {
    let text = "[data]\nvalid = \"v.txt\"\ntokenizer = ";
    let a = evaluated("a", &format!("{text}\"bytes\""), 1.25, 1.25 / std::f64::consts::LN_2);
    let same = evaluated("b", &format!("{text}\"bytes\""), 1.5, 1.5 / std::f64::consts::LN_2);
    assert_eq!(bold(&[a.clone(), same]), ["1.2500"]);
    // Another tokenizer: a higher loss, of longer tokens.
    let longer = evaluated("c", &format!("{text}\"bpe\""), 3.0, 1.375);
    assert_eq!(bold(&[a.clone(), longer.clone()]), ["1.3750"]);
    assert!(document(&[a.clone(), longer]).text.contains("The tokenizers differ"));
    // Another text.
    let other = evaluated("d", "[data]\nvalid = \"w.txt\"\ntokenizer = \"bytes\"", 1.125, 1.0);
    assert_eq!(bold(&[a.clone(), other.clone()]), [""; 0]);
    assert_says("page, other texts", document(&[a.clone(), other]).text);
    // A file of the same name that holds another text: its tokens are as many bytes no more.
    let renamed = evaluated("e", &format!("{text}\"bpe\""), 1.125, 1.0);
    let longer = evaluated("c", &format!("{text}\"bpe\""), 3.0, 1.375);
    assert_eq!(bold(&[longer, renamed]), [""; 0]);
}

#[test]
fn long_values_of_keys_wrap() {
    let style = include_str!("../style.css");
    let rule = style.lines().find(|line| line.starts_with(".diff th, .diff td")).unwrap();
    assert!(rule.contains("white-space: normal") && rule.contains("overflow-wrap: anywhere"), "{rule}");
}

#[test]
fn runs_with_other_batch_sizes_are_compared_by_tokens() {
    let mut larger = run("larger", 200);
    for record in &mut larger.records {
        if let Event::Step(metrics) = &mut record.event {
            metrics.tokens *= 4;
        }
    }
    let page = document(&[run("small", 200), larger]);
    assert!(attributes(&page, "figure", "data-xname").iter().all(|&name| name == "tokens"));
    assert!(attributes(&page, "figure", "data-x1").iter().all(|&last| last == "800000"));
}

#[test]
fn a_long_run_makes_no_larger_page() {
    let html = render(&run("long", 100_000));
    assert!(html.len() < 800_000, "{} bytes", html.len());
    markup::read(&html).unwrap();
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![any::<f64>(), Just(f64::NAN), Just(0.0), Just(-1.0), Just(f64::MAX), 0.0f64..10.0]
}

fn event() -> impl Strategy<Value = Event> {
    let step = prop_oneof![0u64..100, any::<u64>()];
    (step, number(), number(), number(), any::<u64>(), ".{0,20}", 0u8..11).prop_map(
        |(step, a, b, c, n, text, kind)| match kind {
            0 => StepMetrics {
                step,
                loss: a,
                grad_norm: b,
                lr: c,
                tokens: n,
                memory_bytes: n,
                epoch: a,
                step_ms: b,
                tokens_per_second: c,
                tflops: a,
                mfu: Some(b),
                ..StepMetrics::default()
            }
            .into(),
            1 => EvalMetrics { step, loss: a, bits_per_byte: Some(b), ..EvalMetrics::default() }.into(),
            2 => SkippedStep { step, loss: a, grad_norm: b, skipped: n }.into(),
            3 => Resumed::after(step).into(),
            4 => Sample { step, prompt: text.clone(), text, is_chat: false }.into(),
            5 => Warning { step, text }.into(),
            6 => ReferenceGap { step, steps: n, loss: a, bf16_loss: b }.into(),
            7 => {
                let (tokens, epoch, train_loss, loss) = (Some(n), Some(a), Some(b), Some(c));
                SourceMetrics { step, name: text, tokens, epoch, train_loss, loss, token_accuracy: loss }
                    .into()
            }
            8 => {
                let (blocks, max_load, min_tokens) = (vec![n, 3], vec![a, b], vec![step, n]);
                ExpertMetrics {
                    step,
                    balance: b,
                    z_loss: c,
                    blocks,
                    max_load,
                    min_tokens,
                    rank_load: Vec::new(),
                }
                .into()
            }
            9 => TaskMetrics {
                step: step % 200,
                task: text.chars().take(1).collect(),
                metric: if n % 2 == 0 { "acc".into() } else { text },
                value: a,
                interval: (n % 3 > 0).then_some([b, c]),
                rows: n % 2,
                chance: c,
            }
            .into(),
            _ => CheckpointSaved { step, path: text.into() }.into(),
        },
    )
}

proptest! {
    #[test]
    fn any_records_make_a_sound_page(
        events in prop::collection::vec((number(), event()), 0..120),
        name in ".{0,12}",
        config in prop::option::of(".{0,60}"),
        entropy in prop::option::of(number()),
    ) {
        let records = events.into_iter().map(|(time, event)| Record { time, event }).collect();
        let summary = RunSummary { unigram_entropy: entropy, train_seconds: entropy, ..RunSummary::default() };
        let run = RunData { name, records, config: config.clone(), sample: config, summary, ..RunData::default() };
        let gap = seed_gap::Comparison::new(vec![super::run("a", 60), run.clone(), run.clone()], 1, 100).html();
        for page in [render(&run), render_all(&[run.clone(), run]), gap] {
            let read = markup::read(&page).map_err(TestCaseError::fail)?;
            for path in attributes(&read, "path", "d") {
                prop_assert!(!path.contains("NaN") && !path.contains("inf"), "{}", path);
            }
        }
    }
}
