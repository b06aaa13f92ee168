// Rotary position embeddings.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Rotates pairs of a head's first numbers by position * frequency. Pairs are (i, i + half), or neighbours if
// `is_traditional`. The sines and cosines of recent positions are kept, each at its position modulo kKept; the engine's
// lock covers them.
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
