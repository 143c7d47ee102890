// What the sampler keeps of a slot, filled for sequences that enter.
//
// A block is a sequence. The host has made a record of it; here it is laid out for the kernel of sampling.cu.
#include "common.cuh"

constexpr int PARAMETER_WORDS = 24;             // PARAMETERS of sampling_state.py
enum Bits { PROMPT_BITS, BIAS_BITS, STOP_BITS, NUM_BITS };

// Sequences that enter slots: records [...] begins with the places of the launch's records in it, a block's each. A
// record: slot; numbers of words of prompt bits, of tokens with counts (-1: none are kept), of biases, of stop ids, of
// words of forbidden bits, of integers about bad words; then parameters; the prompt bits; id and count of each token
// that is out; ids of biases, then the biases (two words each); stop ids; the forbidden bits; the bad words.
__global__ void __launch_bounds__(256)
    start_slots(uint32_t* __restrict__ parameters, uint16_t* __restrict__ counts, uint32_t* __restrict__ bits,
                int* __restrict__ bias_ids, double* __restrict__ biases, uint32_t* __restrict__ forbidden,
                int* __restrict__ bad_words, const int* __restrict__ records, int vocab, int max_biases,
                int max_bad_words) {
    const int* record = records + records[blockIdx.x];
    const int words = (vocab + 31) / 32;
    const int slot = record[0], num_words = record[1], num_counts = record[2], num_biases = record[3];
    const int num_stops = record[4], num_forbidden = record[5], num_bad_words = record[6];
    const int* from = record + 7;
    for (int i = threadIdx.x; i < PARAMETER_WORDS; i += blockDim.x)
        parameters[(size_t)slot * PARAMETER_WORDS + i] = (uint32_t)from[i];
    uint32_t* own_bits = bits + (size_t)slot * NUM_BITS * words;
    uint16_t* own_counts = counts + (size_t)slot * vocab;
    for (int i = threadIdx.x; i < NUM_BITS * words; i += blockDim.x) own_bits[i] = 0;
    if (num_counts >= 0)
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) own_counts[i] = 0;
    __syncthreads();
    from += PARAMETER_WORDS;
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) own_bits[PROMPT_BITS * words + i] = (uint32_t)from[i];
    from += num_words;
    for (int i = threadIdx.x; i < num_counts; i += blockDim.x) own_counts[from[2 * i]] = (uint16_t)from[2 * i + 1];
    from += 2 * max(num_counts, 0);
    for (int i = threadIdx.x; i < num_biases; i += blockDim.x) {
        const int id = from[i];
        bias_ids[(size_t)slot * max_biases + i] = id;
        atomicOr(&own_bits[BIAS_BITS * words + id / 32], 1u << id % 32);
        uint32_t* bias = reinterpret_cast<uint32_t*>(biases + (size_t)slot * max_biases + i);
        bias[0] = (uint32_t)from[num_biases + 2 * i];
        bias[1] = (uint32_t)from[num_biases + 2 * i + 1];
    }
    from += 3 * num_biases;
    for (int i = threadIdx.x; i < num_stops; i += blockDim.x)
        atomicOr(&own_bits[STOP_BITS * words + from[i] / 32], 1u << from[i] % 32);
    from += num_stops;
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        forbidden[(size_t)slot * words + i] = i < num_forbidden ? (uint32_t)from[i] : 0u;
    from += num_forbidden;
    for (int i = threadIdx.x; i < num_bad_words; i += blockDim.x)
        bad_words[(size_t)slot * max_bad_words + i] = from[i];
}
