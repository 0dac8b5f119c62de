// Norms of rows, and their backward.
//
// Bound by memory: each kernel on the vector path reads and writes every element once. A row is a block's. Where rows do not begin at
// multiples of 16 bytes, or are too wide for a block to keep, a second kernel reads them twice instead.

struct Norm {
    const void* x;
    // Only with the addition: what is added, and the sum.
    const void* delta;
    void* sum;
    Floats w;
    // Only where it is written.
    void* y;
    float* rstd;
    // Where it is not; may be null: the bits of the amax of y as it would be stored, which blocks raise.
    u32* amax;
    u64 rows;
    u32 width;
    float eps;
};

// Has the cache fetch the weights of a vector, which are needed only after the reduction.
template <class T> __device__ __forceinline__ void fetch_weights(const Floats& w, u32 vector) {
    const char* at = (const char*)w.at + (u64)vector * LANES<T> * (w.is_bf16 ? sizeof(bf16) : sizeof(float));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// With Y the norm is written, else at most measured.
template <class T, bool ADD, bool Y> __device__ __forceinline__ void norm_held(const Norm& at) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= at.rows) return;
    u32 vectors = at.width / LANES<T>;
    u64 first = row * vectors;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 v = threadIdx.x + k * blockDim.x;
        // With more rows somebody else has read them.
        if (at.rows == 1 && v < vectors) fetch_weights<T>(at.w, v);
    }
    uint4 held[HELD];
    const uint4 *x = (const uint4*)at.x + first, *delta = (const uint4*)at.delta + first;
    float squares = squares_of_row<T, ADD>(x, delta, (uint4*)at.sum + first, vectors, threadIdx.x, blockDim.x, held);
    float rstd = rstd_of(block_sum(squares, space), at.width, at.eps);
    if (threadIdx.x == 0) at.rstd[row] = rstd;
    if (!Y && at.amax == nullptr) return;
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 v = threadIdx.x + k * blockDim.x;
        if (v >= vectors) continue;
        float x[LANES<T>], w[LANES<T>];
        unpack<T>(held[k], x);
        load<LANES<T>>(at.w, v * LANES<T>, w);
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) x[i] = x[i] * rstd * w[i];
        uint4 y = pack<T>(x);
        if constexpr (Y) {
            ((uint4*)at.y)[first + v] = y;
            continue;
        }
        unpack<T>(y, x);
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    }
    if (!Y) atomic_amax_of_block(at.amax, largest, (u32*)space);
}

// Rows of any width.
template <class T, bool ADD, bool Y> __device__ __forceinline__ void norm_any(const Norm& at) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= at.rows) return;
    u64 first = row * at.width;
    // A thread reads again what it wrote itself.
    const T* x = (ADD ? (const T*)at.sum : (const T*)at.x) + first;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < at.width; i += blockDim.x) {
        if (ADD) {
            float sum = widen(((const T*)at.x)[first + i]) + widen(((const T*)at.delta)[first + i]);
            ((T*)at.sum)[first + i] = narrow<T>(sum);
        }
        float v = widen(x[i]);
        squares += v * v;
    }
    float rstd = rstd_of(block_sum(squares, space), at.width, at.eps);
    if (threadIdx.x == 0) at.rstd[row] = rstd;
    if (!Y && at.amax == nullptr) return;
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < at.width; i += blockDim.x) {
        T y = narrow<T>(widen(x[i]) * rstd * load(at.w, i));
        if (Y) ((T*)at.y)[first + i] = y;
        largest = max(largest, __float_as_uint(widen(y)) & 0x7fffffffu);
    }
    if (!Y) atomic_amax_of_block(at.amax, largest, (u32*)space);
}

struct NormGrad {
    const void* dy;
    const void* x;
    Floats rstd;
    Floats w;
    // May be null.
    const void* residual;
    void* dx;
    // May be null; else it is dy, which a thread has read before it writes.
    void* y;
    // [parts, width]: sums of dy n over the rows of a part.
    float* parts;
    // Where dx is measured: the bits of its amax.
    u32* amax;
    u64 rows;
    u32 width;
};

