// Linear layers of a compiled pass, as one operator: packed weights of four, eight or sixteen bits,
// and what an adapter adds beside them.
//
// Shapes: Q tokens, I inputs, B = I / 32 blocks of inputs, O outputs, P = O / 16 panels of outputs,
// R rank of what is added, in multiples of 16.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>

namespace {

using at::Tensor;

constexpr int64_t kPanel = 16;     // outputs that are computed together, a lane each
constexpr int64_t kPairs = 16;     // pairs of inputs in a block: a lane takes two numbers at once
constexpr int kRows = 12;          // tokens of one tile: their sums stay in registers
constexpr int64_t kAhead = 1024;   // bytes that weights are fetched before they are read
constexpr int64_t kAlone = 100000; // products that are not worth a second thread

// What a panel's weights look like. A block of `bytes` holds 32 inputs of 16 outputs; `pairs` turns a
// quarter of it, four pairs of inputs, into bfloat16.
struct Sixteen {
  static constexpr int64_t bytes = 1024, scales = 0;
  static void pairs(const uint8_t* quarter, __m512bh weights[4]) {
    for (int pair = 0; pair < 4; ++pair)
      weights[pair] = (__m512bh)_mm512_loadu_si512(quarter + 64 * pair);
  }
};

// Whole numbers from -127 to 127, times a scale a block and output (GGUF's Q8_0).
struct Eight {
  static constexpr int64_t bytes = 512, scales = 1;
  static void pairs(const uint8_t* quarter, __m512bh weights[4]) {
    for (int pair = 0; pair < 4; ++pair) {
      const auto* levels = reinterpret_cast<const __m128i*>(quarter + 32 * pair);
      const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(levels));
      const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(levels + 1));
      weights[pair] = _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
    }
  }
};

// Whole numbers from 0 to 15, times a scale, plus a minimum (GGUF's Q4_1). A lane's word holds four of
// them; the table is looked up with five bits of it, so it is written twice.
struct Four {
  static constexpr int64_t bytes = 256, scales = 2;
  static void pairs(const uint8_t* quarter, __m512bh weights[4]) {
    alignas(64) static constexpr uint16_t kLevels[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_load_si512(kLevels), levels = _mm512_loadu_si512(quarter);
    weights[0] = (__m512bh)_mm512_permutexvar_epi16(levels, table);
    weights[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(levels, 4), table);
    weights[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(levels, 8), table);
    weights[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(levels, 12), table);
  }
};

// Inputs of some tokens, in pairs of bfloat16.
struct Inputs {
  const uint32_t* pairs;  // [Q, I / 2]
  int64_t count;          // of them a token

  const uint32_t* of(int64_t token) const { return pairs + token * count; }
};

// A matrix [O, I], packed by engines/packed_linear.py.
struct Matrix {
  const uint8_t* weights;  // [P, B, bytes]
  const at::Half* scales;  // [P, B, scales, 16], or null
  int64_t outputs, blocks;

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
};

// What is added to a panel's outputs: its rows of `up`, times what `down` has made of the inputs.
struct Added {
  const uint8_t* up;  // [R / 2, 16, 2] of bfloat16, or null
  Inputs in;
};

// One panel times `rows` tokens, from `token` on.
template <typename Weights, int rows>
void tile(
    const Matrix& matrix, int64_t panel, const Inputs& in, const float* sums, const Added& added,
    int64_t token, float* out) {
  __m512 total[rows];
  for (int row = 0; row < rows; ++row) total[row] = _mm512_setzero_ps();
  if (added.up)
    for (int64_t pair = 0; pair < added.in.count; ++pair) {
      const auto weights = (__m512bh)_mm512_loadu_si512(added.up + 64 * pair);
      for (int row = 0; row < rows; ++row) {
        const __m512i input = _mm512_set1_epi32(added.in.of(token + row)[pair]);
        total[row] = _mm512_dpbf16_ps(total[row], weights, (__m512bh)input);
      }
    }
  const uint8_t* weights = matrix.weights + panel * matrix.blocks * Weights::bytes;
  const at::Half* scales = matrix.scales + panel * matrix.blocks * Weights::scales * kPanel;
  for (int64_t block = 0; block < matrix.blocks; ++block, weights += Weights::bytes) {
    __m512 products[rows];
    for (int row = 0; row < rows; ++row) products[row] = _mm512_setzero_ps();
    for (int quarter = 0; quarter < 4; ++quarter) {
      __m512bh pairs[4];
      const uint8_t* own = weights + quarter * (Weights::bytes / 4);
      for (int64_t line = 0; line < Weights::bytes / 4; line += 64)
        _mm_prefetch(own + kAhead + line, _MM_HINT_T0);
      Weights::pairs(own, pairs);
      const uint32_t* inputs = in.of(token) + block * kPairs + quarter * 4;
      for (int pair = 0; pair < 4; ++pair)
        for (int row = 0; row < rows; ++row) {
          const __m512i input = _mm512_set1_epi32(inputs[row * in.count + pair]);
          products[row] = _mm512_dpbf16_ps(products[row], pairs[pair], (__m512bh)input);
        }
    }
    const auto number = [scales, block](int64_t which) {
      const at::Half* own = scales + (block * Weights::scales + which) * kPanel;
      return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(own)));
    };
    for (int row = 0; row < rows; ++row) {
      if constexpr (Weights::scales == 0)
        total[row] = _mm512_add_ps(total[row], products[row]);
      else
        total[row] = _mm512_fmadd_ps(number(0), products[row], total[row]);
      if constexpr (Weights::scales == 2) {
        const float sum = sums[(token + row) * matrix.blocks + block];
        total[row] = _mm512_fmadd_ps(number(1), _mm512_set1_ps(sum), total[row]);
      }
    }
  }
  const int64_t left = std::min(kPanel, matrix.outputs - panel * kPanel);
  const auto lanes = static_cast<__mmask16>((1u << left) - 1);
  for (int row = 0; row < rows; ++row)
    _mm512_mask_storeu_ps(
        out + (token + row) * matrix.outputs + panel * kPanel, lanes, total[row]);
}

