// Paged attention on the host: writes a step's K/V into blocks of 32 tokens, then attends over them in place.
//
// K is read as rows [key_dim][32 tokens] of a block and V as panels [32 tokens][32 columns] (pool.h), so that
// scores (queries x K) and outputs (weights x V) are the same small matrix product. A tile is up to kTileRows rows of
// one request and KV head, a row being one (token, query head) pair, query heads of a group innermost: a decode is a
// tile of one token, and the group shares every read of K and V. Softmax is online (Milakov and Gimelshein, 2018) and
// in base 2. Work is cut into items of (tile, key range); long contexts with few rows are split along the keys and
// merged at the end, as in Flash-Decoding (Dao and others, 2023).
//
// Lanes of K beyond the context are read and then masked; rows of V beyond it are never multiplied, so stale blocks
// may hold anything, NaN included.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "pool.h"
#include "product.h"
#include "quantized.h"
#include "threads.h"

namespace {

constexpr int kSpanBlocks = 4;  // blocks per softmax update
constexpr int kSpan = kBlock * kSpanBlocks;
constexpr int kTileRows = 48;
constexpr int64_t kDepth = 64;     // of key_dim, summed on its own
constexpr double kAloneNs = 40e3;  // work that is not worth waking a thread for
constexpr float kMasked = -1e30f;  // a hidden key's score
constexpr float kLowest = -1e29f;  // the running maximum before any key: above kMasked, so hidden keys weigh 0
constexpr double kLog2E = 1.4426950408889634;

// Rows of this step's tokens, one a head. Strides are in floats.
struct Tokens {
  const float* data;
  int64_t token_stride, head_stride;

  const float* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// Mirrored field by field in attention.py. `keys` and `sinks` may be null; `window` 0 is none.
struct Call {
  Tokens queries, keys, values;
  const float* sinks;
  float* output;
  Pool pool;
  int64_t num_heads, window;
  double scale;
  const int64_t* slots;
  const int32_t *query_starts, *context_lens, *block_tables;
  int64_t num_tokens, num_requests, table_width;
};

// Rows [first_row, last_row) of a request under one KV head, over blocks [first_block, last_block).
struct Item {
  int32_t request, kv_head, first_row, last_row, first_block, last_block;
  int64_t part;  // where its unfinished rows go among the parts; -1: it is whole, and goes to the output
  double cost;

  int num_rows() const { return last_row - first_row; }
};

// A tile that was split along its keys: `first` is its first part, the others follow it among the parts.
struct Merge {
  Item first;
  int32_t num_parts;
};

struct Work {
  std::vector<Item> items;
  std::vector<Merge> merges;
  int64_t num_parts;
  double cost;  // of all items, in nanoseconds, roughly
};

// Floats that are kept from call to call and only ever grow.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  float* at_least(size_t count) {
    if (count > size_) {
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, count * sizeof(float)) != 0) throw std::bad_alloc();
      std::free(data_);
      data_ = static_cast<float*>(fresh);
      size_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

// What a thread works in: a tile's scaled queries, its scores in a span of keys, its output, where its softmax
// stands, and room for rows that are not read in place.
struct Tile {
  float *queries, *scores, *output, *room;
  float maximum[kTileRows];
  Floats sum[kTileRows];
  int32_t first_key[kTileRows], last_key[kTileRows];  // the keys that each row sees: [first, last)
  Scratch memory;

  void fit(int64_t key_dim, int64_t output_width, int64_t room_size) {
    room = memory.at_least(room_size + kTileRows * (kSpan + output_width + key_dim));
    scores = room + room_size;
    output = scores + kTileRows * kSpan;
    queries = output + kTileRows * output_width;
  }
};

// Reads and writes the pool through `Rows`: WholeRows or QuantizedRows.
template <typename Rows>
class Attention {
 public:
  static constexpr int64_t kRoom = kSpanBlocks * Rows::kRoom;

  explicit Attention(const Call& call)
      : call_(call),
        rows_(call.pool),
        group_(call.num_heads / call.pool.num_kv_heads),
        width_((call.pool.value_dim + kPanel - 1) / kPanel * kPanel) {}

  // Floats of a tile's output row, and of a part.
  int64_t output_width() const { return width_; }
  int64_t part_size() const { return kTileRows * (width_ + 2); }

