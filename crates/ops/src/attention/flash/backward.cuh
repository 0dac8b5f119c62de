// Backward of attention for the queries, or the keys, of one warp, a tile of the other kind at a time.
// Probabilities are recomputed from the log-sum-exp (Dao, "FlashAttention-2", arXiv 2307.08691, section
// 3.1.2).

// True if the left operands fit into registers together with the sums.
constexpr bool HOLDS_LEFT = HEAD_DIM * STRIPS <= 64;
// Columns of dk and dv that a block sums. For heads wider than 128 all columns would not fit into registers.
constexpr int COLUMNS = HEAD_DIM <= 128 ? HEAD_DIM : HEAD_DIM / 2;

__device__ __forceinline__ float unit() { return SCALE; }
__device__ __forceinline__ float scale() { return unit() * LOG2_E; }

// The queries of a warp, and their gradients.
struct QueryRows {
    Queries queries;
    LeftRows<HOLDS_LEFT> q, d_o;
    // Log-sum-exp in base 2 and delta of each row.
    float lse[STRIPS][2], delta[STRIPS][2];
    float dq[STRIPS][HEAD_DIM / 8][4];

    __device__ __forceinline__ QueryRows(const Shape& s, int sequence, int first, const bf16* q_rows, const bf16* d_o_rows)
        : queries(s, sequence, first), q(q_rows), d_o(d_o_rows), dq{} {}

    // Adds the contribution of the TILE keys from `keys` on to dq.
    __device__ __forceinline__ void add(const bf16* k_tile, const bf16* v_tile, int keys) {
        float p[STRIPS][TILE / 8][4] = {}, dp[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(p, q, k_tile);
        multiply_rows<TILE>(dp, d_o, v_tile);
        u32 ds[STRIPS][TILE / 16][4];
        if (queries.needs_mask(keys)) {
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (!queries.sees(m, i / 2, keys + n * 8 + sum_column() + i % 2)) p[m][n][i] = -INFINITY_F;
        }
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    p[m][n][i] = exp2_fast(fmaf(p[m][n][i], scale(), -lse[m][i / 2])) * (dp[m][n][i] - delta[m][i / 2]);
            as_left<TILE>(ds[m], p[m]);
        }
        multiply<TILE, HEAD_DIM>(dq, ds, k_tile, 0);
    }

    // Writes dq, through STRIPS x 16 rows of `tile` that this warp may overwrite.
    __device__ __forceinline__ void finish(bf16* rows, i64 width, bf16* tile, int seq_len) {
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            put_rows<HEAD_DIM>(tile + m * 16 * PITCH, dq[m], unit(), unit());
            store_rows<HEAD_DIM>(rows, width, tile + m * 16 * PITCH, queries.first + m * 16, seq_len);
        }
    }
};

// Values of the queries of a tile, in shared memory. They are zero for queries past the end, whose rows of
// zeros contribute nothing.
struct QueryStats {
    const float* lse;
    const float* delta;
    const int* seen_from;
};

// Starts asynchronous copies of the values of a query. `delta` may be null.
__device__ __forceinline__ void load_query_stats(const Backward& args, const HeadRows& head_rows, int sequence, int query, float* lse,
                                                 float* delta, float* seen_from) {
    const Shape& s = args.shape;
    bool exists = query < s.seq_len;
    int from = exists ? query : 0;
    copy_async<4>(lse, args.lse + head_rows.sums + from, exists);
    if (delta) copy_async<4>(delta, args.delta + head_rows.sums + from, exists);
    if (s.doc_start) copy_async<4>(seen_from, s.doc_start + (i64)sequence * s.seq_len + from, exists);
}

// The keys of a warp, from `first` on, with the gradients of keys and values. Scores are transposed: a row is
// a key.
struct KeyRows {
    int first;
    LeftRows<HOLDS_LEFT> k, v;
    float dk[STRIPS][COLUMNS / 8][4], dv[STRIPS][COLUMNS / 8][4];

