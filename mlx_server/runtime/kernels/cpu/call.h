// What one call of attention is given.

#pragma once

#include <cstdint>

// One layer's memory, in the layout of pool.h. Mirrored field by field in attention.py. Bits 0 are whole floats; else so many numbers of a row share a scale as
// a group has.
struct Pool {
  void *keys, *values;
  int64_t num_kv_heads, key_dim, value_dim, key_bits, value_bits, key_group, value_group;
};

// Rows of this step's tokens, one a head. Strides are in floats.
struct Tokens {
  const float* data;
  int64_t token_stride, head_stride;

  const float* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// `keys` and `sinks` may be null; `window` 0 is none.
struct Call {
  Tokens queries, keys, values;
  const float* sinks;
  float* output;
  Pool pool;
  int64_t num_heads, window;
  double scale;
  const int64_t* slots;
  const int32_t *query_starts, *context_lens, *block_tables;
  const int32_t* sharing;  // of each request: whose leading blocks it has, itself included, or -1; and how many of them
  const int32_t* both_ways;  // of each request: 1 if its tokens see the later ones of the step, too; null if none do
  int64_t num_tokens, num_requests, table_width;
};
