// Attention of a compiled pass over the cells of several requests, as one operator a layer.
//
// Shapes: Q tokens of the pass, H heads, G kv heads, R = H / G heads that share one, D head width,
// C cells of the cache, S segments (queries of one request), W windows of the model's layers.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kRows = 8;        // rows of one task: queries times the heads that share a kv head
constexpr int64_t kBlock = 64;      // cells whose keys are converted and scored together
constexpr int64_t kWide = 32;       // from so many queries on, torch's own kernel is faster
constexpr int64_t kAlone = 4000;    // rows times cells that are not worth a second thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// A row of the table, as engines/compiled.py writes it.
struct Segment {
  int64_t first;    // its first query in the pass
  int64_t queries;  // how many
  int64_t written;  // the cell of the first of them; the others' follow
  int64_t seen;     // the cells that they look at, their own included: from here
  int64_t end;      // to here
  int64_t mask;     // where its mask [queries, cells] begins, -1: they see all up to their own cell
};

// What the running pass writes and sees: an operator of a compiled program gets nothing but its own
// tensors, so this waits here.
struct Pass {
  std::vector<Tensor> keys_1GCD, values_1GCD;
  std::vector<int64_t> windows;  // -1: none
  Tensor table_WS6, masks;
};
thread_local Pass running;

template <typename T>
void to_float(const T* from, float* to, int64_t count) {
  at::vec::convert(from, to, count);
}

float largest(const float* values, int64_t count) {
  return at::vec::reduce_all<float>(
      [](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, values, count);
}

float total(const float* values, int64_t count) {
  return at::vec::reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, values, count);
}

// One kv head of a segment and some of its rows.
template <typename T>
struct Task {
  const T *keys, *values;  // of the first cell seen
  const uint8_t* mask;     // of the segment, or null
  int64_t cells, queries, width;
  int64_t first_row, rows, shared;
};

template <typename T>
class Rows {
 public:
  explicit Rows(int64_t width)
      : width_(width),
        query_(kRows * width),
        sum_(kRows * width),
        keys_(kBlock * width),
        across_(width * kBlock),
        values_(kBlock * width) {}

  float* query(int64_t row) { return &query_[row * width_]; }

  // Attend; `sum(row)` holds the outcome.
  void attend(const Task<T>& task) {
    std::fill(sum_.begin(), sum_.end(), 0.f);
    std::fill_n(most_, kRows, kHidden);
    std::fill_n(weight_, kRows, 0.f);
    for (int64_t cell = 0; cell < task.cells; cell += kBlock) {
      const int64_t count = std::min(kBlock, task.cells - cell);
      if (!sees_any(task, cell, count)) continue;
      to_float(task.keys + cell * width_, keys_.data(), count * width_);
      std::fill(keys_.begin() + count * width_, keys_.end(), 0.f);
      to_float(task.values + cell * width_, values_.data(), count * width_);
      at::vec::transpose_mxn<float>(
          keys_.data(), width_, across_.data(), kBlock, kBlock, width_);
      for (int64_t row = 0; row < task.rows; ++row) add(task, row, cell, count);
    }
    for (int64_t row = 0; row < task.rows; ++row) {
      const float share = 1.f / weight_[row];
      at::vec::map<float>(
          [share](Vec x) { return x * Vec(share); }, sum(row), sum(row), width_);
    }
  }

  float* sum(int64_t row) { return &sum_[row * width_]; }

 private:
  static int64_t query_of(const Task<T>& task, int64_t row) {
    return (task.first_row + row) / task.shared;
  }

  // How many cells, from the first one on, a query sees where there is no mask.
  static int64_t reach(const Task<T>& task, int64_t row) {
    return task.cells - task.queries + query_of(task, row) + 1;
  }

