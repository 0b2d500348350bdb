// Rows of a tensor as GGUF has them become a packed matrix, value by value.
//
// The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c. Levels are the whole
// numbers of four or eight bits; K formats have scales for 16 or 32 inputs under those of 256.

#include <type_traits>

#include "packed.h"

namespace {

enum Format { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q6_K = 14, BF16 = 30 };

struct Source {
  Format format;
  const uint8_t* rows;
  int64_t row_bytes, inputs;
};

template <typename T>
T read(const uint8_t* from) {
  T found;
  std::memcpy(&found, from, sizeof(T));
  return found;
}

void halves(const uint8_t* from, int8_t* levels) {
  for (int at = 0; at < 16; ++at) {
    levels[at] = static_cast<int8_t>(from[at] & 15);
    levels[16 + at] = static_cast<int8_t>(from[at] >> 4);
  }
}

// The levels of 32 inputs of a row.
void read_levels(Format kind, const uint8_t* row, int64_t block, int8_t* levels) {
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
void read_scales(Format kind, const uint8_t* row, int64_t block, uint16_t* scales) {
  const int64_t sizes[] = {0, 0, 18, 20, 0, 0, 22, 0, 34, 0, 0, 0, 144, 0, 210};
  const uint8_t* own = row + sizes[kind] * block + (kind == Q6_K ? 208 : 0);
  scales[0] = read<uint16_t>(own);
  if (kind == Q4_1) scales[kPanel] = read<uint16_t>(own + 2);
  if (kind == Q4_K) scales[kPanel] = read<uint16_t>(own + 2) ^ 0x8000;
}

// What multiplies the scale, and the minimum, of a group of inputs.
void read_factors(Format kind, const uint8_t* row, int64_t group, int8_t* factors) {
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

// One output's part of a packed block. Levels of six bits are 4 and 2, those of eight 4 and 4.
template <typename Kind>
void put_levels(const int8_t* levels, int64_t output, uint8_t* block) {
  uint8_t* own = block + 4 * output;
  for (int at = 0; at < kBlock; ++at) {
    const int level = levels[at] + (Kind::bits == 4 ? 0 : Kind::offset), quad = at / 4;
    const int64_t word = quad % 4 * 4 * kPanel + at % 4;
    own[word] |= static_cast<uint8_t>((level & 15) << quad / 4 * 4);
    if (Kind::bits == 6)
      own[(4 + quad / 4) * 4 * kPanel + at % 4] |= static_cast<uint8_t>(level >> 4 << quad % 4 * 2);
    if (Kind::bits == 8)
      own[16 * kPanel + word] |= static_cast<uint8_t>(level >> 4 << quad / 4 * 4);
  }
}

template <typename T>
void put_floats(const T* from, int64_t count, int64_t output, uint8_t* block) {
  constexpr int64_t together = 4 / sizeof(T);
  for (int64_t at = 0; at < kBlock; ++at)
    reinterpret_cast<T*>(block)[(at / together * kPanel + output) * together + at % together] =
        at < count ? from[at] : T{};
}

// A record of one output; `at` counts the blocks before it.
template <typename Kind>
void put_record(const Source& from, const uint8_t* row, int64_t at, int64_t output, uint8_t* to) {
  if constexpr (!Kind::whole) {
    using T = std::conditional_t<std::is_same_v<Kind, Floats>, float, uint16_t>;
    const int64_t first = at * kBlock;
    put_floats(reinterpret_cast<const T*>(row) + first, from.inputs - first, output, to);
  } else {
    for (int64_t block = 0; block < Kind::blocks; ++block) {
      int8_t levels[kBlock];
      read_levels(from.format, row, at + block, levels);
      put_levels<Kind>(levels, output, to + block * Kind::block_bytes);
    }
    auto* factors = reinterpret_cast<int8_t*>(to) + Kind::factors_at + output;
    for (int64_t group = 0; Kind::factors && group < Kind::blocks * Kind::groups; ++group)
      read_factors(
          from.format, row, at * Kind::groups + group, factors + group * Kind::numbers * kPanel);
    auto* scales = reinterpret_cast<uint16_t*>(to + Kind::scales_at) + output;
    read_scales(from.format, row, at / Kind::blocks, scales);
  }
}

template <typename Kind>
void pack_panel(const Matrix& to, const Source& from, int64_t panel) {
  std::memset(to.panel(panel), 0, to.records * Kind::bytes);
  for (int64_t output = 0; output < std::min(kPanel, to.outputs - panel * kPanel); ++output)
    for (int64_t record = 0; record < to.records; ++record)
      put_record<Kind>(
          from, from.rows + (panel * kPanel + output) * from.row_bytes, record * Kind::blocks,
          output, to.panel(panel) + record * Kind::bytes);
}

}  // namespace

// Return a matrix of `outputs` rows of `inputs` numbers; the caller gives it back to `pasta_free`.
extern "C" Matrix* pasta_pack(
    int64_t format, const uint8_t* rows, int64_t row_bytes, int64_t outputs, int64_t inputs,
    int threads) {
  const Source from{static_cast<Format>(format), rows, row_bytes, inputs};
  auto* to = new Matrix{format, outputs, 0, 0};
  with_kind(format, [&](auto kind) {
    using Kind = decltype(kind);
    constexpr int64_t width = Kind::blocks * kBlock;
    to->records = (inputs + width - 1) / width;
    to->record_bytes = Kind::bytes;
    const int64_t size = to->panels() * to->records * Kind::bytes;
    to->memory.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < to->panels(); ++panel) pack_panel<Kind>(*to, from, panel);
  });
  return to;
}

extern "C" void pasta_free(Matrix* matrix) { delete matrix; }
