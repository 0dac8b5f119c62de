// Rotary embedding of queries and keys, optionally after an RMSNorm of each head, and their backward
// (qk_norm_rope/mod.rs has the formulas).
//
// The launcher defines GROUP, PAIRS and VECTOR from the head's width. A group of GROUP lanes handles a head;
// each lane holds PAIRS times N columns of the first half of the head and the columns of the second half with
// which they are rotated. N is 16 bytes if the half allows it (VECTOR), else one element.
//
// Bound by memory: each element is read and written once. The heads of a token are in one block if they fit,
// so that the row of the table is read once from L2 and then from L1. Grid: (tokens, blocks for the heads);
// the backward with the norm has a fixed number of blocks along the tokens, which loop over them and sum the
// gradients of the weights in registers, and a second launch that adds the blocks' sums in order.

constexpr int THREADS = PAIRS == 1 ? ONE_PAIR_THREADS : MORE_PAIRS_THREADS;

struct Heads {
    const int* positions;
    // [table_rows, head_dim]: half cosines, half sines.
    Floats table;
    Floats q_w;
    Floats k_w;
    u64 tokens;
    u32 table_rows;
    u32 head_dim;
    // Number of query heads, of query and key heads, and of all heads.
    u32 queries;
    u32 rotated;
    u32 all;
};

struct Rope {
    Heads heads;
    const void* x;
    // The same as x without the norm.
    void* y;
    float* rstd;
    // Bits of the amax of y, if it is computed.
    u32* amax;
    float eps;
    // 1 for the forward, -1 for the backward.
    float direction;
};

struct RopeGrad {
    Heads heads;
    // Overwritten with dx.
    void* dy;
    const void* x;
    Floats rstd;
    // [blocks of heads, gridDim.x, 2, head_dim]: sums for the weight of queries and for that of keys.
    float* parts;
    // Bits of the amax of dx, if it is computed.
    u32* amax;
};

// Takes its arguments by value: kernel arguments whose address is taken are copied to local memory.
__device__ __forceinline__ Floats either(bool first, Floats a, Floats b) {
    return {first ? a.data : b.data, first ? a.is_bf16 : b.is_bf16};
}

template <class T> constexpr int WIDE = VECTOR ? LANES<T> : 1;

__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int lane = GROUP / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// The head of a thread's group.
__device__ __forceinline__ u32 head_of_group() { return (blockIdx.y * blockDim.x + threadIdx.x) / GROUP; }

// First column of a lane's p-th piece.
template <int N> __device__ __forceinline__ u32 column_of(int p) { return (threadIdx.x % GROUP + p * GROUP) * N; }

// Cosines and sines of N columns for the position of a token; NaN for a position outside of the table.
template <int N> __device__ __forceinline__ void angles(const Heads& args, u64 token, u32 column, float* cos, float* sin) {
    u32 position = (u32)args.positions[token];
    if (position < args.table_rows) {
        u64 first = (u64)position * args.head_dim + column;
        load<N>(args.table, first, cos);
        load<N>(args.table, first + args.head_dim / 2, sin);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) cos[i] = sin[i] = NAN_F;
    }
}

// Rotates N pairs (a, b) by the angle times `direction`.
template <int N>
__device__ __forceinline__ void rotate(float* a, float* b, const float* cos, const float* sin, float direction) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float s = sin[i] * direction, first = a[i] * cos[i] - b[i] * s;
        b[i] = b[i] * cos[i] + a[i] * s;
        a[i] = first;
    }
}

// Bits of the maximum of `amax` and the magnitudes of x, after rounding to T.
template <class T, int N> __device__ __forceinline__ u32 raised_amax(const float* x, u32 amax) {
#pragma unroll
    for (int i = 0; i < N; i++) amax = max(amax, __float_as_uint(widen(narrow<T>(x[i]))) & 0x7fffffffu);
    return amax;
}

