// Linear layers as one operator: weights of four, eight, sixteen or 32 bits, an adapter of low rank
// beside them, and inputs and outputs in float32.
//
// An output is the sum over the inputs in their order, whatever else is computed with it: a row's
// result does not depend, to the bit, on the other rows. Weights of whole numbers are turned into
// floats, scale * number + minimum, which gives the values of the file.
//
// Shapes: Q tokens, I inputs, B = I / 32 blocks of inputs, O outputs, P = O / 16 panels of outputs,
// R rank of what is added.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kPanel = 16;      // outputs whose weights lie beside each other
constexpr int64_t kBlock = 32;      // inputs whose weights lie beside each other
constexpr int64_t kChunk = 128;     // inputs that are unpacked together
constexpr int64_t kGroup = 4;       // panels of one task
constexpr int64_t kLanes = kPanel / Vec::size();
constexpr int64_t kAlone = 100000;  // products that are not worth a second thread

// A matrix [O, I], packed by engines/packed.py.
struct Matrix {
  Matrix(const Tensor& weights_, const Tensor* scales_, int64_t outputs_)
      : weights(static_cast<const uint8_t*>(weights_.const_data_ptr())),
        scales(scales_ ? scales_->const_data_ptr<float>() : nullptr),
        kind(weights_.scalar_type()),
        outputs(outputs_),
        inputs(weights_.size(1) * kBlock),
        panel_bytes(weights_.stride(0) * weights_.element_size()),
        panel_scales(scales_ ? scales_->stride(0) : 0),
        groups(scales_ ? scales_->size(1) / weights_.size(1) : 0) {}

  const uint8_t* weights;  // [P, B, ...]
  const float* scales;     // [P, B * groups, 1 or 2, 16], or null
  at::ScalarType kind;     // Float, BFloat16, Char: whole numbers of eight bits, Byte: of four
  int64_t outputs, inputs, panel_bytes, panel_scales;
  int64_t groups;  // scales a block: 1, or 2 where 16 inputs share one

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
};

// A block of one panel as [32 inputs, 16 outputs] of floats. Words hold two inputs of an output, those
// of four bits eight: the even inputs in the low half.
void unpack_bfloat16(const uint32_t* __restrict words, float* __restrict out) {
  auto* bits = reinterpret_cast<uint32_t*>(out);
  for (int64_t pair = 0; pair < 16; ++pair)
    for (int64_t o = 0; o < kPanel; ++o) {
      bits[2 * pair * kPanel + o] = words[pair * kPanel + o] << 16;
      bits[(2 * pair + 1) * kPanel + o] = words[pair * kPanel + o] & 0xffff0000u;
    }
}

void unpack_eight(
    const int16_t* __restrict words, const float* __restrict scales, int64_t groups,
    float* __restrict out) {
  for (int64_t pair = 0; pair < 16; ++pair) {
    const float* scale = scales + (groups == 2 && pair >= 8 ? kPanel : 0);
    for (int64_t o = 0; o < kPanel; ++o) {
      const int32_t word = words[pair * kPanel + o];
      out[2 * pair * kPanel + o] = static_cast<float>((word << 24) >> 24) * scale[o];
      out[(2 * pair + 1) * kPanel + o] = static_cast<float>(word >> 8) * scale[o];
    }
  }
}

void unpack_four(
    const uint32_t* __restrict words, const float* __restrict scales, float* __restrict out) {
  for (int64_t quarter = 0; quarter < 4; ++quarter)
    for (int64_t place = 0; place < 8; ++place) {
      const int shift = static_cast<int>(4 * (place / 2) + 16 * (place % 2));
      float* row = out + (8 * quarter + place) * kPanel;
      for (int64_t o = 0; o < kPanel; ++o) {
        const auto level = static_cast<int32_t>((words[quarter * kPanel + o] >> shift) & 15);
        row[o] = static_cast<float>(level) * scales[o] + scales[kPanel + o];
      }
    }
}

