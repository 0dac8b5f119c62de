// The words of a rank, and the sums of the words of all ranks in a fixed order (step_totals/mod.rs).
//
// Bound by latency. One block each. A thread adds the units of a gradient, and a warp each the gradients, the
// losses, the objectives and the flags, all in order.

struct WordsArguments {
    const double* squares;
    const float* losses;
    const float* objectives;
    const u32* stop;
    // Null if nothing was cast to FP8.
    const float* amax;
    double* words;
    u32 square_words;
    u32 micro_batches;
    u32 stride;
    u32 padding;
};

// The units of a gradient: of each piece, and the words of a rank before them.
struct Gradient {
    u32 first;
    u32 units;
    u32 before;
};

struct TotalsArguments {
    const double* words;
    const Gradient* gradients;
    double* sums;
    float* grad_norm;
    float* loss;
    float* objective;
    float* amax;
    u32* stop;
    u32 ranks;
    u32 rank_words;
    u32 square_words;
    u32 micro_batches;
    u32 count;
    u32 padding;
};

extern "C" __global__ void __launch_bounds__(THREADS) rank_words(WordsArguments args) {
    double* losses = args.words + args.square_words;
    for (u32 n = threadIdx.x; n < args.square_words; n += THREADS) args.words[n] = args.squares[n];
    for (u32 n = threadIdx.x; n < args.micro_batches; n += THREADS) {
        losses[n] = (double)args.losses[n * args.stride];
        losses[args.micro_batches + n] = (double)args.objectives[n * args.stride];
    }
    if (threadIdx.x != 0) return;
    bool bad_amax = args.amax && !(fabsf(*args.amax) < INFINITY_F);
    losses[2 * args.micro_batches] = bad_amax ? 1.0 : 0.0;
    losses[2 * args.micro_batches + 1] = *args.stop != 0 ? 1.0 : 0.0;
}

// The sum of the word `first` of each rank, then that of the next, and so on.
__device__ __forceinline__ double total(const TotalsArguments& args, u32 first, u32 count) {
    double sum = 0.0;
    for (u32 word = first; word < first + count; word++) {
#pragma unroll 8
        for (u64 rank = 0; rank < args.ranks; rank++) sum += args.words[rank * args.rank_words + word];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) step_totals(TotalsArguments args) {
    for (u32 n = threadIdx.x; n < args.count; n += THREADS) {
        Gradient gradient = args.gradients[n];
        double sum = 0.0;
        for (u32 piece = 0; piece < args.ranks; piece++) {
            const double* rank = args.words + (u64)((gradient.first + piece) % args.ranks) * args.rank_words;
#pragma unroll 8
            for (u32 unit = 0; unit < gradient.units; unit++) sum += rank[gradient.before + unit];
        }
        args.sums[n] = sum;
    }
    __syncthreads();
    u32 losses = args.square_words, flags = losses + 2 * args.micro_batches;
    if (threadIdx.x == 0) {
        double sum = 0.0;
#pragma unroll 8
        for (u32 n = 0; n < args.count; n++) sum += args.sums[n];
        *args.grad_norm = (float)sqrt(args.gradients ? sum : args.words[0]);
    }
    if (threadIdx.x == 32) *args.loss = (float)total(args, losses, args.micro_batches);
    if (threadIdx.x == 64) *args.objective = (float)total(args, losses + args.micro_batches, args.micro_batches);
    if (threadIdx.x == 96) *args.amax = total(args, flags, 1) > 0.0 ? INFINITY_F : 0.0f;
    if (threadIdx.x == 128) *args.stop = total(args, flags + 1, 1) > 0.0;
}
