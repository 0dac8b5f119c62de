// AdamW's operands, and its numbers for one or more elements of a parameter.

// In words of 8 bytes where it is written.
struct Parameter {
    void* master;
    void* m;
    void* v;
    void* grad;
    // Null where there is no copy.
    void* compute;
    // Null where the new master is not measured: the bits of its amax.
    u32* amax;
    u64 elements;
    // Bit n: whether the n-th of the above is bf16.
    u32 are_bf16;
    float weight_decay;
};

struct AdamW {
    const Parameter* parameters;
    const struct Chunk* chunks;
    Floats lr;
    Floats coefficient;
    const u32* applied;
    const u32* skip;
    double beta1;
    double beta2;
    // 1 - beta, rounded from f64.
    float rest1;
    float rest2;
    float eps;
    u32 sites;
    u32 seed_low;
    u32 seed_high;
};

// The operands of a parameter, and the numbers of the update.
struct Update {
    Floats master, m, v, grad, compute;
    float lr, coefficient, beta1, rest1, correction1, beta2, rest2, correction2, eps, weight_decay;
    bool skip;
    Philox rng;
};

__device__ __forceinline__ double power(double base, u32 exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2) result *= base;
        base *= base;
    }
    return result;
}

// To bf16, up or down stochastically, as the host's `round_bf16_stochastic`.
__device__ __forceinline__ float round_by(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) >= 0x7f7f0000u) return x; // Rounded where it is stored.
    return __uint_as_float((bits + (random & 0xffffu)) & 0xffff0000u);
}

// The words of N elements, of which the first is a multiple of N.
template <int N> __device__ __forceinline__ void draw(const Philox& rng, u64 first, u32* words) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) rng.block((first + i) / 4, words + i);
    } else {
        static_assert(N == 1, "whole blocks, or an element");
        u32 block[4];
        rng.block(first / 4, block);
        u32 low = first % 2 == 0 ? block[0] : block[1], high = first % 2 == 0 ? block[2] : block[3];
        words[0] = first % 4 < 2 ? low : high;
    }
}

// ROUNDS: whether moments are rounded to bf16, stochastically. They are then computed as the host computes them, every operation rounded, so that
// they are rounded to the same bits. The new masters come out as they are stored.
template <int N, bool ROUNDS> __device__ __forceinline__ void update(const Update& by, u64 first, float (&master)[N]) {
    float m[N], v[N], grad[N];
    load<N>(by.master, first, master);
    if (!by.skip) {
        load<N>(by.m, first, m);
        load<N>(by.v, first, v);
        load<N>(by.grad, first, grad);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (ROUNDS) {
                float g = __fmul_rn(grad[i], by.coefficient);
                m[i] = __fadd_rn(__fmul_rn(by.beta1, m[i]), __fmul_rn(by.rest1, g));
                v[i] = __fadd_rn(__fmul_rn(by.beta2, v[i]), __fmul_rn(by.rest2, __fmul_rn(g, g)));
            } else {
                float g = grad[i] * by.coefficient;
                m[i] = by.beta1 * m[i] + by.rest1 * g;
                v[i] = by.beta2 * v[i] + by.rest2 * (g * g);
            }
            float step = m[i] * by.correction1 / (sqrtf(v[i] * by.correction2) + by.eps);
            master[i] -= by.lr * (step + by.weight_decay * master[i]);
        }
        if (ROUNDS) {
            u32 words[N];
            draw<N>(by.rng, first, words);
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (by.m.is_bf16) m[i] = round_by(m[i], words[i]);
                if (by.v.is_bf16) v[i] = round_by(v[i], words[i] >> 16);
            }
        }
        store<N>(by.m, first, m);
        store<N>(by.v, first, v);
        store<N>(by.master, first, master);
    }
    if (by.master.is_bf16 && !by.skip) {
#pragma unroll
        for (int i = 0; i < N; i++) master[i] = widen(narrow<bf16>(master[i]));
    }
    if (by.compute.at) store<N>(by.compute, first, master);
}

// A parameter's, for all threads of a block, which wait for each other.
__device__ __forceinline__ Update update_of(const AdamW& at, u32 parameter) {
    __shared__ float corrections[2];
    if (threadIdx.x < 2)
        corrections[threadIdx.x] = (float)(1.0 / (1.0 - power(threadIdx.x == 0 ? at.beta1 : at.beta2, *at.applied)));
    Parameter p = at.parameters[parameter];
    __syncthreads();
    return {
        {p.master, p.are_bf16 & 1},
        {p.m, p.are_bf16 >> 1 & 1},
        {p.v, p.are_bf16 >> 2 & 1},
        {p.grad, p.are_bf16 >> 3 & 1},
        {p.compute, p.are_bf16 >> 4 & 1},
        load(at.lr, 0),
        load(at.coefficient, 0),
        (float)at.beta1,
        at.rest1,
        corrections[0],
        (float)at.beta2,
        at.rest2,
        corrections[1],
        at.eps,
        p.weight_decay,
        *at.skip != 0,
        {at.seed_low, at.seed_high, *at.applied, at.sites + parameter},
    };
}
