// Causal attention on tensor cores over sequences of at most WHOLE tokens: a block has all of one head in shared memory (grid: heads,
// sequences), and its warps never wait for each other. Each has two parts of the queries, one from either end, which together see as many
// keys as every other two.

extern "C" __global__ void __launch_bounds__(THREADS, 1) whole_forward(Forward at) {
    const Shape& s = at.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* k_tile = q_tile + WHOLE * PITCH;
    bf16* v_tile = k_tile + WHOLE * PITCH;
    int head = blockIdx.x, sequence = blockIdx.y;
    Columns of(s, at.qkv, head, sequence);
    load_tile<WHOLE>(q_tile, of.q, of.width, 0, s.seq_len);
    load_tile<WHOLE>(k_tile, of.k, of.width, 0, s.seq_len);
    load_tile<WHOLE>(v_tile, of.v, of.width, 0, s.seq_len);
    await_copies();
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        int first = part_of_warp(turn) * STRIPS * 16;
        if (first >= s.seq_len) continue;
        Rows rows(s, sequence, first, q_tile + first * PITCH);
        for (int keys = s.first_key(sequence, first) / TILE * TILE; keys <= rows.queries.last(); keys += TILE)
            rows.add(k_tile + keys * PITCH, v_tile + keys * PITCH, keys);
        rows.finish(at, head, sequence, q_tile + first * PITCH);
    }
}
