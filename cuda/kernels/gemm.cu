// Matrix products with weights in every format that cuda/kernels/packing.py makes:
//
//   out [M, columns] = act(x [M, K] w [N, K]^T * scale_unit + bias [N]), at the columns from `first` on
//
// Both kernels let the weights be the 16x16 A operand of mma.m16n8k16 and the tokens its 8 columns, so that little is
// wasted on a few tokens, and both form each sum by the same steps in the same order: a row of `out` has the same bits
// from either, whatever M is. The order of a sum:
//   K is cut into units, 64 bytes of a row of weights (32 inputs of 16 bits, 64 of 8, 128 of 4), and the units into
//   four quarters, at units * q / 4. A quarter is summed unit by unit; then ((q0 + q1) + q2) + q3.
//   Dense: a unit is two mma onto the sum.
//   Codes: every SPAN inputs, SPAN / 16 mma form the product of tokens and centred codes, exact in T, from zero; then
//   sum = fma(scale, product, sum) and, with OFFSETS, sum = fma(offset, sum of the token over the span, sum). The
//   latter comes from mma with ones.
// Lane 4g + t of a warp holds rows g and g + 8 of a tile of weights and reads 16 bytes of each at a time: packing.py
// says which inputs lie in them. Inputs beyond K are zeros.
//
// skinny_gemm  is for few tokens: a block computes 16 or 32 rows (ROW_TILES) for 8 to 32 tokens (TOKEN_TILES); its
//              four warps are the quarters. Each lane copies its own weights into a ring of its own, some kilobytes
//              ahead for a warp; nothing but scales is handed from lane to lane. grid (tokens, rows).
// tile_gemm    is for many: a block of eight warps computes 128 rows for 64 tokens, all quarters one after the other,
//              from stages in shared memory; a warp computes 32 x 32. grid (tokens, rows).
//
// T is the type of activations and dense weights; BITS of a weight: 16 (dense, of T), 8 or 4; SPAN: 32, or 16 for codes
// in groups of 16. x, weight: 16-byte aligned, K a multiple of 8 (dense) or of the group. scales, offsets: [N, chunks
// of 8 groups], null where there are none. bias may be null. Results go to out or, as float32, to logits; the other is
// null. softcap, where it is not 0, is for logits. activation: 0 none, 1 silu, 2 gelu by tanh; with 1 and 2, rows 0-7
// of each 16 are the gates of rows 8-15, and there are half as many columns.
// Not handled: K above 2^24, N above 2^19, more than one format in a launch.
//
// Source: codes in the mantissa of a power of two: Kim et al. 2022, "Who says elephants can't run".
#include "common.cuh"

template <int BITS>
struct Unit {
    static constexpr int INPUTS = 512 / BITS;
    static constexpr int PARTS = INPUTS / 32;   // of 32 inputs: two mma
};

// The four codes that a word holds for an mma, less their centre, as two pairs of T. Four bits: the low byte of either
// half is of one mma, the high one of the next, which wants the word shifted by 8.
template <class T, int BITS>
DEV void centred(uint32_t (&pairs)[2], uint32_t word) {
    if constexpr (BITS == 4) {
        // A code in the low mantissa bits of 128 (bfloat16) or 1024 (half).
        constexpr uint32_t BASE = is_bf16<T>::value ? 0x43004300u : 0x64006400u;
        constexpr uint32_t CENTRE = is_bf16<T>::value ? 0x43084308u : 0x64086408u;
#pragma unroll
        for (int i = 0; i < 2; i++)
            pairs[i] = subtract_pairs<T>(and_or(word >> 4 * i, 0x000f000fu, BASE), CENTRE);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t codes = word >> 8 * i;
            if constexpr (is_bf16<T>::value)
                // Seven bits go into the mantissa of 128; the eighth decides whether 128 or 256 is subtracted.
                pairs[i] = subtract_pairs<T>(and_or(codes, 0x007f007fu, 0x43004300u),
                                             and_xor(codes, 0x00800080u, 0x43804380u));
            else
                pairs[i] = subtract_pairs<T>(and_or(codes, 0x00ff00ffu, 0x64006400u), 0x64806480u);
        }
    }
}

// product = one or two mma, the first of them onto zeros; a token's words from mma `step` of a part on.
template <bool BF16, int STEPS>
DEV void multiply(float (&product)[4], const uint32_t (&first)[4], const uint32_t (&second)[4],
                  const uint32_t (&token)[4], int step) {
    const uint32_t b[2] = {token[2 * step], token[2 * step + 1]};
    mma_16816_from_zero<BF16>(product, first, b);
    if constexpr (STEPS == 2) {
        const uint32_t next[2] = {token[2], token[3]};
        mma_16816<BF16>(product, second, next);
    }
}

