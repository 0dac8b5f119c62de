// The first half of the backward of causal attention on tensor cores (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1.2): dq, and
// delta = the sum of do * o on the way. The other half, `flash_keys.cu`, makes dk and dv. Each forms the probabilities again from the
// log-sum-exp: two products of five twice, so that every sum has one owner and one order.
//
// A block has OWNED queries of one head of a sequence and goes through the keys that they see, TILE at a time (grid: tiles of queries,
// heads, sequences); the next keys and values are copied while these are worked on.

// The left operands fit into registers beside the sums.
constexpr bool KEPT = HEAD_DIM * STRIPS <= 64;

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_queries(Backward at) {
    const Shape& s = at.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* d_o_tile = q_tile + OWNED * PITCH;
    bf16* stages = d_o_tile + OWNED * PITCH;
    constexpr int STAGE = 2 * TILE * PITCH;
    static_assert(2 * TILE >= OWNED, "the outputs pass through the second stage");
    // The longest tiles first.
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED, head = blockIdx.y, sequence = blockIdx.z;
    int kv_head = head / (s.heads / s.kv_heads);
    i64 width = s.row_width(), out_width = (i64)s.heads * HEAD_DIM, before = sequence * (i64)s.seq_len;
    const bf16* rows = at.qkv + before * width;
    const bf16* k_rows = rows + (s.heads + kv_head) * HEAD_DIM;
    const bf16* v_rows = k_rows + s.kv_heads * HEAD_DIM;
    i64 outputs = before * out_width + head * HEAD_DIM, sums = ((i64)sequence * s.heads + head) * s.seq_len;

    int keys = s.first_key(sequence, first) / TILE * TILE, end = min(first + OWNED, s.seq_len);
    load_tile<OWNED>(q_tile, rows + head * HEAD_DIM, width, first, s.seq_len);
    load_tile<OWNED>(d_o_tile, at.d_o + outputs, out_width, first, s.seq_len);
    bf16* o_tile = stages + STAGE;
    load_tile<OWNED>(o_tile, at.o + outputs, out_width, first, s.seq_len);
    load_tile<TILE>(stages, k_rows, width, keys, s.seq_len);
    load_tile<TILE>(stages + TILE * PITCH, v_rows, width, keys, s.seq_len);

    // Of this warp.
    int owned = warp() * STRIPS * 16, warp_first = first + owned, warp_last = warp_first + STRIPS * 16 - 1;
    int seen_from[STRIPS][2], seen_by_all = s.first_key(sequence, min(warp_last, s.seq_len - 1));
    float lse[STRIPS][2], delta[STRIPS][2], dq[STRIPS][HEAD_DIM / 8][4] = {};
    await_copies();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        // Two lanes a row.
        int row = owned + m * 16 + lane() / 2, half = lane() % 2 * (HEAD_DIM / 2);
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 2; c += 8) {
            float x[8], y[8];
            load<8>(d_o_tile + row * PITCH + half + c, x);
            load<8>(o_tile + row * PITCH + half + c, y);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += x[i] * y[i];
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (lane() % 2 == 0 && first + row < s.seq_len) at.delta[sums + first + row] = sum;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = warp_first + m * 16 + half * 8 + sum_row();
            delta[m][half] = __shfl_sync(0xffffffffu, sum, (half * 8 + sum_row()) * 2);
            // A query that is not there gives every key the probability 0.
            lse[m][half] = query < s.seq_len ? at.lse[sums + query] * LOG2_E : INFINITY_F;
            seen_from[m][half] = s.first_key(sequence, query);
        }
    }
    float unit = rsqrtf((float)HEAD_DIM), scale = unit * LOG2_E;
    LeftRows<KEPT> q(q_tile + owned * PITCH), d_o(d_o_tile + owned * PITCH);

    for (int stage = 0; keys < end; keys += TILE, stage ^= 1) {
        await_copies();
        __syncthreads();
        const bf16* k_tile = stages + stage * STAGE;
        const bf16* v_tile = k_tile + TILE * PITCH;
        if (keys + TILE < end) {
            bf16* next = stages + (stage ^ 1) * STAGE;
            load_tile<TILE>(next, k_rows, width, keys + TILE, s.seq_len);
            load_tile<TILE>(next + TILE * PITCH, v_rows, width, keys + TILE, s.seq_len);
        }
        if (keys > warp_last) continue;

        float p[STRIPS][TILE / 8][4] = {}, dp[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(p, q, k_tile);
        multiply_rows<TILE>(dp, d_o, v_tile);
        bool hidden = keys + TILE - 1 > warp_first || keys < seen_by_all;
        u32 ds[STRIPS][TILE / 16][4];
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float e = exp2_fast(fmaf(p[m][n][i], scale, -lse[m][i / 2]));
                    int query = warp_first + m * 16 + i / 2 * 8 + sum_row(), key = keys + n * 8 + sum_column() + i % 2;
                    if (hidden && (key > query || key < seen_from[m][i / 2])) e = 0.0f;
                    p[m][n][i] = e * (dp[m][n][i] - delta[m][i / 2]);
                }
            as_left<TILE>(ds[m], p[m]);
        }
        multiply<TILE, HEAD_DIM>(dq, ds, k_tile, 0);
    }
    bf16* to = at.dqkv + before * width + head * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        // Queries are read by their own warp alone, which is done with them.
        bf16* tile = q_tile + (owned + m * 16) * PITCH;
        put_rows<HEAD_DIM>(tile, dq[m], unit, unit);
        store_rows<HEAD_DIM>(to, width, tile, warp_first + m * 16, s.seq_len);
    }
}
