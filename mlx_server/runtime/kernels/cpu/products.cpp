// Matrix products of any number of rows, with weights in the layout in which they are stored; SwiGLU; and RMS norm.
//
// A tile is kTile outputs of a few rows, summed in registers over a chunk of the depth, kStep numbers at a time. Every
// output is one sequence of multiply-adds over a chunk in each lane, one tree over the lanes, and one sum over the
// chunks, in every tile: so a row's bits depend only on the row and the weights. Unpacking 4-bit codes gives the even
// and then the odd numbers of kStep, so x is brought into that order first. Example with 8 numbers and 4 lanes:
//
//     bytes     1|0  3|2  5|4  7|6     high bits | low bits, as indices of the numbers
//     low       0 2 4 6                times x arranged as  0 2 4 6
//     high      1 3 5 7                                     1 3 5 7
//
// For many rows, x and the weights are packed first, so that a tile reads aligned floats one after another. Rows in
// memory are not aligned: most loads of whole vectors would touch two cache lines, and a tile's multiply-adds leave no
// time for that.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"
#include "vector.h"

namespace {

constexpr int kStep = 2 * kLanes, kTile = 4;

// Rows of a tile: kTile sums of each, and a few operands, fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 6;
#else
constexpr int kRows = 3;
#endif

constexpr int kPackedFrom = 32;             // rows; packing takes longer than it saves for fewer
constexpr int kFloatsPackedFrom = 96;       // the same for float32, which needs no unpacking
constexpr int64_t kChunk = 1024;            // most numbers of the depth that are summed at a time
constexpr int64_t kChunkStep = 128;         // a chunk is a multiple of this, so it has whole groups of weights
constexpr int64_t kPanelFloats = 32 << 10;  // weights that stay in the L2 cache for a few groups of rows
constexpr int64_t kPanelOutputs = 128;      // the same for packed weights: outputs of one chunk
constexpr int64_t kFewestOutputs = 64;      // that a thread takes at a time
constexpr int64_t kAlone = 100000;          // multiply-adds that are not worth a second thread
constexpr int64_t kAloneRows = 1 << 16;     // the same for norms and SwiGLU, in numbers

// Which weights a group of rows prefetches at each step: bytes [from, to) of a step's, `distance` bytes further on. A tile
// reads kTile rows in turns, which hardware does not predict.
struct Ahead {
  int64_t distance = 0, from = 0, to = 0;
};

constexpr int64_t kNearBytes = 8192, kLineBytes = 64;

inline Ahead part_ahead(int64_t distance, int64_t step_bytes, int64_t part, int64_t parts) {
  const int64_t lines = std::max<int64_t>(1, step_bytes / kLineBytes);
  return {distance, lines * part / parts * kLineBytes, lines * (part + 1) / parts * kLineBytes};
}

// kTile rows of weights from `first` on, with kNumbers numbers in each T; past the end, the last row again. `get<0>` and
// `get<1>` return the two vectors of a step; `enter` is called before the steps of a group.
template <typename T, int kNumbers = 1>
class Rows {
 public:
  static constexpr int64_t kStepBytes = kTile * kStep / kNumbers * int64_t(sizeof(T));
  static constexpr bool kIsLarge = sizeof(T) > 1;  // reading takes about as long as computing; unpacking takes longer

  Rows(const void* data, int64_t first, int64_t outputs, int64_t depth) {
    for (int i = 0; i < kTile; ++i) {
      row_[i] = static_cast<const T*>(data) + std::min(first + i, outputs - 1) * (depth / kNumbers);
    }
  }

  // The rows are adjacent in memory: place k of each is mapped to kTile * k. Near: all of the step, into the L1 cache;
  // else into the L2 cache.
  template <bool kNear>
  void fetch(int64_t k, const Ahead& ahead) const {
    const char* here = reinterpret_cast<const char*>(row_[0] + kTile * (k / kNumbers));
    if constexpr (kNear) {
      if (!kIsLarge && ahead.distance == 0) return;
      for (int64_t i = 0; i < kStepBytes; i += kLineBytes) __builtin_prefetch(here + ahead.distance + i);
    } else if constexpr (kIsLarge) {
      for (int64_t i = ahead.from; i < ahead.to; i += kLineBytes) __builtin_prefetch(here + ahead.distance + i, 0, 2);
    }
  }

