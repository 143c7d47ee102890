// Whole KV blocks from one cache to another or within one, and blocks filled with a byte.
//
// A cache array is [layers, N, block]: a block is `units` times 16 bytes in each layer. Block (x, y, z) of the grid is
// a part of pair x in layer y: its threads move every gridDim.z * blockDim.x -th unit.
// The pairs of a launch run in any order: none may write what another one reads or writes. A negative id: no pair.
#include "common.cuh"

// destination [layers, blocks_to, block], source [layers, blocks_from, block], pairs [P, 2] (from, to)
__global__ void __launch_bounds__(256)
    copy_blocks(void* destination, const void* source, const int* __restrict__ pairs, int blocks_to, int blocks_from,
                int units) {
    const int from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    if (from < 0 || to < 0) return;
    uint4* write = static_cast<uint4*>(destination) + ((size_t)blockIdx.y * blocks_to + to) * units;
    const uint4* read = static_cast<const uint4*>(source) + ((size_t)blockIdx.y * blocks_from + from) * units;
    for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < units; i += gridDim.z * blockDim.x) write[i] = read[i];
}

// cache [layers, blocks, block], block_ids [P]; `word`: four equal bytes
__global__ void __launch_bounds__(256)
    fill_blocks(void* __restrict__ cache, const int* __restrict__ block_ids, int blocks, int units, uint32_t word) {
    const int id = block_ids[blockIdx.x];
    if (id < 0) return;
    uint4* write = static_cast<uint4*>(cache) + ((size_t)blockIdx.y * blocks + id) * units;
    for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < units; i += gridDim.z * blockDim.x)
        write[i] = make_uint4(word, word, word, word);
}
