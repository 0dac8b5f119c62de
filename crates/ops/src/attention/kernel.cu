// Causal attention and its backward on CUDA cores, in f32: the fallback for f32 operands and for head widths
// that tensor cores do not support. FlashAttention (Dao et al., arXiv 2205.14135): scores exist only tile by
// tile, and the backward recomputes probabilities from the log-sum-exp.
//
// The launcher defines HEAD_DIM and TILE. A block of X x Y threads computes tiles of TILE queries by TILE
// keys. Thread (x, y) has rows y * R, .., y * R + R - 1 and columns x, x + X, .. of a score tile, so that a
// row is spread over X neighbouring lanes, which reduce it by shuffles; of outputs it has the same rows and
// COLUMNS of WIDTH columns, the head's width rounded up to 16. All operands lie in shared memory as f32,
// zero-padded past the head's width and past the sequence's end, and are read up to four numbers at a time.
//
// Bound by arithmetic: with TILE = 64 a thread's 4 x 8 scores take 12 vector reads per 128 FMAs. q, k, v and
// o are read from global memory once for each tile of queries.

constexpr int THREADS = X * Y;
constexpr int R = TILE / Y, KEYS = TILE / X;
// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

constexpr int WIDTH = (HEAD_DIM + 15) / 16 * 16;
constexpr int COLUMNS = WIDTH / X;
// Padded by four words, so that eight rows that are read at once lie in different banks.
constexpr int PITCH = WIDTH + 4;
constexpr int SCORES = TILE + 4;
// Contiguous columns of a thread.
constexpr int SIDE = COLUMNS % 4 == 0 ? 4 : 2;

struct Shape {
    int seq_len;
    int heads;
    int kv_heads;
    // For each token, the index in its sequence of the first token of its document; null without documents.
    const int* doc_start;
};

struct Forward {
    const void* qkv;
    void* o;
    float* lse;
    Shape shape;
};

struct Backward {
    const void* d_o;
    const void* qkv;
    const void* o;
    const float* lse;
    // f32 [B, heads, S]: the sum of d_o * o over a head's columns.
    float* delta;
    void* dqkv;
    Shape shape;
};

extern __shared__ __align__(16) float space[];

// Number of columns of qkv.
__device__ __forceinline__ i64 row_width(const Shape& s) { return (i64)(s.heads + 2 * s.kv_heads) * HEAD_DIM; }

// Loads TILE rows of one head of a sequence, from row `first` on, times `scale`, into a tile.
template <class T>
__device__ __forceinline__ void load_tile(float* tile, const T* rows, i64 stride, int first, int seq_len, float scale) {
    constexpr int N = HEAD_DIM % 4 == 0 ? 4 : 1, PIECES = WIDTH / N, IN_FLIGHT = N == 4 ? 4 : 2;
    for (int begin = threadIdx.y * X + threadIdx.x; begin < TILE * PIECES; begin += IN_FLIGHT * THREADS) {
        float x[IN_FLIGHT][N] = {};
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            int i = begin + n * THREADS, row = first + i / PIECES, column = i % PIECES * N;
            if (i < TILE * PIECES && row < seq_len && column < HEAD_DIM) load<N>(rows + row * stride + column, x[n]);
        }
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            int i = begin + n * THREADS;
#pragma unroll
            for (int k = 0; k < N; k++) x[n][k] *= scale;
            if (i < TILE * PIECES) store<N>(tile + i / PIECES * PITCH + i % PIECES * N, x[n]);
        }
    }
}

// This thread's c-th column.
__device__ __forceinline__ int column_of(int c) { return (c / SIDE * X + (int)threadIdx.x) * SIDE + c % SIDE; }

// product[i][j] += dot product of row y * R + i of a and row x + X j of b.
__device__ __forceinline__ void multiply_rows(float (&product)[R][KEYS], const float* a, const float* b) {
#pragma unroll 2
    for (int k = 0; k < WIDTH; k += 4) {
        float x[R][4], y[KEYS][4];
#pragma unroll
        for (int i = 0; i < R; i++) load<4>(a + (threadIdx.y * R + i) * PITCH + k, x[i]);
#pragma unroll
        for (int j = 0; j < KEYS; j++) load<4>(b + (threadIdx.x + X * j) * PITCH + k, y[j]);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < KEYS; j++) product[i][j] += x[i][n] * y[j][n];
    }
}

