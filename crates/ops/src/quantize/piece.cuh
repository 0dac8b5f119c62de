// What a cast is told and what it has in registers: arguments, a thread's pieces, their magnitudes, and scales that are powers of two. It
// follows OF, which is what is cast, and HIGH, the rows of a piece.

#define INPUT 0
#define SWIGLU 1
#define SWIGLU_GRAD 2
#define NORM 3
#define SWIGLU_OF_KEPT 4
#define SWIGLU_GRAD_OF_KEPT 5
#define SWIGLU_KEEPING 6

// One layout: [rows, cols] as it is written.
struct Side {
    u8* q;
    float* inv_scale;
    // Maxima of regions larger than an area, as bits: magnitudes are in the order of their bits, and NaNs above all.
    u32* maxima;
    u32 rows;
    u32 cols;
    // From the scale of one region to that of the one below, and of the one beside it; how many there are in memory.
    u32 down;
    u32 across;
    u32 scales;
    u32 padding;
};

struct Quantize {
    // The tensor, gate and up, dy, or what the norm is of.
    const void* x;
    // Gate and up, where x is dy.
    const void* gate_up;
    // Where they are kept in E4M3: their tiles' scales, and how many stand for a column of tiles.
    const float* gate_up_scale;
    u64 gate_up_rows;
    // Where they are to be kept.
    u8* keep;
    float* keep_scale;
    // Of the norm.
    Floats rstd;
    Floats w;
    // Of the tensor, where it is given.
    const float* scale;
    // The tensor's, where something else has measured it.
    const u32* measured;
    u32* amax;
    Side direct;
    Side transposed;
    u32 rows;
    u32 cols;
    u32 accumulate;
    // The format's largest finite number.
    float largest;
    // Areas side by side, and one below the other.
    u32 across;
    u32 down;
};

// Half a warp has a row of pieces.
constexpr int EDGE = 128, WIDTH = 8, LANES_WIDE = EDGE / WIDTH, LANES_HIGH = EDGE / HIGH, THREADS = LANES_WIDE * LANES_HIGH,
              WARPS = THREADS / 32;

// Whether gate and up are kept so.
constexpr bool KEPT = OF == SWIGLU_OF_KEPT || OF == SWIGLU_GRAD_OF_KEPT;

constexpr bool GRAD = OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT;

// The quotient of a format's largest number and amax rounded down to a power of two, which is a difference of exponents, and one less
// where amax has more behind the point; at most 2^127. An amax below the normal numbers is far beyond that.
__device__ __forceinline__ float power_of_two(float largest, u32 amax) {
    u32 most = __float_as_uint(largest);
    int exponent = (int)(most >> 23) - (int)(amax >> 23) - ((amax & 0x7fffffu) > (most & 0x7fffffu));
    bool has_one = amax - 1 < 0x7f7fffffu;
    return has_one ? __uint_as_float((u32)min(127 + exponent, 254) << 23) : 1.0f;
}

__device__ __forceinline__ float inverse_of_power(float scale) {
    u32 exponent = __float_as_uint(scale) >> 23;
    // 2^-127 is no normal number.
    return __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
}

// What nothing writes meanwhile, so that it may be asked for before what stands before is written.
__device__ __forceinline__ uint4 ask(const uint4* from) {
    uint4 raw;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from));
    return raw;
}
__device__ __forceinline__ uint2 ask(const uint2* from) {
    uint2 raw;
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "l"(from));
    return raw;
}
__device__ __forceinline__ float ask(const float* from) {
    float x;
    asm("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ u32 ask(const u32* from) { return __float_as_uint(ask((const float*)from)); }

// Eight neighbours of a row, as they stand in memory or would.
template <class T> struct Eight {
    uint4 raw[WIDTH / LANES<T>];

    __device__ __forceinline__ void numbers(float* to) const {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) unpack<T>(raw[v], to + v * LANES<T>);
    }

    __device__ __forceinline__ void ask(const T* from) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) raw[v] = ::ask((const uint4*)from + v);
    }

    // Of the numbers themselves, each rounded.
    __device__ __forceinline__ void put(const float* x) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) raw[v] = pack<T>(x + v * LANES<T>);
    }
};

