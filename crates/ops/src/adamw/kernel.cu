// AdamW over all parameters in one launch.
//
// Bound by memory: with f32 operands and a bf16 copy, 16 bytes are read and 14 written an element, each once. Parameters are cut into
// chunks of one size, and a block has a chunk: a few huge tensors and many tiny ones keep the card equally busy. What a chunk is made of
// stands in tables that were written once. The numbers that change from step to step are read from the card's memory.
//
// With moments in bf16 it is 12 and 10 bytes, and what is drawn to round them, some 25 operations an element, runs beside that.

// In words of 8 bytes where it is written.
struct Parameter {
    void* master;
    void* m;
    void* v;
    void* grad;
    // Null where there is no copy.
    void* compute;
    // Null where the new master is not measured: the bits of its largest magnitude.
    u32* amax;
    u64 elements;
    // Bit n: whether the n-th of the above is bf16.
    u32 are_bf16;
    float weight_decay;
};

struct Chunk {
    // Of the parameter's chunks.
    u32 number;
    u32 parameter;
};

struct AdamW {
    const Parameter* parameters;
    const Chunk* chunks;
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

constexpr int THREADS = 256, CHUNK = 16384, AT_ONCE = 8;

// The operands of a chunk's parameter, and the numbers of the update.
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

// To bf16, up or down by chance, as the host's `round_bf16_by`.
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

// ROUNDS: whether moments are rounded to bf16, by chance. They are then computed as the host computes them, every operation rounded, so that
// they are rounded to the same bits.
template <int N, bool ROUNDS> __device__ __forceinline__ void update(const Update& by, u64 first, u32& largest) {
    float master[N], m[N], v[N], grad[N];
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
    // Copied and measured is the master as it is stored.
    if (by.master.is_bf16) {
#pragma unroll
        for (int i = 0; i < N; i++) master[i] = widen(narrow<bf16>(master[i]));
    }
#pragma unroll
    for (int i = 0; i < N; i++) largest = max(largest, __float_as_uint(master[i]) & 0x7fffffffu);
    if (by.compute.at == nullptr) return;
    store<N>(by.compute, first, master);
}

template <bool ROUNDS> __device__ __forceinline__ u32 update_chunk(const Update& by, u64 first, u64 end) {
    u32 largest = 0;
    u64 i = first + threadIdx.x * AT_ONCE;
    for (; i + AT_ONCE <= end; i += THREADS * AT_ONCE) update<AT_ONCE, ROUNDS>(by, i, largest);
    // One thread has what is left behind whole vectors.
    for (; i < end; i++) update<1, ROUNDS>(by, i, largest);
    return largest;
}

// A block a parameter.
extern "C" __global__ void adamw_clear(AdamW at) {
    u32* amax = at.parameters[blockIdx.x].amax;
    if (amax) *amax = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) adamw(AdamW at) {
    __shared__ float corrections[2];
    __shared__ u32 warps[THREADS / 32];
    if (threadIdx.x < 2)
        corrections[threadIdx.x] = (float)(1.0 / (1.0 - power(threadIdx.x == 0 ? at.beta1 : at.beta2, *at.applied)));
    Chunk chunk = at.chunks[blockIdx.x];
    Parameter p = at.parameters[chunk.parameter];
    __syncthreads();
    Update by = {
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
        {at.seed_low, at.seed_high, *at.applied, at.sites + chunk.parameter},
    };
    u64 first = (u64)chunk.number * CHUNK, end = min(first + CHUNK, p.elements);
    u32 largest = by.m.is_bf16 || by.v.is_bf16 ? update_chunk<true>(by, first, end) : update_chunk<false>(by, first, end);
    if (p.amax) raise_by_block(p.amax, largest, warps);
}
