// Linear layers: weights of four to 32 bits, an adapter of low rank beside them, and inputs and
// outputs in float32.
//
// An output is the sum over the inputs in their order, whatever else is computed with it: a row's
// result does not depend, to the bit, on the other rows. Weights that are whole numbers are
// multiplied by whole numbers: 256 inputs are rounded to eight bits under a scale that they share,
// as llama.cpp does. For weights of 16 bits, with AVX-512 BF16, inputs are rounded to bfloat16; for
// those of 32 bits not.
//
// Shapes: Q tokens, I inputs, O outputs, R rank of what is added.

#include <vector>

#include "packed.h"

namespace {

constexpr int64_t kTasks = 16;      // of a thread, if there are as many panels
constexpr int64_t kMostPanels = 64 / kPanel;  // of a task
constexpr int64_t kAlone = 100000;  // products that are not worth a second thread
constexpr int64_t kMostRows = 4;    // of a tile
constexpr int64_t kShared = 8;      // blocks whose inputs share a scale

// A layer; what is added to it, or null; its bias, or null; and its first place in the outputs.
struct Layer {
  const Matrix *main, *down, *up;
  const float* bias;
  int64_t first;
};

// Rows of inputs, zeros behind them up to whole blocks, as those who multiply take them.
class Inputs {
 public:
  Inputs(const float* from, int64_t tokens, int64_t width, int64_t stride, int threads)
      : blocks((width + kBlock - 1) / kBlock),
        scales_a_row_((blocks + kShared - 1) / kShared),
        floats_(tokens * blocks * kBlock),
        bfloats_(floats_.size()),
        bytes_(floats_.size()),
        pairs_(2 * tokens * blocks),
        sums_(tokens * blocks),
        scales_(tokens * scales_a_row_) {
    share(tokens, tokens > kMostRows ? threads : 1, [=](int64_t token) {
      float* own = &floats_[token * blocks * kBlock];
      std::copy_n(from + token * stride, width, own);
#if defined(__AVX512BF16__)
      convert(own, &bfloats_[token * blocks * kBlock], blocks * kBlock);
#endif
      for (int64_t block = 0; block < blocks; block += kShared) round(token, block);
    });
  }

  const Floats::Input* of(int64_t token, Floats) const { return &floats_[token * blocks * kBlock]; }
  const Bfloats::Input* of(int64_t token, Bfloats) const {
    const int64_t at = token * blocks * kBlock;
#if defined(__AVX512BF16__)
    return reinterpret_cast<const Bfloats::Input*>(&bfloats_[at]);
#else
    return reinterpret_cast<const Bfloats::Input*>(&floats_[at]);
#endif
  }
  // A row of bytes, four inputs in a word.
  const int32_t* quads(int64_t token) const {
    return reinterpret_cast<const int32_t*>(&bytes_[token * blocks * kBlock]);
  }
  // Their sums over 16 inputs: two of 16 bits, of the first pair of each quad and of the second.
  const int32_t* pairs(int64_t token) const { return &pairs_[token * blocks * 2]; }
  // The sum over a block, and what the bytes are multiplied by.
  const float* sums(int64_t token) const { return &sums_[token * blocks]; }
  float scale_of(int64_t token, int64_t block) const {
    return scales_[token * scales_a_row_ + block / kShared];
  }

  const int64_t blocks;

