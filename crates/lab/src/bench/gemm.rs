//! Speed of the GEMMs of linear layers.

use super::op_bench::{OpBench, OpBenchOptions, OpRates, OpSpeeds};
use super::operands::{linear_forward, operand, traced};
use super::step::Routing;
use serde::Serialize;
use xtrain_config::Parsed;
use xtrain_model::{EXPERTS, Numerics, Recipe};
use xtrain_ops::dispatch::Dispatch;
use xtrain_ops::grouped_linear::{GroupedDgrad, GroupedLinear, GroupedWgrad};
use xtrain_ops::grouped_scaled_matmul::GroupedScaledMatmul;
use xtrain_ops::groups::Groups;
use xtrain_ops::linear::{LinearDgrad, LinearWgrad};
use xtrain_ops::scaled_matmul::ScaledMatmul;
use xtrain_planner::estimate::OpWork;
use xtrain_program::quantize::Candidate;
use xtrain_program::{LinearGemm, Origin, Program, Role, Stage, Tail, WriteMode};
use xtrain_step::engine::{Processor, Target};
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::{DType, TILE, TensorType};
use xtrain_train::error::RunError;
use xtrain_train::spec::plan_on;

/// The GEMMs of a linear layer: m rows, from k to n columns.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmShape {
    /// Place in a model, or experts; empty if no model was named.
    pub site: String,
    /// Rows: tokens, or with experts their copies, `top_k` of each.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Columns of the input.
    pub k: usize,
    /// The experts that share the tokens; None for a dense layer.
    pub experts: Option<ExpertRows>,
}

/// How tokens are distributed among experts, each of which has a weight of n by k.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRows {
    /// Number of experts.
    pub count: usize,
    /// Experts of a token, at most `count`. Tokens have so many rows each.
    pub top_k: usize,
    /// Shares of the experts.
    pub routing: Routing,
    /// Fewest rows of the ragged tensors; None for as many as any routing needs.
    pub capacity: Option<usize>,
}

impl ExpertRows {
    /// Rows of the ragged tensors, of which experts have `live`.
    fn rows(self, live: usize) -> usize {
        let needed = Dispatch { experts: self.count, align: TILE }.capacity(live);
        needed.max(self.capacity.unwrap_or(0).next_multiple_of(TILE))
    }

    /// The first row of each expert and the end of the last one, for `rows` copies of tokens.
    fn starts(self, rows: usize) -> Vec<usize> {
        let shares = self.routing.fixed().shares(self.count, self.top_k);
        let (mut starts, mut sum, mut before) = (vec![0], 0.0, 0);
        for (e, share) in shares.into_iter().enumerate() {
            sum += share / self.top_k as f64;
            // Sums of equal shares are whole numbers of rows but for their rounding.
            let upto = if e + 1 == self.count { rows } else { (rows as f64 * sum + 1e-6) as usize };
            starts.push(starts[e] + (upto - before).next_multiple_of(TILE));
            before = upto;
        }
        starts
    }
}

/// Speed of one GEMM of a linear layer.
#[derive(Clone, Debug, Serialize)]
pub struct GemmSpeed {
    /// Place in a model, or experts; empty if no model was named. It says "in bf16" of a GEMM that has no
    /// operands in FP8 under a recipe in FP8.
    pub site: String,
    /// fprop, dgrad or wgrad, whose gradient is in fp32.
    pub role: String,
    /// True for a wgrad that adds to the gradient.
    pub adds: bool,
    /// Rows: tokens, or with experts their copies, `top_k` of each.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Columns of the input.
    pub k: usize,
    /// Rows of the tensors: `m`, and with experts those that none has.
    pub capacity: usize,
    /// Its rates.
    #[serde(flatten)]
    pub rates: OpRates,
}

