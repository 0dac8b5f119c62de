//! Samples of [`SumOwners`] and [`SelectOwner`].

use super::{SelectOwner, SumOwners};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

/// Sizes of an exchange: tokens with `top_k` experts each of `ranks * experts`; each fifth token is padding.
#[derive(Clone, Copy)]
struct Exchange {
    ranks: usize,
    experts: usize,
    tokens: usize,
    top_k: usize,
    width: usize,
}

impl Exchange {
    const fn new([ranks, experts]: [usize; 2], [tokens, top_k, width]: [usize; 3]) -> Exchange {
        Exchange { ranks, experts, tokens, top_k, width }
    }

    fn ids(self) -> SampleInput {
        let Exchange { ranks, experts, tokens, top_k, .. } = self;
        let id = |n: usize| (n / top_k * (n / top_k + 3) + n % top_k) % (ranks * experts);
        let ids = (0..tokens * top_k).map(|n| if n / top_k % 5 == 3 { -1 } else { id(n) as i32 });
        SampleInput::integers([tokens, top_k], ids)
    }

    /// The tensors that ranks have sent: NaN for tokens without an expert there.
    fn sent(self) -> SampleInput {
        let Exchange { ranks, experts, tokens, top_k, width } = self;
        let Fill::Values(ids) = self.ids().fill else { unreachable!("ids are given") };
        let value = move |n: usize| {
            let (rank, token) = (n / width / tokens, n / width % tokens);
            let owns =
                ids[token * top_k..][..top_k].iter().any(|&id| id >= 0.0 && id as usize / experts == rank);
            // Also -0, to which nothing may be added.
            if owns { (n * 37 % 64) as f64 / 8.0 * [-1.0, 1.0][n / 64 % 2] } else { f64::NAN }
        };
        SampleInput::activation([ranks, tokens, width]).fill(Fill::each(value)).computed()
    }

    fn shared(self) -> SampleInput {
        SampleInput::activation([self.tokens, self.width])
    }

    fn sum(self) -> Sample {
        Sample::plain(SumOwners { experts: self.experts, out: None, like: false }, [self.sent(), self.ids()])
    }

    /// Also a shared expert's output, in bf16.
    fn sum_in_bf16(self) -> Sample {
        let op = SumOwners { experts: self.experts, out: None, like: false };
        let shared = self.shared().in_format(DType::BF16);
        Sample::plain(op, [self.sent(), self.ids(), shared])
    }

    fn select(self) -> Sample {
        let Exchange { ranks, experts, tokens, top_k, .. } = self;
        let x = SampleInput::activation([ranks, tokens, top_k]);
        Sample::plain(SelectOwner { experts }, [x, self.ids()])
    }
}

const SMALL: [Exchange; 4] = [
    Exchange::new([4, 2], [7, 2, 5]),
    Exchange::new([1, 8], [6, 3, 8]),
    Exchange::new([3, 5], [11, 8, 1]),
    Exchange::new([11, 3], [5, 4, 3]),
];
const ON_GPU: [Exchange; 6] = [
    Exchange::new([8, 16], [70, 8, 264]),
    Exchange::new([2, 64], [33, 8, 2052]),
    Exchange::new([5, 3], [40, 2, 1031]),
    Exchange::new([64, 2], [50, 40, 40]),
    Exchange::new([37, 1], [25, 6, 33]),
    Exchange::new([9, 4], [25, 36, 16]),
];

impl Sampled for SumOwners {
    fn samples() -> Vec<Sample> {
        let [first, second, third, many] = SMALL;
        let f32 = SumOwners { experts: first.experts, out: Some(DType::F32), like: false };
        let bf16 = SumOwners { experts: second.experts, out: Some(DType::BF16), like: false };
        vec![
            first.sum(),
            second.sum(),
            third.sum_in_bf16(),
            many.sum(),
            Sample::plain(f32, [first.sent(), first.ids()]),
            Sample::plain(bf16, [second.sent(), second.ids()]),
            Sample::plain(
                SumOwners { experts: third.experts, out: None, like: true },
                [third.sent(), third.ids(), third.shared().in_format(DType::BF16)],
            ),
        ]
    }

    fn large() -> Sample {
        Exchange::new([4, 4], [700, 3, 40]).sum_in_bf16()
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        ON_GPU.into_iter().flat_map(|shape| [shape.sum(), shape.sum_in_bf16()]).collect()
    }
}

impl Sampled for SelectOwner {
    fn samples() -> Vec<Sample> {
        SMALL.map(Exchange::select).into()
    }

    fn large() -> Sample {
        Exchange::new([4, 4], [3000, 8, 1]).select()
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        ON_GPU.map(Exchange::select).into()
    }
}