// Rotates in place. Values are not written; with AMAX they are read, because the amax includes them.
template <class T, bool AMAX> __device__ __forceinline__ void rope(const Rope& args) {
    constexpr int N = WIDE<T>;
    __shared__ u32 space[THREADS / 32];
    u64 token = blockIdx.x;
    u32 head = head_of_group(), half = args.heads.head_dim / 2, amax = 0;
    bool is_head = token < args.heads.tokens && head < (AMAX ? args.heads.all : args.heads.rotated);
    T* y = (T*)args.y + (token * args.heads.all + head) * args.heads.head_dim;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        u32 column = column_of<N>(p);
        if (!is_head || column >= half) continue;
        float a[N], b[N], cos[N], sin[N];
        load<N>((const T*)y + column, a);
        load<N>((const T*)y + half + column, b);
        if (!AMAX || head < args.heads.rotated) {
            angles<N>(args.heads, token, column, cos, sin);
            rotate<N>(a, b, cos, sin, args.direction);
            store<N>(y + column, a);
            store<N>(y + half + column, b);
        }
        if (AMAX) amax = raised_amax<T, N>(b, raised_amax<T, N>(a, amax));
    }
    if (AMAX) atomic_amax_of_block(args.amax, amax, space);
}

extern "C" __global__ void rope_clear(Rope args) { *args.amax = 0; }

// Normalises and rotates queries and keys, and copies values.
template <class T> __device__ __forceinline__ void norm_rope(const Rope& args) {
    constexpr int N = WIDE<T>;
    u64 token = blockIdx.x;
    u32 head = head_of_group(), half = args.heads.head_dim / 2;
    // Lanes without a head take part in the shuffles of group_sum.
    bool is_head = token < args.heads.tokens && head < args.heads.all;
    u64 first = (token * args.heads.all + head) * args.heads.head_dim;
    float a[PAIRS][N] = {}, b[PAIRS][N] = {};
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        u32 column = column_of<N>(p);
        if (!is_head || column >= half) continue;
        load<N>((const T*)args.x + first + column, a[p]);
        load<N>((const T*)args.x + first + half + column, b[p]);
#pragma unroll
        for (int i = 0; i < N; i++) squares += a[p][i] * a[p][i] + b[p][i] * b[p][i];
    }
    float rstd = 1.0f / sqrtf(group_sum(squares) / args.heads.head_dim + args.eps);
    if (!is_head) return;
    bool rotated = head < args.heads.rotated;
    if (rotated && threadIdx.x % GROUP == 0) args.rstd[token * args.heads.rotated + head] = rstd;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        u32 column = column_of<N>(p);
        if (column >= half) continue;
        if (rotated) {
            Floats weight = either(head < args.heads.queries, args.heads.q_w, args.heads.k_w);
            float w[N], v[N], cos[N], sin[N];
            load<N>(weight, column, w);
            load<N>(weight, half + column, v);
#pragma unroll
            for (int i = 0; i < N; i++) {
                a[p][i] = a[p][i] * rstd * w[i];
                b[p][i] = b[p][i] * rstd * v[i];
            }
            angles<N>(args.heads, token, column, cos, sin);
            rotate<N>(a[p], b[p], cos, sin, 1.0f);
        }
        store<N>((T*)args.y + first + column, a[p]);
        store<N>((T*)args.y + first + half + column, b[p]);
    }
}

// The amax of the gradients of values, which pass unchanged, in every gridDim.x-th token.
template <class T> __device__ __forceinline__ u32 amax_of_values(const RopeGrad& args) {
    constexpr int N = WIDE<T>;
    u32 width = args.heads.head_dim, pieces = (args.heads.all - args.heads.rotated) * (width / N), amax = 0;
    u32 tokens = blockIdx.x < args.heads.tokens ? (u32)((args.heads.tokens - blockIdx.x - 1) / gridDim.x + 1) : 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < tokens * pieces; i += blockDim.x) {
        u64 token = blockIdx.x + (u64)(i / pieces) * gridDim.x;
        float x[N];
        load<N>((const T*)args.dy + (token * args.heads.all + args.heads.rotated) * width + i % pieces * N, x);
        amax = raised_amax<T, N>(x, amax);
    }
    return amax;
}

