//! The list of all ops with kernels: their kernels, their samples, and the ops that passes insert.

use crate::on_gpu::OnGpu;
use crate::permute::{Permute, PermuteByTree};
use crate::quantize::{Amaxes, Dequantize, Given, Layouts, Quantize};
use crate::retile::Retile;
use crate::rows::JoinRows;
#[cfg(any(test, feature = "samples"))]
use crate::samples::{Sample, Sampled};
use crate::sum_ranks::SumSources;
use std::any::Any;
use std::sync::Arc;
use xtrain_cuda::{CudaKernel, KernelSource};
use xtrain_program::fold::FoldOps;
use xtrain_program::measure_casts::MeasureOps;
use xtrain_program::pipeline::PipelineOps;
use xtrain_program::quantize::QuantizeOps;
use xtrain_program::shard::ShardOps;
use xtrain_program::wire::sequence::SequenceOps;
use xtrain_program::wire::{CastTokens, WireOps};
use xtrain_program::{Groups, KernelTable, Op, PassOps, Quantization, RaggedOps, RowShard, Tail, TensorCut};
use xtrain_tensor::{CpuKernel, DType, Scaling, TensorType};

/// CPU kernels by op.
pub type CpuKernels = KernelTable<dyn CpuKernel>;

/// GPU kernels by op.
pub type CudaKernels = KernelTable<dyn CudaKernel>;

/// Declares the list of ops; `: gpu` marks those with GPU kernels.
macro_rules! ops {
    ($($op:path $(: $gpu:ident)?),* $(,)?) => {
        /// CPU kernels of all ops.
        pub fn cpu_kernels() -> CpuKernels {
            let mut table = CpuKernels::default();
            $(table.register::<$op>(|op| op);)*
            table
        }

        /// GPU kernels of all ops that have them.
        pub fn cuda_kernels() -> CudaKernels {
            let mut table = CudaKernels::default();
            $($(on!($gpu, table.register::<$op>(|op| op));)?)*
            table
        }

        /// CUDA sources of all ops, each listed once.
        pub fn kernel_sources() -> Vec<KernelSource> {
            let mut all: Vec<KernelSource> = Vec::new();
            let mut add = |sources: &[KernelSource]| {
                for source in sources {
                    if all.iter().all(|s| s.name != source.name) {
                        all.push(*source);
                    }
                }
            };
            $($(on!($gpu, add(<$op as OnGpu>::SOURCES));)?)*
            // That of measurements is no op's.
            add(&[xtrain_cuda::Delay::SOURCE]);
            all
        }

        /// Samples of all ops.
        #[cfg(any(test, feature = "samples"))]
        pub fn samples() -> Vec<Sample> {
            let mut all = Vec::new();
            $(all.extend(<$op as Sampled>::samples());)*
            all
        }

        /// One large sample of each op.
        #[cfg(any(test, feature = "samples"))]
        pub fn large_samples() -> Vec<Sample> {
            vec![$(<$op as Sampled>::large()),*]
        }

        /// Samples that run on a GPU only, sized for this number of multiprocessors.
        #[cfg(any(test, feature = "samples"))]
        pub fn gpu_samples(multiprocessors: usize) -> Vec<Sample> {
            let mut all = Vec::new();
            $(all.extend(<$op as Sampled>::gpu_samples());)*
            $(all.extend(<$op as Sampled>::busy_samples(multiprocessors));)*
            all
        }
    };
}

/// The ops that know tails of ragged tensors.
pub fn ragged_ops() -> RaggedOps {
    let mut table = RaggedOps::default();
    macro_rules! register {
        ($($op:ident::$name:ident),* $(,)?) => {
            $(table.register::<crate::$op::$name>(|op| op);)*
        };
    }
    register![
        grouped_linear::GroupedLinear,
        grouped_linear::GroupedDgrad,
        grouped_linear::GroupedWgrad,
        grouped_scaled_matmul::GroupedScaledMatmul,
        permute::Permute,
        permute::PermuteByTree,
        permute::Unpermute,
        permute::UnpermuteGates,
        permute::UnpermuteTree,
        quantize::Quantize,
        retile::Retile,
        swiglu::Swiglu,
        swiglu::SwigluGrad,
        swiglu_saving::SwigluSaving,
    ];
    table
}

