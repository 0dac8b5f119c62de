// Norms of rows, and their backward.
//
// Bound by memory: each kernel on the vector path reads and writes every element once. A block has a row.
// Rows that do not start at multiples of 16 bytes, or are too wide for a block to hold, have another kernel,
// which reads them twice.

struct NormArguments {
    const void* x;
    // Null without the addition.
    const void* delta;
    void* sum;
    Floats w;
    // Null if y is not written.
    void* y;
    float* rstd;
    // The bits of the amax of the rounded y, which blocks raise, or null. Only without y.
    u32* amax;
    u64 rows;
    u32 width;
    float eps;
};

// Prefetches the weights of a vector into the cache; they are needed after the reduction.
template <class T> __device__ __forceinline__ void fetch_weights(const Floats& w, u32 vector) {
    const char* address = (const char*)w.data + (u64)vector * LANES<T> * (w.is_bf16 ? sizeof(bf16) : sizeof(float));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Writes the norm if Y, else at most its amax.
template <class T, bool ADD, bool Y> __device__ __forceinline__ void norm_held(const NormArguments& args) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= args.rows) return;
    u32 vectors = args.width / LANES<T>;
    u64 first = row * vectors;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 v = threadIdx.x + k * blockDim.x;
        // With more rows, another block has fetched them.
        if (args.rows == 1 && v < vectors) fetch_weights<T>(args.w, v);
    }
    uint4 held[HELD];
    const uint4 *x = (const uint4*)args.x + first, *delta = (const uint4*)args.delta + first;
    float squares = squares_of_row<T, ADD>(x, delta, (uint4*)args.sum + first, vectors, threadIdx.x, blockDim.x, held);
    float rstd = rstd_of(block_sum(squares, space), args.width, args.eps);
    if (threadIdx.x == 0) args.rstd[row] = rstd;
    if (!Y && args.amax == nullptr) return;
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 v = threadIdx.x + k * blockDim.x;
        if (v >= vectors) continue;
        float x[LANES<T>], w[LANES<T>];
        unpack<T>(held[k], x);
        load<LANES<T>>(args.w, v * LANES<T>, w);
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) x[i] = x[i] * rstd * w[i];
        uint4 y = pack<T>(x);
        if constexpr (Y) {
            ((uint4*)args.y)[first + v] = y;
            continue;
        }
        unpack<T>(y, x);
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    }
    if (!Y) atomic_amax_of_block(args.amax, largest, (u32*)space);
}

// Rows of any width.
template <class T, bool ADD, bool Y> __device__ __forceinline__ void norm_any(const NormArguments& args) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= args.rows) return;
    u64 first = row * args.width;
    // A thread reads back its own writes.
    const T* x = (ADD ? (const T*)args.sum : (const T*)args.x) + first;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x) {
        if (ADD) {
            float sum = widen(((const T*)args.x)[first + i]) + widen(((const T*)args.delta)[first + i]);
            ((T*)args.sum)[first + i] = narrow<T>(sum);
        }
        float v = widen(x[i]);
        squares += v * v;
    }
    float rstd = rstd_of(block_sum(squares, space), args.width, args.eps);
    if (threadIdx.x == 0) args.rstd[row] = rstd;
    if (!Y && args.amax == nullptr) return;
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x) {
        T y = narrow<T>(widen(x[i]) * rstd * load(args.w, i));
        if (Y) ((T*)args.y)[first + i] = y;
        largest = max(largest, __float_as_uint(widen(y)) & 0x7fffffffu);
    }
    if (!Y) atomic_amax_of_block(args.amax, largest, (u32*)space);
}

struct NormGradArguments {
    const void* dy;
    const void* x;
    Floats rstd;
    Floats w;
    // May be null.
    const void* residual;
    void* dx;
    // Null, or equal to dy: a thread reads dy before it writes y.
    void* y;
    // [parts, width]: sums of dy n over the rows of a part.
    float* parts;
    // The bits of the amax of dx, or null.
    u32* amax;
    u64 rows;
    u32 width;
};

