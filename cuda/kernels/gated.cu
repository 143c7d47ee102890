// What a gated projection leaves after a product that knows nothing of it (cuBLAS): out [M, F] = activation(gate) * up.
//
// A row of x [M, 2F] has gates and ups in turns of eight, as packing.py stores the weights' rows. A thread is one turn:
// 16 bytes of gates, 16 of ups, 16 of results. ACTIVATION: 1 silu, 2 gelu by tanh.
// Not handled: F that is no multiple of 8.
#include "common.cuh"

template <int ACTIVATION>
DEV float activate(float gate) {
    if constexpr (ACTIVATION == 1) return __fdividef(gate, 1.0f + __expf(-gate));
    const float cubic = gate + 0.044715f * gate * gate * gate;
    return 0.5f * gate * (1.0f + tanhf(0.7978845608f * cubic));
}

template <class T, int ACTIVATION>
__global__ void __launch_bounds__(256)
    gated(uint4* __restrict__ out, const uint4* __restrict__ x, long long num_turns) {
    const long long turn = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (turn >= num_turns) return;
    const uint4 gates = x[2 * turn], ups = x[2 * turn + 1];
    const uint32_t gate_pairs[4] = {gates.x, gates.y, gates.z, gates.w}, up_pairs[4] = {ups.x, ups.y, ups.z, ups.w};
    uint32_t results[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 gate = unpack_pair<T>(gate_pairs[i]), up = unpack_pair<T>(up_pairs[i]);
        results[i] = pack_pair<T>(activate<ACTIVATION>(gate.x) * up.x, activate<ACTIVATION>(gate.y) * up.y);
    }
    out[turn] = make_uint4(results[0], results[1], results[2], results[3]);
}
