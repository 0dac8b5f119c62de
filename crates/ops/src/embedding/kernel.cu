// Rows of a table looked up by token id, and the table's gradient.
//
// The gradient must be the same in every run, so nothing is added up in the order in which threads happen to arrive. Tokens are sorted by
// row, those of one row in their own order (a radix sort, each pass of which keeps the order of equal digits); then runs of RUN sorted
// tokens are summed, each by one warp a stretch of columns. A row whose tokens lie in one run is written by it. Of a row that reaches
// over the ends of runs, each run leaves its part, and the run in which the row begins adds the parts in order: no token is so frequent
// that one warp would have it to itself.

struct Lookup {
    const int* ids;
    const void* table;
    void* x;
    u64 tokens;
    u64 rows;
    // In the units that are copied.
    u32 width;
};

// A block a token, and a piece of its row. A row that the table does not have is all ones, which is NaN: nothing else is read.
template <class U> __device__ __forceinline__ void look_up(const Lookup& at, U nan) {
    u64 token = blockIdx.x;
    if (token >= at.tokens) return;
    u64 row = (u32)at.ids[token];
    const U* from = (const U*)at.table + row * at.width;
    U* to = (U*)at.x + token * at.width;
    constexpr int AT_ONCE = 4;
    for (u32 first = threadIdx.x; first < at.width; first += AT_ONCE * blockDim.x) {
        U kept[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u32 i = first + k * blockDim.x;
            if (i < at.width) kept[k] = row < at.rows ? from[i] : nan;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u32 i = first + k * blockDim.x;
            if (i < at.width) to[i] = kept[k];
        }
    }
}

extern "C" __global__ void embedding_16(Lookup at) { look_up<uint4>(at, make_uint4(~0u, ~0u, ~0u, ~0u)); }
extern "C" __global__ void embedding_4(Lookup at) { look_up<u32>(at, ~0u); }
extern "C" __global__ void embedding_2(Lookup at) { look_up<u16>(at, (u16)~0u); }

// A pass of the sort: by DIGIT_BITS of the rows, from `shift` on.
struct Sort {
    // The rows in the order so far, and their tokens; where these are null, tokens are in their own order and rows are ids.
    const u32* rows;
    const u32* tokens;
    u32* rows_to;
    u32* tokens_to;
    // [tiles, DIGITS]: how often each digit occurs in a tile.
    u32* counts;
    // By row of the table: whether it occurs. Cleared by the first counting and set by the first moving.
    u32* occurs;
    u32 count;
    // Tokens of a tile, a multiple of SORT_THREADS.
    u32 tile;
    u32 shift;
    // Of the table.
    u32 table_rows;
};

constexpr int DIGIT_BITS = 9, DIGITS = 1 << DIGIT_BITS;
constexpr int SORT_THREADS = DIGITS, SORT_WARPS = SORT_THREADS / 32;

// The row of the n-th token so far; one that the table does not have comes last.
__device__ __forceinline__ u32 sorted_row(const Sort& at, u32 n) {
    u32 row = at.rows[n];
    return row < at.table_rows ? row : at.table_rows;
}

__device__ __forceinline__ u32 digit_of(const Sort& at, u32 row) { return row >> at.shift & (DIGITS - 1); }

// How often each digit occurs in a block's tile.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) embedding_sort_count(Sort at) {
    __shared__ u32 counts[DIGITS];
    counts[threadIdx.x] = 0;
    __syncthreads();
    u32 first = blockIdx.x * at.tile;
    for (u32 i = threadIdx.x; i < at.tile; i += SORT_THREADS)
        if (first + i < at.count) atomicAdd(&counts[digit_of(at, sorted_row(at, first + i))], 1);
    __syncthreads();
    at.counts[blockIdx.x * DIGITS + threadIdx.x] = counts[threadIdx.x];
    if (at.tokens == nullptr)
        for (u32 row = blockIdx.x * SORT_THREADS + threadIdx.x; row < at.table_rows; row += gridDim.x * SORT_THREADS)
            at.occurs[row] = 0;
}

