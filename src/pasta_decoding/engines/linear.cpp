// Linear layers: weights of four to 32 bits, an adapter of low rank beside them, and inputs and
// outputs in float32.
//
// An output is the sum over the inputs in their order, whatever else is computed with it: a row's
// result does not depend, to the bit, on the other rows. Weights that are whole numbers are
// multiplied by whole numbers: 256 inputs are rounded to eight bits under a scale that they share,
// as llama.cpp does. For weights of 16 bits, with AVX-512 BF16, inputs are rounded to bfloat16; for
// those of 32 bits not.

#include "decoder.h"

namespace {

constexpr int64_t kTasks = 8;                        // of a thread, if there are as many panels
constexpr int64_t kAlone = 100000;                   // products that are not worth a second thread
constexpr int64_t kMostRows = kWidth == 16 ? 8 : 4;  // of a tile, whose sums fit into registers
constexpr int64_t kShared = 8;                       // blocks whose inputs share a scale

// The sum over a group of inputs of levels times bytes, for each output. It starts at -offset times
// the sum of the bytes, given in pairs.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
using Sum = Ints;
inline Sum start(int32_t pair, int offset) {
  return (static_cast<int16_t>(pair) + (pair >> 16)) * -offset - Ints{};
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
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weights + 4096 + at);
}

// Adds a panel of whole numbers times some rows of inputs to sums.
template <int rows, typename Kind>
void add_whole(Kind, const uint8_t* record, const Inputs* in, Vec* sums) {
  const int32_t *quads[rows], *pairs[rows];
  for (int row = 0; row < rows; ++row) {
    quads[row] = reinterpret_cast<const int32_t*>(in[row].bytes.data());
    pairs[row] = in[row].pairs.data();
  }
  constexpr int first_offset = Kind::bits == 8 ? 0 : Kind::offset;
  constexpr int offset = Kind::bits == 8 ? Kind::offset / 16 : Kind::offset;
  for (int64_t first = 0; first < in->blocks(); first += Kind::blocks, record += Kind::bytes) {
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
        for (int row = 0; row < rows; ++row) least[row] += minimum * in[row].sums[block];
      }
    }
    const Vec scale = from_float16s(record + Kind::scales_at);
    for (int row = 0; row < rows; ++row) {
      const Vec both = scale * in[row].scales[first / kShared];
      sums[row] += __builtin_convertvector(all[row], Vec) * both;
    }
    if constexpr (Kind::minimums) {
      const Vec minimum = from_float16s(record + Kind::scales_at + 2 * kPanel);
      for (int row = 0; row < rows; ++row) sums[row] += least[row] * minimum;
    }
  }
}

// The same of weights that are floats. A sum waits for its last product, so that there are two.
template <int rows, typename Kind>
void add_floats(Kind, const uint8_t* record, const Inputs* in, Vec* sums) {
  const typename Kind::Input* inputs[rows];
  for (int row = 0; row < rows; ++row) {
    const void* from = in[row].floats.data();
    if (Kind::rounded) from = in[row].bfloats.data();
    inputs[row] = static_cast<const typename Kind::Input*>(from);
  }
  Vec all[rows][2] = {};
  for (int64_t block = 0; block < in->blocks(); ++block, record += Kind::bytes) {
    fetch(record, Kind::bytes);
#pragma GCC unroll 4
    for (int64_t step = 0; step < Kind::steps; ++step)
      for (int row = 0; row < rows; ++row)
        Kind::add(all[row][step % 2], record, step, inputs[row][block * Kind::steps + step]);
  }
  for (int row = 0; row < rows; ++row) sums[row] += all[row][0] + all[row][1];
}

template <int most>
void add(const Matrix& matrix, int64_t panel, const Inputs* in, int64_t rows, Vec* sums) {
  if constexpr (most > 1)
    if (rows < most) return add<most - 1>(matrix, panel, in, rows, sums);
  with_kind(matrix.kind, [&](auto kind) {
    if constexpr (decltype(kind)::whole)
      add_whole<most>(kind, matrix.panel(panel), in, sums);
    else
      add_floats<most>(kind, matrix.panel(panel), in, sums);
  });
}

// Panels of a layer. low[Q, ranks]: the inputs of what an adapter adds.
void run(
    const Linear& linear, const Linear::Part& part, int64_t begin, int64_t end, const Inputs* in,
    const float* low, int64_t tokens, float* out) {
  for (int64_t token = 0; token < tokens; token += kMostRows) {
    const int64_t rows = std::min(kMostRows, tokens - token);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel, width = std::min(kPanel, part.main.outputs - first);
      const int64_t ranks = panel < part.first_up ? 0 : part.rank;
      const Vec* up = part.up.data() + (panel - part.first_up) * ranks;
      for (int64_t rank = 0; rank < ranks; ++rank) __builtin_prefetch(up + rank);
      Vec sums[kMostRows] = {};
      for (int64_t row = 0; !part.bias.empty() && row < rows; ++row)
        std::memcpy(&sums[row], &part.bias[first], 4 * width);
      add<kMostRows>(part.main, panel, in + token, rows, sums);
      for (int64_t row = 0; row < rows; ++row) {
        const float* own = low + (token + row) * linear.ranks + part.first_rank;
        for (int64_t rank = 0; rank < ranks; ++rank) sums[row] += up[rank] * own[rank];
        float* to = out + (token + row) * linear.outputs + part.first + first;
        std::memcpy(to, &sums[row], 4 * width);
      }
    }
  }
}

