// The threads, their scratch memory, and the functions that run on them. The caller holds the engine's mutex.

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
#include "rotation.h"
#include "threads.h"

// Memory for floats that is kept from call to call and never shrinks.
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
      helpers_.release();  // a child has no helper threads, and would wait for them
    } else {
      threads.stop();
    }
  }

  // Calls work(first, last, thread) on all threads, for `at_once` items at a time, until all `items` are done.
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
  std::vector<Scratch> own;         // one for each thread
  Scratch given, arranged;          // inputs in another order
  Scratch between;                  // intermediate results of a layer
  std::shared_ptr<void> attention;  // scratch memory of attention.cpp
};

// Weights [outputs, depth]: float32, bfloat16, or codes of 4 or 8 bits in MLX's affine format, where `group` codes share
// a scale and a bias.
enum class Storage { kFloat32, kBfloat16, kAffine8, kAffine4 };

struct Weights {
  Storage storage;
  int64_t outputs, depth, group;
  const void* data;
  const float *scales, *biases;
};

constexpr int64_t kDepthStep = 32;  // `depth` is a multiple of this
constexpr int64_t kWidthStep = 16;  // a normalised row's size is a multiple of this

// y[i] [rows, outputs] = x [rows, depth] W[i]^T for each of `count` weights of the same depth. What comes out for a row
// does not depend on the other rows, on the other weights or on the number of threads.
void multiply(Engine&, const Weights* weights, int64_t count, const float* x, int64_t rows, float* const* y);

inline void multiply(Engine& engine, const Weights& weights, const float* x, int64_t rows, float* y) {
  multiply(engine, &weights, 1, x, rows, &y);
}

// y = x / sqrt(mean(x^2) + eps) * weight, for each row.
void normalize(Engine&, const float* x, const float* weight, float eps, int64_t rows, int64_t size, float* y);

// y = gate / (1 + e^-gate) * up
void gate(Engine&, const float* gate, const float* up, int64_t count, float* y);

// Attention over a pool, see attention.cpp.
void attend(Engine&, const Call&);

// A transformer layer, see layer.cpp. `products` and `norms` are in the order of `Product` and `Norm`.
struct Layer {
  enum Product { kQueries, kKeys, kValues, kOutput, kGate, kUp, kDown, kProducts };
  enum Norm { kBeforeAttention, kBeforeMlp, kOfQueries, kOfKeys, kNorms };

  Weights products[kProducts];
  const float* biases[kProducts];  // null where a product has none
  const float* norms[kNorms];      // null where the layer has none
  float eps[kNorms];
  Rotation* rotation;
  int64_t heads, kv_heads;

  int64_t size() const { return products[kQueries].depth; }
  bool is_whole() const;  // whether its sizes fit each other
};

// y [rows, size] = the layer's output for x [rows, size], at `positions[row * step]`. `call` needs no queries, keys,
// values and output.
void run(Engine&, const Layer&, Call call, const int32_t* positions, int64_t step, const float* x, float* y);
