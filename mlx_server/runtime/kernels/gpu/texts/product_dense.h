// Columns of a weight `w` [N, K] that is not quantised. `load` reads COUNT numbers of a column, from k on.
#define WEIGHT w
template <typename T, int BITS, int GROUP, int COUNT>
struct Column {
  typedef vec<T, 4> Four;
  const device T* numbers;
  Four fours[COUNT / 4];
  static inline uint depth(uint width) { return width; }
  inline void start(const device T* w, size_t column, uint K) { numbers = w + column * K; }
  inline void clear() {
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) fours[j] = Four(T(0.0f));
  }
  inline void load(uint k) {
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) fours[j] = *(const device Four*)(numbers + (k + uint(4 * j)));
  }
  inline float at(int i) const { return float(fours[i / 4][i % 4]); }
};