// sum[i][c] += x[i] * row[c], for this thread's columns c.
__device__ __forceinline__ void add_row(float (&sum)[R][COLUMNS], const float (&x)[R], const float* row) {
    float y[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c += SIDE) load<SIDE>(row + column_of(c), y + c);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < R; i++) sum[i][c] += x[i] * y[c];
}

// sum += p b, for this thread's rows of p and columns of b.
__device__ __forceinline__ void multiply(float (&sum)[R][COLUMNS], const float* p, const float* b) {
#pragma unroll 2
    for (int k = 0; k < TILE; k += 4) {
        float x[R][4];
#pragma unroll
        for (int i = 0; i < R; i++) load<4>(p + (threadIdx.y * R + i) * SCORES + k, x[i]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float column[R];
#pragma unroll
            for (int i = 0; i < R; i++) column[i] = x[i][n];
            add_row(sum, column, b + (k + n) * PITCH);
        }
    }
}

// sum += p^T b, for this thread's columns of p and columns of b.
__device__ __forceinline__ void multiply_transposed(float (&sum)[R][COLUMNS], const float* p, const float* b) {
#pragma unroll 4
    for (int k = 0; k < TILE; k++) {
        float x[R];
        load<R>(p + k * SCORES + threadIdx.y * R, x);
        add_row(sum, x, b + k * PITCH);
    }
}

template <class T>
__device__ __forceinline__ void store_tile(T* rows, i64 stride, int first, int seq_len, const float (&sum)[R][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < R; i++) {
        int row = first + threadIdx.y * R + i;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int column = column_of(c);
            if (row < seq_len && column < HEAD_DIM) rows[row * stride + column] = narrow<T>(sum[i][c]);
        }
    }
}

// Sum and maximum over the X lanes that share a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int lane = X / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int lane = X / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// e^x. The fast version's error grows with |x|, by units in the last place: too much for f32, negligible in
// bf16.
template <class T> __device__ __forceinline__ float exponential(float x) { return sizeof(T) == 4 ? expf(x) : __expf(x); }

__device__ __forceinline__ int first_key(const Shape& s, int sequence, int query) {
    return s.doc_start && query < s.seq_len ? s.doc_start[(i64)sequence * s.seq_len + query] : 0;
}

// True if a query of a tile may not attend to some key of a tile: there are documents, or the tile is on the
// diagonal.
__device__ __forceinline__ bool needs_mask(const Shape& s, int queries, int keys) {
    return s.doc_start || keys + TILE - 1 > queries;
}

// Forward: one block per tile of queries and head. Grid: (tiles, heads, sequences). Online softmax (Milakov &
// Gimelshein, arXiv 1805.02867): the running sums are rescaled when a row's maximum rises.
template <class T> __device__ __forceinline__ void forward(const Forward& args) {
    const Shape& s = args.shape;
    float* q = space;
    float* k = q + TILE * PITCH;
    float* v = k + TILE * PITCH;
    float* p = v + TILE * PITCH;
    // The tiles with the most keys are scheduled first.
    int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    int kv_head = head / (s.heads / s.kv_heads), first = tile * TILE;
    i64 width = row_width(s);
    const T* rows = (const T*)args.qkv + sequence * (i64)s.seq_len * width;
    load_tile(q, rows + head * HEAD_DIM, width, first, s.seq_len, SCALE);

    float max_score[R], total[R], o[R][COLUMNS] = {};
    int seen_from[R];
#pragma unroll
    for (int i = 0; i < R; i++) {
        max_score[i] = -INFINITY_F;
        total[i] = 0.0f;
        seen_from[i] = first_key(s, sequence, first + threadIdx.y * R + i);
    }
    // Documents are in order, so the first query of the tile sees furthest back.
    for (int keys = first_key(s, sequence, first) / TILE * TILE; keys <= first; keys += TILE) {
        __syncthreads();
        load_tile(k, rows + (s.heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        load_tile(v, rows + (s.heads + s.kv_heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        __syncthreads();
        float score[R][KEYS] = {};
        multiply_rows(score, q, k);
        bool masked = needs_mask(s, first, keys);
#pragma unroll
        for (int i = 0; i < R; i++) {
            int query = first + threadIdx.y * R + i;
            if (masked)
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    int key = keys + threadIdx.x + X * j;
                    if (key > query || key < seen_from[i]) score[i][j] = -INFINITY_F;
                }
            float new_max = max_score[i];
#pragma unroll
            for (int j = 0; j < KEYS; j++) new_max = fmaxf(new_max, score[i][j]);
            new_max = row_max(new_max);
            // Without any key so far, exp(-inf - -inf) would be NaN.
            float shift = new_max == -INFINITY_F ? 0.0f : new_max, sum = 0.0f;
            float shrink = exponential<T>(max_score[i] - shift);
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                float e = exponential<T>(score[i][j] - shift);
                p[(threadIdx.y * R + i) * SCORES + threadIdx.x + X * j] = e;
                sum += e;
            }
            total[i] = total[i] * shrink + row_sum(sum);
            max_score[i] = new_max;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) o[i][c] *= shrink;
        }
        // The rows of p that a thread reads were written by its own warp.
        __syncwarp();
        multiply(o, p, v);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        int query = first + threadIdx.y * R + i;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[i][c] /= total[i];
        if (threadIdx.x == 0 && query < s.seq_len)
            args.lse[((i64)sequence * s.heads + head) * s.seq_len + query] = max_score[i] + logf(total[i]);
    }
    i64 out_width = (i64)s.heads * HEAD_DIM;
    store_tile((T*)args.o + sequence * (i64)s.seq_len * out_width + head * HEAD_DIM, out_width, first, s.seq_len, o);
}

// delta = sum of d_o * o over a head's columns: one warp per query and head. Grid: (ceil(queries /
// blockDim.y), heads, sequences).
template <class T> __device__ __forceinline__ void backward_delta(const Backward& args) {
    const Shape& s = args.shape;
    int query = blockIdx.x * blockDim.y + threadIdx.y, head = blockIdx.y, sequence = blockIdx.z;
    if (query >= s.seq_len) return;
    i64 first = (((i64)sequence * s.seq_len + query) * s.heads + head) * HEAD_DIM;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < HEAD_DIM; c += 32)
        sum += widen(((const T*)args.d_o)[first + c]) * widen(((const T*)args.o)[first + c]);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) args.delta[((i64)sequence * s.heads + head) * s.seq_len + query] = sum;
}

