// Finds accesses that nothing orders. Kernels are compiled with thread-sanitizer instrumentation, but the hooks that
// it calls are ours: what orders two threads of a GPU is their barriers, and nothing orders two threadgroups.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace emulator {

struct Access {
  int thread = -1;  // in its threadgroup; -1: none yet
  int simdgroup = 0;
  unsigned threadgroup = 0;
  unsigned barriers = 0;       // threadgroup barriers that the thread had passed
  unsigned simd_barriers = 0;  // simdgroup barriers that it had passed
  void* pc = nullptr;
};

class RaceDetector {
 public:
  void watch(std::string name, unsigned char* start, size_t size, bool is_shared) {
    regions_.push_back({std::move(name), start, size, is_shared, std::vector<Cell>((size + kCell - 1) / kCell)});
  }

  // Threadgroup memory is fresh in each threadgroup.
  void forget_threadgroup() {
    for (Region& region : regions_) {
      if (!region.is_shared) region.cells.assign(region.cells.size(), Cell());
    }
  }

  // Records an access; returns what it races with, in words, or an empty string.
  std::string note(unsigned char* at, size_t size, bool is_write, const Access& access) {
    for (Region& region : regions_) {
      if (at < region.start || at >= region.start + region.size) continue;
      if (!is_write) region.loaded += size;
      size_t first = (at - region.start) / kCell, last = (at - region.start + size - 1) / kCell;
      for (size_t i = first; i <= last && i < region.cells.size(); ++i) {
        std::string race = note(region, i, is_write, access);
        if (!race.empty()) return race;
      }
    }
    return "";
  }

  // Bytes that were read of what was watched as the i-th.
  size_t loaded(size_t i) const { return regions_[i].loaded; }

  std::string (*describe_pc)(void*) = nullptr;

 private:
  static constexpr size_t kCell = 2;  // bytes: the smallest type of a kernel

  struct Cell {
    Access write, reads[2];
  };
  struct Region {
    std::string name;
    unsigned char* start;
    size_t size;
    bool is_shared;  // seen by every threadgroup
    std::vector<Cell> cells;
    size_t loaded = 0;
  };

  static bool is_ordered(const Access& before, const Access& now, bool is_shared) {
    if (before.thread < 0) return true;
    if (before.threadgroup != now.threadgroup) return !is_shared;
    if (before.thread == now.thread || before.barriers != now.barriers) return true;
    return before.simdgroup == now.simdgroup && before.simd_barriers != now.simd_barriers;
  }

  std::string note(Region& region, size_t index, bool is_write, const Access& access) {
    Cell& cell = region.cells[index];
    if (!is_ordered(cell.write, access, region.is_shared)) return report(region, index, is_write, access, cell.write, "wrote");
    if (is_write) {
      for (const Access& read : cell.reads) {
        if (!is_ordered(read, access, region.is_shared)) return report(region, index, true, access, read, "read");
      }
      cell.write = access;
      cell.reads[0] = cell.reads[1] = Access();
    } else {
      if (cell.reads[0].thread != access.thread || cell.reads[0].threadgroup != access.threadgroup) cell.reads[1] = cell.reads[0];
      cell.reads[0] = access;
    }
    return "";
  }

  std::string report(
      const Region& region, size_t index, bool is_write, const Access& now, const Access& before, const char* verb) const {
    return "data race: " + region.name + " at byte " + std::to_string(index * kCell) + ": thread " +
        std::to_string(now.thread) + (is_write ? " writes at " : " reads at ") + describe_pc(now.pc) + ", thread " +
        std::to_string(before.thread) + (before.threadgroup != now.threadgroup ? " of another threadgroup " : " ") + verb +
        " at " + describe_pc(before.pc);
  }

  std::vector<Region> regions_;
};

}  // namespace emulator
