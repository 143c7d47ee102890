// What the scheduler (cuda_on_host.cpp), the collectives (collectives.cpp) and the race checker (race_checker.cpp) know
// of one another.
#pragma once
#include <vector>

#include "cuda_on_host.h"

namespace emu {

enum class State { ready, at_barrier, in_collective, ended };

struct AsyncCopy {
    char* shared;
    const char* global;
    int bytes, bytes_read;
    const void* code;
};

struct Fiber {
    Thread thread;
    State state;
    int line;                       // of the barrier or collective it waits at
    Collective collective;
    uint32_t mask;
    char* stack;
    void* stack_pointer;
    void* asan_stack;               // ASan's own, while another fiber runs
    std::vector<AsyncCopy> copies;  // not yet waited for, in order
    std::vector<size_t> groups;     // how many of them precede the end of each committed group
};

// Lanes of one warp that wait for one another in a collective.
struct Meeting {
    uint32_t mask, arrived;
    Collective collective;
    int line;
    void* slots[32];
};
// Every lane of `mask` comes here with a slot; the last one does the work for all.
void meet(uint32_t mask, Collective collective, int line, void* slot, void (*work)(Meeting&));
bool copies_are_lazy();

const char* collective_name(Collective collective);
const std::vector<Fiber>& all_fibers();
Fiber* running_fiber();             // null outside a kernel

// Marks the launch as failed; the first message stays. NOTE: returns, and the kernel goes on to its next barrier.
void record_fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
// " at @library+0xoffset", which the launcher turns into file and line.
const char* place(const void* code);

// The race checker. A launch that is not `race_checked` calls none of these.
extern bool race_checked;
void race_begin_launch(const Launch& launch);
void race_begin_block(uint32_t block_number, int num_threads);
void race_add_shared(char* start, size_t bytes, size_t element_bytes);
void race_block_barrier();
void race_syncwarp(int warp, uint32_t mask);
void race_fence();
void race_atomic(const void* address, int bytes, const void* code);
void race_copy_issued(const AsyncCopy& copy);
void race_copy_complete(const AsyncCopy& copy);

constexpr size_t STACK_BYTES = 256 * 1024;

}  // namespace emu
