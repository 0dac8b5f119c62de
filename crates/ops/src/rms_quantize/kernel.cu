// A sum, its rows' 1/rms, and the cast of its norm to FP8 in one launch, equal to the bit to the results of
// rms_norm/kernel.cu and quantize/kernel.cu.
//
// Bound by memory: x and delta are read once, the sum and each layout of its cast are written once. A cast
// needs 1/rms of all its rows, so it waits until a strip of EDGE rows is summed; by then the sum of a few
// strips is still in the cache and is not read from memory again.
//
// Each strip has `row_blocks` blocks that sum its rows and `area_blocks` blocks that cast its areas. A GPU
// starts blocks in the order of their numbers, as CUB's scans also rely on. In that order the rows of a strip
// are `lead` strips before its areas, as many strips as are resident at a time: a block waits only for blocks
// that run, and seldom for long.

struct Arguments {
    // Its x is the sum and its of_rows 1/rms, of f32; this kernel writes both.
    QuantizeArguments cast;
    const void* x;
    const void* delta;
    // For each strip, the number of blocks that have summed its rows, and then of those that have cast; 0
    // before and after the launch.
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
    // The number of the block among those that sum rows of the strip, or of the area.
    u32 n;
};

// The task of a block: first the rows of `lead` strips, then rows of the next strips between areas of the
// first ones, finally the last areas.
__device__ __forceinline__ Task task_of(u32 number, u32 row_blocks, u32 area_blocks, u32 strips, u32 lead) {
    if (number < lead * row_blocks) return {false, number / row_blocks, number % row_blocks};
    number -= lead * row_blocks;
    u32 both = row_blocks + area_blocks, strip = number / both, n = number % both;
    if (strip < strips - lead) {
        u32 before = n * area_blocks / both;
        bool casts = (n + 1) * area_blocks / both > before;
        return casts ? Task{true, strip, before} : Task{false, strip + lead, n - before};
    }
    number -= (strips - lead) * both;
    return {true, strips - lead + number / area_blocks, number % area_blocks};
}

// Sums as many adjacent rows as the block has threads for; `group` is the thread's row among them.
template <class T> __device__ __forceinline__ void sum_rows(const Arguments& args, u32 first, u32 group, u32 thread, bool has_row) {
    __shared__ float space[WARPS];
    u32 vectors = args.cast.cols / LANES<T>;
    u64 row = first + group, start = row * vectors;
    const uint4 *x = (const uint4*)args.x + start, *delta = (const uint4*)args.delta + start;
    uint4 held[HELD];
    float squares = 0.0f;
    if (has_row) squares = squares_of_row<T, true>(x, delta, (uint4*)args.cast.x + start, vectors, thread, args.threads, held);
    // In the order of block_sum.
    squares = warp_sum(squares);
    u32 lane = threadIdx.x % 32, warps = args.threads / 32;
    if (lane == 0) space[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = warp_sum(has_row && lane < warps ? space[group * warps + lane] : 0.0f);
    if (has_row && thread == 0) ((float*)args.cast.of_rows.data)[row] = rstd_of(squares, args.cast.cols, args.eps);
}

// Casts an area of the norm. source.cuh would load the sum as memory that nothing writes during the launch,
// but other blocks of this launch have written it.
template <class T> __device__ __forceinline__ void cast_norm(const QuantizeArguments& args, u32 down, u32 across) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HEIGHT;
    const T* from = (const T*)args.x + (u64)row * args.cols + column;
    Eight<T> piece[HEIGHT];
#pragma unroll
    for (int k = 0; k < HEIGHT; k++)
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) piece[k].raw[v] = ((const uint4*)(from + (u64)k * args.cols))[v];
    float rstd[HEIGHT], w[WIDTH];
    load<HEIGHT>((const float*)args.of_rows.data + row, rstd);
    load<WIDTH>(args.w, column, w);
#pragma unroll
    for (int k = 0; k < HEIGHT; k++) {
        float x[WIDTH];
        piece[k].unpack_to(x);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) x[i] = x[i] * rstd[k] * w[i];
        piece[k].pack_from(x);
    }
    cast_area<T, true, true, true>(args, piece, down, across);
}

template <class T> __device__ __forceinline__ void rms_quantize(const Arguments& args) {
    u32 rows = THREADS / args.threads, row_blocks = EDGE / rows, area_blocks = args.cast.areas_across;
    Task task = task_of(blockIdx.x, row_blocks, area_blocks, args.cast.areas_down, args.lead);
    u32* done = args.done + task.strip;
    if (task.casts) {
        if (threadIdx.x == 0) {
            u32 n;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(done) : "memory");
            while (n < row_blocks);
        }
        __syncthreads();
        cast_norm<T>(args.cast, task.strip, task.n);
        if (threadIdx.x == 0 && atomicAdd(done, 1) == row_blocks + area_blocks - 1) *(volatile u32*)done = 0;
    } else {
        u32 group = threadIdx.x / args.threads;
        sum_rows<T>(args, task.strip * EDGE + task.n * rows, group, threadIdx.x % args.threads, group < rows);
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(done) : "memory");
    }
}

// As in quantize/kernel.cu; one scale for the tensor takes fewer registers.
#if __CUDA_ARCH__ >= 890
#define MIN_BLOCKS (SCALING == TENSOR ? 4 : 3)
#else
#define MIN_BLOCKS 1
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) rms_quantize_bf16(Arguments args) { rms_quantize<bf16>(args); }
