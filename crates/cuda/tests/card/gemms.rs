//! GEMMs of cuBLASLt, of the fallback kernel and of the block-scaled one against a plain loop.

use crate::{TestDevice, gpu_with_cache};
use libtest_mimic::{Failed, Trial};
use xtrain_cuda::{Arch, CudaError, DeviceMemory, Gemm, GemmChoice, GemmOperands, Graph, Work};
use xtrain_tensor::host::decode;
use xtrain_tensor::{DType, HostTensor, Philox, Scaling, TensorType};

/// A GEMM with operands on the GPU. Rows are a stride apart; the elements between them are `GAP`.
pub(crate) struct GemmCase<'a> {
    pub(crate) gemm: Gemm,
    device: &'a TestDevice,
    pub(crate) a: DeviceMemory,
    b: DeviceMemory,
    d: DeviceMemory,
    bias: Option<DeviceMemory>,
    /// Scales of FP8 operands.
    scales: Option<[DeviceMemory; 2]>,
    workspace: DeviceMemory,
    /// A, B, the initial D and the bias, as they lie in memory, FP8 numbers multiplied by their scales.
    host: [Vec<f64>; 4],
}

/// The value of elements between the rows of a matrix.
const GAP: f64 = -3.5;

impl<'a> GemmCase<'a> {
    pub(crate) fn new(device: &'a TestDevice, gemm: Gemm, bias: bool) -> Result<GemmCase<'a>, CudaError> {
        let seed =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let fill = |site: u32, dtype: DType, rows: usize, columns: usize, stride: usize| {
            let mut normal = vec![0.0f32; rows * columns];
            Philox::new(seed as u64, 0, site).fill_normal(1.0, &mut normal);
            let mut values = vec![GAP; rows * stride];
            for (to, from) in values.chunks_mut(stride).zip(normal.chunks(columns)) {
                to.iter_mut().zip(from).for_each(|(to, &from)| *to = from.into());
            }
            let tensor = HostTensor::from_f64(TensorType::new(dtype, [values.len()]), &values);
            let memory = DeviceMemory::new(&device.context, tensor.bytes().len())?;
            memory.all().write(tensor.bytes(), &device.stream)?;
            Ok::<_, CudaError>((memory, tensor.to_f64()))
        };
        let Gemm { m, n, k, a, b, d, .. } = gemm;
        let stored = |transposed, rows, columns| if transposed { (columns, rows) } else { (rows, columns) };
        let ((a_rows, a_columns), (b_rows, b_columns)) =
            (stored(a.transposed, m, k), stored(b.transposed, k, n));
        let (a_memory, mut a_host) = fill(0, a.dtype, a_rows, a_columns, a.stride)?;
        let (b_memory, mut b_host) = fill(1, b.dtype, b_rows, b_columns, b.stride)?;
        let scaled = |site, scaling: Scaling, rows: usize, stride: usize, host: &mut [f64]| {
            let [down, across] = scaling.shape(rows, k);
            let mut scales = vec![0.0f32; down * across];
            Philox::new(seed as u64, 0, site).fill_normal(1.0, &mut scales);
            scales.iter_mut().for_each(|scale| *scale = scale.abs() + 0.25);
            let ((high, wide), (below, beside)) = (scaling.region(rows, k), scaling.steps(rows, k));
            for (i, x) in host.iter_mut().enumerate().filter(|(i, _)| i % stride < k) {
                *x *= f64::from(scales[i / stride / high * below + i % stride / wide * beside]);
            }
            device.floats(&scales)
        };
        let scales = match (a.scaling, b.scaling) {
            (Some(of_a), Some(of_b)) => {
                Some([scaled(4, of_a, m, a.stride, &mut a_host)?, scaled(5, of_b, n, b.stride, &mut b_host)?])
            }
            _ => None,
        };
        let (d_memory, d_host) = fill(2, d, m, n, gemm.d_stride)?;
        let (bias_memory, bias_host) = fill(3, d, 1, n, n)?;
        // Choosing an algorithm runs the GEMM on a stream of its own.
        device.stream.synchronize()?;
        Ok(GemmCase {
            gemm,
            device,
            a: a_memory,
            b: b_memory,
            d: d_memory,
            bias: bias.then_some(bias_memory),
            scales,
            workspace: DeviceMemory::new(&device.context, Gemm::WORKSPACE_BYTES)?,
            host: [a_host, b_host, d_host, bias_host],
        })
    }

    pub(crate) fn operands(&self) -> GemmOperands {
        GemmOperands {
            a: self.a.pointer(),
            b: self.b.pointer(),
            d: self.d.pointer(),
            bias: self.bias.as_ref().map(DeviceMemory::pointer),
            scales: self.scales.as_ref().map(|scales| scales.each_ref().map(DeviceMemory::pointer)),
            workspace: self.workspace.pointer(),
        }
    }

    /// D, computed on the GPU from the initial D.
    fn run(&self, work: &Work) -> Result<Vec<f64>, CudaError> {
        let ty = TensorType::new(self.gemm.d, [self.host[2].len()]);
        self.d.all().write(HostTensor::from_f64(ty, &self.host[2]).bytes(), &self.device.stream)?;
        self.workspace.all().fill(0xFF, &self.device.stream)?;
        work.enqueue(&self.device.stream)?;
        Ok(decode(ty, &self.d.all().read(&self.device.stream)?))
    }

    /// D by a plain loop in f64, not rounded.
    fn expected(&self) -> Vec<f64> {
        let Gemm { m, n, k, a, b, .. } = self.gemm;
        let [a_host, b_host, d_host, bias] = &self.host;
        let at = |transposed: bool, stride: usize, row: usize, column: usize| match transposed {
            true => column * stride + row,
            false => row * stride + column,
        };
        let mut d_host = d_host.clone();
        for i in 0..m {
            for j in 0..n {
                let a_at = |p| a_host[at(a.transposed, a.stride, i, p)];
                let b_at = |p| b_host[at(b.transposed, b.stride, p, j)];
                let d = &mut d_host[i * self.gemm.d_stride + j];
                let held = if self.gemm.accumulate { *d } else { 0.0 };
                let bias = if self.bias.is_some() { bias[j] } else { 0.0 };
                *d = (0..k).map(|p| a_at(p) * b_at(p)).sum::<f64>() + held + bias;
            }
        }
        d_host
    }

    fn assert_near(&self, found: &[f64], expected: &[f64], by: &str) {
        let Gemm { m, n, d_stride, .. } = self.gemm;
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let inside = |x: &'_ [f64]| x.chunks(d_stride).flat_map(|row| row[..n].to_vec()).collect::<Vec<_>>();
        let (f, e) = (inside(found), inside(expected));
        assert_eq!((f.len(), e.len()), (m * n, m * n));
        // Sums near zero are no more exact than their terms.
        let size = norm(&mut e.iter().copied()).max(((m * n) as f64).sqrt());
        let error = norm(&mut f.iter().zip(&e).map(|(f, e)| f - e)) / size;
        // One rounding to bf16 costs at most 2^-8. Long f32 sums in another order differ more than short
        // ones.
        let bar = if self.gemm.k > 4096 { 1e-4 } else { 1e-5 };
        let bar = if self.gemm.d == DType::BF16 { bar + 2f64.powi(-8) } else { bar };
        // Tensor cores keep 14 bits of sums of 128 products.
        let bar = if self.scales.is_some() { bar + 1e-3 } else { bar };
        assert!(error <= bar, "{:?} by {by} is off by {error:e}", self.gemm);
        let between = found.chunks(d_stride).flat_map(|row| &row[n..]);
        assert!(between.copied().all(|x| x == GAP), "{:?} by {by} wrote between the rows", self.gemm);
    }
}

/// Element types of the operands and of D.
const GEMM_TYPES: [(DType, DType); 3] =
    [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)];

