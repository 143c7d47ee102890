// The scheduler: fibers, barriers, meetings of lanes, shared memory, blocks. Never instrumented; only kernels are.
#include <dlfcn.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>

#include "scheduler.h"

#if !defined(__x86_64__)
#error "switch_stack is written for x86-64"
#endif

// Of libasan where the process has it, else null.
#define WEAK __attribute__((weak))
extern "C" {
WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
WEAK void __asan_unpoison_memory_region(const volatile void* start, size_t bytes);
WEAK void __asan_set_error_report_callback(void (*callback)(const char* report));
}

namespace emu {

extern "C" {
Thread* emu_thread;
}

namespace {

constexpr size_t SHARED_GAP = 128;              // between two shared arrays: nobody's
constexpr size_t MOST_SHARED_BYTES = 227 * 1024;  // of any device

struct Warp {
    Meeting meetings[32];
    int num_meetings;
};
struct SharedArray {
    const void* key;
    char* start;
};

Launch launch;
void (*kernel)(void*);
void* kernel_arguments;
char error[4096];
bool failed, abandoned_stacks;

std::vector<Fiber> fibers;
Fiber main_fiber;                                // the caller of `run`
Fiber* running;
const void* main_stack_bottom;
size_t main_stack_bytes;
std::vector<char*> stacks;

int num_threads, num_live, num_arrived, barrier_line, votes, last_votes;
std::vector<Warp> warps;
std::vector<int> sweep;                          // the order of the fibers, and where we are in it
size_t sweep_position;
bool sweep_ran;
uint64_t random_state;

char* shared_memory;                             // reused by every block, except under ASan
size_t shared_used, shared_bytes, most_shared_bytes;
std::vector<SharedArray> shared_arrays;
std::vector<char*> shared_allocations;

bool under_asan() { return __sanitizer_start_switch_fiber != nullptr; }

uint32_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

void shuffle_order(std::vector<int>& order) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
}

void make_order(std::vector<int>& order, size_t count) {
    order.resize(count);
    for (size_t i = 0; i < count; i++) order[i] = (int)(launch.order == 1 ? count - 1 - i : i);
    if (launch.order >= 2) shuffle_order(order);
}

// ---- fibers ---------------------------------------------------------------------------------------------------------

extern "C" void emu_switch_stack(void** save_old, void* new_stack);
asm(R"(
    .text
    .type emu_switch_stack, @function
emu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emu_switch_stack, .-emu_switch_stack
)");

// After every switch, on the new stack.
void arrived(Fiber* me) {
    if (!under_asan()) return;
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(me->asan_stack, &bottom, &bytes);
    if (!main_stack_bottom) main_stack_bottom = bottom, main_stack_bytes = bytes;  // the first to come, from `run`
}

void switch_to(Fiber* next) {
    Fiber* me = running;
    running = next;
    emu_thread = &next->thread;
    if (under_asan())
        __sanitizer_start_switch_fiber(me->state == State::ended ? nullptr : &me->asan_stack,
                                       next == &main_fiber ? main_stack_bottom : next->stack,
                                       next == &main_fiber ? main_stack_bytes : STACK_BYTES);
    emu_switch_stack(&me->stack_pointer, next->stack_pointer);
    arrived(me);
}

void report_deadlock() {
    char waiting[2048];
    int length = 0, num_groups = 0;
    for (int first = 0, last; first < num_threads; first = last + 1) {
        const Fiber& fiber = fibers[first];
        last = first;
        while (last + 1 < num_threads && fibers[last + 1].state == fiber.state && fibers[last + 1].line == fiber.line)
            last++;
        if (fiber.state == State::ended || num_groups++ == 8) continue;
        length += snprintf(waiting + length, sizeof waiting - length, ", threads %d-%d at %s of line %d", first, last,
                           fiber.state == State::at_barrier ? "__syncthreads" : collective_name(fiber.collective),
                           fiber.line);
        if (fiber.state == State::in_collective)
            length += snprintf(waiting + length, sizeof waiting - length, " with mask %08x", fiber.mask);
    }
    const uint3 block = fibers[0].thread.block_index;
    record_fault("block (%u,%u,%u): deadlock: %d of %d threads have ended%s", block.x, block.y, block.z,
                 num_threads - num_live, num_threads, waiting);
}

// The next ready fiber in the launch's order, `main_fiber` where none is left or the launch has failed.
Fiber* next_fiber() {
    while (!failed) {
        while (sweep_position < sweep.size()) {
            Fiber& fiber = fibers[sweep[sweep_position++]];
            if (fiber.state == State::ready) {
                sweep_ran = true;
                return &fiber;
            }
        }
        if (num_live == 0) break;
        if (!sweep_ran) report_deadlock();
        sweep_position = 0;
        sweep_ran = false;
        if (launch.order >= 2) shuffle_order(sweep);
    }
    return &main_fiber;
}

void let_others_run() {
    Fiber* next = next_fiber();
    if (next != running) switch_to(next);
}

[[noreturn]] void leave() {
    switch_to(&main_fiber);
    abort();
}

extern "C" void emu_fiber_main() {
    arrived(running);
    kernel(kernel_arguments);
    if (!running->copies.empty()) fault("ends with cp.async copies that it never waited for");
    running->state = State::ended;
    num_live--;
    let_others_run();
    abort();
}

// A fresh fiber that will begin in emu_fiber_main. The tops of the stacks are spread over the cache's sets.
void prepare(Fiber& fiber) {
    char* top = fiber.stack + STACK_BYTES - 64 - fiber.thread.number % 64 * 576;
    void** pointer = (void**)top;
    *--pointer = nullptr;                        // emu_fiber_main's return address, and the stack's alignment
    *--pointer = (void*)&emu_fiber_main;
    for (int i = 0; i < 6; i++) *--pointer = nullptr;
    fiber.stack_pointer = pointer;
    fiber.state = State::ready;
    fiber.asan_stack = nullptr;
    fiber.copies.clear();
    fiber.groups.clear();
}

// ---- shared memory and blocks ---------------------------------------------------------------------------------------

// Fresh and poisoned: 0xFF is NaN as float32, half and bfloat16, -1 as an integer.
char* take_shared(size_t bytes, size_t element_bytes) {
    char* start;
    shared_bytes += bytes;
    if (shared_bytes > MOST_SHARED_BYTES) fault("%zu bytes of shared memory, more than any device has", shared_bytes);
    if (under_asan()) {                          // with ASan's redzones, as an allocation of its own
        if (posix_memalign((void**)&start, 128, bytes)) abort();
        shared_allocations.push_back(start);
    } else {
        start = shared_memory + shared_used;
        shared_used += (bytes + SHARED_GAP + 127) / 128 * 128;
    }
    memset(start, 0xff, bytes);
    if (race_checked) race_add_shared(start, bytes, element_bytes);
    return start;
}

void run_block(uint32_t block_number) {
    num_live = num_threads;
    num_arrived = votes = 0;
    shared_used = shared_bytes = 0;
    shared_arrays.clear();
    for (Warp& warp : warps) warp.num_meetings = 0;
    if (race_checked) race_begin_block(block_number, num_threads);
    const uint32_t* grid = launch.grid;
    const uint3 block = {block_number % grid[0], block_number / grid[0] % grid[1], block_number / (grid[0] * grid[1])};
    char* dynamic = launch.dynamic_shared_bytes ? take_shared(launch.dynamic_shared_bytes, 1) : nullptr;
    for (Fiber& fiber : fibers) {
        fiber.thread.block_index = block;
        fiber.thread.dynamic_shared = dynamic;
        prepare(fiber);
    }
    make_order(sweep, (size_t)num_threads);
    sweep_position = 0;
    sweep_ran = false;
    if (!failed) switch_to(next_fiber());
    if (failed) abandoned_stacks = true;
    for (char* allocation : shared_allocations) free(allocation);
    shared_allocations.clear();
    most_shared_bytes = std::max(most_shared_bytes, shared_bytes);
}

void note_asan_report(const char* report) { record_fault("%.3500s", report); }

void prepare_threads() {
    const uint32_t *block = launch.block, *grid = launch.grid;
    while ((int)stacks.size() < num_threads) {
        char* memory = (char*)mmap(nullptr, STACK_BYTES + 4096, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE)) abort();
        stacks.push_back(memory + 4096);         // below it a page that faults
    }
    fibers.resize((size_t)num_threads);
    warps.resize((size_t)(num_threads + 31) / 32);
    for (int i = 0; i < num_threads; i++) {
        const unsigned number = (unsigned)i;
        fibers[i].thread = {{number % block[0], number / block[0] % block[1], number / (block[0] * block[1])},
                            {0, 0, 0}, {block[0], block[1], block[2]}, {grid[0], grid[1], grid[2]}, nullptr,
                            i, i / 32, i % 32};
        fibers[i].stack = stacks[i];
        if (abandoned_stacks && under_asan()) __asan_unpoison_memory_region(stacks[i], STACK_BYTES);
    }
    abandoned_stacks = false;
}

}  // namespace