 private:
  void round(int64_t token, int64_t first) {
    const int64_t end = std::min(first + kShared, blocks);
    const float* own = &floats_[token * blocks * kBlock];
    Vec size{};
    for (int64_t at = first * kBlock; at < end * kBlock; at += kWidth) {
      const Vec x = load(own + at), positive = x < 0.f ? -x : x;
      size = positive > size ? positive : size;
    }
    float most = 0;
    for (int lane = 0; lane < kWidth; ++lane) most = std::max(most, size[lane]);
    const float scale = most / 127, inverse = most > 1e-30f ? 127 / most : 0;
    scales_[token * scales_a_row_ + first / kShared] = scale;
    const Vec magic = splat(12582912.f);  // 1.5 * 2^23: what is added to it loses its fraction
    for (int64_t block = first; block < end; ++block) {
      int8_t* bytes = &bytes_[(token * blocks + block) * kBlock];
      Vec sum{};
      for (int64_t at = 0; at < kBlock; at += kWidth) {
        const Vec whole = load(own + block * kBlock + at) * inverse + magic - magic;
        put(whole, bytes + at);
        sum += whole;
      }
      sums_[token * blocks + block] = total(sum) * scale;
      for (int half = 0; half < 2; ++half)
        pairs_[(token * blocks + block) * 2 + half] = pair_of(bytes + half * kBlock / 2);
    }
  }

  static void put(Vec whole, int8_t* to) {
    const Ints ints = __builtin_convertvector(whole, Ints);
    for (int lane = 0; lane < kWidth; ++lane) to[lane] = static_cast<int8_t>(ints[lane]);
  }

  static int32_t pair_of(const int8_t* bytes) {
    int32_t sums[2] = {};
    for (int at = 0; at < 16; ++at) sums[at / 2 % 2] += bytes[at];
    return static_cast<int32_t>(static_cast<uint32_t>(sums[1]) << 16 | (sums[0] & 0xffff));
  }

  const int64_t scales_a_row_;
  std::vector<float> floats_;
  std::vector<uint16_t> bfloats_;
  std::vector<int8_t> bytes_;
  std::vector<int32_t> pairs_;
  std::vector<float> sums_, scales_;
};

// The sum over a group of inputs of levels times bytes, for each output. It starts at -offset times
// the sum of the bytes, given in pairs.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__) || \
    (defined(__AVX512F__) && !defined(__AVX512BW__))
using Sum = Ints;
inline Sum start(int32_t pair, int offset) {
  return ((pair << 16 >> 16) + (pair >> 16)) * -offset - Ints{};
}
inline void add(Sum& sum, Ints levels, int32_t quad) {
  const Ints inputs = quad - Ints{};
#if defined(__AVX512VNNI__)
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)inputs);
#elif defined(__AVXVNNI__)
  sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)levels, (__m256i)inputs);
#else
  for (int at = 0; at < 32; at += 8) sum += (levels >> at & 255) * (inputs << (24 - at) >> 24);
#endif
}
inline Ints times(Sum sum, Ints factors) { return sum * factors; }
#else
// Sums of 16 bits, two for an output. None overflows: a group has 16 levels of six bits, or 32 of
// four, and bytes are at most 127.
typedef uint16_t Sum __attribute__((vector_size(4 * kWidth)));
inline Sum start(int32_t pair, int offset) {
  return (Sum)(pair - Ints{}) * static_cast<uint16_t>(-offset);
}
inline void add(Sum& sum, Ints levels, int32_t quad) {
  const Ints inputs = quad - Ints{};
#if defined(__AVX512BW__)
  sum += (Sum)_mm512_maddubs_epi16((__m512i)levels, (__m512i)inputs);
#else
  sum += (Sum)_mm256_maddubs_epi16((__m256i)levels, (__m256i)inputs);
#endif
  asm("" : "+v"(sum));  // else the compiler first makes all products, and has no registers left
}
inline Ints times(Sum sum, Ints factors) {
  const Ints both = (factors & 0xffff) | factors << 16;
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)sum, (__m512i)both);
#else
  return (Ints)_mm256_madd_epi16((__m256i)sum, (__m256i)both);
#endif
}
#endif

template <typename Kind>
Ints factors_of(const uint8_t* record, int64_t group, int64_t number) {
  if constexpr (Kind::factors)
    return from_bytes(record + Kind::factors_at + (group * Kind::numbers + number) * kPanel);
  return (Kind::bits == 8 && group % 2 ? 16 : 1) - Ints{};
}

