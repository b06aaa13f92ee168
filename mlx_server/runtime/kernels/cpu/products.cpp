// Products of any number of rows with weights that are read as they lie, and what stands between a model's products.
//
// A tile is kTile outputs of a few rows, summed in registers over the whole depth, kStep numbers at a time. Every output
// is one sequence of multiply-adds over the depth in each lane and one tree over the lanes, whatever tile it is in: so
// a row's bits depend on nothing but the row and the weights. Numbers of 4 bits come as the even and the odd ones of
// kStep, so the rows are brought into that order first. Example, of 8 numbers and 4 lanes:
//
//     bytes     1|0  3|2  5|4  7|6     the high bits | the low bits, by what they belong to
//     low       0 2 4 6                times x arranged as  0 2 4 6
//     high      1 3 5 7                                     1 3 5 7
//
// Of many rows, weights that are not floats are widened once for all of them, in the same order.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"
#include "vector.h"

namespace {

constexpr int kStep = 2 * kLanes, kTile = 4;

// Rows at once, such that kTile sums of each and a few operands fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 6;
#else
constexpr int kRows = 3;
#endif

constexpr int kWidenedFrom = 3 * kRows;     // rows from which on weights are widened first
constexpr int64_t kBlockFloats = 96 << 10;  // of x that stay in the second cache while weights pass by
constexpr int64_t kFewestOutputs = 64;      // that a thread takes at a time
constexpr int64_t kAlone = 100000;          // multiply-adds that are not worth a second thread
constexpr int64_t kAloneRows = 1 << 16;     // numbers, likewise

// Rows of weights lie behind one another: what is read next is asked for in the order of addresses, far ahead, into the
// second cache. kTile streams in turns, as the tile reads them, are beyond what hardware foresees.
constexpr int64_t kAheadBytes = 16384;
inline void fetch_ahead(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + kAheadBytes + at, 0, 2);
}

// Four rows of weights, from `first` on; past the end the last one again. `get<0>` and `get<1>` are the two vectors of a
// step, `enter` comes before the steps of a group.
template <typename T>
class Rows {
 public:
  Rows(const T* data, int64_t first, int64_t outputs, int64_t stride) : stride_(stride) {
    for (int i = 0; i < kTile; ++i) row_[i] = data + std::min(first + i, outputs - 1) * stride;
  }

 protected:
  // The four rows are one run of memory, in which place `at` of each comes to stand at kTile * at.
  void fetch(int64_t at, int64_t count) const { fetch_ahead(row_[0] + kTile * at, kTile * count * int64_t(sizeof(T))); }

  const T* row_[kTile];
  int64_t stride_;
};

class Float32Rows : Rows<float> {
 public:
  Float32Rows(const Weights& w, int64_t first) : Rows(static_cast<const float*>(w.data), first, w.outputs, w.depth) {}
  Float32Rows(const float* widened, int64_t depth) : Rows(widened, 0, kTile, depth) {}
  void enter(int64_t) {}
  void fetch(int64_t k) const { Rows::fetch(k, kStep); }
  template <int kHalf>
  Floats get(int i, int64_t k) const {
    return load(row_[i] + k + kHalf * kLanes);
  }
};

class Bfloat16Rows : Rows<uint16_t> {
 public:
  Bfloat16Rows(const Weights& w, int64_t first) : Rows(static_cast<const uint16_t*>(w.data), first, w.outputs, w.depth) {}
  void enter(int64_t) {}
  void fetch(int64_t k) const { Rows::fetch(k, kStep); }
  template <int kHalf>
  Floats get(int i, int64_t k) const {
    typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
    Halves halves;
    std::memcpy(&halves, row_[i] + k + kHalf * kLanes, sizeof halves);
#if defined(__x86_64__) && !defined(__clang__)
    asm("" : "+x"(halves));  // as in `widen`
#endif
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
  }
};

class AffineRows : protected Rows<uint8_t> {
 public:
  AffineRows(const Weights& w, int64_t first, int64_t row_bytes)
      : Rows(static_cast<const uint8_t*>(w.data), first, w.outputs, row_bytes),
        scales_(w.scales, first, w.outputs, w.depth / w.group),
        biases_(w.biases, first, w.outputs, w.depth / w.group) {}

 protected:
  struct Numbers : Rows<float> {
    using Rows::Rows;
    float at(int i, int64_t group) const { return row_[i][group]; }
  };

  Numbers scales_, biases_;
};

class Affine8Rows : AffineRows {
 public:
  Affine8Rows(const Weights& w, int64_t first) : AffineRows(w, first, w.depth) {}
  void enter(int64_t group) {
    UNROLL for (int i = 0; i < kTile; ++i) scale_[i] = fill(scales_.at(i, group)), bias_[i] = fill(biases_.at(i, group));
  }
  void fetch(int64_t k) const { Rows::fetch(k, kStep); }
  template <int kHalf>
  Floats get(int i, int64_t k) const {
    return fused(widen(load_bytes(row_[i] + k + kHalf * kLanes)), scale_[i], bias_[i]);
  }

