// Columns of a weight `w` [N, K] that is not quantised, with the functions of product_quantized.h. Only `turn` reads, four
// numbers at a time: a whole run of them would not fit into registers.
#define WEIGHT w
template <typename T, int BITS, int GROUP, int COUNT>
struct Column {
  typedef vec<T, 4> Four;
  const device T* column_of_w;
  const device T* numbers;
  bool is_inside;
  Four four;
  static inline uint depth(uint width) { return width; }
  inline void start(const device T* w, size_t column, uint K) { column_of_w = w + column * K; }
  inline void load(uint k, bool is_inside_now) {
    numbers = column_of_w + k;
    is_inside = is_inside_now;
  }
  inline void turn(int i) {
    four = Four(T(0.0f));
    if (is_inside) four = *(const device Four*)(numbers + i);
  }
  inline float at(int i) const { return float(four[i % 4]); }
};