 protected:
  const T* row_[kTile];
};

class Float32Rows : public Rows<float> {
 public:
  Float32Rows(const Weights& w, int64_t first) : Rows(w.data, first, w.outputs, w.depth) {}
  void enter(int64_t) {}
  template <int kHalf>
  Floats get(int i, int64_t k) const {
    return load(row_[i] + k + kHalf * kLanes);
  }
};

class Bfloat16Rows : public Rows<uint16_t> {
 public:
  Bfloat16Rows(const Weights& w, int64_t first) : Rows(w.data, first, w.outputs, w.depth) {}
  void enter(int64_t) {}
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

template <int kNumbers>
class AffineRows : public Rows<uint8_t, kNumbers> {
 public:
  AffineRows(const Weights& w, int64_t first)
      : Rows<uint8_t, kNumbers>(w.data, first, w.outputs, w.depth),
        scales_(w.scales, first, w.outputs, w.depth / w.group),
        biases_(w.biases, first, w.outputs, w.depth / w.group) {}

 protected:
  struct Numbers : Rows<float> {
    using Rows::Rows;
    float at(int i, int64_t group) const { return row_[i][group]; }
  };

  Numbers scales_, biases_;
};

class Affine8Rows : public AffineRows<1> {
 public:
  using AffineRows::AffineRows;
  void enter(int64_t group) {
    UNROLL for (int i = 0; i < kTile; ++i) scale_[i] = fill(scales_.at(i, group)), bias_[i] = fill(biases_.at(i, group));
  }
  template <int kHalf>
  Floats get(int i, int64_t k) const {
    return fused_in_first(widen(load_bytes(row_[i] + k + kHalf * kLanes)), scale_[i], bias_[i]);
  }

 private:
  Floats scale_[kTile], bias_[kTile];
};

class Affine4Rows : public AffineRows<2> {
 public:
  using AffineRows::AffineRows;
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
  template <int kHalf>
  Floats get(int i, int64_t k) const {
#if defined(__AVX512F__)  // looks up one of a group's 16 numbers by the low 4 bits of each lane
    const Ints codes = widen_whole(load_bytes(row_[i] + k / 2));
    Floats numbers;
    asm("vpermps %2, %1, %0" : "=v"(numbers) : "v"(kHalf == 0 ? codes : codes >> 4), "v"(table_[i]));
    return numbers;
#else
    const Bytes codes = load_bytes(row_[i] + k / 2);
    return fused_in_first(widen(kHalf == 0 ? codes & 15 : codes >> 4), scale_[i], bias_[i]);
#endif
  }