 private:
  Floats scale_[kTile], bias_[kTile];
};

class Affine4Rows : AffineRows {
 public:
  Affine4Rows(const Weights& w, int64_t first) : AffineRows(w, first, w.depth / 2) {}
  void enter(int64_t group) {
    UNROLL for (int i = 0; i < kTile; ++i) {
      const Floats scale = fill(scales_.at(i, group)), bias = fill(biases_.at(i, group));
#if defined(__AVX512F__)
      table_[i] = fused(Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, scale, bias);
#else
      scale_[i] = scale, bias_[i] = bias;
#endif
    }
  }
  void fetch(int64_t k) const { Rows::fetch(k / 2, kStep / 2); }
  template <int kHalf>
  Floats get(int i, int64_t k) const {
#if defined(__AVX512F__)  // the 16 numbers that a group can have, looked up by the low 4 bits of each lane
    const Ints codes = widen_whole(load_bytes(row_[i] + k / 2));
    return (Floats)_mm512_permutexvar_ps((__m512i)(kHalf == 0 ? codes : codes >> 4), (__m512)table_[i]);
#else
    const Bytes codes = load_bytes(row_[i] + k / 2);
    return fused(widen(kHalf == 0 ? codes & 15 : codes >> 4), scale_[i], bias_[i]);
#endif
  }

 private:
#if defined(__AVX512F__)
  Floats table_[kTile];
#else
  Floats scale_[kTile], bias_[kTile];
#endif
};

// Outputs whose weights, as floats, are about as large as kPanelFloats.
constexpr int64_t kPanelFloats = 32 << 10;
inline int64_t panel_width(int64_t depth) { return std::max<int64_t>(kTile, kPanelFloats / depth / kTile * kTile); }

template <int kHalf, int M, typename W>
inline __attribute__((always_inline)) void add_half(const W& w, const float* x, int64_t depth, int64_t k,
                                                    Floats (&sum)[M][kTile]) {
  Floats left[kTile];
  UNROLL for (int i = 0; i < kTile; ++i) left[i] = in_register(w.template get<kHalf>(i, k));
  UNROLL for (int m = 0; m < M; ++m) {
    const Floats right = in_register(load(x + m * depth + k + kHalf * kLanes));
    UNROLL for (int i = 0; i < kTile; ++i) sum[m][i] = fused(left[i], right, sum[m][i]);
  }
}

// `count` of kTile outputs of M rows. The first rows to meet the weights fetch them.
template <int M, bool kFetches, typename W>
void tile(W w, const float* x, int64_t depth, int64_t group, float* y, int64_t stride, int64_t count) {
  Floats sum[M][kTile] = {};
  for (int64_t start = 0; start < depth; start += group) {
    w.enter(start / group);
    for (int64_t k = start; k < start + group; k += kStep) {
      if (kFetches) w.fetch(k);
      add_half<0, M>(w, x, depth, k, sum);
      add_half<1, M>(w, x, depth, k, sum);
    }
  }
  UNROLL for (int m = 0; m < M; ++m) {
    const Quad sums = sums_of(sum[m]);
    if (count == kTile) {
      std::memcpy(y + m * stride, &sums, sizeof sums);
    } else {
      for (int64_t i = 0; i < count; ++i) y[m * stride + i] = sums[i];
    }
  }
}

template <bool kFetches, typename W, int M = kRows>
void few_rows(int rows, const W& w, const float* x, int64_t depth, int64_t group, float* y, int64_t stride,
              int64_t count) {
  if constexpr (M > 0) {
    if (rows == M) return tile<M, kFetches>(w, x, depth, group, y, stride, count);
    few_rows<kFetches, W, M - 1>(rows, w, x, depth, group, y, stride, count);
  }
}

template <typename W>
void widen_rows(W w, int64_t depth, int64_t group, float* to) {
  for (int64_t start = 0; start < depth; start += group) {
    w.enter(start / group);
    for (int64_t k = start; k < start + group; k += kStep) {
      w.fetch(k);
      UNROLL for (int i = 0; i < kTile; ++i) {
        store(to + i * depth + k, w.template get<0>(i, k));
        store(to + i * depth + k + kLanes, w.template get<1>(i, k));
      }
    }
  }
}