/// m, n and k.
const SHAPES: [[usize; 3]; 6] =
    [[1, 1, 1], [13, 5, 7], [1, 40, 33], [64, 128, 64], [33, 129, 70], [130, 200, 257]];

fn gemms_equal_a_plain_loop(
    device: &TestDevice,
    shape: [usize; 3],
    transposed: [bool; 2],
) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    for (dtype, d) in GEMM_TYPES {
        let plain = Gemm::new(shape, dtype, transposed, d);
        let gapped = plain.a_stride(plain.a.stride + 3).d_stride(plain.n.next_multiple_of(64));
        let cases = [(plain, false), (plain, true), (plain.accumulate(true), false), (gapped, false)];
        for (gemm, bias) in cases.into_iter().chain([(gapped.accumulate(true), true)]) {
            let case = GemmCase::new(device, gemm, bias)?;
            let expected = case.expected();
            let plan = gemm.plan(&gpu, &case.operands())?;
            case.assert_near(&case.run(&plan.work)?, &expected, &format!("{:?}", plan.choice));
            let own = gemm.fallback(&gpu, &case.operands())?;
            case.assert_near(&case.run(&own.work)?, &expected, "the fallback kernel");
        }
    }
    Ok(())
}

pub(crate) fn large_gemms_equal_the_fallback_kernel(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    // The GEMMs of a head with an odd vocabulary and its two gradients, and a sum so long that it is worth
    // splitting. The sizes keep the multiprocessors of an H100 busy, scaled to this GPU's.
    let of_device = |size: usize| size * gpu.info().multiprocessors as usize / 132;
    let (c, d, v) = (96, 768, of_device(5025) | 1);
    // The stride of logits in the workspace of the loss.
    let stride = v.next_multiple_of(64);
    for (dtype, out) in GEMM_TYPES {
        let logits = Gemm::new([c, v, d], dtype, [false, true], dtype).d_stride(stride);
        let dx = Gemm::new([c, d, v], dtype, [false, false], dtype).a_stride(stride);
        let dw = Gemm::new([v, d, c], dtype, [true, false], DType::F32).a_stride(stride).accumulate(true);
        let long = Gemm::new([72, 136, of_device(30_000)], dtype, [true, false], out);
        for gemm in [logits, dx, dw, long] {
            let case = GemmCase::new(device, gemm, false)?;
            let plan = gemm.plan(&gpu, &case.operands())?;
            assert_ne!(plan.choice, GemmChoice::Fallback, "{gemm}");
            let own = case.run(&gemm.fallback(&gpu, &case.operands())?.work)?;
            let found = case.run(&plan.work)?;
            // Both results are rounded.
            if gemm.d == DType::F32 {
                case.assert_near(&found, &own, "cuBLASLt");
            } else {
                let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                let off: Vec<f64> = found.iter().zip(&own).map(|(a, b)| a - b).collect();
                assert!(norm(&off) <= 1e-3 * norm(&own), "{gemm} is off by {}", norm(&off) / norm(&own));
            }
            assert!(case.run(&plan.work)? == found, "{gemm} differs from run to run");
        }
    }
    Ok(())
}

