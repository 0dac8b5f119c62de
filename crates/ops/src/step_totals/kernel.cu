// The words of a rank, and the sums of the words of all ranks in a fixed order (step_totals/mod.rs).
//
// Bound by latency. One block each. A thread adds the units of a gradient or a number of a source, and a warp
// each the gradients, the losses, the objectives and the flags, all in order.

// An amax with which a step is skipped (clip/mod.rs).
constexpr float SKIPPED = 3.402823466e38f;

struct WordsArguments {
    const double* squares;
    const float* losses;
    const float* objectives;
    // Not read if there are two columns.
    const float* sources;
    const u32* stop;
    // Null if nothing was cast to FP8.
    const float* amax;
    double* words;
    u32 square_words;
    u32 micro_batches;
    // Numbers of a micro-batch.
    u32 columns;
    u32 padding;
};

// The units of a gradient: of each piece, and the words of a rank before them. Ranks have parts, and of these
// pieces, whose first is at the place `first` of a part's ranks.
struct Gradient {
    u32 parts;
    u32 part_stride;
    u32 pieces;
    u32 piece_stride;
    u32 first;
    u32 units;
    u32 before;
    u32 first_rank;
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
    // Null without sources.
    float* sources;
    u32 ranks;
    u32 rank_words;
    u32 square_words;
    u32 micro_batches;
    u32 columns;
    u32 count;
    // Neighbouring ranks that compute parts of a micro-batch.
    u32 parts;
    u32 padding;
};

extern "C" __global__ void __launch_bounds__(THREADS) rank_words(WordsArguments args) {
    double* losses = args.words + args.square_words;
    for (u32 n = threadIdx.x; n < args.square_words; n += THREADS) args.words[n] = args.squares[n];
    u32 count = args.columns * args.micro_batches;
    for (u32 n = threadIdx.x; n < count; n += THREADS) {
        u32 column = n / args.micro_batches;
        const float* first = column == 0 ? args.losses : column == 1 ? args.objectives : args.sources + column - 2;
        losses[n] = (double)first[n % args.micro_batches * args.columns];
    }
    if (threadIdx.x != 0) return;
    bool bad_amax = args.amax && !(fabsf(*args.amax) < SKIPPED);
    losses[count] = bad_amax ? 1.0 : 0.0;
    losses[count + 1] = *args.stop != 0 ? 1.0 : 0.0;
}

// The sum of a word of the ranks from `rank` on that compute parts of a micro-batch: in f32, a binary tree.
__device__ __forceinline__ double of_parts(const TotalsArguments& args, u64 rank, u32 word) {
    float sums[MAX_PARTS];
#pragma unroll
    for (u32 n = 0; n < MAX_PARTS; n++) {
        sums[n] = n < args.parts ? (float)args.words[(rank + n) * args.rank_words + word] : 0.0f;
    }
#pragma unroll
    for (u32 width = 1; width < MAX_PARTS; width *= 2) {
#pragma unroll
        for (u32 n = 0; n < MAX_PARTS; n += 2 * width) {
            if (n + width < args.parts) sums[n] += sums[n + width];
        }
    }
    return (double)sums[0];
}

// The sum of the word `first` of each rank, then that of the next, and so on.
__device__ __forceinline__ double total(const TotalsArguments& args, u32 first, u32 count) {
    double sum = 0.0;
    for (u32 word = first; word < first + count; word++) {
        if (args.parts > 1) {
            for (u64 rank = 0; rank < args.ranks; rank += args.parts) sum += of_parts(args, rank, word);
            continue;
        }
#pragma unroll 8
        for (u64 rank = 0; rank < args.ranks; rank++) sum += args.words[rank * args.rank_words + word];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) step_totals(TotalsArguments args) {
    for (u32 n = threadIdx.x; n < args.count; n += THREADS) {
        Gradient gradient = args.gradients[n];
        double sum = 0.0;
        for (u32 piece = 0; piece < gradient.parts * gradient.pieces; piece++) {
            u32 part = piece / gradient.pieces, place = (gradient.first + piece) % gradient.pieces;
            u64 rank = gradient.first_rank + part * gradient.part_stride + place * gradient.piece_stride;
            const double* words = args.words + rank * args.rank_words;
#pragma unroll 8
            for (u32 unit = 0; unit < gradient.units; unit++) sum += words[gradient.before + unit];
        }
        args.sums[n] = sum;
    }
    __syncthreads();
    u32 losses = args.square_words, flags = losses + args.columns * args.micro_batches;
    for (u32 column = 2 + threadIdx.x; column < args.columns; column += THREADS) {
        args.sources[column - 2] = (float)total(args, losses + column * args.micro_batches, args.micro_batches);
    }
    if (threadIdx.x == 0) {
        double sum = 0.0;
#pragma unroll 8
        for (u32 n = 0; n < args.count; n++) sum += args.sums[n];
        *args.grad_norm = (float)sqrt(args.gradients ? sum : args.words[0]);
    }
    if (threadIdx.x == 32) *args.loss = (float)total(args, losses, args.micro_batches);
    if (threadIdx.x == 64) *args.objective = (float)total(args, losses + args.micro_batches, args.micro_batches);
    if (threadIdx.x == 96) *args.amax = total(args, flags, 1) > 0.0 ? SKIPPED : 0.0f;
    if (threadIdx.x == 128) *args.stop = total(args, flags + 1, 1) > 0.0;
}
