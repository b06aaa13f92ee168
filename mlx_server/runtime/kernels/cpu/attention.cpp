// Paged attention on the host: writes a step's K/V into blocks of 32 tokens, then attends over them in place.
//
// K is read as rows [key_dim][32 tokens] of a block and V as panels [32 tokens][32 columns] (kv_layout.h), so that
// scores (queries x K) and outputs (weights x V) are the same small matrix product. A tile is up to kTileRows rows of
// one request and KV head, a row being one (token, query head) pair, query heads of a group innermost: a decode is a
// tile of one token, and the group shares every read of K and V. Softmax is online (Milakov and Gimelshein, 2018) and
// in base 2. Keys are summed up in pieces of kPieceBlocks blocks, which are merged in their order, as in Flash-Decoding
// (Dao and others, 2023). Work is cut into items of (tile, key range); long contexts with few rows are split between
// pieces.
//
// If several requests begin with the same pieces, these are read once for the rows of all of them: tiles of those rows
// come first and leave their sums among the parts, from which each request's own tiles go on. Contexts 700 and 600 that
// share 530 tokens: one tile over [0, 512) for both, then [512, 700) of the one and [512, 600) of the other.
//
// A row's result has the same bits whichever rows are computed with it, in a tile or in a step, and by however many
// threads: spans and pieces begin at multiples of their sizes, counted from the context's start; a product sums up each
// of its numbers alike for any number of rows; and keys that a row does not see add exactly nothing to it. Context 700:
// pieces [0, 256), [256, 512), [512, 700). A decode of position 699 may be three items; in a prompt's chunk with
// positions 650 to 699 the same row is part of one item, and merges the same three pieces as it goes.
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

#include "engine.h"
#include "attention_product.h"
#include "kv_layout.h"

namespace {

constexpr int kSpanBlocks = 4;  // blocks per softmax update
constexpr int kSpan = kBlock * kSpanBlocks;
constexpr int kPieceBlocks = 2 * kSpanBlocks;  // blocks whose sums are merged as one
constexpr int kTileRows = 48;
constexpr int64_t kDepth = 64;     // of key_dim, summed on its own
constexpr double kAloneNs = 40e3;  // work that is not worth waking a thread for
constexpr float kMasked = -1e30f;  // a hidden key's score
constexpr float kLowest = -1e29f;  // the running maximum before any key: above kMasked, so hidden keys weigh 0
constexpr double kLog2E = 1.4426950408889634;

// Rows [first_row, last_row) of a request under one KV head, over blocks [first_block, last_block).
struct Item {
  int32_t request, kv_head, first_row, last_row, first_block, last_block;
  int64_t part;  // its first row in the parts; -1: it is whole, and goes to the output
  double cost;
  int64_t fold = -1;                // the row in the parts of sums that requests share; -1: none
  const int32_t* tokens = nullptr;  // of rows of several requests, by `kv_head`'s groups; null: the request's own

  bool is_shared() const { return tokens != nullptr; }
  int num_rows() const { return last_row - first_row; }
  int32_t first_piece() const { return first_block / kPieceBlocks; }
  int32_t last_piece() const { return (last_block - 1) / kPieceBlocks + 1; }
};

// A tile that was split along its keys: `first` is its first item; its pieces take `num_parts` groups of its rows in the
// parts, from `first.part` on.
struct Merge {
  Item first;
  int32_t num_parts;
};

// What several requests share, which comes first, or what is each one's own.
struct Items {
  std::vector<Item> all;
  std::vector<Merge> merges;
};

struct Work {
  Items shared, own;
  std::vector<int32_t> tokens;                // of the shared tiles' rows
  std::vector<int64_t> folds, rows_of_group;  // of each request: its first row among the parts (-1: none); its group's
  int64_t part_rows;
  double cost;  // of all items, in nanoseconds, roughly
};

// A thread's scratch memory: a tile's scaled queries, its scores in a span of keys, its output in a piece, the running
// maximum and sum, the pieces merged so far, and room for rows that are not read in place.
struct Tile {
  float *queries, *scores, *output, *merged, *room;
  float maximum[kTileRows];
  Floats sum[kTileRows];
  int32_t first_key[kTileRows], last_key[kTileRows];  // the keys that each row sees: [first, last)
  Scratch memory;

