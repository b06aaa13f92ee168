// A few threads that share work cut into many small items.

#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

// One turn of a wait that is expected to be short.
inline void pause_briefly(int& spins) {
  if (++spins % 64 == 0) {
    std::this_thread::yield();
  } else {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

// The caller and `count` - 1 helpers, or fewer if the system gives no more. A forked child has no helpers and works
// alone.
//
// After its share, a helper polls for the next call for some microseconds, since the products of a step follow each
// other, and then sleeps. `state_` holds the number of the call, whether it may still be joined, and how many helpers are
// in it; so a helper joins exactly the call that it has seen. Example with two helpers:
//
//     call 7 begins      7, open, 0      both see it
//     a helper joins     7, open, 1      and takes items
//     the caller ends    7, shut, 1      no item is left; it waits for the helper inside
//     the helper ends    7, shut, 0      the call returns; the other helper wakes too late to join
class Threads {
 public:
  explicit Threads(int count) : owner_(getpid()) {
    helpers_.reserve(count);
    for (int i = 1; i < count; ++i) {
      try {
        helpers_.emplace_back([this, i] { serve(i); });
      } catch (const std::system_error&) {
        break;
      }
    }
  }
  Threads(const Threads&) = delete;

  bool is_forked() const { return getpid() != owner_; }
  int count() const { return is_forked() ? 1 : 1 + int(helpers_.size()); }

  // Calls work(thread) on the caller, as thread 0, and on every helper that joins before the caller has finished. Returns
  // when all of them have. `work` takes items until none is left, and must not throw.
  template <typename Work>
  void run(const Work& work) {
    if (count() == 1) return work(0);
    work_ = [](const void* w, int thread) { (*static_cast<const Work*>(w))(thread); };
    argument_ = &work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_.store((state_.load() & ~kCallBits) + kCall + kOpen);
    }
    if (asleep_.load() > 0) wake_.notify_all();
    work(0);
    state_.fetch_and(~kOpen);
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kInside) != 0;) pause_briefly(spins);
  }

  // Ends the helpers. Must not be called in a forked child.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

 private:
  static constexpr uint64_t kInside = 0xffff, kOpen = 0x10000, kCallBits = 0x1ffff, kCall = 0x20000;
  static constexpr int kLooks = 2000;

  static bool may_join(uint64_t state, uint64_t seen) { return (state & kOpen) != 0 && (state & ~kCallBits) != seen; }

  // Returns the state of a call after `seen`; any state once the helpers are being stopped.
  uint64_t wait_for_call(uint64_t seen) {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (int looks = 0; looks < kLooks; state = state_.load(std::memory_order_acquire)) {
      if (may_join(state, seen) || stopping_.load(std::memory_order_relaxed)) return state;
      pause_briefly(looks);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1);
    wake_.wait(lock, [&] { return stopping_.load() || may_join(state = state_.load(), seen); });
    asleep_.fetch_sub(1);
    return state;
  }

  void serve(int thread) {
    for (uint64_t seen = 0;;) {
      uint64_t state = wait_for_call(seen);
      if (stopping_.load()) return;
      while (may_join(state, seen)) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) continue;
        work_(argument_, thread);
        state_.fetch_sub(1, std::memory_order_release);
        break;
      }
      seen = state & ~kCallBits;
    }
  }

  const pid_t owner_;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*work_)(const void*, int) = nullptr;
  const void* argument_ = nullptr;
  std::atomic<uint64_t> state_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stopping_{false};
};
