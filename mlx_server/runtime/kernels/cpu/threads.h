// A few threads that sleep between calls, for work that is cut into many small items.

#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

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

// The caller and `count` - 1 helpers, or fewer where the system gives no more. A forked child has no helpers: it
// works alone.
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

  bool is_forked() const { return getpid() != owner_; }
  int count() const { return is_forked() ? 1 : 1 + int(helpers_.size()); }

  // Calls work(thread) on the caller, as 0, and on every helper that wakes before the caller is through. Returns
  // when all are: so `work` takes items until none are left, and a late helper finds none.
  template <typename Work>
  void run(const Work& work) {
    if (count() == 1) return work(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = [](const void* w, int thread) { (*static_cast<const Work*>(w))(thread); };
      argument_ = &work;
      ++round_;
    }
    wake_.notify_all();
    work(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = nullptr;
    }
    for (int spins = 0; active_.load(std::memory_order_acquire) != 0;) pause_briefly(spins);
  }

  // Ends the helpers. Not in a forked child.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

 private:
  void serve(int thread) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || (work_ != nullptr && round_ != seen); });
      if (stopping_) return;
      seen = round_;
      const auto work = work_;
      const void* argument = argument_;
      active_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      work(argument, thread);
      active_.fetch_sub(1, std::memory_order_release);
      lock.lock();
    }
  }

  const pid_t owner_;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*work_)(const void*, int) = nullptr;
  const void* argument_ = nullptr;
  uint64_t round_ = 0;
  bool stopping_ = false;
  std::atomic<int> active_{0};
};

}  // namespace