// Columns that a thread has in every row of its block.
constexpr int OWNED = 8;

// What a thread has of a row, as it stands in memory.
template <class T> struct GradRow {
    static constexpr int VECTORS = OWNED / LANES<T>;
    uint4 dy[VECTORS], x[VECTORS], residual[VECTORS];
    float rstd;

    __device__ __forceinline__ void read(const NormGrad& at, u64 row, bool owns) {
        u64 first = row * at.width + threadIdx.x * OWNED;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            dy[v] = x[v] = residual[v] = make_uint4(0, 0, 0, 0);
            if (!owns) continue;
            dy[v] = ((const uint4*)((const T*)at.dy + first))[v];
            x[v] = ((const uint4*)((const T*)at.x + first))[v];
            if (at.residual) residual[v] = ((const uint4*)((const T*)at.residual + first))[v];
        }
        rstd = load(at.rstd, row);
    }
};

template <class T> __device__ __forceinline__ void unpack_all(const uint4 (&from)[OWNED / LANES<T>], float (&to)[OWNED]) {
#pragma unroll
    for (int v = 0; v < OWNED / LANES<T>; v++) unpack<T>(from[v], to + v * LANES<T>);
}

// A block takes every gridDim.x-th row. So a thread adds up dw of its columns in registers, and dy and x are read once for both gradients;
// the next row is read while this one is reduced.
template <class T, bool MEASURES> __device__ __forceinline__ void grad_held(const NormGrad& at) {
    // Two rows' sums of the warps: a warp may be one row ahead of another.
    __shared__ float sums[2][32];
    u32 column = threadIdx.x * OWNED, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    bool owns = column < at.width;
    // A thread's own, for which it has no register left.
    __shared__ u32 most[MEASURES ? 2048 / sizeof(T) : 1];
    if (MEASURES) most[threadIdx.x] = 0;
    float w[OWNED] = {}, dw[OWNED] = {};
    if (owns) load<OWNED>(at.w, column, w);
    GradRow<T> next;
    if (blockIdx.x < at.rows) next.read(at, blockIdx.x, owns);
    int turn = 0;
    for (u64 row = blockIdx.x; row < at.rows; row += gridDim.x, turn ^= 1) {
        GradRow<T> mine = next;
        if (row + gridDim.x < at.rows) next.read(at, row + gridDim.x, owns);
        float dy[OWNED], n[OWNED], dx[OWNED], along = 0.0f;
        unpack_all<T>(mine.dy, dy);
        unpack_all<T>(mine.x, n);
        unpack_all<T>(mine.residual, dx);
#pragma unroll
        for (int i = 0; i < OWNED; i++) {
            n[i] *= mine.rstd;
            dw[i] += dy[i] * n[i];
            dy[i] *= w[i];
            along += dy[i] * n[i];
        }
        along = warp_sum(along);
        if (warps > 1) {
            if (lane == 0) sums[turn][threadIdx.x / 32] = along;
            __syncthreads();
            along = warp_sum(lane < warps ? sums[turn][lane] : 0.0f);
        }
        along /= at.width;
#pragma unroll
        for (int i = 0; i < OWNED; i++) dx[i] += mine.rstd * (dy[i] - n[i] * along);
        if (!owns) continue;
#pragma unroll
        for (int v = 0; v < OWNED / LANES<T>; v++) {
            uint4 raw = pack<T>(dx + v * LANES<T>);
            ((uint4*)((T*)at.dx + row * at.width + column))[v] = raw;
            if (!MEASURES) continue;
            u32 largest = most[threadIdx.x];
            update_amax<T>(largest, raw.x), update_amax<T>(largest, raw.y), update_amax<T>(largest, raw.z), update_amax<T>(largest, raw.w);
            most[threadIdx.x] = largest;
        }
        if (!MEASURES && at.y) {
#pragma unroll
            for (int i = 0; i < OWNED; i++) n[i] *= w[i];
            store<OWNED>((T*)at.y + row * at.width + column, n);
        }
    }
    if (owns) store<OWNED>(at.parts + (u64)blockIdx.x * at.width + column, dw);
    if (MEASURES) {
        __syncthreads();
        atomic_amax_of_block(at.amax, amax_of_pair<T>(most[threadIdx.x]), (u32*)sums[0]);
    }
}

