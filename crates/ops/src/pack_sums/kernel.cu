// Packs the sums of a micro-step into one tensor. A column of blocks has an input, a thread a number. Bound
// by launch latency.

struct PackedSums {
    const float* sums;
    // Their place in the output.
    u32 first;
    u32 count;
};

struct Arguments {
    const PackedSums* inputs;
    float* packed;
    u32 accumulate;
};

extern "C" __global__ void pack_sums(Arguments args) {
    PackedSums input = args.inputs[blockIdx.x];
    u32 n = blockIdx.y * blockDim.x + threadIdx.x;
    if (n >= input.count) return;
    float* packed = args.packed + input.first + n;
    // The zero at the end has no input.
    float sum = input.sums ? input.sums[n] : 0.0f;
    *packed = args.accumulate ? *packed + sum : sum;
}
