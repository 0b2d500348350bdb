// Attention over the slots of several requests, as one call a layer.
//
// A query adds the slots of its request in blocks, from the request's first slot on. What it does not
// see adds exactly nothing, so its result does not depend, to the bit, on the other queries.
//
// Shapes: Q tokens of the pass, H heads, G kv heads, R = H / G heads that share one, D head width,
// S slots of the cache, N segments (queries of one request).

#include <limits>
#include <vector>

#include "vec.h"

namespace {

constexpr int64_t kRows = 32;     // most rows of one task: queries times the heads sharing a kv head
constexpr int64_t kFewRows = 8;   // those of a task where a request has few queries
constexpr int64_t kBlock = 64;    // slots whose keys are converted and scored together
constexpr int64_t kFewQueries = 16;
constexpr int64_t kAtOnce = 4 * kWidth;  // numbers of a head that are summed together
constexpr int64_t kAlone = 4000;  // rows times slots that are not worth a second thread
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

// One layer of a pass.
struct Pass {
  const float *query, *key, *value;  // [Q, H, D] and [Q, G, D], tokens `strides` apart
  void *keys, *values;               // [G, S, D]
  const Segment* segments;
  const uint8_t* masks;
  float* out;  // [Q, H, D]
  int64_t count, heads, kv_heads, slots, width;
  int64_t query_stride, key_stride, value_stride;
  float scaling;
  int threads;
  bool bfloat16;  // the keys and values of the cache, else float32

  int64_t shared() const { return heads / kv_heads; }
};

// Some rows of one kv head of a segment.
struct Task {
  int64_t segment, head, first_row, rows;
};

std::vector<Task> tasks_of(const Pass& pass) {
  std::vector<Task> tasks;
  for (int64_t segment = 0; segment < pass.count; ++segment) {
    const int64_t queries = pass.segments[segment].queries, rows = queries * pass.shared();
    const int64_t most = queries > kFewQueries ? kRows : kFewRows;
    for (int64_t head = 0; head < pass.kv_heads; ++head)
      for (int64_t row = 0; row < rows; row += most)
        tasks.push_back({segment, head, row, std::min(most, rows - row)});
  }
  return tasks;
}

template <int half, int... lane>
Vec interleaved(Vec x, Vec y, std::integer_sequence<int, lane...>) {
  constexpr int first = half * kWidth / 2;
  return __builtin_shufflevector(x, y, (first + lane / 2 + lane % 2 * kWidth)...);
}

// Write a square of kWidth rows across: interleaving rows that lie half of them apart does so.
void turn(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  constexpr std::make_integer_sequence<int, kWidth> lanes;
  Vec rows[kWidth], next[kWidth];
  for (int row = 0; row < kWidth; ++row) rows[row] = load(from + row * from_stride);
  for (int size = 1; size < kWidth; size *= 2) {
    for (int row = 0; row < kWidth / 2; ++row) {
      next[2 * row] = interleaved<0>(rows[row], rows[row + kWidth / 2], lanes);
      next[2 * row + 1] = interleaved<1>(rows[row], rows[row + kWidth / 2], lanes);
    }
    std::copy_n(next, kWidth, rows);
  }
  for (int row = 0; row < kWidth; ++row) store(to + row * to_stride, rows[row]);
}

template <typename T>
class Rows {
 public:
  explicit Rows(const Pass& pass)
      : pass_(pass),
        width_(pass.width),
        padded_((width_ + kAtOnce - 1) / kAtOnce * kAtOnce),
        query_(kRows * padded_),
        sum_(kRows * padded_),
        keys_(kBlock * padded_),
        across_(padded_ * kBlock),
        values_(kBlock * padded_) {}

  void attend(const Task& task) {
    const Segment& one = pass_.segments[task.segment];
    task_ = task;
    queries_ = one.queries;
    slots_ = one.end - one.seen;
    mask_ = one.mask < 0 ? nullptr : pass_.masks + one.mask;
    const int64_t start = (task.head * pass_.slots + one.seen) * width_;
    const T *keys = static_cast<const T*>(pass_.keys) + start,
            *values = static_cast<const T*>(pass_.values) + start;
    for (int64_t row = 0; row < task.rows; ++row) {
      const float* from =
          pass_.query + (one.first + query_of(row)) * pass_.query_stride + head_of(row) * width_;
      for (int64_t at = 0; at < width_; ++at) query_[row * padded_ + at] = from[at] * pass_.scaling;
    }
    std::fill(sum_.begin(), sum_.end(), 0.f);
    std::fill_n(most_, kRows, kHidden);
    std::fill_n(weight_, kRows, 0.f);
    for (int64_t slot = 0; slot < slots_; slot += kBlock) {
      const int64_t count = std::min(kBlock, slots_ - slot);
      if (!sees_any(slot, count)) continue;
      for (int64_t at = 0; at < count; ++at) {
        convert(keys + (slot + at) * width_, &keys_[at * padded_], width_);
        convert(values + (slot + at) * width_, &values_[at * padded_], width_);
      }
      turn_keys();
      for (int64_t row = 0; row < task.rows; ++row) add(row, slot, count);
    }
    for (int64_t row = 0; row < task.rows; ++row) {
      float* out = pass_.out +
                   ((one.first + query_of(row)) * pass_.heads + head_of(row)) * width_;
      for (int64_t at = 0; at < width_; ++at) out[at] = sum_[row * padded_ + at] / weight_[row];
    }
  }

 private:
  int64_t query_of(int64_t row) const { return (task_.first_row + row) / pass_.shared(); }

  int64_t head_of(int64_t row) const {
    return task_.head * pass_.shared() + (task_.first_row + row) % pass_.shared();
  }

  // How many slots, from the first one on, a row sees where there is no mask.
  int64_t reach(int64_t row) const { return slots_ - queries_ + query_of(row) + 1; }