/// Expands to the expression for ops marked `gpu`, the only mark.
macro_rules! on {
    (gpu, $expression:expr) => {
        $expression
    };
}

ops![
    crate::adamw::AdamW: gpu,
    crate::add::Add: gpu,
    crate::attention::Attention: gpu,
    crate::attention::AttentionGrad: gpu,
    crate::balance_bias::BalanceBias: gpu,
    crate::cached_attention::CachedAttention: gpu,
    crate::cast::Cast: gpu,
    crate::cast_statistics::CastStatistics: gpu,
    crate::clip::Clip: gpu,
    crate::delayed_scaling::DelayedScaling: gpu,
    crate::dispatch::CountExperts: gpu,
    crate::dispatch::Dispatch: gpu,
    crate::dispatch::DispatchOwn: gpu,
    crate::dropout::Dropout: gpu,
    crate::embedding::Embedding: gpu,
    crate::embedding::EmbeddingGrad: gpu,
    crate::grad_norm::GradNorm: gpu,
    crate::grad_norm::SquaredNorm: gpu,
    crate::grouped_linear::GroupedLinear: gpu,
    crate::grouped_linear::GroupedDgrad: gpu,
    crate::grouped_linear::GroupedWgrad: gpu,
    crate::grouped_scaled_matmul::GroupedScaledMatmul: gpu,
    crate::linear::Linear: gpu,
    crate::linear::UnroundedLinear: gpu,
    crate::linear::LinearDgrad: gpu,
    crate::linear::LinearWgrad: gpu,
    crate::linear::BiasGrad: gpu,
    crate::linear_cross_entropy::LinearCrossEntropy: gpu,
    crate::linear_cross_entropy::LinearCrossEntropyGrad: gpu,
    crate::linear_cross_entropy::ScaledLinearCrossEntropy: gpu,
    crate::lora::LoraAdd: gpu,
    crate::lora::LoraDgrad: gpu,
    crate::lora::LoraWgrad: gpu,
    crate::muon::MuonMomentum: gpu,
    crate::muon::MuonStep: gpu,
    crate::muon::Orthogonalize: gpu,
    crate::normal::Normal: gpu,
    crate::owners::SelectOwner: gpu,
    crate::owners::SumOwners: gpu,
    crate::pairwise_sum::PairwiseAdd: gpu,
    crate::pairwise_sum::PairwiseTotal: gpu,
    crate::permute::Permute: gpu,
    crate::permute::PermuteByTree: gpu,
    crate::permute::PermuteGates: gpu,
    crate::permute::Unpermute: gpu,
    crate::permute::UnpermuteGates: gpu,
    crate::permute::UnpermuteTree: gpu,
    crate::qk_norm_rope::QkNormRope: gpu,
    crate::qk_norm_rope::QkNormRopeGrad: gpu,
    crate::quantize::Amaxes: gpu,
    crate::quantize::Dequantize: gpu,
    crate::quantize::Quantize: gpu,
    crate::pack_sums::PackSums: gpu,
    crate::rank_amaxes::RankAmaxes: gpu,
    crate::rank_amaxes::MaxAmaxes: gpu,
    crate::retile::Retile: gpu,
    crate::rms_norm::RmsNorm: gpu,
    crate::rms_norm::AddRmsNorm: gpu,
    crate::rms_norm::Rms: gpu,
    crate::rms_norm::RmsNormGrad: gpu,
    crate::rms_quantize::RmsQuantize: gpu,
    crate::room::CheckRoom: gpu,
    crate::room::RowsNeeded: gpu,
    crate::route::Route: gpu,
    crate::route::RouteGrad: gpu,
    crate::router_losses::RouterLosses: gpu,
    crate::router_losses::RouterLossesGrad: gpu,
    crate::rows::JoinRows: gpu,
    crate::rows::SplitRows: gpu,
    crate::scale::Scale: gpu,
    crate::scaled_matmul::ScaledMatmul: gpu,
    crate::step_losses::RecordLosses: gpu,
    crate::step_totals::RankWords: gpu,
    crate::step_totals::StepTotals: gpu,
    crate::sum_ranks::SumParts: gpu,
    crate::sum_ranks::SumRanks: gpu,
    crate::sum_ranks::SumSources: gpu,
    crate::swiglu::Swiglu: gpu,
    crate::swiglu::SwigluGrad: gpu,
    crate::swiglu_saving::SwigluSaving: gpu,
    crate::tensor_part::JoinColumns: gpu,
    crate::tensor_part::PlacePart: gpu,
    crate::tensor_part::TakePart: gpu,
    crate::token_logprobs::TokenLogprobs: gpu,
    crate::transpose_bytes::TransposeBytes: gpu,
    crate::transpose_bytes::TransposeBlockScales: gpu,
    crate::unit_norm::UnitSquares: gpu,
    crate::unit_norm::UnitSquaredNorm: gpu,
];

