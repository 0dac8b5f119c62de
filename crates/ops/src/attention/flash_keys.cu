// The second half of the backward of causal attention on tensor cores: dk and dv, after `flash_queries.cu`.
//
// A block has OWNED keys of a key/value head and goes through the queries of all heads of its group that see them, TILE at a time (grid:
// tiles of keys and, where heads are wide, parts of their columns; key/value heads; sequences). Sums stand transposed: a row a key.

// The left operands fit into registers beside the sums.
constexpr bool KEPT = HEAD_DIM * STRIPS <= 64;
// Columns of dk and dv that a block sums: those of wider heads do not fit into registers.
constexpr int COLUMNS = HEAD_DIM <= 128 ? HEAD_DIM : HEAD_DIM / 2;

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_keys(Backward at) {
    const Shape& s = at.shape;
    constexpr int PARTS = HEAD_DIM / COLUMNS, STAGE = 2 * TILE * PITCH;
    bf16* k_tile = (bf16*)shared_space;
    bf16* v_tile = k_tile + OWNED * PITCH;
    bf16* stages = v_tile + OWNED * PITCH;
    // Of each stage's queries: the log-sum-exp, delta, and the first key that they see.
    float* stage_sums = (float*)(stages + 2 * STAGE);
    int first = blockIdx.x / PARTS * OWNED, column = blockIdx.x % PARTS * COLUMNS, kv_head = blockIdx.y, sequence = blockIdx.z;
    int group = s.heads / s.kv_heads;
    i64 width = s.row_width(), out_width = (i64)s.heads * HEAD_DIM, before = sequence * (i64)s.seq_len;
    const bf16* rows = at.qkv + before * width;
    int k_column = (s.heads + kv_head) * HEAD_DIM, v_column = k_column + s.kv_heads * HEAD_DIM;
    load_tile<OWNED>(k_tile, rows + k_column, width, first, s.seq_len);
    load_tile<OWNED>(v_tile, rows + v_column, width, first, s.seq_len);

    // Tiles of queries that see one of these keys: from the keys' own on, until documents begin behind them.
    int first_tile = first / TILE, tiles = 0;
    for (int tile = first_tile; tile * TILE < s.seq_len; tile += THREADS) {
        int mine = (tile + (int)threadIdx.x) * TILE;
        int seeing = __syncthreads_count(mine < s.seq_len && s.first_key(sequence, mine) < first + OWNED);
        tiles += seeing;
        if (seeing < THREADS) break;
    }
    auto load_stage = [&](int stage, int n) {
        int head = kv_head * group + n / tiles, queries = (first_tile + n % tiles) * TILE;
        bf16* q_tile = stages + stage * STAGE;
        load_tile<TILE>(q_tile, rows + head * HEAD_DIM, width, queries, s.seq_len);
        load_tile<TILE>(q_tile + TILE * PITCH, at.d_o + before * out_width + head * HEAD_DIM, out_width, queries, s.seq_len);
        i64 sums = ((i64)sequence * s.heads + head) * s.seq_len;
        float* to = stage_sums + stage * 3 * TILE;
        for (int i = threadIdx.x; i < TILE; i += THREADS) {
            // Zeros for a query that is not there: its rows of zeros add nothing.
            bool there = queries + i < s.seq_len;
            int query = there ? queries + i : 0;
            copy_async<4>(to + i, at.lse + sums + query, there);
            copy_async<4>(to + TILE + i, at.delta + sums + query, there);
            if (s.doc_start) copy_async<4>(to + 2 * TILE + i, s.doc_start + before + query, there);
        }
    };
    load_stage(0, 0);

    // Of this warp.
    int owned = warp() * STRIPS * 16, warp_first = first + owned;
    float dk[STRIPS][COLUMNS / 8][4] = {}, dv[STRIPS][COLUMNS / 8][4] = {};
    float unit = rsqrtf((float)HEAD_DIM), scale = unit * LOG2_E;
    await_copies();
    __syncthreads();
    LeftRows<KEPT> k(k_tile + owned * PITCH), v(v_tile + owned * PITCH);

    for (int n = 0, stage = 0; n < group * tiles; n++, stage ^= 1) {
        await_copies();
        __syncthreads();
        if (n + 1 < group * tiles) load_stage(stage ^ 1, n + 1);
        int queries = (first_tile + n % tiles) * TILE;
        if (queries + TILE - 1 < warp_first) continue;
        const bf16* q_tile = stages + stage * STAGE;
        const bf16* d_o_tile = q_tile + TILE * PITCH;
        const float* lse = stage_sums + stage * 3 * TILE;
        const float* delta = lse + TILE;
        const int* seen_from = (const int*)(delta + TILE);

        float p[STRIPS][TILE / 8][4] = {}, dp[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(p, k, q_tile);
        multiply_rows<TILE>(dp, v, d_o_tile);
        bool hidden = queries < warp_first + STRIPS * 16 - 1;
        bool cut = s.doc_start && seen_from[min(TILE, s.seq_len - queries) - 1] > warp_first;
#pragma unroll
        for (int i = 0; i < TILE / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int c = i * 8 + sum_column() + j, query = queries + c, from = cut ? seen_from[c] : 0;
                float l = lse[c] * LOG2_E, d = delta[c];
#pragma unroll
                for (int m = 0; m < STRIPS; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int key = warp_first + m * 16 + half * 8 + sum_row();
                        float& mine = p[m][i][half * 2 + j];
                        float& gradient = dp[m][i][half * 2 + j];
                        mine = exp2_fast(fmaf(mine, scale, -l));
                        if ((hidden && key > query) || (cut && key < from)) mine = 0.0f;
                        gradient = mine * (gradient - d);
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
    bf16* to = at.dqkv + before * width + column;
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        // Keys and values are read by their own warp alone, which is done with them.
        bf16* tile = k_tile + (owned + m * 16) * PITCH;
        __syncwarp();
        put_rows<COLUMNS>(tile, dk[m], unit, unit);
        store_rows<COLUMNS>(to + k_column, width, tile, warp_first + m * 16, s.seq_len);
        __syncwarp();
        put_rows<COLUMNS>(tile, dv[m], 1.0f, 1.0f);
        store_rows<COLUMNS>(to + v_column, width, tile, warp_first + m * 16, s.seq_len);
    }
}
