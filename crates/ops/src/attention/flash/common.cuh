// Building blocks of attention on tensor cores (FlashAttention-2, Dao, arXiv 2307.08691): tiles of rows in
// shared memory, their GEMMs by mma.m16n8k16, and causal and document masks.
//
// The launcher defines HEAD_DIM (a multiple of 16), WARPS, STRIPS and TILE, and WHOLE for kernels that hold
// whole sequences. A block owns OWNED rows, queries or keys, of which each warp owns STRIPS strips of 16, and
// loops over tiles of TILE rows of the other kind. Rows of a tile are PITCH elements apart, so that eight
// rows that are read at once lie in different banks. Fragment layouts are described in tensor_cores.cuh.

constexpr int THREADS = WARPS * 32;
// Rows that a block owns.
constexpr int OWNED = WARPS * STRIPS * 16;
// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

// Elements between rows of a tile: the head's width, padded by 16 bytes.
constexpr int PITCH = HEAD_DIM + 8;
constexpr int STEPS = HEAD_DIM / 16;
// Exponentials are computed in base 2: log2(x) = ln(x) * LOG2_E.
constexpr float LOG2_E = 1.4426950408889634f;

struct Shape {
    int seq_len;
    int heads;
    int kv_heads;
    // For each token, the index in its sequence of the first token of its document; null without documents.
    const int* doc_start;
    // The first key that a query sees. Documents are in order, so it does not decrease with the query. It is
    // clamped to a valid key, because kernels are timed before doc_start holds data.
    __device__ int first_key(int sequence, int query) const {
        return doc_start && query < seq_len ? min(max(doc_start[(i64)sequence * seq_len + query], 0), query) : 0;
    }
};

struct Forward {
    const bf16* qkv;
    bf16* o;
    float* lse;
    Shape shape;
};

struct Backward {
    const bf16* d_o;
    const bf16* qkv;
    const bf16* o;
    const float* lse;
    // f32 [B, heads, S].
    float* delta;
    bf16* dqkv;
    Shape shape;
};

// Addresses of one query head of one sequence.
struct HeadRows {
    // Row widths of qkv, and of outputs and their gradients.
    i64 width, out_width;
    // First rows of its queries, and of the keys and values of its group.
    const bf16 *q, *k, *v;
    // Offset of its first row in outputs, and of its first query in lse and delta.
    i64 outputs, sums;

    __device__ __forceinline__ HeadRows(const Shape& s, const bf16* qkv, int head, int sequence) {
        int kv_head = head / (s.heads / s.kv_heads);
        i64 before = sequence * (i64)s.seq_len;
        width = (i64)(s.heads + 2 * s.kv_heads) * HEAD_DIM;
        out_width = (i64)s.heads * HEAD_DIM;
        q = qkv + before * width + head * HEAD_DIM;
        k = qkv + before * width + (s.heads + kv_head) * HEAD_DIM;
        v = k + s.kv_heads * HEAD_DIM;
        outputs = before * out_width + head * HEAD_DIM;
        sums = ((i64)sequence * s.heads + head) * s.seq_len;
    }
};

extern __shared__ uint4 shared_space[];

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
// Row (of 8) and first column (of a pair) of this lane in each m16n8 accumulator.
__device__ __forceinline__ int sum_row() { return lane() / 4; }
__device__ __forceinline__ int sum_column() { return lane() % 4 * 2; }

// Starts asynchronous copies of ROWS rows of a head, from row `first` of a sequence on. Rows past the end of
// the sequence become zeros.
template <int ROWS> __device__ __forceinline__ void load_tile(bf16* tile, const bf16* rows, i64 stride, int first, int seq_len) {
    constexpr int CHUNKS = HEAD_DIM / 8;
#pragma unroll
    for (int n = 0; n < (ROWS * CHUNKS + THREADS - 1) / THREADS; n++) {
        int i = n * THREADS + threadIdx.x;
        int row = i / CHUNKS, chunk = i % CHUNKS;
        if (ROWS * CHUNKS % THREADS != 0 && i >= ROWS * CHUNKS) break;
        bool exists = first + row < seq_len;
        copy_async<16>(tile + row * PITCH + chunk * 8, rows + (exists ? first + row : 0) * stride + chunk * 8, exists);
    }
}

// Stores COLUMNS columns of 16 rows that this warp has written to a tile.
template <int COLUMNS>
__device__ __forceinline__ void store_rows(bf16* rows, i64 stride, const bf16* tile, int first, int seq_len) {
    constexpr int CHUNKS = COLUMNS / 8;
    __syncwarp();
    for (int i = lane(); i < 16 * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row < seq_len)
            *(uint4*)(rows + (first + row) * stride + chunk * 8) = *(const uint4*)(tile + row * PITCH + chunk * 8);
    }
}

// For whole sequences: the part of the rows that this warp owns in its first and in its second turn. The two
// are as far from the start as from the end, so that all warps have the same number of keys to process.
__device__ __forceinline__ int part_of_warp(int turn) { return turn == 0 ? warp() : 2 * WARPS - 1 - warp(); }

