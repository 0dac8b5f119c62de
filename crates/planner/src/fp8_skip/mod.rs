//! Selection of the linear layers that stay in bf16 because FP8 would make them slower. Speeds are measured
//! on the GPU, cached there, and recorded in the configuration of the run.
//!
//! The selection affects a run's numbers. It is therefore measured once, when a run begins whose file does
//! not set `precision.skip_slower`. From then on the run's configuration holds it, wherever the run is
//! resumed or its checkpoints are read. With sums for any world or mesh nothing is measured, and no layer is
//! left in bf16: a time, and the sizes that it is of, depend on the ranks.

mod layers;

pub use layers::LayerSpeed;

use crate::error::PlanError;
use crate::fit;
use crate::planned::Planned;
use layers::Blocks;
use serde::Serialize;
use xtrain_config::{Device, PrecisionConfig, Slower};
use xtrain_model::{Numerics, Recipe};
use xtrain_step::engine::Processor;

/// Speed in FP8 relative to bf16 below which a layer stays in bf16, if noise does not explain it. A smaller
/// loss of speed is worth the memory that FP8 saves.
const FASTER_IN_BF16: f64 = 0.98;

/// The linear layers of a run under one recipe.
#[derive(Clone, Debug, Serialize)]
pub struct RecipeLayers {
    /// The recipe.
    pub recipe: Recipe,
    /// The layers.
    pub layers: Vec<LayerSpeed>,
}

/// True if runs leave this layer in bf16.
pub fn is_slower(layer: &LayerSpeed) -> bool {
    layer.is_longer && layer.speed() < FASTER_IN_BF16
}

/// Measures the linear layers of a run under each recipe, inside its blocks, and caches the result on a GPU
/// for later runs.
pub fn measure(
    planned: &Planned,
    recipes: &[Recipe],
    device: Device,
) -> Result<Vec<RecipeLayers>, PlanError> {
    let mut all = Vec::new();
    for &recipe in recipes {
        let own = planned.spec.numerics();
        let numerics = if recipe == own.recipe { own } else { Numerics::from(recipe) };
        let blocks = Blocks::new(&planned.spec.computed_in(numerics), planned.micro_steps());
        let layers = blocks.measure(Processor::by_name(device)?)?;
        if let Processor::Cuda(gpu) = Processor::by_name(device)? {
            gpu.replace_measurement(&blocks.name(), &line(&layers));
        }
        all.push(RecipeLayers { recipe, layers });
    }
    Ok(all)
}

/// Selects the layers that stay in bf16 because the GPU runs them slower in FP8. Measures them if they are
/// not cached and the run fits. A run whose file decides, and a run on the CPU, are returned unchanged.
pub fn decide(planned: Planned, processor: &Processor) -> Result<Planned, PlanError> {
    if let (Processor::Cuda(_), Some(why)) = (processor, unmeasured(&planned)) {
        tracing::info!("{why}");
    }
    let (Processor::Cuda(gpu), true) = (processor, is_undecided(&planned)) else {
        return planned.complete();
    };
    let blocks = blocks(&planned);
    let known = gpu.cached_measurement(&blocks.name()).and_then(|line| layers(&line));
    let speeds = match known {
        Some(speeds) => speeds,
        None => {
            // Do not time a run that does not fit.
            fit::check(&planned, processor, 1)?;
            tracing::info!(
                "timing the linear layers in FP8 and in bf16 on this GPU, once; the result is cached"
            );
            let other = Processor::by_name(Device::Cuda).map_err(PlanError::from);
            match other.and_then(|other| blocks.measure(other)) {
                // Another process may have measured at the same time: all use the first result.
                Ok(speeds) => {
                    layers(&gpu.cache_measurement(&blocks.name(), &line(&speeds))).unwrap_or(speeds)
                }
                Err(error) => {
                    tracing::warn!(
                        "all linear layers are in FP8, because their speed could not be measured: {error}"
                    );
                    return planned.complete();
                }
            }
        }
    };
    let left = slower_layers(&speeds);
    for Slower { layer, speed, tokens } in &left {
        tracing::info!(
            "{layer} stays in bf16, because FP8 reaches only {speed:.2} of that speed here, at {tokens} tokens; \
             --set 'precision.skip_slower=[]' uses FP8 anyway"
        );
    }
    planned.with_slower(left)
}

