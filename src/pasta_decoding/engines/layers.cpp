// A pass through a decoder's layers: layers.py is the formula.

#include "decoder.h"

namespace {

// out = row / root of its mean square, times the weight; nothing happens without one.
void norm(const float* row, const float* weight, float* out, int64_t width, float epsilon) {
  if (weight == nullptr) return;
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t at = 0; at < width; ++at) squares += row[at] * row[at];
  const float scale = 1.f / std::sqrt(squares / static_cast<float>(width) + epsilon);
  for (int64_t at = 0; at < width; ++at) out[at] = row[at] * scale * weight[at];
}

// Rotate the pairs of a head, which are its first and its second half.
void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t at = 0; at < half; ++at) {
    const float x = head[at], y = head[half + at];
    head[at] = x * cos[at] - y * sin[at];
    head[half + at] = y * cos[at] + x * sin[at];
  }
}

// gate = act(gate) * up, by SiLU, x / (1 + exp(-x)), or GELU, where 1 + tanh(z / 2) =
// 2 / (1 + exp(-z)).
void activate(float* gate, const float* up, int64_t width, bool is_gelu) {
  for (int64_t at = 0; at < width; ++at) {
    const float x = gate[at];
    const float z = is_gelu ? 1.5957691216057308f * (x + .044715f * x * x * x) : x;
    gate[at] = x / (1.f + exp_of(-z)) * up[at];
  }
}

// A pass of hidden[Q, I], which goes through all layers and the last norm.
class Pass {
 public:
  Pass(const Model& model, float* hidden, int64_t tokens, int threads)
      : model_(model),
        hidden_(hidden),
        tokens_(tokens),
        threads_(threads),
        width_(model.width),
        heads_width_(model.heads * model.head_width),
        qkv_width_(heads_width_ + 2 * model.kv_heads * model.head_width),
        rows_(tokens * width_),
        qkv_(tokens * qkv_width_),
        attended_(tokens * heads_width_) {
    reserve_attention(model, threads, scratch_);
  }

  void run(const Metadata* kinds) {
    for (int64_t number = 0; number < model_.layer_count; ++number) {
      const Layer& layer = model_.layers[number];
      add_attention(layer, kinds[layer.attention_kind]);
      add_mlp(layer);
    }
    norm_rows(hidden_, model_.norm, hidden_);
  }

 private:
  void add_attention(const Layer& layer, const Metadata& metadata) {
    norm_rows(hidden_, layer.input_norm, rows_.data());
    multiply(*layer.qkv, rows_.data(), width_, tokens_, qkv_.data(), scratch_, threads_);
    run_tasks(tokens_, threads_, [&](int64_t token) { norm_and_rotate(layer, metadata, token); });
    attend(model_, layer, metadata, qkv_.data(), attended_.data(), scratch_, threads_);
    multiply(
        *layer.out, attended_.data(), heads_width_, tokens_, rows_.data(), scratch_, threads_);
    add_rows(layer.attention_norm);
  }

  void add_mlp(const Layer& layer) {
    norm_rows(hidden_, layer.mlp_input_norm, rows_.data());
    const int64_t mlp_width = layer.down->inputs, token_width = 2 * mlp_width;
    gate_up_.resize(tokens_ * token_width);
    multiply(*layer.gate_up, rows_.data(), width_, tokens_, gate_up_.data(), scratch_, threads_);
    run_tasks(tokens_, threads_, [&](int64_t token) {
      float* gate = &gate_up_[token * token_width];
      activate(gate, gate + mlp_width, mlp_width, model_.is_gelu);
    });
    multiply(*layer.down, gate_up_.data(), token_width, tokens_, rows_.data(), scratch_, threads_);
    add_rows(layer.mlp_norm);
  }

  // The heads of a token's queries and keys.
  void norm_and_rotate(const Layer& layer, const Metadata& metadata, int64_t token) {
    const int64_t head_width = model_.head_width, half = head_width / 2;
    for (int64_t number = 0; number < model_.heads + model_.kv_heads; ++number) {
      float* head = &qkv_[token * qkv_width_ + number * head_width];
      const float* weight = number < model_.heads ? layer.query_norm : layer.key_norm;
      norm(head, weight, head, head_width, model_.epsilon);
      rotate(head, metadata.cos + token * half, metadata.sin + token * half, half);
    }
  }

  void norm_rows(const float* in, const float* weight, float* out) {
    run_tasks(tokens_, threads_, [=](int64_t token) {
      norm(in + token * width_, weight, out + token * width_, width_, model_.epsilon);
    });
  }

  // Add `rows_`, normalised if there is a norm for them, to the hidden states.
  void add_rows(const float* norm_weight) {
    norm_rows(rows_.data(), norm_weight, rows_.data());
    for (int64_t at = 0; at < tokens_ * width_; ++at) hidden_[at] += rows_[at];
  }

  const Model& model_;
  float* hidden_;
  const int64_t tokens_;
  const int threads_;
  const int64_t width_, heads_width_, qkv_width_;
  std::vector<float> rows_, qkv_, attended_, gate_up_;
  Scratch scratch_;
};

}  // namespace

// One `Metadata` for each kind of attention.
extern "C" int pasta_run_layers(
    const Model* model, const Metadata* kinds, float* hidden, int64_t tokens, int threads) {
  return status_of([&] { Pass(*model, hidden, tokens, threads).run(kinds); });
}

// Sizes of the structs that native.py fills, in the order of its `STRUCTS`.
extern "C" const int64_t pasta_struct_bytes[] = {
    sizeof(FileMatrix), sizeof(Segment), sizeof(Metadata), sizeof(Layer), sizeof(Model),
};
