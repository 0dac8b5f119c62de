// Casts to FP8, row-major, transposed, or both in one pass, equal to the bit to those of the host.
//
// The value to cast is a tensor, or it is computed from the operands of another op (SOURCE) and rounded as
// that op would store it; it is then neither written nor read again.
//
// Bound by memory, if few enough instructions run: under load a GPU lowers its clock but not the rate of its
// memory. A block has an area of EDGE rows by EDGE columns, a thread a piece of HEIGHT by WIDTH of it in
// registers, few enough of them that some warps cast while others wait for memory. One thread computes what
// is equal for a row or column, and shares it through shared memory. All rows of a computed value are loaded
// before it is computed, so that a thread waits for memory once and not once a row.
//
// Regions within an area (tiles and blocks) are measured and cast in one pass, so that everything is read
// once: FUSED. For larger regions (rows, the tensor) a launch MEASUREs amaxes, in any order, and another
// CASTs, which reads everything again: by rows, an area measures its part of each. With a given scale,
// CAST_GIVEN casts at once and reduces the amax. A given scale of 0 means "not set": only then MEASURE_UNSET
// reduces the amax before. A transpose passes through shared memory, HEIGHT bytes of a column at a time, at
// offsets that spread over its banks.
//
// The source SWIGLU_SAVING also writes a copy of gate and up in E4M3 by tiles; the RESTORED sources read such
// a copy. With weights of rows, a gradient of SwiGLU also sums that of the weights: each area over its
// columns, and a last launch over the areas.
//
// PERMUTE gathers rows of 16 bytes for each thread and 256 for each row of an area. A row is that of a token,
// or zeros, which are not read. Each token is read as often as it has copies, from the L2 cache: blocks take
// the areas of a few columns first, of all rows.
//
// variants.rs defines SOURCE, WEIGHTED (1 if rows have weights), HEIGHT, FORMAT, SCALING, POW2 (1 if scales
// are powers of two), PHASE, ROW_MAJOR and TRANSPOSED (1 if the layout is written), and the numbers of their
// values.

// Rows that a thread loads together: all of them, if it has registers for their operands.
template <class T> constexpr int ROWS_AT_ONCE = GRAD && sizeof(T) > 2 ? 1 : HEIGHT;

