//! `xtrain bench fp8`.

use crate::cli::BenchFp8Args;
use crate::failure::Failure;
use crate::terminal;
use serde_json::json;
use xtrain_lab::bench::{self, Fp8Speeds, LinearShape, OpBenchOptions};
use xtrain_model::Recipe;
use xtrain_planner::fp8_skip::{self, LayerSpeed, RecipeLayers};
use xtrain_report::metrics::format;
use xtrain_step::engine::{Processor, Target};
use xtrain_train::run_file;
use xtrain_train::spec::plan_on;

/// `xtrain bench fp8`.
pub(crate) fn fp8(args: &BenchFp8Args) -> Result<(), Failure> {
    if args.file.is_some() {
        return measure_run_file(args);
    }
    terminal::use_threads(args.cpu.threads)?;
    let common = bench::fp8_shapes(Target::for_device(args.device));
    let shapes = if args.shape.is_empty() { &common } else { &args.shape };
    let options =
        OpBenchOptions { device: args.device, recipe: None, repeats: args.repeats, runs: args.runs };
    let speeds = bench::fp8(shapes, &args.recipe, options)?;
    match args.json {
        true => terminal::print_json(&speeds),
        false => terminal::print(&shapes_table(&speeds)),
    }
    .map(|_| ())
}

/// Measures the layers of a run file inside its blocks.
fn measure_run_file(args: &BenchFp8Args) -> Result<(), Failure> {
    let Some(file) = &args.file else { return Ok(()) };
    let parsed = run_file::load(file, &args.set)?;
    let train = &parsed.config.train;
    terminal::use_threads(if args.cpu.threads > 0 { args.cpu.threads } else { train.threads })?;
    let processor = Processor::for_config(&parsed.config)?;
    let planned = plan_on(&parsed, processor.target())?;
    let own = Some(planned.spec.recipe).filter(|recipe| args.recipe.is_empty() && recipe.is_fp8());
    let asked: Vec<Recipe> = own.into_iter().chain(args.recipe.iter().copied()).collect();
    let recipes = bench::fp8_recipes(&asked, &processor)?;
    let (device, is_kept) = (processor.describe(), processor.target() == Target::Cuda);
    drop(processor);
    let measured = fp8_skip::measure(&planned, &recipes, train.device)?;
    let tokens = planned.spec.batch.sequences * planned.spec.batch.seq_len;
    if args.json {
        let rows: Vec<_> = measured.iter().flat_map(|of| rows(of, is_kept)).collect();
        let all = json!({ "device": device, "tokens": tokens, "kept": is_kept, "rows": rows });
        return terminal::print_json(&all).map(|_| ());
    }
    let layers = measured.iter().flat_map(|of| &of.layers);
    let wide = terminal::column("layer", layers.map(|layer| layer.layer.as_str()));
    let mut out = format!(
        "{device}: linear layers in a block, forward and backward of {} tokens, casts included\n{:<14}{:<wide$}{:>16}{:>10}{:>10}{:>10}\n",
        format::grouped(tokens as u64),
        "recipe",
        "layer",
        "in x out",
        "bf16 ms",
        "FP8 ms",
        "speed-up"
    );
    for RecipeLayers { recipe, layers } in &measured {
        for layer in layers {
            let slower = if is_kept && fp8_skip::is_slower(layer) { "  stays in bf16" } else { "" };
            out.push_str(&format!(
                "{:<14}{:<wide$}{:>16}{:>10.3}{:>10.3}{:>10.2}{slower}\n",
                recipe.name(),
                layer.layer,
                format!("{} x {}", layer.inputs, layer.outputs),
                layer.bf16_seconds * 1e3,
                layer.fp8_seconds * 1e3,
                layer.speed()
            ));
        }
    }
    out.push_str(match is_kept {
        true => "cached: runs that begin on this GPU use it to choose the layers that stay in bf16\n",
        false => "the CPU emulates FP8: these times say nothing about a GPU, and runs do not use them\n",
    });
    terminal::print(&out).map(|_| ())
}

fn rows(of: &RecipeLayers, is_kept: bool) -> Vec<serde_json::Value> {
    let row = |layer: &LayerSpeed| {
        json!({
            "recipe": of.recipe, "layer": layer.layer, "tokens": layer.tokens, "inputs": layer.inputs,
            "outputs": layer.outputs, "bf16_seconds": layer.bf16_seconds, "fp8_seconds": layer.fp8_seconds,
            "speed": layer.speed(), "stays_in_bf16": is_kept && fp8_skip::is_slower(layer),
        })
    };
    of.layers.iter().map(row).collect()
}

/// The speed-ups of each shape, and the number of tokens from which there is any.
fn shapes_table(speeds: &Fp8Speeds) -> String {
    let recipes: Vec<Recipe> =
        speeds.rows.first().map_or(Vec::new(), |row| row.recipes.iter().map(|of| of.recipe).collect());
    let mut out = format!(
        "{}: a linear layer by itself in FP8, times as fast as in bf16, casts included: all (forward, backward)\n{:>8}{:>8}{:>8}{:>10}",
        speeds.device, "m", "k", "n", "bf16 ms"
    );
    let heads = |out: &mut String| {
        recipes.iter().for_each(|recipe| out.push_str(&format!("{:>20}", recipe.name())));
        out.push('\n');
    };
    heads(&mut out);
    for row in &speeds.rows {
        let LinearShape { m, k, n } = row.shape;
        out.push_str(&format!("{m:>8}{k:>8}{n:>8}{:>10.3}", row.bf16.total() * 1e3));
        for of in &row.recipes {
            let cell = format!("{:.2} ({:.2}, {:.2})", of.both, of.forward, of.backward);
            out.push_str(&format!("{cell:>20}"));
        }
        out.push('\n');
    }
    out.push_str(&format!(
        "\nbreak-even: number of tokens from which FP8 is not slower\n{:>8}{:>8}{:>8}{:>10}",
        "", "k", "n", ""
    ));
    heads(&mut out);
    for of_weights in speeds.break_even.chunks(recipes.len().max(1)) {
        let Some(first) = of_weights.first() else { continue };
        out.push_str(&format!("{:>8}{:>8}{:>8}{:>10}", "", first.k, first.n, ""));
        for of in of_weights {
            let tokens = of.tokens.map_or("none".to_owned(), |tokens| tokens.to_string());
            out.push_str(&format!("{tokens:>20}"));
        }
        out.push('\n');
    }
    if speeds.emulated {
        out.push_str("the CPU emulates FP8: these times say nothing about a GPU\n");
    }
    out
}
