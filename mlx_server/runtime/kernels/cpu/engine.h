// The threads, their scratch memory, and the functions that run on them, with their arguments. The caller holds the
// engine's mutex.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

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

// One layer's memory, in the layout of kv_layout.h. attention.py has the same fields. 0 bits are float32.
struct Pool {
  void *keys, *values;
  int64_t num_kv_heads, key_dim, value_dim, key_bits, value_bits;
};

// One row for each token and head of this step. Strides are in floats.
struct Tokens {
  const float* data;
  int64_t token_stride, head_stride;

  const float* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// An attention call. `keys` and `sinks` may be null; `window` 0 is none.
struct Call {
  Tokens queries, keys, values;
  const float* sinks;
  float* output;
  Pool pool;
  int64_t num_heads, window;
  double scale;
  const int64_t* slots;
  const int32_t *query_starts, *context_lens, *block_tables;
  const int32_t* sharing;  // [requests, 2]: the first request with the same leading blocks, or -1; and how many blocks
  const int32_t* both_ways;  // [requests]: 1 if its tokens also see later ones of the step; null if none do
  int64_t num_tokens, num_requests, table_width;
};

// Attention over a pool, see attention.cpp.
void attend(Engine&, const Call&);

// Rotary embeddings: rotates pairs of a head's first numbers by position * frequency. Pairs are (i, i + half), or
// neighbours if `is_traditional`. The sines and cosines of recent positions are kept, each at its position modulo kKept;
// the engine's lock covers them.
class Rotation : public std::enable_shared_from_this<Rotation> {
 public:
  Rotation(std::vector<double> frequencies, bool is_traditional)
      : frequencies_(std::move(frequencies)), is_traditional_(is_traditional), positions_(kKept, -1), angles_(kKept) {}

  int64_t half() const { return frequencies_.size(); }

  // `y` may be `x` if `stride` is 1.
  void turn(const float* x, int64_t stride, int64_t size, int64_t position, float* y);

 private:
  static constexpr int64_t kKept = 2048;

  const float* angles_at(int64_t position);

  const std::vector<double> frequencies_;
  const bool is_traditional_;
  std::vector<int64_t> positions_;
  std::vector<std::vector<float>> angles_;
};

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
