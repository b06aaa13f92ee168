// Sums over the 32 lanes of a simdgroup of HELD values a lane. At each HOP a lane keeps half of its values, adds what the
// lane HOP away has of them, and gives it the other half, until each is left with one; then both add and keep it. So 16
// values take 8 + 4 + 2 + 1 + 1 shuffles in place of 16 x 5. Lanes meet in the same order however many values they hold:
// l and l ^ 16 first, l and l ^ 1 last. Returns which value the lane's first one is.
template <int HELD, int HOP>
struct Meeting {
  static inline int sum(thread float* values, int lane) {
    constexpr int KEPT = HELD > 1 ? HELD / 2 : 1;
    const bool is_upper = HELD > 1 && (lane & HOP) != 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const float low = values[i];  // by name: choosing between elements of an array would put it into memory
      const float high = values[HELD > 1 ? i + KEPT : i];
      values[i] = (is_upper ? high : low) + simd_shuffle_xor(is_upper ? low : high, ushort(HOP));
    }
    return (is_upper ? KEPT : 0) + Meeting<KEPT, HOP / 2>::sum(values, lane);
  }
};
template <int HELD>
struct Meeting<HELD, 0> {
  static inline int sum(thread float*, int) { return 0; }
};
