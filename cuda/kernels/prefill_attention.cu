#include "common.cuh"
// Attention of long runs of new rows over the paged KV cache, on tensor cores: prompts and their chunks.
//
// A block takes one item of a work list: consecutive rows of one sequence and the query heads of one kv head, which are
// together at most 128 rows of the matrices (token * group + head of the group), so that a group shares its keys and
// values. Grid (G * 128 / ROWS, items): at some head sizes a block takes half of an item's rows. 4 warps own ROWS / 4
// rows each and keep their running softmax in registers; queries stay in shared memory. 32 keys at a time, then their
// values, come through a ring of asynchronous copies; there is one barrier for each. Codes are turned into T by the
// threads that copied them. A warp passes over keys that none of its rows sees, and masks only where it has to.
//
// Every row's result is the same bits whatever rows, items and chunks there are: key tiles lie at absolute positions,
// and a tile in which a row sees nothing changes nothing.
//
// out [T, H, D]; qkv [T, H + 2G, D], of which q is read; k_cache, v_cache [N, G, 16, D] of T or, where CODED, int8 or
// e4m3, then k_scale, v_scale float32 [N, G, 16]; block_table [rows, table_width]; work [items, 4]: first row, number
// of rows (0: nothing to do), position of the first row, row of block_table. sinks [H], null: none. score_scale,
// softcap: scale * log2(e) and 0; with a soft cap, 2 scale log2(e) / cap and cap * log2(e).
// A row sees keys j with position - window < j <= position.
// Not handled: D beyond HEAD_DIM or no multiple of 8; groups beyond 128. Dimensions from D to HEAD_DIM are zeros. A
// value that is not finite may reach rows of its own item that do not see it: zero times NaN.
// Source: FlashAttention-2, arXiv:2307.08691; rows of a group in one tile, ring and order of dimensions, own (see
// decode_attention.cu).

constexpr int BLOCK_SIZE = 16, WARPS = 4, ITEM_ROWS = 128, KEYS = 32, HALVES = 4;

template <bool CODED, int HEAD_DIM>
struct Layout {
    static constexpr int ROW_TILES = HEAD_DIM == 64 || HEAD_DIM == 128 ? 2 : 1;     // of 16 rows, a warp's
    static constexpr int ROWS = WARPS * ROW_TILES * 16;                             // a block's
    static constexpr int CHUNKS = HEAD_DIM / 8;                                     // of 16 bytes, in a row of T
    static constexpr int HALF_CHUNKS = KEYS * (CODED ? CHUNKS / 2 : CHUNKS); // in the ring, as cached
    static constexpr int HALF_BYTES = HALF_CHUNKS * 16 + (CODED ? 2 * KEYS * 4 : 0);    // with keys: scales of both
    static constexpr int QUERY_BYTES = ROWS * CHUNKS * 16, TILE_BYTES = KEYS * CHUNKS * 16;

    // Where chunk `c` of row `r` lies: 8 lanes that read at once hit 8 different groups of banks. Written such that all
    // but the lane's part is known when the loops are unrolled.
    static DEV int place(int r, int c, int swap) {
        return r * CHUNKS + (c & ~7) + ((c & 7) ^ (swap & (CHUNKS - 1)));
    }
    static DEV int key_chunk(int r, int c) { return place(r, c, (r & 1) << 2); }
    static DEV int value_chunk(int r, int c) { return place(r, c, r & 7); }
};

template <class T>
DEV uint4 eight_codes(uint32_t low, uint32_t high, int is_e4m3) {
    if (is_e4m3)
        return make_uint4(e4m3x2_to_pair<T>((uint16_t)low), e4m3x2_to_pair<T>((uint16_t)(low >> 16)),
                          e4m3x2_to_pair<T>((uint16_t)high), e4m3x2_to_pair<T>((uint16_t)(high >> 16)));
    uint32_t first[2], second[2];
    int8x4_to_pairs<T>(first, low);
    int8x4_to_pairs<T>(second, high);
    return make_uint4(first[0], first[1], second[0], second[1]);
}

