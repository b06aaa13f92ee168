// An emulated GPU: one fiber a thread, one threadgroup at a time, in an order that a seed decides.
//
// Strict on purpose. It reports what Metal leaves undefined: barriers and simdgroup operations that not all threads
// reach together, unordered accesses, and accesses outside of buffers, which lie between inaccessible pages.
#include "machine.h"

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <ucontext.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fiber.h"
#include "races.h"

namespace emulator {

// Mirrored by `Launch` in machine.py.
struct Launch {
  Kernel kernel;
  void* const* buffers;
  const char* const* buffer_names;
  const unsigned long* buffer_sizes;
  unsigned num_buffers;
  unsigned char* threadgroup_memory;
  unsigned long threadgroup_bytes;
  Size3 grid, threadgroup;
  unsigned long seed;
  int check_races;
  unsigned long* loaded;  // bytes that the kernel has read from each buffer, counted where races are
  char* error;
  unsigned long error_size;
};

namespace {

enum State { kReady, kInSimdgroup, kAtBarrier, kDone };

struct Thread {
  Fiber fiber;
  Place place;
  State state;
  Meeting meeting;
  void* site;  // where in the kernel it waits
  int index, simdgroup;
  unsigned lane, turn, barriers, simd_barriers;
};

struct Simdgroup {
  Slots slots[2];  // in turn: a fast lane may bring its next value before a slow one has read the last
  int first, size, num_arrived;
};

struct Machine {
  Launch* launch = nullptr;
  Fiber scheduler;
  std::vector<Thread> threads;
  std::vector<Simdgroup> simdgroups;
  std::vector<char*> stacks;
  Thread* running = nullptr;
  int num_alive = 0, num_at_barrier = 0;
  unsigned threadgroup_number = 0;
  uint64_t random_state = 1;
  RaceDetector races;
  std::string error;
  sigjmp_buf escape;

