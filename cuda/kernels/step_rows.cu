// What a step reads, from what is kept of every slot: the tokens of its rows, and where their keys and values go.
#include "common.cuh"

// Changed entries of a table [rows, width]: changes [P, 3] (row, column, value), a thread each; row < 0: no change.
// No entry may be changed twice in a launch.
__global__ void __launch_bounds__(256)
    update_tables(int* __restrict__ table, const int* __restrict__ changes, int count, int width) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int row = changes[3 * i], column = changes[3 * i + 1];
    if (row >= 0) table[(size_t)row * width + column] = changes[3 * i + 2];
}

// token_ids [T] = tokens [slots, W] at row_slots [T] and positions [T]; slot_mapping [groups, T] = where that position
// lies: block_tables [groups, slots, M] times the block size of 16, plus the place in the block. A thread is a row of
// the step and a group; -1 in both where a row has no slot.
__global__ void __launch_bounds__(256)
    step_rows(int* __restrict__ token_ids, int* __restrict__ slot_mapping, const int* __restrict__ tokens,
              const int* __restrict__ row_slots, const int* __restrict__ positions,
              const int* __restrict__ block_tables, int num_rows, int num_slots, int tokens_width, int table_width) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, group = blockIdx.y;
    if (row >= num_rows) return;
    const int slot = row_slots[row], position = positions[row];
    int token_id = -1, place = -1;
    if (slot >= 0) {
        token_id = tokens[(size_t)slot * tokens_width + position];
        place = block_tables[((size_t)group * num_slots + slot) * table_width + position / 16] * 16 + position % 16;
    }
    if (group == 0) token_ids[row] = token_id;
    slot_mapping[(size_t)group * num_rows + row] = place;
}
