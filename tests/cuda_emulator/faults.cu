// Kernels with one planted fault each, and their faultless twins: what the emulator must find, and what must pass.
// Template arguments choose: FAULTY or not.
#include "common.cuh"

// out [64] = in [64] reversed, through shared memory. Fault: no barrier between the write and the read.
template <bool FAULTY>
__global__ void missing_barrier(float* out, const float* in) {
    SHARED_ARRAY(float, values, [64]);
    values[threadIdx.x] = in[threadIdx.x];
    if (!FAULTY) __syncthreads();
    out[threadIdx.x] = values[63 - threadIdx.x];
}

// out [2, 32] = in [2, 32] turned by one. Fault: the second pass writes what others may still read.
template <bool FAULTY>
__global__ void buffer_used_again(float* out, const float* in) {
    SHARED_ARRAY(float, values, [64]);
    for (int pass = 0; pass < 2; pass++) {
        values[threadIdx.x] = in[pass * 64 + threadIdx.x];
        __syncthreads();
        out[pass * 64 + threadIdx.x] = values[(threadIdx.x + 1) % 64];
        if (!FAULTY) __syncthreads();
    }
}

// Two groups of copies, of which the first must have come. Fault: the wait leaves both under way.
template <bool FAULTY>
__global__ void weak_wait(float* out, const float* in) {
    SHARED_ARRAY(float, values, [2][128]);
    for (int group = 0; group < 2; group++) {
        cp_async16(&values[group][threadIdx.x * 4], in + group * 128 + threadIdx.x * 4);
        cp_async_commit();
    }
    cp_async_wait<FAULTY ? 2 : 1>();
    __syncwarp();
    for (int i = 0; i < 4; i++) out[threadIdx.x + 32 * i] = values[0][threadIdx.x + 32 * i];
    cp_async_wait<0>();
}

__global__ void copies_left_behind(float* out, const float* in) {
    SHARED_ARRAY(float, values, [128]);
    cp_async16(&values[threadIdx.x * 4], in + threadIdx.x * 4);
    cp_async_commit();
    out[threadIdx.x] = 0.0f;
}

__global__ void misaligned_copy(float* out, const float* in) {
    SHARED_ARRAY(float, values, [132]);
    cp_async16(&values[threadIdx.x * 4 + 1], in + threadIdx.x * 4);
    out[threadIdx.x] = 0.0f;
}

__global__ void copy_out_of_bounds(float* out, const float* in) {
    SHARED_ARRAY(float, values, [128]);
    cp_async16(&values[threadIdx.x * 4], in + threadIdx.x * 4);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = values[threadIdx.x * 4];
}

__global__ void read_out_of_bounds(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x + 1]; }

__global__ void write_out_of_bounds(float* out) { out[(int)threadIdx.x - 1] = 1.0f; }

__global__ void shared_out_of_bounds(float* out) {
    SHARED_ARRAY(float, values, [32]);
    float* pointer = values;
    pointer[threadIdx.x + 1] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = pointer[threadIdx.x + 1];
}

