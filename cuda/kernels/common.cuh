// What all kernels share: the few places where a build for the device and one for the emulator differ, conversions,
// 16-byte accesses, reductions in a fixed order, and wrappers round cp.async, ldmatrix and mma.sync.
//
// In the emulator (tests/cuda_emulator) every `SHARED_ARRAY` is fresh and poisoned in each block, and a warp collective
// is known by the source line that calls it: at most one on a line. CALL_SITE hands the line of the caller on.
#if defined(__CUDACC_RTC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
// SHARED_ARRAY(float, sums, [4][32]); SHARED_DYNAMIC once in a kernel: the launch says how large.
#define SHARED_ARRAY(TYPE, NAME, DIMENSIONS) __shared__ __align__(16) TYPE NAME DIMENSIONS
#define SHARED_DYNAMIC(TYPE, NAME)                                   \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    TYPE* NAME = reinterpret_cast<TYPE*>(dynamic_shared)
#define CALL_SITE
#define FROM_CALL_SITE
#define SAME_CALL_SITE
#else
#include "cuda_on_host.h"
#define CALL_SITE , int line = __builtin_LINE()
#define FROM_CALL_SITE , 32, line  // to a shuffle
#define SAME_CALL_SITE , line  // to another function that has one
#endif

#define DEV __device__ __forceinline__
#define FULL_WARP 0xffffffffu
#define NEG_INF __int_as_float((int)0xff800000)

// ---- asynchronous copies, global to shared --------------------------------------------------------------------------

// 16 bytes, both ends aligned to 16; zeros, and nothing is read, where !wanted.
DEV void cp_async16(void* shared, const void* global, bool wanted = true) {
#if defined(__CUDA_ARCH__)
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    int bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#else
    emu::cp_async(shared, global, 16, wanted ? 16 : 0);
#endif
}

// Ends this thread's group of copies.
DEV void cp_async_commit() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#else
    emu::cp_async_commit();
#endif
}

// Waits until at most GROUPS of this thread's latest groups are under way. Other threads need a barrier besides.
template <int GROUPS>
DEV void cp_async_wait() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_group %0;\n" ::"n"(GROUPS) : "memory");
#else
    emu::cp_async_wait(GROUPS);
#endif
}

// ---- matrix fragments -----------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements from shared memory: `row` of lane 8m + r is row r of matrix m, 16 aligned bytes.
// Lane l gets elements (l / 4, 2 (l % 4)) and the next of each, or with TRANSPOSED those of the transposed matrix.
template <bool TRANSPOSED>
DEV void ldmatrix_x4(uint32_t (&result)[4], const void* row CALL_SITE) {
#if defined(__CUDA_ARCH__)
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                     : "r"(address)
                     : "memory");
#else
    emu::ldmatrix_x4(result, row, TRANSPOSED, line);
#endif
}

