// The formats of weights: their records in a GGUF file, and how they are packed.
//
// A file has a matrix row by row, an output each; a row is a line of records. A record holds one
// block of 32 inputs or, in K formats, eight blocks. Packed, kPanel outputs (as many as a vector
// has floats) make a panel; a panel is a line of packed records, and a packed record is the same
// blocks of all its outputs. Outputs and inputs that are missing in the last ones are zeros.
//
// Weights of four to eight bits are levels, whole numbers from 0 on:
//
//   weight = scale * factor * (level - offset) + minimum * minimum_factor
//
// Scales and minimums are float16, one of each for an output of a record. Factors are integers of
// eight bits, one for an output of a group of inputs; where a format has none they are 1.

#pragma once

#include "vec.h"

constexpr int64_t kPanel = kWidth;
constexpr int64_t kBlock = 32;

// Numbers of formats in files: enum ggml_type of
// https://github.com/ggml-org/ggml/blob/master/include/ggml.h
enum GgmlType : int64_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12,
  kQ5_K = 13, kQ6_K = 14, kBF16 = 30
};

// --- records of a file: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h -----------
//
// Each struct is a record of one output, and has:
//   blocks         of 32 inputs in a record
//   bits           of a packed level; 5 are packed as 6
//   offset         subtracted from levels
//   factors        in a record, one for each of as many groups of inputs; 0: none
//   has_minimums   whether a minimum is added
//   quad(input)    the levels of four inputs from `input` on, a byte each; `input` is a multiple of
//                  four, counted within the record

// Levels of four bits in runs: the low halves of `run` bytes are as many inputs, their high halves
// the inputs that follow.
template <int64_t run>
uint32_t quad_of_nibbles(const uint8_t* bytes, int64_t input) {
  const uint8_t* own = bytes + input / (2 * run) * run + input % run;
  const bool is_high = input / run % 2;
  return load<uint32_t>(own) >> (is_high ? 4 : 0) & 0x0f0f0f0f;
}

// byte  0       2                                          18
//       | scale | low half: inputs 0-15; high half: 16-31  |
struct __attribute__((packed)) Q4_0 {
  uint16_t scale;
  uint8_t nibbles[16];

  static constexpr GgmlType type = kQ4_0;
  static constexpr int64_t blocks = 1;
  static constexpr int bits = 4, offset = 8;
  static constexpr int64_t factors = 0;
  static constexpr bool has_minimums = false;

  uint32_t quad(int64_t input) const { return quad_of_nibbles<16>(nibbles, input); }
};
static_assert(sizeof(Q4_0) == 18, "as in files");

// byte  0       2         4                                          20
//       | scale | minimum | low half: inputs 0-15; high half: 16-31  |
struct __attribute__((packed)) Q4_1 {
  uint16_t scale, minimum;
  uint8_t nibbles[16];

  static constexpr GgmlType type = kQ4_1;
  static constexpr int64_t blocks = 1;
  static constexpr int bits = 4, offset = 0;
  static constexpr int64_t factors = 0;
  static constexpr bool has_minimums = true;

  uint32_t quad(int64_t input) const { return quad_of_nibbles<16>(nibbles, input); }
  uint16_t added_minimum() const { return minimum; }
};
static_assert(sizeof(Q4_1) == 20, "as in files");

// Bits 4 of the levels of a quad, where a block has a bit for each input.
inline uint32_t quad_of_fifth_bits(const uint8_t* bits, int64_t input) {
  const uint32_t four_bits = bits[input / 8] >> input % 8 & 15;
  const uint32_t a_bit_a_byte = four_bits * 0x00204081 & 0x01010101;
  return a_bit_a_byte << 4;
}

// byte  0       2                             6                                          22
//       | scale | bit 4 of inputs 0-31, a bit | low half: inputs 0-15; high half: 16-31  |
struct __attribute__((packed)) Q5_0 {
  uint16_t scale;
  uint8_t fifth_bits[4];
  uint8_t nibbles[16];

  static constexpr GgmlType type = kQ5_0;
  static constexpr int64_t blocks = 1;
  static constexpr int bits = 6, offset = 16;
  static constexpr int64_t factors = 0;
  static constexpr bool has_minimums = false;

  uint32_t quad(int64_t input) const {
    return quad_of_nibbles<16>(nibbles, input) | quad_of_fifth_bits(fifth_bits, input);
  }
};
static_assert(sizeof(Q5_0) == 22, "as in files");

