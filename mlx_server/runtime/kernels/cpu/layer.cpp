// A transformer layer as one operation: norm, Q/K/V, rotary embedding, attention, output, norm, SwiGLU MLP. As some 20
// nodes of MLX's graph, a layer of a small model takes about twice as long for one row. Each part is computed by the same
// function as on its own, so the bits are the same. Compiled without contraction of a * b + c, as Rotation is used by both.

#include <cmath>
#include <cstdint>

#include "engine.h"

namespace {

void add(const float* a, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += a[i];
}

// Products [first, last) of x, with their biases; the result of product first + i goes to y[i].
void project(Engine& engine, const Layer& layer, int first, int last, const float* x, int64_t rows, float* const* y) {
  multiply(engine, layer.products + first, last - first, x, rows, y);
  for (int i = first; i < last; ++i) {
    const int64_t outputs = layer.products[i].outputs;
    for (int64_t row = 0; row < rows && layer.biases[i] != nullptr; ++row) {
      add(layer.biases[i], outputs, y[i - first] + row * outputs);
    }
  }
}

void apply(Engine& engine, const Layer& layer, Layer::Norm norm, const float* x, int64_t rows, int64_t size, float* y) {
  normalize(engine, x, layer.norms[norm], layer.eps[norm], rows, size, y);
}

}  // namespace

void Rotation::turn(const float* x, int64_t stride, int64_t size, int64_t position, float* y) {
  const float *cosines = angles_at(position), *sines = cosines + half();
  const int64_t step = is_traditional_ ? 2 : 1, apart = is_traditional_ ? 1 : half();
  for (int64_t i = 0; i < half(); ++i) {
    const float a = x[i * step * stride], b = x[(i * step + apart) * stride];
    y[i * step] = a * cosines[i] - b * sines[i];
    y[i * step + apart] = a * sines[i] + b * cosines[i];
  }
  for (int64_t i = 2 * half(); i < size; ++i) y[i] = x[i * stride];
}

const float* Rotation::angles_at(int64_t position) {
  const size_t place = uint64_t(position) % kKept;
  std::vector<float>& angles = angles_[place];
  if (positions_[place] != position || angles.empty()) {
    angles.resize(2 * half());
    for (int64_t i = 0; i < half(); ++i) {
      const double angle = double(position) * frequencies_[i];
      angles[i] = float(std::cos(angle));
      angles[half() + i] = float(std::sin(angle));
    }
    positions_[place] = position;
  }
  return angles.data();
}

bool Layer::is_whole() const {
  const auto fits = [&](int product, int64_t outputs, int64_t depth) {
    return products[product].outputs == outputs && products[product].depth == depth;
  };
  const int64_t head = products[kQueries].outputs / heads, value = products[kValues].outputs / kv_heads;
  return fits(kQueries, heads * head, size()) && fits(kKeys, kv_heads * head, size()) &&
         fits(kValues, kv_heads * value, size()) && fits(kOutput, size(), heads * value) &&
         fits(kGate, products[kDown].depth, size()) && fits(kUp, products[kDown].depth, size()) &&
         fits(kDown, size(), products[kDown].depth) && 2 * rotation->half() <= head;
}

void run(Engine& engine, const Layer& layer, Call call, const int32_t* positions, int64_t step, const float* x, float* y) {
  const int64_t rows = call.num_tokens, size = layer.size(), inner = layer.products[Layer::kDown].depth;
  const int64_t head = layer.products[Layer::kQueries].outputs / layer.heads;
  const int64_t widths[] = {layer.heads * head, layer.kv_heads * head, layer.products[Layer::kValues].outputs,
                            layer.products[Layer::kOutput].depth};
  float* normal = engine.between.at_least(rows * (2 * size + widths[0] + widths[1] + widths[2] + widths[3] + 2 * inner));
  float* middle = normal + rows * size;
  float* queries = middle + rows * size;
  float* keys = queries + rows * widths[0];
  float* values = keys + rows * widths[1];
  float* attended = values + rows * widths[2];
  float* gated = attended + rows * widths[3];
  float* up = gated + rows * inner;

  apply(engine, layer, Layer::kBeforeAttention, x, rows, size, normal);
  float* const projected[] = {queries, keys, values};
  project(engine, layer, Layer::kQueries, Layer::kOutput, normal, rows, projected);
  if (layer.norms[Layer::kOfQueries] != nullptr) {
    apply(engine, layer, Layer::kOfQueries, queries, rows * layer.heads, head, queries);
    apply(engine, layer, Layer::kOfKeys, keys, rows * layer.kv_heads, head, keys);
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t h = 0; h < layer.heads + layer.kv_heads; ++h) {
      float* at = h < layer.heads ? queries + (row * layer.heads + h) * head
                                  : keys + (row * layer.kv_heads + h - layer.heads) * head;
      layer.rotation->turn(at, 1, head, positions[row * step], at);
    }
  }
  call.queries = {queries, widths[0], head};
  call.keys = {keys, widths[1], head};
  call.values = {values, widths[2], widths[2] / layer.kv_heads};
  call.output = attended;
  attend(engine, call);
  project(engine, layer, Layer::kOutput, Layer::kGate, attended, rows, &middle);
  add(x, rows * size, middle);

  apply(engine, layer, Layer::kBeforeMlp, middle, rows, size, normal);
  float* const opened[] = {gated, up};
  project(engine, layer, Layer::kGate, Layer::kDown, normal, rows, opened);
  gate(engine, gated, up, rows * inner, gated);
  project(engine, layer, Layer::kDown, Layer::kProducts, gated, rows, &y);
  add(middle, rows * size, y);
}
