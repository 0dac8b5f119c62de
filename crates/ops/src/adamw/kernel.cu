// AdamW over all parameters in one launch.
//
// Bound by memory: with f32 operands and a bf16 copy, 16 bytes are read and 14 written an element, each once. Parameters are cut into
// chunks of one size, and a block has a chunk: a few huge tensors and many tiny ones keep the card equally busy. What a chunk is made of
// stands in tables that were written once. The numbers that change from step to step are read from the card's memory.

// In words of 8 bytes where it is written.
struct Parameter {
    void* master;
    void* m;
    void* v;
    void* grad;
    // Null where there is no copy.
    void* compute;
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
};

constexpr int THREADS = 256, CHUNK = 16384, AT_ONCE = 8;

// The operands of a chunk's parameter, and the numbers of the update.
struct Update {
    Floats master, m, v, grad, compute;
    float lr, coefficient, beta1, rest1, correction1, beta2, rest2, correction2, eps, weight_decay;
    bool skip;
};

__device__ __forceinline__ double power(double base, u32 exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2) result *= base;
        base *= base;
    }
    return result;
}

template <int N> __device__ __forceinline__ void update(const Update& by, u64 first) {
    float master[N], m[N], v[N], grad[N];
    load<N>(by.master, first, master);
    if (!by.skip) {
        load<N>(by.m, first, m);
        load<N>(by.v, first, v);
        load<N>(by.grad, first, grad);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float g = grad[i] * by.coefficient;
            m[i] = by.beta1 * m[i] + by.rest1 * g;
            v[i] = by.beta2 * v[i] + by.rest2 * (g * g);
            float step = m[i] * by.correction1 / (sqrtf(v[i] * by.correction2) + by.eps);
            master[i] -= by.lr * (step + by.weight_decay * master[i]);
        }
        store<N>(by.m, first, m);
        store<N>(by.v, first, v);
        store<N>(by.master, first, master);
    }
    if (by.compute.at == nullptr) return;
    // The copy is made of the master as it is stored.
    if (by.master.is_bf16) {
#pragma unroll
        for (int i = 0; i < N; i++) master[i] = widen(narrow<bf16>(master[i]));
    }
    store<N>(by.compute, first, master);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) adamw(AdamW at) {
    __shared__ float corrections[2];
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
    };
    u64 first = (u64)chunk.number * CHUNK, end = min(first + CHUNK, p.elements);
    u64 i = first + threadIdx.x * AT_ONCE;
    for (; i + AT_ONCE <= end; i += THREADS * AT_ONCE) update<AT_ONCE>(by, i);
    // One thread has what is left behind whole vectors.
    for (; i < end; i++) update<1>(by, i);
}