// Adds the products of 32 inputs of a unit, from `k` on, to the sums of a warp's tiles.
// weights: the words with these inputs, of rows g and g + 8 of each row tile: four of a dense row, two of 8-bit codes,
// one of 4-bit codes. tokens: what the lane needs of each token tile, two words for either mma.
// scales: from row g of the first tile on, 16 bytes a row; the offsets are `rows` rows behind them.
template <class T, int BITS, int SPAN, bool OFFSETS, int ROW_TILES, int TOKEN_TILES>
DEV void accumulate(float (&sums)[ROW_TILES][TOKEN_TILES][4], const uint32_t (&weights)[ROW_TILES][2][4],
                    const uint32_t (&tokens)[TOKEN_TILES][4], const char* scales, int rows, int k, int group_shift) {
    constexpr bool BF16 = is_bf16<T>::value;
    if constexpr (BITS == 16) {
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const uint32_t a[4] = {weights[r][0][2 * step], weights[r][1][2 * step], weights[r][0][2 * step + 1],
                                       weights[r][1][2 * step + 1]};
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; m++) {
                    const uint32_t b[2] = {tokens[m][2 * step], tokens[m][2 * step + 1]};
                    mma_16816<BF16>(sums[r][m], a, b);
                }
            }
    } else {
        constexpr int STEPS = SPAN / 16;
#pragma unroll
        for (int span = 0; span < 32 / SPAN; span++) {
            // Twice the group's number in its chunk: a place in bytes.
            const int group_bytes = (k + span * SPAN) >> (group_shift - 1) & 14;
            const __half* group_scales = reinterpret_cast<const __half*>(scales + group_bytes);
            uint32_t a[ROW_TILES][STEPS][4];
            float scale[ROW_TILES][2], offset[ROW_TILES][2];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int s = 0; s < STEPS; s++) {
                        const int step = span * STEPS + s;
                        uint32_t pairs[2];
                        if constexpr (BITS == 4)
                            centred<T, 4>(pairs, weights[r][half][0] >> 8 * step);
                        else
                            centred<T, 8>(pairs, weights[r][half][step]);
                        a[r][s][half] = pairs[0];
                        a[r][s][2 + half] = pairs[1];
                    }
                    const int row = r * 16 + half * 8;
                    scale[r][half] = to_float(group_scales[row * 8]);
                    if constexpr (OFFSETS) offset[r][half] = to_float(group_scales[(rows + row) * 8]);
                }
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; m++) {
                float token_sums[4];
                if constexpr (OFFSETS) {
                    constexpr uint32_t ONE = BF16 ? 0x3f803f80u : 0x3c003c00u;
                    const uint32_t ones[4] = {ONE, ONE, ONE, ONE};
                    multiply<BF16, STEPS>(token_sums, ones, ones, tokens[m], span * STEPS);
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    float product[4];
                    multiply<BF16, STEPS>(product, a[r][0], a[r][STEPS - 1], tokens[m], span * STEPS);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& sum = sums[r][m][i];
                        sum = fmaf(scale[r][i / 2], product[i], sum);
                        if constexpr (OFFSETS) sum = fmaf(offset[r][i / 2], token_sums[i % 2], sum);
                    }
                }
            }
        }
    }
}

DEV float activate(float gate, int activation) {
    if (activation == 1) return gate / (1.0f + expf(-gate));
    const float cubic = gate * fmaf(0.044715f * gate, gate, 1.0f);
    return 0.5f * gate * (1.0f + tanhf(0.7978845608f * cubic));
}

// What becomes of the sums of rows `row` and row + 8 of a 16-row tile for a token.
template <class T>
DEV void finish(T* out, float* logits, float upper, float lower, const float* bias, int token, int row, int N,
                float scale_unit, int first, int columns, int activation, float softcap) {
    if (row >= N) return;
    const bool both = row + 8 < N;              // else there is no lower one
    upper = upper * scale_unit + (bias == nullptr ? 0.0f : bias[first + row]);
    lower = lower * scale_unit + (bias == nullptr || !both ? 0.0f : bias[first + row + 8]);
    const size_t place = (size_t)token * columns + first;
    if (activation != 0) {
        out[place + row / 16 * 8 + row % 8] = from_float<T>(activate(upper, activation) * lower);
    } else if (logits != nullptr) {
        if (softcap != 0.0f) {
            upper = softcap * tanhf(upper / softcap);
            lower = softcap * tanhf(lower / softcap);
        }
        logits[place + row] = upper;
        if (both) logits[place + row + 8] = lower;
    } else {
        out[place + row] = from_float<T>(upper);
        if (both) out[place + row + 8] = from_float<T>(lower);
    }
}