// byte  0       2         4                             8                24
//       | scale | minimum | bit 4 of inputs 0-31, a bit | nibbles: Q5_0's |
struct __attribute__((packed)) Q5_1 {
  uint16_t scale, minimum;
  uint8_t fifth_bits[4];
  uint8_t nibbles[16];

  static constexpr GgmlType type = kQ5_1;
  static constexpr int64_t blocks = 1;
  static constexpr int bits = 6, offset = 0;
  static constexpr int64_t factors = 0;
  static constexpr bool has_minimums = true;

  uint32_t quad(int64_t input) const {
    return quad_of_nibbles<16>(nibbles, input) | quad_of_fifth_bits(fifth_bits, input);
  }
  uint16_t added_minimum() const { return minimum; }
};
static_assert(sizeof(Q5_1) == 24, "as in files");

// byte  0       2                     34
//       | scale | int8 of inputs 0-31 |
struct __attribute__((packed)) Q8_0 {
  uint16_t scale;
  uint8_t int8s[32];

  static constexpr GgmlType type = kQ8_0;
  static constexpr int64_t blocks = 1;
  static constexpr int bits = 8, offset = 128;
  static constexpr int64_t factors = 0;
  static constexpr bool has_minimums = false;

  uint32_t quad(int64_t input) const {  // a level is 128 more than the number
    return load<uint32_t>(int8s + input) ^ 0x80808080;
  }
};
static_assert(sizeof(Q8_0) == 34, "as in files");

// Factors and minimum factors of eight blocks, of six bits each. Byte b of a row, b = 0 to 3:
//
//   factors           bits 0-5: factor b;             6-7: bits 4-5 of factor 4 + b
//   minimum_factors   bits 0-5: minimum factor b;     6-7: bits 4-5 of minimum factor 4 + b
//   low_bits          bits 0-3: of factor 4 + b;      4-7: bits 0-3 of minimum factor 4 + b
struct BlockFactors {
  uint8_t factors[4], minimum_factors[4], low_bits[4];

  uint8_t factor(int64_t block) const {
    if (block < 4) return factors[block] & 63;
    return (low_bits[block - 4] & 15) | factors[block - 4] >> 6 << 4;
  }
  uint8_t minimum_factor(int64_t block) const {
    if (block < 4) return minimum_factors[block] & 63;
    return low_bits[block - 4] >> 4 | minimum_factors[block - 4] >> 6 << 4;
  }
};

// byte  0       2         4          16                                     144
//       | scale | minimum | factors  | four times 32 bytes for 64 inputs:   |
//                                    | low half: the first 32; high half:   |
//                                    | the other 32                         |
struct __attribute__((packed)) Q4_K {
  uint16_t scale, minimum;
  BlockFactors block_factors;
  uint8_t nibbles[128];

  static constexpr GgmlType type = kQ4_K;
  static constexpr int64_t blocks = 8;
  static constexpr int bits = 4, offset = 0;
  static constexpr int64_t factors = 8;
  static constexpr bool has_minimums = true;

  uint32_t quad(int64_t input) const { return quad_of_nibbles<32>(nibbles, input); }
  uint8_t factor(int64_t block) const { return block_factors.factor(block); }
  uint8_t minimum_factor(int64_t block) const { return block_factors.minimum_factor(block); }
  uint16_t added_minimum() const { return minimum ^ 0x8000; }  // the file's is subtracted
};
static_assert(sizeof(Q4_K) == 144, "as in files");

// byte  0       2         4          16                         48                  176
//       | scale | minimum | factors  | bit b of byte i: bit 4   | nibbles as in     |
//                                    | of input i of block b    | Q4_K              |
struct __attribute__((packed)) Q5_K {
  uint16_t scale, minimum;
  BlockFactors block_factors;
  uint8_t fifth_bits[32];
  uint8_t nibbles[128];

  static constexpr GgmlType type = kQ5_K;
  static constexpr int64_t blocks = 8;
  static constexpr int bits = 6, offset = 0;
  static constexpr int64_t factors = 8;
  static constexpr bool has_minimums = true;