// Rounds the sums of 16 rows into a tile; the upper and the lower eight rows are each multiplied by a scale.
template <int COLUMNS>
__device__ __forceinline__ void put_rows(bf16* tile, const float (&sum)[COLUMNS / 8][4], float upper_scale, float lower_scale) {
    // All lanes have read the previous contents.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        float upper[2] = {sum[n][0] * upper_scale, sum[n][1] * upper_scale};
        float lower[2] = {sum[n][2] * lower_scale, sum[n][3] * lower_scale};
        bf16* pair = tile + sum_row() * PITCH + n * 8 + sum_column();
        *(u32*)pair = pack_pair(upper);
        *(u32*)(pair + 8 * PITCH) = pack_pair(lower);
    }
}

// STRIPS x 16 rows of a tile as left operands. They are held in registers or, if heads are too wide for that,
// read from shared memory whenever they are needed.
template <bool IN_REGISTERS> struct LeftRows {
    u32 fragments[IN_REGISTERS ? STRIPS : 1][IN_REGISTERS ? STEPS : 1][4];
    const bf16* rows;

    __device__ __forceinline__ void read(u32 (&to)[4], int m, int step) const {
        load_matrices(to, rows + (m * 16 + lane() % 16) * PITCH + step * 16 + lane() / 16 * 8);
    }
    __device__ __forceinline__ explicit LeftRows(const bf16* rows) : rows(rows) {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int step = 0; step < STEPS; step++) read(fragments[m][step], m, step);
        }
    }
    __device__ __forceinline__ void get(u32 (&to)[4], int m, int step) const {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = fragments[m][step][i];
        } else {
            read(to, m, step);
        }
    }
};

// sum[m] += left[m] tile^T, over N rows of the tile.
template <int N, bool IN_REGISTERS>
__device__ __forceinline__ void multiply_rows(float (&sum)[STRIPS][N / 8][4], const LeftRows<IN_REGISTERS>& left, const bf16* tile) {
#pragma unroll(IN_REGISTERS ? STEPS : 2)
    for (int step = 0; step < STEPS; step++) {
        u32 a[STRIPS][4];
#pragma unroll
        for (int m = 0; m < STRIPS; m++) left.get(a[m], m, step);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            u32 b[4];
            load_matrices(b, tile + (n * 16 + lane() / 16 * 8 + lane() % 8) * PITCH + step * 16 + lane() / 8 % 2 * 8);
#pragma unroll
            for (int m = 0; m < STRIPS; m++) {
                multiply_add(sum[m][2 * n], a[m], b[0], b[1]);
                multiply_add(sum[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// sum[m] += weights[m] tile, over K rows of the tile and COLUMNS columns from `first_column` on.
template <int K, int COLUMNS>
__device__ __forceinline__ void multiply(float (&sum)[STRIPS][COLUMNS / 8][4], const u32 (&weights)[STRIPS][K / 16][4], const bf16* tile,
                                         int first_column) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int c = 0; c < COLUMNS / 16; c++) {
            u32 b[4];
            load_transposed(b, tile + (k * 16 + lane() % 16) * PITCH + first_column + c * 16 + lane() / 16 * 8);
#pragma unroll
            for (int m = 0; m < STRIPS; m++) {
                multiply_add(sum[m][2 * c], weights[m][k], b[0], b[1]);
                multiply_add(sum[m][2 * c + 1], weights[m][k], b[2], b[3]);
            }
        }
}

// Rounds accumulators to bf16 fragments of a left operand, for the next GEMM. The layouts match, so no data
// moves between lanes.
template <int N> __device__ __forceinline__ void as_left(u32 (&to)[N / 16][4], const float (&sum)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        to[k][0] = pack_pair(sum[2 * k]), to[k][1] = pack_pair(sum[2 * k] + 2);
        to[k][2] = pack_pair(sum[2 * k + 1]), to[k][3] = pack_pair(sum[2 * k + 1] + 2);
    }
}

// The queries that a warp owns, from `first` on, and the keys that they see.
struct Queries {
    int first;
    int seen_from[STRIPS][2];
    // The first key that any of them sees, and the key from which on each sees all keys up to itself.
    int seen_by_any, seen_by_all;

    __device__ __forceinline__ Queries(const Shape& s, int sequence, int first) : first(first) {
        seen_by_any = s.first_key(sequence, first);
        seen_by_all = s.first_key(sequence, min(first + STRIPS * 16, s.seq_len) - 1);
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) seen_from[m][half] = s.first_key(sequence, query(m, half));
    }
    // The query in this lane's row of the upper or lower half of a strip.
    __device__ __forceinline__ int query(int m, int half) const { return first + m * 16 + half * 8 + sum_row(); }
    __device__ __forceinline__ int last() const { return first + STRIPS * 16 - 1; }
    // True if some query sees some of the N keys from `keys` on.
    template <int N = TILE> __device__ __forceinline__ bool any_sees(int keys) const {
        return keys <= last() && keys + N > seen_by_any;
    }
    // True if some of the N keys from `keys` on is hidden from some query.
    template <int N = TILE> __device__ __forceinline__ bool needs_mask(int keys) const {
        return keys + N - 1 > first || keys < seen_by_all;
    }
    __device__ __forceinline__ bool sees(int m, int half, int key) const {
        return key <= query(m, half) && key >= seen_from[m][half];
    }
};

// Sum and maximum over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
