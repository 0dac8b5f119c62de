// Normal numbers from Philox by the Box-Muller transform, equal to the bit to the host's
// `tensor/src/normal.rs`.
//
// Every f64 operation of the host is done here in the same order. The __d*_rn intrinsics round to nearest and
// keep the compiler from contracting a multiplication and an addition into an FMA. Each thread draws one
// Philox block of four words and writes four f32, 16 bytes. Bound by f64 arithmetic, about a hundred
// operations for two numbers, which is still much faster than copying from the host, even on GPUs with few
// f64 units. y may begin within a block of words. Grid: ceil((elements + first % 4) / (4 * blockDim.x)).

struct Arguments {
    float* y;
    u64 elements;
    // Elements after these are 0.
    u64 drawn;
    // The index of the first element in the stream.
    u64 first;
    u32 seed_low, seed_high, step, site;
    double std;
};

// ln((a + 1) / 2^32), by the series of atanh: ln m = 2 (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1).
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

// Sine and cosine of b / 2^32 turns: Taylor series within an eighth of a turn of the nearest quarter, then
// signs and an exchange by the quarter.
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

// Two normal numbers from two random words (Box & Muller, 1958): radius sqrt(-2 ln u1), angle 2 pi u2.
__device__ __forceinline__ void pair(u32 a, u32 b, double std, float* to) {
    double radius = __dmul_rn(__dsqrt_rn(__dmul_rn(-2.0, ln(a))), std), sin, cos;
    sin_cos(b, &sin, &cos);
    to[0] = __double2float_rn(__dmul_rn(radius, cos));
    to[1] = __double2float_rn(__dmul_rn(radius, sin));
}

extern "C" __global__ void normal_f32(Arguments args) {
    // Counted from the block of words in which y begins.
    u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x, first = index * PER_THREAD;
    u64 begin = args.first % PER_THREAD, end = begin + args.elements, drawn_end = begin + args.drawn;
    if (first >= end) return;
    Philox rng = {args.seed_low, args.seed_high, args.step, args.site};
    u32 words[4];
    rng.block(args.first / PER_THREAD + index, words);
    float drawn[PER_THREAD];
    pair(words[0], words[1], args.std, drawn);
    pair(words[2], words[3], args.std, drawn + 2);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) drawn[i] = first + i < drawn_end ? drawn[i] : 0.0f;
    if (begin == 0 && first + PER_THREAD <= end) {
        store<PER_THREAD>(args.y + first, drawn);
        return;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (first + i >= begin && first + i < end) args.y[first + i - begin] = drawn[i];
    }
}
