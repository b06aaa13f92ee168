// The engine's functions as MLX operations: lazy nodes of a graph, which run on the thread of their stream, so that nothing
// is evaluated while a step is built. An operation returns None for what it cannot compute (another type, weights that are
// not contiguous); the caller then uses MLX's own.
//
// MLX keeps a node's inputs and outputs until the stream has passed it. An exception in a node is thrown again where the
// array is waited for.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "engine.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mx = mlx::core;
namespace nb = nanobind;

namespace {

using Arrays = std::vector<mx::array>;
using Task = std::function<void()>;
using EnginePtr = std::shared_ptr<Engine>;

// `bind` gets the evaluated inputs and the allocated outputs, and returns the task that computes the outputs.
class Node : public mx::Primitive {
 public:
  using Bind = std::function<Task(const Arrays&, Arrays&)>;
  using Shapes = std::function<std::vector<mx::Shape>(const Arrays&)>;

  Node(const char* name, Bind bind, Shapes shapes)
      : mx::Primitive(mx::default_stream(mx::Device(mx::Device::cpu))),
        name_(name),
        bind_(std::move(bind)),
        shapes_(std::move(shapes)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    for (mx::array& y : outputs) y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& x : inputs) encoder.set_input_array(x);
    for (mx::array& y : outputs) encoder.set_output_array(y);
    encoder.dispatch(bind_(inputs, outputs));
  }
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error(std::string(name_) + " is for the CPU"); }
  const char* name() const override { return name_; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override { return shapes_(inputs); }

 private:
  const char* name_;
  Bind bind_;
  Shapes shapes_;
};

mx::array node(const char* name, const mx::Shape& shape, Arrays inputs, Node::Bind bind, Node::Shapes shapes) {
  return mx::array(shape, mx::float32, std::make_shared<Node>(name, std::move(bind), std::move(shapes)), std::move(inputs));
}

std::vector<mx::Shape> as_first(const Arrays& inputs) { return {inputs[0].shape()}; }

bool is_float(const mx::array& a) { return a.dtype() == mx::float32; }

// Evaluated and contiguous, so that its memory can be read.
bool is_plain(const mx::array& a) { return a.is_available() && a.flags().row_contiguous; }

// An array of 4-byte numbers: its memory, shape and strides.
struct View {
  const float* data;
  mx::Shape shape;
  mx::Strides strides;
  bool is_contiguous;
  int64_t size;

  explicit View(const mx::array& a)
      : data(a.data<float>()), shape(a.shape()), strides(a.strides()), is_contiguous(a.flags().row_contiguous), size(a.size()) {}

  // In the order of rows; a copy in `room` if it is strided.
  const float* flat(Scratch& room) const {
    if (is_contiguous) return data;
    float* to = room.at_least(size);
    std::vector<int> at(shape.size(), 0);
    const int64_t width = shape.back(), stride = strides.back();
    for (int64_t done = 0; done < size; done += width) {
      const float* from = data;
      for (size_t axis = 0; axis + 1 < at.size(); ++axis) from += at[axis] * strides[axis];
      for (int64_t i = 0; i < width; ++i) to[done + i] = from[i * stride];
      for (int axis = int(at.size()) - 2; axis >= 0 && ++at[axis] == shape[axis]; --axis) at[axis] = 0;
    }
    return to;
  }
};

std::optional<Weights> weights_of(const mx::array& w, const std::optional<mx::array>& scales,
                                  const std::optional<mx::array>& biases, int64_t depth, int bits) {
  const int64_t outputs = w.shape(0);
  if (!scales) {
    if (w.shape(1) != depth || (!is_float(w) && w.dtype() != mx::bfloat16)) return std::nullopt;
    const Storage storage = is_float(w) ? Storage::kFloat32 : Storage::kBfloat16;
    return Weights{storage, outputs, depth, 0, w.data<void>(), nullptr, nullptr};
  }
  const int64_t group = scales->shape(-1) > 0 ? depth / scales->shape(-1) : 0;
  const bool is_known = (bits == 4 || bits == 8) && (group == 32 || group == 64 || group == 128) && biases;
  if (!is_known || w.dtype() != mx::uint32 || w.shape(1) * 32 != depth * bits || !is_float(*scales) || !is_float(*biases) ||
      !is_plain(*scales) || !is_plain(*biases))
    return std::nullopt;
  const Storage storage = bits == 4 ? Storage::kAffine4 : Storage::kAffine8;
  return Weights{storage, outputs, depth, group, w.data<void>(), scales->data<float>(), biases->data<float>()};
}

