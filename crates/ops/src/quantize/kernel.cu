// Casts to FP8, as the tensor stands, transposed, or both in one pass: equal to the bit to those of the host.
//
// What is cast is a tensor, or made on the way of what another op would make it of (OF), rounded as that op would store it, so that it is
// neither written nor read again.
//
// Bound by memory, where it has few enough instructions: under load a GPU's clock falls, its memory's rate does not. A block has an area of
// EDGE rows by EDGE columns, a thread a piece of HIGH by WIDTH of it, which it keeps in registers: few enough of them that while some warps
// wait for memory, others cast. What all threads of a row or column would compute alike, one does, and shared memory tells the others.
// Of what is made on the way, all rows are asked for before any is computed with: memory's latency stands there once, not once a row.
// Regions within an area (tiles and blocks) are measured and cast at once, so that everything is read once: FUSED. Larger ones (rows, the
// tensor) are first MEASUREd, which needs no order, and then CAST, for which everything is read again: rows by areas, of whose maxima the
// largest is kept, and the tensor in passing. Where the scale of the tensor is GIVEN, it is cast at once and amax comes out beside it; a
// scale of 0 is UNSET, for which alone it is measured before. A transpose passes through shared memory, HIGH bytes of a column at a time,
// in places that spread over its banks.
//
// Gate and up may be kept in E4M3 by whatever reads them first, tile by tile, and are restored on the way where they are. OF, HIGH,
// FORMAT, SCALING, POW2 (whether scales are powers of two), PHASE, DIRECT and TRANSPOSED are defined where this is compiled.

// How many rows a thread asks for together: all of them, where it has registers for what they are made of.
template <class T> constexpr int TOGETHER = GRAD && sizeof(T) > 2 ? 1 : HIGH;

// Raises the maximum of the tensor by what a block has of it: ROWS rows of a piece of columns, and then those as many blocks below, N
// columns a thread.
template <class T, int N> __device__ __forceinline__ void measure(const Quantize& at) {
    __shared__ u32 words[THREADS / 32];
    if (PHASE == UNSET && *at.scale != 0.0f) return;
    constexpr int ROWS = OF == INPUT ? 4 : 2;
    constexpr bool BOTH = GRAD && N > 1;
    u32 width = BOTH ? at.cols / 2 : at.cols, column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool exists = column < width;
    // Again, which raises nothing.
    column = min(column, width - N);
    Magnitudes<T> most = {};
    for (u64 first = (u64)blockIdx.y * ROWS; first < at.rows; first += (u64)gridDim.y * ROWS) {
        Eight<T> piece[ROWS][BOTH ? 2 : 1] = {};
        if constexpr (N > 1) {
            Asked<T> asked[ROWS];
            Weights w;
            ask_rows<T, BOTH, false>(at, (u32)first, column, asked, w);
            if constexpr (OF == SWIGLU_KEEPING) keep_rows(at, asked, (u32)first, column, exists);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if constexpr (BOTH) make_both(asked[k], piece[k][0], piece[k][1]);
                else make(at, asked[k], w, column, piece[k][0]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (first + k < at.rows) piece[k][0] = make_singly<T>(at, first + k, column, 1);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (const Eight<T>& half : piece[k]) {
                Magnitudes<T> mine;
                mine.of(half);
                most.atomic_amax(mine);
            }
    }
    u32 largest = __reduce_max_sync(0xffffffffu, most.largest());
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    largest = max_over_warps(words);
    if (threadIdx.x != 0) return;
    atomic_amax(at.amax, largest);
    atomic_amax(at.direct.q ? at.direct.maxima : at.transposed.maxima, largest);
}

template <class T, bool VECTOR, bool WHOLE> __device__ __forceinline__ void area(const Quantize& at, u32 across, u32 down) {
    // It has been cast with the one that was given.
    if (PHASE == CAST && at.scale && *at.scale != 0.0f) return;
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<T> piece[HIGH];
    if constexpr (VECTOR) {
        constexpr int ROWS = TOGETHER<T>;
#pragma unroll
        for (int first = 0; first < HIGH; first += ROWS) {
            Asked<T> asked[ROWS];
            Weights w;
            ask_rows<T, false, WHOLE>(at, row + first, column, asked, w);
            if constexpr (OF == SWIGLU_KEEPING) keep_rows(at, asked, row + first, column, true);
#pragma unroll
            for (int k = 0; k < ROWS; k++) make(at, asked[k], w, column, piece[first + k]);
        }
    } else {
        u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;
#pragma unroll
        for (int k = 0; k < HIGH; k++) piece[k] = make_singly<T>(at, row + k, column, row + k < at.rows ? count : 0);
    }
    cast_area<T, VECTOR, WHOLE>(at, piece, down, across);
}

// Areas of both halves, of which everything is read once. Where a thread lacks registers for both, rows of the second wait in shared
// memory.
template <class T> __device__ __forceinline__ void halves(const Quantize& at, u32 across, u32 down) {
    constexpr int ROWS = TOGETHER<T>, WAITING = KEPT && PHASE != CAST && sizeof(T) == 2 ? HIGH - 1 : 0;
    __shared__ uint4 waiting[WAITING ? WAITING * THREADS : 1];
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<T> dgate[HIGH], dup[HIGH];
    Weights none;
#pragma unroll
    for (int first = 0; first < HIGH; first += ROWS) {
        Asked<T> asked[ROWS];
        ask_rows<T, true, true>(at, row + first, column, asked, none);
#pragma unroll
        for (int k = 0; k < ROWS; k++) make_both(asked[k], dgate[first + k], dup[first + k]);
#pragma unroll
        for (int k = first; k < first + ROWS; k++)
            if (k < WAITING) waiting[k * THREADS + threadIdx.x] = dup[k].raw[0];
    }
    cast_area<T, true, true>(at, dgate, down, across);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WAITING; k++) dup[k].raw[0] = waiting[k * THREADS + threadIdx.x];
    cast_area<T, true, true>(at, dup, down, at.across + across);
}

// What is raised starts at nothing, and so do scales that stand for no region.
__device__ __forceinline__ void clear(const Side& side, u32 n) {
    if (n >= side.scales) return;
    side.inv_scale[n] = 0.0f;
    if (side.maxima != nullptr) side.maxima[n] = 0;
}
extern "C" __global__ void quantize_clear(Quantize at) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n == 0 && !at.accumulate) *at.amax = 0;
    clear(at.direct, n);
    clear(at.transposed, n);
}

