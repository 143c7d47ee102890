// The race checker. Kernels built with -fsanitize=thread call the hooks at the end of this file at every access;
// libtsan is not linked. Each element of an array that the kernel may write has a cell that remembers who wrote and who
// read it last; a new access must come after those by the rules of CUDA:
//
//   * __syncthreads orders all threads of a block: they count epochs;
//   * __syncwarp orders the lanes of its mask: each lane knows how far it has seen each other one (vector clocks);
//   * shuffles, votes, mma.sync and ldmatrix order nothing;
//   * blocks, and warps between two barriers, are ordered only by an atomic on one address, with a __threadfence before
//     it on the giving and after it on the taking side;
//   * a cp.async writes from its issue to the wait that completes it, and only for the thread that waited.
//
// It also reports reads of shared memory that nobody in the block wrote, accesses outside the arrays of the launch, and
// writes through what the kernel got as constant.
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <unordered_map>

#include "scheduler.h"

namespace emu {

bool race_checked;

namespace {

constexpr uint16_t MANY_WARPS = 0xffff;

// Blocks are numbered from 1 through all launches, so that a cell with another number is an old one.
struct Cell {
    const void *write_code, *read_code;
    uint32_t write_block, write_epoch, write_clock;
    uint32_t read_block, read_epoch, read_clock, read_lanes;  // the latest readers: lanes of one warp at one clock
    uint32_t earlier_block, earlier_epoch;                    // of readers in a block before
    uint16_t writer, read_warp;
    bool write_atomic, in_flight;                             // in_flight: a cp.async writes it
};

struct Region {
    uintptr_t start, end;
    uint32_t element_bytes;
    bool is_constant, is_shared;
    uint32_t argument;
    Cell* cells;
};

// An atomic by a thread of a block that has fenced: what it publishes.
struct Release {
    uint32_t block, epoch;
    uint16_t thread;
    std::shared_ptr<const std::vector<uint32_t>> fences;
};
// An atomic that may have seen the first `count` releases of an address.
struct Acquisition {
    const std::vector<Release>* releases;
    size_t count;
    uint16_t thread;
    uint32_t epoch, fence_epoch;
    bool fenced;
};

std::vector<Region> regions;                     // arguments, then the block's shared arrays
size_t num_arguments, last_region;
std::vector<Cell> shared_cells;
size_t shared_cells_used;
std::vector<std::pair<uintptr_t, uintptr_t>> modules;  // segments of libraries that kernels read: tables, literals

uint32_t block, epoch;
std::vector<uint32_t> seen;                      // [thread][lane of its warp]: how far it has seen that lane
std::vector<uint32_t> fences;                    // [thread]: 1 + the epoch of its last fence, 0 for none
bool any_fence;
std::vector<Acquisition> acquisitions;
std::unordered_map<const void*, std::vector<Release>> releases;

// ---- order ----------------------------------------------------------------------------------------------------------

// Whether `release` publishes what `thread` of its block did in epoch `when`.
bool publishes(const Release& release, uint16_t thread, uint32_t when) {
    const std::vector<uint32_t>& fenced = *release.fences;
    const uint32_t own = fenced[release.thread];
    if (thread == release.thread) return own > when;
    if (own && when + 1 < own) return true;      // a barrier, then the releasing thread's fence
    return when < release.epoch && thread < fenced.size() && fenced[thread] > when;  // its own fence, then a barrier
}

bool acquired(const Thread& me, uint32_t other_block, uint16_t thread, uint32_t when) {
    for (const Acquisition& acquisition : acquisitions) {
        const bool by_its_fence =
            acquisition.fenced && (me.number == acquisition.thread || epoch > acquisition.fence_epoch);
        const bool by_my_fence = fences[me.number] > acquisition.epoch + 1;
        if (!by_its_fence && !by_my_fence) continue;
        for (size_t i = 0; i < acquisition.count; i++) {
            const Release& release = (*acquisition.releases)[i];
            if (release.block == other_block && publishes(release, thread, when)) return true;
        }
    }
    return false;
}

bool ordered(const Thread& me, uint32_t other_block, uint16_t thread, uint32_t when, uint32_t clock) {
    if (other_block == block) {
        if (thread == me.number || when < epoch) return true;
        if (thread / 32 == me.warp && seen[me.number * 32 + thread % 32] >= clock) return true;
    }
    return acquired(me, other_block, thread, when);
}

// The first lane of the cell's readers that the running thread is not ordered after, -1 for none.
int unordered_reader(const Thread& me, const Cell& cell) {
    if (cell.read_block == block && cell.read_epoch < epoch) return -1;
    if (cell.read_warp == MANY_WARPS)
        return acquired(me, cell.read_block, MANY_WARPS, cell.read_epoch) ? -1 : 0;
    for (int lane = 0; lane < 32; lane++) {
        if (!(cell.read_lanes >> lane & 1)) continue;
        const uint16_t thread = (uint16_t)(cell.read_warp * 32 + lane);
        if (!ordered(me, cell.read_block, thread, cell.read_epoch, cell.read_clock)) return lane;
    }
    return -1;
}

void note_read(const Thread& me, Cell& cell, const void* code) {
    const uint32_t clock = seen[me.number * 32 + me.lane];
    const uint16_t warp = (uint16_t)me.warp;
    cell.read_code = code;
    if (cell.read_block != block || cell.read_epoch != epoch) {
        if (cell.read_block && cell.read_block != block)
            cell.earlier_block = cell.read_block, cell.earlier_epoch = cell.read_epoch;
        cell.read_block = block, cell.read_epoch = epoch, cell.read_warp = warp;
        cell.read_lanes = 0;
    } else if (cell.read_warp != warp) {
        cell.read_warp = MANY_WARPS;
    } else if (cell.read_clock != clock) {       // readers that I come after need not be remembered beside me
        for (int lane = 0; lane < 32; lane++)
            if (seen[me.number * 32 + lane] >= cell.read_clock) cell.read_lanes &= ~(1u << lane);
    }
    cell.read_lanes |= 1u << me.lane;
    cell.read_clock = clock;
}

// ---- regions --------------------------------------------------------------------------------------------------------

bool in_a_library(uintptr_t address) {
    for (const auto& [start, end] : modules)
        if (address >= start && address < end) return true;
    struct Search {
        uintptr_t address, start, end;
    } search{address, 0, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            Search& search = *(Search*)data;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
                if (info->dlpi_phdr[i].p_type == PT_LOAD && search.address >= start &&
                    search.address < start + info->dlpi_phdr[i].p_memsz) {
                    search.start = start, search.end = start + info->dlpi_phdr[i].p_memsz;
                    return 1;
                }
            }
            return 0;
        },
        &search);
    if (search.end) modules.push_back({search.start, search.end});
    return search.end != 0;
}