// x [..., depth] times W [outputs, depth] transposed.
std::optional<mx::array> linear(const EnginePtr& engine, const mx::array& x, const mx::array& w,
                                const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, int bits) {
  if (!is_float(x) || x.ndim() == 0 || w.ndim() != 2 || !is_plain(w) || x.shape(-1) % kDepthStep != 0) return std::nullopt;
  const auto weights = weights_of(w, scales, biases, x.shape(-1), bits);
  if (!weights) return std::nullopt;
  Arrays inputs{x, w};
  if (scales) inputs.push_back(*scales), inputs.push_back(*biases);
  const auto shapes = [outputs = w.shape(0)](const Arrays& in) {
    mx::Shape shape = in[0].shape();
    shape.back() = outputs;
    return std::vector<mx::Shape>{shape};
  };
  const auto bind = [engine, weights = *weights](const Arrays& in, Arrays& out) -> Task {
    return [engine, weights, x = View(in[0]), y = out[0].data<float>()] {
      std::lock_guard<std::mutex> lock(engine->mutex);
      multiply(*engine, weights, x.flat(engine->given), x.size / weights.depth, y);
    };
  };
  return node("NativeLinear", shapes(inputs)[0], inputs, bind, shapes);
}

std::optional<mx::array> rms_norm(const EnginePtr& engine, const mx::array& x, const mx::array& weight, float eps) {
  if (!is_float(x) || !is_float(weight) || x.ndim() == 0 || weight.ndim() != 1 || weight.shape(0) != x.shape(-1) ||
      x.shape(-1) % kWidthStep != 0 || !is_plain(weight))
    return std::nullopt;
  const auto bind = [engine, eps](const Arrays& in, Arrays& out) -> Task {
    return [engine, eps, x = View(in[0]), weight = in[1].data<float>(), y = out[0].data<float>()] {
      std::lock_guard<std::mutex> lock(engine->mutex);
      normalize(*engine, x.flat(engine->given), weight, eps, x.size / x.shape.back(), x.shape.back(), y);
    };
  };
  return node("NativeRMSNorm", x.shape(), {x, weight}, bind, as_first);
}

std::optional<mx::array> swiglu(const EnginePtr& engine, const mx::array& opening, const mx::array& up) {
  if (!is_float(opening) || !is_float(up) || opening.ndim() == 0 || opening.shape() != up.shape()) return std::nullopt;
  const auto bind = [engine](const Arrays& in, Arrays& out) -> Task {
    return [engine, opening = View(in[0]), up = View(in[1]), y = out[0].data<float>()] {
      std::lock_guard<std::mutex> lock(engine->mutex);
      gate(*engine, opening.flat(engine->given), up.flat(engine->arranged), opening.size, y);
    };
  };
  return node("NativeSwiGLU", opening.shape(), {opening, up}, bind, as_first);
}

