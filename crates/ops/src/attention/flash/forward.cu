// Tiled forward of causal attention on tensor cores, in bf16 with f32 sums (flash/common.cuh).
//
// A block owns OWNED queries of one head and loops over the keys that they see, TILE at a time. Keys and
// values are double-buffered: the next tile is copied asynchronously while the current one is multiplied.
// Grid: (tiles of queries, heads, sequences); the tiles with the most keys come first.
//
// With documents most tiles are masked, and a warp skips the halves of a tile that its queries do not see.
// Without documents few tiles are masked, and the check costs more than it saves.

template <bool DOCUMENTS> __device__ __forceinline__ void forward(const Forward& args) {
    const Shape& s = args.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* stages = q_tile + OWNED * PITCH;
    constexpr int STAGE = 2 * TILE * PITCH;
    // The tiles with the most keys are scheduled first.
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED, head = blockIdx.y, sequence = blockIdx.z;
    HeadRows head_rows(s, args.qkv, head, sequence);
    int keys = s.first_key(sequence, first) / TILE * TILE, end = min(first + OWNED, s.seq_len);
    load_tile<OWNED>(q_tile, head_rows.q, head_rows.width, first, s.seq_len);
    load_tile<TILE>(stages, head_rows.k, head_rows.width, keys, s.seq_len);
    load_tile<TILE>(stages + TILE * PITCH, head_rows.v, head_rows.width, keys, s.seq_len);
    await_copies();
    __syncthreads();
    bf16* warp_rows = q_tile + warp() * STRIPS * 16 * PITCH;
    OutputRows rows(s, sequence, first + warp() * STRIPS * 16, warp_rows);
    for (int stage = 0; keys < end; keys += TILE, stage ^= 1) {
        await_copies();
        __syncthreads();
        const bf16* k_tile = stages + stage * STAGE;
        if (keys + TILE < end) {
            bf16* next = stages + (stage ^ 1) * STAGE;
            load_tile<TILE>(next, head_rows.k, head_rows.width, keys + TILE, s.seq_len);
            load_tile<TILE>(next + TILE * PITCH, head_rows.v, head_rows.width, keys + TILE, s.seq_len);
        }
        if constexpr (DOCUMENTS) rows.add_seen(k_tile, k_tile + TILE * PITCH, keys);
        else if (rows.queries.any_sees(keys)) rows.add(k_tile, k_tile + TILE * PITCH, keys);
    }
    rows.finish(args, head, sequence, warp_rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward(Forward args) { forward<false>(args); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward_of_documents(Forward args) { forward<true>(args); }