// Values of a thread's queries that the backward needs. For queries past the end, whose rows are zeros, any
// finite value does.
struct QueryStats {
    float lse[R], delta[R];
    int seen_from[R];
};

__device__ __forceinline__ QueryStats query_stats(const Backward& args, int sequence, int head, int first) {
    QueryStats stats;
#pragma unroll
    for (int i = 0; i < R; i++) {
        int query = first + threadIdx.y * R + i;
        i64 place = ((i64)sequence * args.shape.heads + head) * args.shape.seq_len + query;
        bool exists = query < args.shape.seq_len;
        stats.lse[i] = exists ? args.lse[place] : 0.0f;
        stats.delta[i] = exists ? args.delta[place] : 0.0f;
        stats.seen_from[i] = first_key(args.shape, sequence, query);
    }
    return stats;
}

// Recomputes the probabilities of a tile, and the gradients of its scores.
template <class T>
__device__ __forceinline__ void gradients_of_scores(
    float (&p)[R][KEYS], float (&ds)[R][KEYS], const QueryStats& stats, const float* q, const float* k, const float* v, const float* d_o,
    int queries, int keys, bool masked) {
    multiply_rows(p, q, k);
    multiply_rows(ds, d_o, v);
#pragma unroll
    for (int i = 0; i < R; i++) {
#pragma unroll
        for (int j = 0; j < KEYS; j++) p[i][j] = exponential<T>(p[i][j] - stats.lse[i]);
        if (masked) {
            int query = queries + threadIdx.y * R + i;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                int key = keys + threadIdx.x + X * j;
                if (key > query || key < stats.seen_from[i]) p[i][j] = 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS; j++) ds[i][j] = p[i][j] * (ds[i][j] - stats.delta[i]);
    }
}