const std::vector<Fiber>& all_fibers() { return fibers; }

bool copies_are_lazy() { return launch.lazy_copies; }

Fiber* running_fiber() { return running == &main_fiber ? nullptr : running; }

const char* place(const void* code) {
    static char text[512];
    Dl_info info;
    if (!dladdr(code, &info)) return "";
    snprintf(text, sizeof text, " at @%s+0x%lx", info.dli_fname, (long)((const char*)code - (char*)info.dli_fbase) - 1);
    return text;
}

static void record(const char* format, va_list arguments) {
    if (failed) return;
    failed = true;
    int length = 0;
    if (const Fiber* fiber = running_fiber()) {
        const uint3 block = fiber->thread.block_index, thread = fiber->thread.index;
        length = snprintf(error, sizeof error, "block (%u,%u,%u) thread (%u,%u,%u): ", block.x, block.y, block.z,
                          thread.x, thread.y, thread.z);
    }
    vsnprintf(error + length, sizeof error - length, format, arguments);
}

void record_fault(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(format, arguments);
    va_end(arguments);
}

void fault(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(format, arguments);
    va_end(arguments);
    leave();
}

void* shared_array(const void* key, size_t bytes, size_t element_bytes) {
    for (const SharedArray& array : shared_arrays)
        if (array.key == key) return array.start;
    char* start = take_shared(bytes, element_bytes);
    shared_arrays.push_back({key, start});
    return start;
}

