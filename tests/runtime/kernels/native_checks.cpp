// The native CPU code without MLX and Python, held against plain sums in double: for machines that are only emulated.
// Prints a line for each thing that is wrong; ends with status 0 if there is none. With an argument it tries fewer
// numbers of rows: all up to 13, and those around 32, from which on rows are packed.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine.h"

namespace {

using Numbers = std::vector<float>;

std::mt19937 source(7);
int faults = 0;

Numbers normal(size_t count) {
  std::normal_distribution<float> draw;
  Numbers x(count);
  for (float& number : x) number = draw(source);
  return x;
}

void expect(bool is_right, const std::string& what) {
  if (!is_right) ++faults, std::printf("wrong: %s\n", what.c_str());
}

double error(const Numbers& got, const std::vector<double>& want) {
  double most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double off = std::fabs(got[i] - want[i]);
    most = off <= most ? most : off;  // keeps a NaN
  }
  return most;
}

// Weights in each storage, with the numbers that they stand for.
struct Made {
  Weights weights;
  std::vector<uint8_t> bytes;
  Numbers scales, biases;
  std::vector<double> meant;
};

Made make_weights(Storage storage, int64_t outputs, int64_t depth) {
  Made made;
  const int64_t count = outputs * depth, group = 32;
  const bool is_affine = storage == Storage::kAffine8 || storage == Storage::kAffine4;
  const Numbers drawn = normal(count);
  made.meant.assign(drawn.begin(), drawn.end());
  if (storage == Storage::kFloat32) {
    made.bytes.resize(count * 4);
    std::memcpy(made.bytes.data(), drawn.data(), count * 4);
  } else if (storage == Storage::kBfloat16) {
    for (int64_t i = 0; i < count; ++i) {
      uint32_t whole;
      std::memcpy(&whole, &drawn[i], 4);
      whole &= 0xFFFF0000;
      made.bytes.push_back(uint8_t(whole >> 16)), made.bytes.push_back(uint8_t(whole >> 24));
      float cut;
      std::memcpy(&cut, &whole, 4);
      made.meant[i] = cut;
    }
  } else {
    made.scales = normal(count / group), made.biases = normal(count / group);
    const int most = storage == Storage::kAffine4 ? 15 : 255;
    std::uniform_int_distribution<int> code(0, most);
    for (int64_t i = 0; i < count; ++i) {
      const int number = code(source);
      made.scales[i / group] /= i % group == 0 ? most : 1;
      made.meant[i] = double(number) * made.scales[i / group] + made.biases[i / group];
      if (most == 255 || i % 2 == 0) {
        made.bytes.push_back(uint8_t(number));
      } else {
        made.bytes.back() |= uint8_t(number << 4);
      }
    }
  }
  made.weights = {storage, outputs, depth, is_affine ? group : 0, made.bytes.data(), made.scales.data(), made.biases.data()};
  return made;
}

void check_products(Engine& engine, bool tries_all) {
  const char* names[] = {"float32", "bfloat16", "8 bits", "4 bits"};
  for (const Storage storage : {Storage::kFloat32, Storage::kBfloat16, Storage::kAffine8, Storage::kAffine4}) {
    for (const auto& [outputs, depth] : {std::pair<int64_t, int64_t>{7, 32}, {130, 96}, {258, 320}, {37, 1152}, {9, 2176}}) {
      const Made made = make_weights(storage, outputs, depth);
      const int64_t most = 40;
      const Numbers x = normal(most * depth);
      Numbers alone(most * outputs);
      std::vector<double> want(most * outputs);
      for (int64_t m = 0; m < most; ++m) {
        multiply(engine, made.weights, x.data() + m * depth, 1, alone.data() + m * outputs);
        for (int64_t n = 0; n < outputs; ++n) {
          for (int64_t k = 0; k < depth; ++k) want[m * outputs + n] += x[m * depth + k] * made.meant[n * depth + k];
        }
      }
      const std::string what = std::string("product of ") + names[int(storage)] + ", depth " + std::to_string(depth);
      expect(error(alone, want) < 1e-4 * std::sqrt(double(depth)), what);
      for (int64_t rows = 2; rows <= most; ++rows) {
        if (!tries_all && rows > 13 && (rows < 31 || rows > 33)) continue;
        Numbers together(rows * outputs);
        multiply(engine, made.weights, x.data(), rows, together.data());
        const bool is_same = std::memcmp(together.data(), alone.data(), together.size() * 4) == 0;
        expect(is_same, what + ": other bits among " + std::to_string(rows) + " rows");
      }
    }
  }
}