  void cut(int threads, Work& work) const {
    work.items.clear();
    work.merges.clear();
    work.num_parts = 0;
    work.cost = 0;
    for (int32_t r = 0; r < call_.num_requests; ++r) {
      const int32_t rows = (call_.query_starts[r + 1] - call_.query_starts[r]) * group_;
      for (int32_t head = 0; head < call_.pool.num_kv_heads; ++head) {
        for (int32_t row = 0; row < rows; row += kTileRows) {
          Item item{r, head, row, std::min(row + kTileRows, rows), 0, 0, -1, 0};
          item.first_block = visible_from(r, row) / kBlock;
          item.last_block = (visible_to(r, item.last_row - 1) + kBlock - 1) / kBlock;
          item.cost = cost(item);
          work.cost += item.cost;
          work.items.push_back(item);
        }
      }
    }
    if (threads == 1) return;
    split(std::max(work.cost / (threads * 4), kAloneNs / 2), work);
    // Large items first; the others keep their order, in which neighbours read the same blocks.
    std::partition(work.items.begin(), work.items.end(), [&](const Item& i) { return i.cost * threads * 16 > work.cost; });
  }

  // Stores the K/V of tokens [first, last).
  void write(int64_t first, int64_t last) const {
    for (int64_t head = 0; head < call_.pool.num_kv_heads; ++head) {
      for (int64_t token = first; token < last; ++token) {
        const float *key = call_.keys.row(token, head), *value = call_.values.row(token, head);
        rows_.write(call_.slots[token] / kBlock, call_.slots[token] % kBlock, head, key, value);
      }
    }
  }

  void attend(const Item& item, Tile& tile, float* parts) const {
    begin(item, tile);
    for (int32_t block = item.first_block; block < item.last_block; block += kSpanBlocks) {
      const int32_t count = std::min(kSpanBlocks, item.last_block - block);
      score(item, tile, block, count);
      weigh(item, tile, block, count);
      mix(item, tile, block, count);
    }
    for (int row = 0; row < item.num_rows(); ++row) {
      const float* output = tile.output + row * width_;
      const float sum = across<Plus>(tile.sum[row]);
      if (item.part < 0) {
        finish(item, row, output, sum);
      } else {
        float* part = parts + item.part * part_size() + row * (width_ + 2);
        std::memcpy(part, output, width_ * sizeof(float));
        part[width_] = tile.maximum[row];
        part[width_ + 1] = sum;
      }
    }
  }

  // Adds up the parts of one tile, each brought to the largest of their maxima.
  void merge(const Merge& merge, float* parts) const {
    for (int row = 0; row < merge.first.num_rows(); ++row) {
      float* into = parts + merge.first.part * part_size() + row * (width_ + 2);
      for (int32_t p = 1; p < merge.num_parts; ++p) {
        const float* from = into + p * part_size();
        const float maximum = std::max(into[width_], from[width_]);
        const float shrink = exp2_of(into[width_] - maximum), weight = exp2_of(from[width_] - maximum);
        for (int64_t d = 0; d < width_; ++d) into[d] = into[d] * shrink + from[d] * weight;
        into[width_] = maximum;
        into[width_ + 1] = into[width_ + 1] * shrink + from[width_ + 1] * weight;
      }
      finish(merge.first, row, into, into[width_ + 1]);
    }
  }

 private:
  // A block's id, by its place in the request.
  int64_t id_of(const Item& item, int32_t block) const {
    return call_.block_tables[item.request * call_.table_width + block];
  }

  // The keys [from, to) that a request's row sees.
  int32_t visible_to(int32_t request, int32_t row) const {
    const int32_t tokens = call_.query_starts[request + 1] - call_.query_starts[request];
    return call_.context_lens[request] - tokens + row / group_ + 1;
  }
  int32_t visible_from(int32_t request, int32_t row) const {
    return call_.window == 0 ? 0 : std::max<int64_t>(0, visible_to(request, row) - call_.window);
  }

  // Token and query head of an item's row.
  int64_t token_of(const Item& item, int row) const {
    return call_.query_starts[item.request] + (item.first_row + row) / group_;
  }
  int64_t head_of(const Item& item, int row) const { return item.kv_head * group_ + (item.first_row + row) % group_; }

  // In ns: reading a block, and multiplying it at 160 operations/ns.
  double cost(const Item& item) const {
    const double dims = call_.pool.key_dim + call_.pool.value_dim;
    return dims * kBlock * (item.last_block - item.first_block) * (Rows::kReadNs + 0.0125 * item.num_rows());
  }