// Outputs [first, last) of some rows. They are done in panels of weights that stay in the second cache while groups of
// rows, which stay in the first one, pass by: the rows are cut into even groups that fit the registers. `room` holds a
// panel.
template <typename W>
void multiply_outputs(const Weights& w, const float* x, int rows, int64_t first, int64_t last, float* y, float* room) {
  constexpr bool kIsNarrow = !std::is_same_v<W, Float32Rows>;
  const int64_t group = w.group > 0 ? w.group : w.depth, width = panel_width(w.depth);
  const bool is_widened = kIsNarrow && rows >= kWidenedFrom;
  for (; first < last; first += width) {
    const int64_t end = std::min(first + width, last);
    for (int64_t n = first; is_widened && n < end; n += kTile) {
      widen_rows(W(w, n), w.depth, group, room + (n - first) * w.depth);
    }
    for (int done = 0, groups = (rows + kRows - 1) / kRows; groups > 0; --groups) {
      const int m = (rows - done + groups - 1) / groups;
      const float* in = x + done * w.depth;
      float* out = y + done * w.outputs;
      for (int64_t n = first; n < end; n += kTile) {
        const int64_t count = std::min<int64_t>(kTile, end - n);
        if (is_widened) {
          const Float32Rows widened(room + (n - first) * w.depth, w.depth);
          few_rows<false>(m, widened, in, w.depth, w.depth, out + n, w.outputs, count);
        } else if (done == 0) {
          few_rows<true>(m, W(w, n), in, w.depth, group, out + n, w.outputs, count);
        } else {
          few_rows<false>(m, W(w, n), in, w.depth, group, out + n, w.outputs, count);
        }
      }
      done += m;
    }
  }
}

void multiply_outputs(const Weights& w, const float* x, int rows, int64_t first, int64_t last, float* y, float* room) {
  switch (w.storage) {
    case Storage::kFloat32: return multiply_outputs<Float32Rows>(w, x, rows, first, last, y, room);
    case Storage::kBfloat16: return multiply_outputs<Bfloat16Rows>(w, x, rows, first, last, y, room);
    case Storage::kAffine8: return multiply_outputs<Affine8Rows>(w, x, rows, first, last, y, room);
    case Storage::kAffine4: return multiply_outputs<Affine4Rows>(w, x, rows, first, last, y, room);
  }
}

// The even numbers of every kStep, then the odd ones.
void arrange(const float* x, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kStep) {
    for (int i = 0; i < kLanes; ++i) to[k + i] = x[k + 2 * i], to[k + kLanes + i] = x[k + 2 * i + 1];
  }
}

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-x), by e^-|x|, which cannot overflow.
inline Floats silu(Floats x) {
  const Floats e = exp2_of((Floats)((Ints)x | INT32_MIN) * kLog2E);
  return x * select(x >= 0.0f, fill(1.0f), e) / (e + 1.0f);
}

void gate_range(const float* gate, const float* up, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, silu(load(gate + i)) * load(up + i));
  if (i == count) return;
  float edge[2 * kLanes] = {};
  std::memcpy(edge, gate + i, (count - i) * sizeof(float));
  std::memcpy(edge + kLanes, up + i, (count - i) * sizeof(float));
  store(edge, silu(load(edge)) * load(edge + kLanes));
  std::memcpy(y + i, edge, (count - i) * sizeof(float));
}

void normalize_row(const float* x, const float* weight, float eps, int64_t size, float* y) {
  Floats sum[kTile] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats v = load(x + i);
    sum[i / kLanes % kTile] = fused(v, v, sum[i / kLanes % kTile]);
  }
  const Quad parts = sums_of(sum);
  const float mean = ((parts[0] + parts[1]) + (parts[2] + parts[3])) / float(size);
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
}

}  // namespace

void multiply(Engine& engine, const Weights& w, const float* x, int64_t rows, float* y) {
  if (w.storage == Storage::kAffine4) {
    float* arranged = engine.arranged.at_least(rows * w.depth);
    arrange(x, rows * w.depth, arranged);
    x = arranged;
  }
  const int64_t room_size = panel_width(w.depth) * w.depth;
  for (Scratch& own : engine.own) own.at_least(room_size);
  const bool is_small = rows * w.depth * w.outputs < kAlone;
  const int64_t even = w.outputs / (4 * engine.threads.count());
  const int64_t at_once = is_small ? w.outputs : std::max(kFewestOutputs, even / kFewestOutputs * kFewestOutputs);
  const int64_t block = std::max<int64_t>(8 * kRows, kBlockFloats / w.depth / kRows * kRows);
  engine.share(w.outputs, at_once, [&](int64_t first, int64_t last, int thread) {
    float* room = engine.own[thread].at_least(room_size);
    for (int64_t row = 0; row < rows; row += block) {
      const int count = int(std::min(block, rows - row));
      multiply_outputs(w, x + row * w.depth, count, first, last, y + row * w.outputs, room);
    }
  });
}

void gate(Engine& engine, const float* gate, const float* up, int64_t count, float* y) {
  engine.share(count, kAloneRows, [&](int64_t first, int64_t last, int) {
    gate_range(gate + first, up + first, last - first, y + first);
  });
}

void normalize(Engine& engine, const float* x, const float* weight, float eps, int64_t rows, int64_t size, float* y) {
  engine.share(rows, std::max<int64_t>(1, kAloneRows / size), [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) normalize_row(x + row * size, weight, eps, size, y + row * size);
  });
}
