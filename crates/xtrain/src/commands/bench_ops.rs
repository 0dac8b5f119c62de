//! `xtrain bench gemm` and `xtrain bench attention`.

use crate::cli::{BenchAttentionArgs, BenchGemmArgs, OpBenchArgs};
use crate::failure::Failure;
use crate::terminal;
use serde::Serialize;
use xtrain_config::Parsed;
use xtrain_lab::bench::{self, AttentionShape, GemmShape, OpBenchOptions, OpRates, OpSpeeds};
use xtrain_program::WriteMode;
use xtrain_report::metrics::format;
use xtrain_step::engine::Target;
use xtrain_train::run_file;

/// `xtrain bench gemm`.
pub(crate) fn gemm(args: &BenchGemmArgs) -> Result<(), Failure> {
    let (parsed, options) = op_bench_options(&args.bench)?;
    let shapes = match (&parsed, args.m, args.n, args.k) {
        (Some(parsed), ..) => bench::gemms_of(parsed)?,
        (None, Some(m), Some(n), Some(k)) => match args.experts {
            Some(experts) => {
                let top_k = args.per_token.unwrap_or((experts / 4).clamp(1, 8));
                if top_k > experts {
                    return Err(Failure::user(format!(
                        "--per-token {top_k}: a token has at most all of --experts {experts}"
                    )));
                }
                bench::expert_gemms([m, n, k], experts, top_k, args.capacity)
            }
            None => vec![GemmShape { site: String::new(), m, n, k, experts: None }],
        },
        _ => bench::common_gemms(Target::for_device(options.device)),
    };
    let gradient = if args.overwrite { WriteMode::Assign } else { WriteMode::Add };
    let speeds = bench::gemms(&shapes, gradient, options)?;
    let wide = terminal::column("site", speeds.rows.iter().map(|row| row.site.as_str()));
    let columns = |row: &bench::GemmSpeed| {
        format!("{:<wide$}{:<8}{:>8}{:>8}{:>8}", row.site, row.role, row.m, row.n, row.k)
    };
    let head = format!("{:<wide$}{:<8}{:>8}{:>8}{:>8}", "site", "role", "m", "n", "k");
    show(&speeds, args.bench.json, &head, columns, |row| row.rates)
}

/// `xtrain bench attention`.
pub(crate) fn attention(args: &BenchAttentionArgs) -> Result<(), Failure> {
    let (parsed, options) = op_bench_options(&args.bench)?;
    let shape = match &parsed {
        Some(parsed) => bench::attention_of(parsed)?,
        None => {
            let common = bench::common_attention(Target::for_device(options.device));
            let kv_heads = args.kv_heads.or(args.heads).unwrap_or(common.kv_heads);
            AttentionShape {
                batch: args.batch.unwrap_or(common.batch),
                seq_len: args.seq_len.unwrap_or(common.seq_len),
                heads: args.heads.unwrap_or(common.heads),
                kv_heads,
                head_dim: args.head_dim.unwrap_or(common.head_dim),
            }
        }
    };
    if !shape.heads.is_multiple_of(shape.kv_heads) {
        return Err(Failure::user(format!(
            "{} query heads do not divide among {} key/value heads; give --heads a multiple of --kv-heads",
            shape.heads, shape.kv_heads
        )));
    }
    let speeds = bench::attention(shape, args.document_tokens, options)?;
    let columns = |row: &bench::AttentionSpeed| {
        let AttentionShape { batch, seq_len, heads, kv_heads, head_dim } = row.shape;
        let shape = format!("{batch} x {seq_len}, {heads}/{kv_heads} x {head_dim}");
        let documents = row.document_tokens.map_or("-".to_owned(), |mean| format!("{mean:.0}"));
        let order = if row.deterministic { "one" } else { "any" };
        format!("{:<16}{:<7}{:>10}  {:<26}", row.op, order, documents, shape)
    };
    let head = format!("{:<16}{:<7}{:>10}  {:<26}", "op", "order", "documents", "sequences, heads");
    show(&speeds, args.bench.json, &head, columns, |row| row.rates)
}

/// The run file, if one is named, and the options of the measurement.
fn op_bench_options(args: &OpBenchArgs) -> Result<(Option<Parsed>, OpBenchOptions), Failure> {
    let parsed = args.file.as_ref().map(|file| run_file::load(file, &args.set)).transpose()?;
    let (device, recipe, threads) = match &parsed {
        Some(Parsed { config, .. }) => {
            let threads = if args.cpu.threads > 0 { args.cpu.threads } else { config.train.threads };
            (config.train.device, config.precision.recipe, threads)
        }
        None => (args.device, args.precision, args.cpu.threads),
    };
    terminal::use_threads(threads)?;
    Ok((parsed, OpBenchOptions { device, recipe, repeats: args.repeats, runs: args.runs }))
}

fn show<Row: Serialize>(
    speeds: &OpSpeeds<Row>,
    json: bool,
    head: &str,
    columns: impl Fn(&Row) -> String,
    rates: impl Fn(&Row) -> OpRates,
) -> Result<(), Failure> {
    if json {
        return terminal::print_json(speeds).map(|_| ());
    }
    let ceiling = speeds.ceiling;
    let mut out = format!(
        "{}, {}: at best {} TFLOP/s ({}^3), {} GB/s (a copy)\n{head}{:>11}{:>10}{:>7}{:>9}{:>7}\n",
        speeds.device,
        speeds.precision,
        format::significant(ceiling.tflops),
        ceiling.product,
        format::significant(ceiling.gigabytes_per_second),
        "us",
        "TFLOP/s",
        "%",
        "GB/s",
        "%"
    );
    for row in &speeds.rows {
        let OpRates { seconds, tflops, gigabytes_per_second, of_product, of_copy } = rates(row);
        out.push_str(&format!(
            "{}{:>11.1}{:>10}{:>7.1}{:>9}{:>7.1}\n",
            columns(row),
            seconds * 1e6,
            format::significant(tflops),
            100.0 * of_product,
            format::significant(gigabytes_per_second),
            100.0 * of_copy
        ));
    }
    terminal::print(&out).map(|_| ())
}
