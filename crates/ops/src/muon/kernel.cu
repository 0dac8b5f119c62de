// Muon's kernels beside its GEMMs (muon/mod.rs): the momentum of a matrix, the beginning and the end of the
// iteration of a part, its two elementwise steps, and the step of a master.
//
// All are bound by memory, and access each operand once, element by element, warps their neighbours. Each
// thread has PER_THREAD elements at a distance of the block's threads.
// Grids: ceil(elements / (PER_THREAD * THREADS)); that of muon_squares: `parts`.

struct MomentumArguments {
    float* moment;
    const float* grad;
    float* update;
    Floats coefficient;
    const u32* skip;
    u64 elements;
    float momentum;
    float rest;
};

struct PartArguments {
    // All pieces, and what is written in their place.
    const float* from;
    float* to;
    // The part: rounded, and as the sum to which a GEMM adds.
    bf16* x;
    float* sum;
    // Factors of its rows or of its columns.
    const float* diagonal;
    // Sums of squares.
    double* squares;
    // The place of the first element in the pieces, behind whose end follows their begin.
    u64 start;
    u64 total;
    u64 elements;
    u64 cols;
    u32 parts;
    // 1 if the factors are those of rows.
    u32 by_row;
    float scale;
    float eps;
};

struct PolynomialArguments {
    bf16* gram;
    const float* square;
    float* diagonal;
    u64 side;
    float a;
    float b;
    float c;
    u32 padding;
};

struct StepArguments {
    float* master;
    const float* update;
    Floats copy;
    Floats lr;
    const u32* skip;
    u64 elements;
    float decay;
    u32 has_copy;
};

template <class Run> __device__ __forceinline__ void for_elements(u64 elements, Run run) {
    u64 first = (u64)blockIdx.x * THREADS * PER_THREAD + threadIdx.x;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        u64 i = first + k * THREADS;
        if (i < elements) run(i);
    }
}

__device__ __forceinline__ u64 place(const PartArguments& args, u64 i) {
    u64 at = args.start + i;
    return at < args.total ? at : at - args.total;
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_momentum(MomentumArguments args) {
    bool skips = *args.skip != 0;
    float coefficient = load(args.coefficient, 0);
    for_elements(args.elements, [&](u64 i) {
        if (skips) {
            args.update[i] = 0.0f;
            return;
        }
        float g = args.grad[i] * coefficient;
        float m = args.momentum * args.moment[i] + args.rest * g;
        args.moment[i] = m;
        args.update[i] = args.momentum * m + args.rest * g;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_squares(PartArguments args) {
    double sum = 0.0;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < args.elements; i += (u64)gridDim.x * THREADS) {
        double x = args.from[place(args, i)];
        sum += x * x;
    }
    sum = sum_of_block<THREADS>(sum);
    if (threadIdx.x == 0) args.squares[blockIdx.x] = sum;
}

// Each block adds the sums of squares by itself, in the same order.
extern "C" __global__ void __launch_bounds__(THREADS) muon_normalize(PartArguments args) {
    __shared__ float norm_of_part;
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < args.parts; i += THREADS) sum += args.squares[i];
    sum = sum_of_block<THREADS>(sum);
    if (threadIdx.x == 0) norm_of_part = fmaxf((float)sqrt(sum), args.eps);
    __syncthreads();
    float norm = norm_of_part;
    for_elements(args.elements, [&](u64 i) {
        float x = args.from[place(args, i)] / norm;
        args.sum[i] = x;
        args.x[i] = narrow<bf16>(x);
    });
}

// The polynomial of the products. Its diagonal is by far the largest, so it is not rounded.
extern "C" __global__ void __launch_bounds__(THREADS) muon_polynomial(PolynomialArguments args) {
    for_elements(args.side * args.side, [&](u64 i) {
        float x = args.b * widen(args.gram[i]) + args.c * args.square[i];
        bool is_diagonal = i % (args.side + 1) == 0;
        if (is_diagonal) args.diagonal[i / (args.side + 1)] = args.a + x;
        args.gram[i] = narrow<bf16>(is_diagonal ? 0.0f : x);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_scale(PartArguments args) {
    for_elements(args.elements,
                 [&](u64 i) { args.sum[i] *= args.diagonal[args.by_row ? i / args.cols : i % args.cols]; });
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_round(PartArguments args) {
    for_elements(args.elements, [&](u64 i) { args.x[i] = narrow<bf16>(args.sum[i]); });
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_store(PartArguments args) {
    for_elements(args.elements, [&](u64 i) { args.to[place(args, i)] = args.scale * args.sum[i]; });
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_step(StepArguments args) {
    bool skips = *args.skip != 0;
    float lr = load(args.lr, 0);
    for_elements(args.elements, [&](u64 i) {
        float w = args.master[i];
        if (!skips) {
            w -= lr * (args.update[i] + args.decay * w);
            args.master[i] = w;
        }
        if (args.has_copy) store<1>(args.copy, i, &w);
    });
}