  static bool sees_any(const Task<T>& task, int64_t cell, int64_t count) {
    if (task.mask == nullptr) return cell < reach(task, task.rows - 1);
    const int64_t last = query_of(task, task.rows - 1);
    for (int64_t query = query_of(task, 0); query <= last; ++query) {
      if (std::memchr(task.mask + query * task.cells + cell, 1, count) != nullptr) return true;
    }
    return false;
  }

  // Add a block of cells to a row's running softmax.
  void add(const Task<T>& task, int64_t row, int64_t cell, int64_t count) {
    alignas(64) float scores[kBlock];
    score(query(row), scores);
    hide(task, row, cell, count, scores);
    const float most = std::max(most_[row], largest(scores, kBlock));
    if (most == kHidden) return;
    at::vec::map<float>(
        [most](Vec x) { return (x - Vec(most)).exp_u20(); }, scores, scores, kBlock);
    const float old = std::exp(most_[row] - most);
    weight_[row] = weight_[row] * old + total(scores, kBlock);
    most_[row] = most;
    gather(scores, count, old, sum(row));
  }

  void score(const float* query, float* scores) const {
    constexpr int64_t parts = kBlock / Vec::size();
    Vec total[parts];
    for (int64_t part = 0; part < parts; ++part) total[part] = Vec(0.f);
    for (int64_t place = 0; place < width_; ++place) {
      const Vec one(query[place]);
      for (int64_t part = 0; part < parts; ++part) {
        const Vec key = Vec::loadu(&across_[place * kBlock + part * Vec::size()]);
        total[part] = at::vec::fmadd(one, key, total[part]);
      }
    }
    for (int64_t part = 0; part < parts; ++part) total[part].store(scores + part * Vec::size());
  }

  static void hide(
      const Task<T>& task, int64_t row, int64_t cell, int64_t count, float* scores) {
    int64_t seen = count;
    if (task.mask == nullptr) {
      seen = std::clamp<int64_t>(reach(task, row) - cell, 0, count);
    } else {
      const uint8_t* mask = task.mask + query_of(task, row) * task.cells + cell;
      for (int64_t at = 0; at < count; ++at) scores[at] = mask[at] ? scores[at] : kHidden;
    }
    std::fill(scores + seen, scores + kBlock, kHidden);
  }

  // sum = sum * old + weights of the cells times their values.
  void gather(const float* weights, int64_t count, float old, float* sum) const {
    int64_t place = 0;
    for (; place + 4 * Vec::size() <= width_; place += 4 * Vec::size())
      gather_some<4>(weights, count, old, sum, place);
    for (; place + Vec::size() <= width_; place += Vec::size())
      gather_some<1>(weights, count, old, sum, place);
    for (; place < width_; ++place) {
      sum[place] *= old;
      for (int64_t at = 0; at < count; ++at) sum[place] += weights[at] * values_[at * width_ + place];
    }
  }

  template <int parts>
  void gather_some(
      const float* weights, int64_t count, float old, float* sum, int64_t place) const {
    Vec total[parts];
    for (int part = 0; part < parts; ++part)
      total[part] = Vec::loadu(sum + place + part * Vec::size()) * Vec(old);
    for (int64_t at = 0; at < count; ++at) {
      const Vec one(weights[at]);
      for (int part = 0; part < parts; ++part) {
        const Vec value = Vec::loadu(&values_[at * width_ + place + part * Vec::size()]);
        total[part] = at::vec::fmadd(one, value, total[part]);
      }
    }
    for (int part = 0; part < parts; ++part) total[part].store(sum + place + part * Vec::size());
  }

  int64_t width_;
  std::vector<float> query_, sum_, keys_, across_, values_;
  float most_[kRows], weight_[kRows];
};

