// From logits to tokens: cuda/sampler.py on the device, in its order and with its results.
//
// A block is a row. It reads the row several times, each time for one thing: the best logit; the sum of the
// softmax; the thresholds of top_k and top_p; the draw. A logit's penalties, bias and masks are applied as it is read.
// - A weight is the integer part of 2^44 e^((logit - best) / temperature). Sums of integers are the same in any order,
//   so a result does not depend on threads; the row has a distribution of its own that adds up exactly.
// - A threshold is a logit and an id: above it, or equal with a lower id. It is found without a sort: a histogram of
//   counts or weights over 2048 bins from the best logit down, then the few tokens of the bin where the sum is reached
//   are ranked. A bin with too many of them is split by the bits of the logit first.
// - The draw is the inverse of the cumulative distribution at the Philox number of (seed, choice, position). Rejected:
//   Gumbel's maximum: a number and a logarithm for every token, and other tokens than cuda/sampler.py draws.
//
// Not handled: vocabularies over 2^19; a slot twice in a launch.
#include "common.cuh"

constexpr int BINS = 2048;
constexpr int BINS_PER_UNIT = 64;               // of a logit, or of a logit over the temperature
constexpr int MAX_CANDIDATES = 1024;            // of a bin, that are ranked: every one with every one
constexpr int SEGMENT = 512;                    // tokens
constexpr int MAX_SEGMENTS = 1024;
constexpr float MASS_SCALE = 17592186044416.0f; // 2^44: the weight of the best token
constexpr int MAX_TOP = 20;
constexpr int RESULT_INTS = 4 + MAX_TOP;        // token id, status, entries of the list (-1: none wanted), 0, ids
constexpr int RESULT_FLOATS = 1 + MAX_TOP;      // logprob of the token, of the list
constexpr float LARGEST_LOGIT = 3.402823466e38f;

enum Status { SAMPLED, NOT_A_NUMBER, INFINITE, ALL_MINUS_INFINITE, ALL_MASKED };
enum Flag { PENALIZED = 1, REPEATS = 2, BIASED = 4, STOPS = 8, GREEDY = 16, FORBIDS = 32 };
enum Bits { PROMPT_BITS, BIAS_BITS, STOP_BITS, NUM_BITS };
constexpr uint32_t KEY_OF_INFINITY = 0xff800000u;
constexpr uint32_t KEY_OF_MINUS_INFINITY = 0x007fffffu;

// What a slot's sequence asked for: PARAMETERS of sampling_state.py.
struct Parameters {
    double temperature, top_p, min_p, repetition, frequency, presence;
    uint64_t seed;
    int choice, top_k, num_top, flags, num_prompt_tokens, min_tokens, num_biases, num_bad_words, unused[2];
};
constexpr int PARAMETER_WORDS = sizeof(Parameters) / 4;

struct Row {
    const float* logits;
    const Parameters* parameters;
    const uint16_t* counts;                     // how often each token is out; null: nothing is penalized
    const uint32_t* prompt;                     // bits of tokens, likewise the next ones; null where there are none
    const uint32_t* biased;
    const uint32_t* stops;
    const uint32_t* allowed;
    const uint32_t* forbidden;
    const int* bias_ids;                        // ascending
    const double* biases;
    int vocab;
    bool changed;                               // whether any of the above is there
};

// ---- logits ---------------------------------------------------------------------------------------------------------

DEV bool has_bit(const uint32_t* bits, int id) { return bits != nullptr && (bits[id >> 5] >> (id & 31) & 1); }

__device__ __noinline__ float penalize(float raw, int id, int count, bool is_seen, bool is_biased,
                                       const Parameters* parameters, const int* bias_ids, const double* biases) {
    double offset = 0.0;
    if (is_biased) {
        int place = 0;
        for (int step = 512; step > 0; step >>= 1)
            if (place + step < parameters->num_biases && bias_ids[place + step] <= id) place += step;
        offset = biases[place];
    }
    if (count > 0) offset -= count * parameters->frequency + parameters->presence;
    double logit = raw;
    if (is_seen) logit = logit > 0.0 ? logit / parameters->repetition : logit * parameters->repetition;
    logit += offset;
    if (logit < -(double)LARGEST_LOGIT && raw != NEG_INF) logit = -(double)LARGEST_LOGIT;
    if (logit > (double)LARGEST_LOGIT) logit = (double)LARGEST_LOGIT;
    return (float)logit;
}

