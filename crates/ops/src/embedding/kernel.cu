// Embedding lookup, and a deterministic gradient of the table without atomics on floats.
//
// Lookup: bound by memory. One block per token copies its row in 16-byte units (or in elements, if rows are
// not multiples of 16 bytes), four loads in flight per thread.
//
// Gradient, dtable[r] = sum of dx[t] over the tokens t with id r, in the order of t:
//   1. embedding_sort_*: a stable LSD radix sort of the tokens by row, DIGIT_BITS per pass. A pass is two
//      launches: count the digits of each tile, then move. Ids outside of the table sort last.
//   2. embedding_clear: zeroes the rows that no token has. Only if the gradient is assigned.
//   3. embedding_sum: sorted tokens are cut into runs of RUN. A warp sums one run over 32 N columns. It
//      writes a row of dtable whose tokens all lie in the run, and stores a partial sum of a row that crosses
//      the run's start or end.
//   4. embedding_rest: for each row that crosses runs, the warp of the run in which it begins adds the
//      partial sums in order.
// Because long rows are split into runs, a very frequent token does not serialise on one warp. Steps 2 to 4
// are bound by memory: dx is read once and dtable is written once.

struct Lookup {
    const int* ids;
    const void* table;
    void* x;
    u64 tokens;
    u64 rows;
    // Units per row.
    u32 width;
};

// Copies the row of token blockIdx.x in units of type U. For an id outside of the table it reads nothing and
// fills x with `nan`: all bits set, a NaN in f32 and bf16.
template <class U> __device__ __forceinline__ void look_up(const Lookup& args, U nan) {
    u64 token = blockIdx.x;
    if (token >= args.tokens) return;
    u64 row = (u32)args.ids[token];
    const U* from = (const U*)args.table + row * args.width;
    U* to = (U*)args.x + token * args.width;
    for (u32 first = threadIdx.x; first < args.width; first += LOADS * blockDim.x) {
        U units[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            u32 i = first + k * blockDim.x;
            if (i < args.width) units[k] = row < args.rows ? from[i] : nan;
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            u32 i = first + k * blockDim.x;
            if (i < args.width) to[i] = units[k];
        }
    }
}

extern "C" __global__ void embedding_16(Lookup args) { look_up<uint4>(args, make_uint4(~0u, ~0u, ~0u, ~0u)); }
extern "C" __global__ void embedding_4(Lookup args) { look_up<u32>(args, ~0u); }
extern "C" __global__ void embedding_2(Lookup args) { look_up<u16>(args, (u16)~0u); }

// One pass of the radix sort, by the DIGIT_BITS bits of the row from bit `shift` on.
struct Sort {
    // Rows and tokens in the order of the previous pass. In the first pass `tokens` is null, and `rows` are
    // the ids.
    const u32* rows;
    const u32* tokens;
    u32* rows_to;
    u32* tokens_to;
    // [tiles, DIGITS]: occurrences of each digit in each tile.
    u32* counts;
    // [table_rows]: 1 if some token has the row. Cleared by the first count and set by the first move.
    u32* occurs;
    u32 count;
    // Tokens per tile, a multiple of SORT_THREADS.
    u32 tile;
    u32 shift;
    u32 table_rows;
};

constexpr int SORT_THREADS = DIGITS, SORT_WARPS = SORT_THREADS / 32;

// The row of the n-th token in the current order; `table_rows` for an id outside of the table.
__device__ __forceinline__ u32 sorted_row(const Sort& args, u32 n) {
    u32 row = args.rows[n];
    return row < args.table_rows ? row : args.table_rows;
}

__device__ __forceinline__ u32 digit_of(const Sort& args, u32 row) { return row >> args.shift & (DIGITS - 1); }

