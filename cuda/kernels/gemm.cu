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
//   sum = fma(scale, product, sum) and, with OFFSETS, sum = fma(offset, sum of the token over the span, sum). The latter
//   comes from mma with ones.
// Lane 4g + t of a warp holds rows g and g + 8 of a tile of weights and reads 16 bytes of each at a time: see packing.py
// for the inputs in them. Inputs beyond K are zeros.
//
// skinny_gemm  is for few tokens: a block computes 16 or 32 rows (ROW_TILES) for 8 to 32 tokens (TOKEN_TILES); its four
//              warps are the quarters. Each lane copies its own weights into a ring of its own, some kilobytes ahead for
//              a warp, and nothing but the scales is handed from lane to lane. grid (tokens, rows).
// tile_gemm    is for many: a block of eight warps computes 128 rows for 64 tokens, all quarters one after the other,
//              from stages in shared memory; a warp computes 32 x 32. grid (tokens, rows).
//
// T is the type of activations and dense weights; BITS of a weight: 16 (dense, of T), 8 or 4; SPAN 32, or 16 for codes in
// groups of 16. x, weight: 16-byte aligned, K a multiple of 8 (dense) or of the group. scales, offsets: [N, chunks of 8
// groups], null where there are none. bias may be null. Results go to out or, as float32, to logits, the other one is null;
// softcap, where it is not 0, is for logits. activation: 0 none, 1 silu, 2 tanh's gelu; 1 and 2: rows 0-7 of each 16 are
// gates of rows 8-15, and columns half as many.
// Not handled: K above 2^24, N above 2^19, more than one format in a launch.
#include "common.cuh"

template <int BITS>
struct Unit {
    static constexpr int INPUTS = 512 / BITS;
    static constexpr int PARTS = INPUTS / 32;   // of 32 inputs: two mma
};

