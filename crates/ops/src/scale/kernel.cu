// x *= factor, elementwise. Bound by memory: each thread multiplies one 16-byte vector (4 f32 or 8 bf16); the
// last thread multiplies the rest one by one. Grid: ceil(elements / (LANES * blockDim.x)).

struct Arguments {
    void* x;
    u64 elements;
    float factor;
};

template <class T> __device__ __forceinline__ void scale(const Arguments& args) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * LANES<T>;
    T* x = (T*)args.x + first;
    if (first + LANES<T> <= args.elements) {
        Vec16<T> y = *(Vec16<T>*)x;
#pragma unroll
        for (int i = 0; i < LANES<T>; i++) y.v[i] = narrow<T>(widen(y.v[i]) * args.factor);
        *(Vec16<T>*)x = y;
    } else {
        for (int i = 0; first + i < args.elements; i++) x[i] = narrow<T>(widen(x[i]) * args.factor);
    }
}

extern "C" __global__ void scale_f32(Arguments args) { scale<float>(args); }
extern "C" __global__ void scale_bf16(Arguments args) { scale<bf16>(args); }
