// Coefficient of gradient clipping, and the flag that skips a step whose loss or gradient norm is not finite,
// or whose FP8 amax is not below the largest number (clip/mod.rs). A kernel, so that the host need not read
// the norm. One thread.

struct Arguments {
    Floats norm;
    Floats loss;
    // The amax of the values that were cast to FP8; points to the loss if nothing was.
    Floats amax;
    u32* applied;
    float* coefficient;
    u32* skip;
    float max_norm;
    float skipped;
};

extern "C" __global__ void clip(Arguments args) {
    float norm = load(args.norm, 0), loss = load(args.loss, 0);
    bool counts = fabsf(norm) < INFINITY_F && fabsf(loss) < INFINITY_F && fabsf(load(args.amax, 0)) < args.skipped;
    float clipped = args.max_norm > 0.0f ? fminf(args.max_norm / (norm + 1e-6f), 1.0f) : 1.0f;
    *args.coefficient = counts ? clipped : 0.0f;
    *args.skip = !counts;
    *args.applied += counts;
}
