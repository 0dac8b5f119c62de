// AdamW in one launch over all parameters but those that are cast on the way (cast.cu).
//
// Bound by memory: with f32 operands and a bf16 copy, 16 bytes are read and 14 written an element, each once. Parameters are cut into
// chunks of one size, and a block has a chunk: a few huge tensors and many tiny ones keep the GPU equally busy. What a chunk is made of
// stands in tables that were written once. The numbers that change from step to step are read from the GPU's memory.
//
// With moments in bf16 it is 12 and 10 bytes, and what is drawn to round them, some 25 operations an element, runs beside that.

struct Chunk {
    // Of the parameter's chunks.
    u32 number;
    u32 parameter;
};

constexpr int THREADS = 256, CHUNK = 16384, AT_ONCE = 8;

template <bool ROUNDS> __device__ __forceinline__ u32 update_chunk(const Update& by, u64 first, u64 end) {
    u32 largest = 0;
    u64 i = first + threadIdx.x * AT_ONCE;
    for (; i + AT_ONCE <= end; i += THREADS * AT_ONCE) {
        float master[AT_ONCE];
        update<AT_ONCE, ROUNDS>(by, i, master);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) update_amax<float>(largest, __float_as_uint(master[k]));
    }
    // One thread has what is left behind whole vectors.
    for (; i < end; i++) {
        float master[1];
        update<1, ROUNDS>(by, i, master);
        update_amax<float>(largest, __float_as_uint(master[0]));
    }
    return largest;
}

// A block a parameter.
extern "C" __global__ void adamw_clear(AdamW at) {
    u32* amax = at.parameters[blockIdx.x].amax;
    if (amax) *amax = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) adamw(AdamW at) {
    __shared__ u32 warps[THREADS / 32];
    Chunk chunk = at.chunks[blockIdx.x];
    const Parameter& p = at.parameters[chunk.parameter];
    Update by = update_of(at, chunk.parameter);
    u64 first = (u64)chunk.number * CHUNK, end = min(first + CHUNK, p.elements);
    u32 largest = by.m.is_bf16 || by.v.is_bf16 ? update_chunk<true>(by, first, end) : update_chunk<false>(by, first, end);
    if (p.amax) atomic_amax_of_block(p.amax, largest, warps);
}
