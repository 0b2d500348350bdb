// Linear layers: weights of four, eight, sixteen or 32 bits, an adapter of low rank beside them, and
// inputs and outputs in float32.
//
// An output is the sum over the inputs in their order, whatever else is computed with it: a row's
// result does not depend, to the bit, on the other rows. Weights of four and eight bits are whole
// numbers; 16 or 32 inputs share a scale, by which the sum of their products is multiplied, and
// those of four bits a minimum. For them inputs are rounded to 15 bits under a power of two that 32
// inputs share; for weights of 16 bits, with AVX-512 BF16, to bfloat16. Layers of 32 bits round none.
//
// Shapes: Q tokens, I inputs, B = I / 32 blocks of inputs, O outputs, P = O / 16 panels of outputs,
// R rank of what is added.

#include <memory>
#include <vector>

#include "packed.h"

namespace {

constexpr int64_t kChunk = 4;       // blocks that are unpacked together
constexpr int64_t kGroup = 4;       // panels of one task
constexpr int64_t kAlone = 100000;  // products that are not worth a second thread

// A layer; what is added to it, if `down` has weights; its bias, or null; its first place in the
// outputs; and whether its inputs are never rounded.
struct Layer {
  Matrix main, down, up;
  const float* bias;
  int64_t first, exact;
};

// Rows of inputs, zeros behind them up to whole blocks, as those who multiply take them.
class Inputs {
 public:
  Inputs(const float* from, int64_t tokens, int64_t width)
      : blocks((width + kBlock - 1) / kBlock),
        floats_(tokens * blocks * kBlock),
        pairs_(floats_.size() / 2),
        shorts_(floats_.size() / 2),
        scales_(tokens * blocks),
        sums_(tokens * blocks) {
    for (int64_t token = 0; token < tokens; ++token)
      std::copy_n(from + token * width, width, &floats_[token * blocks * kBlock]);
    convert(floats_.data(), reinterpret_cast<uint16_t*>(pairs_.data()), floats_.size());
    for (int64_t block = 0; block < tokens * blocks; ++block) round(block);
  }

  const float* of(int64_t token, Floats) const { return &floats_[token * blocks * kBlock]; }
#ifdef PASTA_BFLOAT16
  const uint32_t* of(int64_t token, Bfloats) const { return &pairs_[token * blocks * kBlock / 2]; }
#endif
#ifdef PASTA_SHORTS
  const uint32_t* of(int64_t token, Shorts) const { return &shorts_[token * blocks * kBlock / 2]; }
  float scale(int64_t token, int64_t block, Shorts) const {
    return scales_[token * blocks + block];
  }
#endif
  template <typename Kind>
  static constexpr float scale(int64_t, int64_t, Kind) {
    return 1.f;
  }
  // The sum of the inputs of a block, as whole numbers of four and eight bits are multiplied.
  float sum(int64_t token, int64_t block) const { return sums_[token * blocks + block]; }

  const int64_t blocks;

 private:
  void round(int64_t block) {
    const float* own = &floats_[block * kBlock];
#ifdef PASTA_SHORTS
    float most = 0, rounded[kBlock];
    for (int64_t at = 0; at < kBlock; ++at) most = std::max(most, std::abs(own[at]));
    const float power = from_bits(__builtin_bit_cast(uint32_t, most) & 0x7f800000u);
    const float scale = power > 1e-30f ? power / 16384 : 1.f, share = 1 / scale;
    auto* shorts = reinterpret_cast<int16_t*>(&shorts_[block * kBlock / 2]);
    constexpr float magic = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
    for (int64_t at = 0; at < kBlock; ++at) {
      const float whole = std::min(own[at] * share + magic - magic, 32767.f);
      shorts[at] = static_cast<int16_t>(whole);
      rounded[at] = whole * scale;
    }
    scales_[block] = scale;
    own = rounded;
#endif
    Vec sum{};
    for (int64_t at = 0; at < kBlock; at += kWidth) sum += load(own + at);
    sums_[block] = total(sum);
  }

  std::vector<float> floats_;
  std::vector<uint32_t> pairs_, shorts_;
  std::vector<float> scales_, sums_;
};

// Some blocks of a group of panels, unpacked.
struct Chunk {
  const uint8_t* weights[kGroup];
  const float* scales[kGroup];  // [groups, numbers, 16]
  int64_t first, blocks, groups, numbers;  // groups of inputs that share a scale; 0 numbers: none
};

// A thread's own memory.
struct Room {
  explicit Room(int64_t tokens)
      : weights(new uint8_t[kGroup * kChunk * kBlock * kPanel * sizeof(float)]),
        scales(new float[kGroup * kChunk * 4 * kPanel]),
        sums(new float[tokens * kGroup * kPanel]) {}

