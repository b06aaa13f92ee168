// What a kernel compiled for the host sees of the emulated GPU. Kept free of C++ headers: every kernel includes it.
#pragma once

namespace emulator {

constexpr int kSimdWidth = 32;
constexpr int kSlotBytes = 16;  // the largest value that lanes exchange

struct Size3 {
  unsigned x, y, z;
};

// Where the running thread stands.
struct Place {
  Size3 in_grid, in_group, group, num_groups;
  unsigned lane, simdgroup;
};

enum Meeting { kReduce, kShuffle, kMatrixProduct, kSimdgroupBarrier, kThreadgroupBarrier };

// One value of each lane of a simdgroup.
struct Slots {
  alignas(16) unsigned char bytes[kSimdWidth][kSlotBytes];
};

typedef void (*Kernel)(void* const* buffers);

}  // namespace emulator

// Where threads meet is told by the call's address, so the compiler must not copy the call into branches.
#define EMULATOR_MEETING __attribute__((convergent, noduplicate))

extern "C" {
const emulator::Place* emulator_place();
EMULATOR_MEETING void emulator_threadgroup_barrier();
// Waits until every lane of the simdgroup has brought its value; `combine`, if given, then runs once over the slots.
EMULATOR_MEETING const emulator::Slots* emulator_meet(
    const void* value, unsigned size, emulator::Meeting meeting, void (*combine)(emulator::Slots*));
}