// Moves a tile's tokens where they belong. Thread d makes the places of digit d: behind all lower digits, and behind the tiles before;
// each warp has a stretch of the tile, so that the places of its tokens follow from the counts of the warps before it.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) embedding_sort_move(Sort at) {
    __shared__ u32 places[SORT_WARPS][DIGITS];
    __shared__ u32 warp_totals[SORT_WARPS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, digit = threadIdx.x;
    u32 stretch = at.tile / SORT_WARPS, first = blockIdx.x * at.tile + warp * stretch;

    for (int w = 0; w < SORT_WARPS; w++) places[w][digit] = 0;
    __syncthreads();
    for (u32 i = lane; i < stretch; i += 32)
        if (first + i < at.count) atomicAdd(&places[warp][digit_of(at, sorted_row(at, first + i))], 1);

    // This digit in the tiles before, and in all.
    u32 before = 0, total = 0;
#pragma unroll 8
    for (u32 tile = 0; tile < gridDim.x; tile++) {
        u32 n = at.counts[tile * DIGITS + digit];
        total += n;
        if (tile < blockIdx.x) before += n;
    }
    // The lower digits: a sum over the threads before this one.
    u32 upto = total;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        u32 n = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= by) upto += n;
    }
    if (lane == 31) warp_totals[warp] = upto;
    __syncthreads();
    u32 place = before + upto - total;
    for (u32 w = 0; w < warp; w++) place += warp_totals[w];
    for (int w = 0; w < SORT_WARPS; w++) {
        u32 n = places[w][digit];
        places[w][digit] = place;
        place += n;
    }
    __syncthreads();

    for (u32 i = 0; i < stretch; i += 32) {
        u32 n = first + i + lane;
        bool is_one = n < at.count;
        u32 row = is_one ? sorted_row(at, n) : 0;
        // Lanes behind the end share a digit that there is not.
        u32 d = is_one ? digit_of(at, row) : DIGITS;
        u32 same = __match_any_sync(0xffffffffu, d);
        u32 rank = __popc(same & ((1u << lane) - 1));
        u32 to = is_one ? places[warp][d] + rank : 0;
        __syncwarp();
        if (is_one && rank == 0) places[warp][d] += __popc(same);
        __syncwarp();
        if (!is_one) continue;
        at.rows_to[to] = row;
        at.tokens_to[to] = at.tokens == nullptr ? n : at.tokens[n];
        if (at.tokens == nullptr && row < at.table_rows) at.occurs[row] = 1;
    }
}

struct Gradient {
    const void* dx;
    // Sorted.
    const u32* rows;
    const u32* tokens;
    const u32* occurs;
    Floats dtable;
    // [runs, 2, width]: what a run has of a row that began before it, and of one that does not end in it.
    float* parts;
    u32 count;
    u32 table_rows;
    u32 width;
    u32 accumulate;
};

constexpr int RUN = 32, SUM_WARPS = 8;

// Clears the rows that do not occur, four elements a thread, or one: a warp a row. Eight of f32 a thread, which it
// stores in two halves, so that no store of a warp is of neighbours, are half as fast.
template <int N> __device__ __forceinline__ void clear(const Gradient& at) {
    u32 row = blockIdx.x * SUM_WARPS + threadIdx.x / 32;
    if (row >= at.table_rows || at.occurs[row]) return;
    float zeros[N] = {};
    for (u32 column = threadIdx.x % 32 * N; column < at.width; column += 32 * N)
        store<N>(at.dtable, (u64)row * at.width + column, zeros);
}

template <int N> __device__ __forceinline__ void put(const Gradient& at, u32 row, u32 column, float* sum) {
    u64 first = (u64)row * at.width + column;
    if (at.accumulate) {
        float held[N];
        load<N>(at.dtable, first, held);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += held[i];
    }
    store<N>(at.dtable, first, sum);
}

