// Causal attention and its backward on the ordinary cores, in f32: what serves where nothing faster can (f32 operands, odd sizes).
//
// HEAD_DIM and TILE are set by the launcher. A block has X x Y threads and works on tiles of TILE queries by TILE keys; thread (x, y) has
// the elements of rows y * R.. and columns x, x + X, .. of a tile (so that a row belongs to X neighbouring lanes, which reduce it by
// shuffles) and COLUMNS columns of WIDTH, the head's width rounded up to 16. All tiles that are multiplied stand in shared memory as
// floats, with zeros behind the head's width and behind the sequence's end; they are read up to four numbers at a time. Bound by arithmetic:
// of two products a score 4 x 8 scores a thread take 12 reads for 128 multiplications; q, k, v and o cross from memory once a tile of queries.

constexpr int X = 8, Y = 16, THREADS = X * Y;
constexpr int R = TILE / Y, KEYS = TILE / X;
// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

constexpr int WIDTH = (HEAD_DIM + 15) / 16 * 16;
constexpr int COLUMNS = WIDTH / X;
// Four more words a row: eight rows that are read at once stand in different banks.
constexpr int PITCH = WIDTH + 4;
constexpr int SCORES = TILE + 4;
// Neighbours among a thread's columns.
constexpr int SIDE = COLUMNS % 4 == 0 ? 4 : 2;

struct Shape {
    int seq_len;
    int heads;
    int kv_heads;
    // By token, where its document starts in its sequence; null where a sequence is one document.
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

// Columns of qkv.
__device__ __forceinline__ i64 row_width(const Shape& s) { return (i64)(s.heads + 2 * s.kv_heads) * HEAD_DIM; }

// Copies rows first.. of one head of a sequence into a tile, times `scale`.
template <class T>
__device__ __forceinline__ void load_tile(float* tile, const T* rows, i64 stride, int first, int seq_len, float scale) {
    constexpr int N = HEAD_DIM % 4 == 0 ? 4 : 1, PIECES = WIDTH / N, AT_ONCE = N == 4 ? 4 : 2;
    for (int begin = threadIdx.y * X + threadIdx.x; begin < TILE * PIECES; begin += AT_ONCE * THREADS) {
        float x[AT_ONCE][N] = {};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            int i = begin + n * THREADS, row = first + i / PIECES, column = i % PIECES * N;
            if (i < TILE * PIECES && row < seq_len && column < HEAD_DIM) load<N>(rows + row * stride + column, x[n]);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            int i = begin + n * THREADS;
#pragma unroll
            for (int k = 0; k < N; k++) x[n][k] *= scale;
            if (i < TILE * PIECES) store<N>(tile + i / PIECES * PITCH + i % PIECES * N, x[n]);
        }
    }
}

// This thread's c-th column.
__device__ __forceinline__ int column_of(int c) { return (c / SIDE * X + (int)threadIdx.x) * SIDE + c % SIDE; }

// product[i][j] += the dot product of row y * R + i of a and row x + X j of b.
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

// sum[i][c] += x[i] times this thread's columns of a row.
__device__ __forceinline__ void add_row(float (&sum)[R][COLUMNS], const float (&x)[R], const float* row) {
    float y[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c += SIDE) load<SIDE>(row + column_of(c), y + c);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < R; i++) sum[i][c] += x[i] * y[c];
}

// sum[i][c] += row y * R + i of p times this thread's columns of b.
__device__ __forceinline__ void multiply(float (&sum)[R][COLUMNS], const float* p, const float* b) {
#pragma unroll 2
    for (int k = 0; k < TILE; k += 4) {
        float x[R][4];
#pragma unroll
        for (int i = 0; i < R; i++) load<4>(p + (threadIdx.y * R + i) * SCORES + k, x[i]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float of_k[R];
#pragma unroll
            for (int i = 0; i < R; i++) of_k[i] = x[i][n];
            add_row(sum, of_k, b + (k + n) * PITCH);
        }
    }
}