// The same for `count` tokens, which is at most `rows`.
template <typename Weights, int rows = kRows>
void tile_of(
    int64_t count, const Matrix& matrix, int64_t panel, const Inputs& in, const float* sums,
    const Added& added, int64_t token, float* out) {
  if constexpr (rows > 1) {
    if (count < rows)
      return tile_of<Weights, rows - 1>(count, matrix, panel, in, sums, added, token, out);
  }
  tile<Weights, rows>(matrix, panel, in, sums, added, token, out);
}

// The same for all tokens, in tiles of even size.
template <typename Weights>
void multiply(
    const Matrix& matrix, int64_t panel, const Inputs& in, const float* sums, const Added& added,
    int64_t tokens, float* out) {
  const int64_t tiles = (tokens + kRows - 1) / kRows;
  for (int64_t one = 0, token = 0; one < tiles; ++one) {
    const int64_t count = (tokens - token + tiles - one - 1) / (tiles - one);
    tile_of<Weights>(count, matrix, panel, in, sums, added, token, out);
    token += count;
  }
}

// What `down` makes of the inputs, [S, Q, R] of bfloat16 for S layers that read the same ones.
std::vector<at::BFloat16> lowered(const Tensor& down, const Inputs& in, int64_t tokens) {
  const int64_t layers = down.size(0), panels = down.size(1), rank = panels * kPanel;
  std::vector<at::BFloat16> low(layers * tokens * rank);
  std::vector<float> found(tokens * rank);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const Matrix matrix{
        static_cast<const uint8_t*>(down.const_data_ptr()) + layer * down.stride(0) * 2, nullptr,
        rank, down.size(2)};
    for (int64_t panel = 0; panel < panels; ++panel)
      multiply<Sixteen>(matrix, panel, in, nullptr, {}, tokens, found.data());
    std::copy(found.begin(), found.end(), low.begin() + layer * tokens * rank);
  }
  return low;
}

std::vector<float> sums_of(const uint32_t* pairs, int64_t blocks) {
  const auto one = (__m512bh)_mm512_set1_epi16(0x3f80);
  std::vector<float> sums(blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    const auto inputs = (__m512bh)_mm512_loadu_si512(pairs + block * kPairs);
    sums[block] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), inputs, one));
  }
  return sums;
}

// Return float32 [..., O] of bfloat16 inputs [..., I]. `outputs`: of each layer that reads these.
Tensor linear(
    const Tensor& input, const Tensor& weights, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& down, const std::optional<Tensor>& up, at::IntArrayRef outputs) {
  TORCH_CHECK(input.scalar_type() == at::kBFloat16, "packed layers take bfloat16");
  const int64_t blocks = weights.size(1), width = 2 * kPairs * blocks;
  TORCH_CHECK(input.size(-1) == width, "inputs of another width than the weights");
  const Tensor rows = input.contiguous();
  const int64_t tokens = rows.numel() / width;
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  Tensor out = at::empty(shape, input.options().dtype(at::kFloat));
  const Matrix matrix{
      static_cast<const uint8_t*>(weights.const_data_ptr()),
      scales ? scales->const_data_ptr<at::Half>() : nullptr, shape.back(), blocks};
  const Inputs in{static_cast<const uint32_t*>(rows.const_data_ptr()), width / 2};
  const bool four = scales && scales->size(2) == Four::scales;
  const auto sums = four ? sums_of(in.pairs, tokens * blocks) : std::vector<float>();
  const auto low = down ? lowered(*down, in, tokens) : std::vector<at::BFloat16>();
  // The layer of each panel, since what is added to one comes from its own part of `low`.
  std::vector<int64_t> layer_of;
  for (size_t layer = 0; layer < outputs.size(); ++layer)
    layer_of.insert(layer_of.end(), (outputs[layer] + kPanel - 1) / kPanel, layer);
  const int64_t pairs = up ? up->size(1) / (2 * kPanel) : 0;
  const auto run = [&](const auto& multiply_panel) {
    const int64_t grain = tokens * shape.back() * width < kAlone ? matrix.panels() : 1;
    at::parallel_for(0, matrix.panels(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        Added added{};
        if (up) {
          const auto* own = reinterpret_cast<const uint32_t*>(low.data());
          added.up = static_cast<const uint8_t*>(up->const_data_ptr()) + panel * pairs * 64;
          added.in = {own + layer_of[panel] * tokens * pairs, pairs};
        }
        multiply_panel(matrix, panel, in, sums.data(), added, tokens, out.mutable_data_ptr<float>());
      }
    });
  };
  if (four)
    run(multiply<Four>);
  else if (scales)
    run(multiply<Eight>);
  else
    run(multiply<Sixteen>);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(pasta, CPU, library) { library.impl("linear", linear); }

#endif
