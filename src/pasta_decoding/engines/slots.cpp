// Attention over the slots of several requests, as one call a layer.
//
// A query adds the slots of its request in blocks, from the request's first slot on. What it does not
// see adds exactly nothing, so its result does not depend, to the bit, on the other queries.

#include <limits>

#include "decoder.h"

namespace {

constexpr int64_t kRows = 32;     // of one task, at most: queries times the heads sharing a kv head
constexpr int64_t kFewRows = 8;   // those of a task where a request has few queries
constexpr int64_t kSlots = 64;    // whose keys are converted and scored together
constexpr int64_t kFewQueries = 16;
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
        shared_(model.heads / model.kv_heads),
        keys_(kSlots * width_),
        values_(kSlots * width_) {}

  void run(const Task& task, float* out) {
    const Segment& one = *task.segment;
    const int64_t slots = one.end - one.seen, rows = task.queries * shared_;
    const uint8_t* masks = one.mask < 0 ? nullptr : metadata_.masks + one.mask;
    const auto place = [&](int64_t row, int64_t heads) {  // where tokens have so many heads
      const int64_t token = one.first + task.first + row / shared_;
      return (token * heads + task.kv_head * shared_ + row % shared_) * width_;
    };
    query_.resize(rows * width_);
    sum_.assign(rows * width_, 0.f);
    most_.assign(rows, kHidden);
    weight_.assign(rows, 0.f);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = qkv_ + place(row, model_.heads + 2 * model_.kv_heads);
      for (int64_t at = 0; at < width_; ++at) query_[row * width_ + at] = from[at] * model_.scaling;
    }
    for (int64_t slot = 0; slot < slots; slot += kSlots) {
      // How many of a block's slots, from its first one on, a query may see; 0 if it sees none.
      const auto reach = [&](int64_t query) {
        const int64_t count = std::min(kSlots, slots - slot);
        if (masks)
          return std::memchr(masks + query * slots + slot, 1, count) == nullptr ? 0 : count;
        return std::clamp<int64_t>(slots - one.queries + query + 1 - slot, 0, count);
      };
      int64_t most = 0;
      for (int64_t query = 0; query < task.queries; ++query)
        most = std::max(most, reach(task.first + query));
      const int64_t start = ((task.kv_head * model_.slots) + one.seen + slot) * width_;
      convert(static_cast<const T*>(layer_.keys) + start, keys_.data(), most * width_);
      convert(static_cast<const T*>(layer_.values) + start, values_.data(), most * width_);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t query = task.first + row / shared_;
        if (const int64_t count = reach(query))
          add(row, count, masks ? masks + query * slots + slot : nullptr);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = out + place(row, model_.heads);
      for (int64_t at = 0; at < width_; ++at) to[at] = sum_[row * width_ + at] / weight_[row];
    }
  }

 private:
  // Add a block of slots to a row's running softmax (arXiv 2205.14135, algorithm 1).
  void add(int64_t row, int64_t count, const uint8_t* mask) {
    float scores[kSlots];
    for (int64_t slot = 0; slot < kSlots; slot += 4) score(&query_[row * width_], slot, scores);
    for (int64_t slot = 0; slot < kSlots; ++slot)
      if (slot >= count || (mask && !mask[slot])) scores[slot] = kHidden;
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
    float* own = &sum_[row * width_];
    for (int64_t at = 0; at < width_; ++at) own[at] *= old;
    for (int64_t slot = 0; slot < count; slot += 4) gather(scores + slot, slot, own);
  }

  // Four scores at a time, and four values, so that sums need not wait for each other.
  void score(const float* query, int64_t slot, float* scores) const {
    const float *first = &keys_[slot * width_], *second = first + width_, *third = second + width_,
                *fourth = third + width_;
    float sums[4] = {};
#pragma omp simd reduction(+ : sums)
    for (int64_t at = 0; at < width_; ++at) {
      sums[0] += query[at] * first[at];
      sums[1] += query[at] * second[at];
      sums[2] += query[at] * third[at];
      sums[3] += query[at] * fourth[at];
    }
    std::copy_n(sums, 4, scores + slot);
  }

  void gather(const float* weights, int64_t slot, float* sum) const {
    const float *first = &values_[slot * width_], *second = first + width_,
                *third = second + width_, *fourth = third + width_;
    for (int64_t at = 0; at < width_; ++at)
      sum[at] += weights[0] * first[at] + weights[1] * second[at] + weights[2] * third[at] +
                 weights[3] * fourth[at];
  }

  const Model& model_;
  const Layer& layer_;
  const Metadata& metadata_;
  const float* qkv_;
  const int64_t width_, shared_;
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
    work += one->queries * model.heads * (one->end - one->seen);
    for (int64_t head = 0; head < model.kv_heads; ++head) {
      for (int64_t query = 0; query < one->queries; ++query) {
        const float* key = qkv + (one->first + query) * stride + (model.heads + head) * width;
        const int64_t to = (head * model.slots + one->written + query) * width;
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
