// Columns of a weight `w` [N, K * BITS / 32] that MLX has quantised, with a scale and a bias for each GROUP of a column.
// `load` takes COUNT numbers of a column, from k on, all of one group; zeros if they are past K. `turn` says that the next
// four are those from i on, and `at` dequantises one of these.
#define WEIGHT w, scales, biases
template <typename T, int BITS, int GROUP, int COUNT>
struct Column {
  const device uint32_t* codes;
  const device T* scales;
  const device T* biases;
  uint32_t words[COUNT * BITS / 32];
  float scale;
  float offset;
  static inline uint depth(uint width) { return width * uint(32 / BITS); }
  inline void start(const device uint32_t* w, const device T* s, const device T* b, size_t column, uint K) {
    codes = w + column * (K / (32 / BITS));
    scales = s + column * (K / GROUP);
    biases = b + column * (K / GROUP);
  }
  inline void load(uint k, bool is_inside) {
    constexpr int WORDS = COUNT * BITS / 32;
    const uint first = k / (32 / BITS);
    scale = 0.0f;
    offset = 0.0f;
    if (is_inside) {
#pragma unroll
      for (int j = 0; j + 4 <= WORDS; j += 4) {
        const vec<uint32_t, 4> four = *(const device vec<uint32_t, 4>*)(codes + (first + uint(j)));
#pragma unroll
        for (int i = 0; i < 4; ++i) words[j + i] = four[i];
      }
#pragma unroll
      for (int j = WORDS / 4 * 4; j < WORDS; ++j) words[j] = codes[first + uint(j)];
      scale = float(scales[k / GROUP]);
      offset = float(biases[k / GROUP]);
    }
  }
  inline void turn(int) {}
  inline float at(int i) const {
    constexpr uint32_t MASK = (1u << BITS) - 1u;
    return fma(scale, float((words[i * BITS / 32] >> uint(i * BITS % 32)) & MASK), offset);
  }
};