// Copy the pass's keys (or values) into their cells.
template <typename T>
void write(const Segment* segments, int64_t count, const Tensor& from_1GQD, Tensor& cells_1GCD) {
  const int64_t heads = cells_1GCD.size(1), width = cells_1GCD.size(3);
  for (int64_t head = 0; head < heads; ++head) {
    const T* from = from_1GQD.const_data_ptr<T>() + head * from_1GQD.stride(1);
    T* to = cells_1GCD.mutable_data_ptr<T>() + head * cells_1GCD.stride(1);
    for (const Segment* one = segments; one != segments + count; ++one) {
      for (int64_t query = 0; query < one->queries; ++query)
        std::memcpy(
            to + (one->written + query) * width,
            from + (one->first + query) * from_1GQD.stride(2),
            width * sizeof(T));
    }
  }
}

struct Place {
  int64_t segment, head, first_row, rows;
};

// The tasks of all narrow segments, a kv head and some rows each.
std::vector<Place> split(const Segment* segments, int64_t count, int64_t heads, int64_t shared) {
  std::vector<Place> places;
  for (int64_t segment = 0; segment < count; ++segment) {
    if (segments[segment].queries > kWide) continue;
    const int64_t rows = segments[segment].queries * shared;
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t row = 0; row < rows; row += kRows)
        places.push_back({segment, head, row, std::min(kRows, rows - row)});
  }
  return places;
}

template <typename T>
void attend_narrow(
    const Segment* segments, int64_t count, const Tensor& query_1HQD, const Tensor& keys_1GCD,
    const Tensor& values_1GCD, const uint8_t* masks, float scaling, Tensor& out_1QHD) {
  const int64_t kv_heads = keys_1GCD.size(1), width = keys_1GCD.size(3);
  const int64_t heads = query_1HQD.size(1), shared = heads / kv_heads;
  const auto places = split(segments, count, kv_heads, shared);
  int64_t work = 0;
  for (const Place& place : places)
    work += place.rows * (segments[place.segment].end - segments[place.segment].seen);
  const int64_t tasks = places.size();
  at::parallel_for(0, tasks, work < kAlone ? tasks : 1, [&](int64_t begin, int64_t end) {
    Rows<T> rows(width);
    for (int64_t index = begin; index < end; ++index) {
      const Place& place = places[index];
      const Segment& one = segments[place.segment];
      const int64_t start = place.head * keys_1GCD.stride(1) + one.seen * width;
      const Task<T> task{
          keys_1GCD.const_data_ptr<T>() + start, values_1GCD.const_data_ptr<T>() + start,
          one.mask < 0 ? nullptr : masks + one.mask, one.end - one.seen, one.queries, width,
          place.first_row, place.rows, shared};
      for (int64_t row = 0; row < place.rows; ++row) {
        const int64_t query = one.first + (place.first_row + row) / shared;
        const int64_t head = place.head * shared + (place.first_row + row) % shared;
        to_float(
            query_1HQD.const_data_ptr<T>() + head * query_1HQD.stride(1) +
                query * query_1HQD.stride(2),
            rows.query(row), width);
        for (int64_t at = 0; at < width; ++at) rows.query(row)[at] *= scaling;
      }
      rows.attend(task);
      for (int64_t row = 0; row < place.rows; ++row) {
        const int64_t query = one.first + (place.first_row + row) / shared;
        const int64_t head = place.head * shared + (place.first_row + row) % shared;
        at::vec::convert(
            rows.sum(row), out_1QHD.mutable_data_ptr<T>() + (query * heads + head) * width, width);
      }
    }
  });
}

