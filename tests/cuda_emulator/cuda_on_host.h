// CUDA C++ on the host: what a kernel's source needs so that g++ compiles it and one processor runs it.
//
// The blocks of a launch run one after another; inside a block every CUDA thread is a fiber, which runs to a barrier, a
// warp collective or its end. Which fiber goes on and which block comes next is an argument of the launch: a kernel
// without races gives the same bits in every order. cuda_on_host.cpp has the scheduler, collectives.cpp the warps,
// race_checker.cpp the shadow memory.
//
// Not shown here: speed, bank conflicts, the text of inline PTX, the last bits of approximate functions and of tensor
// cores, and blocks that wait for one another (they hang). Denormal float32 numbers become zero, as by -ftz=true.
#pragma once
#include <cstdio>
#include <utility>

#include "host_numbers.h"

#define __global__ static  // what a library does not export is not compiled
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(BYTES) __attribute__((aligned(BYTES)))
#define __grid_constant__

namespace emu {

// ---- what runs ------------------------------------------------------------------------------------------------------

struct Thread {
    uint3 index, block_index;
    dim3 block_size, grid_size;
    char* dynamic_shared;
    int number, warp, lane;
};
extern "C" Thread* emu_thread;  // the running one

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// One block's array for the SHARED_ARRAY whose key is given: fresh and full of 0xFF in every block.
void* shared_array(const void* key, size_t bytes, size_t element_bytes);

enum class Collective { syncwarp, shuffle, ballot, match, mma, ldmatrix };

enum class Vote { none, any, all, count };
int block_barrier(int line, Vote vote, bool predicate);
void syncwarp(uint32_t mask, int line);
uint64_t shuffle(uint32_t mask, uint64_t value, int source_lane, int line);
uint32_t ballot(uint32_t mask, bool predicate, int line);
uint32_t match_any(uint32_t mask, uint64_t value, int line);
void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16, int line);
void ldmatrix_x4_checked(uint32_t (&result)[4], const void* row, bool transposed, int line);

void cp_async(void* shared, const void* global, int bytes, int bytes_read);
void cp_async_commit();
void cp_async_wait(int groups);

// Atomics and fences: to the race checker they order what they order on the device, and no more.
void atomic_access(const void* address, int bytes, const void* code);
void fence();

inline void ldmatrix_x4(uint32_t (&result)[4], const void* row, bool transposed, int line) {
    if ((uintptr_t)row % 16) fault("line %d: ldmatrix of a row that is not aligned to 16 bytes", line);
    uint16_t seen = 0;  // an access in the kernel's own code, which the sanitizers see
    for (int i = 0; i < 8; i++) seen ^= ((const volatile uint16_t*)row)[i];
    (void)seen;
    ldmatrix_x4_checked(result, row, transposed, line);
}

template <class T>
inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T>
inline T shuffle_value(uint32_t mask, T value, int source_lane, int line) {
    const uint64_t bits = shuffle(mask, to_bits(value), source_lane, line);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

#if defined(__SANITIZE_THREAD__)
#define EMU_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#else
#define EMU_UNCHECKED __attribute__((noinline))
#endif
// One step for all that runs beside: fibers are never interrupted.
template <class T, class Change>
EMU_UNCHECKED T atomic(T* address, Change change) {
    atomic_access(address, sizeof(T), __builtin_return_address(0));
    const T old = *address;
    *address = change(old);
    return old;
}

}  // namespace emu

#define threadIdx (emu::emu_thread->index)
#define blockIdx (emu::emu_thread->block_index)
#define blockDim (emu::emu_thread->block_size)
#define gridDim (emu::emu_thread->grid_size)
#define warpSize 32

#define SHARED_ARRAY(TYPE, NAME, DIMENSIONS)     \
    typedef TYPE NAME##_type DIMENSIONS;         \
    static const char NAME##_key = 0;            \
    NAME##_type& NAME = *(NAME##_type*)emu::shared_array(&NAME##_key, sizeof(NAME##_type), sizeof(TYPE))
#define SHARED_DYNAMIC(TYPE, NAME) TYPE* NAME = (TYPE*)emu::emu_thread->dynamic_shared

// ---- barriers and warp collectives: `line` is the call's place, where all lanes must meet ---------------------------

#define EMU_LINE int line = __builtin_LINE()