void meet(uint32_t mask, Collective collective, int line, void* slot, void (*work)(Meeting&)) {
    Fiber* me = running;
    const int lane = me->thread.lane;
    Warp& warp = warps[me->thread.warp];
    if (!(mask >> lane & 1))
        fault("line %d: %s by lane %d, which is not in its mask %08x", line, collective_name(collective), lane, mask);
    Meeting* meeting = nullptr;
    for (int i = 0; i < warp.num_meetings; i++) {
        Meeting& other = warp.meetings[i];
        if (other.mask == mask) {
            meeting = &other;
        } else if (other.mask & mask) {
            fault("line %d: %s with mask %08x, while lanes of it wait in %s of line %d with mask %08x", line,
                  collective_name(collective), mask, collective_name(other.collective), other.line, other.mask);
        }
    }
    if (!meeting) {
        meeting = &warp.meetings[warp.num_meetings++];
        meeting->mask = mask, meeting->arrived = 0, meeting->collective = collective, meeting->line = line;
    } else if (meeting->collective != collective || meeting->line != line) {
        fault("line %d: divergent warp: %s, while lanes of the same mask wait in %s of line %d", line,
              collective_name(collective), collective_name(meeting->collective), meeting->line);
    }
    meeting->slots[lane] = slot;
    meeting->arrived |= 1u << lane;
    me->line = line, me->collective = collective, me->mask = mask;
    if (meeting->arrived == mask) {
        work(*meeting);
        Fiber* lanes = &fibers[me->thread.warp * 32];
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) lanes[i].state = State::ready;
        if (meeting != &warp.meetings[--warp.num_meetings]) *meeting = warp.meetings[warp.num_meetings];
    } else {
        me->state = State::in_collective;
    }
    let_others_run();                            // also the last one: the order decides who goes on
}

int block_barrier(int line, Vote vote, bool predicate) {
    Fiber* me = running;
    if (num_arrived == 0)
        barrier_line = line;
    else if (barrier_line != line)
        fault("line %d: divergent __syncthreads: other threads wait at the one of line %d", line, barrier_line);
    votes += predicate;
    me->state = State::at_barrier;
    me->line = line;
    if (++num_arrived == num_threads) {
        last_votes = votes;
        num_arrived = votes = 0;
        for (Fiber& fiber : fibers) fiber.state = State::ready;
        if (race_checked) race_block_barrier();
    }
    let_others_run();
    return vote == Vote::any ? last_votes != 0 : vote == Vote::all ? last_votes == num_threads : last_votes;
}

// ---- a launch -------------------------------------------------------------------------------------------------------

// Returns 0, or 1 with emu_last_error set.
int run(const Launch& what, void (*function)(void*), void* arguments) {
    launch = what, kernel = function, kernel_arguments = arguments;
    failed = false;
    main_stack_bottom = nullptr;                 // of this thread: to be learned
    most_shared_bytes = 0;
    random_state = 0x9E3779B97F4A7C15ull * (2 * (uint64_t)launch.seed + 1);
    const uint64_t threads = (uint64_t)launch.block[0] * launch.block[1] * launch.block[2];
    const uint64_t num_blocks = (uint64_t)launch.grid[0] * launch.grid[1] * launch.grid[2];
    running = &main_fiber;
    if (threads < 1 || threads > 1024 || launch.block[2] > 64)
        record_fault("a block of %u x %u x %u threads", launch.block[0], launch.block[1], launch.block[2]);
    if (num_blocks < 1 || num_blocks > 0x3fffff || launch.grid[1] > 65535 || launch.grid[2] > 65535)
        record_fault("a grid of %u x %u x %u blocks", launch.grid[0], launch.grid[1], launch.grid[2]);
    if (launch.dynamic_shared_bytes > MOST_SHARED_BYTES)
        record_fault("%u bytes of shared memory, more than any device has", launch.dynamic_shared_bytes);
    if (failed) return 1;
    if (!shared_memory) shared_memory = (char*)aligned_alloc(4096, 2 * 1024 * 1024);
    if (__asan_set_error_report_callback) __asan_set_error_report_callback(note_asan_report);
    num_threads = (int)threads;
    race_checked = launch.race_checked != 0;
    if (race_checked) race_begin_launch(launch);
    prepare_threads();
    std::vector<int> blocks;
    make_order(blocks, num_blocks);
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);                // denormal inputs and results are zero
    for (int block : blocks) {
        if (failed) break;
        run_block((uint32_t)block);
    }
    _mm_setcsr(control);
    running = nullptr;
    emu_thread = nullptr;
    return failed;
}

}  // namespace emu

extern "C" const char* emu_last_error() { return emu::error; }
extern "C" size_t emu_shared_bytes() { return emu::most_shared_bytes; }