// The four codes that a word holds for an mma, less their centre, as two pairs of T. Four bits: the low byte
// of each half is of one mma, the high one of the next, which wants the word shifted by 8.
template <class T, int BITS>
DEV void centred(uint32_t (&pairs)[2], uint32_t word) {
    if constexpr (BITS == 4) {
        // A code in the low mantissa bits of 128 (bfloat16) or 1024 (half).
        constexpr uint32_t BASE = is_bf16<T>::value ? 0x43004300u : 0x64006400u;
        constexpr uint32_t CENTRE = is_bf16<T>::value ? 0x43084308u : 0x64086408u;
#pragma unroll
        for (int i = 0; i < 2; i++)
            pairs[i] = subtract_pairs<T>((word >> 4 * i & 0x000f000fu) | BASE, CENTRE);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t codes = word >> 8 * i & 0x00ff00ffu;
            if constexpr (is_bf16<T>::value)
                // Seven bits go into the mantissa of 128; the eighth decides whether 128 or 256 is subtracted.
                pairs[i] = subtract_pairs<T>((codes & 0x007f007fu) | 0x43004300u, (codes & 0x00800080u) ^ 0x43804380u);
            else
                pairs[i] = subtract_pairs<T>(codes | 0x64006400u, 0x64806480u);
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
// weights: the words with these inputs, of rows g and g + 8 of each row tile: four of a dense row, two of 8-bit codes, one
// of 4-bit codes. tokens: what the lane needs of each token tile, two words for either mma.
// scales, offsets: of row g of the first tile, 8 groups a row.
template <class T, int BITS, int SPAN, bool OFFSETS, int ROW_TILES, int TOKEN_TILES>
DEV void accumulate(float (&sums)[ROW_TILES][TOKEN_TILES][4], const uint32_t (&weights)[ROW_TILES][2][4],
                    const uint32_t (&tokens)[TOKEN_TILES][4], const __half* scales, const __half* offsets, int k,
                    int group_shift) {
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
            const int group = (k + span * SPAN) >> group_shift & 7;
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
                    const int place = (r * 16 + half * 8) * 8 + group;
                    scale[r][half] = to_float(scales[place]);
                    if constexpr (OFFSETS) offset[r][half] = to_float(offsets[place]);
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
    const bool both = row + 8 < N;
    upper *= scale_unit;
    lower *= scale_unit;
    if (bias != nullptr) {
        upper += bias[first + row];
        if (both) lower += bias[first + row + 8];
    }
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

DEV int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

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

DEV void split16(uint32_t (&words)[4], uint4 value) {
    words[0] = value.x;
    words[1] = value.y;
    words[2] = value.z;
    words[3] = value.w;
}

template <class T, int BITS, int SPAN, bool OFFSETS, int TOKEN_TILES>
__global__ void __launch_bounds__(128, TOKEN_TILES == 1 ? 6 : TOKEN_TILES == 2 ? 4 : 2)
    skinny_gemm(T* __restrict__ out, float* __restrict__ logits, const T* __restrict__ x,
                const void* __restrict__ weight, const __half* __restrict__ scales, const __half* __restrict__ offsets,
                const float* __restrict__ bias, int M, int N, int K, int group_shift, float scale_unit, int first,
                int columns, int activation, float softcap) {
    constexpr bool CODES = BITS != 16;
    constexpr int INPUTS = Unit<BITS>::INPUTS, PARTS = Unit<BITS>::PARTS;
    constexpr int PARTS_AT_ONCE = TOKEN_TILES == 1 ? PARTS : 1;
    constexpr int ROW_TILES = TOKEN_TILES == 1 ? 1 : 2;
    constexpr int DEPTH = 8 / ROW_TILES;                            // units in a ring; at least as many chunks of scales
    constexpr int TOKENS_AHEAD = TOKEN_TILES == 4 ? 1 : 2;          // parts whose tokens are on their way
    constexpr int UNIT_PIECES = ROW_TILES * 2 * 32, CHUNK_PIECES = CODES ? ROW_TILES * 32 : 0;     // of 16 bytes
    constexpr int WARP_PIECES = DEPTH * (UNIT_PIECES + CHUNK_PIECES);
    static_assert(WARP_PIECES * 16 >= ROW_TILES * TOKEN_TILES * 4 * 32 * 4, "the sums of a quarter lie where its ring did");
    SHARED_DYNAMIC(uint4, rings);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = blockIdx.y * ROW_TILES * 16, token0 = blockIdx.x * TOKEN_TILES * 8;
    const int units = (K + INPUTS - 1) / INPUTS, begin = units * warp / 4, end = units * (warp + 1) / 4;
    const size_t row_bytes = CODES ? (size_t)units * 64 : (size_t)K * 2;
    const int chunk_shift = CODES ? group_shift + 3 : 0;            // inputs of a chunk of scales, as a power of two
    const int scale_columns = CODES ? round_up(units * INPUTS, 1 << chunk_shift) >> group_shift : 0;
    uint4* ring = rings + warp * WARP_PIECES;
    uint4* chunks = ring + DEPTH * UNIT_PIECES;

    auto request = [&](int unit) {
        if (unit >= end) return;
        const bool inside = CODES || unit * 32 + 8 * t < K;
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; i++) {
            const int row = row0 + 8 * i + g;
            const bool wanted = inside && row < N;
            const char* from = static_cast<const char*>(weight) + (wanted ? row * row_bytes + unit * 64 + t * 16 : 0);
            cp_async16(ring + unit % DEPTH * UNIT_PIECES + i * 32 + lane, from, wanted);
        }
        if constexpr (CODES) {
            // Lanes 0 to 15 copy scales, 16 to 31 offsets, a row each.
            if (unit == begin || (unit * INPUTS & ((1 << chunk_shift) - 1)) == 0) {
                const int chunk = unit * INPUTS >> chunk_shift;
                const __half* source = lane < 16 ? scales : offsets;
                if (OFFSETS || lane < 16)
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        const int place = r * 16 + lane % 16, row = row0 + place;
                        cp_async16(chunks + chunk % DEPTH * CHUNK_PIECES + lane / 16 * ROW_TILES * 16 + place,
                                   source + (row < N ? (size_t)row * scale_columns + chunk * 8 : 0), row < N);
                    }
            }
        }
    };
    const T* block_tokens = x + (size_t)token0 * K;
    auto load_tokens = [&](uint32_t (&tokens)[TOKEN_TILES][4], int k) {
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++) {
            const int token = m * 8 + g;
            const T* from = block_tokens + (token * K + k);
            if constexpr (SPAN == 16) {
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    uint2 four = make_uint2(0, 0);
                    if (token0 + token < M && k + step * 16 + 4 * t < K)
                        four = *reinterpret_cast<const uint2*>(from + step * 16 + 4 * t);
                    tokens[m][2 * step] = four.x;
                    tokens[m][2 * step + 1] = four.y;
                }
            } else {
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (token0 + token < M && k + 8 * t < K) eight = load16(from + 8 * t);
                split16(tokens[m], eight);
            }
        }
    };

    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    uint32_t tokens[TOKENS_AHEAD + 1][TOKEN_TILES][4];
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) {
        request(begin + i);
        cp_async_commit();
    }
