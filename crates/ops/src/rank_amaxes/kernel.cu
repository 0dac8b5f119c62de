// Packs the amaxes of tensors into a row, and takes the maxima of the rows of all ranks. A thread has a
// tensor. Bound by launch latency.

struct Arguments {
    u32* const* amaxes;
    u32* rows;
    u32 tensors;
    u32 ranks;
};

extern "C" __global__ void rank_amaxes(Arguments args) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n < args.tensors) args.rows[n] = *args.amaxes[n];
}

extern "C" __global__ void max_amaxes(Arguments args) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= args.tensors) return;
    u32 most = 0;
    // Magnitudes have the order of their bits, with NaNs above all.
    for (u64 rank = 0; rank < args.ranks; rank++) most = max(most, args.rows[rank * args.tensors + n] & 0x7fffffffu);
    *args.amaxes[n] = most;
}
