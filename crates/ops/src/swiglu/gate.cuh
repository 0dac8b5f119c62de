// An element of SwiGLU and of its gradients, in f32.

// 1 / (1 + e^-x). Both instructions flush subnormal numbers to 0, which does not change the result: e^-x is
// added to 1, and the reciprocal is taken of at least 1. If e^-x overflows, the result is 0, the limit.
__device__ __forceinline__ float sigmoid(float x) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

__device__ __forceinline__ float swiglu_dgate(float dy, float gate, float up) {
    float s = sigmoid(gate);
    return dy * up * s * (1.0f + gate * (1.0f - s));
}

__device__ __forceinline__ float swiglu_dup(float dy, float gate) { return dy * (gate * sigmoid(gate)); }
