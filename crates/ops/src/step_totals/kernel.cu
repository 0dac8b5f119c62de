// The words of a rank, and the sums of the words of all ranks, in their order.
//
// Bound by latency. Packing takes one thread; a sum takes one thread for each word of a rank, so that the
// order of additions is that of ranks.

struct WordsArguments {
    const double* squared_norm;
    const float* loss;
    const float* objective;
    const u32* stop;
    // Null if nothing was cast to FP8.
    const float* amax;
    double* words;
};

struct TotalsArguments {
    const double* words;
    float* grad_norm;
    float* loss;
    float* objective;
    float* amax;
    u32* stop;
    u32 ranks;
    u32 has_whole_gradients;
};

extern "C" __global__ void rank_words(WordsArguments args) {
    bool bad_amax = args.amax && !(fabsf(*args.amax) < INFINITY_F);
    args.words[0] = *args.squared_norm;
    args.words[1] = (double)*args.loss;
    args.words[2] = (double)*args.objective;
    args.words[3] = bad_amax ? 1.0 : 0.0;
    args.words[4] = *args.stop != 0 ? 1.0 : 0.0;
}

extern "C" __global__ void step_totals(TotalsArguments args) {
    u32 word = threadIdx.x;
    if (word >= WORDS) return;
    double sum = 0.0;
#pragma unroll 8
    for (u32 rank = 0; rank < args.ranks; rank++) sum += args.words[rank * WORDS + word];
    if (word == 0) *args.grad_norm = (float)sqrt(args.has_whole_gradients ? args.words[0] : sum);
    if (word == 1) *args.loss = (float)sum;
    if (word == 2) *args.objective = (float)sum;
    if (word == 3) *args.amax = sum > 0.0 ? INFINITY_F : 0.0f;
    if (word == 4) *args.stop = sum > 0.0;
}
