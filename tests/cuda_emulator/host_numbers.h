// CUDA's number types, conversions and arithmetic on the host, bit by bit as the device has them.
// Approximate device functions (__expf, rsqrtf, ...) are the host's exact ones here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// ---- vector types ---------------------------------------------------------------------------------------------------

#define EMU_VECTOR2(TYPE, NAME)                          \
    struct alignas(2 * sizeof(TYPE)) NAME {              \
        TYPE x, y;                                       \
    };                                                   \
    inline NAME make_##NAME(TYPE x, TYPE y) { return {x, y}; }
#define EMU_VECTOR4(TYPE, NAME)                          \
    struct alignas(4 * sizeof(TYPE) < 16 ? 4 * sizeof(TYPE) : 16) NAME { \
        TYPE x, y, z, w;                                 \
    };                                                   \
    inline NAME make_##NAME(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
EMU_VECTOR2(float, float2)
EMU_VECTOR4(float, float4)
EMU_VECTOR2(int, int2)
EMU_VECTOR4(int, int4)
EMU_VECTOR2(unsigned, uint2)
EMU_VECTOR4(unsigned, uint4)
EMU_VECTOR2(unsigned short, ushort2)
EMU_VECTOR4(unsigned short, ushort4)
EMU_VECTOR4(signed char, char4)
EMU_VECTOR4(unsigned char, uchar4)
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// ---- bits and integers ----------------------------------------------------------------------------------------------

inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline int __float_as_int(float value) { return (int)__float_as_uint(value); }
inline float __int_as_float(int bits) { return __uint_as_float((uint32_t)bits); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1u) << (31 - i);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
// Bytes of b:a chosen by the four nibbles of `selector`; the nibble's top bit spreads the sign of the byte.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> (4 * i) & 15, byte = (unsigned)(bytes >> (8 * (nibble & 7))) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
inline int __dp4a(int a, int b, int sum) {
    unsigned total = (unsigned)sum;
    for (int i = 0; i < 4; i++)
        total += (unsigned)((int)(int8_t)((unsigned)a >> (8 * i)) * (int)(int8_t)((unsigned)b >> (8 * i)));
    return (int)total;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 4; i++) sum += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
    return sum;
}

// ---- float32 and float64: the names that say how they round ---------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN is 0

// Conversions to integers saturate, and NaN is 0.
namespace emu {
template <class Integer>
inline Integer saturated(double value) {
    constexpr Integer lowest = std::is_signed_v<Integer> ? (Integer)1 << (sizeof(Integer) * 8 - 1) : 0;
    constexpr Integer highest = (Integer)~lowest;
    return value != value ? 0 : value <= (double)lowest ? lowest : value >= (double)highest ? highest : (Integer)value;
}
}  // namespace emu
inline int __float2int_rn(float x) { return emu::saturated<int>(nearbyint((double)x)); }
inline int __float2int_rz(float x) { return emu::saturated<int>(trunc((double)x)); }
inline int __float2int_rd(float x) { return emu::saturated<int>(floor((double)x)); }
inline int __float2int_ru(float x) { return emu::saturated<int>(ceil((double)x)); }
inline unsigned __float2uint_rn(float x) { return emu::saturated<unsigned>(nearbyint((double)x)); }
inline unsigned __float2uint_rz(float x) { return emu::saturated<unsigned>(trunc((double)x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>)
        return std::fmin((std::common_type_t<A, B>)a, (std::common_type_t<A, B>)b);  // the number, where one is NaN
    else
        return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? a : b;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>)
        return std::fmax((std::common_type_t<A, B>)a, (std::common_type_t<A, B>)b);
    else
        return (std::common_type_t<A, B>)a > (std::common_type_t<A, B>)b ? a : b;
}

// ---- half and bfloat16 ----------------------------------------------------------------------------------------------

namespace emu {
inline float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half & 0x7c00;
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13, special = 0x7f800000 | bits;
    const uint32_t denormal = __float_as_uint((float)(int)(half & 0x3ff) * 0x1p-24f), normal = bits + (112u << 23);
    // Without branches, so that g++ makes vectors of it.
    return __uint_as_float(sign | (exponent == 0x7c00 ? special : exponent == 0 ? denormal : normal));
}
inline uint16_t float_to_half(float value) {
    const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520, half-way beyond the largest
    if (magnitude < 0x38800000)  // 2^-14: steps of 2^-24, which are the steps of float32 at 1/2
        return (uint16_t)(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}
inline float bf16_to_float(uint16_t value) { return __uint_as_float((uint32_t)value << 16); }
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// a * b + c to float32 with the last bit set where it is inexact: rounding that to 16 bits rounds once.
inline float fma_to_odd(float a, float b, float c) {
    const double product = (double)a * b, sum = product + c, part = sum - product;
    const double error = (product - (sum - part)) + (c - part);
    const float rounded = (float)sum;
    const bool below = (double)rounded < sum || ((double)rounded == sum && error > 0);
    const bool above = (double)rounded > sum || ((double)rounded == sum && error < 0);
    if ((!below && !above) || (__float_as_uint(rounded) & 1)) return rounded;
    return nextafterf(rounded, below ? INFINITY : -INFINITY);
}
}  // namespace emu