  void fit(int64_t key_dim, int64_t output_width, int64_t room_size) {
    room = memory.at_least(room_size + kTileRows * (kSpan + 2 * output_width + 2 + key_dim));
    scores = room + room_size;
    output = scores + kTileRows * kSpan;
    queries = output + kTileRows * output_width;
    merged = queries + kTileRows * key_dim;
  }
};

// What does not depend on how K/V are stored, so that it is compiled once. Reading a number of K or V takes `read_ns`,
// roughly, and a tile needs `room` floats for K/V that are not read in place.
class Attention {
 public:
  Attention(const Call& call, double read_ns, int64_t room)
      : call_(call),
        group_(call.num_heads / call.pool.num_kv_heads),
        width_((call.pool.value_dim + kPanel - 1) / kPanel * kPanel),
        room_(room),
        read_ns_(read_ns) {}
  virtual ~Attention() = default;

  // Stores the K/V of tokens [first, last).
  virtual void write(int64_t first, int64_t last) const = 0;

  // Floats of a tile's output row, and of a part's: sums, with their maximum and their weight behind them.
  int64_t output_width() const { return width_; }
  int64_t part_width() const { return width_ + 2; }
  int64_t room() const { return room_; }

  void cut(int threads, Work& work) const {
    for (Items* items : {&work.shared, &work.own}) items->all.clear(), items->merges.clear();
    work.part_rows = 0;
    work.cost = 0;
    cut_shared(work);
    for (int32_t r = 0; r < call_.num_requests; ++r) {
      const int32_t rows = (call_.query_starts[r + 1] - call_.query_starts[r]) * group_;
      for (int32_t head = 0; head < call_.pool.num_kv_heads; ++head) {
        for (int32_t row = 0; row < rows; row += kTileRows) {
          Item item{r, head, row, std::min(row + kTileRows, rows), 0, 0, -1, 0};
          item.first_block = std::max(visible_from(r, row) / kBlock, work.folds[r] < 0 ? 0 : shared_blocks(r));
          item.last_block = (visible_to(r, item.last_row - 1) + kBlock - 1) / kBlock;
          if (work.folds[r] >= 0) item.fold = work.folds[r] + head * work.rows_of_group[r] + row;
          add(item, work.own, work);
        }
      }
    }
    if (threads == 1) return;
    for (Items* items : {&work.shared, &work.own}) {
      split(std::max(work.cost / (threads * 4), kAloneNs / 2), *items, work);
      // Large items first; the others keep their order, in which neighbours read the same blocks.
      std::partition(items->all.begin(), items->all.end(),
                     [&](const Item& i) { return i.cost * threads * 16 > work.cost; });
    }
  }

  void attend(const Item& item, Tile& tile, float* parts) const {
    begin(item, tile);
    float* folded = item.fold < 0 ? tile.merged : parts + item.fold * part_width();
    bool is_begun = item.fold >= 0 && !item.is_shared();
    const int32_t first = item.first_piece(), last = item.last_piece();
    for (int32_t piece = first; piece < last; ++piece) {
      clear(item, tile);
      attend_piece(item, tile, piece);
      if (item.part < 0 && item.fold < 0 && last - first == 1) return finish(item, tile);
      if (item.part >= 0) {
        copy(item, tile, parts + (item.part + (piece - first) * item.num_rows()) * part_width());
      } else if (!is_begun) {
        copy(item, tile, folded);
        is_begun = true;
      } else {
        for (int row = 0; row < item.num_rows(); ++row) {
          join(folded + row * part_width(), tile.output + row * width_, tile.maximum[row],
               across<Plus>(tile.sum[row]));
        }
      }
    }
    if (item.part < 0 && !item.is_shared()) finish(item, folded);
  }

  // Joins the pieces of a tile that was split, and finishes it unless its rows go on.
  void merge(const Merge& merge, float* parts) const {
    const Item& item = merge.first;
    const int rows = item.num_rows();
    const float* pieces = parts + item.part * part_width();
    float* into = parts + (item.fold < 0 ? item.part : item.fold) * part_width();
    const bool is_begun = item.fold >= 0 && !item.is_shared();
    if (item.is_shared()) std::memcpy(into, pieces, rows * part_width() * sizeof(float));
    for (int row = 0; row < rows; ++row) {
      for (int32_t p = is_begun ? 0 : 1; p < merge.num_parts; ++p) {
        const float* from = pieces + (p * rows + row) * part_width();
        join(into + row * part_width(), from, from[width_], from[width_ + 1]);
      }
    }
    if (!item.is_shared()) finish(item, into);
  }