// Backward with the norm. A block loops over every gridDim.x-th token, and a group has the same head of each,
// so that its lanes sum the gradient of the weight in registers. With AMAX, an additional row of blocks along
// y handles only the values, so that the sums are in the same order as without it.
template <class T, bool AMAX> __device__ __forceinline__ void norm_rope_grad(const RopeGrad& args) {
    constexpr int N = WIDE<T>;
    // [groups, head_dim].
    extern __shared__ float sums[];
    __shared__ u32 space[THREADS / 32];
    u32 amax = 0;
    if (AMAX && blockIdx.y == gridDim.y - 1) {
        atomic_amax_of_block(args.amax, amax_of_values<T>(args), space);
        return;
    }
    u32 head = head_of_group(), width = args.heads.head_dim, half = width / 2;
    bool is_head = head < args.heads.rotated;
    Floats weight = either(head < args.heads.queries, args.heads.q_w, args.heads.k_w);
    float w[PAIRS][N] = {}, v[PAIRS][N] = {}, dw[PAIRS][N] = {}, dv[PAIRS][N] = {};
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        u32 column = column_of<N>(p);
        if (column >= half) continue;
        load<N>(weight, column, w[p]);
        load<N>(weight, half + column, v[p]);
    }
    for (u64 token = blockIdx.x; token < args.heads.tokens; token += gridDim.x) {
        u64 first = (token * args.heads.all + head) * width;
        float a[PAIRS][N] = {}, b[PAIRS][N] = {}, n[PAIRS][N] = {}, m[PAIRS][N] = {};
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            u32 column = column_of<N>(p);
            if (!is_head || column >= half) continue;
            load<N>((const T*)args.dy + first + column, a[p]);
            load<N>((const T*)args.dy + first + half + column, b[p]);
            load<N>((const T*)args.x + first + column, n[p]);
            load<N>((const T*)args.x + first + half + column, m[p]);
        }
        float rstd = is_head ? load(args.rstd, token * args.heads.rotated + head) : 0.0f, along = 0.0f;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            u32 column = column_of<N>(p);
            if (!is_head || column >= half) continue;
            float cos[N], sin[N];
            angles<N>(args.heads, token, column, cos, sin);
            rotate<N>(a[p], b[p], cos, sin, -1.0f);
#pragma unroll
            for (int i = 0; i < N; i++) {
                n[p][i] *= rstd, m[p][i] *= rstd;
                dw[p][i] += a[p][i] * n[p][i], dv[p][i] += b[p][i] * m[p][i];
                a[p][i] *= w[p][i], b[p][i] *= v[p][i];
                along += a[p][i] * n[p][i] + b[p][i] * m[p][i];
            }
        }
        along = group_sum(along) / width;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            u32 column = column_of<N>(p);
            if (!is_head || column >= half) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                a[p][i] = rstd * (a[p][i] - n[p][i] * along);
                b[p][i] = rstd * (b[p][i] - m[p][i] * along);
            }
            if (AMAX) amax = raised_amax<T, N>(b[p], raised_amax<T, N>(a[p], amax));
            store<N>((T*)args.dy + first + column, a[p]);
            store<N>((T*)args.dy + first + half + column, b[p]);
        }
    }
    u32 group = threadIdx.x / GROUP, groups = blockDim.x / GROUP;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        u32 column = column_of<N>(p);
        if (column >= half) continue;
        store<N>(sums + group * width + column, dw[p]);
        store<N>(sums + group * width + half + column, dv[p]);
    }
    __syncthreads();
    float* part = args.parts + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 2 * width;
    for (u32 column = threadIdx.x; column < 2 * width; column += blockDim.x) {
        bool of_keys = column >= width;
        float sum = 0.0f;
        for (u32 g = 0; g < groups; g++) {
            u32 group_head = blockIdx.y * groups + g;
            if (group_head < args.heads.rotated && (group_head >= args.heads.queries) == of_keys)
                sum += sums[g * width + column - (of_keys ? width : 0)];
        }
        part[column] = sum;
    }
    if (AMAX) atomic_amax_of_block(args.amax, amax, space);
}

extern "C" __global__ void qk_norm_rope_grad_clear(RopeGrad args) { *args.amax = 0; }

struct Sum {
    const float* parts;
    Floats dq_w;
    Floats dk_w;
    u32 head_dim;
    u32 count;
    u32 accumulate_q;
    u32 accumulate_k;
};

extern "C" __global__ void qk_norm_rope_sum(Sum args) {
    u32 column = blockIdx.x * 32 + threadIdx.x;
    bool of_keys = column >= args.head_dim;
    sum_parts(args.parts, args.count, 2 * args.head_dim, column, of_keys ? args.accumulate_k : args.accumulate_q,
              either(of_keys, args.dk_w, args.dq_w), of_keys ? column - args.head_dim : column);
}

#define KERNELS(T, NAME)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_##NAME(Rope args) { rope<T, false>(args); }       \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_amax_##NAME(Rope args) { rope<T, true>(args); }   \
    extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope_##NAME(Rope args) { norm_rope<T>(args); } \
    extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope_grad_##NAME(RopeGrad args) {              \
        norm_rope_grad<T, false>(args);                                                                          \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope_grad_amax_##NAME(RopeGrad args) {         \
        norm_rope_grad<T, true>(args);                                                                           \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
