// Stores the losses of a micro-step. One block.

struct Arguments {
    const float* loss;
    const float* objective;
    const u32* micro_step;
    float* losses;
    // Null without sources.
    const float* sources;
    u32 count;
    u32 columns;
};

extern "C" __global__ void __launch_bounds__(THREADS) record_losses(Arguments args) {
    u32 row = *args.micro_step;
    if (row >= args.count) return;
    float* losses = args.losses + (u64)row * args.columns;
    for (u32 n = threadIdx.x; n < args.columns; n += THREADS) {
        losses[n] = n == 0 ? *args.loss : n == 1 ? *args.objective : args.sources[n - 2];
    }
}
