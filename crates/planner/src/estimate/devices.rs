//! The table of devices.
//!
//! The H200's figures are measured: `xtrain bench op` on the configurations of `benches/configs`, 2026-11-24,
//! and for GEMMs and attention the steps of `benches/results` until 2026-11-27
//! (docs/decisions/chosen-settings.md). The others follow from NVIDIA's data sheets and the fraction of the
//! peak that the H200 sustains, unless a comment says otherwise. Memory sizes are those that PyTorch prints.

use super::rates::{AttentionRates, GemmRates, Rates, ScoreSeconds};
use crate::error::PlanError;
use xtrain_cuda::Arch;
use xtrain_model::Recipe;
use xtrain_step::engine::check_recipe;
use xtrain_step::error::LearnError;

/// Edition of the table. It increases with every change, because chosen settings may change with it.
pub(super) const EDITION: u32 = 4;

/// A device of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceModel {
    /// Name; the driver's name of the device contains it.
    pub name: &'static str,
    /// Its architecture, which decides about the recipes that it runs.
    pub arch: Arch,
    /// Bytes of memory that the driver reports.
    pub memory_bytes: u64,
    /// Peak memory bandwidth in bytes per second.
    pub peak_bandwidth: f64,
    /// Bytes per second that a GPU sends to the others of its node in NCCL's collectives: over NVLink, or
    /// over PCI Express if it has none. Of the H200, fitted to times of 64 MiB and 1 GiB on 2 and 4 GPUs.
    pub nccl_bandwidth: f64,
    /// Bytes per second that a GPU copies to the memory of the others, if NVLink connects them. Of the H200,
    /// an all-gather of 1 GiB on 4 GPUs (docs/benchmarks.md); of others, as much more than through NCCL.
    pub copy_bandwidth: Option<f64>,
    /// Bytes per second that each GPU sends to other nodes through its NIC, in usual servers: 96% of its
    /// rate, as NCCL's authors expect of 400 Gbit/s (NVIDIA/nccl-tests, issues 267 and 290).
    pub nic_bandwidth: f64,
    /// Sustained rates.
    pub rates: Rates,
}

impl DeviceModel {
    /// The device of the table that a user means by a name such as `h100`.
    ///
    /// # Errors
    /// An unknown name.
    pub fn named(name: &str) -> Result<&'static DeviceModel, PlanError> {
        let plain = |text: &str| text.to_lowercase().replace([' ', '-', '_'], "").replace("nvidia", "");
        let wanted = plain(name);
        let is_meant = |model: &&DeviceModel| !wanted.is_empty() && plain(model.name).ends_with(&wanted);
        DEVICES.iter().find(is_meant).ok_or_else(|| {
            let known: Vec<&str> = DEVICES.iter().map(|model| model.name).collect();
            PlanError::Refused(format!(
                "--device-model {name:?} is unknown; the known GPUs are {}. For another GPU, `--memory SIZE` checks whether a step fits",
                known.join(", ")
            ))
        })
    }

    /// An error if it cannot compute under `recipe`, as of a GPU that is there.
    pub fn check(&self, recipe: Recipe) -> Result<(), LearnError> {
        check_recipe(&format!("NVIDIA {}", self.name), self.arch, recipe)
    }
}

/// The devices whose rates are known.
pub const DEVICES: [DeviceModel; 6] = [
    DeviceModel {
        name: "H200",
        arch: Arch::SM90,
        memory_bytes: gib(139.80),
        peak_bandwidth: 4.8e12,
        nccl_bandwidth: 330e9,
        copy_bandwidth: Some(356e9),
        nic_bandwidth: 48e9,
        rates: Rates {
            launch: LAUNCH,
            memory: 4.1e12,
            gemm: HOPPER_GEMM,
            multiprocessors: Some(132),
            attention: HOPPER_ATTENTION,
            several: 1.0,
            casts: 1.0,
        },
    },
    // Multiprocessors and power limit of the H200; the bandwidth is measured.
    DeviceModel {
        name: "H100",
        arch: Arch::SM90,
        memory_bytes: gib(79.11),
        peak_bandwidth: 3.35e12,
        nccl_bandwidth: 330e9,
        copy_bandwidth: Some(356e9),
        nic_bandwidth: 48e9,
        rates: Rates {
            launch: LAUNCH,
            memory: 2.95e12,
            gemm: HOPPER_GEMM,
            multiprocessors: Some(132),
            attention: HOPPER_ATTENTION,
            several: 1.0,
            casts: 1.0,
        },
    },
    // 250 of 312 TFLOP/s: cuBLAS sustains a larger share (0.8) on Ampere than on Hopper.
    DeviceModel {
        name: "A100",
        arch: Arch::SM80,
        memory_bytes: gib(79.15),
        peak_bandwidth: 2.039e12,
        nccl_bandwidth: 220e9,
        copy_bandwidth: Some(237e9),
        nic_bandwidth: 24e9,
        rates: without_fp8(250e12, 17e12, 1.74e12, 108, 0.315),
    },
    // 362 TFLOP/s at 350 W, about 0.6 of it sustained.
    DeviceModel {
        name: "L40S",
        arch: Arch::SM89,
        memory_bytes: gib(44.40),
        peak_bandwidth: 0.864e12,
        nccl_bandwidth: 20e9,
        copy_bandwidth: None,
        nic_bandwidth: 24e9,
        rates: with_ada_fp8(without_fp8(220e12, 55e12, 0.73e12, 142, 0.27)),
    },
    // 165.2 TFLOP/s with f32 accumulation, most of it sustained at 450 W.
    DeviceModel {
        name: "RTX 4090",
        arch: Arch::SM89,
        memory_bytes: gib(23.65),
        peak_bandwidth: 1.008e12,
        nccl_bandwidth: 10e9,
        copy_bandwidth: None,
        nic_bandwidth: 12e9,
        rates: with_ada_fp8(without_fp8(155e12, 55e12, 0.9e12, 128, 0.2)),
    },
    // 209.5 TFLOP/s with f32 accumulation.
    DeviceModel {
        name: "RTX 5090",
        arch: Arch::SM120,
        memory_bytes: gib(31.36),
        peak_bandwidth: 1.792e12,
        nccl_bandwidth: 20e9,
        copy_bandwidth: None,
        nic_bandwidth: 12e9,
        rates: with_ada_fp8(without_fp8(195e12, 70e12, 1.55e12, 170, 0.25)),
    },
];