 private:
#if defined(__AVX512F__)
  Floats table_[kTile];
#else
  Floats scale_[kTile], bias_[kTile];
#endif
};

// M rows of x as given; or packed: for each step, the first vector of every row, then the second of every row.
struct PlainRows {
  const float* data;
  int64_t depth;
  template <int kHalf>
  Floats get(int m, int64_t k) const {
    return load(data + m * depth + k + kHalf * kLanes);
  }
};

template <int M>
struct PackedRows {
  const float* data;
  template <int kHalf>
  Floats get(int m, int64_t k) const {
    return load(data + k * M + (kHalf * M + m) * kLanes);
  }
};

// kTile rows of weights, packed in the same way.
struct PackedWeights {
  const float* data;
  void enter(int64_t) {}
  template <bool kNear>
  void fetch(int64_t, const Ahead&) const {}
  template <int kHalf>
  Floats get(int i, int64_t k) const {
    return load(data + k * kTile + (kHalf * kTile + i) * kLanes);
  }
};

inline int64_t up_to(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// The size of a chunk: the depth is cut evenly, in the same way for any rows and storage.
inline int64_t chunk_of(int64_t depth) {
  const int64_t chunks = (depth + kChunk - 1) / kChunk;
  return up_to((depth + chunks - 1) / chunks, kChunkStep);
}

// Rows are cut into even groups that fit the registers: the first row of group g.
inline int64_t groups_of(int64_t rows) { return (rows + kRows - 1) / kRows; }
inline int64_t first_of(int64_t g, int64_t rows) { return rows * g / groups_of(rows); }

// The fewest rows of a group: of two groups or more, and of as many as there are from kPackedFrom on.
constexpr int kFewest = kRows / 2, kFewestPacked = kRows - 1;
static_assert(kPackedFrom > kRows * (kRows - 2), "rows are packed in groups of kFewestPacked or kRows");

template <int kHalf, int M, typename W, typename X>
inline __attribute__((always_inline)) void add_half(const W& w, const X& x, int64_t k, Floats (&sum)[M][kTile]) {
  Floats left[kTile];
  UNROLL for (int i = 0; i < kTile; ++i) left[i] = in_register(w.template get<kHalf>(i, k));
  UNROLL for (int m = 0; m < M; ++m) {
    const Floats right = in_register(x.template get<kHalf>(m, k));
    UNROLL for (int i = 0; i < kTile; ++i) sum[m][i] = fused(left[i], right, sum[m][i]);
  }
}

// `count` of kTile outputs of M rows, over [from, to) of the depth; added to y unless `is_first`.
template <int M, bool kNear, typename W, typename X>
void tile(W w, X x, int64_t from, int64_t to, bool is_first, int64_t group, const Ahead& ahead, float* y, int64_t stride,
          int64_t count) {
  Floats sum[M][kTile] = {};
  for (int64_t start = from; start < to; start += group) {
    const int64_t end = std::min(start + group, to);
    w.enter(start / group);
    for (int64_t k = start; k < end; k += kStep) {
      w.template fetch<kNear>(k, ahead);
      add_half<0, M>(w, x, k, sum);
      add_half<1, M>(w, x, k, sum);
    }
  }
  Quad sums[M];
  UNROLL for (int m = 0; m < M; ++m) sums[m] = sums_of(sum[m]);
  if (count == kTile) {
    UNROLL for (int m = 0; m < M; ++m) {
      float* at = y + m * stride;
      store(at, is_first ? sums[m] : load<Quad>(at) + sums[m]);
    }
  } else {
    for (int m = 0; m < M; ++m) {
      for (int64_t i = 0; i < count; ++i) y[m * stride + i] = is_first ? sums[m][i] : y[m * stride + i] + sums[m][i];
    }
  }
}

// Outputs [first, last) of as many rows as fit the registers. Not inlined, so that registers are allocated for each
// number of rows on its own. Only the first group is near.
template <typename W, bool kNear, int M = kRows>
__attribute__((noinline)) void few_rows(int rows, const Weights& w, const float* x, int64_t first, int64_t last,
                                        const Ahead& ahead, float* y) {
  if constexpr (M >= (kNear ? 1 : kFewest)) {
    if (rows < M) return few_rows<W, kNear, M - 1>(rows, w, x, first, last, ahead, y);
    const int64_t group = w.group > 0 ? w.group : w.depth, chunk = chunk_of(w.depth);
    for (int64_t n = first; n < last; n += kTile) {
      const int64_t count = std::min<int64_t>(kTile, last - n);
      const W reader(w, n);
      for (int64_t k = 0; k < w.depth; k += chunk) {
        const int64_t end = std::min(k + chunk, w.depth);
        tile<M, kNear>(reader, PlainRows{x, w.depth}, k, end, k == 0, group, ahead, y + n, w.outputs, count);
      }
    }
  }
}

// The same for packed rows and weights, over `size` of the depth.
template <int M = kRows>
__attribute__((noinline)) void few_packed(int rows, const float* weights, const float* x, int64_t size, bool is_first,
                                          int64_t outputs, float* y, int64_t stride) {
  if constexpr (M >= kFewestPacked) {
    if (rows < M) return few_packed<M - 1>(rows, weights, x, size, is_first, outputs, y, stride);
    for (int64_t n = 0; n < outputs; n += kTile) {
      const int64_t count = std::min<int64_t>(kTile, outputs - n);
      tile<M, false>(PackedWeights{weights + n * size}, PackedRows<M>{x}, 0, size, is_first, size, Ahead(), y + n, stride,
                     count);
    }
  }
}

// Packs kTile rows of weights, over [from, to) of the depth.
template <typename W>
void pack_weights(W w, int64_t from, int64_t to, int64_t group, float* out) {
  for (int64_t start = from; start < to; start += group) {
    const int64_t end = std::min(start + group, to);
    w.enter(start / group);
    for (int64_t k = start; k < end; k += kStep) {
      UNROLL for (int i = 0; i < kTile; ++i) store(out + i * kLanes, w.template get<0>(i, k));
      UNROLL for (int i = 0; i < kTile; ++i) store(out + (kTile + i) * kLanes, w.template get<1>(i, k));
      out += kTile * kStep;
    }
  }
}

// Outputs [first, last) of few rows, cut into even groups. A panel of weights stays in the L2 cache while it is
// multiplied by all groups. Of one or two groups, the first prefetches weights a tile ahead. More groups share: each
// prefetches a part of the next panel, so that weights arrive while all rows are computed. Example: 16 rows in groups of
// 5, 5 and 6, with 512 bytes of weights a step, prefetch bytes [0, 128), [128, 320) and [320, 512) of every step.
template <typename W>
void multiply_outputs(const Weights& w, const float* x, int64_t rows, int64_t first, int64_t last, float* y) {
  const int64_t groups = groups_of(rows), tile_bytes = w.depth / kStep * W::kStepBytes;
  const int64_t most = std::max<int64_t>(kTile, kPanelFloats / w.depth), panels = (last - first + most - 1) / most;
  const int64_t width = up_to((last - first + panels - 1) / panels, kTile);
  for (int64_t panel = first; panel < last; panel += width) {
    const int64_t end = std::min(panel + width, last), alone = panel == first || groups <= 2 || !W::kIsLarge;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = first_of(g, rows);
      Ahead ahead;
      if (g == 0 && alone) {
        ahead = {std::max(kNearBytes, tile_bytes + tile_bytes / 4)};
      } else if (W::kIsLarge && groups > 2 && end < last) {
        ahead = part_ahead(width / kTile * tile_bytes, W::kStepBytes, g - alone, groups - alone);
      }
      const auto multiply_group = g == 0 && alone ? few_rows<W, true> : few_rows<W, !W::kIsLarge>;
      multiply_group(int(first_of(g + 1, rows) - row), w, x + row * w.depth, panel, end, ahead, y + row * w.outputs);
    }
  }
}

// Outputs [first, last) of many rows, which are packed. A panel's chunk of weights is packed into `room` and stays in the
// L2 cache while it is multiplied by all groups of rows, each of which stays in the L1 cache.
template <typename W>
void multiply_packed(const Weights& w, const float* packed, int64_t rows, int64_t first, int64_t last, float* y,
                     float* room) {
  const int64_t group = w.group > 0 ? w.group : w.depth, chunk = chunk_of(w.depth);
  for (; first < last; first += kPanelOutputs) {
    const int64_t end = std::min(first + kPanelOutputs, last);
    for (int64_t k = 0; k < w.depth; k += chunk) {
      const int64_t size = std::min(chunk, w.depth - k);
      for (int64_t n = first; n < end; n += kTile) {
        pack_weights(W(w, n), k, k + size, group, room + (n - first) * size);
      }
      for (int64_t g = 0; g < groups_of(rows); ++g) {
        const int64_t row = first_of(g, rows);
        few_packed(int(first_of(g + 1, rows) - row), room, packed + rows * k + row * size, size, k == 0, end - first,
                   y + row * w.outputs + first, w.outputs);
      }
    }
  }
}

// Calls work with a null pointer to the class that reads the storage of w.
template <typename Work>
void with_reader_of(const Weights& w, const Work& work) {
  switch (w.storage) {
    case Storage::kFloat32: return work(static_cast<Float32Rows*>(nullptr));
    case Storage::kBfloat16: return work(static_cast<Bfloat16Rows*>(nullptr));
    case Storage::kAffine8: return work(static_cast<Affine8Rows*>(nullptr));
    case Storage::kAffine4: return work(static_cast<Affine4Rows*>(nullptr));
  }
}

// The even numbers of every kStep, then the odd ones.
void arrange(const float* x, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kStep) {
    for (int i = 0; i < kLanes; ++i) to[k + i] = x[k + 2 * i], to[k + kLanes + i] = x[k + 2 * i + 1];
  }
}

// Groups [first, last) of the rows of x, over `size` numbers from k on; `is_even_first` as by `arrange`.
void pack_rows(const float* x, int64_t rows, int64_t depth, int64_t first, int64_t last, int64_t k, int64_t size,
               bool is_even_first, float* to) {
  for (int64_t g = first; g < last; ++g) {
    const int64_t begin = first_of(g, rows), m = first_of(g + 1, rows) - begin;
    for (int64_t row = begin; row < begin + m; ++row) {
      float* out = to + begin * size + (row - begin) * kLanes;
      for (int64_t i = k; i < k + size; i += kStep, out += m * kStep) {
        float step[kStep];
        const float* from = x + row * depth + i;
        if (is_even_first) arrange(from, kStep, step), from = step;
        store(out, load(from)), store(out + m * kLanes, load(from + kLanes));
      }
    }
  }
}

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-x), computed from e^-|x|, which cannot overflow.
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