  bool sees_any(int64_t slot, int64_t count) const {
    if (mask_ == nullptr) return slot < reach(task_.rows - 1);
    for (int64_t query = query_of(0); query <= query_of(task_.rows - 1); ++query)
      if (std::memchr(mask_ + query * slots_ + slot, 1, count) != nullptr) return true;
    return false;
  }

  void turn_keys() {
    for (int64_t place = 0; place < padded_; place += kWidth)
      for (int64_t slot = 0; slot < kBlock; slot += kWidth)
        turn(&keys_[slot * padded_ + place], padded_, &across_[place * kBlock + slot], kBlock);
  }

  // Add a block of slots to a row's running softmax.
  void add(int64_t row, int64_t slot, int64_t count) {
    float scores[kBlock];
    score(&query_[row * padded_], scores);
    hide(row, slot, count, scores);
    const float most = std::max(most_[row], largest(scores));
    if (most == kHidden) return;
    Vec sum{};
    for (int64_t at = 0; at < kBlock; at += kWidth) {
      const Vec weight = exp(load(scores + at) - most);
      store(scores + at, weight);
      sum += weight;
    }
    const float old = std::exp(most_[row] - most);
    weight_[row] = weight_[row] * old + total(sum);
    most_[row] = most;
    gather(scores, count, old, &sum_[row * padded_]);
  }

  void score(const float* query, float* scores) const {
    constexpr int64_t parts = kBlock / kWidth;
    Vec sums[parts] = {};
    for (int64_t place = 0; place < width_; ++place)
      for (int64_t part = 0; part < parts; ++part)
        sums[part] += query[place] * load(&across_[place * kBlock + part * kWidth]);
    for (int64_t part = 0; part < parts; ++part) store(scores + part * kWidth, sums[part]);
  }

  void hide(int64_t row, int64_t slot, int64_t count, float* scores) const {
    int64_t seen = count;
    if (mask_ == nullptr) {
      seen = std::clamp<int64_t>(reach(row) - slot, 0, count);
    } else {
      const uint8_t* mask = mask_ + query_of(row) * slots_ + slot;
      for (int64_t at = 0; at < count; ++at) scores[at] = mask[at] ? scores[at] : kHidden;
    }
    std::fill(scores + seen, scores + kBlock, kHidden);
  }

  static float largest(const float* scores) {
    Vec most = load(scores);
    for (int64_t at = kWidth; at < kBlock; at += kWidth) {
      const Vec next = load(scores + at);
      most = next > most ? next : most;
    }
    float lanes[kWidth];
    store(lanes, most);
    return *std::max_element(lanes, lanes + kWidth);
  }

  // sum = sum * old + weights of the slots times their values.
  void gather(const float* weights, int64_t count, float old, float* sum) const {
    constexpr int64_t parts = kAtOnce / kWidth;
    for (int64_t place = 0; place < padded_; place += kAtOnce) {
      Vec sums[parts];
      for (int64_t part = 0; part < parts; ++part)
        sums[part] = load(sum + place + part * kWidth) * old;
      for (int64_t at = 0; at < count; ++at)
        for (int64_t part = 0; part < parts; ++part)
          sums[part] += weights[at] * load(&values_[at * padded_ + place + part * kWidth]);
      for (int64_t part = 0; part < parts; ++part) store(sum + place + part * kWidth, sums[part]);
    }
  }

  const Pass& pass_;
  const int64_t width_, padded_;  // numbers of a head, and with the zeros behind them
  Task task_{};
  int64_t queries_ = 0, slots_ = 0;
  const uint8_t* mask_ = nullptr;
  std::vector<float> query_, sum_, keys_, across_, values_;
  float most_[kRows], weight_[kRows];
};

// Copy the pass's keys (or values) into their slots.
template <typename T>
void write(const Pass& pass, const float* from_QGD, int64_t stride, void* slots_GSD) {
  for (const Segment* one = pass.segments; one != pass.segments + pass.count; ++one)
    for (int64_t query = 0; query < one->queries; ++query)
      for (int64_t head = 0; head < pass.kv_heads; ++head)
        convert(
            from_QGD + (one->first + query) * stride + head * pass.width,
            static_cast<T*>(slots_GSD) + (head * pass.slots + one->written + query) * pass.width,
            pass.width);
}

template <typename T>
void run(const Pass& pass) {
  write<T>(pass, pass.key, pass.key_stride, pass.keys);
  write<T>(pass, pass.value, pass.value_stride, pass.values);
  const auto tasks = tasks_of(pass);
  int64_t work = 0;
  for (const Task& task : tasks)
    work += task.rows * (pass.segments[task.segment].end - pass.segments[task.segment].seen);
#pragma omp parallel num_threads(pass.threads) if (pass.threads > 1 && work >= kAlone)
  {
    Rows<T> rows(pass);
#pragma omp for schedule(dynamic)
    for (size_t task = 0; task < tasks.size(); ++task) rows.attend(tasks[task]);
  }
}

}  // namespace

// Write the pass's keys and values into a layer's slots, and attend. See `Pass`.
extern "C" void pasta_attend(
    const float* query, const float* key, const float* value, void* keys, void* values,
    const Segment* segments, const uint8_t* masks, float* out, int64_t count, int64_t heads,
    int64_t kv_heads, int64_t slots, int64_t width, int64_t query_stride, int64_t key_stride,
    int64_t value_stride, float scaling, int threads, bool bfloat16) {
  const Pass pass{
      query, key, value, keys, values, segments, masks, out, count, heads, kv_heads, slots, width,
      query_stride, key_stride, value_stride, scaling, threads, bfloat16};
  bfloat16 ? run<uint16_t>(pass) : run<float>(pass);
}
