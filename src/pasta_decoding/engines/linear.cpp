// Linear layers: weights of four, eight, sixteen or 32 bits, an adapter of low rank beside them, and
// inputs and outputs in float32.
//
// An output is the sum over the inputs in their order, whatever else is computed with it: a row's
// result does not depend, to the bit, on the other rows. Weights of four and eight bits are whole
// numbers; 16 or 32 inputs share a scale, by which the sum of their products is multiplied, and
// those of four bits a minimum. For them inputs are rounded to 15 bits under a power of two that 32
// inputs share; for weights of 16 bits, with AVX-512 BF16, to bfloat16; for those of 32 bits not.
//
// Shapes: Q tokens, I inputs, B = I / 32 blocks of inputs, O outputs, P = O / 16 panels of outputs,
// R rank of what is added.

#include <type_traits>
#include <vector>

#include "packed.h"

namespace {

constexpr int64_t kChunk = 4;       // blocks that all rows take before the next ones
constexpr int64_t kGroup = 4;       // panels of one task
constexpr int64_t kAlone = 100000;  // products that are not worth a second thread

// A layer; what is added to it, if `down` has weights; its bias, or null; and its first place in the
// outputs.
struct Layer {
  Matrix main, down, up;
  const float* bias;
  int64_t first;
};

// Rows of inputs, zeros behind them up to whole blocks, as those who multiply take them.
class Inputs {
 public:
  Inputs(const float* from, int64_t tokens, int64_t width)
      : blocks((width + kBlock - 1) / kBlock),
        floats_(tokens * blocks * kBlock),
        bfloats_(floats_.size()),
        shorts_(floats_.size()),
        scales_(tokens * blocks),
        sums_(tokens * blocks) {
    for (int64_t token = 0; token < tokens; ++token)
      std::copy_n(from + token * width, width, &floats_[token * blocks * kBlock]);
    convert(floats_.data(), bfloats_.data(), floats_.size());
    for (int64_t block = 0; block < tokens * blocks; ++block) round(block);
  }

  // The inputs of a row from a block on.
  const void* of(int64_t token, int64_t block, const Floats&) const {
    return &floats_[(token * blocks + block) * kBlock];
  }
  const void* of(int64_t token, int64_t block, const Bfloats&) const {
#if defined(__AVX512BF16__)
    return &bfloats_[(token * blocks + block) * kBlock];
#else
    return of(token, block, Floats{});
#endif
  }
  const void* of(int64_t token, int64_t block, const Shorts&) const {
    return &shorts_[(token * blocks + block) * kBlock];
  }
  // What whole numbers of a block are multiplied by, and their sum times that.
  float scale(int64_t token, int64_t block) const { return scales_[token * blocks + block]; }
  float sum(int64_t token, int64_t block) const { return sums_[token * blocks + block]; }

  const int64_t blocks;

 private:
  void round(int64_t block) {
    const float* own = &floats_[block * kBlock];
    float most = 0, rounded[kBlock];
    for (int64_t at = 0; at < kBlock; ++at) most = std::max(most, std::abs(own[at]));
    const float power = from_bits(__builtin_bit_cast(uint32_t, most) & 0x7f800000u);
    const float scale = power > 1e-30f ? power / 16384 : 1.f, share = 1 / scale;
    constexpr float magic = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
    for (int64_t at = 0; at < kBlock; ++at) {
      const float whole = std::min(own[at] * share + magic - magic, 32767.f);
      shorts_[block * kBlock + at] = static_cast<int16_t>(whole);
      rounded[at] = whole * scale;
    }
    Vec sum{};
    for (int64_t at = 0; at < kBlock; at += kWidth) sum += load(rounded + at);
    scales_[block] = scale;
    sums_[block] = total(sum);
  }

  std::vector<float> floats_;
  std::vector<uint16_t> bfloats_;
  std::vector<int16_t> shorts_;
  std::vector<float> scales_, sums_;
};

// Adds some panels of a matrix times the inputs to sums[Q, panels, 16].
template <typename Kind>
class Task {
 public:
  Task(const Matrix& matrix, int64_t first, int64_t panels, const Inputs& in, float* sums)
      : matrix_(matrix), first_(first), panels_(panels), in_(in), sums_(sums) {}

