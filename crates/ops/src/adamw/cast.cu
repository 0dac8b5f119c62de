// AdamW of a matrix, with the cast of the new master to FP8 in the same pass, by areas, as quantize/kernel.cu
// casts. The result is equal to the bit to a separate cast, and the master is not read again. The rows of a
// piece are updated one after another, so that registers hold the operands of one row.

struct UpdateCastArguments {
    UpdateArguments update;
    QuantizeArguments cast;
    u64 parameter;
};

template <bool WHOLE, bool ROUNDS> __device__ __forceinline__ void update_area(const QuantizeArguments& cast, const Update& u) {
    u32 column = blockIdx.x * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = blockIdx.y * EDGE + threadIdx.x / LANES_WIDE * HEIGHT;
    Eight<float> piece[HEIGHT] = {};
#pragma unroll
    for (int k = 0; k < HEIGHT; k++) {
        if (!WHOLE && (column >= cast.cols || row + k >= cast.rows)) continue;
        float master[WIDTH];
        // A row has whole vectors, and a rank has whole rows.
        update<WIDTH, ROUNDS, true>(u, (u64)(row + k) * cast.cols + column, master);
        piece[k].pack_from(master);
    }
    cast_area<float, true, WHOLE, true>(cast, piece, blockIdx.y, blockIdx.x);
}

#define KERNEL(NAME, WHOLE)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) adamw_cast_##NAME(UpdateCastArguments args) { \
        Update u = update_of(args.update, (u32)args.parameter);                                        \
        if (u.m.is_bf16 || u.v.is_bf16) update_area<WHOLE, true>(args.cast, u);                        \
        else update_area<WHOLE, false>(args.cast, u);                                                  \
    }
KERNEL(whole, true)
KERNEL(vector, false)
