// The update of the biases that balance experts. Bound by latency: a warp has a layer; lane l has the experts
// l, l + 32 and so on.

// The host writes it as three words of 8 bytes.
struct Layer {
    float* bias;
    // The place of its first load among the sums.
    u64 first;
    u64 experts;
};

struct Arguments {
    const Layer* layers;
    const u32* skip;
    const float* sums;
    float rate;
};

// Loads are whole numbers, so sums are exact and no sign depends on rounding.
__device__ __forceinline__ int sign(double sum, u64 experts, float load) {
    double less = sum - (double)experts * load;
    return (less > 0.0) - (less < 0.0);
}

extern "C" __global__ void __launch_bounds__(32) balance_bias(Arguments args) {
    if (*args.skip != 0) return;
    Layer layer = args.layers[blockIdx.x];
    const float* loads = args.sums + layer.first;
    double sum = 0.0;
    for (u32 e = threadIdx.x; e < layer.experts; e += 32) sum += loads[e];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    int signs = 0;
    for (u32 e = threadIdx.x; e < layer.experts; e += 32) signs += sign(sum, layer.experts, loads[e]);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) signs += __shfl_xor_sync(~0u, signs, by);
    float mean = __fdiv_rn((float)signs, (float)layer.experts);
    for (u32 e = threadIdx.x; e < layer.experts; e += 32) {
        float step = __fmul_rn(args.rate, (float)sign(sum, layer.experts, loads[e]) - mean);
        layer.bias[e] = __fadd_rn(layer.bias[e], step);
    }
}