/// As [`decide`], with cached measurements only.
pub fn decide_if_measured(planned: Planned, processor: &Processor) -> Result<Planned, PlanError> {
    let (Processor::Cuda(gpu), true) = (processor, is_undecided(&planned)) else {
        return planned.complete();
    };
    match gpu.cached_measurement(&blocks(&planned).name()).and_then(|line| layers(&line)) {
        Some(speeds) => planned.with_slower(slower_layers(&speeds)),
        None => Ok(planned),
    }
}

/// The plan of a resumed run: under the recipe with which it began, the same layers stay in bf16; under
/// another one the layers are selected again.
pub fn decide_for_resumed(
    planned: Planned,
    began: &PrecisionConfig,
    processor: &Processor,
) -> Result<Planned, PlanError> {
    match &began.skip_slower {
        _ if planned.resolved.config.precision.recipe != began.recipe => decide(planned, processor),
        Some(slower) if is_open(&planned) => planned.with_slower(slower.clone()),
        // A run without a record left no layer in bf16.
        _ => planned.complete(),
    }
}

/// True if the layers that stay in bf16 are those that a measurement finds.
pub fn is_undecided(planned: &Planned) -> bool {
    is_open(planned) && !planned.spec.parallel.reduce.is_any_world()
}

/// The reason why nothing is measured although the configuration leaves it open, if so.
pub fn unmeasured(planned: &Planned) -> Option<String> {
    let reduce = planned.spec.parallel.reduce;
    (is_open(planned) && reduce.is_any_world()).then(|| {
        format!(
            "no layer is left in bf16 for its speed (precision.skip_slower = []): with parallel.reduce = \"{}\", bits may not depend on \
             times",
            reduce.name()
        )
    })
}

/// True if the configuration does not say which layers stay in bf16.
fn is_open(planned: &Planned) -> bool {
    planned.spec.recipe.is_fp8() && planned.resolved.config.precision.skip_slower.is_none()
}

/// The layers to leave in bf16.
fn slower_layers(speeds: &[LayerSpeed]) -> Vec<Slower> {
    let slower = speeds.iter().filter(|speed| is_slower(speed));
    let entry = |of: &LayerSpeed| Slower {
        layer: of.layer.clone(),
        // More digits would be noise.
        speed: (of.speed() * 1000.0).round() / 1000.0,
        tokens: of.tokens,
    };
    slower.map(entry).collect()
}

fn blocks(planned: &Planned) -> Blocks {
    Blocks::new(&planned.spec, planned.micro_steps())
}

/// The cached text: JSON in one line.
fn line(speeds: &[LayerSpeed]) -> String {
    serde_json::to_string(speeds).unwrap_or_default()
}