namespace emu {
struct HalfFormat {
    static uint16_t encode(float value) { return float_to_half(value); }
    static float decode(uint16_t bits) { return half_to_float(bits); }
};
struct Bf16Format {
    static uint16_t encode(float value) { return float_to_bf16(value); }
    static float decode(uint16_t bits) { return bf16_to_float(bits); }
};
template <class Format>
struct Narrow {
    uint16_t bits;
    Narrow() = default;
    Narrow(float value) : bits(Format::encode(value)) {}
    operator float() const { return Format::decode(bits); }
};
template <class N>
struct alignas(4) Pair {
    N x, y;
};
}  // namespace emu
typedef emu::Narrow<emu::HalfFormat> __half;
typedef emu::Narrow<emu::Bf16Format> __nv_bfloat16;
typedef emu::Pair<__half> __half2;
typedef emu::Pair<__nv_bfloat16> __nv_bfloat162;
typedef __half half;
typedef __half2 half2;

// Sums, differences, products and quotients are rounded to the type: float32 has bits enough that rounding twice is
// rounding once.
#define EMU_NARROW(RESULT, NAME_AND_PARAMETERS, ...) \
    template <class F>                               \
    inline RESULT NAME_AND_PARAMETERS {              \
        return __VA_ARGS__;                          \
    }
namespace emu {  // found by argument-dependent lookup
typedef float Float;
EMU_NARROW(Narrow<F>, operator+(Narrow<F> a, Narrow<F> b), Float(a) + Float(b))
EMU_NARROW(Narrow<F>, operator-(Narrow<F> a, Narrow<F> b), Float(a) - Float(b))
EMU_NARROW(Narrow<F>, operator*(Narrow<F> a, Narrow<F> b), Float(a) * Float(b))
EMU_NARROW(Narrow<F>, operator/(Narrow<F> a, Narrow<F> b), Float(a) / Float(b))
EMU_NARROW(Narrow<F>&, operator+=(Narrow<F>& a, Narrow<F> b), a = a + b)
EMU_NARROW(Narrow<F>&, operator*=(Narrow<F>& a, Narrow<F> b), a = a * b)
EMU_NARROW(Narrow<F>, __hadd(Narrow<F> a, Narrow<F> b), a + b)
EMU_NARROW(Narrow<F>, __hsub(Narrow<F> a, Narrow<F> b), a - b)
EMU_NARROW(Narrow<F>, __hmul(Narrow<F> a, Narrow<F> b), a * b)
EMU_NARROW(Narrow<F>, __hdiv(Narrow<F> a, Narrow<F> b), a / b)
EMU_NARROW(Narrow<F>, __hfma(Narrow<F> a, Narrow<F> b, Narrow<F> c), fma_to_odd(a, b, c))
EMU_NARROW(Narrow<F>, __hmax(Narrow<F> a, Narrow<F> b), fmaxf(a, b))
EMU_NARROW(Narrow<F>, __hmin(Narrow<F> a, Narrow<F> b), fminf(a, b))
EMU_NARROW(Pair<Narrow<F>>, __hadd2(Pair<Narrow<F>> a, Pair<Narrow<F>> b), {a.x + b.x, a.y + b.y})
EMU_NARROW(Pair<Narrow<F>>, __hsub2(Pair<Narrow<F>> a, Pair<Narrow<F>> b), {a.x - b.x, a.y - b.y})
EMU_NARROW(Pair<Narrow<F>>, __hmul2(Pair<Narrow<F>> a, Pair<Narrow<F>> b), {a.x * b.x, a.y * b.y})
EMU_NARROW(Pair<Narrow<F>>, __hmax2(Pair<Narrow<F>> a, Pair<Narrow<F>> b), {__hmax(a.x, b.x), __hmax(a.y, b.y)})
EMU_NARROW(Pair<Narrow<F>>, __hmin2(Pair<Narrow<F>> a, Pair<Narrow<F>> b), {__hmin(a.x, b.x), __hmin(a.y, b.y)})
EMU_NARROW(Pair<Narrow<F>>, __hfma2(Pair<Narrow<F>> a, Pair<Narrow<F>> b, Pair<Narrow<F>> c),
           {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)})
EMU_NARROW(float, __low2float(Pair<Narrow<F>> pair), pair.x)
EMU_NARROW(float, __high2float(Pair<Narrow<F>> pair), pair.y)
template <class F>
inline Narrow<F> operator-(Narrow<F> a) {
    a.bits ^= 0x8000;
    return a;
}
template <class N>
inline N with_bits(uint16_t bits) {
    N result;
    result.bits = bits;
    return result;
}
}  // namespace emu

inline float __half2float(__half value) { return value; }
inline __half __float2half(float value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 pair) { return {pair.x, pair.y}; }
inline __half2 __float2half2_rn(float value) { return {value, value}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return emu::with_bits<__half>(bits); }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {pair.x, pair.y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {value, value}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return emu::with_bits<__nv_bfloat16>(bits); }
