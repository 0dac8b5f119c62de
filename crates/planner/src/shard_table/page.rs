//! The figures of docs/parallel.md that follow from plans: XTRAIN_UPDATE_DOCS=1 writes them anew.

use crate::estimate::{Device, Network, Speed, Timeline};
use crate::fit::needed_bytes;
use crate::planned::Planned;
use crate::planned::plan_alone;
use crate::shard_table::SHARDS;
use std::fs;
use std::path::{Path, PathBuf};
use xtrain_config::Config;
use xtrain_program::{Collective, Groups, Lane, Program, Region, Stage};
use xtrain_rank::Rank;
use xtrain_step::engine::Target;
use xtrain_step::programs;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The plan and the step of an example, for rank 0 of so many.
fn planned(file: &str, ranks: usize, sets: &[&str]) -> (Planned, Program) {
    let parsed = Config::load(&repository().join("examples").join(file), sets).expect("an example");
    let planned = plan_alone(&parsed, Target::Cuda, Rank::first_of(ranks)).expect("a plan");
    let program = programs::training(&planned.spec).expect("a program");
    (planned, program)
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1u64 << 30) as f64)
}

/// GiB that a rank needs, and of them the state, by mode.
fn memory() -> String {
    let runs = [("llama3_8b.toml", 8), ("llama3_70b.toml", 64), ("llama3_70b.toml", 1024)];
    let head = "| `parallel.shard` | Llama-3-8B, 8 GPUs | Llama-3-70B, 64 GPUs | Llama-3-70B, 1,024 GPUs |\n";
    let mut out = format!("{head}|---|---:|---:|---:|\n");
    for (_, name) in SHARDS {
        out.push_str(&format!("| `\"{name}\"` |"));
        for (file, ranks) in runs {
            let shard = format!("parallel.shard={name}");
            let sets = [&shard, "train.batch_size=1024", "train.recompute=block", "train.loss_chunk=4096"];
            let (planned, program) = planned(file, ranks, &sets);
            let state = Target::Cuda.plan(&program).region_bytes[Region::State as usize] as u64;
            let all = needed_bytes(&planned.spec, &program, Target::Cuda, 1).expect("a plan");
            out.push_str(&format!(" {}, state {} |", gib(all), gib(state)));
        }
        out.push('\n');
    }
    out
}

/// Milliseconds in which a block of Llama-3-8B computes its forward, and in which its weights are gathered.
fn gathers() -> String {
    let (_, program) = planned("llama3_8b.toml", 16, &["parallel.shard=weights", "train.batch_size=16"]);
    let device = Device::model("h100").expect("it is in the table");
    // Nothing slows the block down.
    let network = Network { latency: 0.0, copies: Some(f64::INFINITY), ranks_per_node: 16, ..device.network };
    let timeline = Timeline::new(&program, &Device { network, ..device.clone() }, 1);
    let is_of_block = |index: usize| {
        let instance = &program.instances[index];
        let is_forward = instance.lane == Lane::Compute && instance.origin.stage == Stage::Forward;
        is_forward && instance.origin.block == Some(1)
    };
    let spans = timeline.parts[0].spans.iter().filter(|span| is_of_block(span.instance));
    let forward: f64 = spans.map(|span| span.end - span.begin).sum();
    let of_block = program.parameters.iter().filter(|p| p.name.starts_with("blocks.1."));
    let matrices = of_block.map(|p| program.whole_type(p)).filter(|ty| ty.shape.len() > 1);
    let weights: usize = matrices.map(|ty| ty.numel()).sum();
    let head = "| GB/s in rings | fp32 | bf16 | 8 bits | forward of the block, 8,192 tokens in bf16 |\n";
    let mut out = format!("{head}|---:|---:|---:|---:|---:|\n");
    for bandwidth in [330e9, 100e9, 50e9, 25e9, 12.5e9] {
        let network = device.network.with_bandwidths(None, Some(bandwidth));
        let ms = |bytes: usize| {
            let sent = (bytes * weights) as f64 * 15.0 / 16.0;
            1e3 * network.seconds(Collective::AllGather { first: 0 }, Groups::world(16), 16, sent)
        };
        let row: Vec<String> = [4, 2, 1].map(|bytes| format!("{:.1} ms", ms(bytes))).to_vec();
        out.push_str(&format!("| {} | {} | {:.1} ms |\n", bandwidth / 1e9, row.join(" | "), 1e3 * forward));
    }
    out
}

/// Milliseconds of a step of Llama-3-8B in FP8 on two nodes, by what ranks gather.
fn steps() -> String {
    let mut out =
        String::from("| `--link` | `\"fp32\"` | `\"bf16\"` | `\"auto\"`, 8 bits |\n|---|---:|---:|---:|\n");
    for link in [48.0, 12.5, 3.0] {
        out.push_str(&format!("| {link} GB/s |"));
        for gather in ["fp32", "bf16", "auto"] {
            let gather = format!("parallel.gather={gather}");
            let fp8 = "precision.recipe=fp8-current";
            let sets = [
                "parallel.shard=weights",
                "train.batch_size=16",
                fp8,
                &gather,
                "train.recompute=none",
                "train.loss_chunk=4096",
            ];
            let (_, program) = planned("llama3_8b.toml", 16, &sets);
            let mut device = Device::model("h100").expect("it is in the table");
            device.network.nic = link * 1e9;
            let timeline = Timeline::new(&program, &device, 1);
            let [step, exposed] =
                [timeline.seconds(), timeline.exposed_seconds()].map(|seconds| (1e3 * seconds).round());
            out.push_str(&format!(" {step} ms, {exposed} exposed |"));
        }
        out.push('\n');
    }
    out
}

