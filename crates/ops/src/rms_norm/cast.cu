// A sum, its rows' 1/rms and the cast of its norm to FP8 in one launch: equal to the bit to those by rms_norm/kernel.cu and quantize/kernel.cu.
//
// Bound by memory: x and what is added are read once, the sum and both layouts of its cast written once. A cast needs all of its rows' 1/rms,
// and so waits until a strip of EDGE rows is whole; by then the sum of a few strips is still in the cache, and is not read from memory again.
//
// There are `makers` + `areas` blocks for every strip, those that make its rows and those that cast its areas. A GPU begins blocks in the
// order of their numbers, as CUB's scans rely on too. In that order the rows of a strip are `lead` strips before its areas, as many strips as
// are under way at a time: a block that waits, waits for blocks that run, and seldom for long.

struct NormCast {
    // Its x is the sum and its rstd 1/rms, of f32: both are written here.
    Quantize at;
    const void* x;
    const void* delta;
    // Of each strip, how many blocks have made its rows, and then how many have cast: 0 at first, and again as the last one leaves it.
    u32* done;
    // Threads of a row.
    u32 threads;
    // Strips.
    u32 lead;
    float eps;
};

struct Task {
    bool casts;
    u32 strip;
    // Which of the blocks that make rows of the strip, or which of its areas.
    u32 n;
};

// First the rows of `lead` strips, then those of the next among the areas of the first, and at last areas.
__device__ __forceinline__ Task task_of(u32 number, u32 makers, u32 areas, u32 strips, u32 lead) {
    if (number < lead * makers) return {false, number / makers, number % makers};
    number -= lead * makers;
    u32 both = makers + areas, strip = number / both, n = number % both;
    if (strip < strips - lead) {
        u32 before = n * areas / both;
        bool casts = (n + 1) * areas / both > before;
        return casts ? Task{true, strip, before} : Task{false, strip + lead, n - before};
    }
    number -= (strips - lead) * both;
    return {true, strips - lead + number / areas, number % areas};
}

// Makes as many neighbouring rows as a block has threads for.
template <class T> __device__ __forceinline__ void make_rows(const NormCast& of, u32 first, u32 group, u32 thread, bool makes) {
    __shared__ float space[WARPS];
    u32 vectors = of.at.cols / LANES<T>;
    u64 row = first + group, start = row * vectors;
    const uint4 *x = (const uint4*)of.x + start, *delta = (const uint4*)of.delta + start;
    uint4 held[HELD];
    float squares = 0.0f;
    if (makes) squares = squares_of_row<T, true>(x, delta, (uint4*)of.at.x + start, vectors, thread, of.threads, held);
    // As block_sum adds.
    squares = warp_sum(squares);
    u32 lane = threadIdx.x % 32, warps = of.threads / 32;
    if (lane == 0) space[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = warp_sum(makes && lane < warps ? space[group * warps + lane] : 0.0f);
    if (makes && thread == 0) ((float*)of.at.rstd.at)[row] = rstd_of(squares, of.at.cols, of.eps);
}

// Casts an area of the norm. made.cuh would ask for the sum as for what nothing writes meanwhile, and other blocks of this launch have written
// it.
template <class T> __device__ __forceinline__ void cast_strip(const Quantize& at, u32 down, u32 across) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    const T* from = (const T*)at.x + (u64)row * at.cols + column;
    Eight<T> piece[HIGH];
#pragma unroll
    for (int k = 0; k < HIGH; k++)
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) piece[k].raw[v] = ((const uint4*)(from + (u64)k * at.cols))[v];
    float rstd[HIGH], w[WIDTH];
    load<HIGH>((const float*)at.rstd.at + row, rstd);
    load<WIDTH>(at.w, column, w);
#pragma unroll
    for (int k = 0; k < HIGH; k++) {
        float x[WIDTH];
        piece[k].numbers(x);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) x[i] = x[i] * rstd[k] * w[i];
        piece[k].put(x);
    }
    cast_area<T, true, true, true>(at, piece, down, across);
}

template <class T> __device__ __forceinline__ void norm_cast(const NormCast& of) {
    u32 rows = THREADS / of.threads, makers = EDGE / rows, areas = of.at.across;
    Task task = task_of(blockIdx.x, makers, areas, of.at.down, of.lead);
    u32* done = of.done + task.strip;
    if (task.casts) {
        if (threadIdx.x == 0) {
            u32 n;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(done) : "memory");
            while (n < makers);
        }
        __syncthreads();
        cast_strip<T>(of.at, task.strip, task.n);
        if (threadIdx.x == 0 && atomicAdd(done, 1) == makers + areas - 1) *done = 0;
    } else {
        u32 group = threadIdx.x / of.threads;
        make_rows<T>(of, task.strip * EDGE + task.n * rows, group, threadIdx.x % of.threads, group < rows);
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(done) : "memory");
    }
}

// As quantize/kernel.cu; one scale for all leaves more registers.
#if __CUDA_ARCH__ >= 890
#define AT_ONCE (SCALING == TENSOR ? 4 : 3)
#else
#define AT_ONCE 1
#endif

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) norm_cast_bf16(NormCast of) { norm_cast<bf16>(of); }
