//! Attention within documents by the kernels for Hopper, against its definition in f64 from the same bf16
//! operands: documents of one token, documents that end around the ends of tiles, and random cuts. One
//! document gives the bits of whole sequences. Without a Hopper GPU the tests count as ignored.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use std::cmp::Ordering;
use std::sync::Arc;
use xtrain_cuda::{Arch, Gpu};
use xtrain_ops::attention::{Attention, AttentionGrad};
use xtrain_ops::registry::cuda_kernels;
use xtrain_program::{Code, Program, Tracer};
use xtrain_runtime::{Checks, CudaEngine, Engine, Part};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

const POISONED: Checks = Checks { numerics: false, poison: true };

/// Lengths of documents, in tokens, over the sequences one after the other.
#[derive(Clone, Copy, Debug)]
enum Lengths {
    One,
    /// Tiles have 64, 128 and 192 rows.
    AroundTileEnds,
    /// From 1 to 257, drawn.
    Random,
    /// Now a few tokens, now several tiles.
    ShortAndLong,
    Whole,
}

impl Lengths {
    const ALL: [(Lengths, &str); 5] = [
        (Lengths::One, "one_token"),
        (Lengths::AroundTileEnds, "around_tile_ends"),
        (Lengths::Random, "random_lengths"),
        (Lengths::ShortAndLong, "short_and_long"),
        (Lengths::Whole, "a_sequence"),
    ];

    /// The length of the `n`-th document, before the end of a sequence cuts it.
    fn of(self, n: usize, seq_len: usize) -> usize {
        let cycle = |lengths: &[usize]| lengths[n % lengths.len()];
        match self {
            Lengths::One => 1,
            Lengths::AroundTileEnds => cycle(&[63, 2, 62, 1, 129, 64, 127, 65, 191, 193, 128, 192, 257]),
            Lengths::Random => 1 + Philox::new(common::seed(), 1, 0).word(n as u64) as usize % 257,
            Lengths::ShortAndLong => cycle(&[3, 290, 1, 2, 140, 40, 400]),
            Lengths::Whole => seq_len,
        }
    }

    /// For each token, the index in its sequence of the first token of its document.
    fn starts(self, sequences: usize, seq_len: usize) -> Vec<usize> {
        let (mut starts, mut n) = (Vec::new(), 0);
        for _ in 0..sequences {
            let mut start = 0;
            while start < seq_len {
                let end = (start + self.of(n, seq_len)).min(seq_len);
                starts.extend(std::iter::repeat_n(start, end - start));
                (start, n) = (end, n + 1);
            }
        }
        starts
    }
}

/// Operands of attention and of its gradient.
struct Case {
    op: Attention,
    qkv: HostTensor,
    d_o: HostTensor,
    starts: Vec<usize>,
}

/// o, the log-sum-exp, and dqkv.
type Outputs = [HostTensor; 3];

impl Case {
    fn new(sequences: usize, op: Attention, lengths: Lengths) -> Case {
        let (tokens, width) = (sequences * op.seq_len, op.heads * op.head_dim);
        let qkv = normal([tokens, width + 2 * op.kv_heads * op.head_dim], 0);
        Case { op, qkv, d_o: normal([tokens, width], 1), starts: lengths.starts(sequences, op.seq_len) }
    }

    /// Outputs of so many runs, with poisoned outputs and workspaces.
    fn outputs(&self, within_documents: bool, runs: usize) -> Result<Vec<Outputs>, Failed> {
        let starts: Vec<f64> = self.starts.iter().map(|&start| start as f64).collect();
        let starts = HostTensor::from_f64(TensorType::new(DType::I32, [starts.len()]), &starts);
        let mut inputs = vec![("qkv", &self.qkv), ("d_o", &self.d_o)];
        inputs.extend(within_documents.then_some(("doc_start", &starts)));
        let (program, types) = self.program(&inputs);
        let gpu = Gpu::open(0)?.preferring(&["hopper"]);
        let mut engine = CudaEngine::new(Arc::new(cuda_kernels()), gpu)?;
        engine.set_checks(POISONED);
        let id = engine.load(program)?;
        let mut all = Vec::new();
        for _ in 0..runs {
            for (name, tensor) in &inputs {
                engine.write_input(id, name, tensor.bytes())?;
            }
            engine.run(id, Part::First)?;
            let outputs = engine.outputs(id)?;
            let mut tensors = types.map(HostTensor::zeros);
            for (tensor, name) in tensors.iter_mut().zip(["o", "lse", "dqkv"]) {
                tensor.bytes_mut().copy_from_slice(outputs.get(name)?);
            }
            all.push(tensors);
        }
        Ok(all)
    }

    /// Attention, then its gradient.
    fn program(&self, inputs: &[(&str, &HostTensor)]) -> (Program, [TensorType; 3]) {
        let mut tracer = Tracer::default();
        let ids: Vec<_> = inputs.iter().map(|(name, tensor)| tracer.input(name, tensor.ty())).collect();
        let (qkv, d_o, starts) = (ids[0], ids[1], ids.get(2).copied());
        let code = Code::Plain(Arc::new(self.op));
        let operands: Vec<_> = [qkv].into_iter().chain(starts).collect();
        let forward = tracer.site("attention").apply_code(code, &operands).expect("traced");
        let code = Code::Plain(Arc::new(AttentionGrad(self.op)));
        let operands: Vec<_> = [d_o, qkv, forward[0], forward[1]].into_iter().chain(starts).collect();
        let backward = tracer.site("gradient").apply_code(code, &operands).expect("traced");
        let outputs = [forward[0], forward[1], backward[0]];
        let types = outputs.map(|output| tracer.ty(output));
        for (name, output) in ["o", "lse", "dqkv"].into_iter().zip(outputs) {
            tracer.output(name, output);
        }
        (tracer.finish(), types)
    }