#pragma unroll
    for (int i = 0; i < TOKENS_AHEAD; i++) load_tokens(tokens[i], begin * INPUTS + i * 32);
    for (int unit = begin; unit < end; unit++) {
        cp_async_wait<DEPTH - 2>();
        // The other lanes' scales have arrived, and all lanes are done with those that are overwritten next.
        if constexpr (CODES) __syncwarp();
        request(unit + DEPTH - 1);
        cp_async_commit();
        uint32_t weights[ROW_TILES][2][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; i++)
            split16(weights[i / 2][i % 2], ring[unit % DEPTH * UNIT_PIECES + i * 32 + lane]);
        const __half* unit_scales = reinterpret_cast<const __half*>(
            chunks + (unit * INPUTS >> chunk_shift) % DEPTH * CHUNK_PIECES + g);
#pragma unroll PARTS_AT_ONCE
        for (int part = 0; part < PARTS; part++) {
            const int k = unit * INPUTS + part * 32;
            load_tokens(tokens[TOKENS_AHEAD], k + TOKENS_AHEAD * 32);
            accumulate<T, BITS, SPAN, OFFSETS>(sums, weights, tokens[0], unit_scales, unit_scales + ROW_TILES * 16 * 8, k,
                                               group_shift);
            next_part<PARTS>(weights);
#pragma unroll
            for (int i = 0; i < TOKENS_AHEAD; i++)
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) tokens[i][m][j] = tokens[i + 1][m][j];
        }
    }

    // The quarters meet: [warp][row tile][token tile][4][lane], each warp's where its ring was.
    cp_async_wait<0>();
    __syncwarp();
    float* quarter = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) quarter[((r * TOKEN_TILES + m) * 4 + i) * 32 + lane] = sums[r][m][i];
    __syncthreads();
    const float* quarters = reinterpret_cast<const float*>(rings);
#pragma unroll 1
    for (int i = threadIdx.x; i < ROW_TILES * TOKEN_TILES * 64; i += 128) {
        // Eight threads beside each other write eight rows beside each other.
        const int row = i % 8, token_pair = i / 8 % 4, odd = i / 32 % 2, tile = i / 64;
        const int token = token0 + tile % TOKEN_TILES * 8 + token_pair * 2 + odd;
        if (token >= M) continue;
        float both[2];
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const float* sum = quarters + (tile * 4 + lower * 2 + odd) * 32 + row * 4 + token_pair;
            both[lower] = sum_quarters(sum[0], sum[WARP_PIECES * 4], sum[2 * WARP_PIECES * 4], sum[3 * WARP_PIECES * 4]);
        }
        finish(out, logits, both[0], both[1], bias, token, row0 + tile / TOKEN_TILES * 16 + row, N, scale_unit, first,
               columns, activation, softcap);
    }
}

