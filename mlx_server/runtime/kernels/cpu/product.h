// Vectors as wide as the CPU's, 2^x over them, and the one matrix product that attention is made of.
//
// Written with the vector extension that GCC and Clang share, so the same text serves x86-64 and Arm.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

namespace {

// Floats in a vector, accumulators that fit the registers beside the operands, and rows of a product at once.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 24, kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kAccumulators = 12, kMaxRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kAccumulators = 24, kMaxRows = 6;
#else
constexpr int kLanes = 4, kAccumulators = 12, kMaxRows = 6;
#endif

constexpr int kPanel = 32;                  // columns of a full panel
constexpr int kVectors = kPanel / kLanes;   // vectors in one of its rows
constexpr int kLine = 16;                   // floats in a cache line, or in half of one

template <int N>
struct Vector {
  typedef float type __attribute__((vector_size(N * 4)));
};
typedef Vector<kLanes>::type Floats;
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

inline Floats fill(float x) { return Floats{} + x; }

inline Floats select(Ints mask, Floats yes, Floats no) { return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask)); }

struct Larger {
  template <typename T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct Smaller {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

struct Plus {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};

// Brings all lanes together by halves.
template <typename Join, int N = kLanes>
inline float across(typename Vector<N>::type v) {
  if constexpr (N == 2) {
    return Join()(v[0], v[1]);
  } else {
    typename Vector<N / 2>::type half[2];
    std::memcpy(half, &v, sizeof v);
    return across<Join, N / 2>(Join()(half[0], half[1]));
  }
}

constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: added to less than 2^22, the sum's low bits are a whole number
constexpr int32_t kRoundingBits = 0x4B400000;

// 2^x for x <= 0 within 2 ulp; exactly 0 from -127 down. x = n + f with |f| <= 1/2: 2^f by a polynomial (minimax of
// the relative error, 2e-9), 2^n put together as exponent bits.
inline Floats exp2_of(Floats x) {
  x = Larger()(x, fill(-127.0f));
  const Floats shifted = x + kRounding;
  const Ints n = (Ints)shifted - kRoundingBits;
  const Floats f = x - (shifted - kRounding);
  Floats p = f * 1.5353362e-4f + 1.3398874e-3f;
  p = p * f + 9.618437e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return p * (Floats)((n + 127) << 23);
}

inline float exp2_of(float x) { return exp2_of(fill(x))[0]; }

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

// C[M rows][V vectors] (+)= A[M][b.total] B. U independent sums hide the latency of the multiply-add when M x V is
// small. Panels lie anywhere, which hardware cannot foresee: each row asks for the one that lies a panel ahead.
template <int M, int V>
void multiply_columns(const float* a, int64_t lda, const Panels& b, int64_t column, float* c, int64_t ldc, bool add) {
  constexpr int U = power_within(kAccumulators / (M * V), 4);
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
  constexpr int V = power_within(kAccumulators / M, kVectors);
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