// The logit after penalties, bias and masks.
DEV float score(const Row& row, int id, float raw) {
    if (!row.changed) return raw;
    if ((row.allowed != nullptr && !has_bit(row.allowed, id)) || has_bit(row.stops, id) || has_bit(row.forbidden, id))
        return NEG_INF;
    const int count = row.counts != nullptr ? row.counts[id] : 0;
    const bool is_seen = count > 0 || has_bit(row.prompt, id), is_biased = has_bit(row.biased, id);
    if (!is_seen && !is_biased) return raw;
    return penalize(raw, id, count, is_seen, is_biased, row.parameters, row.bias_ids, row.biases);
}

template <bool RAW>
DEV float read_logit(const Row& row, int id) {
    const float raw = row.logits[id];
    return RAW ? raw : score(row, id, raw);
}

// body(id, logit) for every token; the threads do not meet in it.
template <bool RAW, class Body>
DEV void for_each_token(const Row& row, Body body) {
    constexpr int UNROLLED = 4;
    for (int first = threadIdx.x; first < row.vocab; first += UNROLLED * blockDim.x) {
        float logits[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; i++) {
            const int id = first + i * blockDim.x;
            logits[i] = id < row.vocab ? row.logits[id] : NEG_INF;
        }
#pragma unroll
        for (int i = 0; i < UNROLLED; i++) {
            const int id = first + i * blockDim.x;
            if (id < row.vocab) body(id, RAW ? logits[i] : score(row, id, logits[i]));
        }
    }
}

// ---- weights and what is kept ---------------------------------------------------------------------------------------

struct Scale {
    float best;
    float slope;                                // log2(e) / temperature
};

DEV uint64_t weight(Scale scale, float logit) {
    return (uint64_t)(exp2f((logit - scale.best) * scale.slope) * MASS_SCALE);
}

// The last token that is kept.
struct Threshold {
    uint32_t key;
    int id;
};
#define KEEP_ALL Threshold{0u, -1}

// A token's share where every one that can be had counts alike.
struct One {
    DEV uint64_t operator()(int, float logit) const { return logit != NEG_INF; }
};

struct Filter {
    Threshold top_k;
    float min_p_low, min_p_high;                // below: dropped; from here on: kept; between: looked at closely
    const Parameters* parameters;
    float best;
};

__device__ __noinline__ bool reaches_min_p(float logit, float best, const Parameters* parameters) {
    return exp(((double)logit - (double)best) / parameters->temperature) >= parameters->min_p;
}

DEV bool is_kept(Threshold threshold, uint32_t key, int id) {
    return key > threshold.key || (key == threshold.key && id <= threshold.id);
}

DEV bool passes(const Filter& filter, int id, float logit) {
    if (logit < filter.min_p_low || logit == NEG_INF) return false;
    if (!is_kept(filter.top_k, order_key(logit), id)) return false;
    return logit >= filter.min_p_high || reaches_min_p(logit, filter.best, filter.parameters);
}

// ---- sums of a block ------------------------------------------------------------------------------------------------

struct Shared {
    uint64_t* room;                             // [3 BINS / 2]: a histogram, or candidates
    uint64_t* segments;                         // [MAX_SEGMENTS]
    uint64_t* scratch;                          // [32]
    uint64_t* found;                            // [2]
    uint32_t* counter;                          // [1]
};

struct Found {
    int index;
    uint64_t rest;                              // of what was needed, before the entry at `index`
};

// The first entry up to which value(0) + value(1) + ... reaches need(sum of all), which is between 1 and that sum; or
// index -1 where it is more. Every thread calls it and gets the same.
template <class Value, class Need>
DEV Found find(const Shared& shared, int count, Value value, Need need) {
    const int share = (count + blockDim.x - 1) / blockDim.x;
    const int begin = min(count, (int)threadIdx.x * share), end = min(count, begin + share);
    uint64_t own = 0;
    for (int i = begin; i < end; i++) own += value(i);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t through = own;                     // of the warp's lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(FULL_WARP, through, distance);
        if (lane >= distance) through += other;
    }
    if (lane == 31) shared.scratch[warp] = through;
    __syncthreads();
    uint64_t before = through - own, total = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) {
        if (i < warp) before += shared.scratch[i];
        total += shared.scratch[i];
    }
    const uint64_t needed = need(total);
    if (before < needed && needed <= before + own) {
        int i = begin;
        for (uint64_t next = before + value(i); next < needed; next = before + value(i)) {
            before = next;
            i++;
        }
        shared.found[0] = i;
        shared.found[1] = needed - before;
    }
    __syncthreads();
    const Found result = needed <= total ? Found{(int)shared.found[0], shared.found[1]} : Found{-1, 0};
    __syncthreads();
    return result;
}

