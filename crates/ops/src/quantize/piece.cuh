// The arguments of a cast, and a thread's registers: its piece of an area, magnitudes of its elements, and
// scales that are powers of two. It depends on SOURCE, the value to cast, and on HEIGHT, the rows of a piece.

// One layout of the result: [rows, cols] as it is written.
struct CastLayout {
    u8* q;
    float* inv_scale;
    // The amaxes of regions larger than an area, as bits: magnitudes have the order of their bits, NaNs above
    // all.
    u32* amaxes;
    u32 rows;
    u32 cols;
    // Strides of scales: to the region below, and to the region on the right.
    u32 down;
    u32 across;
    // The number of scales in memory.
    u32 scales;
    u32 padding;
};

struct QuantizeArguments {
    // The tensor to cast, gate and up, dy, the norm's input, or the tokens that PERMUTE gathers.
    const void* x;
    union {
        // Gate and up if x is dy.
        const void* gate_up;
        // PERMUTE: for each row the copy of a token that it holds; where tokens are measured, for each token
        // the rows of its copies. -1 is none.
        const int* indices;
    };
    // If gate and up are saved in E4M3: the scales of their tiles, and the number of scales in a column of
    // tiles.
    const float* gate_up_scale;
    union {
        u64 gate_up_rows;
        // PERMUTE: the number of copies of a token.
        u64 top_k;
    };
    union {
        // The copy of gate and up in E4M3 that SWIGLU_SAVING writes.
        u8* saved;
        // The gradient of the weights of rows.
        float* dweights;
    };
    union {
        // The scales of that copy.
        float* saved_scale;
        // For each area of columns and each row, the sum of that gradient over these columns.
        float* dweight_sums;
    };
    // A number for each row: the norm's 1/rms, or the weight of the row.
    Floats of_rows;
    // The norm's weight.
    Floats w;
    // The tensor's delayed scale, or null.
    const float* given_scale;
    // The tensor's amax as another kernel reduced it, or null.
    const u32* given_amax;
    u32* amax;
    union {
        // The end of groups of rows (tail.cuh).
        const u32* end;
        // PERMUTE: the sources of rows, or null if the tail is written like other rows.
        const int* sources;
    };
    CastLayout row_major;
    CastLayout transposed;
    u32 rows;
    u32 cols;
    u32 accumulate;
    // The format's largest finite number.
    float max_finite;
    u32 areas_across;
    u32 areas_down;
};

// Half a warp has a row of pieces.
constexpr int LANES_WIDE = EDGE / WIDTH, LANES_HIGH = EDGE / HEIGHT, THREADS = LANES_WIDE * LANES_HIGH, WARPS = THREADS / 32;

// True if a value of the tensor's width is computed from gate and up.
constexpr bool GATED = SOURCE != INPUT && SOURCE != NORM && SOURCE != PERMUTE;

// True if gate and up are read from their copy in E4M3.
constexpr bool RESTORED = SOURCE == SWIGLU_RESTORED || SOURCE == SWIGLU_GRAD_RESTORED;

constexpr bool GRAD = SOURCE == SWIGLU_GRAD || SOURCE == SWIGLU_GRAD_RESTORED;

// Reads memory that nothing writes during the launch, so that the compiler may move the read above earlier
// writes.
__device__ __forceinline__ uint4 load_nc(const uint4* from) {
    uint4 raw;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from));
    return raw;
}
// The same, or zeros without a read.
__device__ __forceinline__ uint4 load_nc_if(bool exists, const uint4* from) {
    uint4 raw;
    asm("{\n.reg .pred exists;\nsetp.ne.u32 exists, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@exists ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(raw.x), "=&r"(raw.y), "=&r"(raw.z), "=&r"(raw.w)
        : "l"(from), "r"((u32)exists));
    return raw;
}
__device__ __forceinline__ uint2 load_nc(const uint2* from) {
    uint2 raw;
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "l"(from));
    return raw;
}
__device__ __forceinline__ float load_nc(const float* from) {
    float x;
    asm("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ u32 load_nc(const u32* from) { return __float_as_uint(load_nc((const float*)from)); }

// Eight neighbours of a row in their stored form.
template <class T> struct Eight {
    uint4 raw[WIDTH / LANES<T>];

    __device__ __forceinline__ void unpack_to(float* to) const {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) unpack<T>(raw[v], to + v * LANES<T>);
    }

    __device__ __forceinline__ void load(const T* from) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) raw[v] = load_nc((const uint4*)from + v);
    }

    __device__ __forceinline__ void load_if(bool exists, const T* from) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) raw[v] = load_nc_if(exists, (const uint4*)from + v);
    }

    // Rounds eight numbers.
    __device__ __forceinline__ void pack_from(const float* x) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) raw[v] = pack<T>(x + v * LANES<T>);
    }
};

