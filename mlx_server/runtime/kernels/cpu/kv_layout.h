// K and V of one layer as they lie in memory, written by the token and read as rows of 32 floats.
//
// One block of one KV head is one contiguous run, laid out so that every inner loop streams it:
//
//     K  [key_dim][32]                  transposed: the 32 tokens are the vector's lanes
//     V  [ceil(value_dim / 32)][32][w]  panels of w = 32 columns, the last one narrower; a token is a row
//
// Rows of V may be read up to kLanes - 1 floats past their end (the surplus lanes are dropped), so the value pool has
// that much slack after its last block. In fewer bits a run has the same order, see quantized.h.

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

}  // namespace