 protected:
  // Scores of `count` blocks from `block` on, at most a span: queries times K, in steps of kDepth along key_dim, since
  // sums of sums round less than one long sum.
  virtual void score(const Item& item, Tile& tile, int32_t block, int32_t count) const = 0;

  // Adds weights times V to the tile's output, as far as its last row sees.
  virtual void mix(const Item& item, Tile& tile, int32_t block, int32_t count) const = 0;

  // A block's id, by its place in the request.
  int64_t id_of(const Item& item, int32_t block) const {
    return call_.block_tables[item.request * call_.table_width + block];
  }

  const Call& call_;

 private:
  // Leading blocks that a request has in common with others, as whole pieces.
  int32_t shared_blocks(int32_t request) const {
    return call_.sharing[2 * request + 1] / kPieceBlocks * kPieceBlocks;
  }

  void add(Item item, Items& items, Work& work) const {
    item.cost = cost(item);
    work.cost += item.cost;
    items.all.push_back(item);
  }

  // Tiles of the rows of several requests over what they begin with. Their parts are in the order of their rows.
  void cut_shared(Work& work) const {
    work.folds.assign(call_.num_requests, -1);
    work.rows_of_group.assign(call_.num_requests, 0);
    work.tokens.clear();
    work.tokens.reserve(call_.num_tokens);  // items point into it
    for (int32_t leader = 0; leader < call_.num_requests && call_.window == 0; ++leader) {
      if (call_.sharing[2 * leader] != leader || shared_blocks(leader) == 0) continue;
      const size_t first = work.tokens.size();
      for (int32_t r = leader; r < call_.num_requests; ++r) {
        if (call_.sharing[2 * r] != leader) continue;
        work.folds[r] = work.part_rows + (work.tokens.size() - first) * group_;
        for (int32_t t = call_.query_starts[r]; t < call_.query_starts[r + 1]; ++t) work.tokens.push_back(t);
      }
      const int32_t rows = (work.tokens.size() - first) * group_;
      for (int32_t r = leader; r < call_.num_requests; ++r) {
        if (call_.sharing[2 * r] == leader) work.rows_of_group[r] = rows;
      }
      for (int32_t head = 0; head < call_.pool.num_kv_heads; ++head, work.part_rows += rows) {
        for (int32_t row = 0; row < rows; row += kTileRows) {
          Item item{leader, head, row, std::min(row + kTileRows, rows), 0, shared_blocks(leader), -1, 0};
          item.fold = work.part_rows + row;
          item.tokens = work.tokens.data() + first;
          add(item, work.shared, work);
        }
      }
    }
  }

  // The end of a request's tokens up to a row's own.
  int32_t end_of(int32_t request, int32_t row) const {
    const int32_t tokens = call_.query_starts[request + 1] - call_.query_starts[request];
    return call_.context_lens[request] - tokens + row / group_ + 1;
  }
  // The keys [from, to) that a request's row sees.
  int32_t visible_to(int32_t request, int32_t row) const {
    const bool both_ways = call_.both_ways != nullptr && call_.both_ways[request] != 0;
    return both_ways ? call_.context_lens[request] : end_of(request, row);
  }
  int32_t visible_from(int32_t request, int32_t row) const {
    return call_.window == 0 ? 0 : std::max<int64_t>(0, end_of(request, row) - call_.window);
  }

  // Token and query head of an item's row.
  int64_t token_of(const Item& item, int row) const {
    const int32_t at = (item.first_row + row) / group_;
    return item.is_shared() ? item.tokens[at] : call_.query_starts[item.request] + at;
  }
  int64_t head_of(const Item& item, int row) const { return item.kv_head * group_ + (item.first_row + row) % group_; }

  // In ns: reading a block, and multiplying it at 160 operations/ns.
  double cost(const Item& item) const {
    const double dims = call_.pool.key_dim + call_.pool.value_dim;
    return dims * kBlock * (item.last_block - item.first_block) * (read_ns_ + 0.0125 * item.num_rows());
  }

