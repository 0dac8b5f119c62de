// In-place inverted dropout with a counter-based mask (dropout/mod.rs).
//
// Bound by memory, with about fifty integer operations per element for Philox. Each thread handles 8
// contiguous elements. Philox yields random words in blocks of four; the position of the tensor's first
// element within its block depends on the micro-batch and is the same for all threads, so the switch on it
// does not diverge. A thread draws two blocks, or three if its elements are not aligned to blocks. Grid:
// ceil(elements / (8 * blockDim.x)).

struct Arguments {
    void* x;
    // Seed (low word, high word), step, first token.
    const u32* rng;
    u64 elements;
    u64 width;
    u32 site;
    float p;
    float scale;
};

// Applies dropout to 8 elements. The first one uses word OFFSET of `block`.
template <int OFFSET> __device__ __forceinline__ void drop(const Arguments& args, const Philox& rng, u64 block, float* x) {
    u32 words[12];
    rng.block(block, words);
    rng.block(block + 1, words + 4);
    if (OFFSET > 0) rng.block(block + 2, words + 8);
    // A dropped element becomes 0 even if it was not finite.
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) x[i] = unit(words[OFFSET + i]) >= args.p ? x[i] * args.scale : 0.0f;
}

template <class T> __device__ __forceinline__ void dropout(const Arguments& args) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * PER_THREAD;
    if (first >= args.elements) return;
    T* to = (T*)args.x + first;
    int count = (int)min((u64)PER_THREAD, args.elements - first);
    float x[PER_THREAD];
    if (count == PER_THREAD) {
        load<PER_THREAD>((const T*)to, x);
    } else {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) x[i] = i < count ? widen(to[i]) : 0.0f;
    }
    Philox rng = {args.rng[0], args.rng[1], args.rng[2], args.site};
    u64 index = args.rng[3] * args.width + first;
    switch (index % 4) {
    case 0: drop<0>(args, rng, index / 4, x); break;
    case 1: drop<1>(args, rng, index / 4, x); break;
    case 2: drop<2>(args, rng, index / 4, x); break;
    case 3: drop<3>(args, rng, index / 4, x); break;
    }
    if (count == PER_THREAD) {
        store<PER_THREAD>(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (i < count) to[i] = narrow<T>(x[i]);
    }
}

extern "C" __global__ void dropout_f32(Arguments args) { dropout<float>(args); }
extern "C" __global__ void dropout_bf16(Arguments args) { dropout<bf16>(args); }
