// Linear layers: weights of four to 32 bits, an adapter of low rank beside them, and inputs and
// outputs in float32.
//
// An output is the sum over the inputs in their order, whatever else is computed with it: a row's
// result does not depend, to the bit, on the other rows. Weights that are whole numbers are
// multiplied by whole numbers: inputs are rounded to eight bits under a scale that 256 of them share
// for K formats, and 32 for the others, as in llama.cpp. For weights in bfloat16, with AVX-512 BF16,
// inputs are rounded to bfloat16; for those in float32 not.

#include <new>

#include "decoder.h"
#include "dot.h"

namespace {

constexpr int64_t kThreadTasks = 8;              // tasks of a thread, if there are as many panels
constexpr int64_t kSerialProducts = 100000;      // not worth a second thread
constexpr int kTileRows = kWidth == 16 ? 8 : 4;  // rows of inputs whose sums fit into registers
constexpr int64_t kPrefetchBytes = 4096;         // how far ahead

// Fetch weights that come soon: a tile of few rows is done with its weights before the processor
// fetches the next ones by itself.
inline void prefetch(const uint8_t* weights, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weights + kPrefetchBytes + at);
}

// Add a panel of quantized weights times a tile of inputs to sums[rows].
template <int rows, typename Format>
void add_panel(Format, const uint8_t* record, const InputRow* inputs, Vec* sums) {
  const RoundedInputs* rounded[rows];
  const int32_t *quads[rows], *pair_sums[rows];
  for (int row = 0; row < rows; ++row) {
    rounded[row] = Format::blocks == 1 ? &inputs[row].by_block : &inputs[row].by_record;
    quads[row] = reinterpret_cast<const int32_t*>(rounded[row]->int8s.data());
    pair_sums[row] = rounded[row]->pair_sums.data();
  }
  const int64_t blocks = inputs->blocks();
  for (int64_t first = 0; first < blocks; first += Format::blocks, record += Format::bytes) {
    Ints products[rows] = {};
    Vec minimums[rows] = {};
    for (int64_t block = first; block < first + Format::blocks; ++block) {
      const uint8_t* weights = record + (block - first) * Format::block_bytes;
      prefetch(weights, Format::bytes / Format::blocks);
#pragma GCC unroll 2
      for (int group = 0; group < Format::groups; ++group) {
        constexpr int quad_count = Format::quads;
        const int first_quad = Format::bits == 6 ? quad_count * group : 0;
        const int end_quad = first_quad + quad_count;
        const int offset = Format::offset(group);
        GroupSum group_sums[rows] = {};
        for (int row = 0; offset && row < rows; ++row)
          for (int half = first_quad / 4; half < end_quad / 4; ++half)
            group_sums[row] += start(pair_sums[row][block * 2 + half], offset);
#pragma GCC unroll 8
        for (int quad = first_quad; quad < end_quad; ++quad) {
          const Ints levels = Format::levels(weights, group, quad);
#pragma GCC unroll 8
          for (int row = 0; row < rows; ++row)
            add(group_sums[row], levels, quads[row][block * 8 + quad]);
        }
        const Ints factors = Format::factors(record, block - first, group);
        for (int row = 0; row < rows; ++row) products[row] += scaled(group_sums[row], factors);
      }
      if constexpr (Format::has_minimums) {
        const Ints factors = Format::minimum_factors(record, block - first);
        const Vec factor = __builtin_convertvector(factors, Vec);
        for (int row = 0; row < rows; ++row)
          minimums[row] += factor * rounded[row]->block_sums[block];
      }
    }
    const Vec weight_scale = from_float16s(record + Format::scales_at);
    for (int row = 0; row < rows; ++row) {
      const Vec scale = weight_scale * rounded[row]->scales[first / Format::blocks];
      sums[row] += __builtin_convertvector(products[row], Vec) * scale;
    }
    if constexpr (Format::has_minimums) {
      const Vec minimum = from_float16s(record + Format::minimums_at);
      for (int row = 0; row < rows; ++row) sums[row] += minimums[row] * minimum;
    }
  }
}

// The same of weights that are floats. A sum waits for its last product, so that there are two.
template <int rows, typename Format>
void add_float_panel(Format, const uint8_t* record, const InputRow* in, Vec* sums) {
  using Input = typename Format::Input;
  const Input* inputs[rows];
  for (int row = 0; row < rows; ++row) {
    const void* numbers = in[row].floats.data();
    if (Format::rounds_inputs) numbers = in[row].bfloat16s.data();
    inputs[row] = static_cast<const Input*>(numbers);
  }
  Vec products[rows][2] = {};
  for (int64_t block = 0; block < in->blocks(); ++block, record += Format::bytes) {
    prefetch(record, Format::bytes);
#pragma GCC unroll 4
    for (int64_t line = 0; line < Format::rows; ++line)
      for (int row = 0; row < rows; ++row)
        Format::add(
            products[row][line % 2], record + line * Format::row_bytes,
            inputs[row][block * Format::rows + line]);
  }
  for (int row = 0; row < rows; ++row) sums[row] += products[row][0] + products[row][1];
}