  // Cuts items that cost several times `target` along their keys, between pieces.
  void split(double target, Items& items, Work& work) const {
    for (size_t i = 0, whole = items.all.size(); i < whole; ++i) {
      const Item tile = items.all[i];
      const int32_t first = tile.first_piece(), pieces = tile.last_piece() - first;
      const int32_t count = std::min<int64_t>(tile.cost / target, pieces);
      if (count < 2) continue;
      for (int32_t n = 0; n < count; ++n) {
        const int32_t begin = pieces * n / count, end = pieces * (n + 1) / count;
        Item part = tile;
        part.first_block = std::max(tile.first_block, (first + begin) * kPieceBlocks);
        part.last_block = std::min(tile.last_block, (first + end) * kPieceBlocks);
        part.part = work.part_rows + begin * tile.num_rows();
        part.cost = cost(part);
        if (n == 0) {
          items.all[i] = part;
          items.merges.push_back({part, pieces});
        } else {
          items.all.push_back(part);
        }
      }
      work.part_rows += pieces * tile.num_rows();
    }
  }

  // Queries are scaled once, into base 2.
  void begin(const Item& item, Tile& tile) const {
    const float scale = float(call_.scale * kLog2E);
    for (int row = 0; row < item.num_rows(); ++row) {
      const float* query = call_.queries.row(token_of(item, row), head_of(item, row));
      for (int64_t d = 0; d < call_.pool.key_dim; ++d) tile.queries[row * call_.pool.key_dim + d] = query[d] * scale;
      tile.first_key[row] = item.is_shared() ? 0 : visible_from(item.request, item.first_row + row);
      tile.last_key[row] =
          item.is_shared() ? item.last_block * kBlock : visible_to(item.request, item.first_row + row);
    }
  }

  // Makes the tile ready for a piece.
  void clear(const Item& item, Tile& tile) const {
    std::fill_n(tile.maximum, item.num_rows(), kLowest);
    std::fill_n(tile.sum, item.num_rows(), Floats{});
    std::memset(tile.output, 0, item.num_rows() * width_ * sizeof(float));
  }

  void attend_piece(const Item& item, Tile& tile, int32_t piece) const {
    const int32_t last = std::min(item.last_block, (piece + 1) * kPieceBlocks);
    for (int32_t block = std::max(item.first_block, piece * kPieceBlocks), count; block < last; block += count) {
      count = std::min(kSpanBlocks - block % kSpanBlocks, last - block);
      score(item, tile, block, count);
      weigh(item, tile, block, count);
      mix(item, tile, block, count);
    }
  }

  // A piece's rows as a part.
  void copy(const Item& item, const Tile& tile, float* part) const {
    for (int row = 0; row < item.num_rows(); ++row, part += part_width()) {
      std::memcpy(part, tile.output + row * width_, width_ * sizeof(float));
      part[width_] = tile.maximum[row];
      part[width_ + 1] = across<Plus>(tile.sum[row]);
    }
  }

  // Adds a piece's row to one of a part, each brought to the larger of their maxima.
  void join(float* into, const float* sums, float piece_maximum, float piece_weight) const {
    const float maximum = std::max(into[width_], piece_maximum);
    const float shrink = exp2_of(into[width_] - maximum), weight = exp2_of(piece_maximum - maximum);
    for (int64_t d = 0; d < width_; ++d) into[d] = into[d] * shrink + sums[d] * weight;
    into[width_] = maximum;
    into[width_ + 1] = into[width_ + 1] * shrink + piece_weight * weight;
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

  void finish(const Item& item, const Tile& tile) const {
    for (int row = 0; row < item.num_rows(); ++row) {
      finish(item, row, tile.output + row * width_, tile.maximum[row], across<Plus>(tile.sum[row]));
    }
  }
  void finish(const Item& item, const float* part) const {
    for (int row = 0; row < item.num_rows(); ++row, part += part_width()) {
      finish(item, row, part, part[width_], part[width_ + 1]);
    }
  }

  // The sink joins the softmax last.
  void finish(const Item& item, int row, const float* sums, float maximum, float weight) const {
    const int64_t head = head_of(item, row);
    float shrink = 1.0f;
    if (call_.sinks != nullptr) {
      const float sink = float(call_.sinks[head] * kLog2E), top = std::max(maximum, sink);
      shrink = exp2_of(maximum - top);
      weight = weight * shrink + exp2_of(sink - top);
    }
    const float scale = weight > 0 ? shrink / weight : 0.0f;
    float* output = call_.output + (token_of(item, row) * call_.num_heads + head) * call_.pool.value_dim;
    for (int64_t d = 0; d < call_.pool.value_dim; ++d) output[d] = sums[d] * scale;
  }

  const int32_t group_;
  const int64_t width_, room_;  // width_: value_dim rounded up to whole panels
  const double read_ns_;
};

// Reads and writes the pool through `Rows`: WholeRows or QuantizedRows.
template <typename Rows>
class AttentionOver final : public Attention {
 public:
  explicit AttentionOver(const Call& call) : Attention(call, Rows::kReadNs, kSpanBlocks * Rows::kRoom), rows_(call.pool) {}

