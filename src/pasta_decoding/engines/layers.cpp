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

// Rotate a head: its first half by -sin of the second one, and the reverse.
void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t at = 0; at < half; ++at) {
    const float x = head[at], y = head[half + at];
    head[at] = x * cos[at] - y * sin[at];
    head[half + at] = y * cos[at] + x * sin[at];
  }
}

// gate = act(gate) * up, by SiLU or GELU: 1 + tanh(z / 2) = 2 / (1 + exp(-z)).
void gated(float* gate, const float* up, int64_t width, bool gelu) {
  for (int64_t at = 0; at < width; ++at) {
    const float x = gate[at], z = gelu ? 1.5957691216057308f * (x + .044715f * x * x * x) : x;
    gate[at] = x / (1.f + exp_of(-z)) * up[at];
  }
}

}  // namespace

// hidden[Q, I] goes through all layers and the last norm.
extern "C" void pasta_pass(
    const Model* model, const Metadata* kinds, float* hidden, int64_t tokens, int threads) {
  const int64_t width = model->width, half = model->head_width / 2, heads = model->heads,
                turned = heads + model->kv_heads, qkv_width = 2 * half * (turned + model->kv_heads);
  std::vector<float> rows(tokens * width), qkv(tokens * qkv_width),
      attended(tokens * heads * 2 * half), gate_up;
  Scratch scratch;
  const auto normed = [&](const float* in, const float* weight, float* out) {
    share(tokens, threads, [=](int64_t token) {
      norm(in + token * width, weight, out + token * width, width, model->epsilon);
    });
  };
  const auto add = [&](const float* weight) {  // rows to hidden
    normed(rows.data(), weight, rows.data());
    for (int64_t at = 0; at < tokens * width; ++at) hidden[at] += rows[at];
  };
  for (const Layer* layer = model->layers; layer != model->layers + model->count; ++layer) {
    const Metadata& metadata = kinds[layer->kind];
    normed(hidden, layer->input_norm, rows.data());
    multiply(*layer->qkv, rows.data(), width, tokens, qkv.data(), scratch, threads);
    share(tokens, threads, [&](int64_t token) {
      for (int64_t head = 0; head < turned; ++head) {
        float* own = &qkv[token * qkv_width + head * 2 * half];
        const float* weight = head < heads ? layer->query_norm : layer->key_norm;
        norm(own, weight, own, 2 * half, model->epsilon);
        rotate(own, metadata.cos + token * half, metadata.sin + token * half, half);
      }
    });
    attend(*model, *layer, metadata, qkv.data(), attended.data(), threads);
    multiply(
        *layer->out, attended.data(), heads * 2 * half, tokens, rows.data(), scratch, threads);
    add(layer->attention_norm);
    normed(hidden, layer->mlp_input_norm, rows.data());
    const int64_t mlp_width = layer->down->inputs;
    gate_up.resize(tokens * 2 * mlp_width);
    multiply(*layer->gate_up, rows.data(), width, tokens, gate_up.data(), scratch, threads);
    share(tokens, threads, [&](int64_t token) {
      float* gate = &gate_up[token * 2 * mlp_width];
      gated(gate, gate + mlp_width, mlp_width, model->gelu);
    });
    multiply(
        *layer->down, gate_up.data(), 2 * mlp_width, tokens, rows.data(), scratch, threads);
    add(layer->mlp_norm);
  }
  normed(hidden, model->norm, hidden);
}