// The same with p transposed: sum[i][c] += column y * R + i of p times this thread's columns of b.
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

// Sums and maxima over the lanes that share a row.
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

// e^x. The fast one errs by units in the last place times |x|, which bf16 hides and f32 does not.
template <class T> __device__ __forceinline__ float exponential(float x) { return sizeof(T) == 4 ? expf(x) : __expf(x); }

__device__ __forceinline__ int first_key(const Shape& s, int sequence, int query) {
    return s.doc_start && query < s.seq_len ? s.doc_start[(i64)sequence * s.seq_len + query] : 0;
}

// Whether a query of a tile may not see a key of a tile: none where all keys are before the queries, in one document.
__device__ __forceinline__ bool is_cut(const Shape& s, int queries, int keys) { return s.doc_start || keys + TILE - 1 > queries; }

// A block a tile of queries of a head of a sequence (grid: tiles, heads, sequences). The softmax is formed as keys come (Milakov &
// Gimelshein, arXiv 1805.02867): what was summed is scaled down whenever a larger score appears.
template <class T> __device__ __forceinline__ void forward(const Forward& at) {
    const Shape& s = at.shape;
    float* q = space;
    float* k = q + TILE * PITCH;
    float* v = k + TILE * PITCH;
    float* p = v + TILE * PITCH;
    // The longest tiles first.
    int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    int kv_head = head / (s.heads / s.kv_heads), first = tile * TILE;
    i64 width = row_width(s);
    const T* rows = (const T*)at.qkv + sequence * (i64)s.seq_len * width;
    load_tile(q, rows + head * HEAD_DIM, width, first, s.seq_len, SCALE);

    float largest[R], total[R], o[R][COLUMNS] = {};
    int seen_from[R];
#pragma unroll
    for (int i = 0; i < R; i++) {
        largest[i] = -INFINITY_F;
        total[i] = 0.0f;
        seen_from[i] = first_key(s, sequence, first + threadIdx.y * R + i);
    }
    // Documents follow each other, so the first query sees furthest back.
    for (int keys = first_key(s, sequence, first) / TILE * TILE; keys <= first; keys += TILE) {
        __syncthreads();
        load_tile(k, rows + (s.heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        load_tile(v, rows + (s.heads + s.kv_heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        __syncthreads();
        float score[R][KEYS] = {};
        multiply_rows(score, q, k);
        bool cut = is_cut(s, first, keys);
#pragma unroll
        for (int i = 0; i < R; i++) {
            int query = first + threadIdx.y * R + i;
            if (cut)
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    int key = keys + threadIdx.x + X * j;
                    if (key > query || key < seen_from[i]) score[i][j] = -INFINITY_F;
                }
            float most = largest[i];
#pragma unroll
            for (int j = 0; j < KEYS; j++) most = fmaxf(most, score[i][j]);
            most = row_max(most);
            // Nothing seen yet: exp(-inf - -inf) would be NaN.
            float shift = most == -INFINITY_F ? 0.0f : most, sum = 0.0f;
            float shrink = exponential<T>(largest[i] - shift);
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                float e = exponential<T>(score[i][j] - shift);
                p[(threadIdx.y * R + i) * SCORES + threadIdx.x + X * j] = e;
                sum += e;
            }
            total[i] = total[i] * shrink + row_sum(sum);
            largest[i] = most;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) o[i][c] *= shrink;
        }
        // The rows of p that a thread reads were written by lanes of its own warp.
        __syncwarp();
        multiply(o, p, v);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        int query = first + threadIdx.y * R + i;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[i][c] /= total[i];
        if (threadIdx.x == 0 && query < s.seq_len)
            at.lse[((i64)sequence * s.heads + head) * s.seq_len + query] = largest[i] + logf(total[i]);
    }
    i64 out_width = (i64)s.heads * HEAD_DIM;
    store_tile((T*)at.o + sequence * (i64)s.seq_len * out_width + head * HEAD_DIM, out_width, first, s.seq_len, o);
}

// delta = the sum of d_o * o over a head's columns: a warp a query and head (grid: queries by blockDim.y, heads, sequences).
template <class T> __device__ __forceinline__ void backward_delta(const Backward& at) {
    const Shape& s = at.shape;
    int query = blockIdx.x * blockDim.y + threadIdx.y, head = blockIdx.y, sequence = blockIdx.z;
    if (query >= s.seq_len) return;
    i64 first = (((i64)sequence * s.seq_len + query) * s.heads + head) * HEAD_DIM;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < HEAD_DIM; c += 32)
        sum += widen(((const T*)at.d_o)[first + c]) * widen(((const T*)at.o)[first + c]);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) at.delta[((i64)sequence * s.heads + head) * s.seq_len + query] = sum;
}