template <class T, bool CODED, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * 32)
prefill_attention(T* __restrict__ out, const T* __restrict__ qkv, const void* __restrict__ k_cache,
                  const void* __restrict__ v_cache, const float* __restrict__ k_scale,
                  const float* __restrict__ v_scale, const int* __restrict__ block_table, const int* __restrict__ work,
                  const float* __restrict__ sinks, int num_heads, int num_kv_heads, int head_dim, int table_width,
                  int is_e4m3, int window, float score_scale, float softcap) {
    using L = Layout<CODED, HEAD_DIM>;
    constexpr bool BF16 = is_bf16<T>::value;
    constexpr int CHUNKS = L::CHUNKS, ROW_TILES = L::ROW_TILES, PARTS = ITEM_ROWS / L::ROWS;
    constexpr int CACHE_BYTES = CODED ? 1 : 2, CACHE_CHUNKS = L::HALF_CHUNKS / KEYS, CACHE_DIMS = 16 / CACHE_BYTES;
    SHARED_DYNAMIC(unsigned char, shared);
    unsigned char *queries = shared, *ring = shared + L::QUERY_BYTES, *tiles = ring + HALVES * L::HALF_BYTES;

    const int* item = work + blockIdx.y * 4;
    const int group = num_heads / num_kv_heads, kv_head = blockIdx.x / PARTS, part_row = blockIdx.x % PARTS * L::ROWS;
    const int item_row = item[0], first_position = item[2], rows = min(item[1] * group - part_row, L::ROWS);
    if (rows <= 0) return;
    const int* table = block_table + (size_t)item[3] * table_width;
    const int row_width = (num_heads + 2 * num_kv_heads) * head_dim, first_head = kv_head * group;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;

    const int last_key = first_position + (part_row + rows - 1) / group;
    const int first_key = max(0, first_position + part_row / group - window + 1), first_tile = first_key / KEYS;
    const int num_halves = 2 * (last_key / KEYS + 1 - first_tile);

    for (int i = tid; i < L::ROWS * CHUNKS; i += WARPS * 32) {
        const int r = i / CHUNKS, c = i % CHUNKS, row = part_row + r;
        const bool wanted = r < rows && c * 8 < head_dim;
        const T* head = qkv + (size_t)(item_row + row / group) * row_width + (first_head + row % group) * head_dim;
        cp_async16(queries + L::key_chunk(r, c) * 16, wanted ? head + c * 8 : qkv, wanted);
    }

    // Starts the copy of half n: of tile n / 2 the keys, then the values. Keys outside of the item become zeros.
    auto start_copy = [&](int n) {
        if (n < num_halves) {
            const bool is_value = n & 1;
            unsigned char* half = ring + n % HALVES * L::HALF_BYTES;
            const unsigned char* cache = reinterpret_cast<const unsigned char*>(is_value ? v_cache : k_cache);
            const int tile_key = (first_tile + n / 2) * KEYS;
#pragma unroll
            for (int r = tid / CACHE_CHUNKS; r < KEYS; r += WARPS * 32 / CACHE_CHUNKS) {
                const int c = tid % CACHE_CHUNKS, key = tile_key + r, dim = c * CACHE_DIMS;
                const bool wanted = key >= first_key && key <= last_key && dim < head_dim;
                const int block = table[min(key, last_key) / BLOCK_SIZE];
                const size_t row = ((size_t)block * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
                const unsigned char* from = cache + (row * head_dim + dim) * CACHE_BYTES;
                const int place = is_value ? L::value_chunk(r, c) : L::key_chunk(r, c);
                unsigned char* to = half + (CODED ? r * CACHE_CHUNKS + c : place) * 16;
                if (CODED && head_dim % 16 != 0) {  // rows at multiples of 8 bytes only
                    const uint2 none = make_uint2(0, 0), *eights = reinterpret_cast<const uint2*>(from);
                    reinterpret_cast<uint2*>(to)[0] = wanted ? eights[0] : none;
                    reinterpret_cast<uint2*>(to)[1] = wanted && dim + 8 < head_dim ? eights[1] : none;
                } else {
                    cp_async16(to, from, wanted);
                }
            }
            if (CODED && !is_value && tid < KEYS / 2) {
                const int key = tile_key + tid * 4 % KEYS, block = table[min(key, last_key) / BLOCK_SIZE];
                const size_t row = ((size_t)block * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
                cp_async16(half + L::HALF_CHUNKS * 16 + tid * 16, (tid < KEYS / 4 ? k_scale : v_scale) + row,
                           key + 3 >= first_key && key <= last_key);
            }
        }
        cp_async_commit();
    };

    const int warp_row = warp * ROW_TILES * 16;
    const int warp_first = first_position + (part_row + warp_row) / group;          // positions of the warp's rows
    const int warp_last = first_position + (part_row + min(rows, warp_row + ROW_TILES * 16) - 1) / group;

    float sum[ROW_TILES][HEAD_DIM / 8][4] = {}, largest[ROW_TILES][2], total[ROW_TILES][2] = {};
    uint32_t weight[ROW_TILES][KEYS / 16][4];   // fragments of the 32 keys' weights
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) largest[m][0] = largest[m][1] = NEG_INF;

    // Half n arrives while those before it are worked on; the first HALVES - 1 rounds only start copies.
#pragma unroll 1
    for (int n = 1 - HALVES; n < num_halves; n++) {
        cp_async_wait<HALVES - 2>();
        const unsigned char* half = ring + (unsigned)n % HALVES * L::HALF_BYTES;
        const float* scales = reinterpret_cast<const float*>(half + L::HALF_CHUNKS * 16);
        if (CODED && n >= 0) {
            unsigned char* tile = tiles + n % 2 * L::TILE_BYTES;
#pragma unroll
            for (int r = tid / CACHE_CHUNKS; r < KEYS; r += WARPS * 32 / CACHE_CHUNKS) {
                const int c = tid % CACHE_CHUNKS * 2;
                const uint4 codes = load16(half + (r * CHUNKS / 2 + c / 2) * 16);
                const int low = n % 2 ? L::value_chunk(r, c) : L::key_chunk(r, c);
                const int high = n % 2 ? L::value_chunk(r, c + 1) : L::key_chunk(r, c + 1);
                store16(tile + low * 16, eight_codes<T>(codes.x, codes.y, is_e4m3));
                store16(tile + high * 16, eight_codes<T>(codes.z, codes.w, is_e4m3));
            }
            half = tile;
        }
        __syncthreads();
        start_copy(n + HALVES - 1);
        if (n < 0) continue;
        const int tile_key = (first_tile + n / 2) * KEYS;
        if (warp_row >= rows || tile_key > warp_last || tile_key + KEYS - 1 <= warp_first - window) continue;
        if (n % 2 == 0) {
            float score[ROW_TILES][KEYS / 8][4] = {};
#pragma unroll 1
            for (int p = 0; p < CHUNKS / 4; p++) {
                uint32_t query[ROW_TILES][2][4];
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    const int r = warp_row + m * 16 + g;
                    const uint4 low = load16(queries + L::key_chunk(r, 4 * p + t) * 16);
                    const uint4 high = load16(queries + L::key_chunk(r + 8, 4 * p + t) * 16);
                    query[m][0][0] = low.x, query[m][0][1] = high.x, query[m][0][2] = low.y, query[m][0][3] = high.y;
                    query[m][1][0] = low.z, query[m][1][1] = high.z, query[m][1][2] = low.w, query[m][1][3] = high.w;
                }
#pragma unroll
                for (int k = 0; k < KEYS / 8; k++) {
                    const uint4 raw = load16(half + L::key_chunk(k * 8 + g, 4 * p + t) * 16);
                    const uint32_t low[2] = {raw.x, raw.y}, high[2] = {raw.z, raw.w};
#pragma unroll
                    for (int m = 0; m < ROW_TILES; m++) {
                        mma_16816<BF16>(score[m][k], query[m][0], low);
                        mma_16816<BF16>(score[m][k], query[m][1], high);
                    }
                }
            }

            // The softmax so far, in powers of two.
            const bool all_seen = tile_key + KEYS - 1 <= warp_first && tile_key > warp_last - window;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
                for (int k = 0; k < KEYS / 8; k++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float x = score[m][k][e];
                        if constexpr (CODED) x *= scales[k * 8 + 2 * t + e % 2];
                        x *= score_scale;
                        if (softcap > 0.0f)  // softcap * tanh
                            x = softcap - __fdividef(2.0f * softcap, exp2f(x) + 1.0f);
                        score[m][k][e] = x;
                    }
                }
                if (!all_seen) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int position = first_position + (part_row + warp_row + m * 16 + g + 8 * i) / group;
                        const int ahead = position - tile_key - 2 * t;      // of column 0, 1 is one later
#pragma unroll
                        for (int k = 0; k < KEYS / 8; k++) {
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                const int distance = ahead - k * 8 - e;
                                if (distance < 0 || distance >= window) score[m][k][2 * i + e] = NEG_INF;
                            }
                        }
                    }
                }
                float now[2] = {largest[m][0], largest[m][1]};