  void add(int64_t tokens) {
    for (block_ = 0; block_ < matrix_.blocks; block_ += kChunk) {
      blocks_ = std::min(kChunk, matrix_.blocks - block_);
      for (int64_t panel = 0; whole && panel < panels_; ++panel) read_scales(panel);
      for (int64_t token = 0; token < tokens;) token += add(token, tokens - token);
    }
  }

 private:
  static constexpr bool whole = std::is_base_of_v<Shorts, Kind>;
  static constexpr bool minimums = std::is_same_v<Fours, Kind>;
  static constexpr int kMany = kLanes == 1 ? 2 : 1;  // panels of a tile of many rows

  // A tile of at most six rows. A sum waits for its last product, so few rows need several panels at
  // a time, and many rows keep the registers busy with one.
  int64_t add(int64_t token, int64_t left) {
    switch (left == 7 || left == 8 ? 4 : left) {
      case 1: tiles<1, 4>(token); return 1;
      case 2: tiles<2, 2>(token); return 2;
      case 3: tiles<3, 2>(token); return 3;
      case 4: tiles<4, kMany>(token); return 4;
      case 5: tiles<5, kMany>(token); return 5;
      default: tiles<6, kMany>(token); return 6;
    }
  }

  template <int rows, int wide>
  void tiles(int64_t token) {
    int64_t panel = 0;
    for (; panel + wide <= panels_; panel += wide) tile<rows, wide>(token, panel);
    for (; panel < panels_; ++panel) tile<rows, 1>(token, panel);
  }

  template <int rows, int wide>
  void tile(int64_t token, int64_t panel) {
    const int64_t groups = whole ? blocks_ * matrix_.groups : 1;
    const int64_t steps = blocks_ * Kind::steps / groups, bytes = matrix_.block_bytes();
    const typename Kind::Input* inputs[rows];
    for (int row = 0; row < rows; ++row)
      inputs[row] = static_cast<const typename Kind::Input*>(in_.of(token + row, block_, Kind{}));
    const uint8_t* weights[wide];
    for (int one = 0; one < wide; ++one)
      weights[one] = matrix_.weights + ((first_ + panel + one) * matrix_.blocks + block_) * bytes;
    for (int64_t group = 0; group < groups; ++group) {
      typename Kind::Sum products[rows][wide][kLanes] = {};
      for (int64_t step = group * steps; step < (group + 1) * steps; ++step)
        for (int one = 0; one < wide; ++one)
          for (int lane = 0; lane < kLanes; ++lane) {
            const auto own = Kind::weights(weights[one], step, lane);
            for (int row = 0; row < rows; ++row)
              Kind::add(products[row][one][lane], own, inputs[row][step]);
          }
      const int64_t block = block_ + group * blocks_ / groups;
      for (int row = 0; row < rows; ++row) {
        const float share = in_.scale(token + row, block), sum = in_.sum(token + row, block);
        for (int one = 0; one < wide; ++one) {
          float* sums = sums_ + ((token + row) * kGroup + panel + one) * kPanel;
          const float* scales = scales_[panel + one][group];
          for (int lane = 0; lane < kLanes; ++lane) {
            Vec all = load(sums + lane * kWidth);
            const auto& own = products[row][one][lane];
            if constexpr (whole)
              all += __builtin_convertvector(own, Vec) * share * load(scales + lane * kWidth);
            else
              all += own;
            if constexpr (minimums) all += load(scales + kPanel + lane * kWidth) * sum;
            store(sums + lane * kWidth, all);
          }
        }
      }
    }
  }

  // The scales of a panel's groups of inputs, and their minimums.
  void read_scales(int64_t panel) {
    const int64_t size = matrix_.numbers() * kPanel, own = first_ + panel;
    const int64_t supers = matrix_.blocks / matrix_.scale_blocks;
    const int8_t* factors = matrix_.factors + (own * matrix_.blocks + block_) * matrix_.groups * size;
    for (int64_t group = 0; group < blocks_ * matrix_.groups; ++group, factors += size) {
      const int64_t place = (block_ + group / matrix_.groups) / matrix_.scale_blocks;
      const uint16_t* scales = matrix_.scales + (own * supers + place) * size;
      for (int64_t at = 0; at < size; ++at)
        scales_[panel][group][at] = from_float16(scales[at]) * (matrix_.factors ? factors[at] : 1);
    }
  }