/// Tokens per second and GPU that others published for several nodes, and those of plans of the same sizes.
fn published() -> String {
    let bf16: &[&str] = &["train.recompute=norms"];
    let fp8: &[&str] = &["train.recompute=norms", "precision.recipe=fp8-current", "precision.skip_slower=[]"];
    let runs = [
        ("Llama-3-8B, 64 A100", "a100", "llama3_8b.toml", 64, 1, bf16, 2973.0),
        ("Llama-3-70B, 64 A100", "a100", "llama3_70b.toml", 64, 1, &["train.recompute=block"], 331.0),
        ("Llama-3-8B, 8 H100 of 500 W", "h100", "llama3_8b.toml", 8, 2, bf16, 6667.0),
        ("Llama-3-8B, 128 H100 of 500 W", "h100", "llama3_8b.toml", 128, 2, bf16, 6514.0),
        ("Llama-3-8B in FP8, 32 H200", "h200", "llama3_8b.toml", 32, 2, fp8, 10_938.0),
        ("Llama-3-8B in FP8, 64 H200", "h200", "llama3_8b.toml", 64, 2, fp8, 10_753.0),
    ];
    let head = "| run | published | plan | plan, `reduce = \"fast\"` |\n|---|---:|---:|---:|\n";
    let rows = runs.map(|(name, model, file, ranks, micro_batch, sets, tokens)| {
        let device = Device::model(model).expect("it is in the table");
        let batch = [
            format!("train.batch_size={}", ranks * micro_batch),
            format!("train.micro_batch_size={micro_batch}"),
        ];
        let speed = |reduce: &str| {
            let reduce = format!("parallel.reduce={reduce}");
            let own = ["parallel.shard=weights", "train.loss_chunk=4096", &reduce, &batch[0], &batch[1]];
            let (planned, program) = planned(file, ranks, &[&own, sets].concat());
            let device =
                device.clone().connected(|network| network.of_run(&planned.resolved.config.parallel));
            let timeline = Timeline::new(&program, &device, 1);
            let Speed { tokens_per_second, mfu, .. } = Speed::estimate(&planned, &timeline, &device);
            format!("{}, {:.1}%", grouped(tokens_per_second / ranks as f64), 100.0 * mfu.expect("a peak"))
        };
        let mfu = tokens * flops(file) / device.peak_flops.expect("a peak");
        format!(
            "| {name} | {}, {:.1}% | {} | {} |\n",
            grouped(tokens),
            100.0 * mfu,
            speed("same-world"),
            speed("fast")
        )
    });
    head.to_owned() + &rows.concat()
}

/// Model FLOPs for a token of an example.
fn flops(file: &str) -> f64 {
    let (planned, _) =
        planned(file, 64, &["parallel.shard=weights", "train.batch_size=64", "train.micro_batch_size=1"]);
    planned.spec.model.flops_per_token(planned.spec.batch.seq_len)
}

fn grouped(tokens: f64) -> String {
    xtrain_report::metrics::format::grouped(tokens.round() as u64)
}

/// The lanes of a step of eight blocks.
fn picture(ranks: usize, nic: f64) -> String {
    let batch = format!("train.batch_size={ranks}");
    let recompute = ["train.recompute=none", "train.loss_chunk=4096"];
    let sets = ["parallel.shard=weights", "model.layers=8", &batch, recompute[0], recompute[1]];
    let (planned, program) = planned("llama3_8b.toml", ranks, &sets);
    let mut device = Device::model("h100").expect("it is in the table");
    device.network.nic = nic;
    let title = format!("{}: a step on {ranks} x {}", planned.spec.model, device.name);
    Timeline::new(&program, &device, 1).picture(&title, &program)
}

/// `page` with the text between the marks of `name` replaced.
fn with_part(page: &str, name: &str, text: &str) -> String {
    let marks = [format!("<!-- {name}, from a test -->\n\n"), format!("\n<!-- end of {name} -->")];
    let [begin, end] = marks.each_ref().map(|mark| page.find(mark).unwrap_or_else(|| panic!("no {mark}")));
    format!("{}{text}{}", &page[..begin + marks[0].len()], &page[end..])
}

#[test]
fn the_page_of_parallel_runs_is_up_to_date() {
    let files = [
        ("docs/parallel/lanes.svg", picture(8, 48e9)),
        ("docs/parallel/lanes-between-nodes.svg", picture(16, 24e9)),
    ];
    let path = repository().join("docs/parallel.md");
    let found = fs::read_to_string(&path).expect("the page");
    let parts =
        [("memory", memory()), ("published", published()), ("gathers", gathers()), ("steps", steps())];
    let page = parts.iter().fold(found.clone(), |page, (name, text)| with_part(&page, name, text));
    if std::env::var_os("XTRAIN_UPDATE_DOCS").is_some() {
        fs::create_dir_all(repository().join("docs/parallel")).expect("a folder");
        fs::write(&path, &page).expect("written");
        for (name, svg) in &files {
            fs::write(repository().join(name), svg).expect("written");
        }
        return;
    }
    let stale = "is out of date; run this test with XTRAIN_UPDATE_DOCS=1 to rewrite it";
    assert!(found == page, "docs/parallel.md {stale}");
    for (name, svg) in &files {
        let found = fs::read_to_string(repository().join(name)).unwrap_or_default();
        assert!(found == *svg, "{name} {stale}");
        assert!(svg.len() < 16 << 10, "{name} has {} bytes", svg.len());
    }
}