// d [16, 8] += a [16, 16] b [16, 8], float32 sums of bfloat16 or half products. With g = lane / 4 and t = lane % 4:
// a[i] holds row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next; b[i] rows 2t + 8i and the next of column g;
// d[i] row g + 8 (i / 2), column 2t + i % 2. Source: PTX ISA, "Matrix Fragments for mma.m16n8k16".
template <bool BF16>
DEV void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] CALL_SITE) {
#if defined(__CUDA_ARCH__)
    if (BF16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    emu::mma_16816(d, a, b, BF16, line);
#endif
}

// The same onto zeros: d = a b.
template <bool BF16>
DEV void mma_16816_from_zero(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] CALL_SITE) {
#if defined(__CUDA_ARCH__)
    if (BF16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
#else
    for (int i = 0; i < 4; i++) d[i] = 0.0f;
    emu::mma_16816(d, a, b, BF16, line);
#endif
}

// ---- 16-bit floats: T is __nv_bfloat16 or __half; a pair is one 32-bit register, the first in the low half -----------

template <class T>
struct is_bf16;
template <>
struct is_bf16<__nv_bfloat16> {
    static constexpr bool value = true;
};
template <>
struct is_bf16<__half> {
    static constexpr bool value = false;
};

DEV float to_float(float value) { return value; }
DEV float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
DEV float to_float(__half value) { return __half2float(value); }

// To nearest, ties to even.
template <class T>
DEV T from_float(float value);
template <>
DEV float from_float<float>(float value) {
    return value;
}
template <>
DEV __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
DEV __half from_float<__half>(float value) {
    return __float2half_rn(value);
}

DEV float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
DEV float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEV uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

DEV __half2 as_half2(uint32_t pair) {
    __half2 result;
    memcpy(&result, &pair, 4);
    return result;
}
DEV uint32_t half2_bits(__half2 pair) {
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

template <class T>
DEV uint32_t pack_pair(float low, float high) {
    if constexpr (is_bf16<T>::value)
        return pack_bf16(low, high);
    else
        return half2_bits(__floats2half2_rn(low, high));
}

template <class T>
DEV float2 unpack_pair(uint32_t pair) {
    if constexpr (is_bf16<T>::value)
        return make_float2(bf16_lo(pair), bf16_hi(pair));
    else
        return __half22float2(as_half2(pair));
}

// (value & mask) | bits and (value & mask) ^ bits, as one instruction where the compiler, given constants, takes two.
DEV uint32_t and_or(uint32_t value, uint32_t mask, uint32_t bits) {
#if defined(__CUDA_ARCH__)
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
    return result;
#else
    return (value & mask) | bits;
#endif
}
DEV uint32_t and_xor(uint32_t value, uint32_t mask, uint32_t bits) {
#if defined(__CUDA_ARCH__)
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;\n" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
    return result;
#else
    return (value & mask) ^ bits;
#endif
}

// Element by element, rounded to T.
template <class T>
DEV uint32_t subtract_pairs(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t bits;
    if constexpr (is_bf16<T>::value) {
        __nv_bfloat162 x, y;
        memcpy(&x, &a, 4);
        memcpy(&y, &b, 4);
        x = __hsub2(x, y);
        memcpy(&bits, &x, 4);
    } else {
        bits = half2_bits(__hsub2(as_half2(a), as_half2(b)));
    }
    return bits;
#else
    const float2 x = unpack_pair<T>(a), y = unpack_pair<T>(b);
    return pack_pair<T>(x.x - y.x, x.y - y.y);
#endif
}

// ---- 16-byte accesses, aligned to 16 --------------------------------------------------------------------------------

DEV uint4 load16(const void* from) { return *reinterpret_cast<const uint4*>(from); }
DEV void store16(void* to, uint4 value) { *reinterpret_cast<uint4*>(to) = value; }

// Eight of T, or as many float32: `load8(values, pointer)` and back; rounding to nearest, ties to even.
template <class T>
DEV void load8(float (&values)[8], const T* from) {
    uint4 raw = load16(from);
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 two = unpack_pair<T>(pairs[i]);
        values[2 * i] = two.x;
        values[2 * i + 1] = two.y;
    }
}
template <>
DEV void load8<float>(float (&values)[8], const float* from) {
    float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

template <class T>
DEV void store8(T* to, const float (&values)[8]) {
    store16(to, make_uint4(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                           pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7])));
}
template <>
DEV void store8<float>(float* to, const float (&values)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// ---- fp8 e4m3 (4 bits of exponent, bias 7, 3 of fraction; no infinity, NaN is 0x7f and 0xff) ------------------------
// Source: OCP 8-bit Floating Point Specification. Processors from sm_89 convert; the rest gets the same bits here.

// To nearest, ties to even; beyond 448, and infinity, 448; NaN is 0x7f.
DEV uint8_t float_to_e4m3(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(0.0f), "f"(value));
    return (uint8_t)pair;
#else
    uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude >= 0x43e00000) return (uint8_t)(sign | 0x7e);  // 448
    if (magnitude < 0x3c800000)  // 2^-6: steps of 2^-9, which are the steps of float32 at 2^14
        return (uint8_t)(sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000));
    uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    return (uint8_t)(sign | (rounded - (120u << 23)) >> 20);
#endif
}

// Two e4m3 as two halves: exact.
DEV uint32_t e4m3x2_to_half2(uint16_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(pair));
    return halves;
#else
    uint32_t spread = (pair & 0xffu) | (pair & 0xff00u) << 8;
    uint32_t halves = (spread & 0x800080u) << 8 | (spread & 0x7f007fu) << 7;     // half's bias is larger by 8
    uint32_t scaled = half2_bits(__hmul2(as_half2(halves), as_half2(0x5c005c00u)));  // 256
    if ((spread & 0x7fu) == 0x7fu) scaled |= 0x7fffu;
    if ((spread & 0x7f0000u) == 0x7f0000u) scaled |= 0x7fff0000u;
    return scaled;
#endif
}

DEV float e4m3_to_float(uint8_t value) { return __half22float2(as_half2(e4m3x2_to_half2(value))).x; }

