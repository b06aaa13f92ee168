// K and V of one layer as they lie in memory, written by the token and read as rows of 32 floats.
//
// One block of one KV head is one contiguous run, laid out so that every inner loop streams it:
//
//     K  [key_dim][32]                  transposed: the 32 tokens are the vector's lanes
//     V  [ceil(value_dim / 32)][32][w]  panels of w = 32 columns, the last one narrower; a token is a row
//
// Rows of V may be read up to kLanes - 1 floats past their end (the surplus lanes are dropped), so the value pool has
// that much slack after its last block. In fewer bits a run has the same order, see QuantizedRows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_product.h"
#include "engine.h"

namespace {

constexpr int kBlock = kPanel;

// Rows as they are: read in place.
class WholeRows {
 public:
  static constexpr double kReadNs = 0.16;  // a number, at 25 bytes/ns
  static constexpr int64_t kRoom = 0;      // floats that a panel of `values` needs, and each 32 rows of `keys`

  explicit WholeRows(const Pool& pool) : pool_(pool) {}

  // Stores one token's K and V under one head.
  void write(int64_t block, int64_t offset, int64_t head, const float* key, const float* value) const {
    float* column = key_run(block, head) + offset;
    for (int64_t d = 0; d < pool_.key_dim; ++d) column[d * kBlock] = key[d];
    float* panel = value_run(block, head);
    for (int64_t d = 0; d < pool_.value_dim; d += kPanel, panel += kBlock * kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, pool_.value_dim - d);
      std::memcpy(panel + offset * columns, value + d, columns * sizeof(float));
    }
  }

  // Rows [first, first + count) of K: a number of each of 32 tokens.
  const float* keys(int64_t block, int64_t head, int64_t first, int64_t, float*) const {
    return key_run(block, head) + first * kBlock;
  }

  // The panel of V that begins at `column`, as far as `tokens` rows of it; of block `later`, K will be read.
  const float* values(int64_t block, int64_t head, int64_t column, int64_t, int64_t, float*) const {
    return value_run(block, head) + column * kBlock;
  }

  // What a product fetches while it works on something else: where `keys` or `values` will be.
  const float* keys_ahead(int64_t block, int64_t head, int64_t first, float*) const {
    return keys(block, head, first, 0, nullptr);
  }
  const float* values_ahead(int64_t block, int64_t head, int64_t column, float*) const {
    return values(block, head, column, 0, block, nullptr);
  }

 private:
  float* key_run(int64_t block, int64_t head) const {
    return static_cast<float*>(pool_.keys) + (block * pool_.num_kv_heads + head) * pool_.key_dim * kBlock;
  }
  float* value_run(int64_t block, int64_t head) const {
    return static_cast<float*>(pool_.values) + (block * pool_.num_kv_heads + head) * pool_.value_dim * kBlock;
  }

  const Pool& pool_;
};

struct Affine {
  float scale, bias;
};

// Packs a group of numbers into a row of 4 * kBits bytes. As MLX quantises: the number farthest from 0 comes back as it
// was, and 0 as 0, but for a rounding, where it lies between the others.
template <int kBits>
Affine quantize(const float* numbers, uint8_t* row) {
  constexpr int kBytes = 4 * kBits;
  constexpr float kMost = (1 << kBits) - 1, kSmallestScale = 1e-7f;
  Floats lowest = load(numbers), highest = lowest;
  for (int i = kLanes; i < kPanel; i += kLanes) {
    const Floats x = load(numbers + i);
    lowest = Smaller()(lowest, x);
    highest = Larger()(highest, x);
  }
  const float low = across<Smaller>(lowest), high = across<Larger>(highest);
  const float step = std::max((high - low) / kMost, kSmallestScale);
  const bool is_low_far = low + high < 0;
  const float edge = is_low_far ? low : high, guess = is_low_far ? step : -step;
  const float steps = __builtin_rintf(edge / guess);
  const Affine affine = steps == 0 ? Affine{guess, 0.0f} : Affine{edge / steps, edge};
  uint8_t codes[kPanel];
  for (int v = 0; v < kPanel; v += kLanes) {
    const Floats place = (load(numbers + v) - affine.bias) / affine.scale;
    const Floats clamped = Smaller()(Larger()(place, fill(0.0f)), fill(kMost));
    const Bytes bytes = __builtin_convertvector((Ints)(clamped + kRounding) - kRoundingBits, Bytes);
    std::memcpy(codes + v, &bytes, sizeof bytes);
  }
  for (int b = 0; b < kBytes; ++b) {
    row[b] = codes[b];
    for (int n = 1; n < kPanel / kBytes; ++n) row[b] |= codes[b + n * kBytes] << n * kBits;
  }
  return affine;
}

// K and V quantised to 8 or 4 bits; the two may differ. A run holds the codes, then the scales, then the biases of its
// groups.
//
//     K codes   [key_dim / 32][4 * key_bits][32]      a row of bytes has a number of each of 32 tokens
//     V codes   [value_dim / 32][32][4 * value_bits]  a row of bytes has 32 numbers of one token
//     scales    [dim / 32][32] floats, a token each; biases the same
//
// Each 32 numbers of a row are a group: a number is code * scale + bias. Of 4 bits, numbers i and i + 16 of each 32 share
// byte i, low bits first; tokens share no byte, so that threads may write side by side.
//
// Rows are widened into a few KiB that stay in the nearest cache, 32 or 64 of them at a time: memory is read packed, and
// the products are those of whole rows. Runs are short and scattered, so hardware prefetching fails: each row of bytes
// prefetches another, V's rows while K is widened and K's while V is.
template <int kKeyBits, int kValueBits>
class QuantizedRows {
 public:
  static constexpr double kReadNs = 0.05;  // a number, most of it for widening
  static constexpr int64_t kRoom = kPanel * kBlock;

