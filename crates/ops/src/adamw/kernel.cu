// AdamW in one launch over all parameters except those with a fused cast (cast.cu).
//
// Bound by memory: with f32 operands and a bf16 copy, an element reads 16 bytes and writes 14, each once.
// Parameters are cut into chunks of one size, and a block has a chunk, so that a few huge tensors and many
// tiny ones keep the GPU equally busy. Tables, which are written once, list the parameters and chunks.
// Scalars that change from step to step are read from GPU memory.
//
// With moments in bf16 an element reads 12 bytes and writes 10. Drawing the random numbers takes some 25
// operations an element, which overlap with the memory accesses.

struct Chunk {
    // The index among the parameter's chunks.
    u32 number;
    u32 parameter;
};

// Elements that a thread updates at once.
constexpr int ELEMENTS = 8;

template <bool ROUNDS> __device__ __forceinline__ u32 update_chunk(const Update& u, u64 first, u64 end) {
    u32 largest = 0;
    u64 i = first + threadIdx.x * ELEMENTS;
    for (; i + ELEMENTS <= end; i += THREADS * ELEMENTS) {
        float master[ELEMENTS];
        update<ELEMENTS, ROUNDS, false>(u, i, master);
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) update_amax<float>(largest, __float_as_uint(master[k]));
    }
    // One thread updates the elements after the last whole vector.
    for (; i < end; i++) {
        float master[1];
        update<1, ROUNDS, false>(u, i, master);
        update_amax<float>(largest, __float_as_uint(master[0]));
    }
    return largest;
}

// A block has a parameter.
extern "C" __global__ void adamw_clear(UpdateArguments args) {
    u32* amax = args.parameters[blockIdx.x].amax;
    if (amax) *amax = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) adamw(UpdateArguments args) {
    __shared__ u32 warps[THREADS / 32];
    Chunk chunk = args.chunks[blockIdx.x];
    const Parameter& p = args.parameters[chunk.parameter];
    Update u = update_of(args, chunk.parameter);
    u64 first = (u64)chunk.number * CHUNK, end = min(first + CHUNK, p.elements);
    u32 largest = u.m.is_bf16 || u.v.is_bf16 ? update_chunk<true>(u, first, end) : update_chunk<false>(u, first, end);
    if (p.amax) atomic_amax_of_block(p.amax, largest, warps);
}