// Raises the amax of the tensor to that of the block's rows: ROWS of them, and then those of every
// gridDim.y-th group of ROWS. A thread has N columns.
template <class T, int N> __device__ __forceinline__ void measure(const QuantizeArguments& args) {
    __shared__ u32 words[THREADS / 32];
    if (PHASE == MEASURE_UNSET && *args.given_scale != 0.0f) return;
    constexpr int ROWS = SOURCE == INPUT ? 4 : 2;
    constexpr bool BOTH = GRAD && N > 1;
    u32 width = BOTH ? args.cols / 2 : args.cols, column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool exists = column < width;
    // Beyond the edge, the last columns are read again, which raises nothing.
    column = min(column, width - N);
    Magnitudes<T> most = {};
    u32 rows = WEIGHTED ? written_rows(args.end, args.rows) : args.rows;
    for (u64 first = (u64)blockIdx.y * ROWS; first < rows; first += (u64)gridDim.y * ROWS) {
        Eight<T> piece[ROWS][BOTH ? 2 : 1] = {};
        if constexpr (N > 1) {
            Loaded<T> loaded[ROWS];
            Weights w;
            load_rows<T, BOTH, false>(args, (u32)first, column, loaded, w);
            if constexpr (SOURCE == SWIGLU_SAVING) save_rows(args, loaded, (u32)first, column, exists);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if constexpr (BOTH) compute_both(loaded[k], w, k, piece[k][0], piece[k][1]);
                else compute(args, loaded[k], w, k, column, piece[k][0]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (first + k < args.rows) piece[k][0] = compute_elements<T>(args, first + k, column, 1);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (const Eight<T>& half : piece[k]) {
                Magnitudes<T> mine;
                mine.set(half);
                most.raise(mine);
            }
    }
    u32 amax = __reduce_max_sync(0xffffffffu, most.amax());
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    amax = max_over_warps(words);
    if (threadIdx.x != 0) return;
    atomic_amax(args.amax, amax);
    atomic_amax(args.row_major.q ? args.row_major.amaxes : args.transposed.amaxes, amax);
}

// True if the gradient of the weights of rows is computed.
constexpr bool DWEIGHTS = WEIGHTED && GRAD && !MEASURES;

// Writes the sums of the gradient of the weights over the columns of an area, for the rows of a piece: of
// each thread's eight columns in their order, then of the sixteen threads, as swiglu/kernel.cu adds them.
__device__ __forceinline__ void write_dweight_sums(const QuantizeArguments& args, float (&of_thread)[HEIGHT], u32 row, u32 across) {
    constexpr u32 SHARE = LANES_WIDE / HEIGHT;
    if (across * EDGE >= args.cols / 2) return;
    float sum = fold_across(of_thread, [](float a, float b) { return a + b; });
    u32 x_lane = threadIdx.x % LANES_WIDE;
    row += x_lane / SHARE;
    if (x_lane % SHARE == 0 && row < args.rows) args.dweight_sums[(u64)across * args.rows + row] = sum;
}

// True if the rows of an area are in a tail that is left undefined. Rows of norms, and of SwiGLU without
// weights, have none.
__device__ __forceinline__ bool is_undefined_area(const QuantizeArguments& args, u32 down) {
    if (SOURCE == PERMUTE) return args.sources != nullptr && args.sources[down * EDGE] == TAIL_SOURCE;
    return (WEIGHTED || SOURCE == INPUT) && is_undefined(args.end, down * EDGE);
}

template <class T, bool VECTOR, bool WHOLE>
__device__ __forceinline__ void area(const QuantizeArguments& args, u32 across, u32 down) {
    if (is_undefined_area(args, down)) return;
    // CAST_GIVEN has cast by the given scale.
    if (PHASE == CAST && args.given_scale && *args.given_scale != 0.0f) return;
    // Bands of areas may be wider than the matrix.
    if (SOURCE == PERMUTE && across >= args.areas_across) return;
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HEIGHT;
    Eight<T> piece[HEIGHT];
    float dweights[HEIGHT] = {};
    if constexpr (VECTOR) {
        constexpr int ROWS = ROWS_AT_ONCE<T>;
#pragma unroll
        for (int first = 0; first < HEIGHT; first += ROWS) {
            Loaded<T> loaded[ROWS];
            Weights w;
            load_rows<T, false, WHOLE>(args, row + first, column, loaded, w);
            if constexpr (SOURCE == SWIGLU_SAVING) save_rows(args, loaded, row + first, column, true);
#pragma unroll
            for (int k = 0; k < ROWS; k++) dweights[first + k] = compute(args, loaded[k], w, k, column, piece[first + k]);
        }
    } else {
        u32 count = column < args.cols ? min((u32)WIDTH, args.cols - column) : 0;
#pragma unroll
        for (int k = 0; k < HEIGHT; k++)
            piece[k] = compute_elements<T>(args, row + k, column, row + k < args.rows ? count : 0, DWEIGHTS ? dweights + k : nullptr);
    }
    if constexpr (DWEIGHTS) write_dweight_sums(args, dweights, row, across);
    cast_area<T, VECTOR, WHOLE>(args, piece, down, across);
}

// Casts an area of each half of a gradient of SwiGLU, whose operands are read once. If a thread lacks
// registers for both, rows of the second half wait in shared memory.
template <class T> __device__ __forceinline__ void halves(const QuantizeArguments& args, u32 across, u32 down) {
    if (is_undefined_area(args, down)) return;
    constexpr int ROWS = ROWS_AT_ONCE<T>, WAITING = RESTORED && PHASE != CAST && sizeof(T) == 2 ? HEIGHT - 1 : 0;
    __shared__ uint4 waiting[WAITING ? WAITING * THREADS : 1];
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HEIGHT;
    Eight<T> dgate[HEIGHT], dup[HEIGHT];
    float dweights[HEIGHT];
    Weights w;
#pragma unroll
    for (int first = 0; first < HEIGHT; first += ROWS) {
        Loaded<T> loaded[ROWS];
        load_rows<T, true, true>(args, row + first, column, loaded, w);
#pragma unroll
        for (int k = 0; k < ROWS; k++) dweights[first + k] = compute_both(loaded[k], w, k, dgate[first + k], dup[first + k]);
#pragma unroll
        for (int k = first; k < first + ROWS; k++)
            if (k < WAITING) waiting[k * THREADS + threadIdx.x] = dup[k].raw[0];
    }
    cast_area<T, true, true>(args, dgate, down, across);
    // Not before, where the compiler lacks registers for it.
    if constexpr (DWEIGHTS) write_dweight_sums(args, dweights, row, across);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WAITING; k++) dup[k].raw[0] = waiting[k * THREADS + threadIdx.x];
    cast_area<T, true, true>(args, dup, down, args.areas_across + across);
}

// Clears the amaxes that blocks raise, and the scales that belong to no region.
__device__ __forceinline__ void clear(const CastLayout& layout, u32 n) {
    if (n >= layout.scales) return;
    layout.inv_scale[n] = 0.0f;
    if (layout.amaxes != nullptr) layout.amaxes[n] = 0;
}
extern "C" __global__ void quantize_clear(QuantizeArguments args) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n == 0 && !args.accumulate) *args.amax = 0;
    clear(args.row_major, n);
    clear(args.transposed, n);
}

