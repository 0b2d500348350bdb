// What the parts of a pass share. native.py fills the structs that it names, and compares their
// sizes with `pasta_struct_bytes` when the library is loaded.
//
// Shapes: Q tokens of the pass, I width of the model, H heads, G kv heads, D head width, S slots,
// O outputs of linear layers.

#pragma once

#include <exception>
#include <vector>

#include "matrix.h"

struct Linear;

// Inputs rounded to integers of eight bits: int8 * scale, nearly. Those of `scale_blocks` blocks, a
// group, share a scale: what a record of the weights has, as llama.cpp groups them.
struct RoundedInputs {
  int64_t scale_blocks;
  std::vector<int8_t> int8s{};
  std::vector<float> scales{};      // a group
  std::vector<float> block_sums{};  // of the rounded inputs of each block
  // For each half of a block (quads 0-3, or 4-7) two sums of its `int8s`, each of 16 bits: in the
  // low half of the number that of each quad's first two, in the high half that of the others.
  std::vector<int32_t> pair_sums{};

  void resize(int64_t blocks);
  // Round the inputs of whole blocks.
  void fill(const std::vector<float>& inputs);
};

// A row of inputs in the forms that weights are multiplied by; zeros fill its last block.
struct InputRow {
  std::vector<float> floats;
  std::vector<uint16_t> bfloat16s;
  RoundedInputs by_block{1};   // for formats whose records have one block
  RoundedInputs by_record{8};  // for K formats

  int64_t blocks() const { return static_cast<int64_t>(floats.size()) / kBlock; }
  // Take memory for the inputs of these layers, so that `fill` does not throw.
  void reserve(const Linear& linear);
  void fill(const float* from, const Linear& linear);
};

// Linear layers of the same inputs as one, their outputs beside each other.
struct Linear {
  // One layer: weights, an adapter's low-rank addition, and a bias, which may be empty.
  struct Part {
    Matrix weights;
    std::vector<Vec> up;  // for each panel from `first_up_panel` on: a vector for each rank
    std::vector<float> bias;
    int64_t rank = 0;          // of the adapter; 0: none
    int64_t first_rank = 0;    // where the part's ranks begin in the outputs of `down`
    int64_t first_up_panel = 0;
    int64_t first_output = 0;  // where the part's outputs begin
  };
  const Linear* down;  // gives what all `up` take; null without an adapter
  std::vector<Part> parts{};
  int64_t inputs = 0, outputs = 0;
  int64_t ranks = 0;  // those of all parts
  bool rounds_by_block = false, rounds_by_record = false;  // the roundings that its parts take
};

// What one thread attends with: floats of keys, values, queries and sums.
struct AttentionMemory {
  std::vector<float> keys, values, queries, sums, maxima, weights;
};

// Memory that a pass uses again and again.
struct Scratch {
  std::vector<InputRow> rows;
  std::vector<float> low_rank;             // outputs of `down`, [Q, ranks]
  std::vector<AttentionMemory> attention;  // one a thread
};

// out[Q, O] = the layers of input[Q, I], whose rows are `stride` apart. Throws std::bad_alloc.
void multiply(
    const Linear& linear, const float* input, int64_t stride, int64_t tokens, float* out,
    Scratch& scratch, int threads);

// Queries of a branch that follow each other: layers.py has the same fields.
struct Segment {
  int64_t first_query;  // in the pass
  int64_t queries;
  int64_t slots;       // that its last query sees; the last of them are those that they write
  int64_t list_start;  // where these slots begin in the list of all segments
  int64_t mask_start;  // where its mask [queries, slots] begins
};

// What the layers of one kind of attention must know of a pass.
struct Metadata {
  const float *cos, *sin;  // [Q, D / 2]
  const Segment* segments;
  const int32_t* slots;
  const uint8_t* masks;
  int64_t segment_count;
};

// Norms are null where a family has none.
struct Layer {
  const Linear *qkv, *out, *gate_up, *down;
  const float *input_norm, *query_norm, *key_norm, *attention_norm, *mlp_input_norm, *mlp_norm;
  void *keys, *values;     // [G, S, D]
  int64_t attention_kind;  // index of its `Metadata`
};

struct Model {
  const Layer* layers;
  const float* norm;
  int64_t layer_count, width, heads, kv_heads, head_width, slots;
  float epsilon, scaling;
  bool is_gelu;      // the activation, else SiLU
  bool is_bfloat16;  // the keys and values of the cache, else float32
};

// Take memory for `attend` by this number of threads. Throws std::bad_alloc.
void reserve_attention(const Model& model, int threads, Scratch& scratch);

// Write keys and values of qkv[Q, H + 2 G, D] into their slots; attend: out[Q, H, D].
void attend(
    const Model& model, const Layer& layer, const Metadata& metadata, const float* qkv, float* out,
    Scratch& scratch, int threads);

// What the library's functions return: 0, or 1 if there was no memory for the work. An exception
// must not leave them: their caller is C.
enum Status : int { kDone = 0, kNoMemory = 1 };

template <typename Work>
Status status_of(const Work& work) {
  try {
    work();
  } catch (const std::exception&) {  // std::bad_alloc, or std::length_error of a vector
    return kNoMemory;
  }
  return kDone;
}
