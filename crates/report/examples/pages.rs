//! Writes a page of every kind, with long and odd content, to look at in a browser.
//!
//! ```sh
//! cargo run -p xtrain-report --example pages -- target/pages
//! ```

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};
use xtrain_model::Recipe;
use xtrain_report::inspection::{Inspection, TensorCast, write_inspection};
use xtrain_report::metrics::{
    CheckpointSaved, EvalMetrics, Event, ExpertMetrics, MetricsSink, Outputs, Record, ReferenceGap, Resumed,
    Sample, SinkStart, SkippedStep, SourceMetrics, StepMetrics, TaskMetrics, Warning,
};
use xtrain_report::seed_gap::Comparison;
use xtrain_report::{CONFIG_FILE, LiveReport, REPORT_FILE, RunSummary, write, write_comparison};

type Done = Result<(), Box<dyn Error>>;

fn main() -> Done {
    let folder = PathBuf::from(env::args().nth(1).ok_or("usage: pages FOLDER")?);
    fs::create_dir_all(&folder)?;
    let runs = tempfile::tempdir()?;
    reports(runs.path(), &folder)?;
    several(runs.path(), &folder)?;
    comparisons(runs.path(), &folder)?;
    inspections(&folder)
}

/// Reports of one run.
fn reports(runs: &Path, folder: &Path) -> Done {
    let short = ExampleRun { steps: 30, ..ExampleRun::default() };
    for (name, run) in [
        ("one-step", ExampleRun { steps: 1, evals: 0, ..ExampleRun::default() }),
        ("only-evaluated", ExampleRun { steps: 0, evals: 1, ..ExampleRun::default() }),
        ("empty", ExampleRun { steps: 0, evals: 0, ..ExampleRun::default() }),
        ("short", short.clone()),
        ("diverged", ExampleRun { steps: 400, diverges: true, ..ExampleRun::default() }),
        ("never-finite", ExampleRun { loss: f64::NAN, ..short }),
        ("mixture", ExampleRun { steps: 2_000, sources: 5, eventful: true, ..ExampleRun::default() }),
        ("many-sources", ExampleRun { steps: 600, sources: 20, ..ExampleRun::default() }),
        ("tasks-one", ExampleRun { tasks: 1, ..ExampleRun::default() }),
        ("tasks-once", ExampleRun { evals: 1, tasks: 3, ..ExampleRun::default() }),
        ("tasks", ExampleRun { steps: 2_000, evals: 40, tasks: 20, eventful: true, ..ExampleRun::default() }),
        ("experts-short", ExampleRun { steps: 12, blocks: 2, ..ExampleRun::default() }),
        ("experts", ExampleRun { steps: 1_000, blocks: 12, eventful: true, ..ExampleRun::default() }),
        ("experts-deep", ExampleRun { steps: 20_000, blocks: 94, ..ExampleRun::default() }),
        (
            "long",
            ExampleRun { steps: 100_000, sources: 3, eventful: true, every: 1, ..ExampleRun::default() },
        ),
    ] {
        let run_folder = run.write(runs, name)?;
        fs::copy(write(&run_folder)?, folder.join(format!("report-{name}.html")))?;
    }
    let run_folder = ExampleRun::default().write(runs, "running")?;
    let mut live = LiveReport::open(&run_folder, ExampleRun::default().config())?;
    live.renew(|| RunSummary { outcome: Some(RunSummary::running(400, 20_000)), ..summary() });
    live.wait();
    fs::copy(run_folder.join(REPORT_FILE), folder.join("report-running.html"))?;
    Ok(())
}