/// Measures the three GEMMs of each shape, with this mode of wgrad's gradient.
pub fn gemms(
    shapes: &[GemmShape],
    gradient: WriteMode,
    options: OpBenchOptions,
) -> Result<OpSpeeds<GemmSpeed>, RunError> {
    let bench = OpBench::new(options)?;
    let mut rows = Vec::new();
    for GemmShape { site, m, n, k, experts } in shapes {
        let capacity = experts.map_or(*m, |experts| experts.rows(*m));
        let starts = experts.map(|experts| experts.starts(*m).into_iter().map(|row| row as i32).collect());
        let inputs: Vec<_> = starts.into_iter().map(|starts| (STARTS, starts)).collect();
        let scaled = scaled(*m, *n, *k, *experts, bench.recipe)?;
        let site = match (bench.recipe.is_fp8() && scaled.is_none(), site.as_str()) {
            (false, _) => site.clone(),
            (true, "") => "in bf16".to_owned(),
            (true, _) => format!("{site}, in bf16"),
        };
        let mut program = match (scaled, experts) {
            (Some(program), _) => program,
            (None, Some(experts)) => grouped(*m, *n, *k, *experts, bench.dtype())?,
            (None, None) => program(*m, *n, *k, bench.dtype())?,
        };
        for instance in program.instances.iter_mut().filter(|i| i.origin.role == Role::Wgrad) {
            instance.outputs.iter_mut().for_each(|output| output.mode = gradient);
        }
        let works: Vec<(&str, OpWork)> = program
            .instances
            .iter()
            .map(|i| (i.origin.role.name(), OpWork::from_instance(&program, i)))
            .collect();
        let seconds = bench.seconds(program.clone(), &inputs)?;
        for ((role, work), seconds) in works.into_iter().zip(seconds) {
            let rates = OpRates::new(seconds, work.flops, work.bytes, bench.ceiling);
            let adds = role == Role::Wgrad.name() && gradient.accumulates(true);
            let (site, role) = (site.clone(), role.to_owned());
            rows.push(GemmSpeed { site, role, adds, m: *m, n: *n, k: *k, capacity, rates });
        }
    }
    Ok(bench.speeds(rows))
}

/// The shapes to measure by default: those of models of some billion parameters, or on the CPU small ones.
pub fn common_gemms(target: Target) -> Vec<GemmShape> {
    let of = |sizes: &[[usize; 3]]| {
        sizes.iter().map(|&[m, n, k]| GemmShape { site: String::new(), m, n, k, experts: None }).collect()
    };
    match target {
        Target::Cpu => of(&[[256, 256, 256]]),
        Target::Cuda => {
            of(&[[8192, 4096, 4096], [8192, 28672, 4096], [8192, 4096, 14336], [16384, 2048, 2048]])
        }
    }
}

/// Linear layers of experts that share m rows equally and by Zipf's law, after a dense layer of as many rows.
/// Rows are copies of tokens, `top_k` of each token. Ragged tensors have `capacity` rows, or more if some
/// routing needs them.
pub fn expert_gemms(
    [m, n, k]: [usize; 3],
    experts: usize,
    top_k: usize,
    capacity: Option<usize>,
) -> Vec<GemmShape> {
    let of_experts = |routing: Routing, name: &str| {
        let experts = ExpertRows { count: experts, top_k, routing, capacity };
        let room = capacity.map_or(String::new(), |_| format!(" in {} rows", experts.rows(m)));
        GemmShape { site: format!("{} experts{room}{name}", experts.count), m, n, k, experts: Some(experts) }
    };
    vec![
        GemmShape { site: "dense".into(), m, n, k, experts: None },
        of_experts(Routing::Uniform, ""),
        of_experts(Routing::Zipf, ", Zipf"),
    ]
}

/// The distinct shapes of a run file's linear layers. Experts share the tokens equally; of the head, one
/// chunk of tokens counts.
pub fn gemms_of(parsed: &Parsed) -> Result<Vec<GemmShape>, RunError> {
    let spec = plan_on(parsed, Processor::for_config(&parsed.config)?.target())?.spec;
    Ok(linears(&spec)?)
}

