// What the backward for Hopper needs to know of documents: the starts of a tile's queries where one copy can
// fetch them, and the tiles of queries that see a tile of keys. It reads and writes 4 bytes a token, once for
// all heads.

struct DocumentArguments {
    // [B, s]: the index in its sequence of the first token of each token's document.
    const int* doc_start;
    // [B, n, QUERIES] for n tiles of queries: the same; after the end of a sequence, that of its last token.
    u32* starts;
    // [B, m] for m tiles of KEYS keys: the tile of queries after the last one that sees some of the keys. It
    // does not decrease with the tile, whatever doc_start holds: blocks count on it when they wait.
    u32* ends;
    u32 seq_len;
    u32 padding;
};

constexpr u32 THREADS = 128, RATIO = KEYS / QUERIES;

// A block for each tile of queries and sequence.
extern "C" __global__ void __launch_bounds__(THREADS) hopper_documents(const DocumentArguments args) {
    __shared__ u32 of_warps[THREADS / 32];
    u32 tile = blockIdx.x, tiles = gridDim.x, sequence = blockIdx.y, thread = threadIdx.x;
    const int* doc_start = args.doc_start + (u64)sequence * args.seq_len;
    auto first_key = [&](u32 query) { return min((u32)max(doc_start[query], 0), query); };
    if (thread < QUERIES)
        args.starts[((u64)sequence * tiles + tile) * QUERIES + thread] = first_key(min(tile * QUERIES + thread, args.seq_len - 1));
    if (tile % RATIO > 0) return;
    u32 keys = tile / RATIO, end = 0;
    for (u32 n = tile + thread; n < tiles; n += THREADS)
        if (first_key(n * QUERIES) < (keys + 1) * KEYS) end = n + 1;
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) end = max(end, __shfl_xor_sync(0xffffffffu, end, step));
    if (thread % 32 == 0) of_warps[thread / 32] = end;
    __syncthreads();
    if (thread > 0) return;
#pragma unroll
    for (u32 warp = 1; warp < THREADS / 32; warp++) end = max(end, of_warps[warp]);
    args.ends[sequence * ((args.seq_len + KEYS - 1) / KEYS) + keys] = end;
}