// Two e4m3 as a pair of T: exact.
template <class T>
DEV uint32_t e4m3x2_to_pair(uint16_t pair) {
    uint32_t halves = e4m3x2_to_half2(pair);
    if constexpr (is_bf16<T>::value) {
        float2 two = __half22float2(as_half2(halves));
        return pack_bf16(two.x, two.y);
    } else {
        return halves;
    }
}

// ---- int8 ----------------------------------------------------------------------------------------------------------

// Four int8 as two pairs of T, the lowest byte first: exact.
template <class T>
DEV void int8x4_to_pairs(uint32_t (&pairs)[2], uint32_t codes) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (is_bf16<T>::value) {  // 128 + the lower 7 bits, less 128 or, where the sign is set, 256
            const uint32_t spread = __byte_perm(codes, 0u, i == 0 ? 0x4140 : 0x4342);
            const uint32_t low = (spread & 0x007f007fu) | 0x43004300u, less = (spread & 0x00800080u) | 0xc300c300u;
#if defined(__CUDA_ARCH__)
            asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(pairs[i]) : "r"(low), "r"(0x3f803f80u), "r"(less));
#else
            pairs[i] = pack_bf16(bf16_lo(low) + bf16_lo(less), bf16_hi(low) + bf16_hi(less));
#endif
        } else {  // 1024 + (128 + code), less 1152
            const uint32_t spread = __byte_perm(codes ^ 0x80808080u, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
            pairs[i] = half2_bits(__hsub2(as_half2(spread), as_half2(0x64806480u)));
        }
    }
}

// ---- reductions: one order, whatever runs first ---------------------------------------------------------------------

// Of the 32 lanes, by halves of the distance: every lane gets the same bits, since a + b = b + a.
template <class V>
DEV V warp_sum(V value CALL_SITE) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
        value += __shfl_xor_sync(FULL_WARP, value, distance FROM_CALL_SITE);
    return value;
}

template <class V>
DEV V warp_max(V value CALL_SITE) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
        value = max(value, __shfl_xor_sync(FULL_WARP, value, distance FROM_CALL_SITE));
    return value;
}

// What the warps of a one-dimensional block have found, merged by their numbers. Every thread calls it; `scratch` is
// shared memory for 32 values and is free again on return.
template <class V, class Merge>
DEV V merge_warps(V value, V* scratch, Merge merge) {
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) scratch[warp] = value;
    __syncthreads();
    V merged = scratch[0];
    for (int i = 1; i < num_warps; i++) merged = merge(merged, scratch[i]);
    __syncthreads();
    return merged;
}

template <class V>
DEV V block_sum(V value, V* scratch CALL_SITE) {
    return merge_warps(warp_sum(value SAME_CALL_SITE), scratch, [](V a, V b) { return a + b; });
}

template <class V>
DEV V block_max(V value, V* scratch CALL_SITE) {
    return merge_warps(warp_max(value SAME_CALL_SITE), scratch, [](V a, V b) { return max(a, b); });
}

// The order in which a matmul adds the sums of the four quarters of K, in every kernel that has one.
DEV float sum_quarters(float first, float second, float third, float fourth) {
    return ((first + second) + third) + fourth;
}

// ---- order and chance -----------------------------------------------------------------------------------------------

// Unsigned integers in the order of the numbers; -0 is 0. NOTE: floats are not compared, since the device may take
// those below the normal ones for 0.
DEV uint32_t order_key(float value) {
    uint32_t bits = __float_as_uint(value);
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEV float float_of(uint32_t order_key) {
    return __uint_as_float(order_key & 0x80000000u ? order_key & 0x7fffffffu : ~order_key);
}

// Philox4x32-10 of counter (position, SAMPLE, choice, 0) and key `seed`: 53 random bits, as in cuda/philox.py.
DEV uint64_t random_bits(uint64_t seed, int choice, int position) {
    uint32_t counter[4] = {(uint32_t)position, 0u, (uint32_t)choice, 0u};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = (uint64_t)counter[0] * 0xD2511F53u, product2 = (uint64_t)counter[2] * 0xCD9E8D57u;
        counter[0] = (uint32_t)(product2 >> 32) ^ counter[1] ^ key[0];
        counter[2] = (uint32_t)(product0 >> 32) ^ counter[3] ^ key[1];
        counter[1] = (uint32_t)product2;
        counter[3] = (uint32_t)product0;
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (uint64_t)counter[0] << 21 | counter[1] >> 11;
}

// The integer part of a b / 2^53. a < 2^53, b < 2^63
DEV uint64_t scale_down(uint64_t a, uint64_t b) { return (uint64_t)__umul64hi(a, b) << 11 | a * b >> 53; }
