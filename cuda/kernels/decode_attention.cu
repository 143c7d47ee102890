#include "common.cuh"
// Attention of a few new rows of a sequence over its paged KV cache, on tensor cores: decoding, and the verification of
// drafts. Memory sets the pace, so every key and value is read once for all rows and heads that want it.
//
// A block takes one item of a work list for one tile of query heads; grid (items, G * tiles of a kv head's queries), 4
// warps. An item is 1 to 8 rows of one sequence and at most 512 keys of it (a split). Its rows and the heads of the
// tile, at most 16 together, are the 16 rows of the matrix fragments. Warp w owns each block of 16 keys whose number is
// w modulo 4: it copies them by itself through a ring in shared memory (keys and values of a tile are two halves of it)
// and keeps a running softmax, so that the loop has no barrier of the block. At the end the four warps merge, and if
// the sequence has several splits, the block that arrives last merges those.
//
// Every row's result is the same bits whatever rows, items and splits of others there are: tiles and splits lie at
// absolute positions, a tile or split in which a row sees nothing changes nothing, and merges are in order of position.
//
// out [T, H, D]; qkv [T, H + 2G, D], of which q is read; k_cache, v_cache [N, G, 16, D] of KV: T, int8_t, or uint8_t,
// which means e4m3, then k_scale, v_scale float32 [N, G, 16]; block_table [rows, table_width]; work [items, 8]: first
// row, number of rows (0: nothing to do), position of the first row, row of block_table, first key, number of this
// split, number of splits, first partial of them all. partials: of each split and tile 16 rows of D sums, then of each
// row its largest score and its sum of weights; counters [splits * tiles]: 0 before and after. sinks [H], null: none.
// score_scale, softcap: scale * log2(e) and 0; with a soft cap, 2 scale log2(e) / cap and cap * log2(e).
// A row sees keys j with position - window < j <= position.
//
// A sum over a head's dimensions may run in any order that both operands share: lane t of a group of four takes
// CHUNK_DIMS consecutive ones, 16 bytes of a key, instead of the fragment's own pairs. For codes the same is done with
// the columns of the values: a lane takes 4 consecutive ones of four tokens.
// Not handled: D beyond HEAD_DIM or no multiple of 8; dimensions from D to HEAD_DIM are zeros, and cost as others do. A
// value that is not finite may reach rows of its own item that do not see it: zero times NaN.
// Source: FlashAttention-2, arXiv:2307.08691; Flash-Decoding (splits); the ring of each warp, own.

constexpr int BLOCK_SIZE = 16, WARPS = 4, ROWS = 16, SPLIT_KEYS = 512;

template <class KV, int HEAD_DIM>
struct Layout {
    static constexpr bool CODED = sizeof(KV) == 1;
    static constexpr int CHUNK_DIMS = 16 / (int)sizeof(KV);              // of 16 bytes
    static constexpr int CHUNKS = HEAD_DIM / CHUNK_DIMS;                 // in a row
    static constexpr int DATA_BYTES = BLOCK_SIZE * CHUNKS * 16;
    static constexpr int HALF_BYTES = DATA_BYTES + (CODED ? 2 * BLOCK_SIZE * 4 : 0);    // with keys: scales of both
    static constexpr int HALVES = DATA_BYTES > 4096 ? 3 : 4;             // in a warp's ring

    // Where chunk `c` of row `r` lies: 8 lanes that read at once hit 8 different groups of banks. Written such that all
    // but the lane's part is known when the loops are unrolled.
    static DEV int place(int r, int c, int swap) {
        return r * CHUNKS + (c & ~7) + ((c & 7) ^ (swap & (CHUNKS - 1)));
    }
    static DEV int key_chunk(int r, int c) { return place(r, c, (r & 1) << 2); }
    static DEV int value_chunk(int r, int c) { return place(r, c, r & 7); }
};

