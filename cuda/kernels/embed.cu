// Rows of the embedding as the residual stream: out [T, C] float32 = scale * table [V, C] at token_ids [T].
//
// The table has a layout of packing.py, so that a tied head reads the same memory: dense rows of T, or codes of BITS
// with a float16 scale and offset a group. A thread gathers four elements beside each other, which the codes' order
// leaves together; grid (T, C / 4 / blockDim.x rounded up). A negative id gives a row of zeros.
// Not handled: C that is no multiple of 4; ids beyond the table.
#include "common.cuh"

template <class T>
__global__ void __launch_bounds__(256)
    embed_dense(float* __restrict__ out, const int* __restrict__ token_ids, const T* __restrict__ table, int columns,
                float scale) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (column >= columns) return;
    const int id = token_ids[blockIdx.x];
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (id >= 0) {
        const uint2 four = *reinterpret_cast<const uint2*>(table + (size_t)id * columns + column);
        const float2 low = unpack_pair<T>(four.x), high = unpack_pair<T>(four.y);
        values = make_float4(low.x * scale, low.y * scale, high.x * scale, high.y * scale);
    }
    *reinterpret_cast<float4*>(out + (size_t)blockIdx.x * columns + column) = values;
}

template <int BITS>
__global__ void __launch_bounds__(256)
    embed_codes(float* __restrict__ out, const int* __restrict__ token_ids, const uint32_t* __restrict__ codes,
                const __half* __restrict__ scales, const __half* __restrict__ offsets, int columns, int row_words,
                int scale_columns, int group_shift, float scale) {
    constexpr int INPUTS = 512 / BITS;                              // of a unit of 64 bytes
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (column >= columns) return;
    const int id = token_ids[blockIdx.x];
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (id >= 0) {
        // Which of the mma of a unit these belong to, and the thread that reads them for it.
        const bool in_turns = group_shift > 4;
        const int step = column % INPUTS / 32 * 2 + (in_turns ? column % 8 / 4 : column % 32 / 16);
        const int thread = in_turns ? column % 32 / 8 : column % 16 / 4;
        const uint32_t* unit = codes + (size_t)id * row_words + column / INPUTS * 16 + thread * 4;
        const size_t group = (size_t)id * scale_columns + (column >> group_shift);
        const float multiplier = to_float(scales[group]);
        const float offset = offsets == nullptr ? 0.0f : to_float(offsets[group]);
        int code[4];
        if constexpr (BITS == 4) {
            const uint32_t word = unit[step / 2] >> step % 2 * 8;
            code[0] = word & 15;
            code[1] = word >> 16 & 15;
            code[2] = word >> 4 & 15;
            code[3] = word >> 20 & 15;
        } else {
            const uint32_t word = unit[step];
            code[0] = word & 255;
            code[1] = word >> 16 & 255;
            code[2] = word >> 8 & 255;
            code[3] = word >> 24;
        }
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] = fmaf(multiplier, (float)(code[i] - (1 << (BITS - 1))), offset) * scale;
        values = make_float4(four[0], four[1], four[2], four[3]);
    }
    *reinterpret_cast<float4*>(out + (size_t)blockIdx.x * columns + column) = values;
}