// x [batch, heads, tokens, size]; `offset` is the position of the first token, one for each of the batch or one for all.
std::optional<mx::array> rope(const EnginePtr& engine, const mx::array& x, const mx::array& offset,
                              const std::shared_ptr<Rotation>& rotation) {
  if (!is_float(x) || x.ndim() != 4 || x.shape(3) < 2 * rotation->half() || offset.dtype() != mx::int32 ||
      (offset.size() != 1 && (offset.ndim() != 1 || offset.shape(0) != x.shape(0))))
    return std::nullopt;
  const auto bind = [engine, rotation](const Arrays& in, Arrays& out) -> Task {
    const int64_t step = in[1].size() == 1 ? 0 : in[1].strides(0);
    return [engine, rotation, x = View(in[0]), offsets = in[1].data<int32_t>(), step, y = out[0].data<float>()]() mutable {
      std::lock_guard<std::mutex> lock(engine->mutex);
      for (int64_t b = 0; b < x.shape[0]; ++b) {
        for (int64_t h = 0; h < x.shape[1]; ++h) {
          for (int64_t t = 0; t < x.shape[2]; ++t, y += x.shape[3]) {
            const float* from = x.data + b * x.strides[0] + h * x.strides[1] + t * x.strides[2];
            rotation->turn(from, x.strides[3], x.shape[3], offsets[b * step] + t, y);
          }
        }
      }
    };
  };
  return node("NativeRoPE", x.shape(), {x, offset}, bind, as_first);
}

template <typename T>
std::vector<T> numbers(const nb::bytes& given) {
  std::vector<T> all(given.size() / sizeof(T));
  std::memcpy(all.data(), given.c_str(), all.size() * sizeof(T));
  return all;
}

// A step's plan. Nodes share it.
struct Plan : std::enable_shared_from_this<Plan> {
  Plan(const nb::bytes& slots, const nb::bytes& starts, const nb::bytes& lengths, const nb::bytes& tables,
       const nb::bytes& sharing, const nb::bytes& both_ways)
      : slots(numbers<int64_t>(slots)),
        starts(numbers<int32_t>(starts)),
        lengths(numbers<int32_t>(lengths)),
        tables(numbers<int32_t>(tables)),
        sharing(numbers<int32_t>(sharing)),
        both_ways(numbers<int32_t>(both_ways)) {
    if (this->starts.size() != this->lengths.size() + 1 || this->lengths.empty() ||
        this->tables.size() % this->lengths.size() != 0 || this->sharing.size() != 2 * this->lengths.size() ||
        size_t(this->starts.back()) != this->slots.size() ||
        (!this->both_ways.empty() && this->both_ways.size() != this->lengths.size()))
      throw std::invalid_argument("a plan's arrays do not fit each other");
  }

  std::vector<int64_t> slots;
  std::vector<int32_t> starts, lengths, tables, sharing, both_ways;
};

// A zeroed memory map, whose pages take memory when they are first written. Pools and nodes share it. `give_back` returns
// the pages after the first `start` bytes to the system.
class Memory : public std::enable_shared_from_this<Memory> {
 public:
  explicit Memory(size_t size) : size_(size) {
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "a pool of " + std::to_string(size));
#if defined(MADV_HUGEPAGE)
    madvise(data_, size_, MADV_HUGEPAGE);  // kernels may have none
#endif
  }
  Memory(const Memory&) = delete;
  ~Memory() { munmap(data_, size_); }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_); }

  void give_back(size_t start) {
    const size_t page = sysconf(_SC_PAGESIZE);
    start = (start + page - 1) / page * page;
#if defined(__linux__)
    constexpr int kAdvice = MADV_DONTNEED;
#else
    constexpr int kAdvice = MADV_FREE;
#endif
    if (start < size_) madvise(static_cast<char*>(data_) + start, size_ - start, kAdvice);
  }

 private:
  void* data_;
  size_t size_;
};

using MemoryPtr = std::shared_ptr<Memory>;

// The heads of each token; a copy in `room` if a head's numbers are strided.
Tokens tokens_of(const View& a, Scratch& room) {
  if (a.strides[3] == 1) return {a.data, a.strides[0], a.strides[1]};
  return {a.flat(room), a.shape[1] * a.shape[3], a.shape[3]};
}