// `count` inputs of one panel, from `input` on, as floats: in `room`, or where they lie.
const float* unpack(
    const Matrix& matrix, int64_t panel, int64_t input, int64_t count, float* room) {
  const uint8_t* weights = matrix.weights + panel * matrix.panel_bytes;
  if (matrix.kind == at::kFloat) return reinterpret_cast<const float*>(weights) + input * kPanel;
  const int64_t block_bytes = matrix.panel_bytes * kBlock / matrix.inputs;
  const int64_t block_scales = matrix.panel_scales * kBlock / matrix.inputs;
  for (int64_t block = input / kBlock; block < (input + count) / kBlock; ++block) {
    const uint8_t* own = weights + block * block_bytes;
    const float* scales = matrix.scales + panel * matrix.panel_scales + block * block_scales;
    float* out = room + (block * kBlock - input) * kPanel;
    if (matrix.kind == at::kBFloat16)
      unpack_bfloat16(reinterpret_cast<const uint32_t*>(own), out);
    else if (matrix.kind == at::kChar)
      unpack_eight(reinterpret_cast<const int16_t*>(own), scales, matrix.groups, out);
    else
      unpack_four(reinterpret_cast<const uint32_t*>(own), scales, out);
  }
  return room;
}

// Rows of floats, `stride` apart.
struct Rows {
  const float* first;
  int64_t stride;

  const float* of(int64_t row) const { return first + row * stride; }
};

// sums[row, panel, 16] += `count` inputs times their weights, for some panels and rows.
template <int rows, int panels>
void tile(const float* const* weights, int64_t count, const Rows& in, float* sums) {
  const auto place = [sums](int row, int panel, int lane) {
    return sums + (row * kGroup + panel) * kPanel + lane * Vec::size();
  };
  Vec total[rows][panels][kLanes];
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < panels; ++panel)
      for (int lane = 0; lane < kLanes; ++lane)
        total[row][panel][lane] = Vec::loadu(place(row, panel, lane));
  for (int64_t input = 0; input < count; ++input) {
    Vec weight[panels][kLanes];
    for (int panel = 0; panel < panels; ++panel)
      for (int lane = 0; lane < kLanes; ++lane)
        weight[panel][lane] = Vec::loadu(weights[panel] + input * kPanel + lane * Vec::size());
    for (int row = 0; row < rows; ++row) {
      const Vec one(in.of(row)[input]);
      for (int panel = 0; panel < panels; ++panel)
        for (int lane = 0; lane < kLanes; ++lane)
          total[row][panel][lane] =
              at::vec::fmadd(one, weight[panel][lane], total[row][panel][lane]);
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < panels; ++panel)
      for (int lane = 0; lane < kLanes; ++lane)
        total[row][panel][lane].store(place(row, panel, lane));
}

// The same for all panels of a group, `wide` at a time: a sum waits for its last product, so few rows
// need several panels, and many rows keep the registers busy with one.
template <int rows, int wide>
void tiles(
    const float* const* weights, int64_t panels, int64_t count, const Rows& in, float* sums) {
  int64_t panel = 0;
  for (; panel + wide <= panels; panel += wide)
    tile<rows, wide>(weights + panel, count, in, sums + panel * kPanel);
  for (; panel < panels; ++panel)
    tile<rows, 1>(weights + panel, count, in, sums + panel * kPanel);
}

