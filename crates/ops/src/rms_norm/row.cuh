// A row of a norm that threads hold in registers from the reduction to the writing: HELD vectors of 16 bytes
// each, all loaded at once.

// Loads a thread's vectors of a row. With ADD it adds delta and stores the sum, and holds the rounded sum
// from then on. Returns the thread's sum of their squares.
template <class T, bool ADD>
__device__ __forceinline__ float squares_of_row(
    const uint4* x, const uint4* delta, uint4* sum, u32 vectors, u32 thread, u32 threads, uint4 (&held)[HELD]) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 v = thread + k * threads;
        held[k] = v < vectors ? x[v] : make_uint4(0, 0, 0, 0);
    }
    if (ADD) {
        uint4 added[HELD];
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            u32 v = thread + k * threads;
            added[k] = v < vectors ? delta[v] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            u32 v = thread + k * threads;
            float a[LANES<T>], b[LANES<T>];
            unpack<T>(held[k], a);
            unpack<T>(added[k], b);
#pragma unroll
            for (int i = 0; i < LANES<T>; i++) a[i] += b[i];
            held[k] = pack<T>(a);
            if (v < vectors) sum[v] = held[k];
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        float a[LANES<T>];
        unpack<T>(held[k], a);
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) squares += a[i] * a[i];
    }
    return squares;
}

__device__ __forceinline__ float rstd_of(float squares, u32 width, float eps) { return 1.0f / sqrtf(squares / width + eps); }