// A call without rows: `pool` is a struct Pool in `memory`, K's and V's. The plan must outlive it.
Call call_of(const nb::bytes& pool, const Plan& plan, int64_t num_heads, double scale, int64_t window) {
  Call call{};
  if (pool.size() != sizeof(Pool)) throw std::invalid_argument("a pool's fields are of another size");
  std::memcpy(&call.pool, pool.c_str(), sizeof(Pool));
  call.num_heads = num_heads, call.scale = scale, call.window = window;
  call.num_tokens = plan.slots.size(), call.num_requests = plan.lengths.size();
  call.table_width = plan.tables.size() / plan.lengths.size();
  call.slots = plan.slots.data(), call.query_starts = plan.starts.data();
  call.context_lens = plan.lengths.data(), call.block_tables = plan.tables.data();
  call.sharing = plan.sharing.data();
  call.both_ways = plan.both_ways.empty() ? nullptr : plan.both_ways.data();
  return call;
}

// An output of `shape`, and the token of a pool's use.
std::pair<mx::array, mx::array> node_with_token(const char* name, const mx::Shape& shape, mx::Dtype dtype, Arrays inputs,
                                                Node::Bind bind) {
  const auto shapes = [shape](const Arrays&) { return std::vector<mx::Shape>{shape, {1}}; };
  auto made = mx::array::make_arrays({shape, {1}}, {dtype, mx::int32}, std::make_shared<Node>(name, std::move(bind), shapes),
                                     std::move(inputs));
  return {made[0], made[1]};
}

// Stores keys and values [T, kv_heads, 1, dim] in a pool if they are given, then attends with queries
// [T, heads, 1, key_dim]. `token` is that of the pool's last use; the second result is that of this use.
std::pair<mx::array, mx::array> attention(const EnginePtr& engine, const std::pair<MemoryPtr, MemoryPtr>& memory,
                                          const nb::bytes& pool, const std::shared_ptr<Plan>& plan,
                                          const mx::array& token, const mx::array& queries,
                                          const std::optional<mx::array>& keys, const std::optional<mx::array>& values,
                                          const std::optional<mx::array>& sinks, double scale, int64_t window) {
  const Call call = call_of(pool, *plan, queries.shape(1), scale, window);
  Arrays inputs{token, queries};
  const bool writes = keys && values;
  if (writes) inputs.push_back(*keys), inputs.push_back(*values);
  if (sinks) inputs.push_back(mx::contiguous(*sinks));
  for (const mx::array& input : inputs) {
    if (&input != &inputs[0] && !is_float(input)) throw std::invalid_argument("attention is of float32");
  }
  const mx::Shape shape{queries.shape(0), queries.shape(1), 1, int(call.pool.value_dim)};
  const auto bind = [engine, memory, plan, call, writes, has_sinks = bool(sinks)](const Arrays& in, Arrays& out) -> Task {
    Call bound = call;
    std::vector<View> rows{View(in[1])};
    if (writes) rows.push_back(View(in[2])), rows.push_back(View(in[3]));
    if (has_sinks) bound.sinks = in.back().data<float>();
    bound.output = out[0].data<float>();
    return [engine, memory, plan, bound, rows, used = out[1].data<int32_t>()]() mutable {
      Scratch rooms[3];
      bound.queries = tokens_of(rows[0], rooms[0]);
      if (rows.size() > 1) bound.keys = tokens_of(rows[1], rooms[1]), bound.values = tokens_of(rows[2], rooms[2]);
      std::lock_guard<std::mutex> lock(engine->mutex);
      attend(*engine, bound);
      *used = 0;
    };
  };
  return node_with_token("NativeAttention", shape, mx::float32, inputs, bind);
}

// A layer's weights and norms, added in the order of `Layer`. The model and nodes share them.
class LayerParts : public std::enable_shared_from_this<LayerParts> {
 public:
  LayerParts(std::shared_ptr<Rotation> rotation, int64_t heads, int64_t kv_heads, double scale)
      : layer_{}, rotation_(std::move(rotation)), scale_(scale) {
    layer_.rotation = rotation_.get(), layer_.heads = heads, layer_.kv_heads = kv_heads;
  }