  uint32_t quad(int64_t input) const {
    const auto four_bytes = load<uint32_t>(fifth_bits + input % kBlock);
    const uint32_t a_bit_a_byte = four_bytes >> input / kBlock & 0x01010101;
    return quad_of_nibbles<32>(nibbles, input) | a_bit_a_byte << 4;
  }
  uint8_t factor(int64_t block) const { return block_factors.factor(block); }
  uint8_t minimum_factor(int64_t block) const { return block_factors.minimum_factor(block); }
  uint16_t added_minimum() const { return minimum ^ 0x8000; }  // the file's is subtracted
};
static_assert(sizeof(Q5_K) == 176, "as in files");

// byte  0                           128                       192                    208     210
//       | twice 64 bytes for 128    | twice 32 bytes for 128  | factors: int8 of     | scale |
//       | inputs: low half: the     | inputs: bits 0-1 of a   | 16 groups of 16      |
//       | first 64; high half: the  | byte are bits 4-5 of    | inputs               |
//       | other 64                  | one of the first 32,    |
//                                   | bits 2-3 of the next 32 |
struct __attribute__((packed)) Q6_K {
  uint8_t nibbles[128];
  uint8_t high_bits[64];
  uint8_t group_factors[16];
  uint16_t scale;

  static constexpr GgmlType type = kQ6_K;
  static constexpr int64_t blocks = 8;
  static constexpr int bits = 6, offset = 32;
  static constexpr int64_t factors = 16;
  static constexpr bool has_minimums = false;

  uint32_t quad(int64_t input) const {
    const auto four_bytes = load<uint32_t>(high_bits + input / 128 * 32 + input % 32);
    const uint32_t two_bits_a_byte = four_bytes >> input % 128 / 32 * 2 & 0x03030303;
    return quad_of_nibbles<64>(nibbles, input) | two_bits_a_byte << 4;
  }
  uint8_t factor(int64_t group) const { return group_factors[group]; }
};
static_assert(sizeof(Q6_K) == 210, "as in files");

// --- packed records -----------------------------------------------------------------------------
//
// A quad is four inputs beside each other, so a block has quads 0 to 7. In a packed record, which
// begins with its blocks, every row below has kPanel members, one an output.
//
//   | block 0 | block 1 ... | rows of factors, int8 | row of scales, float16 | row of minimums |
//
// Rows of factors: for each group of inputs its factors and, if there are, its minimum factors.
//
// A block, in rows of 32-bit words, whose byte i is of input i of a quad:
//
//   bits   row              bits 0-3 of a byte          bits 4-7
//   4      0 to 3           quad `row`                  quad `row` + 4
//   6      0 to 3           the same, of bits 0-3 of the levels
//          4, 5             bits 4-5 of the levels of quads 0-3, or 4-7: two bits a quad
//   8      0 to 3           the same, of bits 0-3 of the levels: the low digits
//          4 to 7           the same, of bits 4-7: the high digits
//
// A group is a block (4 bits), 16 inputs (6 bits), or one of a block's digits (8 bits), where the
// factor is 1 for the low digits and 16 for the high ones. Both groups of a block may have one
// factor, as in Q5_K.
template <typename FileRecord>
struct Quantized {
  using File = FileRecord;
  static constexpr bool is_quantized = true;
  static constexpr GgmlType type = File::type;
  static constexpr int64_t blocks = File::blocks;
  static constexpr int bits = File::bits;
  static constexpr bool has_factors = File::factors > 0, has_minimums = File::has_minimums;

  static constexpr int64_t word_row_bytes = 4 * kPanel;
  static constexpr int groups = bits == 4 ? 1 : 2;  // of a block
  static constexpr int quads = bits == 6 ? 4 : 8;   // of a group
  static constexpr int64_t factor_rows = has_minimums ? 2 : 1;  // for a factor
  static constexpr int64_t block_factors = File::factors / blocks;
  static constexpr int64_t block_bytes = bits * word_row_bytes;
  static constexpr int64_t factors_at = blocks * block_bytes;
  static constexpr int64_t scales_at = factors_at + File::factors * factor_rows * kPanel;
  static constexpr int64_t minimums_at = scales_at + 2 * kPanel;
  static constexpr int64_t bytes = minimums_at + (has_minimums ? 2 * kPanel : 0);

  // Of the levels in a group: of eight bits the high digits alone are offset.
  static constexpr int offset(int group) {
    if (bits != 8) return File::offset;
    return group ? File::offset / 16 : 0;
  }