  std::unique_ptr<uint8_t[]> weights;
  std::unique_ptr<float[]> scales, sums;  // sums[Q, panels, 16]
};

// Adds some panels of a matrix times the inputs to sums[Q, panels, 16].
template <typename Kind>
class Task {
 public:
  Task(int64_t tokens, Room& room)
      : tokens_(tokens),
        room_(room.weights.get()),
        scales_(room.scales.get()),
        sums_(room.sums.get()) {}

  void add(const Matrix& matrix, int64_t first, int64_t panels, const Inputs& in) {
    for (int64_t block = 0; block < matrix.blocks; block += kChunk) {
      Chunk chunk{};
      chunk.first = block;
      chunk.blocks = std::min(kChunk, matrix.blocks - block);
      chunk.numbers = matrix.scales ? matrix.numbers() : 0;
      chunk.groups = matrix.scales ? chunk.blocks * matrix.groups : 1;
      for (int64_t panel = 0; panel < panels; ++panel) unpack(matrix, first, panel, chunk);
      multiply(chunk, panels, in);
    }
  }

 private:
  void unpack(const Matrix& matrix, int64_t first, int64_t panel, Chunk& chunk) {
    constexpr int64_t bytes = Kind::steps * Kind::bytes;
    const int64_t from = (first + panel) * matrix.blocks + chunk.first;
    uint8_t* room = &room_[panel * kChunk * bytes];
    const uint8_t* blocks = matrix.weights + from * matrix.block_bytes();
    const bool there = matrix.bits == Kind::bits;
    chunk.weights[panel] = there ? blocks : room;
    for (int64_t block = 0; !there && block < chunk.blocks; ++block)
      Kind::unpack(matrix.bits, blocks + block * matrix.block_bytes(), room + block * bytes);
    if (!matrix.scales) return;
    const int64_t size = chunk.numbers * kPanel, all = matrix.blocks / matrix.scale_blocks;
    float* to = &scales_[panel * kChunk * 4 * kPanel];
    chunk.scales[panel] = to;
    for (int64_t group = 0; group < chunk.groups; ++group, to += size) {
      const int64_t place = (chunk.first + group / matrix.groups) / matrix.scale_blocks;
      const uint16_t* scales = matrix.scales + ((first + panel) * all + place) * size;
      const int8_t* factors = matrix.factors + (from * matrix.groups + group) * size;
      for (int64_t at = 0; at < size; ++at)
        to[at] = from_float16(scales[at]) * (matrix.factors ? factors[at] : 1);
    }
  }

  // The same for all rows, in tiles of at most six.
  void multiply(const Chunk& chunk, int64_t panels, const Inputs& in) {
    for (int64_t token = 0; token < tokens_;) {
      const int64_t left = tokens_ - token;
      const int64_t rows = left == 7 || left == 8 ? 4 : std::min<int64_t>(left, 6);
      switch (rows) {
        case 1: tiles<1, 4>(chunk, panels, in, token); break;
        case 2: tiles<2, 2>(chunk, panels, in, token); break;
        case 3: tiles<3, 2>(chunk, panels, in, token); break;
        case 4: tiles<4, kMany>(chunk, panels, in, token); break;
        case 5: tiles<5, kMany>(chunk, panels, in, token); break;
        default: tiles<6, kMany>(chunk, panels, in, token);
      }
      token += rows;
    }
  }

  static constexpr int kMany = kLanes == 1 ? 2 : 1;  // panels of a tile of many rows

  // The same for all panels of a group, `wide` at a time: a sum waits for its last product, so few
  // rows need several panels, and many rows keep the registers busy with one.
  template <int rows, int wide>
  void tiles(const Chunk& chunk, int64_t panels, const Inputs& in, int64_t token) {
    int64_t panel = 0;
    for (; panel + wide <= panels; panel += wide) tile<rows, wide>(chunk, panel, in, token);
    for (; panel < panels; ++panel) tile<rows, 1>(chunk, panel, in, token);
  }