fn layers(line: &str) -> Option<Vec<LayerSpeed>> {
    serde_json::from_str(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;
    use xtrain_step::linear_gemms::{fp8_share, linear_gemms};

    /// Speeds of the layers of a block, in their order.
    fn table(speeds: [f64; 4]) -> Vec<LayerSpeed> {
        let of = |(layer, speed): (&str, f64)| LayerSpeed {
            layer: layer.into(),
            tokens: 4096,
            inputs: 32,
            outputs: 64,
            bf16_seconds: 1e-4 * speed,
            fp8_seconds: 1e-4,
            is_longer: speed < 1.0,
        };
        let sites = planned(&[]).spec.model.linear_sites();
        sites.into_iter().zip(speeds).map(of).collect()
    }

    fn planned(sets: &[&str]) -> Planned {
        let text = "[model]\ndim = 32\nlayers = 2\nheads = 2\nffn_dim = 64\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 32\n\
                    [train]\nsteps = 1\n";
        let parsed = Config::parse(Path::new("run.toml"), text.as_bytes(), sets).expect("a run file");
        plan_alone(&parsed, Target::Cpu, Rank::ALONE).expect("a plan")
    }

    #[test]
    fn what_a_table_says_is_slower_by_more_than_noise_stays_in_bf16() {
        let left = slower_layers(&table([1.3, 0.9312, 0.985, 0.9799]));
        let skipped: Vec<(&str, f64, usize)> =
            left.iter().map(|of| (of.layer.as_str(), of.speed, of.tokens)).collect();
        assert_eq!(skipped, [("attn.o_proj", 0.931, 4096), ("mlp.down_proj", 0.98, 4096)]);
        let run = planned(&["precision.recipe=fp8-current"]).with_slower(left).expect("a plan");
        let kept: Vec<String> = linear_gemms(&run.spec)
            .iter()
            .map(|linear| {
                linear.gemms.iter().flat_map(|p| p.as_ref().err()).map(ToString::to_string).collect()
            })
            .collect();
        let why = "FP8 is slower: 0.93 of bf16's speed at 4096 x 32 x 32".repeat(3);
        assert_eq!(kept[..3], [String::new(), why, String::new()]);
        assert!(kept[3].contains("at 4096 x 64 x 32"), "{}", kept[3]);
        let share = fp8_share(&linear_gemms(&run.spec));
        assert!((share - (96.0 + 128.0) / (96.0 + 32.0 + 128.0 + 64.0)).abs() < 1e-12, "{share}");
        // The configuration records the selection and keeps it when it is read again.
        let text = run.resolved.config.to_toml();
        assert!(
            text.contains("skip_slower = [{ layer = \"attn.o_proj\", speed = 0.931, tokens = 4096 }, "),
            "{text}"
        );
        let again =
            Config::parse::<&str>(Path::new("config.toml"), text.as_bytes(), &[]).expect("a run file");
        assert_eq!(plan_alone(&again, Target::Cpu, Rank::ALONE).expect("a plan").spec, run.spec);
    }

    #[test]
    fn a_run_goes_on_with_what_it_left_under_its_own_recipe() {
        let fp8 = ["precision.recipe=fp8-current"];
        let began = planned(&fp8)
            .with_slower(slower_layers(&table([0.5; 4])))
            .expect("a plan")
            .resolved
            .config
            .precision;
        let spec = |sets: &[&str], began: &PrecisionConfig| {
            decide_for_resumed(planned(sets), began, &Processor::Cpu).expect("a plan").spec
        };
        assert_eq!(spec(&fp8, &began).fp8.slower.len(), 4);
        // A list in the file decides, and so does another recipe.
        let own = [fp8[0], "precision.skip_slower=[]"];
        assert_eq!(spec(&own, &began).fp8.slower, []);
        assert_eq!(spec(&["precision.recipe=fp8-row"], &began).fp8.slower, []);
        assert_eq!(spec(&["precision.recipe=bf16"], &began).fp8.slower, []);
        // The run began before measurements existed, or on the CPU.
        let silent = PrecisionConfig { skip_slower: None, ..began };
        let run = decide_for_resumed(planned(&fp8), &silent, &Processor::Cpu).expect("a plan");
        assert_eq!(run.resolved.config.precision, silent);
    }

    #[test]
    fn no_time_decides_where_bits_are_those_of_any_number_of_ranks() {
        for reduce in ["any-world", "any-mesh"] {
            let fp8 = ["precision.recipe=fp8-row", "train.micro_batch_size=1"];
            let sets = [fp8[0], fp8[1], &format!("parallel.reduce={reduce}")];
            let run = planned(&sets);
            assert!(!is_undecided(&run) && unmeasured(&run).is_some_and(|why| why.contains(reduce)));
            assert!(is_undecided(&planned(&fp8)) && unmeasured(&planned(&fp8)).is_none());
            let given = planned(&[&sets[..], &["precision.skip_slower=[]"]].concat());
            assert!(!is_undecided(&given) && unmeasured(&given).is_none());
            // What a run recorded before this was so stays.
            let began = planned(&fp8).with_slower(slower_layers(&table([0.5; 4]))).expect("a plan");
            let began = began.resolved.config.precision;
            let again = decide_for_resumed(run, &began, &Processor::Cpu).expect("a plan");
            assert_eq!(again.spec.fp8.slower.len(), 4);
        }
    }

    #[test]
    fn on_cores_nothing_is_measured_and_what_was_kept_is_read_whole() {
        let run = planned(&["precision.recipe=fp8-block"]);
        let spec = run.spec.clone();
        assert!(is_undecided(&run));
        let decide = decide(run, &Processor::Cpu).expect("a plan");
        assert_eq!((decide.spec, decide.resolved.config.precision.skip_slower), (spec, None));
        let speeds = table([1.0, 1.25, 0.1, 3.0]);
        assert_eq!(layers(&line(&speeds)), Some(speeds));
        assert_eq!(layers("[{\"layer\": \"attn"), None);
    }
}