void run_all(
    const Linear& linear, const Inputs* in, const float* low, int64_t tokens, float* out,
    int threads) {
  const int64_t group = std::max<int64_t>(linear.outputs / kPanel / (kTasks * threads), 1);
  std::vector<std::pair<const Linear::Part*, int64_t>> places;  // the first panels of tasks
  for (const Linear::Part& part : linear.parts)
    for (int64_t panel = 0; panel < part.main.panels(); panel += group)
      places.emplace_back(&part, panel);
  const bool alone = tokens * linear.outputs * linear.inputs < kAlone;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && !alone)
  for (const auto& [part, panel] : places)
    run(linear, *part, panel, std::min(panel + group, part->main.panels()), in, low, tokens, out);
}

}  // namespace

void Inputs::take(const float* from, int64_t width) {
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  floats.assign(blocks * kBlock, 0.f);
  std::copy_n(from, width, floats.data());
#if defined(__AVX512BF16__)
  bfloats.resize(blocks * kBlock);
  convert(floats.data(), bfloats.data(), blocks * kBlock);
#endif
  bytes.resize(blocks * kBlock);
  pairs.resize(blocks * 2);
  sums.resize(blocks);
  scales.resize((blocks + kShared - 1) / kShared);
  const float magic = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
  for (int64_t first = 0; first < blocks; first += kShared) {
    const int64_t end = std::min(first + kShared, blocks);
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t at = first * kBlock; at < end * kBlock; ++at)
      most = std::max(most, std::abs(floats[at]));
    const float scale = most / 127, inverse = most > 1e-30f ? 127 / most : 0;
    scales[first / kShared] = scale;
    for (int64_t block = first; block < end; ++block) {
      const float* own = &floats[block * kBlock];
      int8_t* whole = &bytes[block * kBlock];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t at = 0; at < kBlock; ++at) {
        const float nearest = own[at] * inverse + magic - magic;
        whole[at] = static_cast<int8_t>(static_cast<int32_t>(nearest));
        sum += nearest;
      }
      sums[block] = sum * scale;
      for (int64_t half = 0; half < 2; ++half) {
        int32_t both[2] = {};
        for (int64_t at = 0; at < 16; ++at) both[at / 2 % 2] += whole[half * 16 + at];
        pairs[block * 2 + half] = both[1] * 65536 | (both[0] & 0xffff);
      }
    }
  }
}

void multiply(
    const Linear& linear, const float* input, int64_t stride, int64_t tokens, float* out,
    Scratch& scratch, int threads) {
  scratch.inputs.resize(std::max<size_t>(scratch.inputs.size(), tokens));
  Inputs* in = scratch.inputs.data();
  share(tokens, threads, [&](int64_t row) { in[row].take(input + row * stride, linear.inputs); });
  scratch.low.resize(tokens * linear.ranks);
  if (linear.down) run_all(*linear.down, in, nullptr, tokens, scratch.low.data(), threads);
  run_all(linear, in, scratch.low.data(), tokens, out, threads);
}

// Return layers without parts yet; `down` must live as long.
extern "C" Linear* pasta_linear(const Linear* down) { return new Linear{down}; }
extern "C" void pasta_free(Linear* linear) { delete linear; }

// Put a part behind the others. up[O, R], bias[O]: or null.
extern "C" void pasta_add(
    Linear* linear, const Rows* main, const float* up, int64_t rank, const float* bias,
    int threads) {
  const int64_t outputs = main->outputs, count = outputs * rank;
  Linear::Part part{pack(*main, threads), {}, std::vector<float>(bias, bias + (bias ? outputs : 0)),
                    rank, linear->ranks, 0, linear->outputs};
  // Of the head only the outputs of control tokens have some, and they are the last ones.
  part.first_up = std::find_if(up, up + count, [](float x) { return x != 0; }) - up;
  part.first_up /= std::max<int64_t>(rank, 1) * kPanel;
  part.up.resize((part.main.panels() - part.first_up) * rank);
  for (int64_t at = part.first_up * kPanel * rank; at < count; ++at) {
    const int64_t output = at / rank - part.first_up * kPanel;
    part.up[output / kPanel * rank + at % rank][output % kPanel] = up[at];
  }
  linear->parts.push_back(std::move(part));
  linear->inputs = main->inputs;
  linear->outputs += outputs;
  linear->ranks += rank;
}

extern "C" void pasta_multiply(
    const Linear* linear, const float* input, float* out, int64_t tokens, int threads) {
  Scratch scratch;
  multiply(*linear, input, linear->inputs, tokens, out, scratch, threads);
}
