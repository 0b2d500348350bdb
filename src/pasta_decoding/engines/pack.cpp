// Rows of a matrix as a file has them become a packed one, value by value; formats.h shows both.

#include <sys/mman.h>

#include <new>

#include "matrix.h"

namespace {

// Put one output's record of a file into a packed one, where its place holds zeros.
template <typename Format>
void put_quantized(const uint8_t* from, int64_t output, uint8_t* to) {
  const auto& file = *reinterpret_cast<const typename Format::File*>(from);
  for (int64_t input = 0; input < Format::blocks * kBlock; input += 4) {
    const uint32_t levels = file.quad(input);
    const uint32_t low = levels & 0x0f0f0f0f, high = levels >> 4 & 0x0f0f0f0f;
    const int64_t block = input / kBlock, quad = input % kBlock / 4;
    auto* words = reinterpret_cast<uint32_t*>(to + block * Format::block_bytes) + output;
    words[quad % 4 * kPanel] |= low << quad / 4 * 4;
    if (Format::bits == 6) words[(4 + quad / 4) * kPanel] |= high << quad % 4 * 2;
    if (Format::bits == 8) words[(4 + quad % 4) * kPanel] |= high << quad / 4 * 4;
  }
  uint8_t* factors = to + Format::factors_at + output;
  if constexpr (Format::has_factors)
    for (int64_t number = 0; number < Format::File::factors; ++number) {
      uint8_t* row = factors + number * Format::factor_rows * kPanel;
      row[0] = file.factor(number);
      if constexpr (Format::has_minimums) row[kPanel] = file.minimum_factor(number);
    }
  reinterpret_cast<uint16_t*>(to + Format::scales_at)[output] = file.scale;
  if constexpr (Format::has_minimums)
    reinterpret_cast<uint16_t*>(to + Format::minimums_at)[output] = file.added_minimum();
}

// Put up to a block of one output's inputs into a packed record of floats.
template <typename Format, typename Number = typename Format::Number>
void put_floats(const Number* from, int64_t inputs, int64_t output, Number* to) {
  constexpr int64_t together = kBlock / Format::rows;  // inputs in a row
  for (int64_t input = 0; input < std::min(inputs, kBlock); ++input)
    to[(input / together * kPanel + output) * together + input % together] = from[input];
}

// A step reads all weights. With pages of 4 kB a fifth of its time goes into finding addresses.
uint8_t* allocate(int64_t bytes) {
  constexpr int64_t large_page = 2 << 20;
  void* memory = nullptr;
  if (posix_memalign(&memory, bytes < large_page ? 64 : large_page, bytes)) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes / large_page * large_page, MADV_HUGEPAGE);
#endif
  return static_cast<uint8_t*>(memory);
}

}  // namespace

Matrix pack(const FileMatrix& from, int threads) {
  Matrix to{from.type, from.outputs};
  with_format(from.type, [&](auto format) {
    using Format = decltype(format);
    constexpr int64_t record_inputs = Format::blocks * kBlock;
    to.records = (from.inputs + record_inputs - 1) / record_inputs;
    to.record_bytes = Format::bytes;
    to.memory.reset(allocate(to.panels() * to.records * Format::bytes));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < to.panels(); ++panel) {
      std::memset(to.panel(panel), 0, to.records * Format::bytes);
      const int64_t first = panel * kPanel, end = std::min(first + kPanel, to.outputs);
      for (int64_t number = 0; number < to.records; ++number) {
        uint8_t* record = to.panel(panel) + number * Format::bytes;
        for (int64_t output = first; output < end; ++output) {
          const uint8_t* row = from.rows + output * from.row_bytes;
          if constexpr (Format::is_quantized) {
            using File = typename Format::File;
            put_quantized<Format>(row + number * sizeof(File), output - first, record);
          } else {
            using Number = typename Format::Number;
            const Number* inputs = reinterpret_cast<const Number*>(row) + number * kBlock;
            const int64_t inputs_left = from.inputs - number * kBlock;
            put_floats<Format>(inputs, inputs_left, output - first, reinterpret_cast<Number*>(record));
          }
        }
      }
    }
  });
  return to;
}