// A segment of many queries, such as a prompt, by torch's own kernel.
void attend_wide(
    const Segment& one, const Tensor& query_1HQD, const Tensor& keys_1GCD,
    const Tensor& values_1GCD, const Tensor& masks, double scaling, Tensor& out_1QHD) {
  const int64_t kv_heads = keys_1GCD.size(1), heads = query_1HQD.size(1);
  const int64_t shared = heads / kv_heads, cells = one.end - one.seen;
  const Tensor query = query_1HQD.narrow(2, one.first, one.queries);
  const Tensor keys = keys_1GCD.narrow(2, one.seen, cells);
  const Tensor values = values_1GCD.narrow(2, one.seen, cells);
  Tensor out_1HQD;
  if (one.mask < 0) {
    out_1HQD = at::scaled_dot_product_attention(
        query, keys, values, {}, 0.0, /*is_causal=*/true, scaling, /*enable_gqa=*/shared > 1);
  } else {
    const Tensor mask = masks.narrow(0, one.mask, one.queries * cells).view({one.queries, cells});
    out_1HQD = at::scaled_dot_product_attention(
                   query.reshape({1, kv_heads, shared * one.queries, -1}), keys, values,
                   mask.to(at::kBool).repeat({shared, 1}), 0.0, false, scaling)
                   .reshape({1, heads, one.queries, -1});
  }
  out_1QHD.narrow(1, one.first, one.queries).copy_(out_1HQD.transpose(1, 2));
}

Tensor rows_of(const Tensor& states) {
  return states.stride(3) == 1 ? states : states.contiguous();
}

// Write the pass's keys and values into a layer's cells and attend; return out_1QHD. Rows that no
// segment has are padding: they are not written, and get zeros.
Tensor attend(
    const Tensor& query, const Tensor& key, const Tensor& value, int64_t layer, double scaling,
    std::optional<int64_t> window) {
  const auto found =
      std::find(running.windows.begin(), running.windows.end(), window.value_or(-1));
  TORCH_CHECK(found != running.windows.end(), "no pass has said what this layer sees");
  const int64_t count = running.table_WS6.size(1);
  const auto* segments =
      reinterpret_cast<const Segment*>(running.table_WS6.const_data_ptr<int64_t>()) +
      (found - running.windows.begin()) * count;
  const Tensor query_1HQD = rows_of(query), key_1GQD = rows_of(key), value_1GQD = rows_of(value);
  Tensor &keys = running.keys_1GCD.at(layer), &values = running.values_1GCD.at(layer);
  const int64_t heads = query.size(1), queries = query.size(2), width = query.size(3);
  TORCH_CHECK(values.size(3) == width, "keys and values of different widths");
  Tensor out_1QHD = at::empty({1, queries, heads, width}, query.options());
  const int64_t used = count ? segments[count - 1].first + segments[count - 1].queries : 0;
  if (used < queries) out_1QHD.narrow(1, used, queries - used).zero_();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, query.scalar_type(), "pasta::attend", [&] {
        if constexpr (std::is_same_v<scalar_t, double>) {
          TORCH_CHECK(false, "float64 is not compiled");
        } else {
          write<scalar_t>(segments, count, key_1GQD, keys);
          write<scalar_t>(segments, count, value_1GQD, values);
          attend_narrow<scalar_t>(
              segments, count, query_1HQD, keys, values, running.masks.const_data_ptr<uint8_t>(),
              static_cast<float>(scaling), out_1QHD);
        }
      });
  for (int64_t segment = 0; segment < count; ++segment) {
    if (segments[segment].queries > kWide)
      attend_wide(segments[segment], query_1HQD, keys, values, running.masks, scaling, out_1QHD);
  }
  return out_1QHD;
}

// Say what the next pass of this thread writes and sees. Empty lists let go of the last one's cells.
void see(
    std::vector<Tensor> keys_1GCD, std::vector<Tensor> values_1GCD, const Tensor& table_WS6,
    const Tensor& masks, std::vector<int64_t> windows) {
  running = {std::move(keys_1GCD), std::move(values_1GCD), std::move(windows), table_WS6, masks};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pasta, library) {
  library.def("see(Tensor[] keys, Tensor[] values, Tensor table, Tensor masks, int[] windows) -> ()");
}

TORCH_LIBRARY_IMPL(pasta, CPU, library) { library.impl("attend", attend); }

TORCH_LIBRARY_IMPL(pasta, CompositeExplicitAutograd, library) { library.impl("see", see); }