    /// Outputs by the definition, one query at a time.
    fn reference(&self) -> [Vec<f64>; 3] {
        let Attention { seq_len, heads, kv_heads, head_dim: e, .. } = self.op;
        let (qkv, d_o) = (self.qkv.to_f64(), self.d_o.to_f64());
        let (width, tokens) = ((heads + 2 * kv_heads) * e, self.starts.len());
        let mut o = vec![0.0; tokens * heads * e];
        let mut lse = vec![0.0; tokens * heads];
        let mut dqkv = vec![0.0; qkv.len()];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let scale = 1.0 / (e as f64).sqrt();
        for token in 0..tokens {
            let (sequence, t) = (token / seq_len, token % seq_len);
            let seen: Vec<usize> = (self.starts[token]..=t).map(|s| sequence * seq_len + s).collect();
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let q = token * width + head * e;
                let k = |s: usize| s * width + (heads + kv_head) * e;
                let v = |s: usize| k(s) + kv_heads * e;
                let at = (token * heads + head) * e;
                let scores: Vec<f64> =
                    seen.iter().map(|&s| scale * dot(&qkv[q..][..e], &qkv[k(s)..][..e])).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum = most + scores.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
                lse[(sequence * heads + head) * seq_len + t] = sum;
                let p: Vec<f64> = scores.iter().map(|x| (x - sum).exp()).collect();
                for (p, &s) in p.iter().zip(&seen) {
                    (0..e).for_each(|j| o[at + j] += p * qkv[v(s) + j]);
                }
                let dp: Vec<f64> = seen.iter().map(|&s| dot(&d_o[at..][..e], &qkv[v(s)..][..e])).collect();
                let mean = dot(&p, &dp);
                for ((p, dp), &s) in p.iter().zip(&dp).zip(&seen) {
                    let ds = p * (dp - mean) * scale;
                    for j in 0..e {
                        dqkv[q + j] += ds * qkv[k(s) + j];
                        dqkv[k(s) + j] += ds * qkv[q + j];
                        dqkv[v(s) + j] += p * d_o[at + j];
                    }
                }
            }
        }
        [o, lse, dqkv]
    }
}

/// Normal bf16 numbers.
fn normal(shape: [usize; 2], n: u32) -> HostTensor {
    let mut x = vec![0.0f32; shape.iter().product()];
    Philox::new(common::seed(), 0, n).fill_normal(1.0, &mut x);
    let ty = TensorType::new(DType::BF16, shape);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

/// The shape for heads of this width: several tiles of queries and of keys, and ends within tiles.
fn shape(head_dim: usize, grouped: bool) -> (usize, Attention) {
    let (heads, kv_heads) = if grouped { (2, 1) } else { (1, 1) };
    let op = |seq_len| Attention { seq_len, heads, kv_heads, head_dim, scale: None, deterministic: true };
    if grouped { (1, op(470)) } else { (2, op(333)) }
}

/// Compares outputs within documents with the definition, and runs with each other.
fn check(head_dim: usize, grouped: bool, lengths: Lengths) -> Result<(), Failed> {
    let (sequences, op) = shape(head_dim, grouped);
    let case = Case::new(sequences, op, lengths);
    let what = format!("{op:?}, documents of {lengths:?}, XTRAIN_TEST_SEED={}", common::seed());
    let runs = case.outputs(true, 2)?;
    let bars = [6e-3, 1e-6, 6e-3];
    for (((found, expected), bar), name) in
        runs[0].iter().zip(case.reference()).zip(bars).zip(["o", "lse", "dqkv"])
    {
        let found = found.to_f64();
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let size = norm(&mut expected.iter().copied());
        let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / size;
        let rms = size / (expected.len() as f64).sqrt();
        // In 40 runs of each case no element was off by more than 0.7 of this. The largest errors are those
        // of gradients, and come from delta, the sum of do and the rounded o.
        let wrong = found.iter().zip(&expected).position(|(a, b)| {
            let bar = 0.04 * (b.abs() + 2.0 * rms);
            // Not a number is wrong, too.
            !matches!((a - b).abs().partial_cmp(&bar), Some(Ordering::Less))
        });
        if let Some(i) = wrong {
            let (a, b) = (found[i], expected[i]);
            return Err(format!("{what}: element {i} of {name} is {a} instead of {b}").into());
        }
        if error > bar {
            return Err(format!("{what}: {name} is off by {error:e}").into());
        }
    }
    is_same(&what, &runs[0], &runs[1])?;
    // The gradients of grouped heads of 64 columns are added in another order in whole sequences.
    if matches!(lengths, Lengths::Whole) && !grouped {
        is_same(&format!("{what}: without documents"), &runs[0], &case.outputs(false, 1)?[0])?;
    }
    Ok(())
}

fn is_same(what: &str, a: &Outputs, b: &Outputs) -> Result<(), Failed> {
    match a.iter().zip(b).position(|(a, b)| a.bytes() != b.bytes()) {
        Some(n) => Err(format!("{what}: output {n} has other bits").into()),
        None => Ok(()),
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let gpu = common::gpu();
    let is_hopper = gpu.as_ref().is_some_and(|gpu| gpu.info().arch == Arch::SM90);
    let mut tests = Vec::new();
    for head_dim in [64, 128] {
        for (grouped, heads) in [(false, "heads"), (true, "grouped_heads")] {
            for (lengths, of) in Lengths::ALL {
                let name = format!("documents_of_{of}_{heads}_{head_dim}");
                let test = Trial::test(name, move || check(head_dim, grouped, lengths));
                tests.push(test.with_ignored_flag(!is_hopper));
            }
        }
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(gpu);
    conclusion.exit();
}