// Call the function for this number of rows, at most `max_rows`.
template <int max_rows>
void add_tile(
    const Matrix& weights, int64_t panel, const InputRow* inputs, int64_t rows, Vec* sums) {
  if constexpr (max_rows > 1)
    if (rows < max_rows) return add_tile<max_rows - 1>(weights, panel, inputs, rows, sums);
  with_format(weights.type, [&](auto format) {
    if constexpr (decltype(format)::is_quantized)
      add_panel<max_rows>(format, weights.panel(panel), inputs, sums);
    else
      add_float_panel<max_rows>(format, weights.panel(panel), inputs, sums);
  });
}

// What a multiplication reads and writes. low_rank[Q, ranks]: the outputs of `down`.
struct Product {
  const Linear& linear;
  const InputRow* inputs;
  const float* low_rank;
  int64_t tokens;
  float* out;
};

// A tile of rows times a panel of a part.
void run_tile(
    const Product& product, const Linear::Part& part, int64_t panel, int64_t token, int64_t rows) {
  const Linear& linear = product.linear;
  const int64_t first = panel * kPanel;
  const int64_t width = std::min(kPanel, part.weights.outputs - first);
  const int64_t ranks = panel < part.first_up_panel ? 0 : part.rank;
  const Vec* up = part.up.data() + (panel - part.first_up_panel) * ranks;
  for (int64_t rank = 0; rank < ranks; ++rank) __builtin_prefetch(up + rank);
  Vec sums[kTileRows] = {};
  for (int64_t row = 0; !part.bias.empty() && row < rows; ++row)
    std::memcpy(&sums[row], &part.bias[first], 4 * width);
  add_tile<kTileRows>(part.weights, panel, product.inputs + token, rows, sums);
  for (int64_t row = 0; row < rows; ++row) {
    const float* low_rank = product.low_rank + (token + row) * linear.ranks + part.first_rank;
    for (int64_t rank = 0; rank < ranks; ++rank) sums[row] += up[rank] * low_rank[rank];
    float* to = product.out + (token + row) * linear.outputs + part.first_output + first;
    std::memcpy(to, &sums[row], 4 * width);
  }
}

// Some panels of a part.
struct Task {
  const Linear::Part* part;
  int64_t first_panel, end_panel;
};

void run(const Product& product, int threads) {
  const Linear& linear = product.linear;
  const int64_t panels = linear.outputs / kPanel;
  const int64_t step = std::max<int64_t>(panels / (kThreadTasks * threads), 1);
  std::vector<Task> tasks;
  for (const Linear::Part& part : linear.parts)
    for (int64_t panel = 0; panel < part.weights.panels(); panel += step)
      tasks.push_back({&part, panel, std::min(panel + step, part.weights.panels())});
  const int64_t products = product.tokens * linear.outputs * linear.inputs;
#pragma omp parallel for schedule(dynamic) num_threads(threads) \
    if (threads > 1 && products >= kSerialProducts)
  for (const Task& task : tasks)
    for (int64_t token = 0; token < product.tokens; token += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, product.tokens - token);
      for (int64_t panel = task.first_panel; panel < task.end_panel; ++panel)
        run_tile(product, *task.part, panel, token, rows);
    }
}

int64_t blocks_of(int64_t width) { return (width + kBlock - 1) / kBlock; }

// The largest magnitude of some numbers.
float largest_of(const float* numbers, int64_t count) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t at = 0; at < count; ++at) largest = std::max(largest, std::abs(numbers[at]));
  return largest;
}

// Two sums of eight pairs each, as `pair_sums` has them, of half a block.
int32_t pair_sums_of(const int8_t* numbers) {
  int32_t sums[2] = {};
  for (int64_t at = 0; at < kBlock / 2; ++at) sums[at / 2 % 2] += numbers[at];
  return sums[1] * 65536 | (sums[0] & 0xffff);
}

}  // namespace

void RoundedInputs::resize(int64_t blocks) {
  int8s.resize(blocks * kBlock);
  scales.resize((blocks + scale_blocks - 1) / scale_blocks);
  block_sums.resize(blocks);
  pair_sums.resize(blocks * 2);
}

