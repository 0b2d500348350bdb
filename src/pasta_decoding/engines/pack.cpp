// Rows of a tensor as GGUF has them become a packed matrix, value by value.
//
// The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c. Levels are the whole
// numbers of four or eight bits; K formats have scales for 16 or 32 inputs under those of 256.

#include "packed.h"

namespace {

enum Kind { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q6_K = 14, BF16 = 30 };

struct Source {
  Kind kind;
  const uint8_t* rows;
  int64_t row_bytes, inputs;
};

template <typename T>
T read(const uint8_t* from) {
  T found;
  std::memcpy(&found, from, sizeof(T));
  return found;
}

uint16_t times_minus_eight(uint16_t number) {  // of float16, exactly
  const float size = std::abs(from_float16(number)) * 8 * 0x1p-112f;
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, size) >> 13 | (~number & 0x8000));
}

void halves(const uint8_t* from, int8_t* levels) {
  for (int at = 0; at < 16; ++at) {
    levels[at] = static_cast<int8_t>(from[at] & 15);
    levels[16 + at] = static_cast<int8_t>(from[at] >> 4);
  }
}

// The levels of 32 inputs of a row.
void read_levels(Kind kind, const uint8_t* row, int64_t block, int8_t* levels) {
  const int64_t super = block / 8, part = block % 8;
  if (kind == Q4_0) halves(row + 18 * block + 2, levels);
  if (kind == Q4_1) halves(row + 20 * block + 4, levels);
  if (kind == Q8_0) std::memcpy(levels, row + 34 * block + 2, 32);
  if (kind == Q5_0) {
    const uint8_t* own = row + 22 * block;
    halves(own + 6, levels);
    const auto fifth = read<uint32_t>(own + 2);
    for (int at = 0; at < 32; ++at)
      levels[at] = static_cast<int8_t>((levels[at] | (fifth >> at & 1) << 4) - 16);
  }
  if (kind == Q4_K) {
    const uint8_t* own = row + 144 * super + 16 + 32 * (part / 2);
    for (int at = 0; at < 32; ++at)
      levels[at] = static_cast<int8_t>(part % 2 ? own[at] >> 4 : own[at] & 15);
  }
  if (kind == Q6_K) {
    const uint8_t *own = row + 210 * super, *low = own + 64 * (part / 4) + 32 * (part % 2),
                  *high = own + 128 + 32 * (part / 4);
    for (int at = 0; at < 32; ++at) {
      const int four = part % 4 < 2 ? low[at] & 15 : low[at] >> 4;
      levels[at] = static_cast<int8_t>((four | (high[at] >> 2 * (part % 4) & 3) << 4) - 32);
    }
  }
}

// The scale of one output, and the minimum behind it, `kPanel` numbers further.
void read_scales(Kind kind, const uint8_t* row, int64_t block, uint16_t* scales) {
  const int64_t sizes[] = {0, 0, 18, 20, 0, 0, 22, 0, 34, 0, 0, 0, 144, 0, 210};
  const uint8_t* own = row + sizes[kind] * block + (kind == Q6_K ? 208 : 0);
  scales[0] = read<uint16_t>(own);
  if (kind == Q4_0) scales[kPanel] = times_minus_eight(scales[0]);
  if (kind == Q4_1) scales[kPanel] = read<uint16_t>(own + 2);
  if (kind == Q4_K) scales[kPanel] = read<uint16_t>(own + 2) ^ 0x8000;
}

// What multiplies the scale, and the minimum, of a group of inputs.
void read_factors(Kind kind, const uint8_t* row, int64_t group, int8_t* factors) {
  if (kind == Q6_K) {
    factors[0] = static_cast<int8_t>(row[210 * (group / 16) + 192 + group % 16]);
    return;
  }
  const uint8_t* own = row + 144 * (group / 8) + 4;  // eight of six bits, eight more, in 12 bytes
  const int64_t at = group % 8;
  const int scale = at < 4 ? own[at] & 63 : (own[at + 4] & 15) | own[at - 4] >> 6 << 4;
  const int minimum = at < 4 ? own[at + 4] & 63 : own[at + 4] >> 4 | own[at] >> 6 << 4;
  factors[0] = static_cast<int8_t>(scale);
  factors[kPanel] = static_cast<int8_t>(minimum);
}

// One output's part of a packed block.
void put_levels(int64_t bits, const int8_t* levels, int64_t output, uint8_t* block) {
  for (int64_t at = 0; bits == 8 && at < kBlock; ++at)
    block[at / 2 * 2 * kPanel + 2 * output + at % 2] = static_cast<uint8_t>(levels[at]);
  for (int64_t quarter = 0; bits == 4 && quarter < 4; ++quarter) {
    uint32_t word = 0;
    for (int64_t at = 0; at < 8; ++at)
      word |= static_cast<uint32_t>(levels[8 * quarter + at]) << (4 * (at / 2) + 16 * (at % 2));
    std::memcpy(block + 4 * (quarter * kPanel + output), &word, 4);
  }
}

template <typename T>
void put_floats(const T* from, int64_t count, int64_t together, int64_t output, uint8_t* block) {
  for (int64_t at = 0; at < kBlock; ++at)
    reinterpret_cast<T*>(block)[(at / together * kPanel + output) * together + at % together] =
        at < count ? from[at] : T{};
}

void pack_panel(const Matrix& to, const Source& from, int64_t panel) {
  const int64_t numbers = to.numbers() * kPanel, supers = to.blocks / std::max<int64_t>(to.scale_blocks, 1);
  for (int64_t output = 0; output < std::min(kPanel, to.outputs - panel * kPanel); ++output) {
    const uint8_t* row = from.rows + (panel * kPanel + output) * from.row_bytes;
    for (int64_t block = 0; block < to.blocks; ++block) {
      auto* own = const_cast<uint8_t*>(to.weights) + (panel * to.blocks + block) * to.block_bytes();
      const int64_t at = block * kBlock, count = from.inputs - at;
      int8_t levels[kBlock];
      if (from.kind == F32) {
        put_floats(reinterpret_cast<const float*>(row) + at, count, 1, output, own);
      } else if (from.kind == BF16) {
        put_floats(reinterpret_cast<const uint16_t*>(row) + at, count, 2, output, own);
      } else {
        read_levels(from.kind, row, block, levels);
        put_levels(to.bits, levels, output, own);
      }
    }
    for (int64_t super = 0; to.scales && super < supers; ++super)
      read_scales(
          from.kind, row, super,
          const_cast<uint16_t*>(to.scales) + (panel * supers + super) * numbers + output);
    for (int64_t group = 0; to.factors && group < to.blocks * to.groups; ++group)
      read_factors(
          from.kind, row, group,
          const_cast<int8_t*>(to.factors) + (panel * to.blocks * to.groups + group) * numbers + output);
  }
}

}  // namespace

// Fill the memory of `to`, which is zero, from rows of `inputs` numbers.
extern "C" void pasta_pack(
    const Matrix* to, int64_t kind, const uint8_t* rows, int64_t row_bytes, int64_t inputs,
    int threads) {
  const Source from{static_cast<Kind>(kind), rows, row_bytes, inputs};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < to->panels(); ++panel) pack_panel(*to, from, panel);
}