/// The ops that passes insert.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassSet;

impl PassOps for PassSet {
    fn add(&self) -> Arc<dyn Op> {
        Arc::new(crate::add::Add)
    }

    fn cast(&self, dtype: DType) -> Arc<dyn Op> {
        Arc::new(crate::cast::Cast { to: dtype })
    }
}

impl QuantizeOps for PassSet {
    fn quantize(&self, quantization: Quantization, layouts: [bool; 2]) -> Arc<dyn Op> {
        Arc::new(Quantize::of_operand(quantization, layouts))
    }

    fn dequantize(&self, out: DType) -> Arc<dyn Op> {
        Arc::new(Dequantize { out, scaling: Scaling::Tile })
    }
}

impl ShardOps for PassSet {
    fn all_gather(&self, RowShard { groups, first, rows, .. }: RowShard) -> Arc<dyn Op> {
        Arc::new(crate::collective::AllGather { groups, first, rows })
    }

    fn all_to_all(&self, RowShard { groups, first, piece_rows, .. }: RowShard) -> Arc<dyn Op> {
        Arc::new(crate::collective::AllToAll { groups, first, piece_rows })
    }

    fn reduce_scatter(&self, cut: RowShard, as_summand: bool) -> Arc<dyn Op> {
        let RowShard { groups, first, piece_rows, .. } = cut;
        Arc::new(crate::collective::ReduceScatter { groups, first, piece_rows, as_summand })
    }

    fn sum_ranks(&self) -> Arc<dyn Op> {
        Arc::new(crate::sum_ranks::SumRanks)
    }

    fn pairwise_add(&self) -> Arc<dyn Op> {
        Arc::new(crate::pairwise_sum::PairwiseAdd)
    }

    fn pairwise_total(&self) -> Arc<dyn Op> {
        Arc::new(crate::pairwise_sum::PairwiseTotal)
    }

    fn amaxes(&self, by_column: bool) -> Arc<dyn Op> {
        Arc::new(Amaxes { by_column })
    }

    fn rank_amaxes(&self) -> Arc<dyn Op> {
        Arc::new(crate::rank_amaxes::RankAmaxes)
    }

    fn max_amaxes(&self, lengths: Vec<usize>) -> Arc<dyn Op> {
        Arc::new(crate::rank_amaxes::MaxAmaxes { lengths })
    }

    fn quantize_rows(&self, quantization: Quantization, layouts: [bool; 2], amaxes: bool) -> Arc<dyn Op> {
        let cast = Quantize::of_operand(quantization, layouts);
        let given = match (quantization.delayed, amaxes) {
            (_, false) => cast.given,
            (false, true) => Given::Amax,
            (true, true) => Given::ScaleOrAmax,
        };
        Arc::new(Quantize { given, ..cast })
    }

