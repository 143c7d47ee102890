// What the lanes of a warp do together, asynchronous copies, and what UBSan finds.
#include <algorithm>

#include "scheduler.h"

extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void* start, size_t bytes);

namespace emu {

namespace {

// ---- the work of a collective, done by the last lane for all --------------------------------------------------------

struct ShuffleSlot {
    uint64_t value, result;
    int source;
};

void exchange(Meeting& meeting) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(meeting.mask >> lane & 1)) continue;
        ShuffleSlot& slot = *(ShuffleSlot*)meeting.slots[lane];
        const int source = slot.source >= 0 && slot.source < 32 ? slot.source : lane;
        if (!(meeting.mask >> source & 1))
            fault("line %d: lane %d shuffles from lane %d, which is not in the mask %08x", meeting.line, lane, source,
                  meeting.mask);
        slot.result = ((ShuffleSlot*)meeting.slots[source])->value;
    }
}

struct VoteSlot {
    uint64_t value;
    uint32_t result;
};

void collect_votes(Meeting& meeting) {
    uint32_t result = 0;
    for (int lane = 0; lane < 32; lane++)
        if (meeting.mask >> lane & 1) result |= (uint32_t)((VoteSlot*)meeting.slots[lane])->value << lane;
    for (int lane = 0; lane < 32; lane++)
        if (meeting.mask >> lane & 1) ((VoteSlot*)meeting.slots[lane])->result = result;
}

void match(Meeting& meeting) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(meeting.mask >> lane & 1)) continue;
        VoteSlot& slot = *(VoteSlot*)meeting.slots[lane];
        slot.result = 0;
        for (int other = 0; other < 32; other++)
            if ((meeting.mask >> other & 1) && ((VoteSlot*)meeting.slots[other])->value == slot.value)
                slot.result |= 1u << other;
    }
}

void order_memory(Meeting& meeting) {            // the only collective that does
    if (race_checked) race_syncwarp(running_fiber()->thread.warp, meeting.mask);
}

struct MmaSlot {
    float* d;
    const uint32_t *a, *b;
};

// sums = a b, by k in order.
__attribute__((target_clones("avx2", "default"))) void matrix_product(float (&sums)[16][8], const float (&a)[16][16],
                                                                      const float (&b)[16][8]) {
    for (int row = 0; row < 16; row++) {
        float total[8] = {};
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) total[column] += a[row][k] * b[k][column];
        memcpy(sums[row], total, sizeof total);
    }
}

template <float (*decode)(uint16_t)>
void multiply(Meeting& meeting) {
    uint16_t a_bits[16][16], b_bits[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const MmaSlot& slot = *(const MmaSlot*)meeting.slots[lane];
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; i++) memcpy(&a_bits[group + i % 2 * 8][pair + i / 2 * 8], &slot.a[i], 4);
        for (int i = 0; i < 2; i++) {
            b_bits[pair + i * 8][group] = (uint16_t)slot.b[i];
            b_bits[pair + i * 8 + 1][group] = (uint16_t)(slot.b[i] >> 16);
        }
    }
    float a[16][16], b[16][8], sums[16][8];
    for (int k = 0; k < 16; k++) {
        for (int i = 0; i < 16; i++) a[k][i] = decode(a_bits[k][i]);
        for (int i = 0; i < 8; i++) b[k][i] = decode(b_bits[k][i]);
    }
    matrix_product(sums, a, b);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            ((MmaSlot*)meeting.slots[lane])->d[i] += sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

struct MatrixSlot {
    const uint16_t* row;
    uint32_t* result;
    bool transposed;
};

void load_matrices(Meeting& meeting) {
    for (int lane = 0; lane < 32; lane++) {
        const MatrixSlot& slot = *(const MatrixSlot*)meeting.slots[lane];
        for (int matrix = 0; matrix < 4; matrix++) {
            uint16_t values[2];
            for (int i = 0; i < 2; i++) {
                int row = lane / 4, column = lane % 4 * 2 + i;
                if (slot.transposed) std::swap(row, column);
                values[i] = ((const MatrixSlot*)meeting.slots[matrix * 8 + row])->row[column];
            }
            slot.result[matrix] = (uint32_t)values[1] << 16 | values[0];
        }
    }
}

}  // namespace

const char* collective_name(Collective collective) {
    static const char* const names[] = {"__syncwarp",       "a shuffle", "a vote",
                                        "__match_any_sync", "mma.sync",  "ldmatrix"};
    return names[(int)collective];
}

void syncwarp(uint32_t mask, int line) { meet(mask, Collective::syncwarp, line, nullptr, order_memory); }

uint64_t shuffle(uint32_t mask, uint64_t value, int source_lane, int line) {
    ShuffleSlot slot{value, 0, source_lane};
    meet(mask, Collective::shuffle, line, &slot, exchange);
    return slot.result;
}

uint32_t ballot(uint32_t mask, bool predicate, int line) {
    VoteSlot slot{predicate, 0};
    meet(mask, Collective::ballot, line, &slot, collect_votes);
    return slot.result;
}

