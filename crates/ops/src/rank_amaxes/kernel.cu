// Packs the amaxes of tensors into a row, and takes the maxima of the rows of all ranks. A column of blocks
// has a tensor, a thread an amax. Bound by launch latency.

struct TensorAmaxes {
    u32* amaxes;
    // Their place in a row.
    u32 first;
    u32 count;
};

struct Arguments {
    const TensorAmaxes* tensors;
    u32* rows;
    // Amaxes of a row.
    u32 all;
    u32 ranks;
};

extern "C" __global__ void rank_amaxes(Arguments args) {
    TensorAmaxes tensor = args.tensors[blockIdx.x];
    u32 n = blockIdx.y * blockDim.x + threadIdx.x;
    if (n < tensor.count) args.rows[tensor.first + n] = tensor.amaxes[n];
}

extern "C" __global__ void max_amaxes(Arguments args) {
    TensorAmaxes tensor = args.tensors[blockIdx.x];
    u32 n = blockIdx.y * blockDim.x + threadIdx.x;
    if (n >= tensor.count) return;
    u32 most = 0;
    // Magnitudes have the order of their bits, with NaNs above all.
    for (u64 rank = 0; rank < args.ranks; rank++) most = max(most, args.rows[rank * args.all + tensor.first + n] & 0x7fffffffu);
    tensor.amaxes[n] = most;
}