  void write(int64_t first, int64_t last) const override {
    for (int64_t head = 0; head < call_.pool.num_kv_heads; ++head) {
      for (int64_t token = first; token < last; ++token) {
        const float *key = call_.keys.row(token, head), *value = call_.values.row(token, head);
        rows_.write(call_.slots[token] / kBlock, call_.slots[token] % kBlock, head, key, value);
      }
    }
  }

 private:
  void score(const Item& item, Tile& tile, int32_t block, int32_t count) const override {
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

  void mix(const Item& item, Tile& tile, int32_t block, int32_t count) const override {
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
               tile.output + d, output_width(), true);
    }
  }

  const Rows rows_;
};

// What the threads work in.
struct Room {
  explicit Room(int threads) : tiles(threads) {}

  std::vector<Tile> tiles;
  Work work;
  Scratch parts;
};

void attend_with(const Attention& attention, Engine& engine, Room& room, const Call& call) {
  attention.cut(engine.threads.count(), room.work);
  float* parts = room.parts.at_least(room.work.part_rows * attention.part_width());
  for (Tile& tile : room.tiles) tile.fit(call.pool.key_dim, attention.output_width(), attention.room());

  const Items &shared = room.work.shared, &own = room.work.own;
  const int64_t tokens = call.keys.data == nullptr ? 0 : call.num_tokens, items = own.all.size();
  const int64_t shared_items = shared.all.size();
  const int64_t batch = std::min<int64_t>(kBlock, 1 + tokens / (4 * engine.threads.count()));
  std::atomic<int64_t> next_token{0}, written{0}, next_shared{0}, num_folded{0}, next_item{0};
  std::atomic<bool> is_folded{shared_items == 0};
  const auto share = [&](int thread) {
    for (int64_t at; (at = next_token.fetch_add(batch)) < tokens;) {
      const int64_t end = std::min(at + batch, tokens);
      attention.write(at, end);
      written.fetch_add(end - at, std::memory_order_release);
    }
    for (int spins = 0; written.load(std::memory_order_acquire) < tokens;) pause_briefly(spins);
    for (int64_t at; (at = next_shared.fetch_add(1)) < shared_items;) {
      attention.attend(shared.all[at], room.tiles[thread], parts);
      if (num_folded.fetch_add(1, std::memory_order_acq_rel) + 1 < shared_items) continue;
      for (const Merge& merge : shared.merges) attention.merge(merge, parts);
      is_folded.store(true, std::memory_order_release);
    }
    for (int spins = 0; !is_folded.load(std::memory_order_acquire);) pause_briefly(spins);
    for (int64_t at; (at = next_item.fetch_add(1)) < items;) attention.attend(own.all[at], room.tiles[thread], parts);
  };
  if (room.work.cost < kAloneNs) {
    share(0);
  } else {
    engine.threads.run(share);
  }
  for (const Merge& merge : own.merges) attention.merge(merge, parts);
}

}  // namespace

void attend(Engine& engine, const Call& call) {
  if (engine.attention == nullptr) engine.attention = std::make_shared<Room>(engine.threads.count());
  Room& room = *static_cast<Room*>(engine.attention.get());
  switch (call.pool.key_bits << 8 | call.pool.value_bits) {
    case 0x808: return attend_with(AttentionOver<QuantizedRows<8, 8>>(call), engine, room, call);
    case 0x804: return attend_with(AttentionOver<QuantizedRows<8, 4>>(call), engine, room, call);
    case 0x404: return attend_with(AttentionOver<QuantizedRows<4, 4>>(call), engine, room, call);
    default: return attend_with(AttentionOver<WholeRows>(call), engine, room, call);
  }
}
