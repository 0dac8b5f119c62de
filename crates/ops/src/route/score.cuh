// The scores of a token's experts, computed by a warp: lane l has the experts l, l + 32 and so on. The
// operations and their order are those of the CPU kernel, so that both choose the same experts.

// e^x, as the CPU's `exp_f32`.
__device__ __forceinline__ float exp_as_host(float x) {
    float clamped = fminf(fmaxf(x, -87.33654f), 88.722839f);
    float rounded = __fmaf_rn(clamped, 1.44269504088896341f, 12582912.0f);
    float n = rounded - 12582912.0f;
    int whole = __float_as_int(rounded) - __float_as_int(12582912.0f);
    float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.6933594f, clamped));
    float p = 1.984127e-4f;
    p = __fmaf_rn(p, r, 1.3888889e-3f);
    p = __fmaf_rn(p, r, 8.333334e-3f);
    p = __fmaf_rn(p, r, 4.1666666e-2f);
    p = __fmaf_rn(p, r, 1.6666667e-1f);
    p = __fmaf_rn(p, r, 0.5f);
    float e = __fadd_rn(__fmaf_rn(__fmul_rn(p, r), r, r), 1.0f);
    int half = whole >> 1;
    float y = __fmul_rn(__fmul_rn(e, __int_as_float((half + 127) << 23)), __int_as_float((whole - half + 127) << 23));
    if (x < -87.33654f) y = 0.0f;
    if (x > 88.722839f) y = INFINITY_F;
    return x != x ? x : y;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + exp_as_host(-x)); }

// Added to a sum of scores before it divides them: all may be 0.
constexpr float TINY = 1e-20f;

struct Scores {
    u32 is_sigmoid;
    // The maximum of the logits and the sum of e^(logit - max); of no use for the sigmoid.
    float most, sum;
};

__device__ __forceinline__ Scores scores_of(const float* logits, u32 experts, u32 is_sigmoid) {
    Scores of = {is_sigmoid, -INFINITY_F, 0.0f};
    if (is_sigmoid) return of;
    for (u32 e = threadIdx.x % 32; e < experts; e += 32) of.most = fmaxf(of.most, logits[e]);
    of.most = warp_max(of.most);
    for (u32 e = threadIdx.x % 32; e < experts; e += 32) of.sum += exp_as_host(logits[e] - of.most);
    of.sum = warp_sum(of.sum);
    return of;
}

__device__ __forceinline__ float score(const Scores& of, float logit) {
    return of.is_sigmoid ? sigmoid(logit) : __fdiv_rn(exp_as_host(logit - of.most), of.sum);
}
