// Tiled backward of causal attention on tensor cores, first launch: dq, and delta, the sum of do * o, which
// the second launch reads. flash/keys.cu is the second launch, for dk and dv. Two of the five GEMMs, the
// scores and dp, are computed in both, so that each gradient is summed by one block in a fixed order, without
// atomics.
//
// A block owns OWNED queries of one head and loops over the keys that they see, TILE at a time,
// double-buffered. Grid: (tiles of queries, heads, sequences).

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_queries(Backward args) {
    const Shape& s = args.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* d_o_tile = q_tile + OWNED * PITCH;
    bf16* stages = d_o_tile + OWNED * PITCH;
    constexpr int STAGE = 2 * TILE * PITCH;
    static_assert(2 * TILE >= OWNED, "the outputs are loaded into the second stage");
    // The tiles with the most keys are scheduled first.
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED, head = blockIdx.y, sequence = blockIdx.z;
    HeadRows head_rows(s, args.qkv, head, sequence);
    int keys = s.first_key(sequence, first) / TILE * TILE, end = min(first + OWNED, s.seq_len);
    load_tile<OWNED>(q_tile, head_rows.q, head_rows.width, first, s.seq_len);
    load_tile<OWNED>(d_o_tile, args.d_o + head_rows.outputs, head_rows.out_width, first, s.seq_len);
    bf16* o_tile = stages + STAGE;
    load_tile<OWNED>(o_tile, args.o + head_rows.outputs, head_rows.out_width, first, s.seq_len);
    load_tile<TILE>(stages, head_rows.k, head_rows.width, keys, s.seq_len);
    load_tile<TILE>(stages + TILE * PITCH, head_rows.v, head_rows.width, keys, s.seq_len);
    await_copies();
    __syncthreads();

    int owned = warp() * STRIPS * 16;
    QueryRows rows(s, sequence, first + owned, q_tile + owned * PITCH, d_o_tile + owned * PITCH);
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        int strip = owned + m * 16;
        sum_delta(rows.delta[m], d_o_tile + strip * PITCH, o_tile + strip * PITCH, PITCH, [&](int row, float sum) {
            if (first + strip + row < s.seq_len) args.delta[head_rows.sums + first + strip + row] = sum;
        });
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = rows.queries.query(m, half);
            // For queries past the end all probabilities become 0.
            rows.lse[m][half] = query < s.seq_len ? args.lse[head_rows.sums + query] * LOG2_E : INFINITY_F;
        }
    }
    for (int stage = 0; keys < end; keys += TILE, stage ^= 1) {
        await_copies();
        __syncthreads();
        const bf16* k_tile = stages + stage * STAGE;
        if (keys + TILE < end) {
            bf16* next = stages + (stage ^ 1) * STAGE;
            load_tile<TILE>(next, head_rows.k, head_rows.width, keys + TILE, s.seq_len);
            load_tile<TILE>(next + TILE * PITCH, head_rows.v, head_rows.width, keys + TILE, s.seq_len);
        }
        if (rows.queries.any_sees(keys)) rows.add(k_tile, k_tile + TILE * PITCH, keys);
    }
    // Each warp reads only its own rows of q_tile, and no longer needs them.
    rows.finish(args.dqkv + (head_rows.q - args.qkv), head_rows.width, q_tile + owned * PITCH, s.seq_len);
}