Region* find_region(uintptr_t address) {
    if (last_region < regions.size() && address >= regions[last_region].start && address < regions[last_region].end)
        return &regions[last_region];
    for (last_region = 0; last_region < regions.size(); last_region++)
        if (address >= regions[last_region].start && address < regions[last_region].end) return &regions[last_region];
    return nullptr;
}

// "shared memory" or "argument 2", with the byte.
const char* where(const Region& region, uintptr_t address) {
    static char text[96];
    if (region.is_shared)
        snprintf(text, sizeof text, "byte %zu of a shared array", (size_t)(address - region.start));
    else
        snprintf(text, sizeof text, "byte %zu of argument %u", (size_t)(address - region.start), region.argument);
    return text;
}

[[noreturn]] void report_outside(uintptr_t address, int bytes, bool write, const void* code) {
    const Region* nearest = nullptr;
    uintptr_t least = UINTPTR_MAX;
    for (const Region& region : regions) {
        const uintptr_t distance = address < region.start ? region.start - address : address - region.end;
        if (distance < least) least = distance, nearest = &region;
    }
    char beside[128] = "";
    if (nearest && least < 1 << 16) {
        const bool before = address < nearest->start;
        const char* array = nearest->is_shared ? "a shared array" : "argument";
        snprintf(beside, sizeof beside, ", %zu bytes %s %s", (size_t)least, before ? "before" : "past the end of",
                 array);
        if (!nearest->is_shared)
            snprintf(beside + strlen(beside), sizeof beside - strlen(beside), " %u", nearest->argument);
    }
    fault("%s of %d bytes outside the arrays of the launch%s%s", write ? "write" : "read", bytes, beside, place(code));
}