template <int BITS>
DEV size_t row_bytes(int K) {
    return BITS == 16 ? (size_t)K * 2 : (size_t)((K + Unit<BITS>::INPUTS - 1) / Unit<BITS>::INPUTS) * 64;
}

// Of a row of scales: groups of all inputs that the units have room for, up to a whole chunk.
template <int BITS>
DEV size_t scale_columns(int K, int group_shift) {
    const int inputs = (K + Unit<BITS>::INPUTS - 1) / Unit<BITS>::INPUTS * Unit<BITS>::INPUTS;
    return (size_t)((inputs + (8 << group_shift) - 1) >> (group_shift + 3)) * 8;
}

// Moves the words of a unit's next 32 inputs to the front.
template <int PARTS, int ROW_TILES>
DEV void next_part(uint32_t (&weights)[ROW_TILES][2][4]) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4 - 4 / PARTS; i++) weights[r][half][i] = weights[r][half][i + 4 / PARTS];
}

// A warp's sums, as [row tile][token tile][4][lane].
template <int ROW_TILES, int TOKEN_TILES>
DEV void store_sums(float* to, const float (&sums)[ROW_TILES][TOKEN_TILES][4]) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[((r * TOKEN_TILES + m) * 4 + i) * 32 + threadIdx.x % 32] = sums[r][m][i];
}

DEV void split16(uint32_t (&words)[4], uint4 value) {
    words[0] = value.x, words[1] = value.y, words[2] = value.z, words[3] = value.w;
}

template <class T, int BITS, int SPAN, bool OFFSETS, int TOKEN_TILES>
__global__ void __launch_bounds__(128, TOKEN_TILES == 1 ? 6 : TOKEN_TILES == 2 ? 3 : 2)
    skinny_gemm(T* __restrict__ out, float* __restrict__ logits, const T* __restrict__ x,
                const void* __restrict__ weight, const __half* __restrict__ scales, const __half* __restrict__ offsets,
                const float* __restrict__ bias, int M, int N, int K, int group_shift, float scale_unit, int first,
                int columns, int activation, float softcap) {
    constexpr bool CODES = BITS != 16;
    constexpr int INPUTS = Unit<BITS>::INPUTS, PARTS = Unit<BITS>::PARTS;
    constexpr int PARTS_AT_ONCE = TOKEN_TILES == 1 ? PARTS : 1;
    constexpr int ROW_TILES = TOKEN_TILES == 1 ? 1 : 2;
    constexpr int DEPTH = 8 / ROW_TILES;                            // units in a ring, and chunks of scales
    constexpr int TOKENS_AHEAD = TOKEN_TILES == 4 ? 1 : 2;          // parts whose tokens are on their way
    constexpr int UNIT_PIECES = ROW_TILES * 2 * 32, CHUNK_PIECES = CODES ? ROW_TILES * 32 : 0;     // of 16 bytes
    constexpr int WARP_PIECES = DEPTH * (UNIT_PIECES + CHUNK_PIECES);
    static_assert(WARP_PIECES * 16 >= ROW_TILES * TOKEN_TILES * 512, "the sums of a quarter lie where its ring did");
    SHARED_DYNAMIC(uint4, rings);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = blockIdx.y * ROW_TILES * 16, token0 = blockIdx.x * TOKEN_TILES * 8;
    const int units = (K + INPUTS - 1) / INPUTS, begin = units * warp / 4, end = units * (warp + 1) / 4;
    const int chunk_shift = CODES ? group_shift + 3 : 0;            // inputs of a chunk of scales, as a power of two
    uint4* ring = rings + warp * WARP_PIECES;
    uint4* chunks = ring + DEPTH * UNIT_PIECES;

    // NOTE: rows and tokens that are not there are the last ones once more; their sums are written nowhere.
    const char* rows[ROW_TILES * 2];
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; i++)
        rows[i] = static_cast<const char*>(weight) + min(row0 + 8 * i + g, N - 1) * row_bytes<BITS>(K) + t * 16;
    const T* next_tokens[TOKEN_TILES];                              // what is read next of each
    int inputs_left = K - begin * INPUTS - (SPAN == 16 ? 4 : 8) * t;    // from there
