// The first half of the backward of causal attention on tensor cores: dq, and delta = the sum of do * o on the way. The other half,
// `keys.cu`, makes dk and dv. Two products of five are made twice, so that every sum has one owner and one order.
//
// A block has OWNED queries of one head of a sequence and goes through the keys that they see, TILE at a time (grid: tiles of queries,
// heads, sequences); the next keys and values are copied while these are worked on.

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_queries(Backward at) {
    const Shape& s = at.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* d_o_tile = q_tile + OWNED * PITCH;
    bf16* stages = d_o_tile + OWNED * PITCH;
    constexpr int STAGE = 2 * TILE * PITCH;
    static_assert(2 * TILE >= OWNED, "the outputs pass through the second stage");
    // The longest tiles first.
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED, head = blockIdx.y, sequence = blockIdx.z;
    Columns of(s, at.qkv, head, sequence);
    int keys = s.first_key(sequence, first) / TILE * TILE, end = min(first + OWNED, s.seq_len);
    load_tile<OWNED>(q_tile, of.q, of.width, first, s.seq_len);
    load_tile<OWNED>(d_o_tile, at.d_o + of.outputs, of.out_width, first, s.seq_len);
    bf16* o_tile = stages + STAGE;
    load_tile<OWNED>(o_tile, at.o + of.outputs, of.out_width, first, s.seq_len);
    load_tile<TILE>(stages, of.k, of.width, keys, s.seq_len);
    load_tile<TILE>(stages + TILE * PITCH, of.v, of.width, keys, s.seq_len);
    await_copies();
    __syncthreads();

    int owned = warp() * STRIPS * 16;
    QueryRows rows(s, sequence, first + owned, q_tile + owned * PITCH, d_o_tile + owned * PITCH);
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        int strip = owned + m * 16;
        sum_delta(rows.delta[m], d_o_tile + strip * PITCH, o_tile + strip * PITCH, PITCH, [&](int row, float sum) {
            if (first + strip + row < s.seq_len) at.delta[of.sums + first + strip + row] = sum;
        });
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = rows.queries.query(m, half);
            // A query that is not there gives every key the probability 0.
            rows.lse[m][half] = query < s.seq_len ? at.lse[of.sums + query] * LOG2_E : INFINITY_F;
        }
    }
    for (int stage = 0; keys < end; keys += TILE, stage ^= 1) {
        await_copies();
        __syncthreads();
        const bf16* k_tile = stages + stage * STAGE;
        if (keys + TILE < end) {
            bf16* next = stages + (stage ^ 1) * STAGE;
            load_tile<TILE>(next, of.k, of.width, keys + TILE, s.seq_len);
            load_tile<TILE>(next + TILE * PITCH, of.v, of.width, keys + TILE, s.seq_len);
        }
        if (rows.queries.see_some(keys)) rows.add(k_tile, k_tile + TILE * PITCH, keys);
    }
    // Queries are read by their own warp alone, which is done with them.
    rows.finish(at.dqkv + (of.q - at.qkv), of.width, q_tile + owned * PITCH, s.seq_len);
}