void multiply(Engine& engine, const Weights* all, int64_t count, const float* x, int64_t rows, float* const* y) {
  const int64_t depth = all[0].depth, chunk = chunk_of(depth);
  const bool is_even_first = all[0].storage == Storage::kAffine4;
  const bool is_packed = rows >= (all[0].storage == Storage::kFloat32 ? kFloatsPackedFrom : kPackedFrom);
  int64_t outputs = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (all[i].storage != all[0].storage) {  // x is arranged differently for them
      multiply(engine, all, i, x, rows, y);
      return multiply(engine, all + i, count - i, x, rows, y + i);
    }
    outputs += all[i].outputs;
  }
  const bool is_small = rows * depth * outputs < kAlone || engine.threads.count() == 1;
  const int64_t parts = 4 * engine.threads.count();  // as many for each thread, unless there are few outputs
  const int64_t at_once = is_small ? outputs : std::max(kFewestOutputs, up_to((outputs + parts - 1) / parts, kTile));
  float* ordered = is_packed || is_even_first ? engine.arranged.at_least(rows * depth) : nullptr;
  const int64_t room_size = is_packed ? kPanelOutputs * chunk : 0;
  for (Scratch& own : engine.own) own.at_least(room_size);
  if (is_packed) {
    const int64_t groups = groups_of(rows);
    engine.share(groups, is_small ? groups : (groups + 3) / 4, [&](int64_t first, int64_t last, int) {
      for (int64_t k = 0; k < depth; k += chunk) {
        const int64_t size = std::min(chunk, depth - k);
        pack_rows(x, rows, depth, first, last, k, size, is_even_first, ordered + rows * k);
      }
    });
  } else if (is_even_first) {
    arrange(x, rows * depth, ordered);
  }
  engine.share(outputs, at_once, [&](int64_t first, int64_t last, int thread) {
    for (int64_t i = 0; i < count && last > 0; first -= all[i].outputs, last -= all[i].outputs, ++i) {
      const int64_t from = std::max<int64_t>(first, 0), to = std::min(last, all[i].outputs);
      if (from >= to) continue;
      with_reader_of(all[i], [&](auto* reader) {
        using W = std::remove_pointer_t<decltype(reader)>;
        if (is_packed) {
          multiply_packed<W>(all[i], ordered, rows, from, to, y[i], engine.own[thread].at_least(room_size));
        } else {
          multiply_outputs<W>(all[i], is_even_first ? ordered : x, rows, from, to, y[i]);
        }
      });
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