/// Sizes of block-scaled GEMMs, which end within tiles and clusters; the last ones have more tiles than an
/// H200 has multiprocessors.
const BLOCK_SCALED_SHAPES: [[usize; 3]; 5] =
    [[16, 16, 16], [256, 256, 128], [272, 400, 656], [48, 528, 1040], [2320, 4368, 16]];

/// Types of A and B.
const BLOCK_SCALED_TYPES: [[DType; 2]; 3] =
    [[DType::E4M3; 2], [DType::E5M2, DType::E4M3], [DType::E4M3, DType::E5M2]];

fn block_scaled_gemms_equal_a_plain_loop(
    device: &TestDevice,
    shape: [usize; 3],
    [a, b]: [DType; 2],
) -> Result<(), Failed> {
    if device.arch != Arch::SM90 {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    let is_small = gpu.info().multiprocessors < 100;
    let shape = if shape == BLOCK_SCALED_SHAPES[4] && is_small { [560, 1072, 16] } else { shape };
    // The emulated GPU is slow, and does not differ from run to run.
    let repetitions =
        if std::env::var("XTRAIN_TEST_SAMPLE").is_ok_and(|sample| sample == "1") { 0 } else { 3 };
    for (of_b, d) in [Scaling::Tile, Scaling::Block]
        .into_iter()
        .flat_map(|scaling| [DType::F32, DType::BF16].map(|d| (scaling, d)))
    {
        let plain = Gemm::scaled(shape, [(a, Scaling::Tile), (b, of_b)], d, false);
        let gapped = plain.a_stride(plain.a.stride + 16).d_stride(plain.n + 4);
        let all = [plain, gapped, plain.accumulate(true), gapped.accumulate(true)];
        for gemm in all.into_iter().filter(|gemm| d == DType::F32 || !gemm.accumulate) {
            let case = GemmCase::new(device, gemm, false)?;
            let Some(plan) = gemm.block_scaled(&gpu, &case.operands())? else {
                return Err(format!("{gemm} is not supported").into());
            };
            let found = case.run(&plan.work)?;
            case.assert_near(&found, &case.expected(), "the block-scaled kernel");
            for _ in 0..repetitions {
                assert!(case.run(&plan.work)? == found, "{gemm} differs from run to run");
            }
        }
    }
    Ok(())
}

pub(crate) fn a_captured_gemm_computes_the_same(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let gpu = gpu_with_cache(folder.path())?;
    let case =
        GemmCase::new(device, Gemm::new([70, 90, 4000], DType::BF16, [true, false], DType::F32), false)?;
    let plan = case.gemm.plan(&gpu, &case.operands())?;
    let found = case.run(&plan.work)?;
    let mut exec = Graph::record(&device.stream, || plan.work.enqueue(&device.stream))?.instantiate()?;
    for _ in 0..3 {
        case.d.all().fill(0xFF, &device.stream)?;
        case.workspace.all().fill(0xFF, &device.stream)?;
        exec.launch(&device.stream)?;
        let ty = TensorType::new(DType::F32, [found.len()]);
        assert!(decode(ty, &case.d.all().read(&device.stream)?) == found);
    }
    Ok(())
}

/// The trials of all sizes and types.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for [m, n, k] in SHAPES {
        for [a, b] in [[false, false], [false, true], [true, false], [true, true]] {
            let of = |transposed| if transposed { "t" } else { "n" };
            let name = format!("gemms_equal_a_plain_loop_{m}x{n}x{k}_{}{}", of(a), of(b));
            let test = move || gemms_equal_a_plain_loop(&TestDevice::new()?, [m, n, k], [a, b]);
            trials.push(Trial::test(name, test));
        }
    }
    for (shape, types) in
        BLOCK_SCALED_SHAPES.into_iter().flat_map(|shape| BLOCK_SCALED_TYPES.map(|of| (shape, of)))
    {
        let ([m, n, k], [a, b]) = (shape, types);
        let name = format!("block_scaled_gemms_equal_a_plain_loop_{m}x{n}x{k}_{a}_{b}");
        let test = move || block_scaled_gemms_equal_a_plain_loop(&TestDevice::new()?, shape, types);
        trials.push(Trial::test(name, test));
    }
    trials
}
