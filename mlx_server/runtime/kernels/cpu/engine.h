// The threads, the memory they work in, and what they can be asked for. One caller at a time works; others wait.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "call.h"
#include "threads.h"

// Floats that are kept from call to call and only ever grow.
class Scratch {
 public:
  Scratch() = default;
  Scratch(Scratch&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  float* at_least(size_t count) {
    if (count > size_) {
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, count * sizeof(float)) != 0) throw std::bad_alloc();
      std::free(data_);
      data_ = static_cast<float*>(fresh);
      size_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

struct Engine : std::enable_shared_from_this<Engine> {
  explicit Engine(int count) : helpers_(new Threads(count)), threads(*helpers_), own(count) {}
  ~Engine() {
    if (threads.is_forked()) {
      helpers_.release();  // they do not exist in a child, which would wait for them
    } else {
      threads.stop();
    }
  }

  // Calls work(first, last, thread) until `items` are done, so many at a time, on all threads.
  template <typename Work>
  void share(int64_t items, int64_t at_once, const Work& work) {
    if (items <= at_once) return work(int64_t(0), items, 0);
    std::atomic<int64_t> next{0};
    threads.run([&](int thread) {
      for (int64_t at; (at = next.fetch_add(at_once)) < items;) work(at, std::min(at + at_once, items), thread);
    });
  }

 private:
  std::unique_ptr<Threads> helpers_;

 public:
  Threads& threads;
  std::mutex mutex;
  std::vector<Scratch> own;         // a thread's
  Scratch given, arranged;          // inputs in another order
  std::shared_ptr<void> attention;  // what attention works in
};

// Weights [outputs, depth] as they lie: float32, bfloat16, or codes of 4 or 8 bits in MLX's affine format, of which
// `group` share a scale and a bias.
enum class Storage { kFloat32, kBfloat16, kAffine8, kAffine4 };

struct Weights {
  Storage storage;
  int64_t outputs, depth, group;
  const void* data;
  const float *scales, *biases;
};

constexpr int64_t kDepthStep = 32;  // of which `depth` is a multiple
constexpr int64_t kWidthStep = 16;  // of which the size of a row that is normalised is one

// y [rows, outputs] = x [rows, depth] W^T. What comes out for a row does not depend on the others, nor on the threads.
void multiply(Engine&, const Weights&, const float* x, int64_t rows, float* y);

// y = x / sqrt(mean(x^2) + eps) * weight, for each row.
void normalize(Engine&, const float* x, const float* weight, float eps, int64_t rows, int64_t size, float* y);

// y = gate / (1 + e^-gate) * up
void gate(Engine&, const float* gate, const float* up, int64_t count, float* y);

// Attention over a pool, see attention.cpp.
void attend(Engine&, const Call&);