// Counts the digits in the tile of this block.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) embedding_sort_count(Sort args) {
    __shared__ u32 counts[DIGITS];
    counts[threadIdx.x] = 0;
    __syncthreads();
    u32 first = blockIdx.x * args.tile;
    for (u32 i = threadIdx.x; i < args.tile; i += SORT_THREADS)
        if (first + i < args.count) atomicAdd(&counts[digit_of(args, sorted_row(args, first + i))], 1);
    __syncthreads();
    args.counts[blockIdx.x * DIGITS + threadIdx.x] = counts[threadIdx.x];
    if (args.tokens == nullptr)
        for (u32 row = blockIdx.x * SORT_THREADS + threadIdx.x; row < args.table_rows; row += gridDim.x * SORT_THREADS)
            args.occurs[row] = 0;
}

// Scatters the tokens of a tile, stably. Thread d computes the first destination of digit d in each warp's
// stretch of the tile: after all lower digits, after digit d of earlier tiles, and after digit d of earlier
// warps. Each warp then walks its stretch 32 tokens at a time; lanes with equal digits rank themselves with a
// match.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) embedding_sort_move(Sort args) {
    __shared__ u32 places[SORT_WARPS][DIGITS];
    __shared__ u32 warp_totals[SORT_WARPS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, digit = threadIdx.x;
    u32 stretch = args.tile / SORT_WARPS, first = blockIdx.x * args.tile + warp * stretch;

    for (int w = 0; w < SORT_WARPS; w++) places[w][digit] = 0;
    __syncthreads();
    for (u32 i = lane; i < stretch; i += 32)
        if (first + i < args.count) atomicAdd(&places[warp][digit_of(args, sorted_row(args, first + i))], 1);

    // Occurrences of this digit in earlier tiles, and in all.
    u32 before = 0, total = 0;
#pragma unroll 8
    for (u32 tile = 0; tile < gridDim.x; tile++) {
        u32 n = args.counts[tile * DIGITS + digit];
        total += n;
        if (tile < blockIdx.x) before += n;
    }
    // An inclusive prefix sum over digits, in each warp.
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
        bool is_token = n < args.count;
        u32 row = is_token ? sorted_row(args, n) : 0;
        // Lanes past the end share a digit that no token has.
        u32 d = is_token ? digit_of(args, row) : DIGITS;
        u32 same = __match_any_sync(0xffffffffu, d);
        u32 rank = __popc(same & ((1u << lane) - 1));
        u32 to = is_token ? places[warp][d] + rank : 0;
        __syncwarp();
        if (is_token && rank == 0) places[warp][d] += __popc(same);
        __syncwarp();
        if (!is_token) continue;
        args.rows_to[to] = row;
        args.tokens_to[to] = args.tokens == nullptr ? n : args.tokens[n];
        // Several threads may store the same.
        if (args.tokens == nullptr && row < args.table_rows) ((volatile u32*)args.occurs)[row] = 1;
    }
}

struct Gradient {
    const void* dx;
    // Sorted rows, and their tokens.
    const u32* rows;
    const u32* tokens;
    const u32* occurs;
    Floats dtable;
    // [runs, 2, width]: partial sums of each run: of a row that began in an earlier run, and of a row that
    // begins in this run and continues in the next.
    float* parts;
    u32 count;
    u32 table_rows;
    u32 width;
    u32 accumulate;
};

// Zeroes the rows that no token has, one warp per row and N elements per thread. N is at most 4: with 8 f32 a
// thread stores twice with a gap, so that the stores of a warp do not coalesce, which halves the speed.
template <int N> __device__ __forceinline__ void clear(const Gradient& args) {
    u32 row = blockIdx.x * SUM_WARPS + threadIdx.x / 32;
    if (row >= args.table_rows || args.occurs[row]) return;
    float zeros[N] = {};
    for (u32 column = threadIdx.x % 32 * N; column < args.width; column += 32 * N)
        store<N>(args.dtable, (u64)row * args.width + column, zeros);
}

// Writes, or adds, N elements of a finished row.
template <int N> __device__ __forceinline__ void put(const Gradient& args, u32 row, u32 column, float* sum) {
    u64 first = (u64)row * args.width + column;
    if (args.accumulate) {
        float held[N];
        load<N>(args.dtable, first, held);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += held[i];
    }
    store<N>(args.dtable, first, sum);
}

