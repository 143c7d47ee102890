#include "common.cuh"
// What happens to q, k and v between their projection and attention, in one pass: RMSNorm of each head of q and k
// (where a model has it), the rotary position embedding of both, and k and v into the slot of the paged cache that the
// token was given, rounded to what the cache holds.
//
// A warp owns one head of one token, a block 8 of them; grid (T, ceil((H + 2G) / 8)). The head's numbers lie in shared
// memory as float32, since dimension i turns with i + rotary_dim / 2, which is another lane's.
//
// qkv [T, H + 2G, D]: q is rotated in place, k and v are only read. k_cache, v_cache [N, G, 16, D] of KV: T, int8_t or
// uint8_t, which means e4m3; with the latter two k_scale, v_scale float32 [N, G, 16]: of a token and head the largest
// magnitude / 127 or / 448, NaN where a number is not finite (its codes are then 0). positions [T], slot_mapping [T]:
// block * 16 + place in it; below 0 the row is padding and stays as it is. cos_sin [P, rotary_dim]: cosines, then
// sines; null: no rotation. q_norm, k_norm [D]; null: no norm.
// Not handled: D beyond 256, odd rotary_dim, interleaved pairs.
// Source: RoPE, arXiv:2104.09864; the norms are Qwen 3's and Gemma 3's; scales per token and head, own.

constexpr int BLOCK_SIZE = 16, WARPS = 8, MAX_HEAD_DIM = 256;

template <class KV>
struct Code;
template <>
struct Code<int8_t> {
    static constexpr float LARGEST = 127.0f;
    static DEV int8_t from(float value) { return (int8_t)max(-127, min(127, __float2int_rn(value))); }
};
template <>
struct Code<uint8_t> {
    static constexpr float LARGEST = 448.0f;
    static DEV uint8_t from(float value) { return float_to_e4m3(value); }
};

// One row of D into the cache, at `place`, a count of rows; all lanes of the warp call it.
template <class KV>
DEV void store_row(KV* cache, float* scales, size_t place, const float* row, int head_dim, int lane) {
    KV* to = cache + place * head_dim;
    if constexpr (sizeof(KV) == 2) {
        for (int i = lane; i < head_dim; i += 32) to[i] = from_float<KV>(row[i]);
    } else {
        // As integers the sizes order like the floats, and NaN and infinity lie above all others.
        int bits = 0;
        for (int i = lane; i < head_dim; i += 32) bits = max(bits, __float_as_int(row[i]) & 0x7fffffff);
        bits = warp_max(bits);
        const float scale = __int_as_float(bits < 0x7f800000 ? __float_as_int(__int_as_float(bits) / Code<KV>::LARGEST)
                                                             : 0x7fffffff);
        // Nothing to divide by where all are zero, or so small that the scale is.
        const bool usable = scale > 0.0f;
        for (int i = lane; i < head_dim; i += 32) to[i] = Code<KV>::from(usable ? row[i] / scale : 0.0f);
        if (lane == 0) scales[place] = scale;
    }
}

template <class T, class KV>
__global__ void __launch_bounds__(WARPS * 32)
rope_store_kv(T* __restrict__ qkv, KV* __restrict__ k_cache, KV* __restrict__ v_cache, float* __restrict__ k_scale,
              float* __restrict__ v_scale, const int* __restrict__ positions, const int* __restrict__ slot_mapping,
              const float* __restrict__ cos_sin, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
              float eps, int num_heads, int num_kv_heads, int head_dim, int rotary_dim) {
    SHARED_ARRAY(float, rows, [WARPS][MAX_HEAD_DIM]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x;
    const int total_heads = num_heads + 2 * num_kv_heads, head = blockIdx.y * WARPS + warp;
    const int slot = slot_mapping[token];
    if (slot < 0 || head >= total_heads) return;  // whole warps: no barrier of the block follows

    const bool is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;
    T* source = qkv + ((size_t)token * total_heads + head) * head_dim;
    float* row = rows[warp];
    float squares = 0.0f;
    for (int i = lane; i < head_dim; i += 32) {
        const float value = to_float(source[i]);
        row[i] = value;
        squares += value * value;
    }
    const float* norm = is_q ? q_norm : k_norm;
    if (!is_v && norm != nullptr) {
        const float factor = 1.0f / sqrtf(warp_sum(squares) / (float)head_dim + eps);
        for (int i = lane; i < head_dim; i += 32) row[i] = row[i] * factor * norm[i];
    }
    __syncwarp();
    if (!is_v && cos_sin != nullptr) {
        const int half = rotary_dim / 2;
        const float* cosines = cos_sin + (size_t)positions[token] * rotary_dim;
        for (int i = lane; i < half; i += 32) {
            const float low = row[i], high = row[i + half], cosine = cosines[i], sine = cosines[i + half];
            row[i] = low * cosine - high * sine;
            row[i + half] = high * cosine + low * sine;
        }
        __syncwarp();
    }
    if (is_q) {
        for (int i = lane; i < head_dim; i += 32) source[i] = from_float<T>(row[i]);
        return;
    }
    const int kv_head = head - num_heads - (is_v ? num_kv_heads : 0);
    const size_t place = ((size_t)(slot / BLOCK_SIZE) * num_kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
    store_row(is_v ? v_cache : k_cache, is_v ? v_scale : k_scale, place, row, head_dim, lane);
}
