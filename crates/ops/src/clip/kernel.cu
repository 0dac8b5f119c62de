// The coefficient of clipping and the decision whether a step counts: one thread.

struct Arguments {
    Floats norm;
    Floats loss;
    // Of what was cast to FP8; the loss once more where nothing was.
    Floats amax;
    u32* applied;
    float* coefficient;
    u32* skip;
    float max_norm;
};

extern "C" __global__ void clip(Arguments at) {
    float norm = load(at.norm, 0), loss = load(at.loss, 0);
    bool counts = fabsf(norm) < INFINITY_F && fabsf(loss) < INFINITY_F && fabsf(load(at.amax, 0)) < INFINITY_F;
    float clipped = at.max_norm > 0.0f ? fminf(at.max_norm / (norm + 1e-6f), 1.0f) : 1.0f;
    *at.coefficient = counts ? clipped : 0.0f;
    *at.skip = !counts;
    *at.applied += counts;
}