__global__ void shared_index_out_of_bounds(float* out) {
    SHARED_ARRAY(float, values, [2][32]);
    values[0][threadIdx.x] = values[1][threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[0][threadIdx.x + 1];
}

__global__ void misaligned(float* out, const float* in) {
    float4 values = *reinterpret_cast<const float4*>(in + threadIdx.x * 4 + 1);
    out[threadIdx.x] = values.x + values.w;
}

__global__ void wide_shift(int* out, int shift) { out[threadIdx.x] = 1 << shift; }

__global__ void written_constant(float* out, const float* in) {
    const_cast<float*>(in)[threadIdx.x] = 0.0f;
    out[threadIdx.x] = 0.0f;
}

// out [32] = in [32] reversed inside one warp. Fault: nothing orders the lanes' accesses to shared memory: 0 lets them
// run in step, as warps once did; 1 takes a shuffle for a fence; 2 is right.
template <int ORDER>
__global__ void lock_step(int* out, const int* in) {
    SHARED_ARRAY(int, values, [32]);
    values[threadIdx.x] = in[threadIdx.x];
    int ignored = 0;
    if (ORDER == 1) ignored = __shfl_sync(FULL_WARP, 0, 0);
    if (ORDER == 2) __syncwarp();
    out[threadIdx.x] = values[31 - threadIdx.x] + ignored;
}

// The same in groups of eight lanes. Fault: the mask is that of the group's first four.
template <bool FAULTY>
__global__ void groups_of_lanes(int* out, const int* in) {
    SHARED_ARRAY(int, values, [32]);
    const int group = threadIdx.x / 8 * 8, half = threadIdx.x / 4 * 4;
    values[threadIdx.x] = in[threadIdx.x];
    __syncwarp(FAULTY ? 15u << half : 255u << group);
    out[threadIdx.x] = values[group + 7 - threadIdx.x % 8];
}

__global__ void uninitialised_shared(float* out) {
    SHARED_ARRAY(float, values, [64]);
    if (threadIdx.x != 40) values[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

template <bool FAULTY>
__global__ void blocks_add(int* sum) {
    if (threadIdx.x != 0) return;
    if (FAULTY)
        *sum += (int)blockIdx.x;
    else
        atomicAdd(sum, (int)blockIdx.x);
}

// Every block leaves a part; the last to arrive adds them up in order and resets the counter. Faults: 1 no fence before
// the counter, 2 none after it, 3 no barrier before it.
template <int FAULT>
__global__ void last_block(float* out, float* parts, int* arrived) {
    SHARED_ARRAY(int, is_last, [1]);
    parts[blockIdx.x * blockDim.x + threadIdx.x] = (float)threadIdx.x;
    if (FAULT != 3) __syncthreads();
    if (threadIdx.x == 0) {
        if (FAULT != 1) __threadfence();
        is_last[0] = atomicAdd(arrived, 1) == (int)gridDim.x - 1;
        if (FAULT != 2) __threadfence();
    }
    __syncthreads();
    if (!is_last[0]) return;
    float sum = 0.0f;
    for (int i = 0; i < (int)gridDim.x; i++) sum += parts[i * blockDim.x + threadIdx.x];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *arrived = 0;
}

__global__ void half_block_barrier(float* out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1.0f;
}

__global__ void two_barriers(float* out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1.0f;
}

__global__ void lanes_that_left(int* out) {
    if (threadIdx.x >= 16) return;
    out[threadIdx.x] = __shfl_xor_sync(FULL_WARP, (int)threadIdx.x, 1);
}

__global__ void shuffle_from_outside_the_mask(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, (int)threadIdx.x, 20);
}

__global__ void lane_outside_its_mask(int* out) { out[threadIdx.x] = __shfl_sync(0xffffu, (int)threadIdx.x, 0); }

__global__ void overlapping_masks(int* out) {
    if (threadIdx.x < 16)
        __syncwarp(0x1ffffu);
    else
        __syncwarp(0xffff8000u);
    out[threadIdx.x] = 1;
}

__global__ void two_shuffles(int* out) {
    if (threadIdx.x % 2 == 0)
        out[threadIdx.x] = __shfl_xor_sync(FULL_WARP, 0, 1);
    else
        out[threadIdx.x] = __shfl_xor_sync(FULL_WARP, 0, 2);
}

__global__ void two_collectives(int* out) {
    if (threadIdx.x % 2 == 0)
        out[threadIdx.x] = (int)__ballot_sync(FULL_WARP, 1);
    else
        __syncwarp();
}

__global__ void two_sums(float* out) {
    float sum;
    if (threadIdx.x % 2 == 0)
        sum = warp_sum(1.0f);
    else
        sum = warp_sum(2.0f);
    out[threadIdx.x] = sum;
}

__global__ void too_much_shared(float* out) {
    SHARED_DYNAMIC(float, values);
    values[threadIdx.x] = 1.0f;
    out[threadIdx.x] = values[threadIdx.x];
}

template <class T>
__global__ void parameters(T* out, const T* in, const uint4* wide, float scale, int count, int64_t offset, bool flag,
                           const void* bytes) {
    if (threadIdx.x < 1) out[0] = in[0];
}

// ---- what each primitive of the language does, for the tests to compare ---------------------------------------------

// Eleven answers for each lane, out [11, 32].
__global__ void collectives(int* out, const int* in) {
    const int lane = threadIdx.x, value = in[lane];
    out[lane] = __shfl_sync(FULL_WARP, value, 5);
    out[32 + lane] = __shfl_xor_sync(FULL_WARP, value, 3);
    out[64 + lane] = __shfl_up_sync(FULL_WARP, value, 2);
    out[96 + lane] = __shfl_down_sync(FULL_WARP, value, 2);
    out[128 + lane] = __shfl_down_sync(FULL_WARP, value, 2, 8);
    out[160 + lane] = (int)__ballot_sync(FULL_WARP, value % 3 == 0);
    out[192 + lane] = __any_sync(FULL_WARP, value == 7);
    out[224 + lane] = __all_sync(FULL_WARP, value < 1000);
    out[256 + lane] = (int)__match_any_sync(FULL_WARP, value % 4);
    out[288 + lane] = __dp4a(value, in[(lane + 1) % 32], 100);
    if (lane < 16) out[320 + lane] = __shfl_xor_sync(0xffffu, value, 1);
}

// When each thread came, out [blocks, threads].
__global__ void arrivals(int* out, int* arrived) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(arrived, 1);
}

__global__ void votes(int* out, const int* in) {
    out[threadIdx.x] = __syncthreads_count(in[threadIdx.x] > 2);
    out[64 + threadIdx.x] = __syncthreads_or(in[threadIdx.x] > 62);
    out[128 + threadIdx.x] = __syncthreads_and(in[threadIdx.x] > 2);
}

// out [16, 8] = a [16, 16] b [16, 8]: both through shared memory, ldmatrix and mma.sync; b comes by its transpose.
template <class T>
__global__ void product(float* out, const T* a, const T* b) {
    SHARED_ARRAY(T, left, [16][16]);
    SHARED_ARRAY(T, right, [16][16]);
    const int lane = threadIdx.x, row = lane % 16, column = lane / 16 * 8;
    cp_async16(&left[row][column], a + row * 16 + column);
    cp_async16(&right[row][column], b + row * 8, column == 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    uint32_t fragments[4], columns[4];
    ldmatrix_x4<false>(fragments, &left[row][column]);
    ldmatrix_x4<true>(columns, &right[row][column]);
    const uint32_t pair[2] = {columns[0], columns[1]};
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_16816<is_bf16<T>::value>(sums, fragments, pair);
    for (int i = 0; i < 4; i++) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

__global__ void decode(float* half, float* bf16, float* e4m3, uint16_t* e4m3_as_bf16) {
    for (int i = threadIdx.x; i < 65536; i += blockDim.x) {
        half[i] = __half2float(__ushort_as_half((unsigned short)i));
        bf16[i] = __bfloat162float(__ushort_as_bfloat16((unsigned short)i));
        if (i < 256) e4m3[i] = e4m3_to_float((uint8_t)i);
        if (i < 256) e4m3_as_bf16[i] = (uint16_t)(e4m3x2_to_pair<__nv_bfloat16>((uint16_t)(i << 8)) >> 16);
    }
}

__global__ void encode(uint16_t* half, uint16_t* bf16, uint8_t* e4m3, const float* in, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        half[i] = __half_as_ushort(__float2half_rn(in[i]));
        bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
        e4m3[i] = float_to_e4m3(in[i]);
    }
}

template <class T>
__global__ void arithmetic(T* sums, T* products, T* fused, const T* a, const T* b, const T* c, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        sums[i] = __hadd(a[i], b[i]);
        products[i] = __hmul(a[i], b[i]);
        fused[i] = __hfma(a[i], b[i], c[i]);
    }
}

__global__ void reductions(float* sums, int* largest, const float* in) {
    SHARED_ARRAY(float, scratch, [32]);
    SHARED_ARRAY(int, integers, [32]);
    sums[threadIdx.x] = block_sum(in[threadIdx.x], scratch);
    largest[threadIdx.x] = block_max((int)in[threadIdx.x], integers);
}

__global__ void denormals(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x] * 0.5f; }