  uint32_t random(uint32_t below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return uint32_t(random_state >> 32) % below;
  }
  void fail(std::string message) {
    if (error.empty()) error = std::move(message);
  }
};

Machine machine;

// A code address as `{+offset}` in its library; machine.py turns it into a line of the kernel.
std::string describe_pc(void* pc) {
  Dl_info info;
  char text[64];
  if (dladdr(pc, &info)) {
    snprintf(text, sizeof text, "{+0x%lx}", (unsigned long)((char*)pc - (char*)info.dli_fbase - 1));
  } else {
    snprintf(text, sizeof text, "%p", pc);
  }
  return text;
}

const char* describe(Meeting meeting) {
  static const char* const names[] = {"a simd reduction", "a simd shuffle", "a matrix product", "simdgroup_barrier", "threadgroup_barrier"};
  return names[meeting];
}

void give_way() {
  Thread* thread = machine.running;
  machine.scheduler.enter(thread->fiber);
}

void run_thread() {
  machine.launch->kernel(machine.launch->buffers);
  machine.running->state = kDone;
  --machine.num_alive;
  give_way();
  abort();
}

void place_threads(Size3 group, Size3 extent) {
  const Launch& launch = *machine.launch;
  int count = int(extent.x * extent.y * extent.z);
  while (int(machine.stacks.size()) < count) machine.stacks.push_back(make_stack());
  machine.threads.assign(count, Thread());
  machine.simdgroups.assign((count + kSimdWidth - 1) / kSimdWidth, Simdgroup());
  for (int s = 0; s < int(machine.simdgroups.size()); ++s) {
    machine.simdgroups[s].first = s * kSimdWidth;
    machine.simdgroups[s].size = std::min(kSimdWidth, count - s * kSimdWidth);
  }
  Size3 full = launch.threadgroup;
  for (int i = 0; i < count; ++i) {
    Thread& thread = machine.threads[i];
    Size3 in_group = {i % extent.x, i / extent.x % extent.y, i / (extent.x * extent.y)};
    thread.index = i;
    thread.simdgroup = i / kSimdWidth;
    thread.lane = i % kSimdWidth;
    thread.place = {
        {group.x * full.x + in_group.x, group.y * full.y + in_group.y, group.z * full.z + in_group.z},
        in_group,
        group,
        {(launch.grid.x + full.x - 1) / full.x, (launch.grid.y + full.y - 1) / full.y, (launch.grid.z + full.z - 1) / full.z},
        thread.lane,
        unsigned(thread.simdgroup)};
    thread.fiber.start(machine.stacks[i], run_thread);
  }
  machine.num_alive = count;
  machine.num_at_barrier = 0;
  ++machine.threadgroup_number;
}

// Runs every ready lane once, in a shuffled order; false if none was ready.
bool run_lanes(Simdgroup& simdgroup) {
  bool any = false;
  uint32_t start = machine.random(kSimdWidth), stride = machine.random(kSimdWidth / 2) * 2 + 1;
  for (int k = 0; k < kSimdWidth; ++k) {
    int lane = int((start + k * stride) % kSimdWidth);
    if (lane >= simdgroup.size) continue;
    Thread& thread = machine.threads[simdgroup.first + lane];
    if (thread.state != kReady) continue;
    any = true;
    machine.running = &thread;
    thread.fiber.enter(machine.scheduler);
    machine.running = nullptr;
    if (!machine.error.empty()) return true;
  }
  return any;
}

void report_deadlock() {
  int counts[4] = {0, 0, 0, 0};
  std::string sites;
  for (const Thread& thread : machine.threads) {
    if (counts[thread.state]++ == 0 && (thread.state == kInSimdgroup || thread.state == kAtBarrier)) {
      sites += "; thread " + std::to_string(thread.index) + " waits in " + describe(thread.meeting) + " at " + describe_pc(thread.site);
    }
  }
  machine.fail(
      "divergence: " + std::to_string(counts[kInSimdgroup]) + " threads wait in a simd operation, " +
      std::to_string(counts[kAtBarrier]) + " at threadgroup_barrier, " + std::to_string(counts[kDone]) + " have returned" + sites);
}

void run_threadgroup() {
  std::vector<int> order(machine.simdgroups.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  while (machine.num_alive > 0) {
    bool progress = false;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[machine.random(uint32_t(i))]);
    for (int s : order) {
      for (uint32_t turns = 1 + machine.random(8); turns > 0; --turns) {
        if (!run_lanes(machine.simdgroups[s])) break;
        progress = true;
        if (!machine.error.empty()) return;
      }
    }
    if (!progress) {
      report_deadlock();
      return;
    }
  }
}

void run_grid() {
  Launch& launch = *machine.launch;
  Size3 full = launch.threadgroup, grid = launch.grid;
  std::vector<Size3> groups;
  for (unsigned z = 0; z * full.z < grid.z; ++z) {
    for (unsigned y = 0; y * full.y < grid.y; ++y) {
      for (unsigned x = 0; x * full.x < grid.x; ++x) groups.push_back({x, y, z});
    }
  }
  for (size_t i = groups.size(); i > 1; --i) std::swap(groups[i - 1], groups[machine.random(uint32_t(i))]);
  for (Size3 group : groups) {
    Size3 extent = {
        std::min(full.x, grid.x - group.x * full.x),
        std::min(full.y, grid.y - group.y * full.y),
        std::min(full.z, grid.z - group.z * full.z)};
    memset(launch.threadgroup_memory, 0xFF, launch.threadgroup_bytes);  // NaN in every float format
    machine.races.forget_threadgroup();
    place_threads(group, extent);
    run_threadgroup();
    if (!machine.error.empty()) return;
  }
}

// ---- faults of the kernel itself become errors

const int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};

void* program_counter(void* context) {
#if defined(__x86_64__)
  return (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#else
  return (void*)((ucontext_t*)context)->uc_mcontext.pc;
#endif
}

std::string describe_address(void* address) {
  const Launch& launch = *machine.launch;
  for (unsigned i = 0; i < launch.num_buffers; ++i) {
    long offset = (char*)address - (char*)launch.buffers[i];
    long size = long(launch.buffer_sizes[i]);
    if (offset >= -long(16 * kPage) && offset < size + long(16 * kPage) && (offset < 0 || offset >= size)) {
      return "out of bounds: " + std::string(launch.buffer_names[i]) + " at byte " + std::to_string(offset) + " of " + std::to_string(size);
    }
  }
  return "out of bounds: address outside of every buffer";
}

void on_signal(int signal, siginfo_t* info, void* context) {
  void* pc = (char*)program_counter(context) + 1;  // describe_pc expects a return address
  if ((signal == SIGSEGV || signal == SIGBUS) && info->si_code == SI_KERNEL) {
    machine.fail("out of bounds: an address that cannot exist, or a misaligned vector, at " + describe_pc(pc));
  } else if (signal == SIGSEGV || signal == SIGBUS) {
    machine.fail(describe_address(info->si_addr) + ", at " + describe_pc(pc));
  } else {
    machine.fail("undefined behaviour: overflow, misalignment or an index beyond a local array, at " + describe_pc(pc));
  }
  siglongjmp(machine.escape, 1);
}

class SignalScope {
 public:
  SignalScope() {
    static char stack[64 * 1024];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~SignalScope() {
    for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  struct sigaction old_[5];
  stack_t old_stack_;
};

void note_access(void* at, size_t size, bool is_write, void* pc) {
  Thread* thread = machine.running;
  if (thread == nullptr || !machine.launch->check_races) return;
  Access access = {thread->index, thread->simdgroup, machine.threadgroup_number, thread->barriers, thread->simd_barriers, pc};
  std::string race = machine.races.note((unsigned char*)at, size, is_write, access);
  if (!race.empty()) machine.fail(race);
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" const Place* emulator_place() { return &machine.running->place; }

extern "C" const Slots* emulator_meet(const void* value, unsigned size, Meeting meeting, void (*combine)(Slots*)) {
  Thread& thread = *machine.running;
  Simdgroup& simdgroup = machine.simdgroups[thread.simdgroup];
  Slots& slots = simdgroup.slots[thread.turn++ & 1];
  if (simdgroup.size < kSimdWidth) {
    machine.fail(std::string("divergence: ") + describe(meeting) + " in a simdgroup of " + std::to_string(simdgroup.size) + " lanes");
  }
  memcpy(slots.bytes[thread.lane], value, size);
  thread.state = kInSimdgroup;
  thread.meeting = meeting;
  thread.site = __builtin_return_address(0);
  if (++simdgroup.num_arrived == simdgroup.size) {
    simdgroup.num_arrived = 0;
    for (int i = 0; i < simdgroup.size; ++i) {
      Thread& other = machine.threads[simdgroup.first + i];
      if (other.site != thread.site) {
        machine.fail(
            "divergence: lane " + std::to_string(thread.lane) + " is in " + describe(meeting) + " at " + describe_pc(thread.site) +
            ", lane " + std::to_string(i) + " in " + describe(other.meeting) + " at " + describe_pc(other.site));
      }
      other.state = kReady;
      if (meeting == kSimdgroupBarrier) ++other.simd_barriers;
    }
    if (combine) combine(&slots);
  }
  give_way();
  return &slots;
}

extern "C" void emulator_threadgroup_barrier() {
  Thread& thread = *machine.running;
  thread.state = kAtBarrier;
  thread.meeting = kThreadgroupBarrier;
  thread.site = __builtin_return_address(0);
  if (++machine.num_at_barrier == int(machine.threads.size())) {
    machine.num_at_barrier = 0;
    for (Thread& other : machine.threads) {
      if (other.site != thread.site) {
        machine.fail("divergence: threads wait at different barriers, at " + describe_pc(thread.site) + " and " + describe_pc(other.site));
      }
      other.state = kReady;
      ++other.barriers;
    }
  }
  give_way();
}

// Runs a launch; 0, or 1 with a message in `launch->error`.
extern "C" int emulator_launch(Launch* launch) {
  machine.launch = launch;
  machine.error.clear();
  machine.random_state = launch->seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
  machine.races = RaceDetector();
  machine.races.describe_pc = describe_pc;
  if (launch->check_races) {
    machine.races.watch("threadgroup memory", launch->threadgroup_memory, launch->threadgroup_bytes, false);
    for (unsigned i = 0; i < launch->num_buffers; ++i) {
      machine.races.watch(launch->buffer_names[i], (unsigned char*)launch->buffers[i], launch->buffer_sizes[i], true);
    }
  }
  SignalScope signals;
  if (sigsetjmp(machine.escape, 1) == 0) run_grid();
  machine.running = nullptr;
  for (unsigned i = 0; launch->check_races && i < launch->num_buffers; ++i) launch->loaded[i] = machine.races.loaded(i + 1);
  if (machine.error.empty()) return 0;
  snprintf(launch->error, launch->error_size, "%s", machine.error.c_str());
  return 1;
}

// ---- what thread-sanitizer instrumentation calls

#define EMULATOR_HOOKS(n)                                                                                               \
  extern "C" void __tsan_read##n(void* at) { note_access(at, n, false, __builtin_return_address(0)); }                  \
  extern "C" void __tsan_write##n(void* at) { note_access(at, n, true, __builtin_return_address(0)); }                  \
  extern "C" void __tsan_unaligned_read##n(void* at) { note_access(at, n, false, __builtin_return_address(0)); }        \
  extern "C" void __tsan_unaligned_write##n(void* at) { note_access(at, n, true, __builtin_return_address(0)); }
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t size) {
  note_access((void*)from, size, false, __builtin_return_address(0));
  note_access(to, size, true, __builtin_return_address(0));
  return memmove(to, from, size);
}
extern "C" void* __tsan_memset(void* to, int value, size_t size) {
  note_access(to, size, true, __builtin_return_address(0));
  return memset(to, value, size);
}