  // False if the layer cannot be computed in one piece.
  bool add_product(const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
                   int bits, const std::optional<mx::array>& bias) {
    if (num_products_ == Layer::kProducts || w.ndim() != 2 || !is_plain(w)) return false;
    const int64_t depth = bits == 0 ? w.shape(1) : w.shape(1) * 32 / bits;
    const auto weights = depth % kDepthStep == 0 ? weights_of(w, scales, biases, depth, bits) : std::nullopt;
    if (!weights || (bias && (bias->shape() != mx::Shape{w.shape(0)} || !is_float(*bias) || !is_plain(*bias)))) return false;
    layer_.products[num_products_] = *weights;
    layer_.biases[num_products_++] = bias ? bias->data<float>() : nullptr;
    for (const auto& part : {std::optional(w), scales, biases, bias}) {
      if (part) kept_.push_back(*part);
    }
    return true;
  }

  bool add_norm(const std::optional<mx::array>& weight, float eps) {
    if (num_norms_ == Layer::kNorms) return false;
    if (weight && (!is_float(*weight) || weight->ndim() != 1 || weight->shape(0) % kWidthStep != 0 || !is_plain(*weight)))
      return false;
    sizes_[num_norms_] = weight ? weight->shape(0) : 0;
    layer_.norms[num_norms_] = weight ? weight->data<float>() : nullptr;
    layer_.eps[num_norms_++] = eps;
    if (weight) kept_.push_back(*weight);
    return true;
  }

  bool is_whole() const {
    if (num_products_ != Layer::kProducts || num_norms_ != Layer::kNorms || !layer_.is_whole()) return false;
    const int64_t head = layer_.products[Layer::kQueries].outputs / layer_.heads, inner = has_head_norms() ? head : 0;
    return sizes_[0] == layer_.size() && sizes_[1] == layer_.size() && sizes_[2] == inner && sizes_[3] == inner;
  }

  const Layer& layer() const { return layer_; }
  double scale() const { return scale_; }

 private:
  bool has_head_norms() const { return layer_.norms[Layer::kOfQueries] != nullptr; }

  Layer layer_;
  Arrays kept_;
  std::shared_ptr<Rotation> rotation_;
  double scale_;
  int num_products_ = 0, num_norms_ = 0;
  int64_t sizes_[Layer::kNorms] = {};
};

// A whole layer for x [T, 1, size] at positions `offset` [T]; the other arguments as for `attention`.
std::optional<std::pair<mx::array, mx::array>> run_layer(const EnginePtr& engine, const std::shared_ptr<LayerParts>& parts,
                                                         const std::pair<MemoryPtr, MemoryPtr>& memory,
                                                         const nb::bytes& pool, const std::shared_ptr<Plan>& plan,
                                                         const mx::array& token, const mx::array& x,
                                                         const mx::array& offset, int64_t window) {
  const Layer& layer = parts->layer();
  const Call call = call_of(pool, *plan, layer.heads, parts->scale(), window);
  const bool is_of_pool = call.pool.num_kv_heads == layer.kv_heads &&
                          layer.products[Layer::kKeys].outputs == layer.kv_heads * call.pool.key_dim &&
                          layer.products[Layer::kValues].outputs == layer.kv_heads * call.pool.value_dim;
  if (!is_of_pool || !is_float(x) || x.shape() != mx::Shape{int(call.num_tokens), 1, int(layer.size())} ||
      offset.dtype() != mx::int32 || offset.shape() != mx::Shape{int(call.num_tokens)})
    return std::nullopt;
  const auto bind = [engine, parts, memory, plan, call](const Arrays& in, Arrays& out) -> Task {
    return [engine, parts, memory, plan, call, x = View(in[1]), positions = in[2].data<int32_t>(), step = in[2].strides(0),
            y = out[0].data<float>(), used = out[1].data<int32_t>()] {
      std::lock_guard<std::mutex> lock(engine->mutex);
      run(*engine, parts->layer(), call, positions, step, x.flat(engine->given), y);
      *used = 0;
    };
  };
  return node_with_token("NativeLayer", x.shape(), mx::float32, {token, x, offset}, bind);
}