#pragma unroll
                for (int k = 0; k < KEYS / 8; k++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) now[e / 2] = fmaxf(now[e / 2], score[m][k][e]);
                }
                float decay[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    now[i] = fmaxf(now[i], __shfl_xor_sync(FULL_WARP, now[i], 1));
                    now[i] = fmaxf(now[i], __shfl_xor_sync(FULL_WARP, now[i], 2));
                    const float base = now[i] == NEG_INF ? 0.0f : now[i];
                    decay[i] = exp2f(largest[m][i] - base);
                    largest[m][i] = now[i];
                    total[m][i] *= decay[i];
#pragma unroll
                    for (int k = 0; k < KEYS / 8; k++) {
                        float low = exp2f(score[m][k][2 * i] - base), high = exp2f(score[m][k][2 * i + 1] - base);
                        total[m][i] += low + high;
                        if constexpr (CODED) {  // what a row does not see may have any scale
                            const float* two = scales + KEYS + k * 8 + 2 * t;
                            low = low > 0.0f ? low * two[0] : low;
                            high = high > 0.0f ? high * two[1] : high;
                        }
                        weight[m][k / 2][k % 2 * 2 + i] = pack_pair<T>(low, high);
                    }
                }
                if (__any_sync(FULL_WARP, decay[0] != 1.0f || decay[1] != 1.0f)) {
#pragma unroll
                    for (int d = 0; d < HEAD_DIM / 8; d++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) sum[m][d][e] *= decay[e / 2];
                    }
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
                for (int d = 0; d < HEAD_DIM / 16; d++) {
                    uint32_t values[4];
                    ldmatrix_x4<true>(values, half + L::value_chunk(k * 16 + lane % 16, 2 * d + lane / 16) * 16);
                    const uint32_t low[2] = {values[0], values[1]}, high[2] = {values[2], values[3]};
#pragma unroll
                    for (int m = 0; m < ROW_TILES; m++) {
                        mma_16816<BF16>(sum[m][2 * d], weight[m][k], low);
                        mma_16816<BF16>(sum[m][2 * d + 1], weight[m][k], high);
                    }
                }
            }
        }
    }
    cp_async_wait<0>();

    if (warp_row >= rows) return;  // whole warps: no barrier of the block follows
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float all = total[m][i], factor = 1.0f;
            all += __shfl_xor_sync(FULL_WARP, all, 1);
            all += __shfl_xor_sync(FULL_WARP, all, 2);
            const int r = warp_row + m * 16 + g + 8 * i, row = part_row + r;
            if (r < rows) {
                const int head = first_head + row % group;
                if (sinks != nullptr) {
                    const float sink = sinks[head] * 1.4426950408889634f, both = fmaxf(largest[m][i], sink);
                    factor = largest[m][i] == NEG_INF ? 0.0f : exp2f(largest[m][i] - both);
                    all = all * factor + exp2f(sink - both);
                }
                factor /= all;
                T* to = out + ((size_t)(item_row + row / group) * num_heads + head) * head_dim + 2 * t;
#pragma unroll
                for (int d = 0; d < HEAD_DIM / 8; d++) {
                    if (d * 8 < head_dim)
                        *reinterpret_cast<uint32_t*>(to + d * 8) =
                            pack_pair<T>(sum[m][d][2 * i] * factor, sum[m][d][2 * i + 1] * factor);
                }
            }
        }
    }
}
