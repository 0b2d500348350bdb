// Rows of a matrix as GGUF has them become a packed one, value by value.
//
// The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.

#include <sys/mman.h>

#include "packed.h"

namespace {

// The levels of four inputs of a record: four bits, and those above them where a format has more.
template <typename Kind>
uint32_t levels_of(const uint8_t* levels, int64_t at) {
  if (Kind::bits == 8) return load<uint32_t>(levels + at) ^ 0x80808080;
  constexpr int64_t half = Kind::blocks == 1 ? 16 : Kind::bits == 4 ? 32 : 64;  // low, then high
  const uint8_t* own = levels + at / (2 * half) * half + at % half;
  const uint32_t low = load<uint32_t>(own) >> at / half % 2 * 4 & 0x0f0f0f0f;
  if (Kind::bits == 4) return low;
  if (Kind::blocks == 1)  // a bit to each byte
    return low | ((levels[at / 8 - 4] >> at % 8 & 15) * 0x00204081 & 0x01010101) << 4;
  const auto two = load<uint32_t>(levels + 128 + at / 128 * 32 + at % 32);
  return low | (two >> at % 128 / 32 * 2 & 0x03030303) << 4;
}

// What multiplies the scale, and the minimum `kPanel` further, of a group of inputs.
template <typename Kind>
void put_factors(const uint8_t* record, int64_t group, uint8_t* to) {
  if (Kind::bits == 6) return void(to[0] = record[192 + group]);
  const uint8_t* own = record + 4 + group;  // eight of six bits, eight more, in 12 bytes
  to[0] = group < 4 ? own[0] & 63 : (own[4] & 15) | own[-4] >> 6 << 4;
  to[kPanel] = group < 4 ? own[4] & 63 : own[4] >> 4 | own[0] >> 6 << 4;
}

// A record's part of one output, where `to` has zeros.
template <typename Kind>
void put_whole(const uint8_t* record, int64_t output, uint8_t* to) {
  for (int64_t at = 0; at < Kind::blocks * kBlock; at += 4) {
    const uint32_t levels = levels_of<Kind>(record + Kind::file_levels, at);
    const int64_t quad = at % kBlock / 4;
    const uint32_t high = levels >> 4 & 0x0f0f0f0f;
    auto* words = reinterpret_cast<uint32_t*>(to + at / kBlock * Kind::block_bytes) + output;
    words[quad % 4 * kPanel] |= (levels & 0x0f0f0f0f) << quad / 4 * 4;
    if (Kind::bits == 6) words[(4 + quad / 4) * kPanel] |= high << quad % 4 * 2;
    if (Kind::bits == 8) words[(4 + quad % 4) * kPanel] |= high << quad / 4 * 4;
  }
  uint8_t* factors = to + Kind::factors_at + output;
  for (int64_t group = 0; Kind::factors && group < Kind::blocks * Kind::groups; ++group)
    put_factors<Kind>(record, group, factors + group * Kind::numbers * kPanel);
  auto* scales = reinterpret_cast<uint16_t*>(to + Kind::scales_at) + output;
  scales[0] = load<uint16_t>(record + Kind::file_scale);
  if (Kind::minimums)  // Q4_K subtracts it
    scales[kPanel] = load<uint16_t>(record + Kind::file_scale + 2) ^ (Kind::factors ? 0x8000 : 0);
}

template <typename T>
void put_floats(const T* from, int64_t count, int64_t output, T* to) {
  constexpr int64_t together = 4 / sizeof(T);
  for (int64_t at = 0; at < std::min(count, kBlock); ++at)
    to[(at / together * kPanel + output) * together + at % together] = from[at];
}

// A step reads all weights. With pages of 4 kB a fifth of its time goes into finding addresses.
uint8_t* allocated(int64_t size) {
  constexpr int64_t page = 2 << 20;
  void* memory = nullptr;
  if (posix_memalign(&memory, size < page ? 64 : page, size)) std::abort();
#if defined(MADV_HUGEPAGE)
  madvise(memory, size / page * page, MADV_HUGEPAGE);
#endif
  return static_cast<uint8_t*>(memory);
}

}  // namespace

Matrix pack(const Rows& from, int threads) {
  Matrix to{from.kind, from.outputs};
  with_kind(from.kind, [&](auto kind) {
    using Kind = decltype(kind);
    constexpr int64_t width = Kind::blocks * kBlock;
    to.records = (from.inputs + width - 1) / width;
    to.record_bytes = Kind::bytes;
    to.memory.reset(allocated(to.panels() * to.records * Kind::bytes));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < to.panels(); ++panel) {
      std::memset(to.panel(panel), 0, to.records * Kind::bytes);
      const int64_t end = std::min((panel + 1) * kPanel, to.outputs);
      for (int64_t record = 0; record < to.records; ++record)
        for (int64_t output = panel * kPanel; output < end; ++output) {
          const uint8_t* row = from.rows + output * from.row_bytes;
          uint8_t* own = to.panel(panel) + record * Kind::bytes;
          if constexpr (Kind::whole) {
            put_whole<Kind>(row + record * Kind::file_bytes, output % kPanel, own);
          } else {
            using T = typename Kind::Number;
            const T* inputs = reinterpret_cast<const T*>(row) + record * kBlock;
            const int64_t count = from.inputs - record * kBlock;
            put_floats(inputs, count, output % kPanel, reinterpret_cast<T*>(own));
          }
        }
    }
  });
  return to;
}