/// Seconds of a launch inside a graph, including the time before a kernel's first and after its last bytes.
const LAUNCH: f64 = 3.5e-6;

/// GEMMs on Hopper, with cuBLASLt and our kernels.
const HOPPER_GEMM: GemmRates = GemmRates {
    bf16: 728e12,
    f32: 49e12,
    fp8_tensor: 1320e12,
    fp8_row: 1220e12,
    fp8_block: 1200e12,
    fp8_tile: 930e12,
};

/// Attention on Hopper, with cuDNN and our kernels.
const HOPPER_ATTENTION: AttentionRates = AttentionRates {
    forward: ScoreSeconds { softmax: 2.4e-13, column: 5.3e-15, diagonal: 390.0 },
    backward: ScoreSeconds { softmax: 3.4e-13, column: 1.84e-14, diagonal: 860.0 },
    in_order: 1.68,
    f32: 7.0,
};

/// Rates of a device without FP8 GEMMs. `attention` is its attention speed relative to Hopper's: the ratio of
/// their bf16 peaks.
const fn without_fp8(bf16: f64, f32: f64, memory: f64, multiprocessors: usize, attention: f64) -> Rates {
    let AttentionRates { forward, backward, in_order, f32: f32_factor } = HOPPER_ATTENTION;
    Rates {
        launch: LAUNCH,
        memory,
        gemm: GemmRates { bf16, f32, fp8_tensor: bf16, fp8_row: bf16, fp8_block: bf16, fp8_tile: bf16 },
        multiprocessors: Some(multiprocessors),
        attention: AttentionRates {
            forward: slower(forward, attention),
            backward: slower(backward, attention),
            in_order,
            f32: f32_factor,
        },
        several: 1.0,
        casts: 1.0,
    }
}

const fn slower(of: ScoreSeconds, share: f64) -> ScoreSeconds {
    ScoreSeconds { softmax: of.softmax / share, column: of.column / share, diagonal: of.diagonal }
}

/// Adds FP8 GEMMs with per-tensor scales at 1.8 times the bf16 rate; recipes with finer scales need Hopper.
const fn with_ada_fp8(rates: Rates) -> Rates {
    let mut rates = rates;
    rates.gemm.fp8_tensor = 1.8 * rates.gemm.bf16;
    rates
}

const fn gib(size: f64) -> u64 {
    (size * (1u64 << 30) as f64) as u64
}

/// Default rates of a CPU with this number of threads: AVX2 at 3 GHz, two memory channels.
pub(super) fn unmeasured_cpu(threads: usize) -> Rates {
    let threads = threads as f64;
    let score = |softmax: f64, column: f64| ScoreSeconds {
        softmax: softmax / threads,
        column: column / threads,
        diagonal: 64.0,
    };
    Rates {
        launch: 1e-5,
        memory: (4e9 * threads).min(3e10),
        gemm: GemmRates {
            bf16: 4e10 * threads,
            f32: 5e10 * threads,
            fp8_tensor: 2e10 * threads,
            fp8_row: 2e10 * threads,
            fp8_block: 2e10 * threads,
            fp8_tile: 2e10 * threads,
        },
        multiprocessors: None,
        attention: AttentionRates {
            forward: score(3e-9, 2e-10),
            backward: score(5e-9, 5e-10),
            in_order: 1.0,
            f32: 1.0,
        },
        several: 1.0,
        // The casts emulate FP8: measured at a thirtieth of the rate of other kernels that move bytes.
        casts: 30.0,
    }
}
