// Forward of causal attention on tensor cores for sequences of at most WHOLE tokens. A block holds q, k and v
// of one head in shared memory and synchronises only once, after loading them. Grid: (heads, sequences).
//
// Each warp owns two parts of the queries, equally far from the start and the end, so that all warps process
// the same number of keys.

extern "C" __global__ void __launch_bounds__(THREADS, 1) whole_forward(Forward args) {
    const Shape& s = args.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* k_tile = q_tile + WHOLE * PITCH;
    bf16* v_tile = k_tile + WHOLE * PITCH;
    int head = blockIdx.x, sequence = blockIdx.y;
    HeadRows head_rows(s, args.qkv, head, sequence);
    load_tile<WHOLE>(q_tile, head_rows.q, head_rows.width, 0, s.seq_len);
    load_tile<WHOLE>(k_tile, head_rows.k, head_rows.width, 0, s.seq_len);
    load_tile<WHOLE>(v_tile, head_rows.v, head_rows.width, 0, s.seq_len);
    await_copies();
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        int first = part_of_warp(turn) * STRIPS * 16;
        if (first >= s.seq_len) continue;
        OutputRows rows(s, sequence, first, q_tile + first * PITCH);
        for (int keys = s.first_key(sequence, first) / TILE * TILE; keys <= rows.queries.last(); keys += TILE)
            rows.add(k_tile + keys * PITCH, v_tile + keys * PITCH, keys);
        rows.finish(args, head, sequence, q_tile + first * PITCH);
    }
}