#pragma unroll
    for (int m = 0; m < TOKEN_TILES; m++)
        next_tokens[m] = x + (size_t)min(token0 + m * 8 + g, M - 1) * K + K - inputs_left;
    // Lanes 0 to 15 copy scales, 16 to 31 offsets, a row each, from chunk to chunk.
    const __half* next_chunks[ROW_TILES];
    if constexpr (CODES)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            next_chunks[r] = (OFFSETS && lane >= 16 ? offsets : scales) + (begin * INPUTS >> chunk_shift) * 8 +
                             min(row0 + r * 16 + lane % 16, N - 1) * scale_columns<BITS>(K, group_shift);

    auto request = [&](int unit) {
        if (unit >= end) return;
        const bool inside = CODES || unit * 32 + 8 * t < K;
        uint4* to = ring + (unit & (DEPTH - 1)) * UNIT_PIECES + lane;
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; i++)
            cp_async16(to + i * 32, rows[i] + (inside ? (size_t)(unit * 64) : 0), inside);
        if constexpr (CODES) {
            if (unit == begin || (unit * INPUTS & ((1 << chunk_shift) - 1)) == 0) {
                const int chunk = unit * INPUTS >> chunk_shift;
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const int place = (lane / 16 * ROW_TILES + r) * 16 + lane % 16;
                    if (OFFSETS || lane < 16)
                        cp_async16(chunks + (chunk & (DEPTH - 1)) * CHUNK_PIECES + place, next_chunks[r]);
                    next_chunks[r] += 8;
                }
            }
        }
    };
    auto load_tokens = [&](uint32_t (&tokens)[TOKEN_TILES][4]) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++) {
            if constexpr (SPAN == 16) {
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    uint2 four = make_uint2(0, 0);
                    if (inputs_left > step * 16) four = *reinterpret_cast<const uint2*>(next_tokens[m] + step * 16);
                    tokens[m][2 * step] = four.x;
                    tokens[m][2 * step + 1] = four.y;
                }
            } else {
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (inputs_left > 0) eight = load16(next_tokens[m]);
                split16(tokens[m], eight);
            }
            next_tokens[m] += 32;
        }
        inputs_left -= 32;
    };

    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    uint32_t tokens[TOKENS_AHEAD + 1][TOKEN_TILES][4];
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) {
        request(begin + i);
        cp_async_commit();
    }
#pragma unroll
    for (int i = 0; i < TOKENS_AHEAD; i++) load_tokens(tokens[i]);
    for (int unit = begin; unit < end; unit++) {
        cp_async_wait<DEPTH - 2>();
        // The other lanes' scales have arrived, and all lanes are done with those that are overwritten next.
        if constexpr (CODES) __syncwarp();
        request(unit + DEPTH - 1);
        cp_async_commit();
        uint32_t weights[ROW_TILES][2][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; i++)
            split16(weights[i / 2][i % 2], ring[(unit & (DEPTH - 1)) * UNIT_PIECES + i * 32 + lane]);
        const char* unit_scales = reinterpret_cast<const char*>(
            chunks + (unit * INPUTS >> chunk_shift & (DEPTH - 1)) * CHUNK_PIECES + g);
#pragma unroll PARTS_AT_ONCE
        for (int part = 0; part < PARTS; part++) {
            load_tokens(tokens[TOKENS_AHEAD]);
            accumulate<T, BITS, SPAN, OFFSETS>(sums, weights, tokens[0], unit_scales, ROW_TILES * 16,
                                               unit * INPUTS + part * 32, group_shift);
            next_part<PARTS>(weights);
#pragma unroll
            for (int i = 0; i < TOKENS_AHEAD; i++)
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) tokens[i][m][j] = tokens[i + 1][m][j];
        }
    }

    // The quarters meet, each warp's sums where its ring was.
    cp_async_wait<0>();
    __syncwarp();
    store_sums(reinterpret_cast<float*>(ring), sums);
    __syncthreads();
    const float* quarters = reinterpret_cast<const float*>(rings);
    constexpr int NEXT = WARP_PIECES * 4;                           // from a quarter's sum to the next one's