  // Cuts items that cost several times `target` along their keys.
  void split(double target, Work& work) const {
    for (size_t i = 0, whole = work.items.size(); i < whole; ++i) {
      const Item tile = work.items[i];
      const int64_t blocks = tile.last_block - tile.first_block;
      const int32_t pieces = std::min<int64_t>(tile.cost / target, blocks / kSpanBlocks);
      if (pieces < 2) continue;
      for (int32_t piece = 0; piece < pieces; ++piece) {
        Item part = tile;
        part.first_block = tile.first_block + blocks * piece / pieces;
        part.last_block = tile.first_block + blocks * (piece + 1) / pieces;
        part.part = work.num_parts + piece;
        part.cost = cost(part);
        if (piece == 0) {
          work.items[i] = part;
          work.merges.push_back({part, pieces});
        } else {
          work.items.push_back(part);
        }
      }
      work.num_parts += pieces;
    }
  }

  // Queries are scaled once, into base 2. The sink joins the softmax where the tile's key range starts.
  void begin(const Item& item, Tile& tile) const {
    const float scale = float(call_.scale * kLog2E);
    const bool has_sink = call_.sinks != nullptr && item.first_block == visible_from(item.request, item.first_row) / kBlock;
    for (int row = 0; row < item.num_rows(); ++row) {
      const int64_t head = head_of(item, row);
      const float* query = call_.queries.row(token_of(item, row), head);
      for (int64_t d = 0; d < call_.pool.key_dim; ++d) tile.queries[row * call_.pool.key_dim + d] = query[d] * scale;
      tile.first_key[row] = visible_from(item.request, item.first_row + row);
      tile.last_key[row] = visible_to(item.request, item.first_row + row);
      tile.maximum[row] = has_sink ? std::max(float(call_.sinks[head] * kLog2E), kLowest) : kLowest;
      tile.sum[row] = Floats{has_sink ? 1.0f : 0.0f};
    }
    std::memset(tile.output, 0, item.num_rows() * width_ * sizeof(float));
  }

  // Queries times K, in steps of kDepth along key_dim: sums of sums round less than one long sum.
  void score(const Item& item, Tile& tile, int32_t block, int32_t count) const {
    const int64_t key_dim = call_.pool.key_dim;
    for (int32_t j = 0; j < count; ++j) {
      const int64_t id = id_of(item, block + j);
      for (int64_t d = 0; d < key_dim; d += kDepth) {
        const int64_t depth = std::min(kDepth, key_dim - d);
        const float* keys = rows_.keys(id, item.kv_head, d, depth, tile.room);
        const float* next = d + kDepth < key_dim ? rows_.keys_ahead(id, item.kv_head, d + kDepth, tile.room)
                            : j + 1 < count ? rows_.keys_ahead(id_of(item, block + j + 1), item.kv_head, 0, tile.room)
                                            : rows_.values_ahead(id_of(item, block), item.kv_head, 0, tile.room);
        multiply(item.num_rows(), tile.queries + d, key_dim, {&keys, depth, depth, kBlock, next}, kVectors,
                 tile.scores + j * kBlock, kSpan, d > 0);
      }
    }
  }

  // Turns a span's scores into weights against the running maximum; scales down what was summed before.
  void weigh(const Item& item, Tile& tile, int32_t block, int32_t count) const {
    const int32_t start = block * kBlock, vectors = count * kVectors;
    for (int row = 0; row < item.num_rows(); ++row) {
      float* scores = tile.scores + row * kSpan;
      const int32_t first = tile.first_key[row] - start, last = tile.last_key[row] - start;
      if (first > 0 || last < count * kBlock) hide(scores, vectors, first, last);
      Floats high = load(scores);
      for (int v = 1; v < vectors; ++v) high = Larger()(high, load(scores + v * kLanes));
      const float maximum = std::max(tile.maximum[row], across<Larger>(high));
      if (maximum > tile.maximum[row]) {
        const float shrink = exp2_of(tile.maximum[row] - maximum);
        float* output = tile.output + row * width_;
        for (int64_t d = 0; d < width_; d += kLanes) store(output + d, load(output + d) * shrink);
        tile.sum[row] *= shrink;
        tile.maximum[row] = maximum;
      }
      Floats sum = tile.sum[row];
      for (int v = 0; v < vectors; ++v) {
        const Floats weight = exp2_of(load(scores + v * kLanes) - maximum);
        store(scores + v * kLanes, weight);
        sum += weight;
      }
      tile.sum[row] = sum;
    }
  }

  // Keys outside [first, last) of a span get no weight.
  static void hide(float* scores, int vectors, int32_t first, int32_t last) {
    Ints index;
    for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
    for (int v = 0; v < vectors; ++v, index += kLanes) {
      const Ints seen = (index >= first) & (index < last);
      store(scores + v * kLanes, select(seen, load(scores + v * kLanes), fill(kMasked)));
    }
  }