template <class T>
DEV void codes_to_pairs(uint32_t (&pairs)[2], uint32_t codes, const int8_t*) {
    int8x4_to_pairs<T>(pairs, codes);
}
template <class T>
DEV void codes_to_pairs(uint32_t (&pairs)[2], uint32_t codes, const uint8_t*) {
    pairs[0] = e4m3x2_to_pair<T>((uint16_t)codes);
    pairs[1] = e4m3x2_to_pair<T>((uint16_t)(codes >> 16));
}

// A row's sums divided by its weights, which the head's sink joins.
DEV float4 finished(float4 sum, float largest, float weights, const float* sinks, int head) {
    if (sinks != nullptr) {
        const float sink = sinks[head] * 1.4426950408889634f, both = fmaxf(largest, sink);
        const float factor = largest == NEG_INF ? 0.0f : exp2f(largest - both);
        sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
        weights = weights * factor + exp2f(sink - both);
    }
    return make_float4(sum.x / weights, sum.y / weights, sum.z / weights, sum.w / weights);
}

template <class T>
DEV void store4(T* to, float4 value) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(value.x, value.y), pack_pair<T>(value.z, value.w));
}

template <class T, class KV, int HEAD_DIM>
__global__ void __launch_bounds__(WARPS * 32)
decode_attention(T* __restrict__ out, const T* __restrict__ qkv, const KV* __restrict__ k_cache,
                 const KV* __restrict__ v_cache, const float* __restrict__ k_scale, const float* __restrict__ v_scale,
                 const int* __restrict__ block_table, const int* __restrict__ work, float* partials, int* counters,
                 const float* __restrict__ sinks, int num_heads, int num_kv_heads, int head_dim, int table_width,
                 int window, float score_scale, float softcap) {
    using L = Layout<KV, HEAD_DIM>;
    constexpr bool BF16 = is_bf16<T>::value, CODED = L::CODED;
    constexpr int CHUNKS = L::CHUNKS, CHUNK_DIMS = L::CHUNK_DIMS, HALVES = L::HALVES;
    SHARED_DYNAMIC(unsigned char, shared);
    SHARED_ARRAY(int, is_last, [1]);
    const int* item = work + blockIdx.x * 8;
    const int first_row = item[0], num_rows = item[1], first_position = item[2], first_key = item[4];
    if (num_rows == 0) return;
    const int* table = block_table + (size_t)item[3] * table_width;
    const int end_key = min(first_position + num_rows, (first_key / SPLIT_KEYS + 1) * SPLIT_KEYS);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = num_heads / num_kv_heads, tile_heads = min(group, ROWS), tiles = (group + ROWS - 1) / ROWS;
    const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
    const int heads = min(tile_heads, group - tile * ROWS), rows = num_rows * heads;
    const int first_head = kv_head * group + tile * ROWS, row_width = (num_heads + 2 * num_kv_heads) * head_dim;

    uint32_t q[HEAD_DIM / 16][4];
    int first_seen[2], last_seen[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = g + 8 * i, token = row / heads;
        const bool is_row = row < rows;
        const T* source =
            qkv + (size_t)(first_row + (is_row ? token : 0)) * row_width + (first_head + row % heads) * head_dim;
        last_seen[i] = min(first_position + token, end_key - 1);
        first_seen[i] = max(first_position + token - window + 1, first_key);
#pragma unroll
        for (int u = 0; u < HEAD_DIM / 32; u++) {
            const int dim = (u * 8 / CHUNK_DIMS * 4 + t) * CHUNK_DIMS + u * 8 % CHUNK_DIMS;
            const uint4 eight = is_row && dim < head_dim ? load16(source + dim) : make_uint4(0, 0, 0, 0);
            q[2 * u][i] = eight.x, q[2 * u][i + 2] = eight.y;
            q[2 * u + 1][i] = eight.z, q[2 * u + 1][i + 2] = eight.w;
        }
    }

    unsigned char* ring = shared + warp * (HALVES * L::HALF_BYTES);
    const int first_block = first_key / BLOCK_SIZE + ((warp - first_key / BLOCK_SIZE) & (WARPS - 1));
    const int num_tiles = max(0, ((end_key + BLOCK_SIZE - 1) / BLOCK_SIZE - first_block + WARPS - 1) / WARPS);

    // Starts the copy of half n: of tile n / 2 the keys, then the values. Keys outside of the item become zeros.
    auto start_copy = [&](int n) {
        if (n < 2 * num_tiles) {
            const bool is_value = n & 1;
            unsigned char* half = ring + n % HALVES * L::HALF_BYTES;
            const int block = first_block + n / 2 * WARPS, block_key = block * BLOCK_SIZE;
            const size_t source_row = ((size_t)table[block] * num_kv_heads + kv_head) * BLOCK_SIZE;
            const KV* source = (is_value ? v_cache : k_cache) + source_row * head_dim;
#pragma unroll
            for (int r = lane / CHUNKS; r < BLOCK_SIZE; r += 32 / CHUNKS) {
                const int c = lane % CHUNKS, key = block_key + r, dim = c * CHUNK_DIMS;
                const bool wanted = key >= first_key && key < end_key && dim < head_dim;
                unsigned char* to = half + (is_value ? L::value_chunk(r, c) : L::key_chunk(r, c)) * 16;
                const KV* from = source + r * head_dim + dim;
                if (CODED && head_dim % 16 != 0) {  // rows at multiples of 8 bytes only
                    const uint2 none = make_uint2(0, 0), *eights = reinterpret_cast<const uint2*>(from);
                    reinterpret_cast<uint2*>(to)[0] = wanted ? eights[0] : none;
                    reinterpret_cast<uint2*>(to)[1] = wanted && dim + 8 < head_dim ? eights[1] : none;
                } else {
                    cp_async16(to, from, wanted);
                }
            }
            if (CODED && !is_value && lane < BLOCK_SIZE / 2) {
                const int r = lane * 4 % BLOCK_SIZE, key = block_key + r;
                cp_async16(half + L::DATA_BYTES + lane * 16, (lane < 4 ? k_scale : v_scale) + source_row + r,
                           key + 3 >= first_key && key < end_key);
            }
        }
        cp_async_commit();
    };

    // Half n arrives while those before it are worked on; the first HALVES - 1 rounds only start copies.
    float sum[HEAD_DIM / 8][4] = {}, largest[2] = {NEG_INF, NEG_INF}, total[2] = {0.0f, 0.0f};
    uint32_t weight[4];  // the fragment of the tile's weights
#pragma unroll 1
    for (int n = 1 - HALVES; n < 2 * num_tiles; n++) {
        cp_async_wait<HALVES - 2>();
        __syncwarp();
        start_copy(n + HALVES - 1);
        if (n < 0) continue;
        const unsigned char* half = ring + n % HALVES * L::HALF_BYTES;
        const float* scales = reinterpret_cast<const float*>(half + L::DATA_BYTES);
        if (n % 2 == 0) {
            // Scores of 16 rows and two times 8 keys.
            float score[2][4] = {};
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int p = 0; p < CHUNKS / 4; p++) {
                    const uint4 raw = load16(half + L::key_chunk(m * 8 + g, 4 * p + t) * 16);
                    if constexpr (CODED) {
                        const uint32_t codes[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            uint32_t key[2];
                            codes_to_pairs<T>(key, codes[k], (const KV*)nullptr);
                            mma_16816<BF16>(score[m], q[4 * p + k], key);
                        }
                    } else {
                        const uint32_t low[2] = {raw.x, raw.y}, high[2] = {raw.z, raw.w};
                        mma_16816<BF16>(score[m], q[2 * p], low);
                        mma_16816<BF16>(score[m], q[2 * p + 1], high);
                    }
                }
            }

            // The softmax so far, in powers of two.
            const int tile_key = (first_block + n / 2 * WARPS) * BLOCK_SIZE;
            float now[2] = {largest[0], largest[1]};
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = m * 8 + 2 * t + e % 2, key = tile_key + column;
                    float x = score[m][e];
                    if constexpr (CODED) x *= scales[column];
                    x *= score_scale;
                    if (softcap > 0.0f) x = softcap - __fdividef(2.0f * softcap, exp2f(x) + 1.0f);  // softcap * tanh
                    score[m][e] = key >= first_seen[e / 2] && key <= last_seen[e / 2] ? x : NEG_INF;
                    now[e / 2] = fmaxf(now[e / 2], score[m][e]);
                }
            }
            float decay[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                now[i] = fmaxf(now[i], __shfl_xor_sync(FULL_WARP, now[i], 1));
                now[i] = fmaxf(now[i], __shfl_xor_sync(FULL_WARP, now[i], 2));
                const float base = now[i] == NEG_INF ? 0.0f : now[i];
                decay[i] = exp2f(largest[i] - base);
                largest[i] = now[i];
                total[i] *= decay[i];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    float low = exp2f(score[m][2 * i] - base), high = exp2f(score[m][2 * i + 1] - base);
                    total[i] += low + high;
                    if constexpr (CODED) {  // what a row does not see may have any scale
                        low = low > 0.0f ? low * scales[BLOCK_SIZE + m * 8 + 2 * t] : low;
                        high = high > 0.0f ? high * scales[BLOCK_SIZE + m * 8 + 2 * t + 1] : high;
                    }
                    weight[2 * m + i] = pack_pair<T>(low, high);
                }
            }
            if (__any_sync(FULL_WARP, decay[0] != 1.0f || decay[1] != 1.0f)) {
#pragma unroll
                for (int m = 0; m < HEAD_DIM / 8; m++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[m][e] *= decay[e / 2];
                }
            }
        } else {
            if constexpr (CODED) {
#pragma unroll
                for (int m = 0; m < HEAD_DIM / 32; m++) {
                    uint32_t rows_of[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int r = 2 * t + i % 2 + i / 2 * 8;
                        const unsigned char* chunk = half + L::value_chunk(r, 2 * m + g / 4) * 16;
                        rows_of[i] = reinterpret_cast<const uint32_t*>(chunk)[g % 4];
                    }
                    uint32_t upper[4], lower[4];  // of each of 4 columns tokens 2t and 2t + 1, and those 8 later
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        uint32_t two[2];
                        const unsigned interleave = i == 0 ? 0x5140 : 0x7362;
                        codes_to_pairs<T>(two, __byte_perm(rows_of[0], rows_of[1], interleave), (const KV*)nullptr);
                        upper[2 * i] = two[0], upper[2 * i + 1] = two[1];
                        codes_to_pairs<T>(two, __byte_perm(rows_of[2], rows_of[3], interleave), (const KV*)nullptr);
                        lower[2 * i] = two[0], lower[2 * i + 1] = two[1];
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint32_t value[2] = {upper[i], lower[i]};
                        mma_16816<BF16>(sum[4 * m + i], weight, value);
                    }
                }
            } else {
#pragma unroll
                for (int m = 0; m < HEAD_DIM / 16; m++) {
                    uint32_t values[4];
                    ldmatrix_x4<true>(values, half + L::value_chunk(lane % 16, 2 * m + lane / 16) * 16);
                    const uint32_t low[2] = {values[0], values[1]}, high[2] = {values[2], values[3]};
                    mma_16816<BF16>(sum[2 * m], weight, low);
                    mma_16816<BF16>(sum[2 * m + 1], weight, high);
                }
            }
        }
    }

    // The warps merge, in shared memory that was the ring.
    cp_async_wait<0>();
    __syncthreads();
    float* warp_sums = reinterpret_cast<float*>(shared);                    // [WARPS][ROWS][HEAD_DIM]
    float* warp_softmax = warp_sums + WARPS * ROWS * HEAD_DIM;              // [WARPS][ROWS]: largest score, weights
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(FULL_WARP, total[i], 1);
        total[i] += __shfl_xor_sync(FULL_WARP, total[i], 2);
        const int row = warp * ROWS + g + 8 * i;
        if (g + 8 * i < rows) {
            if (t == 0) reinterpret_cast<float2*>(warp_softmax)[row] = make_float2(largest[i], total[i]);
            float* to = warp_sums + row * HEAD_DIM;
            if constexpr (CODED) {
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 32; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        *reinterpret_cast<float4*>(to + n * 32 + t * 8 + e * 4) =
                            make_float4(sum[4 * n][2 * i + e], sum[4 * n + 1][2 * i + e], sum[4 * n + 2][2 * i + e],
                                        sum[4 * n + 3][2 * i + e]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++)
                    *reinterpret_cast<float2*>(to + n * 8 + t * 2) = make_float2(sum[n][2 * i], sum[n][2 * i + 1]);
            }
        }
    }
    __syncthreads();
    const int num_splits = item[6], slot = item[7], quarters = head_dim / 4, partial_size = ROWS * (head_dim + 2);
    float* own = partials + ((size_t)(slot + item[5]) * gridDim.y + blockIdx.y) * partial_size;
    for (int i = threadIdx.x; i < rows * quarters; i += WARPS * 32) {
        const int row = i / quarters, dim = i % quarters * 4;
        float2 softmax[WARPS];
        float all = NEG_INF, total = 0.0f;
        float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            softmax[w] = reinterpret_cast<const float2*>(warp_softmax)[w * ROWS + row];
            all = fmaxf(all, softmax[w].x);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = softmax[w].x == NEG_INF ? 0.0f : exp2f(softmax[w].x - all);
            const float4 part = *reinterpret_cast<const float4*>(warp_sums + (w * ROWS + row) * HEAD_DIM + dim);
            total += factor * softmax[w].y;
            result.x += factor * part.x, result.y += factor * part.y;
            result.z += factor * part.z, result.w += factor * part.w;
        }
        if (num_splits == 1) {
            const int head = first_head + row % heads;
            store4(out + ((size_t)(first_row + row / heads) * num_heads + head) * head_dim + dim,
                   finished(result, all, total, sinks, head));
        } else {
            *reinterpret_cast<float4*>(own + row * head_dim + dim) = result;
            if (dim == 0) reinterpret_cast<float2*>(own + ROWS * head_dim)[row] = make_float2(all, total);
        }
    }
    if (num_splits == 1) return;

    // The last block to come finds all splits' partials. It merges them in their order, whichever block it is.
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = counters + (size_t)slot * gridDim.y + blockIdx.y;
        __threadfence();
        is_last[0] = atomicAdd(counter, 1) == num_splits - 1;
        __threadfence();
        if (is_last[0]) atomicExch(counter, 0);
    }
    __syncthreads();
    if (!is_last[0]) return;
    const size_t stride = (size_t)gridDim.y * partial_size;
    const float* first = partials + ((size_t)slot * gridDim.y + blockIdx.y) * partial_size;
    for (int i = threadIdx.x; i < rows * quarters; i += WARPS * 32) {
        const int row = i / quarters, dim = i % quarters * 4, head = first_head + row % heads;
        const float* softmaxes = first + ROWS * head_dim + row * 2;
        float all = NEG_INF, total = 0.0f;
        float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int s = 0; s < num_splits; s++) all = fmaxf(all, softmaxes[s * stride]);
        for (int s = 0; s < num_splits; s++) {
            const float2 softmax = *reinterpret_cast<const float2*>(softmaxes + s * stride);
            const float factor = softmax.x == NEG_INF ? 0.0f : exp2f(softmax.x - all);
            const float4 part = *reinterpret_cast<const float4*>(first + s * stride + row * head_dim + dim);
            total += factor * softmax.y;
            result.x += factor * part.x, result.y += factor * part.y;
            result.z += factor * part.z, result.w += factor * part.w;
        }
        store4(out + ((size_t)(first_row + row / heads) * num_heads + head) * head_dim + dim,
               finished(result, all, total, sinks, head));
    }
}
