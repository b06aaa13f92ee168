// The arguments of one attention call.

#pragma once

#include <cstdint>

// One layer's memory, in the layout of kv_layout.h. attention.py has the same fields. 0 bits are float32; otherwise numbers are
// quantised in groups of `key_group` and `value_group`.
struct Pool {
  void *keys, *values;
  int64_t num_kv_heads, key_dim, value_dim, key_bits, value_bits, key_group, value_group;
};

// One row for each token and head of this step. Strides are in floats.
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
  const int32_t* sharing;  // [requests, 2]: the first request with the same leading blocks, or -1; and how many blocks
  const int32_t* both_ways;  // [requests]: 1 if its tokens also see later ones of the step; null if none do
  int64_t num_tokens, num_requests, table_width;
};