// Magnitudes of eight elements as bits, or maxima of such magnitudes.
template <class T> struct Magnitudes;
template <> struct Magnitudes<float> {
    using Bits = u32;
    u32 bits[WIDTH];

    __device__ __forceinline__ void set(const Eight<float>& x) {
        const u32* raw = (const u32*)x.raw;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = raw[i] & 0x7fffffffu;
    }
    __device__ __forceinline__ void raise(const Magnitudes& other) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = max(bits[i], other.bits[i]);
    }
    // Raises them to those of the thread this many lanes away.
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
    __device__ __forceinline__ u32 amax() const { return folded(); }
};

template <> struct Magnitudes<bf16> {
    using Bits = u16;
    u32 pairs[WIDTH / 2];

    __device__ __forceinline__ void set(const Eight<bf16>& x) {
        const u32* raw = (const u32*)x.raw;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = raw[i] & 0x7fff7fffu;
    }
    __device__ __forceinline__ void raise(const Magnitudes& other) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = max_halves(pairs[i], other.pairs[i]);
    }
    __device__ __forceinline__ void raise_across(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = max_halves(pairs[i], __shfl_xor_sync(0xffffffffu, pairs[i], lanes));
    }
    __device__ __forceinline__ void store(u16* to) const { *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]); }
    // A word whose halves are the maxima of the even elements and of the odd ones.
    __device__ __forceinline__ u32 folded() const {
        return max_halves(max_halves(pairs[0], pairs[1]), max_halves(pairs[2], pairs[3]));
    }
    __device__ __forceinline__ u32 amax() const {
        u32 most = folded();
        return max(most & 0xffff0000u, most << 16);
    }
};

// The maximum of two words that Magnitudes has folded.
template <class T> __device__ __forceinline__ u32 max_folded(u32 a, u32 b) { return sizeof(T) == 2 ? max_halves(a, b) : max(a, b); }

// Folds N words over the sixteen threads that have a row of pieces. Each thread returns the result of one
// word, number x_lane / (16 / N). In every step a thread keeps half of its words and sends the others to the
// thread that keeps those.
template <class W, int N, class F> __device__ __forceinline__ W fold_across(W (&words)[N], F fold) {
    int left = N;
#pragma unroll
    for (int lanes = LANES_WIDE / 2; lanes > 0; lanes /= 2) {
        if (left > 1) {
            left /= 2;
            bool later = threadIdx.x & lanes;
#pragma unroll
            for (int i = 0; i < left; i++) {
                W sent = later ? words[i] : words[i + left], own = later ? words[i + left] : words[i];
                words[i] = fold(own, __shfl_xor_sync(0xffffffffu, sent, lanes));
            }
        } else {
            words[0] = fold(words[0], __shfl_xor_sync(0xffffffffu, words[0], lanes));
        }
    }
    return words[0];
}

// One word with the maximum of a's halves and that of b's.
__device__ __forceinline__ u32 max_of_each(u32 a, u32 b) { return max_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)); }

// The amaxes of N rows, of which each thread of a row of pieces has its part as folded words. Each thread
// gets the amax of one of them, number `index`; exactly one thread for each has `is_leader` set.
template <class T, int N> struct RowAmax {
    static constexpr int WORDS = sizeof(T) == 2 ? N / 2 : N, SHARE = LANES_WIDE / WORDS, EACH = N / WORDS;
    u32 bits;
    u32 index;
    bool is_leader;

    __device__ __forceinline__ RowAmax(const u32 (&folded)[N]) {
        u32 words[WORDS], x_lane = threadIdx.x % LANES_WIDE;
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = EACH == 2 ? max_of_each(folded[2 * i], folded[2 * i + 1]) : folded[i];
        u32 most = fold_across(words, [](u32 a, u32 b) { return max_folded<T>(a, b); });
        index = x_lane / SHARE * EACH + x_lane % EACH;
        bits = EACH == 1 ? most : x_lane % 2 ? most & 0xffff0000u : most << 16;
        is_leader = x_lane % SHARE < EACH;
    }
};