// dx for rows of any width.
template <class T> __device__ __forceinline__ void grad_any(const NormGrad& at) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= at.rows) return;
    u64 first = row * at.width;
    const T* dy = (const T*)at.dy + first;
    const T* x = (const T*)at.x + first;
    float rstd = load(at.rstd, row);
    u32 largest = 0;
    float along = 0.0f;
    for (u32 i = threadIdx.x; i < at.width; i += blockDim.x)
        along += widen(dy[i]) * load(at.w, i) * (widen(x[i]) * rstd);
    along = block_sum(along, space) / at.width;
    for (u32 i = threadIdx.x; i < at.width; i += blockDim.x) {
        float dx = rstd * (widen(dy[i]) * load(at.w, i) - widen(x[i]) * rstd * along);
        if (at.residual) dx += widen(((const T*)at.residual)[first + i]);
        T stored = narrow<T>(dx);
        ((T*)at.dx)[first + i] = stored;
        largest = max(largest, __float_as_uint(widen(stored)) & 0x7fffffffu);
    }
    if (at.amax) atomic_amax_of_block(at.amax, largest, (u32*)space);
}

// dw's partial sums for rows of any width: a block of 32 columns by 8 rows, of which it takes every gridDim.y-th eight.
template <class T> __device__ __forceinline__ void columns_any(const NormGrad& at) {
    __shared__ float sums[8][32];
    u32 column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < at.width) {
        for (u64 row = (u64)blockIdx.y * 8 + threadIdx.y; row < at.rows; row += (u64)gridDim.y * 8) {
            u64 i = row * at.width + column;
            float n = widen(((const T*)at.x)[i]) * load(at.rstd, row);
            sum += widen(((const T*)at.dy)[i]) * n;
            if (at.y) ((T*)at.y)[i] = narrow<T>(n * load(at.w, column));
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= at.width) return;
#pragma unroll
    for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
    at.parts[(u64)blockIdx.y * at.width + column] = sum;
}

struct Sum {
    const float* parts;
    Floats dw;
    u64 width;
    u32 count;
    u32 accumulate;
};

extern "C" __global__ void rms_norm_sum(Sum at) {
    u64 column = (u64)blockIdx.x * 32 + threadIdx.x;
    sum_parts(at.parts, at.count, at.width, column, at.accumulate, at.dw, column);
}

extern "C" __global__ void rms_norm_clear(Norm at) { *at.amax = 0; }
extern "C" __global__ void rms_norm_grad_clear(NormGrad at) { *at.amax = 0; }

#define KERNELS(T, NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_held_##NAME(Norm at) {                                \
        norm_held<T, false, true>(at);                                                                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_any_##NAME(Norm at) {                                 \
        norm_any<T, false, true>(at);                                                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) rms_held_##NAME(Norm at) {                                     \
        norm_held<T, false, false>(at);                                                                               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) rms_any_##NAME(Norm at) {                                      \
        norm_any<T, false, false>(at);                                                                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) add_rms_norm_held_##NAME(Norm at) {                            \
        norm_held<T, true, true>(at);                                                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) add_rms_norm_any_##NAME(Norm at) {                             \
        norm_any<T, true, true>(at);                                                                                  \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) add_rms_held_##NAME(Norm at) {                                 \
        norm_held<T, true, false>(at);                                                                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) add_rms_any_##NAME(Norm at) {                                  \
        norm_any<T, true, false>(at);                                                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(2048 / sizeof(T)) rms_norm_grad_held_##NAME(NormGrad at) {           \
        grad_held<T, false>(at);                                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(2048 / sizeof(T)) rms_norm_grad_amax_##NAME(NormGrad at) {           \
        grad_held<T, true>(at);                                                                                       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_grad_any_##NAME(NormGrad at) { grad_any<T>(at); }     \
    extern "C" __global__ void __launch_bounds__(256) rms_norm_columns_any_##NAME(NormGrad at) { columns_any<T>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
