// The arguments of AdamW, and the update of adjacent elements of a parameter.

// An entry of the table of parameters.
struct Parameter {
    void* master;
    void* m;
    void* v;
    void* grad;
    // The copy that GEMMs read, or null.
    void* compute;
    // The bits of the amax of the new master, or null.
    u32* amax;
    u64 elements;
    // The index of the first element in the whole parameter, which numbers the random words.
    u64 first_element;
    // Bit n is 1 if the n-th of the pointers above points to bf16.
    u32 are_bf16;
    float weight_decay;
};

struct UpdateArguments {
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

// The operands of a parameter, and the scalars of the update.
struct Update {
    Floats master, m, v, grad, compute;
    float lr, coefficient, beta1, rest1, correction1, beta2, rest2, correction2, eps, weight_decay;
    bool skip;
    u64 first_element;
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

// Rounds to bf16 stochastically, as the host's `round_bf16_stochastic`.
__device__ __forceinline__ float round_stochastic(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) >= 0x7f7f0000u) return x; // The store rounds it.
    return __uint_as_float((bits + (random & 0xffffu)) & 0xffff0000u);
}

// The random word of an element.
__device__ __forceinline__ u32 draw(const Philox& rng, u64 index) {
    u32 block[4];
    rng.block(index / 4, block);
    u32 low = index % 2 == 0 ? block[0] : block[1], high = index % 2 == 0 ? block[2] : block[3];
    return index % 4 < 2 ? low : high;
}

// The random words of N elements from `first` on, which is a multiple of 4 if ALIGNED.
template <int N, bool ALIGNED> __device__ __forceinline__ void draw(const Philox& rng, u64 first, u32* words) {
    if (N % 4 == 0 && (ALIGNED || first % 4 == 0)) {
#pragma unroll
        for (int i = 0; i < N; i += 4) rng.block((first + i) / 4, words + i);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) words[i] = draw(rng, first + i);
    }
}

// Updates N elements from `first` on and returns the new masters as they are stored. With ROUNDS, moments are
// rounded to bf16 stochastically. Each of their operations then rounds as on the host, so that the result has
// the same bits. ALIGNED says that the index of the first element in the whole parameter is a multiple of 4.
template <int N, bool ROUNDS, bool ALIGNED> __device__ __forceinline__ void update(const Update& u, u64 first, float (&master)[N]) {
    float m[N], v[N], grad[N];
    load<N>(u.master, first, master);
    if (!u.skip) {
        load<N>(u.m, first, m);
        load<N>(u.v, first, v);
        load<N>(u.grad, first, grad);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (ROUNDS) {
                float g = __fmul_rn(grad[i], u.coefficient);
                m[i] = __fadd_rn(__fmul_rn(u.beta1, m[i]), __fmul_rn(u.rest1, g));
                v[i] = __fadd_rn(__fmul_rn(u.beta2, v[i]), __fmul_rn(u.rest2, __fmul_rn(g, g)));
            } else {
                float g = grad[i] * u.coefficient;
                m[i] = u.beta1 * m[i] + u.rest1 * g;
                v[i] = u.beta2 * v[i] + u.rest2 * (g * g);
            }
            float step = m[i] * u.correction1 / (sqrtf(v[i] * u.correction2) + u.eps);
            master[i] -= u.lr * (step + u.weight_decay * master[i]);
        }
        if (ROUNDS) {
            u32 words[N];
            draw<N, ALIGNED>(u.rng, u.first_element + first, words);
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (u.m.is_bf16) m[i] = round_stochastic(m[i], words[i]);
                if (u.v.is_bf16) v[i] = round_stochastic(v[i], words[i] >> 16);
            }
        }
        store<N>(u.m, first, m);
        store<N>(u.v, first, v);
        store<N>(u.master, first, master);
    }
    if (u.master.is_bf16 && !u.skip) {
#pragma unroll
        for (int i = 0; i < N; i++) master[i] = widen(narrow<bf16>(master[i]));
    }
    if (u.compute.data) store<N>(u.compute, first, master);
}

// The update of a parameter. All threads of the block call it and wait for each other.
__device__ __forceinline__ Update update_of(const UpdateArguments& args, u32 parameter) {
    __shared__ float corrections[2];
    if (threadIdx.x < 2)
        corrections[threadIdx.x] = (float)(1.0 / (1.0 - power(threadIdx.x == 0 ? args.beta1 : args.beta2, *args.applied)));
    Parameter p = args.parameters[parameter];
    __syncthreads();
    return {
        {p.master, p.are_bf16 & 1},
        {p.m, p.are_bf16 >> 1 & 1},
        {p.v, p.are_bf16 >> 2 & 1},
        {p.grad, p.are_bf16 >> 3 & 1},
        {p.compute, p.are_bf16 >> 4 & 1},
        load(args.lr, 0),
        load(args.coefficient, 0),
        (float)args.beta1,
        args.rest1,
        corrections[0],
        (float)args.beta2,
        args.rest2,
        corrections[1],
        args.eps,
        p.weight_decay,
        *args.skip != 0,
        p.first_element,
        {args.seed_low, args.seed_high, *args.applied, args.sites + parameter},
    };
}