/// Reports of several runs.
fn several(runs: &Path, folder: &Path) -> Done {
    let two = [
        ExampleRun { tasks: 4, ..ExampleRun::default() }.write(runs, "baseline")?,
        ExampleRun { seed: 2, lr: 3e-3, tasks: 3, ..ExampleRun::default() }.write(runs, "lr-3e-3")?,
    ];
    write_comparison(&two, &folder.join("several-two.html"), true)?;
    let mut many = Vec::new();
    for (n, recipe) in Recipe::ALL.into_iter().cycle().take(14).enumerate() {
        let seed = n as u64;
        let loss = 2.0 + 0.05 * n as f64;
        let run = ExampleRun { recipe, seed, loss, train: "long", tasks: 3, ..ExampleRun::default() };
        let name = format!("qwen3-0.6b-continued-pretraining-on-a-mixture-with-{}-seed{n}", recipe.name());
        many.push(run.write(runs, &name)?);
    }
    write_comparison(&many, &folder.join("several-many.html"), true)?;
    let mut others = Vec::new();
    for tokenizer in ["bytes", "models/a-long-name-of-a-folder/with/a/tokenizer", "bpe"] {
        let run =
            ExampleRun { tokenizer, batch_tokens: 4096 * (1 + others.len() as u64), ..ExampleRun::default() };
        others.push(run.write(runs, &format!("tokenizer-{}", others.len()))?);
    }
    write_comparison(&others, &folder.join("several-tokenizers.html"), true)?;
    Ok(())
}

/// Pages of `xtrain compare`.
fn comparisons(runs: &Path, folder: &Path) -> Done {
    let seeds_of = |recipe: Recipe, over: f64, seeds: u64| -> Result<Vec<PathBuf>, Box<dyn Error>> {
        let of = |seed| {
            let run = ExampleRun { recipe, seed, loss: 2.0 * (1.0 + over), ..ExampleRun::default() };
            run.write(runs, &format!("{}-{}", recipe.name(), seed))
        };
        (1..=seeds).map(of).collect()
    };
    let page = |name: &str, baseline: &[PathBuf], others: &[PathBuf]| -> Done {
        Ok(Comparison::load(baseline, others, 100)?.write(&folder.join(name), true)?)
    };
    let bf16 = seeds_of(Recipe::Bf16, 0.0, 5)?;
    let block = seeds_of(Recipe::Fp8Block, 0.0008, 5)?;
    let current = seeds_of(Recipe::Fp8Current, 0.03, 3)?;
    let row = seeds_of(Recipe::Fp8Row, 0.004, 2)?;
    page("compare-one-seed.html", &bf16[..1], &block[..1])?;
    page("compare-unclear.html", &bf16[..2], &[&block[..1], &current[..1]].concat())?;
    page("compare-seeds.html", &bf16, &[block, current, row].concat())?;
    let mut many = Vec::new();
    for n in 0..12u64 {
        let lr = 1e-3 * (1.0 + n as f64);
        let run = ExampleRun { lr, loss: 2.0 + 0.01 * n as f64, train: "long", ..ExampleRun::default() };
        many.push(run.write(runs, &format!("a-sweep-over-learning-rates-with-long-names-lr={lr:.4}"))?);
    }
    page("compare-many.html", &bf16[..1], &many)?;
    let bytes = ExampleRun { tokenizer: "bytes", ..ExampleRun::default() }.write(runs, "bytes")?;
    page("compare-tokenizers.html", &bf16[..1], &[bytes])
}

/// Pages of `xtrain inspect`.
fn inspections(folder: &Path) -> Done {
    for (name, blocks, casts) in
        [("one-block", 1, "fp8-current"), ("few-blocks", 4, "fp8-block"), ("many-blocks", 80, "fp8-row")]
    {
        let inspection = Inspection {
            run: format!("runs/{name}").into(),
            step: 12_000,
            recipe: "bf16".into(),
            casts: casts.into(),
            loss: 3.2519,
            tensors: (0..blocks).flat_map(casts_of).collect(),
        };
        write_inspection(&inspection, &folder.join(format!("inspect-{name}.html")), true)?;
    }
    let empty = Inspection {
        run: "runs/none".into(),
        step: 1,
        recipe: "fp32".into(),
        casts: "fp8-row".into(),
        loss: f64::NAN,
        tensors: Vec::new(),
    };
    Ok(write_inspection(&empty, &folder.join("inspect-none.html"), true)?)
}