// What the backward needs of a thread's queries; of those behind the end, whose rows are zeros, anything finite.
struct Queries {
    float lse[R], delta[R];
    int seen_from[R];
};

__device__ __forceinline__ Queries queries_of(const Backward& at, int sequence, int head, int first) {
    Queries of;
#pragma unroll
    for (int i = 0; i < R; i++) {
        int query = first + threadIdx.y * R + i;
        i64 place = ((i64)sequence * at.shape.heads + head) * at.shape.seq_len + query;
        bool there = query < at.shape.seq_len;
        of.lse[i] = there ? at.lse[place] : 0.0f;
        of.delta[i] = there ? at.delta[place] : 0.0f;
        of.seen_from[i] = first_key(at.shape, sequence, query);
    }
    return of;
}

// The probabilities of a tile, and the gradients of its scores.
template <class T>
__device__ __forceinline__ void gradients_of_scores(
    float (&p)[R][KEYS], float (&ds)[R][KEYS], const Queries& of, const float* q, const float* k, const float* v, const float* d_o,
    int queries, int keys, bool cut) {
    multiply_rows(p, q, k);
    multiply_rows(ds, d_o, v);
#pragma unroll
    for (int i = 0; i < R; i++) {
#pragma unroll
        for (int j = 0; j < KEYS; j++) p[i][j] = exponential<T>(p[i][j] - of.lse[i]);
        if (cut) {
            int query = queries + threadIdx.y * R + i;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                int key = keys + threadIdx.x + X * j;
                if (key > query || key < of.seen_from[i]) p[i][j] = 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS; j++) ds[i][j] = p[i][j] * (ds[i][j] - of.delta[i]);
    }
}