// dq: one block per tile of queries and head, with the grid of the forward.
template <class T> __device__ __forceinline__ void backward_queries(const Backward& args) {
    const Shape& s = args.shape;
    float* q = space;
    float* d_o = q + TILE * PITCH;
    float* k = d_o + TILE * PITCH;
    float* v = k + TILE * PITCH;
    float* ds_tile = v + TILE * PITCH;
    int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    int kv_head = head / (s.heads / s.kv_heads), first = tile * TILE;
    i64 width = row_width(s), out_width = (i64)s.heads * HEAD_DIM;
    i64 before = sequence * (i64)s.seq_len;
    const T* rows = (const T*)args.qkv + before * width;
    QueryStats stats = query_stats(args, sequence, head, first);
    float scale = SCALE;
    load_tile(q, rows + head * HEAD_DIM, width, first, s.seq_len, scale);
    load_tile(d_o, (const T*)args.d_o + before * out_width + head * HEAD_DIM, out_width, first, s.seq_len, 1.0f);
    float dq[R][COLUMNS] = {};
    for (int keys = first_key(s, sequence, first) / TILE * TILE; keys <= first; keys += TILE) {
        __syncthreads();
        load_tile(k, rows + (s.heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        load_tile(v, rows + (s.heads + s.kv_heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        __syncthreads();
        float p[R][KEYS] = {}, ds[R][KEYS] = {};
        gradients_of_scores<T>(p, ds, stats, q, k, v, d_o, first, keys, needs_mask(s, first, keys));
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < KEYS; j++) ds_tile[(threadIdx.y * R + i) * SCORES + threadIdx.x + X * j] = ds[i][j] * scale;
        __syncwarp();
        multiply(dq, ds_tile, k);
    }
    store_tile((T*)args.dqkv + before * width + head * HEAD_DIM, width, first, s.seq_len, dq);
}

// dk and dv: one block per tile of keys and key/value head, which loops over the queries of all heads of its
// group in order, so that no sum needs atomics. Grid: (tiles, key/value heads, sequences).
template <class T> __device__ __forceinline__ void backward_keys(const Backward& args) {
    const Shape& s = args.shape;
    float* q = space;
    float* d_o = q + TILE * PITCH;
    float* k = d_o + TILE * PITCH;
    float* v = k + TILE * PITCH;
    float* p_tile = v + TILE * PITCH;
    float* ds_tile = p_tile + TILE * SCORES;
    int keys = blockIdx.x * TILE, kv_head = blockIdx.y, sequence = blockIdx.z, group = s.heads / s.kv_heads;
    i64 width = row_width(s), out_width = (i64)s.heads * HEAD_DIM;
    i64 before = sequence * (i64)s.seq_len;
    const T* rows = (const T*)args.qkv + before * width;
    int k_column = (s.heads + kv_head) * HEAD_DIM, v_column = (s.heads + s.kv_heads + kv_head) * HEAD_DIM;
    load_tile(k, rows + k_column, width, keys, s.seq_len, 1.0f);
    load_tile(v, rows + v_column, width, keys, s.seq_len, 1.0f);
    float dk[R][COLUMNS] = {}, dv[R][COLUMNS] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int queries = keys; queries < s.seq_len; queries += TILE) {
            // Queries of later documents see none of these keys.
            if (first_key(s, sequence, queries) >= keys + TILE) break;
            QueryStats stats = query_stats(args, sequence, head, queries);
            __syncthreads();
            load_tile(q, rows + head * HEAD_DIM, width, queries, s.seq_len, SCALE);
            load_tile(d_o, (const T*)args.d_o + before * out_width + head * HEAD_DIM, out_width, queries, s.seq_len, 1.0f);
            __syncthreads();
            float p[R][KEYS] = {}, ds[R][KEYS] = {};
            gradients_of_scores<T>(p, ds, stats, q, k, v, d_o, queries, keys, needs_mask(s, queries, keys));
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    int place = (threadIdx.y * R + i) * SCORES + threadIdx.x + X * j;
                    p_tile[place] = p[i][j];
                    ds_tile[place] = ds[i][j];
                }
            __syncthreads();
            multiply_transposed(dv, p_tile, d_o);
            // q was scaled when it was loaded, so dk needs no further scale.
            multiply_transposed(dk, ds_tile, q);
        }
    }
    T* gradients = (T*)args.dqkv + before * width;
    store_tile(gradients + k_column, width, keys, s.seq_len, dk);
    store_tile(gradients + v_column, width, keys, s.seq_len, dv);
}

// For heads this wide the compiler targets four blocks per multiprocessor on sm_100 and spills a register;
// with a limit of three it does not.
#if __CUDA_ARCH__ == 1000 && HEAD_DIM > 112 && HEAD_DIM <= 128
#define BOUNDS_OF_QUERIES __launch_bounds__(THREADS, 3)
#else
#define BOUNDS_OF_QUERIES __launch_bounds__(THREADS)
#endif

#define KERNELS(name, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##name(Forward args) { forward<T>(args); }          \
    extern "C" __global__ void attention_delta_##name(Backward args) { backward_delta<T>(args); }                       \
    extern "C" __global__ void BOUNDS_OF_QUERIES attention_queries_##name(Backward args) { backward_queries<T>(args); } \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_keys_##name(Backward args) { backward_keys<T>(args); }

KERNELS(f32, float)
KERNELS(bf16, bf16)