// Likewise of weight_of(id, logit) of every token; the sum reaches what is needed. Returns the token's id.
template <bool RAW, class Weight, class Need>
DEV int find_token(const Row& row, const Shared& shared, Weight weight_of, Need need) {
    const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    const int num_segments = (row.vocab + SEGMENT - 1) / SEGMENT;
    for (int segment = threadIdx.x / 32; segment < num_segments; segment += num_warps) {
        uint64_t sum = 0;
#pragma unroll 4
        for (int i = lane; i < SEGMENT; i += 32) {
            const int id = segment * SEGMENT + i;
            if (id < row.vocab) sum += weight_of(id, read_logit<RAW>(row, id));
        }
        sum = warp_sum(sum);
        if (lane == 0) shared.segments[segment] = sum;
    }
    __syncthreads();
    const Found segment = find(shared, num_segments, [&](int i) { return shared.segments[i]; }, need);
    const int start = segment.index * SEGMENT;
    auto weight_at = [&](int i) { return weight_of(start + i, read_logit<RAW>(row, start + i)); };
    auto rest = [&](uint64_t) { return segment.rest; };
    return start + find(shared, min(SEGMENT, row.vocab - start), weight_at, rest).index;
}

// ---- thresholds -----------------------------------------------------------------------------------------------------

// Tokens in the order of their ranks, for which `is_wanted(id, logit)`: at most MAX_CANDIDATES.
// use(rank, sum of the ranks' values before it, key, id, value) by one thread each.
template <bool RAW, class Value, class Use>
DEV void rank(const Row& row, const Shared& shared, Value value, Use use) {
    uint64_t* values = shared.room;
    uint32_t* keys = reinterpret_cast<uint32_t*>(values + MAX_CANDIDATES);
    int* ids = reinterpret_cast<int*>(keys + MAX_CANDIDATES);
    if (threadIdx.x == 0) *shared.counter = 0;
    __syncthreads();
    for_each_token<RAW>(row, [&](int id, float logit) {
        const uint64_t own = value(id, logit);
        if (own == 0) return;
        const uint32_t place = atomicAdd(shared.counter, 1u);
        values[place] = own;
        keys[place] = order_key(logit);
        ids[place] = id;
    });
    __syncthreads();
    const int count = *shared.counter;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        int rank = 0;
        uint64_t before = 0;
        for (int other = 0; other < count; other++)
            if (keys[other] > keys[i] || (keys[other] == keys[i] && ids[other] < ids[i])) {
                before += values[other];
                rank++;
            }
        use(rank, before, keys[i], ids[i], values[i]);
    }
    __syncthreads();
}