// Weights that come soon: few rows are done with theirs before the processor fetches the next by
// itself.
inline void fetch(const uint8_t* weights, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weights + 2048 + at);
}

// Adds a panel of whole numbers times some rows of inputs to sums.
template <int rows, typename Kind>
void add_whole(Kind, const uint8_t* record, const Inputs& in, int64_t token, Vec* sums) {
  const int32_t *quads[rows], *pairs[rows];
  const float* inputs[rows];
  for (int row = 0; row < rows; ++row) {
    inputs[row] = in.sums(token + row);
    quads[row] = in.quads(token + row);
    pairs[row] = in.pairs(token + row);
  }
  constexpr int first_offset = Kind::bits == 8 ? 0 : Kind::offset;
  constexpr int offset = Kind::bits == 8 ? Kind::offset / 16 : Kind::offset;
  for (int64_t first = 0; first < in.blocks; first += Kind::blocks, record += Kind::bytes) {
    Ints all[rows] = {};
    Vec least[rows] = {};
    for (int64_t block = first; block < first + Kind::blocks; ++block) {
      const uint8_t* weights = record + (block - first) * Kind::block_bytes;
      fetch(weights, Kind::bytes / Kind::blocks);
#pragma GCC unroll 2
      for (int group = 0; group < Kind::groups; ++group) {
        constexpr int count = Kind::bits == 6 ? 4 : 8;
        const int quad = Kind::bits == 6 ? 4 * group : 0;
        const int own_offset = group ? offset : first_offset;
        Sum own[rows] = {};
        for (int row = 0; own_offset && row < rows; ++row)
          for (int half = quad / 4; half < (quad + count) / 4; ++half)
            own[row] += start(pairs[row][block * 2 + half], own_offset);
#pragma GCC unroll 8
        for (int at = quad; at < quad + count; ++at) {
          const Ints levels = Kind::levels(weights, group, at);
#pragma GCC unroll 8
          for (int row = 0; row < rows; ++row) add(own[row], levels, quads[row][block * 8 + at]);
        }
        const Ints factors = factors_of<Kind>(record, (block - first) * Kind::groups + group, 0);
        for (int row = 0; row < rows; ++row) all[row] += times(own[row], factors);
      }
      if constexpr (Kind::minimums) {
        const Ints factors = factors_of<Kind>(record, block - first, 1);
        const Vec minimum = __builtin_convertvector(factors, Vec);
        for (int row = 0; row < rows; ++row) least[row] += minimum * inputs[row][block];
      }
    }
    const Vec scale = from_float16s(record + Kind::scales_at);
    for (int row = 0; row < rows; ++row)
      sums[row] += __builtin_convertvector(all[row], Vec) * (scale * in.scale_of(token + row, first));
    if constexpr (Kind::minimums) {
      const Vec minimum = from_float16s(record + Kind::scales_at + 2 * kPanel);
      for (int row = 0; row < rows; ++row) sums[row] += least[row] * minimum;
    }
  }
}

// The same of weights that are floats. A sum waits for its last product, so that there are two.
template <int rows, typename Kind>
void add_floats(Kind kind, const uint8_t* record, const Inputs& in, int64_t token, Vec* sums) {
  const typename Kind::Input* inputs[rows];
  for (int row = 0; row < rows; ++row) inputs[row] = in.of(token + row, kind);
  Vec all[rows][2] = {};
  for (int64_t block = 0; block < in.blocks; ++block, record += Kind::bytes) {
    fetch(record, Kind::bytes);
#pragma GCC unroll 4
    for (int64_t step = 0; step < Kind::steps; ++step)
      for (int row = 0; row < rows; ++row)
        Kind::add(all[row][step % 2], record, step, inputs[row][block * Kind::steps + step]);
  }
  for (int row = 0; row < rows; ++row) sums[row] += all[row][0] + all[row][1];
}

