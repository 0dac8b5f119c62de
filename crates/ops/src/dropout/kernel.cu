// In-place inverted dropout with a counter-based mask (dropout/mod.rs).
//
// Bound by memory, with about fifty integer operations per element for Philox. Each thread handles 8
// contiguous elements. Philox yields random words in blocks of four; the position of the tensor's first element within
// its block depends on the micro-batch and is the same for all threads, so the switch on it does not diverge.
// A thread draws two blocks, or three if its elements are not aligned to blocks. Grid: ceil(elements / (8 *
// blockDim.x)).

struct Dropout {
    void* x;
    // Seed (low word, high word), step, first token.
    const u32* rng;
    u64 elements;
    u64 width;
    u32 site;
    float p;
    float scale;
};

constexpr int AT_ONCE = 8;

// Applies dropout to 8 elements. The first one uses word OFFSET of `block`.
template <int OFFSET> __device__ __forceinline__ void drop(const Dropout& at, const Philox& rng, u64 block, float* x) {
    u32 words[12];
    rng.block(block, words);
    rng.block(block + 1, words + 4);
    if (OFFSET > 0) rng.block(block + 2, words + 8);
    // A dropped element becomes 0 even if it was not finite.
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) x[i] = unit(words[OFFSET + i]) >= at.p ? x[i] * at.scale : 0.0f;
}

template <class T> __device__ __forceinline__ void dropout(const Dropout& at) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * AT_ONCE;
    if (first >= at.elements) return;
    T* to = (T*)at.x + first;
    int count = (int)min((u64)AT_ONCE, at.elements - first);
    float x[AT_ONCE];
    if (count == AT_ONCE) {
        load<AT_ONCE>((const T*)to, x);
    } else {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) x[i] = i < count ? widen(to[i]) : 0.0f;
    }
    Philox rng = {at.rng[0], at.rng[1], at.rng[2], at.site};
    u64 index = at.rng[3] * at.width + first;
    switch (index % 4) {
    case 0: drop<0>(at, rng, index / 4, x); break;
    case 1: drop<1>(at, rng, index / 4, x); break;
    case 2: drop<2>(at, rng, index / 4, x); break;
    case 3: drop<3>(at, rng, index / 4, x); break;
    }
    if (count == AT_ONCE) {
        store<AT_ONCE>(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (i < count) to[i] = narrow<T>(x[i]);
    }
}

extern "C" __global__ void dropout_f32(Dropout at) { dropout<float>(at); }
extern "C" __global__ void dropout_bf16(Dropout at) { dropout<bf16>(at); }
