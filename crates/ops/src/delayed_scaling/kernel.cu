// The scales of casts from the amaxes of earlier steps: a block a tensor.

constexpr int THREADS = 256;

struct Tensor {
    const float* amax;
    float* history;
    float* scale;
    u32 length;
    u32 pow2;
    // The format's largest finite number, less the margin; and nothing.
    float most;
    u32 padding;
};

struct Arguments {
    const Tensor* tensors;
    u32* largest;
    u32 latest;
    u32 padding;
};

extern "C" __global__ void delayed_scaling_clear(Arguments at) { *at.largest = 0; }

extern "C" __global__ void __launch_bounds__(THREADS) delayed_scaling(Arguments at) {
    __shared__ u32 words[THREADS / 32];
    const Tensor of = at.tensors[blockIdx.x];
    u32 bits = __float_as_uint(*of.amax) & 0x7fffffffu;
    // Magnitudes are in the order of their bits, with NaNs above all.
    if (threadIdx.x == 0) atomicMax(at.largest, bits);
    if (bits == 0 || bits >= 0x7f800000u) return;
    // From the end: what moves is read before the place that it moves to is written.
    u32 most = bits;
    for (u32 end = of.length; end > 0; end -= min(end, (u32)THREADS)) {
        u32 first = end - min(end, (u32)THREADS), i = first + threadIdx.x;
        float moved = 0.0f;
        if (i < end) moved = i == 0 ? __uint_as_float(bits) : of.history[i - 1];
        __syncthreads();
        if (i < end) {
            of.history[i] = moved;
            most = max(most, __float_as_uint(moved) & 0x7fffffffu);
        }
        __syncthreads();
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) most = max(most, words[warp]);
    float scale = fminf(__fdiv_rn(of.most, __uint_as_float(at.latest ? bits : most)), __uint_as_float(0x7f7fffffu));
    *of.scale = of.pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}