[[noreturn]] void report_race(const char* what, const Region& region, uintptr_t address, const char* other,
                              uint32_t other_block, int thread, const void* other_code, const void* code) {
    char other_place[512];
    snprintf(other_place, sizeof other_place, "%s", place(other_code));
    char who[64] = "several warps";
    if (thread >= 0) snprintf(who, sizeof who, "thread %d", thread);
    fault("race: %s of %s%s is not ordered with the %s by %s of %s%s", what, where(region, address), place(code), other,
          who, other_block == block ? "this block" : "another block", other_place);
}

// ---- accesses -------------------------------------------------------------------------------------------------------

enum class Access { read, write, atomic, issue, complete };  // the last two: a cp.async into shared memory

void check(const void* pointer, int bytes, Access access, const void* code) {
    Fiber* fiber = running_fiber();
    if (!fiber) return;
    const uintptr_t address = (uintptr_t)pointer, stack = (uintptr_t)fiber->stack;
    if (address >= stack && address < stack + STACK_BYTES) return;
    const bool writes = access != Access::read;
    Region* region = find_region(address);
    if (!region) {
        const auto& fibers = all_fibers();       // threadIdx and the like
        if (!writes && address >= (uintptr_t)fibers.data() && address < (uintptr_t)(fibers.data() + fibers.size()))
            return;
        if (in_a_library(address)) return;
        report_outside(address, bytes, writes, code);
    }
    if (address + (uintptr_t)bytes > region->end) report_outside(region->end, bytes, writes, code);
    if (region->is_constant) {
        if (writes) fault("write to %s, which the kernel gets as constant%s", where(*region, address), place(code));
        return;
    }
    const Thread& me = fiber->thread;
    const size_t first = (address - region->start) / region->element_bytes;
    const size_t last = (address + (uintptr_t)bytes - 1 - region->start) / region->element_bytes;
    for (size_t i = first; i <= last; i++) {
        Cell& cell = region->cells[i];
        const uintptr_t at = region->start + i * region->element_bytes;
        if (region->is_shared && cell.write_block != block && cell.read_block != block) cell = Cell{};
        if (cell.in_flight && access != Access::complete)
            report_race(writes ? "write" : "read", *region, at, "cp.async in flight", cell.write_block, cell.writer,
                        cell.write_code, code);
        if (region->is_shared && !writes && !cell.write_block)
            fault("read of uninitialised shared memory: %s%s", where(*region, at), place(code));
        const bool both_atomic = access == Access::atomic && cell.write_atomic;
        if (cell.write_block && !both_atomic && access != Access::complete &&
            !ordered(me, cell.write_block, cell.writer, cell.write_epoch, cell.write_clock))
            report_race(writes ? "write" : "read", *region, at, "write", cell.write_block, cell.writer, cell.write_code,
                        code);
        if (!writes) {
            note_read(me, cell, code);
            continue;
        }
        if (cell.read_block) {
            const int lane = unordered_reader(me, cell);
            if (lane >= 0)
                report_race("write", *region, at, "read", cell.read_block,
                            cell.read_warp == MANY_WARPS ? -1 : cell.read_warp * 32 + lane, cell.read_code, code);
        }
        if (cell.earlier_block && !acquired(me, cell.earlier_block, MANY_WARPS, cell.earlier_epoch))
            report_race("write", *region, at, "read", cell.earlier_block, -1, cell.read_code, code);
        cell = Cell{};
        cell.write_code = code;
        cell.write_block = block, cell.write_epoch = epoch, cell.write_clock = seen[me.number * 32 + me.lane];
        cell.writer = (uint16_t)me.number;
        cell.write_atomic = access == Access::atomic;
        cell.in_flight = access == Access::issue;
    }
}

}  // namespace

void race_begin_launch(const Launch& launch) {
    for (size_t i = 0; i < num_arguments; i++) free(regions[i].cells);
    regions.clear();
    releases.clear();
    std::vector<Array> arrays(launch.arrays, launch.arrays + launch.num_arrays);
    std::sort(arrays.begin(), arrays.end(), [](const Array& a, const Array& b) { return a.start < b.start; });
    for (const Array& array : arrays) {
        const uintptr_t start = (uintptr_t)array.start, end = start + array.bytes;
        if (start == end) continue;
        const uint32_t element_bytes = std::min(array.element_bytes, 4u);
        if (!regions.empty() && start < regions.back().end) {  // given twice, or a part of the array before
            Region& before = regions.back();
            before.end = std::max(before.end, end);
            before.is_constant = before.is_constant && array.is_constant;
            before.element_bytes = std::min(before.element_bytes, element_bytes);
        } else {
            regions.push_back({start, end, element_bytes, array.is_constant != 0, false, array.argument, nullptr});
        }
    }
    for (Region& region : regions)
        if (!region.is_constant)
            region.cells = (Cell*)calloc((region.end - region.start) / region.element_bytes + 1, sizeof(Cell));
    num_arguments = regions.size();
}