void check_rows(Engine& engine) {
  const int64_t rows = 5, size = 48;
  const Numbers x = normal(rows * size), weight = normal(size), up = normal(rows * size);
  Numbers y(rows * size), gated(rows * size - 3);
  std::vector<double> want(rows * size), want_gated(gated.size());
  for (int64_t i = 0; i < rows * size; ++i) {
    double squares = 0;
    for (int64_t k = 0; k < size; ++k) squares += double(x[i / size * size + k]) * x[i / size * size + k];
    want[i] = x[i] / std::sqrt(squares / size + 1e-5) * weight[i % size];
    if (i < int64_t(gated.size())) want_gated[i] = x[i] / (1 + std::exp(-double(x[i]))) * up[i];
  }
  normalize(engine, x.data(), weight.data(), 1e-5f, rows, size, y.data());
  expect(error(y, want) < 1e-5, "RMS norm");
  gate(engine, x.data(), up.data(), gated.size(), gated.data());
  expect(error(gated, want_gated) < 1e-5, "SwiGLU");
}

// A prompt of 70 tokens in chunks of 33, 36 and 1, beside a second request of as many.
void check_attention(Engine& engine, int64_t bits, int64_t window, double most) {
  const int64_t requests = 2, heads = 6, kv_heads = 2, key_dim = 64, value_dim = 32, total = 70, width = 3;
  const double scale = 0.125;
  const Numbers q = normal(requests * total * heads * key_dim), k = normal(requests * total * kv_heads * key_dim),
                v = normal(requests * total * kv_heads * value_dim);
  std::vector<float> keys((requests * width + 1) * kv_heads * key_dim * 32 + 64), values(keys.size());
  const int32_t tables[] = {4, 1, 3, 2, 6, 5};
  Pool pool = {keys.data(), values.data(), kv_heads, key_dim, value_dim, bits, bits};
  double worst = 0;
  for (int64_t from = 0; from < total;) {
    const int64_t count = from == 0 ? 33 : from == 33 ? 36 : 1;
    Numbers now[3];
    std::vector<int64_t> slots;
    std::vector<int32_t> starts = {0}, lengths, sharing;
    for (int64_t r = 0; r < requests; ++r) {
      const auto add = [&](Numbers& to, const Numbers& all, int64_t row) {
        const auto at = all.begin() + (r * total + from) * row;
        to.insert(to.end(), at, at + count * row);
      };
      add(now[0], q, heads * key_dim), add(now[1], k, kv_heads * key_dim), add(now[2], v, kv_heads * value_dim);
      for (int64_t t = from; t < from + count; ++t) slots.push_back(tables[r * width + t / 32] * 32 + t % 32);
      starts.push_back(int32_t(starts.back() + count)), lengths.push_back(int32_t(from + count));
      sharing.insert(sharing.end(), {-1, 0});
    }
    Numbers out(requests * count * heads * value_dim);
    Call call = {};
    call.queries = {now[0].data(), heads * key_dim, key_dim};
    call.keys = {now[1].data(), kv_heads * key_dim, key_dim}, call.values = {now[2].data(), kv_heads * value_dim, value_dim};
    call.output = out.data(), call.pool = pool, call.num_heads = heads, call.window = window, call.scale = scale;
    call.slots = slots.data(), call.query_starts = starts.data(), call.context_lens = lengths.data();
    call.block_tables = tables, call.sharing = sharing.data();
    call.num_tokens = requests * count, call.num_requests = requests, call.table_width = width;
    attend(engine, call);
    for (int64_t r = 0; r < requests; ++r) {
      for (int64_t t = from; t < from + count; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t kv = h / (heads / kv_heads), first = window ? std::max<int64_t>(0, t + 1 - window) : 0;
          std::vector<double> sum(value_dim);
          double weight = 0;
          for (int64_t p = first; p <= t; ++p) {
            double score = 0;
            for (int64_t d = 0; d < key_dim; ++d) {
              score += double(q[((r * total + t) * heads + h) * key_dim + d]) * k[((r * total + p) * kv_heads + kv) * key_dim + d];
            }
            const double share = std::exp(score * scale);
            weight += share;
            for (int64_t d = 0; d < value_dim; ++d) sum[d] += share * v[((r * total + p) * kv_heads + kv) * value_dim + d];
          }
          for (int64_t d = 0; d < value_dim; ++d) {
            const double off = std::fabs(sum[d] / weight - out[((r * count + t - from) * heads + h) * value_dim + d]);
            worst = off <= worst ? worst : off;
          }
        }
      }
    }
    from += count;
  }
  expect(worst < most, "attention, bits " + std::to_string(bits) + ", window " + std::to_string(window) + ": off by " +
                           std::to_string(worst));
}

