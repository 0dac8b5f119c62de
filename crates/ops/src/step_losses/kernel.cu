// Stores the losses of a micro-step. One thread.

struct Arguments {
    const float* loss;
    const float* objective;
    const u32* micro_step;
    float* losses;
    u64 count;
};

extern "C" __global__ void record_losses(Arguments args) {
    u64 row = *args.micro_step;
    if (row >= args.count) return;
    args.losses[2 * row] = *args.loss;
    args.losses[2 * row + 1] = *args.objective;
}