uint32_t match_any(uint32_t mask, uint64_t value, int line) {
    VoteSlot slot{value, 0};
    meet(mask, Collective::match, line, &slot, match);
    return slot.result;
}

void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16, int line) {
    MmaSlot slot{d, a, b};
    meet(0xffffffffu, Collective::mma, line, &slot, bf16 ? multiply<bf16_to_float> : multiply<half_to_float>);
}

void ldmatrix_x4_checked(uint32_t (&result)[4], const void* row, bool transposed, int line) {
    MatrixSlot slot{(const uint16_t*)row, result, transposed};
    meet(0xffffffffu, Collective::ldmatrix, line, &slot, load_matrices);
}

// ---- asynchronous copies --------------------------------------------------------------------------------------------
// At once, which finds a buffer that is overwritten while others read it, or as late as the waits allow, which finds a
// wait that is missing or too weak.

static void copy_now(const AsyncCopy& copy) {
    if (__asan_region_is_poisoned && (__asan_region_is_poisoned((void*)copy.global, (size_t)copy.bytes_read) ||
                         __asan_region_is_poisoned(copy.shared, (size_t)copy.bytes)))
        fault("cp.async outside its arrays%s", place(copy.code));
    memcpy(copy.shared, copy.global, (size_t)copy.bytes_read);
    memset(copy.shared + copy.bytes_read, 0, (size_t)(copy.bytes - copy.bytes_read));
}

void cp_async(void* shared, const void* global, int bytes, int bytes_read) {
    const void* code = __builtin_return_address(0);
    if (((uintptr_t)shared | (uintptr_t)global) % (uintptr_t)bytes)
        fault("cp.async of %d bytes that is not aligned to them%s", bytes, place(code));
    const AsyncCopy copy{(char*)shared, (const char*)global, bytes, bytes_read, code};
    if (race_checked) race_copy_issued(copy);
    if (!copies_are_lazy()) copy_now(copy);
    running_fiber()->copies.push_back(copy);
}

void cp_async_commit() { running_fiber()->groups.push_back(running_fiber()->copies.size()); }

void cp_async_wait(int num_groups) {
    std::vector<AsyncCopy>& copies = running_fiber()->copies;
    std::vector<size_t>& groups = running_fiber()->groups;
    if ((int)groups.size() <= num_groups) return;
    const size_t num_ended = groups.size() - (size_t)num_groups, num_copies = groups[num_ended - 1];
    for (size_t i = 0; i < num_copies; i++) {
        if (race_checked) race_copy_complete(copies[i]);
        if (copies_are_lazy()) copy_now(copies[i]);
    }
    copies.erase(copies.begin(), copies.begin() + (long)num_copies);
    groups.erase(groups.begin(), groups.begin() + (long)num_ended);
    for (size_t& end : groups) end -= num_copies;
}

void atomic_access(const void* address, int bytes, const void* code) {
    if ((uintptr_t)address % (uintptr_t)bytes)
        fault("atomic access of %d bytes that is not aligned to them%s", bytes, place(code));
    if (race_checked) race_atomic(address, bytes, code);
}

void fence() {
    if (race_checked) race_fence();
}

}  // namespace emu

// ---- UBSan: the compiler's calls come here, libubsan is not linked --------------------------------------------------

namespace {

struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
struct TypeMismatch {
    SourceLocation location;
    const void* type;
    uint8_t log_alignment, kind;
};

void report(const SourceLocation* location, const char* what) {
    emu::fault("undefined behaviour: %s at %s:%u", what, location->file, location->line);
}

}  // namespace

// Every kind's data begins with the place in the source; the other parameters are not looked at.
#define UNDEFINED(NAME, WHAT) \
    void __ubsan_handle_##NAME(const SourceLocation* location) { report(location, WHAT); }
extern "C" {
void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t pointer) {
    const bool misaligned = pointer && (pointer & (((uintptr_t)1 << data->log_alignment) - 1));
    report(&data->location, !pointer ? "access through a null pointer"
                            : misaligned ? "misaligned access" : "access outside the object");
}
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(shift_out_of_bounds, "shift by more than the type has bits")
UNDEFINED(add_overflow, "signed overflow of an addition")
UNDEFINED(sub_overflow, "signed overflow of a subtraction")
UNDEFINED(mul_overflow, "signed overflow of a product")
UNDEFINED(negate_overflow, "signed overflow of a negation")
UNDEFINED(divrem_overflow, "division by zero or overflow of a division")
UNDEFINED(float_cast_overflow, "number outside the integer type that it is converted to")
UNDEFINED(load_invalid_value, "value that the type does not have")
UNDEFINED(pointer_overflow, "overflow of pointer arithmetic")
UNDEFINED(builtin_unreachable, "end of what cannot be reached")
UNDEFINED(missing_return, "end of a function that must return a value")
UNDEFINED(vla_bound_not_positive, "array of no elements")
UNDEFINED(nonnull_arg, "null where the function takes none")
UNDEFINED(invalid_builtin, "zero given to a bit scan")
}