// A layer of 5 rows, each a request's first token, beside the same rows one at a time; a layer whose weights are 0 adds
// nothing to its input.
void check_layer(Engine& engine) {
  const int64_t rows = 5, size = 64, inner = 96, heads = 2, head = 32;
  const int64_t shapes[][2] = {{heads * head, size}, {head, size}, {head, size}, {size, heads * head}, {inner, size}, {inner, size}, {size, inner}};
  Rotation rotation({1.0, 0.1, 0.01, 0.001}, false);
  const Numbers norm = normal(size), x = normal(rows * size);
  for (const bool is_zero : {false, true}) {
    std::vector<Made> made;
    Layer layer = {};
    layer.rotation = &rotation, layer.heads = heads, layer.kv_heads = 1;
    layer.norms[Layer::kBeforeAttention] = layer.norms[Layer::kBeforeMlp] = norm.data();
    for (int i = 0; i < Layer::kProducts; ++i) {
      made.push_back(make_weights(Storage::kFloat32, shapes[i][0], shapes[i][1]));
      if (is_zero) std::fill(made.back().bytes.begin(), made.back().bytes.end(), uint8_t(0));
    }
    for (int i = 0; i < Layer::kProducts; ++i) layer.products[i] = made[i].weights;
    expect(layer.is_whole(), "layer: sizes");
    const auto run_rows = [&](int64_t first, int64_t count) {
      std::vector<float> keys(rows * head * 32 + 64), values(keys.size());
      std::vector<int64_t> slots;
      std::vector<int32_t> starts = {0}, lengths, tables, sharing, positions;
      for (int64_t r = 0; r < count; ++r) {
        slots.push_back(r * 32), starts.push_back(int32_t(r + 1)), lengths.push_back(1), tables.push_back(int32_t(r));
        sharing.insert(sharing.end(), {-1, 0}), positions.push_back(int32_t(first + r));
      }
      Call call = {};
      call.pool = {keys.data(), values.data(), 1, head, head, 0, 0};
      call.num_heads = heads, call.scale = 0.2, call.num_tokens = call.num_requests = count, call.table_width = 1;
      call.slots = slots.data(), call.query_starts = starts.data(), call.context_lens = lengths.data();
      call.block_tables = tables.data(), call.sharing = sharing.data();
      Numbers y(count * size);
      run(engine, layer, call, positions.data(), 1, x.data() + first * size, y.data());
      return y;
    };
    const Numbers together = run_rows(0, rows);
    for (int64_t row = 0; row < rows; ++row) {
      const Numbers alone = run_rows(row, 1);
      expect(std::memcmp(alone.data(), together.data() + row * size, size * 4) == 0, "layer: other bits among other rows");
    }
    if (is_zero) expect(std::memcmp(together.data(), x.data(), x.size() * 4) == 0, "layer: its input is not kept");
  }
}

}  // namespace

int main(int count, char**) {
  Engine engine(2);
  check_products(engine, count == 1);
  check_rows(engine);
  check_layer(engine);
  for (const int64_t window : {0, 20}) {
    check_attention(engine, 0, window, 1e-5);
    check_attention(engine, 8, window, 0.05);
    check_attention(engine, 4, window, 0.8);
  }
  std::printf("%d wrong\n", faults);
  return faults > 0;
}
