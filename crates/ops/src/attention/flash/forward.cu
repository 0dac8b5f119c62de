// Causal attention on tensor cores, in bf16 with f32 sums. A block has OWNED queries of one head of a sequence (grid: tiles of queries,
// heads, sequences) and goes through the keys that they see, TILE at a time; the next keys and values are copied while these are worked on.
// Within documents most tiles are cut, and a warp goes through the halves that it sees; over whole sequences few are, and what finds
// halves costs more than they do.

template <bool DOCUMENTS> __device__ __forceinline__ void forward(const Forward& at) {
    const Shape& s = at.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* stages = q_tile + OWNED * PITCH;
    constexpr int STAGE = 2 * TILE * PITCH;
    // The longest tiles first.
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED, head = blockIdx.y, sequence = blockIdx.z;
    Columns of(s, at.qkv, head, sequence);
    int keys = s.first_key(sequence, first) / TILE * TILE, end = min(first + OWNED, s.seq_len);
    load_tile<OWNED>(q_tile, of.q, of.width, first, s.seq_len);
    load_tile<TILE>(stages, of.k, of.width, keys, s.seq_len);
    load_tile<TILE>(stages + TILE * PITCH, of.v, of.width, keys, s.seq_len);
    await_copies();
    __syncthreads();
    bf16* mine = q_tile + warp() * STRIPS * 16 * PITCH;
    Rows rows(s, sequence, first + warp() * STRIPS * 16, mine);
    for (int stage = 0; keys < end; keys += TILE, stage ^= 1) {
        await_copies();
        __syncthreads();
        const bf16* k_tile = stages + stage * STAGE;
        if (keys + TILE < end) {
            bf16* next = stages + (stage ^ 1) * STAGE;
            load_tile<TILE>(next, of.k, of.width, keys + TILE, s.seq_len);
            load_tile<TILE>(next + TILE * PITCH, of.v, of.width, keys + TILE, s.seq_len);
        }
        if constexpr (DOCUMENTS) rows.add_seen(k_tile, k_tile + TILE * PITCH, keys);
        else if (rows.queries.see_some(keys)) rows.add(k_tile, k_tile + TILE * PITCH, keys);
    }
    rows.finish(at, head, sequence, mine);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward(Forward at) { forward<false>(at); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward_of_documents(Forward at) { forward<true>(at); }
