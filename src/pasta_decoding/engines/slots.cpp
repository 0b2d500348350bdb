// Attention over the slots of several requests, as one call a layer.
//
// A query adds the slots that its branch lists in blocks, in their order. A slot that it does not
// see adds exactly nothing, so its result does not depend, to the bit, on what else is computed, or
// when.

#include <omp.h>

#include <limits>

#include "decoder.h"

namespace {

constexpr int64_t kTaskRows = 32;         // of a task, at most; a row is a query of a head
constexpr int64_t kFewQueries = 16;       // a segment with no more has smaller tasks
constexpr int64_t kSmallTaskRows = 8;
constexpr int64_t kBlockSlots = 64;       // whose keys are converted and scored together
constexpr int64_t kSums = 4;              // that need not wait for each other
constexpr int64_t kSerialWork = 4000;     // rows times slots not worth a second thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Some queries of a segment, and the heads that share one kv head.
struct Task {
  const Segment* segment;
  int64_t kv_head, first_query, queries;
};

// Numbers of a head with the zeros behind them, up to vectors for all sums.
int64_t padded_width(const Model& model) {
  constexpr int64_t step = kSums * kWidth;
  return (model.head_width + step - 1) / step * step;
}

int64_t heads_of_kv_head(const Model& model) { return model.heads / model.kv_heads; }

// One thread's attention, with the softmax online: arXiv 2205.14135, algorithm 1.
template <typename T>
class Attention {
 public:
  Attention(
      const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv,
      AttentionMemory& memory)
      : model_(model),
        layer_(layer),
        metadata_(metadata),
        qkv_(qkv),
        memory_(memory),
        width_(model.head_width),
        padded_(padded_width(model)),
        shared_(heads_of_kv_head(model)) {}

  void run(const Task& task, float* out) {
    const Segment& segment = *task.segment;
    const int64_t slots = segment.slots, rows = task.queries * shared_;
    const int32_t* list = metadata_.slots + segment.list_start;
    const uint8_t* masks = metadata_.masks + segment.mask_start + task.first_query * slots;
    take_queries(task);
    for (int64_t slot = 0; slot < slots; slot += kBlockSlots) {
      const int64_t count = std::min(kBlockSlots, slots - slot);
      bool is_converted = false;
      for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* mask = masks + row / shared_ * slots + slot;
        const bool sees_any = std::memchr(mask, 1, count) != nullptr;
        if (!sees_any) continue;
        if (!is_converted) convert_slots(task.kv_head, list + slot, count);
        is_converted = true;
        add_block(row, count, mask);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = out + head_start(task, row, model_.heads);
      const float* sum = &memory_.sums[row * padded_];
      for (int64_t at = 0; at < width_; ++at) to[at] = sum[at] / memory_.weights[row];
    }
  }

 private:
  // Where a row's head begins among tokens of `heads` heads each.
  int64_t head_start(const Task& task, int64_t row, int64_t heads) const {
    const int64_t token = task.segment->first_query + task.first_query + row / shared_;
    return (token * heads + task.kv_head * shared_ + row % shared_) * width_;
  }

  // Begin with the task's queries, scaled, and with sums of nothing.
  void take_queries(const Task& task) {
    const int64_t rows = task.queries * shared_;
    memory_.queries.assign(rows * padded_, 0.f);
    memory_.sums.assign(rows * padded_, 0.f);
    memory_.maxima.assign(rows, kHidden);
    memory_.weights.assign(rows, 0.f);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = qkv_ + head_start(task, row, model_.heads + 2 * model_.kv_heads);
      float* query = &memory_.queries[row * padded_];
      for (int64_t at = 0; at < width_; ++at) query[at] = from[at] * model_.scaling;
    }
  }

  void convert_slots(int64_t kv_head, const int32_t* slots, int64_t count) {
    const T* keys = static_cast<const T*>(layer_.keys);
    const T* values = static_cast<const T*>(layer_.values);
    for (int64_t slot = 0; slot < count; ++slot) {
      const int64_t from = (kv_head * model_.slots + slots[slot]) * width_;
      convert(keys + from, &memory_.keys[slot * padded_], width_);
      convert(values + from, &memory_.values[slot * padded_], width_);
    }
  }

  // Add the converted slots, of which a row sees those in its mask.
  void add_block(int64_t row, int64_t count, const uint8_t* mask) {
    float scores[kBlockSlots];
    score(&memory_.queries[row * padded_], scores);
    for (int64_t slot = 0; slot < kBlockSlots; ++slot)
      if (slot >= count || !mask[slot]) scores[slot] = kHidden;
    float maximum = memory_.maxima[row], weight = 0;
#pragma omp simd reduction(max : maximum)
    for (int64_t slot = 0; slot < kBlockSlots; ++slot) maximum = std::max(maximum, scores[slot]);
#pragma omp simd reduction(+ : weight)
    for (int64_t slot = 0; slot < kBlockSlots; ++slot) {
      scores[slot] = exp_of(scores[slot] - maximum);
      weight += scores[slot];
    }
    const float shrink = std::exp(memory_.maxima[row] - maximum);
    memory_.weights[row] = memory_.weights[row] * shrink + weight;
    memory_.maxima[row] = maximum;
    add_values(scores, count, shrink, &memory_.sums[row * padded_]);
  }