fn casts_of(block: u32) -> Vec<TensorCast> {
    let mut casts = Vec::new();
    let sites = ["attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"];
    let operands = [
        ("fprop", "input"),
        ("fprop", "weight"),
        ("dgrad", "output gradient"),
        ("dgrad", "weight"),
        ("wgrad", "output gradient"),
        ("wgrad", "input"),
    ];
    for (site_at, site) in sites.into_iter().enumerate() {
        for (at, (gemm, operand)) in operands.into_iter().enumerate() {
            let chance = noise(u64::from(block) * 31 + site_at as u64 * 7 + at as u64, 104_729);
            casts.push(TensorCast {
                name: format!("blocks.{block}.{site}:{gemm}"),
                block,
                site: site.into(),
                gemm,
                operand,
                format: if gemm == "dgrad" { "e5m2" } else { "e4m3" }.into(),
                scaling: "tile",
                amax: (12.0 * chance - 8.0).exp(),
                zeros: 0.3 * chance,
                underflow: if chance < 0.1 { 0.0 } else { (12.0 * chance - 14.0).exp() },
                saturation: if chance > 0.97 { 1e-4 } else { 0.0 },
                not_finite: u64::from(chance > 0.99),
                sqnr_db: match chance {
                    c if c > 0.99 => f64::NAN,
                    c if c < 0.01 => f64::INFINITY,
                    c => 31.5 - 24.0 * c.powi(6),
                },
                bf16_reason: (block == 0 && site_at == 0)
                    .then(|| "precision.skip leaves the first blocks in bf16".into()),
            });
        }
    }
    casts
}

/// A made-up run.
#[derive(Clone)]
struct ExampleRun {
    steps: u64,
    /// Evaluations.
    evals: u64,
    /// Steps from one report to the next.
    every: u64,
    /// Loss at the end.
    loss: f64,
    lr: f64,
    seed: u64,
    recipe: Recipe,
    tokenizer: &'static str,
    /// Kind of `data.train`: a name, or `long`.
    train: &'static str,
    batch_tokens: u64,
    sources: u64,
    /// Tasks that are scored at each evaluation.
    tasks: u64,
    /// Blocks, all with experts but the first; 0 for a dense model.
    blocks: u64,
    diverges: bool,
    /// It was resumed, skipped steps, and has many samples and checkpoints.
    eventful: bool,
}

impl Default for ExampleRun {
    fn default() -> Self {
        ExampleRun {
            steps: 400,
            evals: 8,
            every: 1,
            loss: 2.0,
            lr: 1e-3,
            seed: 1,
            recipe: Recipe::Bf16,
            tokenizer: "bpe",
            train: "corpus.txt",
            batch_tokens: 4096,
            sources: 0,
            tasks: 0,
            blocks: 0,
            diverges: false,
            eventful: false,
        }
    }
}

impl ExampleRun {
    /// Writes the run's folder, and returns its path.
    fn write(&self, parent: &Path, name: &str) -> Result<PathBuf, Box<dyn Error>> {
        let folder = parent.join(name);
        fs::create_dir_all(&folder)?;
        let outputs = Outputs { jsonl: true, tensorboard: false };
        let mut sink = MetricsSink::open(&folder, outputs, SinkStart::Fresh, "", None)?;
        for (n, event) in self.events().into_iter().enumerate() {
            sink.write(&Record { time: 1.7643e9 + n as f64, event })?;
        }
        fs::write(folder.join(CONFIG_FILE), self.config())?;
        let has_steps = self.steps > 0 || self.evals > 0;
        if has_steps {
            RunSummary { total_steps: Some(self.steps), ..summary() }.write(&folder)?;
        }
        Ok(folder)
    }

