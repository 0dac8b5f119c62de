// a += b, elementwise.
//
// Bound by memory: reads a and b, writes a. Each thread adds one 16-byte vector (4 f32 or 8 bf16), so that a
// warp reads 512 contiguous bytes per load; the last thread adds the rest one by one. bf16 is widened to f32
// and the sum is rounded once. Grid: ceil(elements / (LANES * blockDim.x)).

struct Arguments {
    void* a;
    const void* b;
    u64 elements;
};

template <class T> __device__ __forceinline__ void add(const Arguments& args) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * LANES<T>;
    T* a = (T*)args.a + first;
    const T* b = (const T*)args.b + first;
    if (first + LANES<T> <= args.elements) {
        Vec16<T> x = *(Vec16<T>*)a, y = *(const Vec16<T>*)b;
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) x.v[i] = narrow<T>(widen(x.v[i]) + widen(y.v[i]));
        *(Vec16<T>*)a = x;
    } else {
        for (int i = 0; first + i < args.elements; i++) a[i] = narrow<T>(widen(a[i]) + widen(b[i]));
    }
}

extern "C" __global__ void add_f32(Arguments args) { add<float>(args); }
extern "C" __global__ void add_bf16(Arguments args) { add<bf16>(args); }