  template <int rows, int wide>
  void tile(const Chunk& chunk, int64_t panel, const Inputs& in, int64_t token) {
    const int64_t steps = chunk.blocks * Kind::steps / chunk.groups;
    const typename Kind::Input* inputs[rows];
    for (int row = 0; row < rows; ++row)
      inputs[row] = in.of(token + row, Kind{}) + chunk.first * Kind::steps;
    for (int64_t group = 0; group < chunk.groups; ++group) {
      typename Kind::Sixteen products[rows][wide] = {};
      for (int64_t step = group * steps; step < (group + 1) * steps; ++step) {
        decltype(Kind::weights(nullptr)) weights[wide];
        for (int one = 0; one < wide; ++one)
          weights[one] = Kind::weights(chunk.weights[panel + one] + step * Kind::bytes);
        for (int row = 0; row < rows; ++row)
          for (int one = 0; one < wide; ++one)
            Kind::add(products[row][one], weights[one], inputs[row][step]);
      }
      const int64_t block = chunk.first + group * chunk.blocks / chunk.groups;
      for (int row = 0; row < rows; ++row) {
        const float share = in.scale(token + row, block, Kind{}), sum = in.sum(token + row, block);
        for (int one = 0; one < wide; ++one) {
          float* sums = &sums_[((token + row) * kGroup + panel + one) * kPanel];
          const float* scales = chunk.scales[panel + one] + group * chunk.numbers * kPanel;
          for (int lane = 0; lane < kLanes; ++lane) {
            const int at = lane * kWidth;
            const Vec own = Kind::floats(products[row][one].lane[lane]) * share;
            Vec all = load(sums + at);
            all += chunk.numbers ? own * load(scales + at) : own;
            if (chunk.numbers == 2) all += load(scales + kPanel + at) * sum;
            store(sums + at, all);
          }
        }
      }
    }
  }

  const int64_t tokens_;
  uint8_t* room_;
  float *scales_, *sums_;
};

void add(
    const Matrix& matrix, bool exact, int64_t first, int64_t panels, const Inputs& in,
    int64_t tokens, Room& room) {
  if (exact || matrix.bits == 32)
    Task<Floats>(tokens, room).add(matrix, first, panels, in);
  else if (matrix.bits == 16)
    Task<Bfloats>(tokens, room).add(matrix, first, panels, in);
  else
    Task<Shorts>(tokens, room).add(matrix, first, panels, in);
}

// A group of panels of a layer. low: what `down` makes of the inputs, if there is such a thing.
void run(
    const Layer& layer, int64_t group, const Inputs& in, const Inputs* low, int64_t tokens,
    Room& room, float* out, int64_t stride) {
  const int64_t first = group * kGroup;
  const int64_t panels = std::min(kGroup, layer.main.panels() - first);
  const int64_t width = std::min(panels * kPanel, layer.main.outputs - first * kPanel);
  float* sums = room.sums.get();
  std::fill_n(sums, tokens * kGroup * kPanel, 0.f);
  for (int64_t token = 0; layer.bias && token < tokens; ++token)
    std::copy_n(layer.bias + first * kPanel, width, sums + token * kGroup * kPanel);
  add(layer.main, layer.exact, first, panels, in, tokens, room);
  if (low) add(layer.up, layer.exact, first, panels, *low, tokens, room);
  for (int64_t token = 0; token < tokens; ++token)
    std::copy_n(
        sums + token * kGroup * kPanel, width, out + token * stride + layer.first + first * kPanel);
}

struct Place {
  int64_t layer, group;
};

// out[Q, stride] = layers of the same inputs, each at its place.
void run_all(
    const std::vector<Layer>& layers, const Inputs& in, const std::vector<Inputs>& low,
    int64_t tokens, float* out, int64_t stride, int threads) {
  std::vector<Place> places;
  for (size_t layer = 0; layer < layers.size(); ++layer)
    for (int64_t group = 0; group * kGroup < layers[layer].main.panels(); ++group)
      places.push_back({static_cast<int64_t>(layer), group});
  const bool alone = tokens * stride * in.blocks * kBlock < kAlone;
#pragma omp parallel num_threads(threads) if (threads > 1 && !alone)
  {
    Room room(tokens);
#pragma omp for schedule(dynamic)
    for (const Place& place : places) {
      const Layer& layer = layers[place.layer];
      const Inputs* added = layer.up.weights ? &low[place.layer] : nullptr;
      run(layer, place.group, in, added, tokens, room, out, stride);
    }
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
    const Layer down{all[layer].down, {}, {}, nullptr, 0, all[layer].exact};
    const int64_t rank = down.main.outputs;
    std::vector<float> found(tokens * rank);
    if (rank) run_all({down}, in, {}, tokens, found.data(), rank, threads);
    low.emplace_back(found.data(), tokens, rank);
  }
  run_all(all, in, low, tokens, out, outputs, threads);
}