    __device__ __forceinline__ KeyRows(int first, const bf16* k_rows, const bf16* v_rows)
        : first(first), k(k_rows), v(v_rows), dk{}, dv{} {}

    __device__ __forceinline__ int last() const { return first + STRIPS * 16 - 1; }

    // Adds the contribution of the TILE queries from `queries` on to the columns of dk and dv from `column`
    // on.
    __device__ __forceinline__ void add(const Shape& s, const bf16* q_tile, const bf16* d_o_tile, const QueryStats& stats, int queries,
                                        int column) {
        float p[STRIPS][TILE / 8][4] = {}, dp[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(p, k, q_tile);
        multiply_rows<TILE>(dp, v, d_o_tile);
        bool on_diagonal = queries < last();
        bool crosses_documents = s.doc_start && stats.seen_from[min(TILE, s.seq_len - queries) - 1] > first;
        if (on_diagonal || crosses_documents) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int c = n * 8 + sum_column() + j, from = crosses_documents ? stats.seen_from[c] : 0;
#pragma unroll
                    for (int m = 0; m < STRIPS; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            int key = first + m * 16 + half * 8 + sum_row();
                            if (key > queries + c || key < from) p[m][n][half * 2 + j] = -INFINITY_F;
                        }
                }
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            float2 lse = *(const float2*)(stats.lse + n * 8 + sum_column());
            float2 delta = *(const float2*)(stats.delta + n * 8 + sum_column());
            float l[2] = {lse.x * LOG2_E, lse.y * LOG2_E}, d[2] = {delta.x, delta.y};
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    p[m][n][i] = exp2_fast(fmaf(p[m][n][i], scale(), -l[i % 2]));
                    dp[m][n][i] = p[m][n][i] * (dp[m][n][i] - d[i % 2]);
                }
        }
        u32 weights[STRIPS][TILE / 16][4];
#pragma unroll
        for (int m = 0; m < STRIPS; m++) as_left<TILE>(weights[m], p[m]);
        multiply<TILE, COLUMNS>(dv, weights, d_o_tile, column);
#pragma unroll
        for (int m = 0; m < STRIPS; m++) as_left<TILE>(weights[m], dp[m]);
        multiply<TILE, COLUMNS>(dk, weights, q_tile, column);
    }

    // Writes dk and dv, through STRIPS x 16 rows of `tile` that this warp may overwrite.
    __device__ __forceinline__ void finish(bf16* dk_rows, bf16* dv_rows, i64 width, bf16* tile, int seq_len) {
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            bf16* strip = tile + m * 16 * PITCH;
            put_rows<COLUMNS>(strip, dk[m], unit(), unit());
            store_rows<COLUMNS>(dk_rows, width, strip, first + m * 16, seq_len);
            put_rows<COLUMNS>(strip, dv[m], 1.0f, 1.0f);
            store_rows<COLUMNS>(dv_rows, width, strip, first + m * 16, seq_len);
        }
    }
};

// delta of 16 queries, the sum of do * o over a head's columns: two lanes sum a row. `delta` gets the values
// of this lane's rows in both halves of the strip; `store(row, delta)` is called once for each row.
template <class Store> __device__ __forceinline__ void sum_delta(float (&delta)[2], const bf16* d_o, const bf16* o, i64 o_stride, Store store) {
    int row = lane() / 2, half = lane() % 2 * (HEAD_DIM / 2);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 2; c += 8) {
        float x[8], y[8];
        load<8>(d_o + row * PITCH + half + c, x);
        load<8>(o + row * o_stride + half + c, y);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[i] * y[i];
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (lane() % 2 == 0) store(row, sum);
#pragma unroll
    for (int half = 0; half < 2; half++) delta[half] = __shfl_sync(0xffffffffu, sum, (half * 8 + sum_row()) * 2);
}
