// What the parts of a pass share. native.py fills the structs that it names.
//
// Shapes: Q tokens of the pass, I width of the model, H heads, G kv heads, D head width, S slots.

#pragma once

#include <vector>

#include "packed.h"

// A row of inputs, zeros behind them up to whole blocks, as weights of each form are multiplied.
struct Inputs {
  std::vector<float> floats;
  std::vector<uint16_t> bfloats;
  std::vector<int8_t> bytes;   // times `scales`, which eight blocks share
  std::vector<int32_t> pairs;  // sums of 16 bytes: of the first pairs of quads, and of the second
  std::vector<float> sums;     // of a block's inputs
  std::vector<float> scales;

  int64_t blocks() const { return static_cast<int64_t>(floats.size()) / kBlock; }
  void take(const float* from, int64_t width);
};

// Weights of linear layers of the same inputs, their outputs beside each other, and a bias or null.
struct Linear {
  struct Part {
    Matrix main;
    std::vector<Vec> up;  // of an adapter, for each panel from `first_up` on: a vector a rank
    std::vector<float> bias;
    int64_t rank, first_rank, first_up;  // `first_rank`: its first place in what `down` gives
    int64_t first;                       // its first place in the outputs
  };
  const Linear* down;  // what the `up` of all parts take; or null
  std::vector<Part> parts{};
  int64_t inputs = 0, outputs = 0, ranks = 0;
};

// Memory that a pass uses again and again.
struct Scratch {
  std::vector<Inputs> inputs;
  std::vector<float> low;
};

// out[Q, O] = the layers of input[Q, I], whose rows are `stride` apart.
void multiply(
    const Linear& linear, const float* input, int64_t stride, int64_t tokens, float* out,
    Scratch& scratch, int threads);

// Queries of a branch that follow each other, as fast.py writes them.
struct Segment {
  int64_t first;    // its first query in the pass
  int64_t queries;  // how many
  int64_t count;    // the slots that the last of them sees: at the end those that they write
  int64_t listed;   // where these begin in the list of slots
  int64_t mask;     // where its mask [queries, slots] begins
};

// What the layers of one kind of attention must know.
struct Metadata {
  const float *cos, *sin;  // [Q, D / 2]
  const Segment* segments;
  const int32_t* slots;
  const uint8_t* masks;
  int64_t count;  // segments
};

// Norms are null where a family has none.
struct Layer {
  const Linear *qkv, *out, *gate_up, *down;
  const float *input_norm, *query_norm, *key_norm, *attention_norm, *mlp_input_norm, *mlp_norm;
  void *keys, *values;  // [G, S, D]
  int64_t kind;         // which `Metadata`
};

struct Model {
  const Layer* layers;
  const float* norm;
  int64_t count, width, heads, kv_heads, head_width, slots;
  float epsilon, scaling;
  bool gelu, bfloat16;  // the keys and values of the cache, else float32
};

// Write keys and values of qkv[Q, H + 2 G, D] into their slots; attend: out[Q, H, D].
void attend(
    const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv, float* out,
    int threads);