// Casts to E5M6 if rows are no multiples of eight: two elements, perhaps of two rows, share a byte. A thread
// has such a pair; the regions have been measured.
template <class T> __device__ __forceinline__ void pair(const QuantizeArguments& args) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 2, elements = (u64)args.rows * args.cols;
    if (first >= elements) return;
    u32 region_rows = SCALING == TENSOR ? args.rows : SCALING == BLOCK ? EDGE : 1;
    u32 region_cols = SCALING == TILE || SCALING == BLOCK ? EDGE : args.cols;
    u32 w[2] = {};
    for (int i = 0; i < 2; i++) {
        if (first + i >= elements) continue;
        u32 row = (u32)((first + i) / args.cols), column = (u32)((first + i) % args.cols);
        u32 region = row / region_rows * args.row_major.down + column / region_cols * args.row_major.across;
        float scale = scale_of(args, args.row_major.amaxes[region]);
        if (row % region_rows == 0 && column % region_cols == 0) args.row_major.inv_scale[region] = inverse_of(args, scale);
        w[i] = to_e5m6(__fmul_rn(widen(narrow<T>(compute_element<T>(args, row, column))), scale));
    }
    u8* to = args.row_major.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

// Resident blocks of a multiprocessor that bf16 kernels have registers for. f32 takes twice as many, and
// without instructions for FP8 a cast takes more.
#if __CUDA_ARCH__ >= 890
#define MIN_BLOCKS (HEIGHT == 4 ? 2 : SOURCE == SWIGLU_RESTORED ? 4 : 3)
#else
#define MIN_BLOCKS 1
#endif
#define KERNEL(NAME, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_##NAME(QuantizeArguments args)

#if SCALING == TENSOR && (PHASE == MEASURE || PHASE == MEASURE_UNSET)
KERNEL(any_f32, 1) { measure<float, 1>(args); }
KERNEL(any_bf16, 2) { measure<bf16, 1>(args); }
KERNEL(vector_f32, 1) { measure<float, WIDTH>(args); }
KERNEL(vector_bf16, 2) { measure<bf16, WIDTH>(args); }
#else
#if SOURCE == PERMUTE
#define AREA blockIdx.z * gridDim.x + blockIdx.x, blockIdx.y
#else
#define AREA blockIdx.x, blockIdx.y
#endif
KERNEL(any_f32, 1) { area<float, false, false>(args, AREA); }
KERNEL(any_bf16, 1) { area<bf16, false, false>(args, AREA); }
KERNEL(vector_f32, 1) { area<float, true, false>(args, AREA); }
KERNEL(vector_bf16, 1) { area<bf16, true, false>(args, AREA); }

#if SOURCE == SWIGLU_GRAD || SOURCE == SWIGLU_GRAD_RESTORED
// Measuring lines of both halves takes more registers, and so does any other target.
#define MIN_BLOCKS_OF_HALVES (__CUDA_ARCH__ == 900 && !MEASURES ? MIN_BLOCKS : 1)
KERNEL(whole_f32, 1) { halves<float>(args, AREA); }
KERNEL(whole_bf16, MIN_BLOCKS_OF_HALVES) { halves<bf16>(args, AREA); }
#else
KERNEL(whole_f32, 1) { area<float, true, true>(args, AREA); }
KERNEL(whole_bf16, MIN_BLOCKS) { area<bf16, true, true>(args, AREA); }
#endif
#endif

#if SOURCE == INPUT && FORMAT == E5M6
KERNEL(pair_f32, 1) { pair<float>(args); }
KERNEL(pair_bf16, 1) { pair<bf16>(args); }
#endif

#if WEIGHTED && (SOURCE == SWIGLU_GRAD || SOURCE == SWIGLU_GRAD_RESTORED) && PHASE != MEASURE && PHASE != MEASURE_UNSET
// Adds the sums over the columns of areas to the gradient of the weights, in the order of columns. A thread
// has a row.
extern "C" __global__ void quantize_dweights(QuantizeArguments args) {
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= args.rows || is_undefined(args.end, row)) return;
    float dweight = 0.0f;
    for (u32 across = 0; across * EDGE < args.cols / 2; across++) dweight += args.dweight_sums[(u64)across * args.rows + row];
    args.dweights[row] = dweight;
}
#endif
