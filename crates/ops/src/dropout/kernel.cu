// Dropout in place: bound by memory, with some fifty operations an element beside it. A thread has eight neighbours. Four numbers of the
// stream are drawn together; where the tensor's first element stands among its four depends on the batch, and is the same for all threads.

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

constexpr int AT_ONCE = 8;

// Drops from eight numbers, of which the first is the OFFSET-th of four.
template <int OFFSET> __device__ __forceinline__ void drop(const Arguments& at, const Philox& rng, u64 block, float* x) {
    u32 words[12];
    rng.block(block, words);
    rng.block(block + 1, words + 4);
    if (OFFSET > 0) rng.block(block + 2, words + 8);
    // What is dropped is 0 even if it was not finite.
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) x[i] = unit(words[OFFSET + i]) >= at.p ? x[i] * at.scale : 0.0f;
}

template <class T> __device__ __forceinline__ void dropout(const Arguments& at) {
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

extern "C" __global__ void dropout_f32(Arguments at) { dropout<float>(at); }
extern "C" __global__ void dropout_bf16(Arguments at) { dropout<bf16>(at); }
