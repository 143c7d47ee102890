// RMSNorm of rows, and before it the addition to the residual stream.
//
//   add [T, C] = add * post [C] / sqrt(mean(add^2) + eps), rounded to T (where `post` is given; not stored)
//   x [T, C] += add (where given, and stored);  out [T, C] = x * weight [C] / sqrt(mean(x^2) + eps)
//
// A block is a row. A thread holds up to 16 of its elements in registers, in vectors of VECTOR that lie blockDim.x
// vectors apart, so x is read once. The block's size depends on C alone, and with it the order of the sum.
// T is the type of activations, X that of x: float (the residual stream) or T.
// Not handled: C above 16 blockDim.x; `add` where x is no float.
#include "common.cuh"

constexpr int ELEMENTS = 16;                    // a thread's, at most

// What a thread holds of a row, and what the row's sum of squares gives.
template <int VECTOR>
struct Row {
    static constexpr int VECTORS = ELEMENTS / VECTOR;
    float values[VECTORS][VECTOR];

    template <class Y>
    DEV void load(const Y* from, int columns) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (threadIdx.x + i * blockDim.x) * VECTOR;
            if (column >= columns) break;
            if constexpr (VECTOR == 8)
                load8(values[i], from + column);
            else
                values[i][0] = to_float(from[column]);
        }
    }

    DEV float scale(int columns, float eps, float* scratch) const {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if ((threadIdx.x + i * blockDim.x) * VECTOR >= columns) break;
#pragma unroll
            for (int k = 0; k < VECTOR; k++) squares = fmaf(values[i][k], values[i][k], squares);
        }
        return 1.0f / sqrtf(block_sum(squares, scratch) / (float)columns + eps);
    }

    // values * scale * weight
    DEV void multiply(const float* weight, int columns, float scale) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (threadIdx.x + i * blockDim.x) * VECTOR;
            if (column >= columns) break;
            float weights[VECTOR];
            if constexpr (VECTOR == 8)
                load8(weights, weight + column);
            else
                weights[0] = weight[column];
#pragma unroll
            for (int k = 0; k < VECTOR; k++) values[i][k] = values[i][k] * scale * weights[k];
        }
    }

    template <class Y>
    DEV void store(Y* to, int columns) const {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int column = (threadIdx.x + i * blockDim.x) * VECTOR;
            if (column >= columns) break;
            if constexpr (VECTOR == 8)
                store8(to + column, values[i]);
            else
                to[column] = from_float<Y>(values[i][0]);
        }
    }
};

template <class T, class X, int VECTOR>
__global__ void __launch_bounds__(1024)
    rms_norm(T* __restrict__ out, X* __restrict__ x, const T* __restrict__ add, const float* __restrict__ post,
             const float* __restrict__ weight, int columns, float eps) {
    SHARED_ARRAY(float, scratch, [32]);
    const size_t row = (size_t)blockIdx.x * columns;
    Row<VECTOR> values;
    values.load(x + row, columns);
    if (add != nullptr) {
        Row<VECTOR> added;
        added.load(add + row, columns);
        if (post != nullptr) added.multiply(post, columns, added.scale(columns, eps, scratch));
#pragma unroll
        for (int i = 0; i < Row<VECTOR>::VECTORS; i++) {
            if ((threadIdx.x + i * blockDim.x) * VECTOR >= columns) break;
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                float own = added.values[i][k];
                if (post != nullptr) own = to_float(from_float<T>(own));
                values.values[i][k] += own;
            }
        }
        values.store(x + row, columns);
    }
    values.multiply(weight, columns, values.scale(columns, eps, scratch));
    values.store(out + row, columns);
}