  explicit QuantizedRows(const Pool& pool)
      : pool_(pool),
        keys_(pool.keys, pool.key_dim, kKeyBytes),
        values_(pool.values, pool.value_dim, kValueBytes) {}

  void write(int64_t block, int64_t offset, int64_t head, const float* key, const float* value) const {
    const Run k = keys_.run(index(block, head));
    for (int64_t d = 0, g = offset; d < pool_.key_dim; d += kPanel, g += kBlock) {
      uint8_t row[kKeyBytes];
      const Affine affine = quantize<kKeyBits>(key + d, row);
      k.scales[g] = affine.scale;
      k.biases[g] = affine.bias;
      uint8_t* column = k.codes + d / kPanel * kKeyBytes * kBlock + offset;
      for (int b = 0; b < kKeyBytes; ++b) column[b * kBlock] = row[b];
    }
    const Run v = values_.run(index(block, head));
    for (int64_t d = 0, g = offset; d < pool_.value_dim; d += kPanel, g += kBlock) {
      const Affine affine = quantize<kValueBits>(value + d, v.codes + g * kValueBytes);
      v.scales[g] = affine.scale;
      v.biases[g] = affine.bias;
    }
  }

  // Fetches V of the same block meanwhile.
  const float* keys(int64_t block, int64_t head, int64_t first, int64_t count, float* room) const {
    const Run run = keys_.run(index(block, head)), later = values_.run(index(block, head));
    for (int64_t d = 0; d < count; d += kPanel) {
      if (first + d < pool_.value_dim) fetch_group(later, first + d);
      const uint8_t* ahead = later.codes + (first + d) * kValueBytes;
      const int64_t group = (first + d) / kPanel * kBlock;
      Floats scales[kVectors], biases[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        scales[v] = load(run.scales + group + v * kLanes);
        biases[v] = load(run.biases + group + v * kLanes);
      }
      const uint8_t* codes = run.codes + (first + d) / kPanel * kKeyBytes * kBlock;
      float* rows = room + d * kBlock;
      for (int b = 0; b < kKeyBytes; ++b, codes += kBlock, ahead += kBlock * kValueBytes / kKeyBytes) {
        __builtin_prefetch(ahead);
        UNROLL for (int v = 0; v < kVectors; ++v) {
          const Bytes bytes = load_bytes(codes + v * kLanes);
          UNROLL for (int n = 0; n < kPanel / kKeyBytes; ++n) {
            const Floats numbers = widen(part<kKeyBits>(bytes, n)) * scales[v] + biases[v];
            store(rows + (b + n * kKeyBytes) * kBlock + v * kLanes, numbers);
          }
        }
      }
    }
    return room;
  }

  // Fetches K of block `later` meanwhile.
  const float* values(int64_t block, int64_t head, int64_t column, int64_t tokens, int64_t later, float* room) const {
    const Run run = values_.run(index(block, head));
    const Run next = keys_.run(index(later, head));
    if (column < pool_.key_dim) fetch_group(next, column);
    const uint8_t* ahead = next.codes + column * kKeyBytes;
    const int64_t group = column / kPanel * kBlock;
    const uint8_t* codes = run.codes + column / kPanel * kValueBytes * kBlock;
    for (int64_t token = 0; token < tokens; ++token, codes += kValueBytes, ahead += kKeyBytes) {
      __builtin_prefetch(ahead);
      const Floats scale = fill(run.scales[group + token]), bias = fill(run.biases[group + token]);
      UNROLL for (int v = 0; v < kVectors; ++v) {
        const Bytes bytes = part<kValueBits>(load_bytes(codes + v * kLanes % kValueBytes), v * kLanes / kValueBytes);
        store(room + token * kPanel + v * kLanes, widen(bytes) * scale + bias);
      }
    }
    return room;
  }

  // A product has nothing to fetch: widened rows are in the cache.
  const float* keys_ahead(int64_t, int64_t, int64_t, float* room) const { return room; }
  const float* values_ahead(int64_t, int64_t, int64_t, float* room) const { return room; }

 private:
  static constexpr int kKeyBytes = 4 * kKeyBits, kValueBytes = 4 * kValueBits;

  struct Run {
    uint8_t* codes;
    float *scales, *biases;
  };

  // All runs of K or of V.
  class Runs {
   public:
    Runs(void* memory, int64_t dim, int64_t bytes)
        : memory_(static_cast<uint8_t*>(memory)), codes_(dim * bytes), scales_(dim / kPanel * kBlock) {}

    Run run(int64_t index) const {
      uint8_t* codes = memory_ + index * (codes_ + 2 * scales_ * int64_t(sizeof(float)));
      float* scales = reinterpret_cast<float*>(codes + codes_);
      return {codes, scales, scales + scales_};
    }

   private:
    uint8_t* memory_;
    int64_t codes_, scales_;  // bytes, and floats, of a run
  };

  // The n-th number of each byte, of two at most.
  template <int kBits>
  static Bytes part(Bytes bytes, int n) {
    if (kBits == 8) return bytes;
    return n == 0 ? bytes & 15 : bytes >> kBits;
  }

  int64_t index(int64_t block, int64_t head) const { return block * pool_.num_kv_heads + head; }

  // Asks for the scales and biases of the group whose dimensions begin at `first`.
  static void fetch_group(const Run& run, int64_t first) {
    for (int at = 0; at < kBlock; at += kLine) {
      __builtin_prefetch(run.scales + first / kPanel * kBlock + at);
      __builtin_prefetch(run.biases + first / kPanel * kBlock + at);
    }
  }

  const Pool& pool_;
  const Runs keys_, values_;
};

}  // namespace
