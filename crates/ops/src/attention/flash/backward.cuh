// What the kernels of attention's backward share: the gradients of a warp's queries, or keys, from a tile of the others. Each forms the
// probabilities again from the log-sum-exp (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1.2).

// The left operands fit into registers beside the sums.
constexpr bool KEPT = HEAD_DIM * STRIPS <= 64;
// Columns of dk and dv that a block sums: those of wider heads do not fit into registers.
constexpr int COLUMNS = HEAD_DIM <= 128 ? HEAD_DIM : HEAD_DIM / 2;

__device__ __forceinline__ float unit() { return SCALE; }
__device__ __forceinline__ float scale() { return unit() * LOG2_E; }

// The queries of a warp and the sum of their gradients.
struct QueryRows {
    Queries queries;
    LeftRows<KEPT> q, d_o;
    // By row: the log-sum-exp in base 2, and delta.
    float lse[STRIPS][2], delta[STRIPS][2];
    float dq[STRIPS][HEAD_DIM / 8][4];

    __device__ __forceinline__ QueryRows(const Shape& s, int sequence, int first, const bf16* q_rows, const bf16* d_o_rows)
        : queries(s, sequence, first), q(q_rows), d_o(d_o_rows), dq{} {}

    // Goes through TILE keys from `keys` on.
    __device__ __forceinline__ void add(const bf16* k_tile, const bf16* v_tile, int keys) {
        float p[STRIPS][TILE / 8][4] = {}, dp[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(p, q, k_tile);
        multiply_rows<TILE>(dp, d_o, v_tile);
        u32 ds[STRIPS][TILE / 16][4];
        if (queries.miss(keys)) {
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (!queries.see(m, i / 2, keys + n * 8 + sum_column() + i % 2)) p[m][n][i] = -INFINITY_F;
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

    // Writes dq by way of STRIPS x 16 rows of `tile`, which are this warp's to overwrite.
    __device__ __forceinline__ void finish(bf16* rows, i64 width, bf16* tile, int seq_len) {
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            put_rows<HEAD_DIM>(tile + m * 16 * PITCH, dq[m], unit(), unit());
            store_rows<HEAD_DIM>(rows, width, tile + m * 16 * PITCH, queries.first + m * 16, seq_len);
        }
    }
};

// What the queries of a tile have one of each, by query. Zeros stand for a query that is not there: its rows of zeros add nothing.
struct OfQueries {
    const float* lse;
    const float* delta;
    const int* seen_from;
};

// Begins to copy what a query has; delta where there is a place for it.
__device__ __forceinline__ void load_of_query(const Backward& at, const Columns& of, int sequence, int query, float* lse, float* delta,
                                              float* seen_from) {
    const Shape& s = at.shape;
    bool there = query < s.seq_len;
    int from = there ? query : 0;
    copy_async<4>(lse, at.lse + of.sums + from, there);
    if (delta) copy_async<4>(delta, at.delta + of.sums + from, there);
    if (s.doc_start) copy_async<4>(seen_from, s.doc_start + (i64)sequence * s.seq_len + from, there);
}

// The keys of a warp, from `first` on, and the sums of their gradients and their values', transposed: a row a key.
struct KeyRows {
    int first;
    LeftRows<KEPT> k, v;
    float dk[STRIPS][COLUMNS / 8][4], dv[STRIPS][COLUMNS / 8][4];

    __device__ __forceinline__ KeyRows(int first, const bf16* k_rows, const bf16* v_rows)
        : first(first), k(k_rows), v(v_rows), dk{}, dv{} {}

    __device__ __forceinline__ int last() const { return first + STRIPS * 16 - 1; }

    // Goes through TILE queries from `queries` on; sums the columns from `column` on.
    __device__ __forceinline__ void add(const Shape& s, const bf16* q_tile, const bf16* d_o_tile, const OfQueries& of, int queries,
                                        int column) {
        float p[STRIPS][TILE / 8][4] = {}, dp[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(p, k, q_tile);
        multiply_rows<TILE>(dp, v, d_o_tile);
        bool before = queries < last();
        bool cut = s.doc_start && of.seen_from[min(TILE, s.seq_len - queries) - 1] > first;
        if (before || cut) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int c = n * 8 + sum_column() + j, from = cut ? of.seen_from[c] : 0;
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
            float2 lse = *(const float2*)(of.lse + n * 8 + sum_column());
            float2 delta = *(const float2*)(of.delta + n * 8 + sum_column());
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

    // Writes dk and dv by way of STRIPS x 16 rows of `tile`, which are this warp's to overwrite.
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

// delta of 16 queries, for the row of each half of a strip that this lane has: the sums of do * o over a head's columns. Two lanes a row;
// `keep` is handed each sum once, with the row.
template <class Keep> __device__ __forceinline__ void sum_delta(float (&delta)[2], const bf16* d_o, const bf16* o, i64 o_stride, Keep keep) {
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
    if (lane() % 2 == 0) keep(row, sum);
#pragma unroll
    for (int half = 0; half < 2; half++) delta[half] = __shfl_sync(0xffffffffu, sum, (half * 8 + sum_row()) * 2);
}