void RoundedInputs::fill(const std::vector<float>& inputs) {
  const int64_t blocks = static_cast<int64_t>(inputs.size()) / kBlock;
  resize(blocks);
  for (int64_t first = 0; first < blocks; first += scale_blocks) {
    const int64_t end = std::min(first + scale_blocks, blocks);
    const float largest = largest_of(&inputs[first * kBlock], (end - first) * kBlock);
    const float scale = largest / 127, inverse = largest > 1e-30f ? 127 / largest : 0;
    scales[first / scale_blocks] = scale;
    for (int64_t block = first; block < end; ++block) {
      const float* numbers = &inputs[block * kBlock];
      int8_t* rounded = &int8s[block * kBlock];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t at = 0; at < kBlock; ++at) {
        const float nearest = numbers[at] * inverse + kRound - kRound;
        rounded[at] = static_cast<int8_t>(static_cast<int32_t>(nearest));
        sum += nearest;
      }
      block_sums[block] = sum * scale;
      pair_sums[2 * block] = pair_sums_of(rounded);
      pair_sums[2 * block + 1] = pair_sums_of(rounded + kBlock / 2);
    }
  }
}

void InputRow::reserve(const Linear& linear) {
  const int64_t blocks = blocks_of(linear.inputs);
  floats.reserve(blocks * kBlock);
  bfloat16s.reserve(blocks * kBlock);
  if (linear.rounds_by_block) by_block.resize(blocks);
  if (linear.rounds_by_record) by_record.resize(blocks);
}

void InputRow::fill(const float* from, const Linear& linear) {
  const int64_t blocks = blocks_of(linear.inputs);
  floats.assign(blocks * kBlock, 0.f);
  std::copy_n(from, linear.inputs, floats.data());
#if defined(__AVX512BF16__)
  bfloat16s.resize(blocks * kBlock);
  convert(floats.data(), bfloat16s.data(), blocks * kBlock);
#endif
  if (linear.rounds_by_block) by_block.fill(floats);
  if (linear.rounds_by_record) by_record.fill(floats);
}

void multiply(
    const Linear& linear, const float* input, int64_t stride, int64_t tokens, float* out,
    Scratch& scratch, int threads) {
  scratch.rows.resize(std::max<size_t>(scratch.rows.size(), tokens));
  InputRow* rows = scratch.rows.data();
  for (int64_t token = 0; token < tokens; ++token) rows[token].reserve(linear);
  run_tasks(tokens, threads, [&](int64_t token) {
    rows[token].fill(input + token * stride, linear);
  });
  scratch.low_rank.resize(tokens * linear.ranks);
  float* low_rank = scratch.low_rank.data();
  if (linear.down) run({*linear.down, rows, nullptr, tokens, low_rank}, threads);
  run({linear, rows, low_rank, tokens, out}, threads);
}

// Return layers without parts yet, or null without memory; `down` must live as long.
extern "C" Linear* pasta_new_linear(const Linear* down) { return new (std::nothrow) Linear{down}; }
extern "C" void pasta_free_linear(Linear* linear) { delete linear; }

// Put a part behind the others. up[O, R], bias[O]: or null.
extern "C" int pasta_add_part(
    Linear* linear, const FileMatrix* weights, const float* up, int64_t rank, const float* bias,
    int threads) {
  return status_of([&] {
    const int64_t outputs = weights->outputs, up_numbers = outputs * rank;
    Linear::Part part;
    part.weights = pack(*weights, threads);
    if (bias) part.bias.assign(bias, bias + outputs);
    part.rank = rank;
    part.first_rank = linear->ranks;
    part.first_output = linear->outputs;
    // Of the head only the outputs of control tokens have some, and they are the last ones.
    const int64_t zeros = std::find_if(up, up + up_numbers, [](float x) { return x != 0; }) - up;
    part.first_up_panel = zeros / (std::max<int64_t>(rank, 1) * kPanel);
    part.up.resize((part.weights.panels() - part.first_up_panel) * rank);
    for (int64_t output = part.first_up_panel * kPanel; output < outputs; ++output) {
      const int64_t panel = output / kPanel - part.first_up_panel;
      for (int64_t column = 0; column < rank; ++column)
        part.up[panel * rank + column][output % kPanel] = up[output * rank + column];
    }
    with_format(weights->type, [&](auto format) {
      if (!format.is_quantized) return;
      linear->rounds_by_block |= format.blocks == 1;
      linear->rounds_by_record |= format.blocks != 1;
    });
    linear->parts.push_back(std::move(part));
    linear->inputs = weights->inputs;
    linear->outputs += outputs;
    linear->ranks += rank;
  });
}

extern "C" int pasta_multiply(
    const Linear* linear, const float* input, float* out, int64_t tokens, int threads) {
  return status_of([&] {
    Scratch scratch;
    multiply(*linear, input, linear->inputs, tokens, out, scratch, threads);
  });
}