#pragma unroll 1
    for (int i = threadIdx.x; i < ROW_TILES * TOKEN_TILES * 64; i += 128) {     // eight threads beside each other: rows
        const int row = i % 8, token_pair = i / 8 % 4, odd = i / 32 % 2, tile = i / 64;
        const int token = token0 + tile % TOKEN_TILES * 8 + token_pair * 2 + odd;
        if (token >= M) continue;
        const float* sum = quarters + (tile * 4 + odd) * 32 + row * 4 + token_pair;
        const float upper = sum_quarters(sum[0], sum[NEXT], sum[2 * NEXT], sum[3 * NEXT]);
        const float lower = sum_quarters(sum[64], sum[NEXT + 64], sum[2 * NEXT + 64], sum[3 * NEXT + 64]);
        finish(out, logits, upper, lower, bias, token, row0 + tile / TOKEN_TILES * 16 + row, N, scale_unit, first,
               columns, activation, softcap);
    }
}

template <class T, int BITS, int SPAN, bool OFFSETS>
__global__ void __launch_bounds__(256, 1)
    tile_gemm(T* __restrict__ out, float* __restrict__ logits, const T* __restrict__ x, const void* __restrict__ weight,
              const __half* __restrict__ scales, const __half* __restrict__ offsets, const float* __restrict__ bias,
              int M, int N, int K, int group_shift, float scale_unit, int first, int columns, int activation,
              float softcap) {
    constexpr bool CODES = BITS != 16;
    constexpr int INPUTS = Unit<BITS>::INPUTS, PARTS = Unit<BITS>::PARTS;
    constexpr int ROWS = 128, TOKENS = 64, STAGES = 3, ROW_TILES = 2, TOKEN_TILES = 4;
    constexpr int TOKEN_PIECES = INPUTS / 8;                        // of 16 bytes, in a stage of one token
    constexpr int WEIGHT_STAGE = ROWS * 4, TOKEN_STAGE = TOKENS * TOKEN_PIECES, CHUNK = CODES ? 2 * ROWS : 0;
    SHARED_DYNAMIC(uint4, shared);
    uint4* weight_stages = shared;
    uint4* token_stages = weight_stages + STAGES * WEIGHT_STAGE;
    uint4* chunks = token_stages + STAGES * TOKEN_STAGE;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = blockIdx.y * ROWS, token0 = blockIdx.x * TOKENS;
    const int warp_row = warp % 4 * 32, warp_token = warp / 4 * 32;
    const int units = (K + INPUTS - 1) / INPUTS;
    const int chunk_shift = CODES ? group_shift + 3 : 0;
    // Where a piece of a token lies: 16 lanes that read 8 bytes of four tokens, or 8 lanes 16 of two, touch all banks.
    auto token_place = [&](int token, int piece) {
        const int turned = SPAN == 16 ? piece ^ (token & 3) << 1 : piece ^ (token & 1) << 2;
        return token * TOKEN_PIECES + (CODES ? turned : piece);
    };

    // NOTE: rows and tokens that are not there are the last ones once more; their sums are written nowhere.
    constexpr int WEIGHT_COPIES = WEIGHT_STAGE / 256, TOKEN_COPIES = TOKEN_STAGE / 256;
    const char* rows[WEIGHT_COPIES];
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++)
        rows[i] = static_cast<const char*>(weight) + threadIdx.x % 4 * 16 +
                  min(row0 + i * 64 + (int)threadIdx.x / 4, N - 1) * row_bytes<BITS>(K);
    constexpr int TOKENS_AT_ONCE = 256 / TOKEN_PIECES;
    const int token = threadIdx.x / TOKEN_PIECES, piece = threadIdx.x % TOKEN_PIECES;
    const T* block_tokens[TOKEN_COPIES];
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; i++)
        block_tokens[i] = x + (size_t)min(token0 + i * TOKENS_AT_ONCE + token, M - 1) * K + piece * 8;
    const __half* chunk_row = nullptr;
    if constexpr (CODES)
        chunk_row = (OFFSETS && threadIdx.x >= ROWS ? offsets : scales) +
                    min(row0 + (int)threadIdx.x % ROWS, N - 1) * scale_columns<BITS>(K, group_shift);

    auto request = [&](int unit) {
        if (unit >= units) return;
        const int stage = unit % STAGES;
        const bool weight_inside = CODES || unit * 32 + (int)threadIdx.x % 4 * 8 < K;
#pragma unroll
        for (int i = 0; i < WEIGHT_COPIES; i++)
            cp_async16(weight_stages + stage * WEIGHT_STAGE + i * 256 + threadIdx.x,
                       rows[i] + (weight_inside ? (size_t)(unit * 64) : 0), weight_inside);
        const bool token_inside = unit * INPUTS + piece * 8 < K;
#pragma unroll
        for (int i = 0; i < TOKEN_COPIES; i++)
            cp_async16(token_stages + stage * TOKEN_STAGE + token_place(i * TOKENS_AT_ONCE + token, piece),
                       token_inside ? block_tokens[i] + unit * INPUTS : x, token_inside);
        if constexpr (CODES) {
            const int chunk = unit * INPUTS >> chunk_shift;
            if ((unit * INPUTS & ((1 << chunk_shift) - 1)) == 0 && (OFFSETS || threadIdx.x < ROWS))
                cp_async16(chunks + chunk % STAGES * CHUNK + threadIdx.x, chunk_row + chunk * 8);
        }
    };

    float totals[ROW_TILES][TOKEN_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        request(i);
        cp_async_commit();
    }
    int unit = 0;
    for (int quarter = 0; quarter < 4; quarter++) {
        float sums[ROW_TILES][TOKEN_TILES][4] = {};
        for (const int end = units * (quarter + 1) / 4; unit < end; unit++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            request(unit + STAGES - 1);
            cp_async_commit();
            const uint4* stage = weight_stages + unit % STAGES * WEIGHT_STAGE + warp_row * 4;
            uint32_t weights[ROW_TILES][2][4];
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; i++) split16(weights[i / 2][i % 2], stage[i * 32 + lane]);
            const char* unit_scales = reinterpret_cast<const char*>(
                chunks + (unit * INPUTS >> chunk_shift) % STAGES * CHUNK + warp_row + g);
#pragma unroll 1
            for (int part = 0; part < PARTS; part++) {
                uint32_t tokens[TOKEN_TILES][4];
                const uint4* from = token_stages + unit % STAGES * TOKEN_STAGE;
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; m++) {
                    const int of_tile = warp_token + m * 8 + g;
                    if constexpr (SPAN == 16) {
#pragma unroll
                        for (int step = 0; step < 2; step++) {
                            const uint4* place = from + token_place(of_tile, part * 4 + step * 2 + t / 2);
                            const uint2 four = reinterpret_cast<const uint2*>(place)[t % 2];
                            tokens[m][2 * step] = four.x;
                            tokens[m][2 * step + 1] = four.y;
                        }
                    } else {
                        split16(tokens[m], from[token_place(of_tile, part * 4 + t)]);
                    }
                }
                accumulate<T, BITS, SPAN, OFFSETS>(sums, weights, tokens, unit_scales, ROWS, unit * INPUTS + part * 32,
                                                   group_shift);
                next_part<PARTS>(weights);
            }
        }
        // ((q0 + q1) + q2) + q3. NOTE: no 0 + q0: it would make +0 of -0.
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    totals[r][m][i] = quarter == 0 ? sums[r][m][i] : totals[r][m][i] + sums[r][m][i];
    }
    // By way of shared memory: for a loop, and for rows beside each other.
    cp_async_wait<0>();
    __syncthreads();
    float* results = reinterpret_cast<float*>(shared);
    store_sums(results + warp * ROW_TILES * TOKEN_TILES * 128, totals);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * ROW_TILES * TOKEN_TILES * 64; i += 256) {
        const int row = i % 8, token_pair = i / 8 % 4, odd = i / 32 % 2, tile = i / 64;
        const int of_warp = tile / (ROW_TILES * TOKEN_TILES), r = tile / TOKEN_TILES % ROW_TILES;
        const int of_block = of_warp / 4 * 32 + tile % TOKEN_TILES * 8 + token_pair * 2 + odd;
        const float* result = results + (tile * 4 + odd) * 32 + row * 4 + token_pair;
        if (token0 + of_block < M)
            finish(out, logits, result[0], result[64], bias, token0 + of_block,
                   row0 + of_warp % 4 * 32 + r * 16 + row, N, scale_unit, first, columns, activation, softcap);
    }
}

// out [M, N] = x [M, N] + bias [N], after a product that knew of none; out may be x. grid (M, N / 256 rounded up).
template <class T>
__global__ void __launch_bounds__(256) add_bias(T* out, const T* x, const float* __restrict__ bias, int N) {
    const int column = blockIdx.y * 256 + threadIdx.x;
    if (column >= N) return;
    const size_t place = (size_t)blockIdx.x * N + column;
    out[place] = from_float<T>(to_float(x[place]) + bias[column]);
}