  const Matrix& matrix_;
  const int64_t first_, panels_;
  const Inputs& in_;
  float* sums_;
  int64_t block_ = 0, blocks_ = 0;
  float scales_[kGroup][2 * kChunk][2 * kPanel];
};

void add(
    const Matrix& matrix, int64_t first, int64_t panels, const Inputs& in, int64_t tokens,
    float* sums) {
  switch (matrix.bits) {
    case 4: return Task<Fours>(matrix, first, panels, in, sums).add(tokens);
    case 8: return Task<Eights>(matrix, first, panels, in, sums).add(tokens);
    case 16: return Task<Bfloats>(matrix, first, panels, in, sums).add(tokens);
    default: return Task<Floats>(matrix, first, panels, in, sums).add(tokens);
  }
}

// A group of panels of a layer. low: what `down` makes of the inputs, if there is such a thing.
void run(
    const Layer& layer, int64_t group, const Inputs& in, const Inputs* low, int64_t tokens,
    float* sums, float* out, int64_t stride) {
  const int64_t first = group * kGroup;
  const int64_t panels = std::min(kGroup, layer.main.panels() - first);
  const int64_t width = std::min(panels * kPanel, layer.main.outputs - first * kPanel);
  std::fill_n(sums, tokens * kGroup * kPanel, 0.f);
  for (int64_t token = 0; layer.bias && token < tokens; ++token)
    std::copy_n(layer.bias + first * kPanel, width, sums + token * kGroup * kPanel);
  add(layer.main, first, panels, in, tokens, sums);
  if (low) add(layer.up, first, panels, *low, tokens, sums);
  for (int64_t token = 0; token < tokens; ++token)
    std::copy_n(
        sums + token * kGroup * kPanel, width, out + token * stride + layer.first + first * kPanel);
}

// out[Q, stride] = layers of the same inputs, each at its place.
void run_all(
    const std::vector<Layer>& layers, const Inputs& in, const std::vector<Inputs>& low,
    int64_t tokens, float* out, int64_t stride, int threads) {
  std::vector<std::pair<size_t, int64_t>> places;  // layers, and groups of their panels
  for (size_t layer = 0; layer < layers.size(); ++layer)
    for (int64_t group = 0; group * kGroup < layers[layer].main.panels(); ++group)
      places.emplace_back(layer, group);
  const bool alone = tokens * stride * in.blocks * kBlock < kAlone;
#pragma omp parallel num_threads(threads) if (threads > 1 && !alone)
  {
    std::vector<float> sums(tokens * kGroup * kPanel);
#pragma omp for schedule(dynamic)
    for (const auto& [layer, group] : places)
      run(layers[layer], group, in, layers[layer].up.weights ? &low[layer] : nullptr, tokens,
          sums.data(), out, stride);
  }
}

}  // namespace

// out[Q, O] of all `count` layers of float32 inputs [Q, I]: weights @ inputs + up @ (down @ inputs).
extern "C" void pasta_linear(
    const Layer* layers, int64_t count, const float* input, float* out, int64_t tokens,
    int64_t width, int64_t outputs, int threads) {
  const std::vector<Layer> all(layers, layers + count);
  const Inputs in(input, tokens, width);
  std::vector<Inputs> low;
  const bool adapted =
      std::any_of(all.begin(), all.end(), [](const Layer& one) { return one.down.weights; });
  for (size_t layer = 0; adapted && layer < all.size(); ++layer) {
    const Layer down{all[layer].down, {}, {}, nullptr, 0};
    const int64_t rank = down.main.outputs;
    std::vector<float> found(tokens * rank);
    if (rank) run_all({down}, in, {}, tokens, found.data(), rank, threads);
    low.emplace_back(found.data(), tokens, rank);
  }
  run_all(all, in, low, tokens, out, outputs, threads);
}