// Of the tokens with a value, in their order: the last one that is needed for a sum of need(sum of all values), which
// is at least 1; KEEP_ALL where they do not reach it. value(id, logit): 0 or, for equal logits, the same number.
// best: at least every logit with a value; bins_per_unit: where the histogram is to be fine.
template <bool RAW, class Value, class Need>
DEV Threshold select(const Row& row, const Shared& shared, float best, float bins_per_unit, Value value, Need need) {
    uint32_t* counts = reinterpret_cast<uint32_t*>(shared.room);        // [BINS]
    uint32_t* lows = counts + BINS;                                     // [BINS], of the sums of values
    uint32_t* highs = lows + BINS;                                      // [BINS]
    auto linear_bin = [&](float logit) { return (int)fminf((best - logit) * bins_per_unit, BINS - 1.0f); };
    int bin = 0;
    uint32_t prefix = 0;                        // the upper bits of the key that are known
    Found found = {0, 0};
    for (int level = 0; level < 4; level++) {   // the linear bin, then 11, 11 and 10 bits of the key
        const int shift = level == 1 ? 21 : level == 2 ? 10 : 0, known = level == 2 ? 21 : 10;
        const uint32_t mask = level == 3 ? 1023u : 2047u;
        auto is_in = [&](float logit) {         // what the last level found
            return level == 0 || (linear_bin(logit) == bin && (level == 1 || order_key(logit) >> known == prefix));
        };
        for (int i = threadIdx.x; i < 3 * BINS; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for_each_token<RAW>(row, [&](int id, float logit) {
            const uint64_t own = value(id, logit);
            if (own == 0 || !is_in(logit)) return;
            const int place = level == 0 ? linear_bin(logit) : (int)(mask - (order_key(logit) >> shift & mask));
            const uint32_t low = (uint32_t)own, old = atomicAdd(&lows[place], low);
            const uint32_t high = (uint32_t)(own >> 32) + (old + low < low);
            if (high > 0) atomicAdd(&highs[place], high);
            atomicAdd(&counts[place], 1u);
        });
        __syncthreads();
        const uint64_t rest = found.rest;
        found = find(shared, BINS, [&](int i) { return (uint64_t)highs[i] << 32 | lows[i]; },
                     [&](uint64_t total) { return level == 0 ? need(total) : rest; });
        if (found.index < 0) return KEEP_ALL;
        const bool is_ranked = counts[found.index] <= MAX_CANDIDATES;
        __syncthreads();                        // before the histogram is overwritten
        if (level == 0)
            bin = found.index;
        else
            prefix = prefix << (level == 3 ? 10 : 11) | (mask - found.index);
        if (is_ranked) {
            auto is_found = [&](float logit) {
                return linear_bin(logit) == bin && (level == 0 || order_key(logit) >> shift == prefix);
            };
            auto value_if_found = [&](int id, float logit) {
                const uint64_t own = value(id, logit);
                return own != 0 && is_found(logit) ? own : 0;
            };
            rank<RAW>(row, shared, value_if_found, [&](int, uint64_t before, uint32_t key, int id, uint64_t own) {
                if (before >= found.rest || found.rest > before + own) return;
                shared.found[0] = key;
                shared.found[1] = id;
            });
            const Threshold threshold = {(uint32_t)shared.found[0], (int)shared.found[1]};
            __syncthreads();
            return threshold;
        }
    }
    // Many equal logits: the ids decide.
    auto value_if_equal = [&](int id, float logit) {
        return order_key(logit) == prefix ? value(id, logit) : (uint64_t)0;
    };
    return Threshold{prefix, find_token<RAW>(row, shared, value_if_equal, [&](uint64_t) { return found.rest; })};
}

// The log-softmax of the raw logits: of the `num_top` best tokens into the results, and what a logit is above it.
DEV double report(const Row& row, const Shared& shared, float best, int num_top, int* result, float* logprobs) {
    const Scale scale = {best, 1.44269504f};
    uint64_t total = 0;
    for_each_token<true>(row, [&](int, float logit) { total += weight(scale, logit); });
    total = block_sum(total, shared.scratch);
    const double log_total = (double)best + log((double)total / (double)MASS_SCALE);
    if (num_top > 0) {
        auto needed = [&](uint64_t) { return (uint64_t)num_top; };
        const Threshold last = select<true>(row, shared, best, BINS_PER_UNIT, One{}, needed);
        auto is_listed = [&](int id, float logit) {
            return (uint64_t)(logit != NEG_INF && is_kept(last, order_key(logit), id));
        };
        rank<true>(row, shared, is_listed, [&](int place, uint64_t, uint32_t key, int id, uint64_t) {
            result[4 + place] = id;
            logprobs[1 + place] = (float)((double)float_of(key) - log_total);
        });
        num_top = (int)*shared.counter;
    }
    if (threadIdx.x == 0) result[2] = num_top;
    return log_total;
}

// One token of the filtered distribution.
DEV int draw(const Row& row, const Shared& shared, float best, int position) {
    const Parameters* parameters = row.parameters;
    SHARED_ARRAY(float, bounds, [4]);
    if (threadIdx.x == 0) {
        const double temperature = parameters->temperature, min_p = parameters->min_p;
        bounds[0] = (float)(1.4426950408889634 / temperature);
        bounds[1] = (float)(BINS_PER_UNIT / temperature);
        bounds[2] = bounds[3] = -LARGEST_LOGIT;
        if (min_p > 0.0) {
            const double bound = best + temperature * log(min_p);
            const double margin = 1e-6 * (fabs((double)best) + fabs(bound) + temperature);
            bounds[2] = (float)(bound - margin);
            bounds[3] = (float)(bound + margin);
        }
    }
    __syncthreads();
    const Scale scale = {best, bounds[0]};
    Filter filter = {KEEP_ALL, bounds[2], bounds[3], parameters, best};
    auto top_k = [&](uint64_t) { return (uint64_t)parameters->top_k; };
    if (parameters->top_k > 0) filter.top_k = select<false>(row, shared, best, BINS_PER_UNIT, One{}, top_k);
    Threshold top_p = KEEP_ALL;
    const double share = parameters->top_p;
    auto kept_weight = [&](int id, float logit) {
        const bool wanted = is_kept(top_p, order_key(logit), id) && passes(filter, id, logit);
        return wanted ? weight(scale, logit) : (uint64_t)0;
    };
    if (share < 1.0)
        top_p = select<false>(row, shared, best, bounds[1], kept_weight, [&](uint64_t total) {
            const uint64_t goal = (uint64_t)ceil(share * (double)total);
            return goal < 1 ? (uint64_t)1 : goal < total ? goal : total;
        });
    const uint64_t number = random_bits(parameters->seed, parameters->choice, position);
    auto place = [&](uint64_t total) { return scale_down(number, total) + 1; };
    return find_token<false>(row, shared, kept_weight, place);
}

// Bad words of several tokens: the last one of each is forbidden while the output ends with those before it.
// words: the places where they begin, and where the last one ends; then their ids. tokens: behind the output.
// NOTE: forbidden has no bit of a last one but what was set here for the token before.
DEV void forbid_last_tokens(uint32_t* forbidden, const int* words, int num_words, const int* tokens, int num_output) {
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
        const int last = words[words[i + 1] - 1];
        atomicAnd(&forbidden[last >> 5], ~(1u << (last & 31)));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
        const int begin = words[i], last = words[i + 1] - 1, length = last - begin;
        bool is_there = length <= num_output;
        for (int j = 0; is_there && j < length; j++) is_there = tokens[j - length] == words[begin + j];
        if (is_there) atomicOr(&forbidden[words[last] >> 5], 1u << (words[last] & 31));
    }
    __syncthreads();
}

