// Scales that are powers of two.

// max_finite / amax rounded down to a power of two, at most 2^127: the difference of the exponents, less one
// if amax has the larger mantissa. A subnormal amax is far beyond that limit.
__device__ __forceinline__ float power_of_two(float max_finite, u32 amax) {
    u32 most = __float_as_uint(max_finite);
    int exponent = (int)(most >> 23) - (int)(amax >> 23) - ((amax & 0x7fffffu) > (most & 0x7fffffu));
    bool has_scale = amax - 1 < 0x7f7fffffu;
    return has_scale ? __uint_as_float((u32)min(127 + exponent, 254) << 23) : 1.0f;
}

__device__ __forceinline__ float inverse_of_power(float scale) {
    u32 exponent = __float_as_uint(scale) >> 23;
    // 2^-127 is subnormal.
    return __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
}