  // The levels of a quad of a block (bits == 8: those of the digits that are the group).
  static Ints levels(const uint8_t* block, int group, int quad) {
    const int row = (bits == 8 ? 4 * group : 0) + quad % 4;
    const Ints word = load<Ints>(block + row * word_row_bytes);
    const Ints low = (quad < 4 ? word : word >> 4) & 0x0f0f0f0f;
    if constexpr (bits != 6) return low;
    const Ints high = load<Ints>(block + (4 + quad / 4) * word_row_bytes);
    const int up = 4 - quad % 4 * 2;
    return low | ((up < 0 ? high >> -up : high << up) & 0x30303030);
  }

  // What the levels of a group are multiplied by.
  static Ints factors(const uint8_t* record, int64_t block, int group) {
    if constexpr (has_factors) {
      const int64_t row = (block * block_factors + group * block_factors / groups) * factor_rows;
      return from_int8s(record + factors_at + row * kPanel);
    }
    return (bits == 8 && group ? 16 : 1) - Ints{};
  }
  static Ints minimum_factors(const uint8_t* record, int64_t block) {
    if constexpr (has_factors)
      return from_int8s(record + factors_at + (block * block_factors * factor_rows + 1) * kPanel);
    return 1 - Ints{};
  }
};

// Weights in float32: a row of floats for each input, which are multiplied as they are.
struct Float32 {
  static constexpr bool is_quantized = false;
  static constexpr bool rounds_inputs = false;
  static constexpr GgmlType type = kF32;
  using Number = float;
  using Input = float;
  static constexpr int64_t blocks = 1;
  static constexpr int64_t row_bytes = 4 * kPanel;
  static constexpr int64_t rows = kBlock, bytes = rows * row_bytes;

  static void add(Vec& sum, const uint8_t* row, Input input) { sum += load(row) * input; }
};

// Weights in float16: a row of them for each input, which are multiplied as they are.
struct Float16 {
  static constexpr bool is_quantized = false;
  static constexpr bool rounds_inputs = false;
  static constexpr GgmlType type = kF16;
  using Number = uint16_t;
  using Input = float;
  static constexpr int64_t blocks = 1;
  static constexpr int64_t row_bytes = 2 * kPanel;
  static constexpr int64_t rows = kBlock, bytes = rows * row_bytes;

  static void add(Vec& sum, const uint8_t* row, Input input) { sum += from_float16s(row) * input; }
};

// Weights in bfloat16: a row of pairs for each two inputs. They are rounded to bfloat16 where the
// processor multiplies such numbers, else they are as they are.
struct BFloat16 {
  static constexpr bool is_quantized = false;
  static constexpr GgmlType type = kBF16;
  using Number = uint16_t;
  static constexpr int64_t blocks = 1;
  static constexpr int64_t row_bytes = 4 * kPanel;
  static constexpr int64_t rows = kBlock / 2, bytes = rows * row_bytes;
#if defined(__AVX512BF16__)
  using Input = uint32_t;  // two bfloat16
  static constexpr bool rounds_inputs = true;

  static void add(Vec& sum, const uint8_t* row, Input pair) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)load<Ints>(row), (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  struct Input {
    float first, second;
  };
  static constexpr bool rounds_inputs = false;

  static void add(Vec& sum, const uint8_t* row, Input pair) {
    const Ints weights = load<Ints>(row);
    sum += (Vec)(weights << 16) * pair.first;
    sum += (Vec)(weights & ~0xffff) * pair.second;
  }
#endif
};

// Call `work` with the format of that number; do nothing if it is none of these.
template <typename Work>
void with_format(int64_t type, const Work& work) {
  switch (type) {
    case kF32: return work(Float32{});
    case kF16: return work(Float16{});
    case kBF16: return work(BFloat16{});
    case kQ4_0: return work(Quantized<Q4_0>{});
    case kQ4_1: return work(Quantized<Q4_1>{});
    case kQ5_0: return work(Quantized<Q5_0>{});
    case kQ5_1: return work(Quantized<Q5_1>{});
    case kQ8_0: return work(Quantized<Q8_0>{});
    case kQ4_K: return work(Quantized<Q4_K>{});
    case kQ5_K: return work(Quantized<Q5_K>{});
    case kQ6_K: return work(Quantized<Q6_K>{});
  }
}