// E5M6 where rows are not made of eights: two elements, that may lie in two rows, share a byte. A thread has such a pair; the regions have
// been measured.
template <class T> __device__ __forceinline__ void pair(const Quantize& at) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 2, elements = (u64)at.rows * at.cols;
    if (first >= elements) return;
    u32 high = SCALING == TENSOR ? at.rows : SCALING == BLOCK ? EDGE : 1, wide = SCALING == TILE || SCALING == BLOCK ? EDGE : at.cols;
    u32 w[2] = {};
    for (int i = 0; i < 2; i++) {
        if (first + i >= elements) continue;
        u32 row = (u32)((first + i) / at.cols), column = (u32)((first + i) % at.cols);
        u32 region = row / high * at.direct.down + column / wide * at.direct.across;
        float scale = scale_of(at, at.direct.maxima[region]);
        if (row % high == 0 && column % wide == 0) at.direct.inv_scale[region] = inverse_of(at, scale);
        w[i] = to_e5m6(__fmul_rn(widen(narrow<T>(make_one<T>(at, row, column))), scale));
    }
    u8* to = at.direct.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

// Of f32 a thread keeps twice as much; and where there are no instructions for FP8, casts need room.
#if __CUDA_ARCH__ >= 890
#define AT_ONCE (HIGH == 4 ? 2 : OF == SWIGLU_OF_KEPT ? 4 : 3)
#else
#define AT_ONCE 1
#endif
#define KERNEL(NAME, BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_##NAME(Quantize at)

#if SCALING == TENSOR && (PHASE == MEASURE || PHASE == UNSET)
KERNEL(any_f32, 1) { measure<float, 1>(at); }
KERNEL(any_bf16, 2) { measure<bf16, 1>(at); }
KERNEL(vector_f32, 1) { measure<float, WIDTH>(at); }
KERNEL(vector_bf16, 2) { measure<bf16, WIDTH>(at); }
#else
#define PLACE blockIdx.x, blockIdx.y
KERNEL(any_f32, 1) { area<float, false, false>(at, PLACE); }
KERNEL(any_bf16, 1) { area<bf16, false, false>(at, PLACE); }
KERNEL(vector_f32, 1) { area<float, true, false>(at, PLACE); }
KERNEL(vector_bf16, 1) { area<bf16, true, false>(at, PLACE); }

#if OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT
// To measure lines of both, and on other targets, the compiler needs more registers.
#define HALVES_AT_ONCE (__CUDA_ARCH__ == 900 && !MEASURES ? AT_ONCE : 1)
KERNEL(whole_f32, 1) { halves<float>(at, PLACE); }
KERNEL(whole_bf16, HALVES_AT_ONCE) { halves<bf16>(at, PLACE); }
#else
KERNEL(whole_f32, 1) { area<float, true, true>(at, PLACE); }
KERNEL(whole_bf16, AT_ONCE) { area<bf16, true, true>(at, PLACE); }
#endif
#endif

#if OF == INPUT
KERNEL(pair_f32, 1) { pair<float>(at); }
KERNEL(pair_bf16, 1) { pair<bf16>(at); }
#endif