  // scores[slot] = query * key, of all slots of a block: what lies behind the last is left over.
  void score(const float* query, float* scores) const {
    const float* keys = memory_.keys.data();
    for (int64_t slot = 0; slot < kBlockSlots; slot += kSums) {
      Vec sums[kSums] = {};
      for (int64_t at = 0; at < padded_; at += kWidth)
#pragma GCC unroll 4
        for (int64_t part = 0; part < kSums; ++part)
          sums[part] += load(query + at) * load(keys + (slot + part) * padded_ + at);
#pragma GCC unroll 4
      for (int64_t part = 0; part < kSums; ++part) scores[slot + part] = total(sums[part]);
    }
  }

  // sum = sum * shrink + weights of the slots times their values.
  void add_values(const float* weights, int64_t count, float shrink, float* sum) const {
    const float* values = memory_.values.data();
    for (int64_t first = 0; first < padded_; first += kSums * kWidth) {
      Vec sums[kSums];
#pragma GCC unroll 4
      for (int64_t part = 0; part < kSums; ++part)
        sums[part] = load(sum + first + part * kWidth) * shrink;
      for (int64_t slot = 0; slot < count; ++slot)
#pragma GCC unroll 4
        for (int64_t part = 0; part < kSums; ++part)
          sums[part] += weights[slot] * load(values + slot * padded_ + first + part * kWidth);
#pragma GCC unroll 4
      for (int64_t part = 0; part < kSums; ++part) store(sum + first + part * kWidth, sums[part]);
    }
  }

  const Model& model_;
  const Layer& layer_;
  const Metadata& metadata_;
  const float* qkv_;
  AttentionMemory& memory_;
  const int64_t width_, padded_, shared_;
};

// Write the keys and values of a segment's queries into their slots.
template <typename T>
void write_slots(
    const Model& model, const Layer& layer, const Metadata& metadata, const Segment& segment,
    const float* qkv) {
  const int64_t width = model.head_width, token_width = (model.heads + 2 * model.kv_heads) * width;
  const int32_t* written = metadata.slots + segment.list_start + segment.slots - segment.queries;
  for (int64_t head = 0; head < model.kv_heads; ++head)
    for (int64_t query = 0; query < segment.queries; ++query) {
      const float* token = qkv + (segment.first_query + query) * token_width;
      const float* key = token + (model.heads + head) * width;
      const float* value = key + model.kv_heads * width;
      const int64_t to = (head * model.slots + written[query]) * width;
      convert(key, static_cast<T*>(layer.keys) + to, width);
      convert(value, static_cast<T*>(layer.values) + to, width);
    }
}

std::vector<Task> tasks_of(const Model& model, const Metadata& metadata) {
  std::vector<Task> tasks;
  for (int64_t number = 0; number < metadata.segment_count; ++number) {
    const Segment& segment = metadata.segments[number];
    const int64_t rows = segment.queries > kFewQueries ? kTaskRows : kSmallTaskRows;
    const int64_t step = std::max<int64_t>(rows / heads_of_kv_head(model), 1);
    for (int64_t head = 0; head < model.kv_heads; ++head)
      for (int64_t query = 0; query < segment.queries; query += step)
        tasks.push_back({&segment, head, query, std::min(step, segment.queries - query)});
  }
  return tasks;
}

template <typename T>
void run(
    const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv, float* out,
    Scratch& scratch, int threads) {
  int64_t work = 0;
  for (int64_t number = 0; number < metadata.segment_count; ++number) {
    const Segment& segment = metadata.segments[number];
    write_slots<T>(model, layer, metadata, segment, qkv);
    work += segment.queries * model.heads * segment.slots;
  }
  const std::vector<Task> tasks = tasks_of(model, metadata);
#pragma omp parallel num_threads(threads) if (threads > 1 && work >= kSerialWork)
  {
    AttentionMemory& memory = scratch.attention[omp_get_thread_num()];
    Attention<T> attention(model, layer, metadata, qkv, memory);
#pragma omp for schedule(dynamic)
    for (const Task& task : tasks) attention.run(task, out);
  }
}

}  // namespace

void reserve_attention(const Model& model, int threads, Scratch& scratch) {
  const int64_t padded = padded_width(model);
  const int64_t rows = std::max(kTaskRows, heads_of_kv_head(model));
  scratch.attention.resize(std::max(threads, 1));
  for (AttentionMemory& memory : scratch.attention) {
    memory.keys.assign(kBlockSlots * padded, 0.f);
    memory.values.assign(kBlockSlots * padded, 0.f);
    memory.queries.reserve(rows * padded);
    memory.sums.reserve(rows * padded);
    memory.maxima.reserve(rows);
    memory.weights.reserve(rows);
  }
}

void attend(
    const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv, float* out,
    Scratch& scratch, int threads) {
  const auto run_with = model.is_bfloat16 ? run<uint16_t> : run<float>;
  run_with(model, layer, metadata, qkv, out, scratch, threads);
}