// The part of a row that a thread owns, in its stored form.
template <class T> struct GradRow {
    static constexpr int VECTORS = OWNED / LANES<T>;
    uint4 dy[VECTORS], x[VECTORS], residual[VECTORS];
    float rstd;

    __device__ __forceinline__ void read(const NormGradArguments& args, u64 row, bool owns) {
        u64 first = row * args.width + threadIdx.x * OWNED;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            dy[v] = x[v] = residual[v] = make_uint4(0, 0, 0, 0);
            if (!owns) continue;
            dy[v] = ((const uint4*)((const T*)args.dy + first))[v];
            x[v] = ((const uint4*)((const T*)args.x + first))[v];
            if (args.residual) residual[v] = ((const uint4*)((const T*)args.residual + first))[v];
        }
        rstd = load(args.rstd, row);
    }
};

template <class T> __device__ __forceinline__ void unpack_all(const uint4 (&from)[OWNED / LANES<T>], float (&to)[OWNED]) {
#pragma unroll
    for (int v = 0; v < OWNED / LANES<T>; v++) unpack<T>(from[v], to + v * LANES<T>);
}

// A block takes every gridDim.x-th row. A thread sums dw of its OWNED columns in registers, so dy and x are
// read once for both gradients. The next row is loaded while this one is reduced.
template <class T, bool MEASURES> __device__ __forceinline__ void grad_held(const NormGradArguments& args) {
    // The warps' sums of two rows: a warp may be one row ahead of another.
    __shared__ float sums[2][32];
    u32 column = threadIdx.x * OWNED, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    bool owns = column < args.width;
    // The thread's own running amax, for which it has no register left.
    __shared__ u32 most[MEASURES ? 2 * MAX_THREADS / sizeof(T) : 1];
    if (MEASURES) most[threadIdx.x] = 0;
    float w[OWNED] = {}, dw[OWNED] = {};
    if (owns) load<OWNED>(args.w, column, w);
    GradRow<T> next;
    if (blockIdx.x < args.rows) next.read(args, blockIdx.x, owns);
    int parity = 0;
    for (u64 row = blockIdx.x; row < args.rows; row += gridDim.x, parity ^= 1) {
        GradRow<T> mine = next;
        if (row + gridDim.x < args.rows) next.read(args, row + gridDim.x, owns);
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
            if (lane == 0) sums[parity][threadIdx.x / 32] = along;
            __syncthreads();
            along = warp_sum(lane < warps ? sums[parity][lane] : 0.0f);
        }
        along /= args.width;
#pragma unroll
        for (int i = 0; i < OWNED; i++) dx[i] += mine.rstd * (dy[i] - n[i] * along);
        if (!owns) continue;
#pragma unroll
        for (int v = 0; v < OWNED / LANES<T>; v++) {
            uint4 raw = pack<T>(dx + v * LANES<T>);
            ((uint4*)((T*)args.dx + row * args.width + column))[v] = raw;
            if (!MEASURES) continue;
            u32 largest = most[threadIdx.x];
            update_amax<T>(largest, raw.x), update_amax<T>(largest, raw.y), update_amax<T>(largest, raw.z), update_amax<T>(largest, raw.w);
            most[threadIdx.x] = largest;
        }
        if (!MEASURES && args.y) {
#pragma unroll
            for (int i = 0; i < OWNED; i++) n[i] *= w[i];
            store<OWNED>((T*)args.y + row * args.width + column, n);
        }
    }
    if (owns) store<OWNED>(args.parts + (u64)blockIdx.x * args.width + column, dw);
    if (MEASURES) {
        __syncthreads();
        atomic_amax_of_block(args.amax, amax_of_pair<T>(most[threadIdx.x]), (u32*)sums[0]);
    }
}

