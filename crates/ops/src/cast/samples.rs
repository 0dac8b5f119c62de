//! Samples of [`Cast`].

use super::Cast;
use crate::samples::{Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for Cast {
    fn samples() -> Vec<Sample> {
        vec![
            Sample::plain(Cast { to: DType::BF16 }, [SampleInput::activation([5, 7])]),
            Sample::plain(Cast { to: DType::F32 }, [SampleInput::activation([3, 11]).in_format(DType::BF16)]),
        ]
    }

    fn large() -> Sample {
        Sample::plain(Cast { to: DType::BF16 }, [SampleInput::activation([300, 160])])
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |to, n| Sample::plain(Cast { to }, [SampleInput::activation([n]).computed()]);
        [1, 8, 4099, 1 << 20]
            .into_iter()
            .flat_map(|n| [DType::BF16, DType::F32].map(|to| sample(to, n)))
            .collect()
    }
}