// The same for all rows, in tiles of at most six.
void multiply(
    const float* const* weights, int64_t panels, int64_t count, const Rows& in, int64_t tokens,
    float* sums) {
  for (int64_t token = 0; token < tokens;) {
    const Rows own{in.of(token), in.stride};
    float* to = sums + token * kGroup * kPanel;
    const int64_t left = tokens - token;
    const int64_t rows = left == 7 || left == 8 ? 4 : std::min<int64_t>(left, 6);
    switch (rows) {
      case 1: tiles<1, 4>(weights, panels, count, own, to); break;
      case 2: tiles<2, 2>(weights, panels, count, own, to); break;
      case 3: tiles<3, 2>(weights, panels, count, own, to); break;
      case 4: tiles<4, 1>(weights, panels, count, own, to); break;
      case 5: tiles<5, 1>(weights, panels, count, own, to); break;
      default: tiles<6, 1>(weights, panels, count, own, to);
    }
    token += rows;
  }
}

// sums[Q, panels, 16] += a group of a matrix's panels times the inputs.
void add(
    const Matrix& matrix, int64_t first, int64_t panels, const Rows& in, int64_t tokens,
    float* room, float* sums) {
  for (int64_t input = 0; input < matrix.inputs; input += kChunk) {
    const int64_t count = std::min(kChunk, matrix.inputs - input);
    const float* weights[kGroup];
    for (int64_t panel = 0; panel < panels; ++panel)
      weights[panel] =
          unpack(matrix, first + panel, input, count, room + panel * kChunk * kPanel);
    multiply(weights, panels, count, {in.first + input, in.stride}, tokens, sums);
  }
}

// out[Q, O] = inputs times the matrix, and times what is added where there is some.
void run(
    const Matrix& matrix, const Rows& in, const Matrix* up, const Rows& low, int64_t tokens,
    float* out) {
  const int64_t groups = (matrix.panels() + kGroup - 1) / kGroup;
  const bool alone = tokens * matrix.outputs * matrix.inputs < kAlone;
  at::parallel_for(0, groups, alone ? groups : 1, [&](int64_t begin, int64_t end) {
    std::vector<float> room(kGroup * kChunk * kPanel), sums(tokens * kGroup * kPanel);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kGroup, panels = std::min(kGroup, matrix.panels() - first);
      std::fill(sums.begin(), sums.end(), 0.f);
      add(matrix, first, panels, in, tokens, room.data(), sums.data());
      if (up) add(*up, first, panels, low, tokens, room.data(), sums.data());
      const int64_t width = std::min(panels * kPanel, matrix.outputs - first * kPanel);
      for (int64_t token = 0; token < tokens; ++token)
        std::copy_n(
            &sums[token * kGroup * kPanel], width, out + token * matrix.outputs + first * kPanel);
    }
  });
}

// Return float32 [Q, O] of float32 inputs [Q, I]: weights @ inputs + up @ (down @ inputs).
Tensor linear(
    const Tensor& input_QI, const Tensor& weights, const std::optional<Tensor>& scales,
    int64_t outputs, const std::optional<Tensor>& down, const std::optional<Tensor>& up) {
  const Matrix matrix(weights, scales ? &*scales : nullptr, outputs);
  const int64_t tokens = input_QI.size(0), missing = matrix.inputs - input_QI.size(1);
  TORCH_CHECK(missing >= 0 && missing < kBlock, "inputs of another width than the weights");
  Tensor rows = input_QI.contiguous();
  if (missing) rows = at::constant_pad_nd(rows, {0, missing});
  const Rows in{rows.const_data_ptr<float>(), matrix.inputs};
  Tensor out_QO = at::empty({tokens, outputs}, input_QI.options());
  float* out = out_QO.mutable_data_ptr<float>();
  if (!down) {
    run(matrix, in, nullptr, in, tokens, out);
    return out_QO;
  }
  const Matrix added(*up, nullptr, outputs);
  const Matrix lower(*down, nullptr, added.inputs);
  std::vector<float> low(tokens * added.inputs);
  run(lower, in, nullptr, in, tokens, low.data());
  run(matrix, in, &added, {low.data(), added.inputs}, tokens, out);
  return out_QO;
}

}  // namespace

TORCH_LIBRARY_IMPL(pasta_fast, CPU, library) { library.impl("linear", linear); }