// Rows [n, ...] of the pool at the first n slots, and the token of this use.
std::pair<mx::array, mx::array> read_rows(const mx::array& pool, const mx::array& slots, const std::vector<int>& sizes,
                                          const mx::array& token, int64_t count) {
  const mx::Shape shape(sizes.begin(), sizes.end());
  int64_t bytes = pool.itemsize();
  for (int size : sizes) bytes *= size;
  bytes /= std::max<int64_t>(count, 1);
  const auto bind = [count, bytes](const Arrays& in, Arrays& out) -> Task {
    return [count, bytes, from = in[0].data<char>(), slots = in[1].data<int32_t>(), to = out[0].data<char>(),
            used = out[1].data<int32_t>()] {
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * bytes, from + slots[i] * bytes, bytes);
      *used = 0;
    };
  };
  return node_with_token("NativeRowRead", shape, pool.dtype(), {pool, slots, token}, bind);
}

// Writes rows [n, ...] into the pool; returns the token of this use.
mx::array write_rows(const mx::array& rows, const mx::array& pool, const mx::array& slots, const mx::array& token) {
  const int64_t count = rows.shape(0);
  const auto bind = [count](const Arrays& in, Arrays& out) -> Task {
    const int64_t bytes = count == 0 ? 0 : in[0].nbytes() / count;
    auto* to = const_cast<char*>(in[1].data<char>());
    return [count, bytes, from = in[0].data<char>(), to, slots = in[2].data<int32_t>(), used = out[0].data<int32_t>()] {
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + slots[i] * bytes, from + i * bytes, bytes);
      *used = 0;
    };
  };
  const auto shapes = [](const Arrays&) { return std::vector<mx::Shape>{{1}}; };
  return mx::array({1}, mx::int32, std::make_shared<Node>("NativeRowWrite", bind, shapes), {mx::contiguous(rows), pool, slots, token});
}

// A constructor of objects that nodes keep. References are counted in C++, since a node ends on its stream's thread, which
// must neither wait for the GIL nor touch an interpreter that is shutting down. T inherits enable_shared_from_this, so
// that nanobind uses the same count.
template <typename T, typename... Args>
auto made() {
  return nb::new_([](Args... args) { return std::make_shared<T>(std::move(args)...); });
}

}  // namespace

NB_MODULE(NATIVE_MODULE, m) {
  nb::set_leak_warnings(false);  // engines stay until the process ends
  nb::class_<Engine>(m, "Engine", nb::is_weak_referenceable())
      .def(made<Engine, int>())
      .def_prop_ro("threads", [](const Engine& e) { return e.threads.count(); });
  nb::class_<Rotation>(m, "Rotation").def(made<Rotation, std::vector<double>, bool>());
  nb::class_<Memory>(m, "Memory")
      .def(made<Memory, size_t>())
      .def_prop_ro("address", &Memory::address)
      .def("give_back", &Memory::give_back);
  nb::class_<Plan>(m, "Plan").def(made<Plan, nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes>());
  nb::class_<LayerParts>(m, "Layer")
      .def(made<LayerParts, std::shared_ptr<Rotation>, int64_t, int64_t, double>())
      .def("add_product", &LayerParts::add_product, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none())
      .def("add_norm", &LayerParts::add_norm, nb::arg().none(), nb::arg())
      .def_prop_ro("is_whole", &LayerParts::is_whole)
      .def_prop_ro("num_heads", [](const LayerParts& parts) { return parts.layer().heads; });
  m.def("linear", &linear, nb::arg(), nb::arg(), nb::arg(), nb::arg("scales") = nb::none(), nb::arg("biases") = nb::none(),
        nb::arg("bits") = 0);
  m.def("rms_norm", &rms_norm);
  m.def("swiglu", &swiglu);
  m.def("rope", &rope);
  m.def("attention", &attention, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
  m.def("run_layer", &run_layer);
  m.def("read_rows", &read_rows);
  m.def("write_rows", &write_rows);
}