// A token for every row r of logits [R, V] whose slot slots[r] is not below 0, at positions[r] of its sequence: into
// results [R, RESULT_INTS] and logprobs [R, RESULT_FLOATS] (0 where not asked for), tokens [slots, tokens_width],
// counts [slots, V] and, of bad words of several tokens, forbidden [slots, words].
// parameters [slots, PARAMETER_WORDS]; bits [slots, NUM_BITS, words]; bias_ids, biases [slots, max_biases];
// bad_words [slots, max_bad_words];
// allowed [masks, words] and allowed_rows [R], -1: everything is; both may be null.
__global__ void __launch_bounds__(512, 1)
    sample(int* __restrict__ results, float* __restrict__ logprobs, int* __restrict__ tokens,
           uint16_t* __restrict__ counts, uint32_t* __restrict__ forbidden, const float* __restrict__ logits,
           const int* __restrict__ slots, const int* __restrict__ positions, const uint32_t* __restrict__ parameters,
           const uint32_t* __restrict__ bits, const int* __restrict__ bias_ids, const double* __restrict__ biases,
           const int* __restrict__ bad_words, const uint32_t* __restrict__ allowed,
           const int* __restrict__ allowed_rows, int vocab, int tokens_width, int max_biases, int max_bad_words) {
    SHARED_ARRAY(uint64_t, room, [3 * BINS / 2]);
    SHARED_ARRAY(uint64_t, segments, [MAX_SEGMENTS]);
    SHARED_ARRAY(uint64_t, scratch, [32]);
    SHARED_ARRAY(uint64_t, found, [2]);
    SHARED_ARRAY(uint32_t, counter, [1]);
    const Shared shared = {room, segments, scratch, found, counter};
    const int slot = slots[blockIdx.x], position = positions[blockIdx.x];
    if (slot < 0) return;
    const int words = (vocab + 31) / 32;
    const Parameters* own = reinterpret_cast<const Parameters*>(parameters + (size_t)slot * PARAMETER_WORDS);
    const uint32_t* own_bits = bits + (size_t)slot * NUM_BITS * words;
    const int flags = own->flags;
    const bool masks_stops = flags & STOPS && position - own->num_prompt_tokens < own->min_tokens;
    const int mask = allowed != nullptr ? allowed_rows[blockIdx.x] : -1;
    uint32_t* own_forbidden = forbidden + (size_t)slot * words;
    if (own->num_bad_words > 0)
        forbid_last_tokens(own_forbidden, bad_words + (size_t)slot * max_bad_words, own->num_bad_words,
                           tokens + (size_t)slot * tokens_width + position, position - own->num_prompt_tokens);
    Row row;
    row.logits = logits + (size_t)blockIdx.x * vocab;
    row.parameters = own;
    row.counts = flags & PENALIZED ? counts + (size_t)slot * vocab : nullptr;
    row.prompt = flags & REPEATS ? own_bits + PROMPT_BITS * words : nullptr;
    row.biased = flags & BIASED ? own_bits + BIAS_BITS * words : nullptr;
    row.stops = masks_stops ? own_bits + STOP_BITS * words : nullptr;
    row.allowed = mask >= 0 ? allowed + (size_t)mask * words : nullptr;
    row.forbidden = flags & FORBIDS ? own_forbidden : nullptr;
    row.bias_ids = bias_ids + (size_t)slot * max_biases;
    row.biases = biases + (size_t)slot * max_biases;
    row.vocab = vocab;
    row.changed = flags & (PENALIZED | BIASED | FORBIDS) || row.stops != nullptr || row.allowed != nullptr;

    int* result = results + (size_t)blockIdx.x * RESULT_INTS;
    float* result_logprobs = logprobs + (size_t)blockIdx.x * RESULT_FLOATS;
    for (int i = threadIdx.x; i < RESULT_INTS; i += blockDim.x) result[i] = i == 2 ? -1 : 0;
    for (int i = threadIdx.x; i < RESULT_FLOATS; i += blockDim.x) result_logprobs[i] = 0.0f;

    uint64_t best = 0;                          // key and id, so that of equals the lowest id is the largest
    uint32_t raw_best = 0;
    bool is_nan = false;
    for_each_token<true>(row, [&](int id, float raw) {
        is_nan |= (__float_as_uint(raw) & 0x7fffffffu) > 0x7f800000u;
        raw_best = max(raw_best, order_key(raw));
        best = max(best, (uint64_t)order_key(score(row, id, raw)) << 32 | (0xffffffffu - id));
    });
    is_nan = __syncthreads_or(is_nan);
    best = block_max(best, scratch);
    raw_best = (uint32_t)block_max((uint64_t)raw_best, scratch);
    const uint32_t best_key = (uint32_t)(best >> 32);

    const Status status = is_nan                                ? NOT_A_NUMBER
                          : raw_best >= KEY_OF_INFINITY       ? INFINITE
                          : raw_best <= KEY_OF_MINUS_INFINITY ? ALL_MINUS_INFINITE
                          : best_key <= KEY_OF_MINUS_INFINITY ? ALL_MASKED
                                                              : SAMPLED;
    int token = 0;                              // of a failed row: one that can be fed on
    double log_total = 0.0;
    if (status == SAMPLED) {
        if (own->num_top >= 0)
            log_total = report(row, shared, float_of(raw_best), own->num_top, result, result_logprobs);
        token = flags & GREEDY ? (int)(0xffffffffu - (uint32_t)best) : draw(row, shared, float_of(best_key), position);
    }
    if (threadIdx.x == 0) {
        result[0] = token;
        result[1] = status;
        tokens[(size_t)slot * tokens_width + position] = token;
        if (status != SAMPLED) return;
        if (own->num_top >= 0) result_logprobs[0] = (float)((double)row.logits[token] - log_total);
        uint16_t* count = counts + (size_t)slot * vocab + token;
        if (flags & PENALIZED && *count < 0xffff) *count += 1;
    }
}