// Magnitudes, as bits, which are in the order of the numbers, with NaNs above all.
template <class T> struct Magnitudes;
template <> struct Magnitudes<float> {
    using Bits = u32;
    u32 bits[WIDTH];

    __device__ __forceinline__ void of(const Eight<float>& x) {
        const u32* raw = (const u32*)x.raw;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = raw[i] & 0x7fffffffu;
    }
    __device__ __forceinline__ void atomic_amax(const Magnitudes& other) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = max(bits[i], other.bits[i]);
    }
    // By the thread so many lanes away.
    __device__ __forceinline__ void raise_across(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = max(bits[i], __shfl_xor_sync(0xffffffffu, bits[i], lanes));
    }
    __device__ __forceinline__ void store(u32* to) const {
        *(uint4*)to = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        *(uint4*)(to + 4) = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    }
    __device__ __forceinline__ u32 folded() const {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) most = max(most, bits[i]);
        return most;
    }
    __device__ __forceinline__ u32 largest() const { return folded(); }
};

template <> struct Magnitudes<bf16> {
    using Bits = u16;
    u32 pairs[WIDTH / 2];

    __device__ __forceinline__ void of(const Eight<bf16>& x) {
        const u32* raw = (const u32*)x.raw;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = raw[i] & 0x7fff7fffu;
    }
    __device__ __forceinline__ void atomic_amax(const Magnitudes& other) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = max_halves(pairs[i], other.pairs[i]);
    }
    __device__ __forceinline__ void raise_across(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = max_halves(pairs[i], __shfl_xor_sync(0xffffffffu, pairs[i], lanes));
    }
    __device__ __forceinline__ void store(u16* to) const { *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]); }
    // The largest of each half of the words.
    __device__ __forceinline__ u32 folded() const {
        return max_halves(max_halves(pairs[0], pairs[1]), max_halves(pairs[2], pairs[3]));
    }
    __device__ __forceinline__ u32 largest() const {
        u32 most = folded();
        return max(most & 0xffff0000u, most << 16);
    }
};

// The larger of two words of what Magnitudes folds.
template <class T> __device__ __forceinline__ u32 larger(u32 a, u32 b) { return sizeof(T) == 2 ? max_halves(a, b) : max(a, b); }

// The largest of N words each, over the sixteen threads that have a row of pieces: each is left with one of them, that of the word
// x_lane / (16 / N). In every step a thread has half as many words, and gives the other half to one that keeps those.
template <class T, int N> __device__ __forceinline__ u32 largest_across(u32 (&words)[N]) {
    int left = N;
#pragma unroll
    for (int lanes = LANES_WIDE / 2; lanes > 0; lanes /= 2) {
        if (left > 1) {
            left /= 2;
            bool later = threadIdx.x & lanes;
#pragma unroll
            for (int i = 0; i < left; i++) {
                u32 given = later ? words[i] : words[i + left], own = later ? words[i + left] : words[i];
                words[i] = larger<T>(own, __shfl_xor_sync(0xffffffffu, given, lanes));
            }
        } else {
            words[0] = larger<T>(words[0], __shfl_xor_sync(0xffffffffu, words[0], lanes));
        }
    }
    return words[0];
}

// Two such words of two halves each as one of both's largest.
__device__ __forceinline__ u32 both_halves(u32 a, u32 b) { return max_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)); }

// The magnitudes of the largest of N things, of each thread's folded ones, over the threads of a row: each is left with that of the thing
// `mine`, one that every thing has for its own, `speaks`.
template <class T, int N> struct Largest {
    static constexpr int WORDS = sizeof(T) == 2 ? N / 2 : N, SHARE = LANES_WIDE / WORDS, EACH = N / WORDS;
    u32 bits;
    u32 mine;
    bool speaks;

    __device__ __forceinline__ Largest(const u32 (&folded)[N]) {
        u32 words[WORDS], x_lane = threadIdx.x % LANES_WIDE;
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = EACH == 2 ? both_halves(folded[2 * i], folded[2 * i + 1]) : folded[i];
        u32 most = largest_across<T>(words);
        mine = x_lane / SHARE * EACH + x_lane % EACH;
        bits = EACH == 1 ? most : x_lane % 2 ? most & 0xffff0000u : most << 16;
        speaks = x_lane % SHARE < EACH;
    }
};
