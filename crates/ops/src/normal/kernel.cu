// Normal numbers, the same bits as the host's `tensor/src/normal.rs`: the same operations of f64 in the same order, each rounded to nearest
// and none fused into another, as the intrinsics say. A thread draws one block of the stream, four neighbours, and writes 16 bytes. Bound by
// f64 arithmetic, some hundred operations for two numbers: on a GPU with few units for it still far quicker than a copy from the host.

struct Arguments {
    float* y;
    u64 elements;
    u32 seed_low, seed_high, step, site;
    double std;
};

constexpr int AT_ONCE = 4;

// ln((a + 1) / 2^32).
__device__ __forceinline__ double ln(u32 a) {
    constexpr u64 MANTISSA = (1ull << 52) - 1, ONE = 1023ull << 52;
    u64 bits = (u64)__double_as_longlong(__dadd_rn((double)a, 1.0));
    // a + 1 = m 2^e with m in (sqrt(1/2), sqrt(2)].
    double m = __longlong_as_double((i64)((bits & MANTISSA) | ONE));
    bool halve = m > 1.41421356237309504880;
    m = halve ? __dmul_rn(0.5, m) : m;
    int e = (int)(bits >> 52) - 1023 + (halve ? 1 : 0);
    double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0));
    double z = __dmul_rn(s, s);
    double sum = 1.0 / 21.0;
#pragma unroll
    for (int divisor = 19; divisor > 0; divisor -= 2) sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / divisor);
    double whole = __dmul_rn((double)(e - 32), 0.69314718055994530942);
    return __dadd_rn(whole, __dmul_rn(__dmul_rn(2.0, s), sum));
}

// Sine and cosine of b / 2^32 turns.
__device__ __forceinline__ void sin_cos(u32 b, double* to_sin, double* to_cos) {
    u32 quarters = (b + (1u << 29)) >> 30;
    int rest = (int)(b - (quarters << 30));
    double x = __dmul_rn((double)rest, 6.28318530717958647693 / 4294967296.0);
    double z = __dmul_rn(x, x);
    double sin = 1.0, cos = 1.0;
#pragma unroll
    for (int n = 16; n > 0; n -= 2) {
        sin = __dadd_rn(1.0, -__dmul_rn(__dmul_rn(z, 1.0 / ((double)n * (n + 1.0))), sin));
    }
#pragma unroll
    for (int n = 17; n > 0; n -= 2) {
        cos = __dadd_rn(1.0, -__dmul_rn(__dmul_rn(z, 1.0 / ((double)n * (n + 1.0))), cos));
    }
    sin = __dmul_rn(x, sin);
    double first = quarters & 1 ? cos : sin, second = quarters & 1 ? sin : cos;
    *to_sin = quarters & 2 ? -first : first;
    *to_cos = (quarters + 1) & 2 ? -second : second;
}

__device__ __forceinline__ void pair(u32 a, u32 b, double std, float* to) {
    double radius = __dmul_rn(__dsqrt_rn(__dmul_rn(-2.0, ln(a))), std), sin, cos;
    sin_cos(b, &sin, &cos);
    to[0] = __double2float_rn(__dmul_rn(radius, cos));
    to[1] = __double2float_rn(__dmul_rn(radius, sin));
}

extern "C" __global__ void normal_f32(Arguments at) {
    u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x, first = index * AT_ONCE;
    if (first >= at.elements) return;
    Philox rng = {at.seed_low, at.seed_high, at.step, at.site};
    u32 words[4];
    rng.block(index, words);
    float drawn[AT_ONCE];
    pair(words[0], words[1], at.std, drawn);
    pair(words[2], words[3], at.std, drawn + 2);
    if (first + AT_ONCE <= at.elements) {
        store<AT_ONCE>(at.y + first, drawn);
    } else {
        for (int i = 0; first + i < at.elements; i++) at.y[first + i] = drawn[i];
    }
}