fn linears(spec: &TrainingSpec) -> Result<Vec<GemmShape>, LearnError> {
    // Shapes do not depend on the recipe.
    let program = programs::training(&spec.computed_in(Recipe::Bf16))?;
    // All blocks with experts have the same mixture.
    let experts = spec.model.layers.iter().find_map(|layer| layer.feed_forward.experts());
    let experts = experts.map(|e| {
        let (top_k, routing) = (e.router.top_k, Routing::Uniform);
        ExpertRows { count: e.count, top_k, routing, capacity: None }
    });
    let mut shapes: Vec<GemmShape> = Vec::new();
    for instance in program.instances.iter().filter(|i| i.origin.stage == Stage::Forward) {
        let (chunk, experts) = match instance.code.op().name() {
            "linear" => (usize::MAX, None),
            // Its ragged input has room for more rows than tokens have copies.
            "grouped_linear" => (spec.batch.tokens() * experts.map_or(1, |e| e.top_k), experts),
            name if name.starts_with("linear_cross_entropy") => (spec.loss.chunk_tokens, None),
            _ => continue,
        };
        let types = program.input_types(instance);
        let (x, w) = (types[0].shape, types[1].shape);
        let (site, m) = (instance.origin.site.to_string(), x[0].min(chunk));
        let n = w[0] / experts.map_or(1, |experts| experts.count);
        let shape = GemmShape { site, m, n, k: w[1], experts };
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    Ok(shapes)
}

/// fprop, dgrad and wgrad of a linear layer.
fn program(m: usize, n: usize, k: usize, dtype: DType) -> Result<Program, LearnError> {
    let (program, (x, w)) = linear_forward(m, n, k, dtype)?;
    let (program, dy) = traced(program, Stage::Backward, Role::Dgrad, |t| {
        let dy = operand(t, "dy", dtype, [m, n]);
        t.emit(LinearDgrad, &[dy, w])?;
        Ok(dy)
    })?;
    let (program, ()) = traced(program, Stage::Backward, Role::Wgrad, |t| {
        let dw = operand(t, "dw", DType::F32, [n, k]);
        t.emit_into(LinearWgrad { out: DType::F32 }, &[dy, x], &[Some(dw)])?;
        Ok(())
    })?;
    Ok(program)
}

/// The input with the first rows of experts.
const STARTS: &str = "starts";

/// fprop, dgrad and wgrad of the linear layers of experts that share m tokens.
fn grouped(m: usize, n: usize, k: usize, of: ExpertRows, dtype: DType) -> Result<Program, LearnError> {
    let (experts, rows) = (of.count, of.rows(m));
    let (groups, out) = (Groups { experts, align: TILE, live_rows: m }, DType::F32);
    let (program, [x, w, starts]) = traced(Program::default(), Stage::Forward, Role::Forward, |t| {
        let starts = t.input(STARTS, TensorType::new(DType::I32, [experts + 1]));
        let (x, w) = (operand(t, "x", dtype, [rows, k]), operand(t, "w", dtype, [experts * n, k]));
        t.apply(GroupedLinear::new(groups), &[x, w, starts])?;
        Ok([x, w, starts])
    })?;
    let (program, dy) = traced(program, Stage::Backward, Role::Dgrad, |t| {
        let dy = operand(t, "dy", dtype, [rows, n]);
        t.emit(GroupedDgrad::new(groups), &[dy, w, starts])?;
        Ok(dy)
    })?;
    let (program, ()) = traced(program, Stage::Backward, Role::Wgrad, |t| {
        let dw = operand(t, "dw", out, [experts * n, k]);
        t.emit_into(GroupedWgrad { groups, out }, &[dy, x, starts], &[Some(dw)])?;
        Ok(())
    })?;
    Ok(program)
}

/// The three GEMMs of a linear layer, or of the layers of experts, on FP8 operands, which are cast elsewhere.
/// None if the recipe computes one of them in bf16.
fn scaled(
    m: usize,
    n: usize,
    k: usize,
    experts: Option<ExpertRows>,
    recipe: Recipe,
) -> Result<Option<Program>, LearnError> {
    let numerics = Numerics::from(recipe);
    let (site, count) = match experts {
        Some(experts) => (format!("{EXPERTS}gate_up_proj"), experts.count),
        None => (String::new(), 1),
    };
    let rows = experts.map_or(m, |experts| experts.rows(m));
    let (mut program, mut starts) = (Program::default(), None);
    for gemm in LinearGemm::ALL {
        let (stage, role, [a, b], d) = match gemm {
            LinearGemm::Fprop => (Stage::Forward, Role::Forward, [[rows, k], [count * n, k]], [rows, n]),
            LinearGemm::Dgrad => (Stage::Backward, Role::Dgrad, [[rows, n], [k, count * n]], [rows, k]),
            LinearGemm::Wgrad => (Stage::Backward, Role::Wgrad, [[n, rows], [k, rows]], [count * n, k]),
        };
        let origin = Origin { block: Some(0), site: site.as_str().into(), role, stage };
        let candidate = Candidate { origin: &origin, gemm, extents: gemm.extents(rows, n, k) };
        let Ok(format) = numerics.scaled_gemm(candidate, 1) else { return Ok(None) };
        let out = if gemm == LinearGemm::Wgrad { DType::F32 } else { DType::BF16 };
        let traced = traced(program, stage, role, |t| {
            let mut inputs = Vec::new();
            for (name, shape, cast) in [("a", a, format.operands[0]), ("b", b, format.operands[1])] {
                let scales = cast.scaling.shape(shape[0], shape[1]);
                inputs.push(operand(t, &format!("{name} {gemm:?}"), cast.format, shape));
                inputs.push(operand(t, &format!("scales of {name} {gemm:?}"), DType::F32, scales));
            }
            let into = (gemm == LinearGemm::Wgrad).then(|| operand(t, "dw", out, d));
            if experts.is_none() {
                return t.emit_into(ScaledMatmul::new(format, out, false), &inputs, &[into]);
            }
            let ty = TensorType::new(DType::I32, [count + 1]);
            inputs.push(*starts.get_or_insert_with(|| t.input(STARTS, ty)));
            let scaling = format.operands.map(|cast| cast.scaling);
            let groups = Groups { experts: count, align: TILE, live_rows: m };
            let op = GroupedScaledMatmul { gemm, groups, out, scaling, tail: Tail::Zeros };
            t.emit_into(op, &inputs, &[into])
        })?;
        program = traced.0;
    }
    Ok(Some(program))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use xtrain_config::{Config, Device};

    #[test]
    fn the_products_of_a_run_file_are_those_of_its_layers_each_once() {
        let text = "[model]\nfamily = 'llama'\ndim = 16\nlayers = 3\nheads = 4\nkv_heads = 2\nffn_dim = 24\nvocab_size = 300\n\
                    [data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 32\n\
                    [train]\nsteps = 1\nbatch_size = 4\nloss_chunk = 40\ndevice = 'cpu'\n";
        let shapes = |text: &str| -> Vec<(usize, usize, usize)> {
            let parsed =
                Config::parse::<&str>(Path::new("run.toml"), text.as_bytes(), &[]).expect("a run file");
            gemms_of(&parsed).expect("planned").iter().map(|s| (s.m, s.n, s.k)).collect()
        };
        let expected = [(128, 32, 16), (128, 16, 16), (128, 48, 16), (128, 16, 24), (40, 300, 16)];
        assert_eq!(shapes(text), expected);
        // Shapes do not depend on the recipe.
        assert_eq!(shapes(&format!("{text}[precision]\nrecipe = 'fp8-row'\n")), expected);
        let head = text.replace("300", "304") + "[precision]\nrecipe = 'fp8-block'\nhead = 'fp8'\n";
        assert_eq!(shapes(&head)[4], (40, 304, 16));
    }

    #[test]
    fn experts_share_all_tokens_equally_or_by_zipfs_law() {
        let starts =
            |routing, top_k, rows| ExpertRows { count: 4, top_k, routing, capacity: None }.starts(rows);
        assert_eq!(starts(Routing::Uniform, 1, 1024), [0, 256, 512, 768, 1024]);
        assert_eq!(starts(Routing::Uniform, 2, 1000), [0, 256, 512, 768, 1024]);
        // Shares of 12, 6, 4 and 3 of 25.
        assert_eq!(starts(Routing::Zipf, 1, 2500), [0, 1280, 1920, 2432, 2816]);
        assert_eq!(starts(Routing::Zipf, 1, 1), [0, 0, 0, 0, 128]);
        // The first expert has all 1000 tokens, the others 12, 8 and 6 of 13 times as many.
        assert_eq!(starts(Routing::Zipf, 3, 3000), [0, 1024, 2048, 2688, 3200]);
    }

    #[test]
    fn ragged_tensors_have_the_rows_that_are_asked_for() {
        let rows =
            |capacity| ExpertRows { count: 4, top_k: 1, routing: Routing::Uniform, capacity }.rows(1000);
        assert_eq!((rows(None), rows(Some(1408)), rows(Some(2000))), (1408, 1408, 2048));
    }

    #[test]
    fn products_are_on_fp8_operands_where_the_recipe_says_so() {
        let experts = Some(ExpertRows { count: 2, top_k: 1, routing: Routing::Uniform, capacity: Some(512) });
        let names = |n, experts, recipe| -> Option<Vec<&str>> {
            let program = scaled(256, n, 64, experts, recipe).expect("traced")?;
            Some(program.instances.iter().map(|instance| instance.code.op().name()).collect())
        };
        for recipe in [Recipe::Fp8Block, Recipe::Fp8Current] {
            assert_eq!(names(128, None, recipe), Some(vec!["scaled_matmul"; 3]));
            assert_eq!(names(128, experts, recipe), Some(vec!["grouped_scaled_matmul"; 3]));
            let options = OpBenchOptions { device: Device::Cpu, recipe: Some(recipe), repeats: 1, runs: 1 };
            let shape = GemmShape { site: "a".into(), m: 256, n: 128, k: 64, experts };
            for (gradient, adds) in [(WriteMode::Add, true), (WriteMode::Assign, false)] {
                let speeds = gemms(std::slice::from_ref(&shape), gradient, options).expect("measured");
                assert!(speeds.rows.iter().all(|row| row.rates.seconds > 0.0));
                assert_eq!(speeds.rows.iter().map(|row| row.adds).collect::<Vec<_>>(), [false, false, adds]);
            }
        }
        assert_eq!(names(128, experts, Recipe::Bf16), None);
        assert_eq!(names(64, experts, Recipe::Fp8Block), None, "blocks would cross experts");
    }

    #[test]
    fn each_product_of_a_layer_is_measured_against_the_ceiling() {
        let options = OpBenchOptions { device: Device::Cpu, recipe: None, repeats: 1, runs: 1 };
        let shape = GemmShape { site: "a".into(), m: 8, n: 16, k: 4, experts: None };
        let speeds = gemms(&[shape], WriteMode::Add, options).expect("measured");
        assert_eq!(speeds.precision, "fp32");
        assert!(speeds.ceiling.tflops > 0.0 && speeds.ceiling.gigabytes_per_second > 0.0);
        let roles: Vec<&str> = speeds.rows.iter().map(|row| row.role.as_str()).collect();
        assert_eq!(roles, ["fprop", "dgrad", "wgrad"]);
        for row in &speeds.rows {
            let OpRates { seconds, tflops, gigabytes_per_second, of_product, of_copy } = row.rates;
            assert!((tflops * seconds * 1e12 / 1024.0 - 1.0).abs() < 1e-9, "{row:?}");
            let bytes = 4.0 * (8 * 4 + 16 * 4 + 8 * 16) as f64;
            assert!((gigabytes_per_second * seconds * 1e9 / bytes - 1.0).abs() < 1e-9, "{row:?}");
            assert!((of_product * speeds.ceiling.tflops / tflops - 1.0).abs() < 1e-9);
            assert!(
                (of_copy * speeds.ceiling.gigabytes_per_second / gigabytes_per_second - 1.0).abs() < 1e-9
            );
        }
    }
}