// Sums a run: a warp the 32 N columns of blockIdx.y, a lane N of them.
template <class T, int N> __device__ __forceinline__ void sum_run(const Gradient& at) {
    constexpr int AT_ONCE = 4;
    u32 run = blockIdx.x * SUM_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = run * RUN, column = (blockIdx.y * 32 + lane) * N;
    if (first >= at.count) return;
    u32 count = min((u32)RUN, at.count - first);
    u32 row = lane < count ? at.rows[first + lane] : ~0u, token = lane < count ? at.tokens[first + lane] : 0;
    // Rows beside the run: none has the number of one that the table does not have and sorting gave out.
    u32 before = first > 0 ? at.rows[first - 1] : ~0u;
    u32 behind = first + count < at.count ? at.rows[first + count] : ~0u;
    bool mine = column < at.width;
    float sum[N] = {};
    bool begins = before != __shfl_sync(0xffffffffu, row, 0);
    for (u32 n = 0; n < count; n += AT_ONCE) {
        float dx[AT_ONCE][N];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u32 t = __shfl_sync(0xffffffffu, token, (n + k) % RUN);
            if (mine && n + k < count) load<N>((const T*)at.dx + (u64)t * at.width + column, dx[k]);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (n + k >= count) break;
            u32 r = __shfl_sync(0xffffffffu, row, n + k);
            u32 next = n + k + 1 < count ? __shfl_sync(0xffffffffu, row, n + k + 1) : behind;
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += dx[k][i];
            bool ends = next != r;
            if (!ends && n + k + 1 < count) continue;
            if (mine && r < at.table_rows) {
                if (begins && ends) put<N>(at, r, column, sum);
                else store<N>(at.parts + ((u64)run * 2 + begins) * at.width + column, sum);
            }
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = 0.0f;
            begins = true;
        }
    }
}

// Adds up the parts of the row that begins in a run and does not end in it.
template <int N> __device__ __forceinline__ void sum_rest(const Gradient& at) {
    u32 run = blockIdx.x * SUM_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = run * RUN, column = (blockIdx.y * 32 + lane) * N;
    if (first + RUN >= at.count) return;
    u32 row = at.rows[first + RUN - 1];
    bool begins = first == 0 || at.rows[first - 1] != row;
    if (row >= at.table_rows || !begins || at.rows[first + RUN] != row) return;
    // How many of the runs behind begin with the row, 32 looked at together.
    u32 last = run;
    while (true) {
        u64 other = (u64)last + 1 + lane;
        bool goes_on = other * RUN < at.count && at.rows[other * RUN] == row;
        u32 all = __ballot_sync(0xffffffffu, goes_on);
        last += all == ~0u ? 32 : __ffs(~all) - 1;
        if (all != ~0u) break;
    }
    if (column >= at.width) return;
    float sum[N];
    load<N>(at.parts + ((u64)run * 2 + 1) * at.width + column, sum);
#pragma unroll 4
    for (u32 other = run + 1; other <= last; other++) {
        float part[N];
        load<N>(at.parts + (u64)other * 2 * at.width + column, part);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += part[i];
    }
    put<N>(at, row, column, sum);
}

#define SUMS(T, NAME, PATH, N)                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) embedding_clear_##PATH##_##NAME(Gradient at) { \
        clear<N == 1 ? 1 : 4>(at);                                                                              \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) embedding_sum_##PATH##_##NAME(Gradient at) {   \
        sum_run<T, N>(at);                                                                           \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) embedding_rest_##PATH##_##NAME(Gradient at) {  \
        sum_rest<N>(at);                                                                             \
    }

SUMS(float, f32, vector, 4)
SUMS(bf16, bf16, vector, 8)
SUMS(float, f32, any, 1)
SUMS(bf16, bf16, any, 1)
