// Delayed scaling: the next FP8 scales from the amax history (delayed_scaling/mod.rs). One block per tensor
// shifts the history by one in place and takes its maximum. Bound by launch latency.

struct Tensor {
    const float* amax;
    float* history;
    float* scale;
    u32 length;
    u32 pow2;
    // The value to which the amax is scaled: the format's largest finite number times 2^-margin.
    float target;
    // 1 if a scale of 0 that no amax sets becomes 1.
    u32 in_pieces;
};

struct Arguments {
    const Tensor* tensors;
    u32* max_amax;
    // Histories and scales stay if it is not 0. Null if they always change.
    const u32* halted;
    u32 latest;
    u32 padding;
};

extern "C" __global__ void delayed_scaling_clear(Arguments args) { *args.max_amax = 0; }

extern "C" __global__ void __launch_bounds__(THREADS) delayed_scaling(Arguments args) {
    __shared__ u32 words[THREADS / 32];
    const Tensor tensor = args.tensors[blockIdx.x];
    u32 bits = __float_as_uint(*tensor.amax) & 0x7fffffffu;
    // Magnitudes have the order of their bits, with NaNs above all.
    if (threadIdx.x == 0) atomicMax(args.max_amax, bits);
    if (args.halted && *args.halted != 0) return;
    if (bits == 0 || bits >= 0x7f800000u) {
        if (threadIdx.x == 0 && tensor.in_pieces && *tensor.scale == 0.0f) *tensor.scale = 1.0f;
        return;
    }
    // Shifts from the end, THREADS elements at a time, so that each is read before it is overwritten.
    u32 max_bits = bits;
    for (u32 end = tensor.length; end > 0; end -= min(end, (u32)THREADS)) {
        u32 first = end - min(end, (u32)THREADS), i = first + threadIdx.x;
        float moved = 0.0f;
        if (i < end) moved = i == 0 ? __uint_as_float(bits) : tensor.history[i - 1];
        __syncthreads();
        if (i < end) {
            tensor.history[i] = moved;
            max_bits = max(max_bits, __float_as_uint(moved) & 0x7fffffffu);
        }
        __syncthreads();
    }
    max_bits = __reduce_max_sync(0xffffffffu, max_bits);
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = max_bits;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) max_bits = max(max_bits, words[warp]);
    float scale = fminf(__fdiv_rn(tensor.target, __uint_as_float(args.latest ? bits : max_bits)), __uint_as_float(0x7f7fffffu));
    *tensor.scale = tensor.pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}
