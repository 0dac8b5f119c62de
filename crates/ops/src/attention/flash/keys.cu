// Tiled backward of causal attention on tensor cores, second launch: dk and dv (flash/queries.cu is the
// first).
//
// A block owns OWNED keys of a key/value head and loops over the queries of all heads of its group that see
// them, TILE at a time, double-buffered. Grid: (tiles of keys x parts of the columns, key/value heads,
// sequences); heads wider than 128 have two parts.

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_keys(Backward args) {
    const Shape& s = args.shape;
    constexpr int PARTS = HEAD_DIM / COLUMNS, STAGE = 2 * TILE * PITCH;
    bf16* k_tile = (bf16*)shared_space;
    bf16* v_tile = k_tile + OWNED * PITCH;
    bf16* stages = v_tile + OWNED * PITCH;
    // For the queries of each stage: log-sum-exp, delta, and first key.
    float* stage_sums = (float*)(stages + 2 * STAGE);
    int first = blockIdx.x / PARTS * OWNED, column = blockIdx.x % PARTS * COLUMNS, kv_head = blockIdx.y, sequence = blockIdx.z;
    int group = s.heads / s.kv_heads;
    HeadRows keys(s, args.qkv, kv_head * group, sequence);
    load_tile<OWNED>(k_tile, keys.k, keys.width, first, s.seq_len);
    load_tile<OWNED>(v_tile, keys.v, keys.width, first, s.seq_len);

    // Number of tiles of queries that see some of these keys: from the tile of the first key on, up to the
    // first document that begins after them.
    int first_tile = first / TILE, tiles = 0;
    for (int tile = first_tile; tile * TILE < s.seq_len; tile += THREADS) {
        int query = (tile + (int)threadIdx.x) * TILE;
        int seeing = __syncthreads_count(query < s.seq_len && s.first_key(sequence, query) < first + OWNED);
        tiles += seeing;
        if (seeing < THREADS) break;
    }
    auto load_stage = [&](int stage, int n) {
        int head = kv_head * group + n / tiles, queries = (first_tile + n % tiles) * TILE;
        HeadRows head_rows(s, args.qkv, head, sequence);
        bf16* q_tile = stages + stage * STAGE;
        load_tile<TILE>(q_tile, head_rows.q, head_rows.width, queries, s.seq_len);
        load_tile<TILE>(q_tile + TILE * PITCH, args.d_o + head_rows.outputs, head_rows.out_width, queries, s.seq_len);
        float* to = stage_sums + stage * 3 * TILE;
        for (int i = threadIdx.x; i < TILE; i += THREADS)
            load_query_stats(args, head_rows, sequence, queries + i, to + i, to + TILE + i, to + 2 * TILE + i);
    };
    load_stage(0, 0);
    await_copies();
    __syncthreads();

    int owned = warp() * STRIPS * 16;
    KeyRows rows(first + owned, k_tile + owned * PITCH, v_tile + owned * PITCH);
    for (int n = 0, stage = 0; n < group * tiles; n++, stage ^= 1) {
        await_copies();
        __syncthreads();
        if (n + 1 < group * tiles) load_stage(stage ^ 1, n + 1);
        int queries = (first_tile + n % tiles) * TILE;
        const bf16* q_tile = stages + stage * STAGE;
        const float* sums = stage_sums + stage * 3 * TILE;
        QueryStats stats{sums, sums + TILE, (const int*)(sums + 2 * TILE)};
        // Skips queries that see none of the warp's keys.
        if (queries + TILE - 1 < rows.first || (s.doc_start && stats.seen_from[0] > rows.last())) continue;
        rows.add(s, q_tile, q_tile + TILE * PITCH, stats, queries, column);
    }
    // Each warp reads only its own rows of k_tile, and no longer needs them.
    bf16* to = args.dqkv + column;
    rows.finish(to + (keys.k - args.qkv), to + (keys.v - args.qkv), keys.width, k_tile + owned * PITCH, s.seq_len);
}
