// RMSNorm of rows, and before it the addition to the residual stream.
//
//   x [T, C] += add [T, C] (where given, and stored);  out [T, C] = x * weight [C] / sqrt(mean(x^2) + eps)
//
// A block is a row. A thread holds up to 16 of its elements in registers, in vectors of VECTOR that lie blockDim.x
// vectors apart, so x is read once. The block's size depends on C alone, and with it the order of the sum.
// T is the type of activations, X that of x: float (the residual stream) or T.
// Not handled: C above 16 blockDim.x; `add` where x is no float.
#include "common.cuh"

template <class T, class X, int VECTOR>
__global__ void __launch_bounds__(1024)
    rms_norm(T* __restrict__ out, X* __restrict__ x, const T* __restrict__ add, const float* __restrict__ weight,
             int columns, float eps) {
    SHARED_ARRAY(float, scratch, [32]);
    constexpr int VECTORS = 16 / VECTOR;
    const size_t row = (size_t)blockIdx.x * columns;
    float values[VECTORS][VECTOR];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (threadIdx.x + i * blockDim.x) * VECTOR;
        if (column >= columns) break;
        if constexpr (VECTOR == 8) {
            load8(values[i], x + row + column);
            if (add != nullptr) {
                float added[8];
                load8(added, add + row + column);
#pragma unroll
                for (int k = 0; k < 8; k++) values[i][k] += added[k];
                store8(x + row + column, values[i]);
            }
        } else {
            values[i][0] = to_float(x[row + column]);
            if (add != nullptr) {
                values[i][0] += to_float(add[row + column]);
                x[row + column] = from_float<X>(values[i][0]);
            }
        }
#pragma unroll
        for (int k = 0; k < VECTOR; k++) squares = fmaf(values[i][k], values[i][k], squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)columns + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = (threadIdx.x + i * blockDim.x) * VECTOR;
        if (column >= columns) break;
        if constexpr (VECTOR == 8) {
            float weights[8];
            load8(weights, weight + column);
#pragma unroll
            for (int k = 0; k < 8; k++) weights[k] *= values[i][k] * scale;
            store8(out + row + column, weights);
        } else {
            out[row + column] = from_float<T>(values[i][0] * scale * weight[column]);
        }
    }
}
