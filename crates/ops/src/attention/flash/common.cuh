// What the forward and the backward of attention on tensor cores share: tiles of rows in shared memory, and their products.
//
// HEAD_DIM, a multiple of 16, WARPS, STRIPS and TILE (and WHOLE, where a block has whole sequences) are set by the launcher. A block owns
// some rows, queries or keys, each of its warps STRIPS times 16 of them. A tile's rows lie PITCH elements apart, so that eight rows that are
// read at once stand in different banks.

constexpr int THREADS = WARPS * 32;
// Rows that a block owns.
constexpr int OWNED = WARPS * STRIPS * 16;
// Bytes of a head's row, and 16 more.
// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

constexpr int PITCH = HEAD_DIM + 8;
constexpr int STEPS = HEAD_DIM / 16;
// Natural logarithms to those of base 2, in which exponentials are formed.
constexpr float LOG2_E = 1.4426950408889634f;

struct Shape {
    int seq_len;
    int heads;
    int kv_heads;
    // By token, where its document starts in its sequence; null where a sequence is one document.
    const int* doc_start;
    // The first key that a query sees. Documents follow each other, so it never falls from one query to the next. Whatever stands there
    // (every kernel runs once before there is data), it is a key.
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

// Where a head of a sequence stands.
struct Columns {
    // Of qkv, and of the outputs and their gradients.
    i64 width, out_width;
    // Its first rows; keys and values are those of its group.
    const bf16 *q, *k, *v;
    // The offset of its first row in outputs, and that of its first query in what there is one number of a query and head.
    i64 outputs, sums;

    __device__ __forceinline__ Columns(const Shape& s, const bf16* qkv, int head, int sequence) {
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
// The row of 8 and the pair of columns that this lane has of every sum.
__device__ __forceinline__ int sum_row() { return lane() / 4; }
__device__ __forceinline__ int sum_column() { return lane() % 4 * 2; }

// Begins to copy the ROWS rows of a head from row `first` of a sequence on; what is behind the sequence's end becomes zeros.
template <int ROWS> __device__ __forceinline__ void load_tile(bf16* tile, const bf16* rows, i64 stride, int first, int seq_len) {
    constexpr int CHUNKS = HEAD_DIM / 8;
#pragma unroll
    for (int n = 0; n < (ROWS * CHUNKS + THREADS - 1) / THREADS; n++) {
        int i = n * THREADS + threadIdx.x;
        int row = i / CHUNKS, chunk = i % CHUNKS;
        if (ROWS * CHUNKS % THREADS != 0 && i >= ROWS * CHUNKS) break;
        bool there = first + row < seq_len;
        copy_async<16>(tile + row * PITCH + chunk * 8, rows + (there ? first + row : 0) * stride + chunk * 8, there);
    }
}

// The same way back, COLUMNS of 16 rows that this warp has written.
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

// Where a block has whole sequences: the part of the rows that this warp has in its first and its second turn.
__device__ __forceinline__ int part_of_warp(int turn) { return turn == 0 ? warp() : 2 * WARPS - 1 - warp(); }

// Sums of 16 rows, the upper and the lower eight times a factor, rounded into a tile.
template <int COLUMNS>
__device__ __forceinline__ void put_rows(bf16* tile, const float (&sum)[COLUMNS / 8][4], float upper_scale, float lower_scale) {
    // Whatever stood there has been read.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        float upper[2] = {sum[n][0] * upper_scale, sum[n][1] * upper_scale};
        float lower[2] = {sum[n][2] * lower_scale, sum[n][3] * lower_scale};
        bf16* at = tile + sum_row() * PITCH + n * 8 + sum_column();
        *(u32*)at = pack_pair(upper);
        *(u32*)(at + 8 * PITCH) = pack_pair(lower);
    }
}

// STRIPS x 16 rows of a tile as left operands: kept in registers, or, where heads are too wide for that, read whenever they are needed.
template <bool IN_REGISTERS> struct LeftRows {
    u32 kept[IN_REGISTERS ? STRIPS : 1][IN_REGISTERS ? STEPS : 1][4];
    const bf16* at;

    __device__ __forceinline__ void read(u32 (&to)[4], int m, int step) const {
        load_matrices(to, at + (m * 16 + lane() % 16) * PITCH + step * 16 + lane() / 16 * 8);
    }
    __device__ __forceinline__ explicit LeftRows(const bf16* rows) : at(rows) {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int step = 0; step < STEPS; step++) read(kept[m][step], m, step);
        }
    }
    __device__ __forceinline__ void get(u32 (&to)[4], int m, int step) const {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = kept[m][step][i];
        } else {
            read(to, m, step);
        }
    }
};

// sum[m][row, n] += the dot product of left's row and row n of the tile.
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

// sum[m][row, column] += weights[m][row, k] times the tile's row k from `first_column` on.
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

// Sums as the left operand of the next product, rounded to bf16.
template <int N> __device__ __forceinline__ void as_left(u32 (&to)[N / 16][4], const float (&sum)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        to[k][0] = pack_pair(sum[2 * k]), to[k][1] = pack_pair(sum[2 * k] + 2);
        to[k][2] = pack_pair(sum[2 * k + 1]), to[k][3] = pack_pair(sum[2 * k + 1] + 2);
    }
}

// The queries that a warp owns, from `first` of a sequence on, and which keys they see.
struct Queries {
    int first;
    int seen_from[STRIPS][2];
    // Before this key none of them sees any, and from the second on all see all that are not behind them.
    int seen_by_any, seen_by_all;

    __device__ __forceinline__ Queries(const Shape& s, int sequence, int first) : first(first) {
        seen_by_any = s.first_key(sequence, first);
        seen_by_all = s.first_key(sequence, min(first + STRIPS * 16, s.seq_len) - 1);
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) seen_from[m][half] = s.first_key(sequence, query(m, half));
    }
    // The query of this lane's row in half of a strip.
    __device__ __forceinline__ int query(int m, int half) const { return first + m * 16 + half * 8 + sum_row(); }
    __device__ __forceinline__ int last() const { return first + STRIPS * 16 - 1; }
    // Whether one of them sees one of the N keys from `keys` on.
    template <int N = TILE> __device__ __forceinline__ bool see_some(int keys) const {
        return keys <= last() && keys + N > seen_by_any;
    }
    // Whether one of the N keys from `keys` on is hidden from one of them.
    template <int N = TILE> __device__ __forceinline__ bool miss(int keys) const {
        return keys + N - 1 > first || keys < seen_by_all;
    }
    __device__ __forceinline__ bool see(int m, int half, int key) const {
        return key <= query(m, half) && key >= seen_from[m][half];
    }
};

// Over the four lanes that share a row of a sum.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