    fn config(&self) -> String {
        let train = match self.train {
            "long" => format!(
                "[{}]",
                (0..6)
                    .map(|n| format!(
                        "\"/data/corpora/a-long-folder-name/common-crawl-{n}-filtered-{}/*.jsonl.zst\"",
                        self.seed
                    ))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
            one => format!("\"{one}\""),
        };
        format!(
            "[model]\nfamily = \"qwen3\"\ndim = 256\nlayers = 4\nheads = 4\n\n[data]\ntrain = {train}\ntokenizer = \"{}\"\nvalid = \"valid.txt\"\n\n\
             [optimizer]\nlr = {:?}\n\n[precision]\nrecipe = \"{}\"\n\n[train]\nsteps = {}\nseed = {}\n",
            self.tokenizer,
            self.lr,
            self.recipe.name(),
            self.steps.max(1),
            self.seed
        )
    }

    fn loss_at(&self, step: u64) -> f64 {
        let share = step as f64 / self.steps.max(1) as f64;
        let loss = self.loss + 6.0 * (-12.0 * share).exp();
        let risen = if self.diverges && share > 0.5 { 40.0 * (share - 0.5) } else { 0.0 };
        // Batches are those of the seed, and recipes differ by less.
        let recipe = noise(step, 31 * self.recipe as u64 + 17) - 0.5;
        loss * (1.0 + 0.03 * (noise(step, 7919 + self.seed) - 0.5) + 0.004 * recipe) + risen
    }

    fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = Vec::new();
        if self.evals > 0 {
            self.evaluation(0, &mut events);
        }
        let eval_every = (self.steps / self.evals.max(1)).max(1);
        for step in 1..=self.steps {
            if step.is_multiple_of(self.every) || step == 1 {
                events.push(self.step(step).into());
                if self.blocks > 0 {
                    events.push(self.experts(step).into());
                }
            }
            if self.evals > 0 && step.is_multiple_of(eval_every) {
                self.evaluation(step, &mut events);
                let text = SAMPLE.repeat(1 + (step % 3) as usize);
                events.push(Sample { step, prompt: "The ".into(), text, is_chat: false }.into());
                let path = format!("runs/a-run/checkpoints/step-{step:08}").into();
                events.push(CheckpointSaved { step, path }.into());
            }
            if self.eventful && step.is_multiple_of(self.steps / 5) && step < self.steps {
                let (loss, grad_norm) = (f64::NAN, f64::INFINITY);
                events.push(SkippedStep { step, loss, grad_norm, skipped: 1 }.into());
                let switched = (step < self.steps / 2).then_some([Recipe::Bf16, Recipe::Fp8Block]);
                events.push(Resumed { step, switched }.into());
            }
            if self.recipe.is_fp8() && step.is_multiple_of(40) {
                let bf16_loss = self.loss_at(step);
                let loss = bf16_loss * (1.0 + 0.004 * (noise(step, 3) - 0.4));
                events.push(ReferenceGap { step, steps: 10, loss, bf16_loss }.into());
            }
            if self.diverges && step == self.steps * 3 / 5 {
                let text = "the gradient norm, 12.300, is 24 times its running median of 0.512, for 4 steps: the run may diverge; the usual \
                            cause is a learning rate that is too high (now 1.00e-3): lower optimizer.lr or lengthen schedule.warmup_steps; \
                            else look at the data of these steps";
                events.push(Warning { step, text: text.into() }.into());
            }
        }
        events
    }

    fn step(&self, step: u64) -> StepMetrics {
        let share = step as f64 / self.steps as f64;
        let spike = if step % 997 == 5 { 40.0 } else { 1.0 };
        StepMetrics {
            step,
            loss: self.loss_at(step),
            grad_norm: spike * (0.4 + 2.0 * (-8.0 * share).exp() + 0.3 * noise(step, 104_729)),
            lr: self.lr * (step as f64 / 50.0).min(1.0) * (0.1 + 0.9 * (1.0 - share)),
            memory_bytes: 41_000_000_000,
            memory_total_bytes: Some(85_000_000_000),
            tokens_per_second: 52_000.0 * (1.0 + 0.05 * noise(step, 1299)),
            trained: None,
            tflops: 412.0,
            mfu: Some(0.41 + 0.02 * noise(step, 1299)),
            tokens: step * self.batch_tokens,
            epoch: share * 1.7,
            step_ms: 78.0,
            skipped: 0,
            saturated: None,
            seconds_left: Some((self.steps - step) as f64 * 0.078),
        }
    }

    /// Loads that become equal, but for one block from the middle of the run on.
    fn experts(&self, step: u64) -> ExpertMetrics {
        let share = step as f64 / self.steps as f64;
        let load = |block: u64| {
            let uneven = if block == self.blocks / 2 && share > 0.5 { 1.2 } else { 0.0 };
            let early = 3.0 * (-10.0 * share * (1.0 + block as f64 / self.blocks as f64)).exp();
            1.1 + uneven + early + 0.3 * noise(step, 31 * block)
        };
        let blocks: Vec<u64> = (1..self.blocks).collect();
        ExpertMetrics {
            step,
            balance: 2.0 + 0.8 * (-10.0 * share).exp() + 0.02 * noise(step, 17),
            z_loss: 4.0 + 3.0 * share + 0.2 * noise(step, 19),
            max_load: blocks.iter().map(|&block| load(block)).collect(),
            min_tokens: blocks.iter().map(|&block| (512.0 / load(block).powi(2)) as u64).collect(),
            rank_load: Vec::new(),
            blocks,
        }
    }