// Sums a run: one warp per run and 32 N columns, N columns per lane.
template <class T, int N> __device__ __forceinline__ void sum_run(const Gradient& args) {
    constexpr int IN_FLIGHT = 4;
    u32 run = blockIdx.x * SUM_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = run * RUN, column = (blockIdx.y * 32 + lane) * N;
    if (first >= args.count) return;
    u32 count = min((u32)RUN, args.count - first);
    u32 row = lane < count ? args.rows[first + lane] : ~0u, token = lane < count ? args.tokens[first + lane] : 0;
    // Rows of the tokens before and after the run; ~0 at the ends, which no sorted row equals.
    u32 before = first > 0 ? args.rows[first - 1] : ~0u;
    u32 after = first + count < args.count ? args.rows[first + count] : ~0u;
    bool has_columns = column < args.width;
    float sum[N] = {};
    bool begins = before != __shfl_sync(0xffffffffu, row, 0);
    for (u32 n = 0; n < count; n += IN_FLIGHT) {
        float dx[IN_FLIGHT][N];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            u32 t = __shfl_sync(0xffffffffu, token, (n + k) % RUN);
            if (has_columns && n + k < count) load<N>((const T*)args.dx + (u64)t * args.width + column, dx[k]);
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (n + k >= count) break;
            u32 r = __shfl_sync(0xffffffffu, row, n + k);
            u32 next = n + k + 1 < count ? __shfl_sync(0xffffffffu, row, n + k + 1) : after;
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += dx[k][i];
            bool ends = next != r;
            if (!ends && n + k + 1 < count) continue;
            if (has_columns && r < args.table_rows) {
                if (begins && ends) put<N>(args, r, column, sum);
                else store<N>(args.parts + ((u64)run * 2 + begins) * args.width + column, sum);
            }
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = 0.0f;
            begins = true;
        }
    }
}

// Sums the parts of the row that begins in a run and continues in later ones.
template <int N> __device__ __forceinline__ void sum_rest(const Gradient& args) {
    u32 run = blockIdx.x * SUM_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = run * RUN, column = (blockIdx.y * 32 + lane) * N;
    if (first + RUN >= args.count) return;
    u32 row = args.rows[first + RUN - 1];
    bool begins = first == 0 || args.rows[first - 1] != row;
    if (row >= args.table_rows || !begins || args.rows[first + RUN] != row) return;
    // The last run that begins with this row, found 32 runs at a time.
    u32 last = run;
    while (true) {
        u64 other = (u64)last + 1 + lane;
        bool goes_on = other * RUN < args.count && args.rows[other * RUN] == row;
        u32 all = __ballot_sync(0xffffffffu, goes_on);
        last += all == ~0u ? 32 : __ffs(~all) - 1;
        if (all != ~0u) break;
    }
    if (column >= args.width) return;
    float sum[N];
    load<N>(args.parts + ((u64)run * 2 + 1) * args.width + column, sum);
#pragma unroll 4
    for (u32 other = run + 1; other <= last; other++) {
        float part[N];
        load<N>(args.parts + (u64)other * 2 * args.width + column, part);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += part[i];
    }
    put<N>(args, row, column, sum);
}

#define SUMS(T, NAME, PATH, N)                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) embedding_clear_##PATH##_##NAME(Gradient args) { \
        clear<N == 1 ? 1 : 4>(args);                                                                              \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) embedding_sum_##PATH##_##NAME(Gradient args) {   \
        sum_run<T, N>(args);                                                                                      \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) embedding_rest_##PATH##_##NAME(Gradient args) {  \
        sum_rest<N>(args);                                                                                        \
    }

SUMS(float, f32, vector, 4)
SUMS(bf16, bf16, vector, 8)
SUMS(float, f32, any, 1)
SUMS(bf16, bf16, any, 1)
