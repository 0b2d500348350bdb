// Attention over the slots of several requests, as one call a layer.
//
// A query adds the slots that its branch lists in blocks, in their order. What it does not see adds
// exactly nothing, so its result does not depend, to the bit, on what else is computed, or when.

#include <limits>

#include "decoder.h"

namespace {

constexpr int64_t kRows = 32;     // of one task, at most: queries times the heads sharing a kv head
constexpr int64_t kFewRows = 8;   // those of a task where a request has few queries
constexpr int64_t kSlots = 64;    // whose keys are converted and scored together
constexpr int64_t kFewQueries = 16;
constexpr int64_t kParts = 4;     // sums that need not wait for each other
constexpr int64_t kAlone = 4000;  // rows times slots that are not worth a second thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Some queries of a segment, and the heads that share one kv head.
struct Task {
  const Segment* segment;
  int64_t kv_head, first, queries;
};

// What a thread attends with. A row is a query of a head.
template <typename T>
class Attention {
 public:
  Attention(const Model& model, const Layer& layer, const float* qkv, const Metadata& metadata)
      : model_(model),
        layer_(layer),
        metadata_(metadata),
        qkv_(qkv),
        width_(model.head_width),
        padded_((width_ + kParts * kWidth - 1) / (kParts * kWidth) * kParts * kWidth),
        shared_(model.heads / model.kv_heads),
        keys_(kSlots * padded_),
        values_(kSlots * padded_) {}

  void run(const Task& task, float* out) {
    const Segment& one = *task.segment;
    const int64_t slots = one.count, rows = task.queries * shared_;
    const int32_t* list = metadata_.slots + one.listed;
    const uint8_t* masks = metadata_.masks + one.mask + task.first * slots;
    const auto place = [&](int64_t row, int64_t heads) {  // where tokens have so many heads
      const int64_t token = one.first + task.first + row / shared_;
      return (token * heads + task.kv_head * shared_ + row % shared_) * width_;
    };
    query_.assign(rows * padded_, 0.f);
    sum_.assign(rows * padded_, 0.f);
    most_.assign(rows, kHidden);
    weight_.assign(rows, 0.f);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = qkv_ + place(row, model_.heads + 2 * model_.kv_heads);
      float* own = &query_[row * padded_];
      for (int64_t at = 0; at < width_; ++at) own[at] = from[at] * model_.scaling;
    }
    for (int64_t slot = 0; slot < slots; slot += kSlots) {
      const int64_t count = std::min(kSlots, slots - slot);
      bool converted = false;
      for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* mask = masks + row / shared_ * slots + slot;
        if (std::memchr(mask, 1, count) == nullptr) continue;
        if (!converted) convert_slots(task.kv_head * model_.slots, list + slot, count);
        converted = true;
        add(row, count, mask);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = out + place(row, model_.heads);
      for (int64_t at = 0; at < width_; ++at) to[at] = sum_[row * padded_ + at] / weight_[row];
    }
  }

 private:
  void convert_slots(int64_t first, const int32_t* slots, int64_t count) {
    for (int64_t slot = 0; slot < count; ++slot) {
      const int64_t from = (first + slots[slot]) * width_;
      convert(static_cast<const T*>(layer_.keys) + from, &keys_[slot * padded_], width_);
      convert(static_cast<const T*>(layer_.values) + from, &values_[slot * padded_], width_);
    }
  }

  // Add a block of slots to a row's running softmax (arXiv 2205.14135, algorithm 1).
  void add(int64_t row, int64_t count, const uint8_t* mask) {
    float scores[kSlots];
    score(&query_[row * padded_], scores);
    for (int64_t slot = 0; slot < kSlots; ++slot)
      if (slot >= count || !mask[slot]) scores[slot] = kHidden;
    float most = most_[row], sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t slot = 0; slot < kSlots; ++slot) most = std::max(most, scores[slot]);
#pragma omp simd reduction(+ : sum)
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      scores[slot] = exp_of(scores[slot] - most);
      sum += scores[slot];
    }
    const float old = std::exp(most_[row] - most);
    weight_[row] = weight_[row] * old + sum;
    most_[row] = most;
    gather(scores, count, old, &sum_[row * padded_]);
  }

  void score(const float* query, float* scores) const {
    for (int64_t slot = 0; slot < kSlots; slot += kParts) {
      Vec sums[kParts] = {};
      for (int64_t at = 0; at < padded_; at += kWidth)
#pragma GCC unroll 4
        for (int64_t part = 0; part < kParts; ++part)
          sums[part] += load(query + at) * load(&keys_[(slot + part) * padded_ + at]);
#pragma GCC unroll 4
      for (int64_t part = 0; part < kParts; ++part) scores[slot + part] = total(sums[part]);
    }
  }

  // sum = sum * old + weights of the slots times their values.
  void gather(const float* weights, int64_t count, float old, float* sum) const {
    for (int64_t place = 0; place < padded_; place += kParts * kWidth) {
      Vec sums[kParts];
#pragma GCC unroll 4
      for (int64_t part = 0; part < kParts; ++part)
        sums[part] = load(sum + place + part * kWidth) * old;
      for (int64_t slot = 0; slot < count; ++slot)
#pragma GCC unroll 4
        for (int64_t part = 0; part < kParts; ++part)
          sums[part] += weights[slot] * load(&values_[slot * padded_ + place + part * kWidth]);
#pragma GCC unroll 4
      for (int64_t part = 0; part < kParts; ++part) store(sum + place + part * kWidth, sums[part]);
    }
  }

  const Model& model_;
  const Layer& layer_;
  const Metadata& metadata_;
  const float* qkv_;
  const int64_t width_, padded_, shared_;  // numbers of a head, and with the zeros behind them
  std::vector<float> keys_, values_, query_, sum_, most_, weight_;
};

template <typename T>
void run(
    const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv, float* out,
    int threads) {
  const int64_t width = model.head_width, shared = model.heads / model.kv_heads,
                stride = (model.heads + 2 * model.kv_heads) * width;
  std::vector<Task> tasks;
  int64_t work = 0;
  for (const Segment* one = metadata.segments; one != metadata.segments + metadata.count; ++one) {
    const int64_t most = (one->queries > kFewQueries ? kRows : kFewRows) / shared,
                  step = std::max<int64_t>(most, 1);
    const int32_t* written = metadata.slots + one->listed + one->count - one->queries;
    work += one->queries * model.heads * one->count;
    for (int64_t head = 0; head < model.kv_heads; ++head) {
      for (int64_t query = 0; query < one->queries; ++query) {
        const float* key = qkv + (one->first + query) * stride + (model.heads + head) * width;
        const int64_t to = (head * model.slots + written[query]) * width;
        convert(key, static_cast<T*>(layer.keys) + to, width);
        convert(key + model.kv_heads * width, static_cast<T*>(layer.values) + to, width);
      }
      for (int64_t query = 0; query < one->queries; query += step)
        tasks.push_back({one, head, query, std::min(step, one->queries - query)});
    }
  }
#pragma omp parallel num_threads(threads) if (threads > 1 && work >= kAlone)
  {
    Attention<T> attention(model, layer, qkv, metadata);
#pragma omp for schedule(dynamic)
    for (const Task& task : tasks) attention.run(task, out);
  }
}

}  // namespace

void attend(
    const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv, float* out,
    int threads) {
  (model.bfloat16 ? run<uint16_t> : run<float>)(model, layer, metadata, qkv, out, threads);
}