// dx for rows of any width.
template <class T> __device__ __forceinline__ void grad_any(const NormGradArguments& args) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= args.rows) return;
    u64 first = row * args.width;
    const T* dy = (const T*)args.dy + first;
    const T* x = (const T*)args.x + first;
    float rstd = load(args.rstd, row);
    u32 largest = 0;
    float along = 0.0f;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x)
        along += widen(dy[i]) * load(args.w, i) * (widen(x[i]) * rstd);
    along = block_sum(along, space) / args.width;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x) {
        float dx = rstd * (widen(dy[i]) * load(args.w, i) - widen(x[i]) * rstd * along);
        if (args.residual) dx += widen(((const T*)args.residual)[first + i]);
        T stored = narrow<T>(dx);
        ((T*)args.dx)[first + i] = stored;
        largest = max(largest, __float_as_uint(widen(stored)) & 0x7fffffffu);
    }
    if (args.amax) atomic_amax_of_block(args.amax, largest, (u32*)space);
}

// Partial sums of dw for rows of any width. A block has 32 columns and takes every gridDim.y-th group of
// COLUMN_BLOCK_ROWS rows.
template <class T> __device__ __forceinline__ void columns_any(const NormGradArguments& args) {
    __shared__ float sums[COLUMN_BLOCK_ROWS][32];
    u32 column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < args.width) {
        for (u64 row = (u64)blockIdx.y * COLUMN_BLOCK_ROWS + threadIdx.y; row < args.rows; row += (u64)gridDim.y * COLUMN_BLOCK_ROWS) {
            u64 i = row * args.width + column;
            float n = widen(((const T*)args.x)[i]) * load(args.rstd, row);
            sum += widen(((const T*)args.dy)[i]) * n;
            if (args.y) ((T*)args.y)[i] = narrow<T>(n * load(args.w, column));
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= args.width) return;
#pragma unroll
    for (int y = 1; y < COLUMN_BLOCK_ROWS; y++) sum += sums[y][threadIdx.x];
    args.parts[(u64)blockIdx.y * args.width + column] = sum;
}

struct SumArguments {
    const float* parts;
    Floats dw;
    u64 width;
    u32 count;
    u32 accumulate;
};

extern "C" __global__ void rms_norm_sum(SumArguments args) {
    u64 column = (u64)blockIdx.x * 32 + threadIdx.x;
    sum_parts(args.parts, args.count, args.width, column, args.accumulate, args.dw, column);
}

extern "C" __global__ void rms_norm_clear(NormArguments args) { *args.amax = 0; }
extern "C" __global__ void rms_norm_grad_clear(NormGradArguments args) { *args.amax = 0; }

#define NORM(NAME, FUNCTION, T, ADD, Y) \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS) NAME(NormArguments args) { FUNCTION<T, ADD, Y>(args); }
#define GRAD(NAME, FUNCTION, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(NormGradArguments args) { FUNCTION(args); }
#define KERNELS(T, NAME)                                                                        \
    NORM(rms_norm_held_##NAME, norm_held, T, false, true)                                       \
    NORM(rms_norm_any_##NAME, norm_any, T, false, true)                                         \
    NORM(rms_held_##NAME, norm_held, T, false, false)                                           \
    NORM(rms_any_##NAME, norm_any, T, false, false)                                             \
    NORM(add_rms_norm_held_##NAME, norm_held, T, true, true)                                    \
    NORM(add_rms_norm_any_##NAME, norm_any, T, true, true)                                      \
    NORM(add_rms_held_##NAME, norm_held, T, true, false)                                        \
    NORM(add_rms_any_##NAME, norm_any, T, true, false)                                          \
    GRAD(rms_norm_grad_held_##NAME, (grad_held<T, false>), 2 * MAX_THREADS / sizeof(T))         \
    GRAD(rms_norm_grad_amax_##NAME, (grad_held<T, true>), 2 * MAX_THREADS / sizeof(T))          \
    GRAD(rms_norm_grad_any_##NAME, grad_any<T>, MAX_THREADS)                                    \
    GRAD(rms_norm_columns_any_##NAME, columns_any<T>, 32 * COLUMN_BLOCK_ROWS)

KERNELS(float, f32)
KERNELS(bf16, bf16)
