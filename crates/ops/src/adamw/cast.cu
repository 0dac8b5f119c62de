// AdamW of a matrix whose new master is cast to FP8 in the same pass, by areas, as quantize/kernel.cu casts: equal to the bit to the cast of
// the master, which is not read again. A row of a piece is updated after the other, so that registers hold the operands of one.

struct AdamWCast {
    AdamW by;
    Quantize at;
    u64 parameter;
};

template <bool WHOLE, bool ROUNDS> __device__ __forceinline__ void update_area(const Quantize& at, const Update& by) {
    u32 column = blockIdx.x * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = blockIdx.y * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<float> piece[HIGH] = {};
#pragma unroll
    for (int k = 0; k < HIGH; k++) {
        if (!WHOLE && (column >= at.cols || row + k >= at.rows)) continue;
        float master[WIDTH];
        update<WIDTH, ROUNDS>(by, (u64)(row + k) * at.cols + column, master);
        piece[k].put(master);
    }
    cast_area<float, true, WHOLE, true>(at, piece, blockIdx.y, blockIdx.x);
}

#define KERNEL(NAME, WHOLE)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) adamw_cast_##NAME(AdamWCast of) {     \
        Update by = update_of(of.by, (u32)of.parameter);                                        \
        if (by.m.is_bf16 || by.v.is_bf16) update_area<WHOLE, true>(of.at, by);                  \
        else update_area<WHOLE, false>(of.at, by);                                              \
    }
KERNEL(whole, true)
KERNEL(vector, false)