template <int rows>
void add_rows(const Matrix& matrix, int64_t panel, const Inputs& in, int64_t token, Vec* sums) {
  with_kind(matrix.kind, [&](auto kind) {
    if constexpr (decltype(kind)::whole)
      add_whole<rows>(kind, matrix.panel(panel), in, token, sums);
    else
      add_floats<rows>(kind, matrix.panel(panel), in, token, sums);
  });
}

template <int most = kMostRows>
void add(
    const Matrix& matrix, int64_t panel, const Inputs& in, int64_t token, int64_t rows, Vec* sums) {
  if constexpr (most > 1)
    if (rows < most) return add<most - 1>(matrix, panel, in, token, rows, sums);
  add_rows<most>(matrix, panel, in, token, sums);
}

// Panels of a layer. low: what `down` makes of the inputs, if there is such a thing.
void run(
    const Layer& layer, int64_t begin, int64_t end, const Inputs& in, const Inputs* low,
    int64_t tokens, float* out, int64_t stride) {
  for (int64_t token = 0; token < tokens; token += kMostRows) {
    const int64_t rows = std::min(kMostRows, tokens - token);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel, width = std::min(kPanel, layer.main->outputs - first);
      Vec sums[kMostRows] = {};
      for (int64_t row = 0; layer.bias && row < rows; ++row)
        std::memcpy(&sums[row], layer.bias + first, 4 * width);
      add(*layer.main, panel, in, token, rows, sums);
      if (low) add(*layer.up, panel, *low, token, rows, sums);
      for (int64_t row = 0; row < rows; ++row)
        std::memcpy(out + (token + row) * stride + layer.first + first, &sums[row], 4 * width);
    }
  }
}

// out[Q, stride] = layers of the same inputs, each at its place.
void run_all(
    const std::vector<Layer>& layers, const Inputs& in, const std::vector<Inputs>& low,
    int64_t tokens, float* out, int64_t stride, int threads) {
  std::vector<std::pair<size_t, int64_t>> places;  // layers, and the first panels of tasks
  const int64_t group = std::clamp<int64_t>(stride / kPanel / (kTasks * threads), 1, kMostPanels);
  for (size_t layer = 0; layer < layers.size(); ++layer)
    for (int64_t panel = 0; panel < layers[layer].main->panels(); panel += group)
      places.emplace_back(layer, panel);
  const bool alone = tokens * stride * in.blocks * kBlock < kAlone;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && !alone)
  for (const auto& [layer, panel] : places)
    run(layers[layer], panel, std::min(panel + group, layers[layer].main->panels()), in,
        layers[layer].up ? &low[layer] : nullptr, tokens, out, stride);
}

}  // namespace

// out[Q, O] of all `count` layers of float32 inputs [Q, I]: weights @ inputs + up @ (down @ inputs).
extern "C" void pasta_linear(
    const Layer* layers, int64_t count, const float* input, float* out, int64_t tokens,
    int64_t width, int64_t outputs, int threads) {
  const std::vector<Layer> all(layers, layers + count);
  const Inputs in(input, tokens, width, width, threads);
  std::vector<Layer> downs;
  int64_t ranks = 0;
  for (const Layer& layer : all)
    if (layer.down) {
      downs.push_back({layer.down, nullptr, nullptr, nullptr, ranks});
      ranks += layer.down->outputs;
    }
  std::vector<float> found(tokens * ranks);
  run_all(downs, in, {}, tokens, found.data(), ranks, threads);
  std::vector<Inputs> low;
  const float* own = found.data();
  for (const Layer& layer : all) {
    const int64_t rank = layer.down ? layer.down->outputs : 0;
    if (ranks) low.emplace_back(own, tokens, rank, ranks, threads);
    own += rank;
  }
  run_all(all, in, low, tokens, out, outputs, threads);
}