// dq: a block a tile of queries, as in the forward.
template <class T> __device__ __forceinline__ void backward_queries(const Backward& at) {
    const Shape& s = at.shape;
    float* q = space;
    float* d_o = q + TILE * PITCH;
    float* k = d_o + TILE * PITCH;
    float* v = k + TILE * PITCH;
    float* ds_tile = v + TILE * PITCH;
    int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    int kv_head = head / (s.heads / s.kv_heads), first = tile * TILE;
    i64 width = row_width(s), out_width = (i64)s.heads * HEAD_DIM;
    i64 before = sequence * (i64)s.seq_len;
    const T* rows = (const T*)at.qkv + before * width;
    Queries of = queries_of(at, sequence, head, first);
    float scale = SCALE;
    load_tile(q, rows + head * HEAD_DIM, width, first, s.seq_len, scale);
    load_tile(d_o, (const T*)at.d_o + before * out_width + head * HEAD_DIM, out_width, first, s.seq_len, 1.0f);
    float dq[R][COLUMNS] = {};
    for (int keys = first_key(s, sequence, first) / TILE * TILE; keys <= first; keys += TILE) {
        __syncthreads();
        load_tile(k, rows + (s.heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        load_tile(v, rows + (s.heads + s.kv_heads + kv_head) * HEAD_DIM, width, keys, s.seq_len, 1.0f);
        __syncthreads();
        float p[R][KEYS] = {}, ds[R][KEYS] = {};
        gradients_of_scores<T>(p, ds, of, q, k, v, d_o, first, keys, is_cut(s, first, keys));
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < KEYS; j++) ds_tile[(threadIdx.y * R + i) * SCORES + threadIdx.x + X * j] = ds[i][j] * scale;
        __syncwarp();
        multiply(dq, ds_tile, k);
    }
    store_tile((T*)at.dqkv + before * width + head * HEAD_DIM, width, first, s.seq_len, dq);
}

// dk and dv: a block a tile of keys of a key/value head, which goes through the queries of all heads of its group in order (grid:
// tiles, key/value heads, sequences).
template <class T> __device__ __forceinline__ void backward_keys(const Backward& at) {
    const Shape& s = at.shape;
    float* q = space;
    float* d_o = q + TILE * PITCH;
    float* k = d_o + TILE * PITCH;
    float* v = k + TILE * PITCH;
    float* p_tile = v + TILE * PITCH;
    float* ds_tile = p_tile + TILE * SCORES;
    int keys = blockIdx.x * TILE, kv_head = blockIdx.y, sequence = blockIdx.z, group = s.heads / s.kv_heads;
    i64 width = row_width(s), out_width = (i64)s.heads * HEAD_DIM;
    i64 before = sequence * (i64)s.seq_len;
    const T* rows = (const T*)at.qkv + before * width;
    int k_column = (s.heads + kv_head) * HEAD_DIM, v_column = (s.heads + s.kv_heads + kv_head) * HEAD_DIM;
    load_tile(k, rows + k_column, width, keys, s.seq_len, 1.0f);
    load_tile(v, rows + v_column, width, keys, s.seq_len, 1.0f);
    float dk[R][COLUMNS] = {}, dv[R][COLUMNS] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int queries = keys; queries < s.seq_len; queries += TILE) {
            // Later documents see none of these keys.
            if (first_key(s, sequence, queries) >= keys + TILE) break;
            Queries of = queries_of(at, sequence, head, queries);
            __syncthreads();
            load_tile(q, rows + head * HEAD_DIM, width, queries, s.seq_len, SCALE);
            load_tile(d_o, (const T*)at.d_o + before * out_width + head * HEAD_DIM, out_width, queries, s.seq_len, 1.0f);
            __syncthreads();
            float p[R][KEYS] = {}, ds[R][KEYS] = {};
            gradients_of_scores<T>(p, ds, of, q, k, v, d_o, queries, keys, is_cut(s, queries, keys));
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
            // The queries were scaled when they were loaded, as the scores' gradients must be.
            multiply_transposed(dk, ds_tile, q);
        }
    }
    T* gradients = (T*)at.dqkv + before * width;
    store_tile(gradients + k_column, width, keys, s.seq_len, dk);
    store_tile(gradients + v_column, width, keys, s.seq_len, dv);
}

// For heads this wide the compiler aims at four blocks on this architecture, and spills a word; three do.
#if __CUDA_ARCH__ == 1000 && HEAD_DIM > 112 && HEAD_DIM <= 128
#define BOUNDS_OF_QUERIES __launch_bounds__(THREADS, 3)
#else
#define BOUNDS_OF_QUERIES __launch_bounds__(THREADS)
#endif

#define KERNELS(name, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##name(Forward at) { forward<T>(at); }                 \
    extern "C" __global__ void attention_delta_##name(Backward at) { backward_delta<T>(at); }                          \
    extern "C" __global__ void BOUNDS_OF_QUERIES attention_queries_##name(Backward at) { backward_queries<T>(at); } \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_keys_##name(Backward at) { backward_keys<T>(at); }

KERNELS(f32, float)
KERNELS(bf16, bf16)
