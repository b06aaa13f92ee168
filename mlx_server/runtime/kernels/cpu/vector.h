// Vectors as wide as the CPU's, and operations on them, in the vector extension of GCC and Clang: the same code is for
// x86-64 and Arm. Without immintrin.h, whose thousands of functions take a fifth of the time to compile a file.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 32")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// The indices i, j, k, l of every four lanes.
#if defined(__AVX512F__)
#define OF_FOURS(i, j, k, l) OF_EIGHT(i, j, k, l), OF_EIGHT(i + 8, j + 8, k + 8, l + 8)
#define OF_EIGHT(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#elif defined(__AVX__)
#define OF_FOURS(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#else
#define OF_FOURS(i, j, k, l) i, j, k, l
#endif

namespace {

// Floats in a vector. The instruction set is chosen by the compiler's flags.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int N>
struct Vector {
  typedef float type __attribute__((vector_size(N * 4)));
};
typedef Vector<kLanes>::type Floats;
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

template <typename T = Floats>
inline T load(const float* from) {
  T v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename T>
inline void store(float* to, T v) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats fill(float x) { return Floats{} + x; }

inline Floats select(Ints mask, Floats yes, Floats no) { return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask)); }

// a * b + c, rounded once if the CPU can. Explicit, so that bits do not depend on a compiler's choice.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__FMA__) && !defined(__AVX512F__) && __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);  // Clang: groups of rows take a fifth less time than with assembly
#elif defined(__AVX512F__) || (defined(__FMA__) && defined(__clang__))
  asm("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
#elif defined(__FMA__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The same where a is not used again, and b and c are: the result takes a's register, which saves a move.
inline Floats fused_in_first(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  asm("vfmadd213ps %2, %1, %0" : "+v"(a) : "v"(b), "v"(c));
  return a;
#else
  return fused(a, b, c);
#endif
}

// Keeps a loaded vector in a register. Compilers that run short of registers load again at each use, and loads limit the
// speed of a product.
inline Floats in_register(Floats v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

inline Bytes load_bytes(const void* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

inline Ints widen_whole(Bytes codes) {
#if defined(__x86_64__) && !defined(__clang__)
  asm("" : "+x"(codes));  // otherwise GCC loads and moves the bytes one by one
#endif
  return __builtin_convertvector(codes, Ints);
}

inline Floats widen(Bytes codes) { return __builtin_convertvector(widen_whole(codes), Floats); }

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

// Joins all lanes, by halves.
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

typedef Vector<4>::type Quad;

// The sums of every four lanes of a, b, c and d, side by side.
inline Floats sums_of_fours(Floats a, Floats b, Floats c, Floats d) {
#if defined(__aarch64__)
  return (Floats)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
  constexpr int N = kLanes;
  const Floats ab = SHUFFLE(a, b, OF_FOURS(0, N, 1, N + 1)) + SHUFFLE(a, b, OF_FOURS(2, N + 2, 3, N + 3));
  const Floats cd = SHUFFLE(c, d, OF_FOURS(0, N, 1, N + 1)) + SHUFFLE(c, d, OF_FOURS(2, N + 2, 3, N + 3));
  return SHUFFLE(ab, cd, OF_FOURS(0, 1, N, N + 1)) + SHUFFLE(ab, cd, OF_FOURS(2, 3, N + 2, N + 3));
#endif
}

template <int N = kLanes>
inline Quad quarter(typename Vector<N>::type v) {
  if constexpr (N == 4) {
    return v;
  } else {
    typename Vector<N / 2>::type half[2];
    std::memcpy(half, &v, sizeof v);
    return quarter<N / 2>(half[0] + half[1]);
  }
}

// The sum of the lanes of each of four vectors, all in the same order.
inline Quad sums_of(const Floats* v) { return quarter(sums_of_fours(v[0], v[1], v[2], v[3])); }

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

}  // namespace
