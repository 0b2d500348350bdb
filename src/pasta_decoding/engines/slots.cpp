// Attention over the slots of several requests, as one operator a layer.
//
// A query adds the slots of its request in blocks, from the request's first slot on. What it does not
// see adds exactly nothing, so its result does not depend, to the bit, on the other queries.
//
// Shapes: Q tokens of the pass, H heads, G kv heads, R = H / G heads that share one, D head width,
// S slots of the cache, N segments (queries of one request).

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kRows = 32;       // most rows of one task: queries times the heads sharing a kv head
constexpr int64_t kFewRows = 8;     // those of a task where a request has few queries
constexpr int64_t kBlock = 64;      // slots whose keys are converted and scored together
constexpr int64_t kFewQueries = 16;
constexpr int64_t kAlone = 4000;    // rows times slots that are not worth a second thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// A row of the table, as engines/fast.py writes it.
struct Segment {
  int64_t first;    // its first query in the pass
  int64_t queries;  // how many
  int64_t written;  // the slot of the first of them; the others' follow
  int64_t seen;     // the slots that they look at, their own included: from here
  int64_t end;      // to here
  int64_t mask;     // where its mask [queries, slots] begins, -1: they see all up to their own slot
};

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
  const T *keys, *values;  // of the first slot seen
  const uint8_t* mask;     // of the segment, or null
  int64_t slots, queries, width;
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
    for (int64_t slot = 0; slot < task.slots; slot += kBlock) {
      const int64_t count = std::min(kBlock, task.slots - slot);
      if (!sees_any(task, slot, count)) continue;
      to_float(task.keys + slot * width_, keys_.data(), count * width_);
      std::fill(keys_.begin() + count * width_, keys_.end(), 0.f);
      to_float(task.values + slot * width_, values_.data(), count * width_);
      at::vec::transpose_mxn<float>(
          keys_.data(), width_, across_.data(), kBlock, kBlock, width_);
      for (int64_t row = 0; row < task.rows; ++row) add(task, row, slot, count);
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

  // How many slots, from the first one on, a query sees where there is no mask.
  static int64_t reach(const Task<T>& task, int64_t row) {
    return task.slots - task.queries + query_of(task, row) + 1;
  }

  static bool sees_any(const Task<T>& task, int64_t slot, int64_t count) {
    if (task.mask == nullptr) return slot < reach(task, task.rows - 1);
    const int64_t last = query_of(task, task.rows - 1);
    for (int64_t query = query_of(task, 0); query <= last; ++query) {
      if (std::memchr(task.mask + query * task.slots + slot, 1, count) != nullptr) return true;
    }
    return false;
  }

  // Add a block of slots to a row's running softmax.
  void add(const Task<T>& task, int64_t row, int64_t slot, int64_t count) {
    alignas(64) float scores[kBlock];
    score(query(row), scores);
    hide(task, row, slot, count, scores);
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
      const Task<T>& task, int64_t row, int64_t slot, int64_t count, float* scores) {
    int64_t seen = count;
    if (task.mask == nullptr) {
      seen = std::clamp<int64_t>(reach(task, row) - slot, 0, count);
    } else {
      const uint8_t* mask = task.mask + query_of(task, row) * task.slots + slot;
      for (int64_t at = 0; at < count; ++at) scores[at] = mask[at] ? scores[at] : kHidden;
    }
    std::fill(scores + seen, scores + kBlock, kHidden);
  }

  // sum = sum * old + weights of the slots times their values.
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

// Copy the pass's keys (or values) into their slots.
template <typename T>
void write(const Segment* segments, int64_t count, const Tensor& from_QGD, const Tensor& slots_GSD) {
  const int64_t heads = slots_GSD.size(0), width = slots_GSD.size(2);
  for (const Segment* one = segments; one != segments + count; ++one)
    for (int64_t query = 0; query < one->queries; ++query)
      for (int64_t head = 0; head < heads; ++head)
        at::vec::convert(
            from_QGD.const_data_ptr<float>() + (one->first + query) * from_QGD.stride(0) +
                head * from_QGD.stride(1),
            slots_GSD.mutable_data_ptr<T>() + head * slots_GSD.stride(0) +
                (one->written + query) * width,
            width);
}

struct Place {
  int64_t segment, head, first_row, rows;
};

// The tasks of all segments, a kv head and some rows each.
std::vector<Place> split(const Segment* segments, int64_t count, int64_t heads, int64_t shared) {
  std::vector<Place> places;
  for (int64_t segment = 0; segment < count; ++segment) {
    const int64_t queries = segments[segment].queries, rows = queries * shared;
    const int64_t most = queries > kFewQueries ? kRows : kFewRows;
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t row = 0; row < rows; row += most)
        places.push_back({segment, head, row, std::min(most, rows - row)});
  }
  return places;
}

template <typename T>
void attend_segments(
    const Segment* segments, int64_t count, const Tensor& query_QHD, const Tensor& keys_GSD,
    const Tensor& values_GSD, const uint8_t* masks, float scaling, Tensor& out_QHD) {
  const int64_t kv_heads = keys_GSD.size(0), width = keys_GSD.size(2);
  const int64_t heads = query_QHD.size(1), shared = heads / kv_heads;
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
      const int64_t start = place.head * keys_GSD.stride(0) + one.seen * width;
      const Task<T> task{
          keys_GSD.const_data_ptr<T>() + start, values_GSD.const_data_ptr<T>() + start,
          one.mask < 0 ? nullptr : masks + one.mask, one.end - one.seen, one.queries, width,
          place.first_row, place.rows, shared};
      for (int64_t row = 0; row < place.rows; ++row) {
        const int64_t query = one.first + (place.first_row + row) / shared;
        const int64_t head = place.head * shared + (place.first_row + row) % shared;
        const float* from = query_QHD.const_data_ptr<float>() + query * query_QHD.stride(0) +
                            head * query_QHD.stride(1);
        for (int64_t at = 0; at < width; ++at) rows.query(row)[at] = from[at] * scaling;
      }
      rows.attend(task);
      for (int64_t row = 0; row < place.rows; ++row) {
        const int64_t query = one.first + (place.first_row + row) / shared;
        const int64_t head = place.head * shared + (place.first_row + row) % shared;
        std::copy_n(
            rows.sum(row), width,
            out_QHD.mutable_data_ptr<float>() + (query * heads + head) * width);
      }
    }
  });
}

// Write the pass's keys and values into a layer's slots and attend; return out_QHD.
Tensor attend(
    const Tensor& query_QHD, const Tensor& key_QGD, const Tensor& value_QGD,
    const Tensor& keys_GSD, const Tensor& values_GSD, const Tensor& table_N6, const Tensor& masks,
    double scaling) {
  const int64_t count = table_N6.size(0);
  const auto* segments = reinterpret_cast<const Segment*>(table_N6.const_data_ptr<int64_t>());
  Tensor out_QHD = at::empty(query_QHD.sizes(), query_QHD.options());
  const auto run = [&](auto number) {
    using T = decltype(number);
    write<T>(segments, count, key_QGD, keys_GSD);
    write<T>(segments, count, value_QGD, values_GSD);
    attend_segments<T>(
        segments, count, query_QHD, keys_GSD, values_GSD, masks.const_data_ptr<uint8_t>(),
        static_cast<float>(scaling), out_QHD);
  };
  if (keys_GSD.scalar_type() == at::kFloat)
    run(0.f);
  else
    run(at::BFloat16());
  return out_QHD;
}

}  // namespace

TORCH_LIBRARY_IMPL(pasta_fast, CPU, library) { library.impl("attend", attend); }