    fn take_part(&self, cut: &TensorCut) -> Arc<dyn Op> {
        Arc::new(crate::tensor_part::TakePart(cut.clone()))
    }

    fn place_part(&self, cut: &TensorCut) -> Arc<dyn Op> {
        Arc::new(crate::tensor_part::PlacePart(cut.clone()))
    }

    fn transpose_bytes(&self) -> Arc<dyn Op> {
        Arc::new(crate::transpose_bytes::TransposeBytes)
    }

    fn transpose_block_scales(&self, cols: usize) -> Arc<dyn Op> {
        Arc::new(crate::transpose_bytes::TransposeBlockScales { cols })
    }
}

impl FoldOps for PassSet {
    fn stack(&self) -> Arc<dyn Op> {
        Arc::new(JoinRows::Stacked)
    }

    fn join_rows(&self, rows: usize) -> Arc<dyn Op> {
        Arc::new(JoinRows::Rows(rows))
    }

    fn join_lines(&self, lines: usize) -> Arc<dyn Op> {
        Arc::new(JoinRows::Lines(lines))
    }

    fn sum_of_sources(&self, sum: &dyn Op, parts: usize) -> Option<(usize, Arc<dyn Op>)> {
        let &SumSources { experts, ranks } = (sum as &dyn Any).downcast_ref()?;
        Some((experts * ranks, Arc::new(SumSources { experts, ranks: ranks * parts })))
    }

    fn split_rows(&self, parts: usize, rows: usize) -> Arc<dyn Op> {
        Arc::new(crate::rows::SplitRows { parts, rows })
    }
}

impl PipelineOps for PassSet {
    fn send(&self, groups: Groups, to: usize) -> Arc<dyn Op> {
        Arc::new(crate::collective::Send { groups, to })
    }

    fn receive(&self, groups: Groups, from: usize, ty: TensorType) -> Arc<dyn Op> {
        Arc::new(crate::collective::Receive { groups, from, ty })
    }

    fn send_receive(&self, groups: Groups, with: usize) -> Arc<dyn Op> {
        Arc::new(crate::collective::SendReceive { groups, with })
    }
}

impl WireOps for PassSet {
    fn cast_tokens(&self, permute: &dyn Op, cast: &dyn Op) -> Option<CastTokens> {
        let (permute, cast): (&dyn Any, &dyn Any) = (permute, cast);
        let permutes = permute.is::<Permute>() || permute.is::<PermuteByTree>();
        let cast = *cast.downcast_ref::<Quantize>().filter(|cast| permutes && cast.is_of_tokens())?;
        Some(CastTokens {
            cast: Arc::new(Quantize { layouts: Layouts::RowMajor, ..cast }),
            permute: Arc::new(Retile { scaling: cast.scaling, layouts: cast.layouts, tail: Tail::Zeros }),
            has_scales: cast.scaling == Scaling::Tile,
        })
    }

    fn gather_rows(&self, groups: Groups, rows: usize) -> Arc<dyn Op> {
        Arc::new(crate::collective::AllGather { groups, first: 0, rows })
    }
}

impl SequenceOps for PassSet {
    fn operand_cast(&self, cast: &dyn Op) -> Option<(Quantization, [bool; 2])> {
        let cast: &dyn Any = cast;
        let cast = cast.downcast_ref::<Quantize>()?;
        let Quantize { format, scaling, pow2_scales, given, .. } = *cast;
        let quantization = Quantization { format, scaling, pow2_scales, delayed: given == Given::Scale };
        let layouts = cast.layouts.written();
        (*cast == Quantize::of_operand(quantization, layouts)).then_some((quantization, layouts))
    }

    fn join_columns(&self, ranks: usize) -> Arc<dyn Op> {
        Arc::new(crate::tensor_part::JoinColumns { ranks })
    }
}

impl MeasureOps for PassSet {
    fn cast_statistics(&self, scaling: Scaling, transposed: bool) -> Arc<dyn Op> {
        Arc::new(crate::cast_statistics::CastStatistics { scaling, transposed })
    }
}
