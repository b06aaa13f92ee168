// The matrix product of attention: queries x K, and weights x V.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace {

// Accumulators that fit the registers beside the operands, and the most rows of a product at once.
#if defined(__AVX512F__)
constexpr int kAccumulators = 24, kMaxRows = 6;
#elif defined(__aarch64__)
constexpr int kAccumulators = 24, kMaxRows = 6;
#else
constexpr int kAccumulators = 12, kMaxRows = 3;
#endif

constexpr int kSums = 2;  // sums of each number of a product: of its even and of its odd terms

constexpr int kPanel = 32;                  // columns of a full panel
constexpr int kVectors = kPanel / kLanes;   // vectors in one of its rows
constexpr int kLine = 16;                   // floats in a cache line, or in half of one

// B of a product, as panels of `depth` rows each (the last may hold fewer, down to `total` rows in all). `next` is
// what will be read after them.
struct Panels {
  const float* const* at;
  int64_t depth, total, stride;
  const float* next;
};

constexpr int power_within(int limit, int most) {
  int p = 1;
  while (p * 2 <= limit && p * 2 <= most) p *= 2;
  return p;
}

// C[M rows][V vectors] (+)= A[M][b.total] B. Independent sums hide the latency of the multiply-add when M x V is small.
// Their number is the same for every M, V and b.total, so that these do not change the bits of a row. Hardware cannot
// predict where the next panel is: each row prefetches the one that is a panel ahead.
template <int M, int V>
void multiply_columns(const float* a, int64_t lda, const Panels& b, int64_t column, float* c, int64_t ldc, bool add) {
  constexpr int U = kSums;
  Floats sum[U][M][V] = {};
  for (int64_t done = 0, panel = 0; done < b.total; done += b.depth, ++panel) {
    const float* rows = b.at[panel] + column;
    const float* ahead = (done + b.depth < b.total ? b.at[panel + 1] : b.next) + column;
    const float* left = a + done;
    const int64_t depth = std::min(b.depth, b.total - done);
    int64_t k = 0;
    for (; k + U <= depth; k += U) {
      UNROLL for (int u = 0; u < U; ++u) {
        for (int f = 0; f < V * kLanes; f += kLine) __builtin_prefetch(ahead + (k + u) * b.stride + f);
        Floats right[V];
        UNROLL for (int v = 0; v < V; ++v) right[v] = load(rows + (k + u) * b.stride + v * kLanes);
        UNROLL for (int m = 0; m < M; ++m) {
          UNROLL for (int v = 0; v < V; ++v) sum[u][m][v] += left[m * lda + k + u] * right[v];
        }
      }
    }
    for (; k < depth; ++k) {
      UNROLL for (int m = 0; m < M; ++m) {
        UNROLL for (int v = 0; v < V; ++v) sum[0][m][v] += left[m * lda + k] * load(rows + k * b.stride + v * kLanes);
      }
    }
  }
  UNROLL for (int m = 0; m < M; ++m) {
    UNROLL for (int v = 0; v < V; ++v) {
      UNROLL for (int u = 1; u < U; ++u) sum[0][m][v] += sum[u][m][v];
      float* at = c + m * ldc + v * kLanes;
      store(at, add ? load(at) + sum[0][m][v] : sum[0][m][v]);
    }
  }
}

template <int M>
void multiply_rows(const float* a, int64_t lda, const Panels& b, int vectors, float* c, int64_t ldc, bool add) {
  constexpr int V = power_within(kAccumulators / (kSums * M), kVectors);
  int v = 0;
  for (; v + V <= vectors; v += V) multiply_columns<M, V>(a, lda, b, v * kLanes, c + v * kLanes, ldc, add);
  for (; v < vectors; ++v) multiply_columns<M, 1>(a, lda, b, v * kLanes, c + v * kLanes, ldc, add);
}

template <int M = kMaxRows>
void multiply_few(int m, const float* a, int64_t lda, const Panels& b, int vectors, float* c, int64_t ldc, bool add) {
  if constexpr (M > 0) {
    if (m == M) return multiply_rows<M>(a, lda, b, vectors, c, ldc, add);
    multiply_few<M - 1>(m, a, lda, b, vectors, c, ldc, add);
  }
}

// C[rows][vectors] (+)= A[rows][b.total] B; `lda` and `ldc` are the floats from row to row. The rows are cut into
// even groups that fit the registers.
void multiply(int rows, const float* a, int64_t lda, const Panels& b, int vectors, float* c, int64_t ldc, bool add) {
  for (int done = 0, groups = (rows + kMaxRows - 1) / kMaxRows; groups > 0; --groups) {
    const int m = (rows - done + groups - 1) / groups;
    multiply_few(m, a + done * lda, lda, b, vectors, c + done * ldc, ldc, add);
    done += m;
  }
}

}  // namespace
