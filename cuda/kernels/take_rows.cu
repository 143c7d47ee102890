// Rows of a matrix by number: out [R, C] = x[rows], zeros where a number is negative.
//
// A block is a row of `out`, a thread one unit of every blockDim.x of it. Rows are moved as they are, in units of UNIT:
// 16 bytes where the row's length allows it, else 2.
// Not handled: numbers beyond x.
#include "common.cuh"

template <class UNIT>
__global__ void __launch_bounds__(256)
    take_rows(void* __restrict__ out, const void* __restrict__ x, const int* __restrict__ rows, int units) {
    const int row = rows[blockIdx.x];
    UNIT* to = static_cast<UNIT*>(out) + (size_t)blockIdx.x * units;
    const UNIT* from = static_cast<const UNIT*>(x) + (size_t)max(row, 0) * units;
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        UNIT value = {};
        if (row >= 0) value = from[i];
        to[i] = value;
    }
}