inline void __syncthreads(EMU_LINE) { emu::block_barrier(line, emu::Vote::none, false); }
inline int __syncthreads_or(int predicate, EMU_LINE) {
    return emu::block_barrier(line, emu::Vote::any, predicate != 0);
}
inline int __syncthreads_and(int predicate, EMU_LINE) {
    return emu::block_barrier(line, emu::Vote::all, predicate != 0);
}
inline int __syncthreads_count(int predicate, EMU_LINE) {
    return emu::block_barrier(line, emu::Vote::count, predicate != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_LINE) { emu::syncwarp(mask, line); }
inline void __threadfence() { emu::fence(); }
inline void __threadfence_block() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_LINE) {
    const int lane = emu::emu_thread->lane;
    return emu::shuffle_value(mask, value, (lane & -width) | (source & (width - 1)), line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_LINE) {
    const int lane = emu::emu_thread->lane, source = lane ^ lane_mask;
    return emu::shuffle_value(mask, value, (source & -width) > (lane & -width) ? lane : source, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_LINE) {
    const int lane = emu::emu_thread->lane, inside = (lane & (width - 1)) + (int)delta;
    return emu::shuffle_value(mask, value, inside >= width ? lane : lane + (int)delta, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_LINE) {
    const int lane = emu::emu_thread->lane, inside = (lane & (width - 1)) - (int)delta;
    return emu::shuffle_value(mask, value, inside < 0 ? lane : lane - (int)delta, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_LINE) {
    return emu::ballot(mask, predicate != 0, line);
}
inline int __any_sync(unsigned mask, int predicate, EMU_LINE) { return emu::ballot(mask, predicate != 0, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, EMU_LINE) {
    return emu::ballot(mask, predicate != 0, line) == mask;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EMU_LINE) {
    return emu::match_any(mask, emu::to_bits(value), line);
}
template <class T>
inline T __reduce_add_sync(unsigned mask, T value, EMU_LINE) {
    T sum = 0;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) sum += emu::shuffle_value(mask, value, lane, line);
    return sum;
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T value, EMU_LINE) {
    T largest = value;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) largest = max(largest, emu::shuffle_value(mask, value, lane, line));
    return largest;
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T value, EMU_LINE) {
    T smallest = value;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) smallest = min(smallest, emu::shuffle_value(mask, value, lane, line));
    return smallest;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* address) {
    return *address;
}
template <class T>
inline T __ldcs(const T* address) {
    return *address;
}
template <class T>
inline T __ldcg(const T* address) {
    return *address;
}
template <class T>
inline void __stcs(T* address, T value) {
    *address = value;
}
template <class T>
inline T atomicAdd(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return (T)(old + value); });
}
template <class T>
inline T atomicSub(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return (T)(old - value); });
}
template <class T>
inline T atomicMax(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicMin(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomicOr(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return (T)(old | value); });
}
template <class T>
inline T atomicAnd(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return (T)(old & value); });
}
template <class T>
inline T atomicXor(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return (T)(old ^ value); });
}
template <class T>
inline T atomicExch(T* address, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T) { return value; });
}
template <class T>
inline T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
    return emu::atomic(address, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return emu::atomic(address, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}

// ---- a kernel's way out: its launch and its parameters' types by their NumPy names ----------------------------------

namespace emu {

struct Array {
    const char* start;
    uint64_t bytes;
    uint32_t element_bytes, is_constant, argument;
};
struct Launch {
    uint32_t grid[3], block[3], dynamic_shared_bytes;
    uint32_t order, seed, lazy_copies;
    uint32_t race_checked, num_arrays;  // arrays: all that the kernel may touch; only for the race checker
    const Array* arrays;
};
int run(const Launch& launch, void (*kernel)(void*), void* arguments);

template <class... A>
struct Call {
    void (*kernel)(A...);
    void* const* values;
    template <size_t... I>
    EMU_UNCHECKED void apply(std::index_sequence<I...>) {
        kernel(*(std::remove_reference_t<A>*)values[I]...);
    }
    EMU_UNCHECKED static void of(void* call) { ((Call*)call)->apply(std::index_sequence_for<A...>{}); }
};
template <class... A>
int start(const Launch& launch, void* const* values, void (*kernel)(A...)) {
    Call<A...> call{kernel, values};
    return run(launch, &Call<A...>::of, &call);
}

template <class T>
void add_type(char*& text) {
    if constexpr (std::is_pointer_v<T>) {
        typedef std::remove_pointer_t<T> Target;
        text = stpcpy(text, std::is_const_v<Target> ? "const*" : "*");
        add_type<std::remove_cv_t<Target>>(text);
    } else if constexpr (std::is_void_v<T>) {
        text = stpcpy(text, "void");
    } else if constexpr (std::is_same_v<T, __half>) {
        text = stpcpy(text, "float16");
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        text = stpcpy(text, "bfloat16");
    } else if constexpr (std::is_same_v<T, bool>) {
        text = stpcpy(text, "bool");
    } else if constexpr (std::is_arithmetic_v<T>) {
        const char* kind = std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
        text += sprintf(text, "%s%d", kind, (int)sizeof(T) * 8);
    } else {
        text += sprintf(text, "align%d", (int)alignof(T));
    }
}
template <class... A>
const char* signature(void (*)(A...)) {
    static char all[1024];
    char* text = all;
    ((add_type<std::remove_cv_t<A>>(text), *text++ = ' '), ...);
    *text = 0;
    return all;
}

}  // namespace emu

#define EMU_EXPORT(...)                                                                  \
    extern "C" int emu_start(const emu::Launch* launch, void* const* values) {           \
        return emu::start(*launch, values, __VA_ARGS__);                                 \
    }                                                                                    \
    extern "C" const char* emu_signature() { return emu::signature(__VA_ARGS__); }