template <class T, int BITS, int SPAN, bool OFFSETS>
__global__ void __launch_bounds__(256)
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
    const size_t row_bytes = CODES ? (size_t)units * 64 : (size_t)K * 2;
    const int chunk_shift = CODES ? group_shift + 3 : 0;
    const int scale_columns = CODES ? round_up(units * INPUTS, 1 << chunk_shift) >> group_shift : 0;
    // Where a piece of a token lies: so that 16 lanes that read 8 bytes of four tokens, or 8 lanes 16 of two, touch all
    // banks.
    auto token_place = [&](int token, int piece) {
        return token * TOKEN_PIECES + (SPAN == 16 ? piece ^ (token & 3) << 1 : CODES ? piece ^ (token & 1) << 2 : piece);
    };

    auto request = [&](int unit) {
        if (unit >= units) return;
        const int stage = unit % STAGES;
#pragma unroll
        for (int i = 0; i < WEIGHT_STAGE / 256; i++) {
            const int piece = threadIdx.x + i * 256, row = row0 + piece / 4;
            const bool wanted = row < N && (CODES || unit * 32 + piece % 4 * 8 < K);
            const char* from =
                static_cast<const char*>(weight) + (wanted ? row * row_bytes + unit * 64 + piece % 4 * 16 : 0);
            cp_async16(weight_stages + stage * WEIGHT_STAGE + piece, from, wanted);
        }
#pragma unroll
        for (int i = 0; i < TOKEN_STAGE / 256; i++) {
            const int index = threadIdx.x + i * 256, token = index / TOKEN_PIECES, piece = index % TOKEN_PIECES;
            const int k = unit * INPUTS + piece * 8;
            const bool wanted = token0 + token < M && k < K;
            cp_async16(token_stages + stage * TOKEN_STAGE + token_place(token, piece),
                       x + (wanted ? (size_t)(token0 + token) * K + k : 0), wanted);
        }
        if constexpr (CODES) {
            const int chunk = unit * INPUTS >> chunk_shift, row = row0 + threadIdx.x % ROWS;
            const __half* source = threadIdx.x < ROWS ? scales : offsets;
            if ((unit * INPUTS & ((1 << chunk_shift) - 1)) == 0 && (OFFSETS || threadIdx.x < ROWS))
                cp_async16(chunks + chunk % STAGES * CHUNK + threadIdx.x,
                           source + (row < N ? (size_t)row * scale_columns + chunk * 8 : 0), row < N);
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
            const __half* unit_scales = reinterpret_cast<const __half*>(
                chunks + (unit * INPUTS >> chunk_shift) % STAGES * CHUNK + warp_row + g);
#pragma unroll 1
            for (int part = 0; part < PARTS; part++) {
                uint32_t tokens[TOKEN_TILES][4];
                const uint4* from = token_stages + unit % STAGES * TOKEN_STAGE;
#pragma unroll
                for (int m = 0; m < TOKEN_TILES; m++) {
                    const int token = warp_token + m * 8 + g;
                    if constexpr (SPAN == 16) {
#pragma unroll
                        for (int step = 0; step < 2; step++) {
                            const uint4* piece = from + token_place(token, part * 4 + step * 2 + t / 2);
                            const uint2 four = reinterpret_cast<const uint2*>(piece)[t % 2];
                            tokens[m][2 * step] = four.x;
                            tokens[m][2 * step + 1] = four.y;
                        }
                    } else {
                        split16(tokens[m], from[token_place(token, part * 4 + t)]);
                    }
                }
                accumulate<T, BITS, SPAN, OFFSETS>(sums, weights, tokens, unit_scales, unit_scales + ROWS * 8,
                                                   unit * INPUTS + part * 32, group_shift);
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
    // By way of shared memory, [warp][row tile][token tile][4][lane]: a loop, and rows beside each other written at once.
    cp_async_wait<0>();
    __syncthreads();
    float* results = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int m = 0; m < TOKEN_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                results[(((warp * ROW_TILES + r) * TOKEN_TILES + m) * 4 + i) * 32 + lane] = totals[r][m][i];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * ROW_TILES * TOKEN_TILES * 64; i += 256) {
        const int row = i % 8, token_pair = i / 8 % 4, odd = i / 32 % 2, tile = i / 64;
        const int of_warp = tile / (ROW_TILES * TOKEN_TILES), r = tile / TOKEN_TILES % ROW_TILES;
        const int token = token0 + of_warp / 4 * 32 + tile % TOKEN_TILES * 8 + token_pair * 2 + odd;
        const float* result = results + (tile * 4 + odd) * 32 + row * 4 + token_pair;
        if (token < M)
            finish(out, logits, result[0], result[64], bias, token, row0 + of_warp % 4 * 32 + r * 16 + row, N, scale_unit,
                   first, columns, activation, softcap);
    }
}

// out [M, N] += bias [N], after a product that knew of none.
template <class T>
__global__ void __launch_bounds__(256) add_bias(T* __restrict__ out, const float* __restrict__ bias, int N) {
    const int column = blockIdx.y * 256 + threadIdx.x;
    if (column >= N) return;
    T* place = out + (size_t)blockIdx.x * N + column;
    *place = from_float<T>(to_float(*place) + bias[column]);
}