    fn evaluation(&self, step: u64, events: &mut Vec<Event>) {
        let loss = self.loss_at(step) + 0.1;
        events.push(
            EvalMetrics {
                step,
                loss,
                bits_per_byte: Some(loss / 3.1),
                token_accuracy: Some((-0.3 * loss).exp()),
            }
            .into(),
        );
        for n in 0..self.sources {
            let name = match n {
                0 => "data/books.jsonl.zst".to_owned(),
                1 => "/data/corpora/a-very-long-folder-name/common-crawl-2024-10-filtered/part-*.parquet"
                    .to_owned(),
                n => format!("shards/source-{n}"),
            };
            let source = SourceMetrics {
                step,
                name,
                tokens: Some(step * self.batch_tokens * (n + 1) / 15),
                epoch: Some(step as f64 / 700.0 / (n + 1) as f64),
                train_loss: (step > 0).then_some(loss + 0.3 * (n as f64 - 1.5) - 0.12),
                loss: (n != 3).then_some(loss + 0.3 * (n as f64 - 1.5)),
                token_accuracy: (n != 3).then_some((-0.3 * loss).exp()),
            };
            events.push(source.into());
        }
        // One evaluation is that of the last step.
        let tasks = if self.evals == 1 && step == 0 { 0 } else { self.tasks };
        events.extend((0..tasks).map(|n| self.score(n, step).into()));
    }

    /// The score on the n-th task, which leaves the chance level sooner the lower n is.
    fn score(&self, n: u64, step: u64) -> TaskMetrics {
        let (task, metric, chance): (&str, &str, f64) = match n {
            0 => ("capitals", "acc", 0.0),
            1 => ("hellaswag", "acc_norm", 0.25),
            2 => ("samples_a_very_long_name_of_a_task_<2026-11-29T10-47-27.594>", "gold_bpb", 0.25),
            3 => ("one-row", "acc", 0.5),
            _ => ("", "acc_norm", 1.0 / (2 + n % 4) as f64),
        };
        let task = if task.is_empty() { format!("mmlu_{n}") } else { task.to_owned() };
        let rows = if n == 3 { 1 } else { 200 + 300 * (n % 5) };
        let share = step as f64 / self.steps.max(1) as f64;
        let learned = 1.0 - (-3.0 * share / (1 + n) as f64).exp();
        let accuracy = chance + (0.9 - chance) * learned + 0.05 * (noise(step, n + 40 * self.seed) - 0.5);
        let accuracy = if n == 3 { accuracy.round() } else { accuracy.clamp(0.0, 1.0) };
        let value = if metric == "gold_bpb" { 2.5 - accuracy } else { accuracy };
        let half = 1.96 * (accuracy * (1.0 - accuracy) / rows as f64).sqrt();
        let interval = (rows > 1).then_some([value - half, value + half]);
        TaskMetrics { step, task, metric: metric.to_owned(), value, interval, rows, chance }
    }
}

fn summary() -> RunSummary {
    RunSummary {
        model: Some("qwen3, 4 layers, dim 256, 4 heads, vocabulary 32,768".into()),
        parameters: Some(124_439_808),
        precision: Some("fp8-block".into()),
        device: Some("NVIDIA H100 80GB HBM3".into()),
        total_steps: Some(20_000),
        train_seconds: Some(7_380.0),
        unigram_entropy: Some(6.29),
        outcome: Some("finished".into()),
        ..RunSummary::default()
    }
}

/// A number from 0 to 1.
fn noise(n: u64, of: u64) -> f64 {
    let mixed = (n ^ of.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    ((mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 40) as f64 / f64::from(1 << 24)
}

const SAMPLE: &str = "quick <brown> fox & the \"lazy\" dog: 光の中で 🦊 a_very_long_identifier_without_a_place_to_break_it_that_goes_on_and_on_and_on\n\
                      \tfn main() { println!(\"{}\", 42); }\n\n";