void race_begin_block(uint32_t, int num_threads) {
    block++;
    epoch = 0;
    regions.resize(num_arguments);
    shared_cells_used = 0;
    shared_cells.resize(256 * 1024);             // of any device's shared memory, byte for byte
    seen.assign((size_t)num_threads * 32, 0);
    for (int thread = 0; thread < num_threads; thread++) seen[thread * 32 + thread % 32] = 1;
    fences.assign((size_t)num_threads, 0);
    any_fence = false;
    acquisitions.clear();
}

void race_add_shared(char* start, size_t bytes, size_t element_bytes) {
    const uint32_t element = element_bytes == 2 || element_bytes == 4 ? (uint32_t)element_bytes : 1;
    Cell* cells = &shared_cells[shared_cells_used];
    shared_cells_used += bytes / element + 1;
    regions.push_back({(uintptr_t)start, (uintptr_t)start + bytes, element, false, true, 0, cells});
}

void race_block_barrier() { epoch++; }

void race_syncwarp(int warp, uint32_t mask) {
    uint32_t joined[32] = {};
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            for (int other = 0; other < 32; other++)
                joined[other] = std::max(joined[other], seen[(warp * 32 + lane) * 32 + other]);
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint32_t* mine = &seen[(warp * 32 + lane) * 32];
        std::copy(joined, joined + 32, mine);
        mine[lane]++;
    }
}

void race_fence() {
    const Thread& me = running_fiber()->thread;
    fences[me.number] = epoch + 1;
    any_fence = true;
    for (Acquisition& acquisition : acquisitions)
        if (acquisition.thread == me.number && !acquisition.fenced)
            acquisition.fenced = true, acquisition.fence_epoch = epoch;
}

void race_atomic(const void* address, int bytes, const void* code) {
    check(address, bytes, Access::atomic, code);
    const uint16_t me = (uint16_t)running_fiber()->thread.number;
    const auto found = releases.find(address);
    if (found != releases.end())
        acquisitions.push_back({&found->second, found->second.size(), me, epoch, 0, false});
    if (any_fence)
        releases[address].push_back({block, epoch, me, std::make_shared<const std::vector<uint32_t>>(fences)});
}

void race_copy_issued(const AsyncCopy& copy) {
    if (copy.bytes_read) check(copy.global, copy.bytes_read, Access::read, copy.code);
    check(copy.shared, copy.bytes, Access::issue, copy.code);
}

void race_copy_complete(const AsyncCopy& copy) {
    if (copy.bytes_read) check(copy.global, copy.bytes_read, Access::read, copy.code);
    check(copy.shared, copy.bytes, Access::complete, copy.code);
}

}  // namespace emu

// ---- what the compiler calls ----------------------------------------------------------------------------------------

using emu::Access;
#define CODE __builtin_return_address(0)
#define HOOKS(BYTES)                                                                                     \
    void __tsan_read##BYTES(void* p) { emu::check(p, BYTES, Access::read, CODE); }                       \
    void __tsan_write##BYTES(void* p) { emu::check(p, BYTES, Access::write, CODE); }                     \
    void __tsan_unaligned_read##BYTES(void* p) { emu::check(p, BYTES, Access::read, CODE); }             \
    void __tsan_unaligned_write##BYTES(void* p) { emu::check(p, BYTES, Access::write, CODE); }           \
    void __tsan_volatile_read##BYTES(void* p) { emu::check(p, BYTES, Access::read, CODE); }              \
    void __tsan_volatile_write##BYTES(void* p) { emu::check(p, BYTES, Access::write, CODE); }            \
    void __tsan_unaligned_volatile_read##BYTES(void* p) { emu::check(p, BYTES, Access::read, CODE); }    \
    void __tsan_unaligned_volatile_write##BYTES(void* p) { emu::check(p, BYTES, Access::write, CODE); }
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { emu::check(p, (int)bytes, Access::read, CODE); }
void __tsan_write_range(void* p, size_t bytes) { emu::check(p, (int)bytes, Access::write, CODE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