  // Adds weights times V, as far as the tile's last row sees.
  void mix(const Item& item, Tile& tile, int32_t block, int32_t count) const {
    const int64_t value_dim = call_.pool.value_dim;
    const int64_t tokens = std::min(count * kBlock, tile.last_key[item.num_rows() - 1] - block * kBlock);
    for (int64_t d = 0; d < value_dim; d += kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, value_dim - d);
      const float* at[kSpanBlocks];
      for (int32_t j = 0; j < count; ++j) {
        const int64_t seen = std::min<int64_t>(kBlock, tokens - j * kBlock);
        const int64_t later = id_of(item, std::min(block + count + j, item.last_block - 1));
        at[j] = rows_.values(id_of(item, block + j), item.kv_head, d, seen, later, tile.room + j * Rows::kRoom);
      }
      const bool is_last = d + kPanel >= value_dim && block + count < item.last_block;
      const float* next = is_last ? rows_.keys_ahead(id_of(item, block + count), item.kv_head, 0, tile.room)
                                  : rows_.values_ahead(id_of(item, block), item.kv_head, d + kPanel, tile.room);
      multiply(item.num_rows(), tile.scores, kSpan, {at, kBlock, tokens, columns, next}, (columns + kLanes - 1) / kLanes,
               tile.output + d, width_, true);
    }
  }

  void finish(const Item& item, int row, const float* sums, float weight) const {
    const float scale = weight > 0 ? 1.0f / weight : 0.0f;
    float* output = call_.output + (token_of(item, row) * call_.num_heads + head_of(item, row)) * call_.pool.value_dim;
    for (int64_t d = 0; d < call_.pool.value_dim; ++d) output[d] = sums[d] * scale;
  }

  const Call& call_;
  const Rows rows_;
  const int32_t group_;
  const int64_t width_;  // value_dim rounded up to whole panels
};

// The threads, and the memory they work in.
class Engine {
 public:
  explicit Engine(int count) : threads_(count), tiles_(count) {}
  Threads& threads() { return threads_; }

  void run(const Call& call) {
    switch (call.pool.bits) {
      case 8: return run_over<QuantizedRows<8>>(call);
      case 4: return run_over<QuantizedRows<4>>(call);
      default: return run_over<WholeRows>(call);
    }
  }

 private:
  template <typename Rows>
  void run_over(const Call& call) {
    const Attention<Rows> attention(call);
    attention.cut(threads_.count(), work_);
    float* parts = parts_.at_least(work_.num_parts * attention.part_size());
    for (Tile& tile : tiles_) tile.fit(call.pool.key_dim, attention.output_width(), attention.kRoom);

    const int64_t tokens = call.keys.data == nullptr ? 0 : call.num_tokens, items = work_.items.size();
    const int64_t batch = std::min<int64_t>(kBlock, 1 + tokens / (4 * threads_.count()));
    std::atomic<int64_t> next_token{0}, written{0}, next_item{0};
    const auto share = [&](int thread) {
      for (int64_t at; (at = next_token.fetch_add(batch)) < tokens;) {
        const int64_t end = std::min(at + batch, tokens);
        attention.write(at, end);
        written.fetch_add(end - at, std::memory_order_release);
      }
      for (int spins = 0; written.load(std::memory_order_acquire) < tokens;) pause_briefly(spins);
      for (int64_t at; (at = next_item.fetch_add(1)) < items;) attention.attend(work_.items[at], tiles_[thread], parts);
    };
    if (work_.cost < kAloneNs) {
      share(0);
    } else {
      threads_.run(share);
    }
    for (const Merge& merge : work_.merges) attention.merge(merge, parts);
  }

  Threads threads_;
  std::vector<Tile> tiles_;
  Work work_;
  Scratch parts_;
};

}  // namespace

extern "C" {

// Null when there is no memory.
void* cpu_attention_start(int threads) {
  try {
    return new Engine(threads);
  } catch (...) {
    return nullptr;
  }
}

// In a forked child the helpers do not exist, and what they hold is left alone.
void cpu_attention_stop(void* engine) {
  Engine* stopped = static_cast<Engine*>(engine);
  if (stopped->threads().is_forked()) return;
  stopped->threads().stop();
  delete stopped;
}

// One caller at a time. Returns 0, or 1 when there is no memory.
int cpu_attention_run(void* engine, const void* call) {
  try {
    static_cast<Engine*>(engine)->run(*static_cast<const Call*>(call));
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
