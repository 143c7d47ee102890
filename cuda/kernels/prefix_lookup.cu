// Which blocks of the KV cache hold the beginning of whose prompt: a hash table of the pool's keys on the device.
//
// table [capacity] holds block ids; a block stands at the home of its key or, where that is taken, at the next place
// that is free (linear probing). What is known of a block lies in blocks [N, 24]: its key (4 words), the key of the
// block before it (4) and its token ids (16). At least half of the table is EMPTY, places of REMOVED blocks counted as
// taken; the host has the table built anew where there would be less.
//
// Equal keys are not enough for a hit: the key before it and all ids must be equal too. So blocks whose keys collide
// lie in the table beside each other, and each is found by its own ids.
//
// Where a block stands depends on which thread came first. What is found does not: a probe looks at all places up to
// the first EMPTY one and takes the lowest id of those that are equal.
//
// Homes depend on a secret: who knows the keys' function (SHA-256) still cannot make prompts that crowd one place.
// Rejected: storing keys in the table (removal must then look for them); shifting entries back at removal (one thread
// only, or a lock).
#include "common.cuh"

constexpr int EMPTY = -1;
constexpr int REMOVED = -2;
constexpr int VECTORS = 6;                      // of 16 bytes, of what is known of a block: key, key before it, ids
constexpr int QUERY_VECTORS = 5;                // key, ids

DEV bool is_same(uint4 a, uint4 b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

DEV uint32_t home(uint4 key, uint64_t secret, uint32_t mask) {
    uint64_t mixed = ((uint64_t)key.x << 32 | key.y) ^ secret;
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 29 ^ ((uint64_t)key.z << 32 | key.w)) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(mixed >> 32) & mask;
}

// Its place.
DEV int insert(int* table, int block_id, uint32_t place, uint32_t mask) {
    while (true) {
        int taken = atomicCAS(&table[place], EMPTY, block_id);
        if (taken == REMOVED) taken = atomicCAS(&table[place], REMOVED, block_id) == REMOVED ? EMPTY : 0;
        if (taken == EMPTY) return (int)place;
        place = (place + 1) & mask;
    }
}

__global__ void __launch_bounds__(256) clear_table(int* __restrict__ table, int capacity) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < capacity; i += gridDim.x * blockDim.x) table[i] = EMPTY;
}

// Into a clear table, all blocks that have a place (places [N], below 0: none). A thread is a block.
__global__ void __launch_bounds__(256)
    insert_all(int* table, int* __restrict__ places, const uint4* __restrict__ blocks, int num_blocks, uint32_t mask,
               uint64_t secret) {
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    if (id < num_blocks && places[id] >= 0)
        places[id] = insert(table, id, home(blocks[(size_t)id * VECTORS], secret, mask), mask);
}

// changes [count, 1 + VECTORS]: block id and whether it can be found from now on, then what is known of it. A thread is
// a change; no block has two in a launch.
__global__ void __launch_bounds__(256)
    apply_changes(int* table, int* __restrict__ places, uint4* __restrict__ blocks, const uint4* __restrict__ changes,
                  int count, uint32_t mask, uint64_t secret) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint4* change = changes + (size_t)i * (1 + VECTORS);
    const int id = (int)change[0].x;
    const bool is_findable = change[0].y != 0;
    const int old = places[id];
    if (old >= 0) atomicExch(&table[old], REMOVED);
    if (is_findable)
        for (int k = 0; k < VECTORS; k++) blocks[(size_t)id * VECTORS + k] = change[1 + k];
    places[id] = is_findable ? insert(table, id, home(change[1], secret, mask), mask) : EMPTY;
}

DEV int probe(const int* table, const uint4* blocks, const uint4* query, uint4 before, uint32_t mask, uint64_t secret) {
    const uint4 key = query[0];
    int found = EMPTY;
    for (uint32_t place = home(key, secret, mask);; place = (place + 1) & mask) {
        const int id = table[place];
        if (id == EMPTY) return found;
        if (id == REMOVED || (found != EMPTY && found < id)) continue;
        const uint4* block = blocks + (size_t)id * VECTORS;
        bool is_equal = is_same(block[0], key) && is_same(block[1], before);
        for (int k = 1; is_equal && k < QUERY_VECTORS; k++) is_equal = is_same(block[1 + k], query[k]);
        if (is_equal) found = id;
    }
}

// A block of threads is a request r. Its queries [P, QUERY_VECTORS] are those from starts[r] to starts[r + 1], one for
// each full block of its prompt in order; before the first stands roots[r]. hits [R]: how many of them are found up to
// the first that is not; found [P]: the ids of these, EMPTY for the others.
__global__ void __launch_bounds__(256)
    look_up(int* __restrict__ hits, int* __restrict__ found, const int* __restrict__ table,
            const uint4* __restrict__ blocks, const int* __restrict__ starts, const uint4* __restrict__ roots,
            const uint4* __restrict__ queries, uint32_t mask, uint64_t secret) {
    SHARED_ARRAY(int, first_miss, [1]);
    const int start = starts[blockIdx.x], count = starts[blockIdx.x + 1] - start;
    if (threadIdx.x == 0) *first_miss = count;
    __syncthreads();
    for (int first = 0; first < count; first += blockDim.x) {
        const int i = first + threadIdx.x;
        int id = EMPTY;
        if (i < count && *first_miss == count) {    // no miss before this part
            const uint4* query = queries + (size_t)(start + i) * QUERY_VECTORS;
            id = probe(table, blocks, query, i > 0 ? query[-QUERY_VECTORS] : roots[blockIdx.x], mask, secret);
        }
        __syncthreads();
        if (i < count && id == EMPTY) atomicMin(first_miss, i);
        __syncthreads();
        if (i < count) found[start + i] = i < *first_miss ? id : EMPTY;
    }
    if (threadIdx.x == 0) hits[blockIdx.x] = *first_miss;
}
