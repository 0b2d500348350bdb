// Packed weights: what they look like, and what multiplies them.
//
// As many outputs as a vector has numbers make a panel, 32 inputs a block. A panel is a row of
// records, of one block or, in K formats, eight. A record has the weights of its blocks; factors,
// one for a group of inputs of each output; and float16 scales, by which the factors are
// multiplied. Behind factors and scales are those of the minimums, if the kind has them.
//
// The values of weights: scale * factor * (level - offset) + minimum.

#pragma once

#include <cstdlib>
#include <memory>

#include "vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int64_t kPanel = kWidth;
constexpr int64_t kBlock = 32;

// A matrix [O, I] as a GGUF file has it; `kind` is the file's number for its format.
struct Rows {
  const uint8_t* rows;
  int64_t kind, row_bytes, outputs, inputs;
};

// The same, packed.
struct Matrix {
  int64_t kind = 0, outputs = 0, record_bytes = 0, records = 0;  // records of a panel
  std::unique_ptr<uint8_t, decltype(&std::free)> memory{nullptr, std::free};

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  uint8_t* panel(int64_t number) const {
    return memory.get() + number * records * record_bytes;
  }
};

Matrix pack(const Rows& from, int threads);

// Numbers of 8 and 16 bits, made wider by hand: compilers go one by one.
inline Ints from_bytes(const uint8_t* from) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}
inline Vec from_float16s(const uint8_t* from) {  // of finite ones
#if defined(__AVX512BW__)
  return (Vec)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(load<__m128i>(from));
#else
  float numbers[kWidth];
  for (int at = 0; at < kWidth; ++at) {
    const int number = load<uint16_t>(from + 2 * at);
    numbers[at] = from_bits((number & 0x7fff) << 13) * (number >> 15 ? -0x1p112f : 0x1p112f);
  }
  return load(numbers);
#endif
}

// Whole numbers of 4, 6 or 8 bits (5 are stored as 6). A word has one output's levels of a quad:
// four inputs beside each other. Its bits 0 to 3 are those of quad q, bits 4 to 7 those of quad
// q + 4. Bits 4 and 5 of six are in a word for four quads. Levels of 8 bits are two digits of four.
// In a file a record takes `file_bytes`, with its levels and its scale where the last two say.
template <
    int bits_, int64_t blocks_, bool factors_, bool minimums_, int offset_, int64_t file_bytes_,
    int64_t file_levels_, int64_t file_scale_>
struct Whole {
  static constexpr bool whole = true, factors = factors_, minimums = minimums_;
  static constexpr int bits = bits_, offset = offset_;
  static constexpr int64_t blocks = blocks_, file_bytes = file_bytes_, file_levels = file_levels_,
                           file_scale = file_scale_;
  static constexpr int groups = bits == 4 ? 1 : 2;  // of a block: halves of six bits, digits of 8
  static constexpr int64_t numbers = minimums ? 2 : 1;
  static constexpr int64_t block_bytes = kPanel * kBlock * bits / 8;
  static constexpr int64_t factors_at = blocks * block_bytes;
  static constexpr int64_t scales_at =
      factors_at + (factors ? blocks * groups * numbers * kPanel : 0);
  static constexpr int64_t bytes = scales_at + numbers * kPanel * 2;

  static Ints levels(const uint8_t* block, int group, int quad) {
    const int digit = bits == 8 ? group : 0;
    const Ints word = load<Ints>(block + (digit * 4 + quad % 4) * 4 * kPanel);
    const Ints low = (quad < 4 ? word : word >> 4) & 0x0f0f0f0f;
    if constexpr (bits != 6) return low;
    const Ints two = load<Ints>(block + (4 + quad / 4) * 4 * kPanel);
    const int up = 4 - quad % 4 * 2;
    return low | ((up < 0 ? two >> -up : two << up) & 0x30303030);
  }
};

// Weights of 32 bits times inputs as they are.
struct Floats {
  static constexpr bool whole = false, rounded = false;
  using Input = float;
  using Number = float;
  static constexpr int64_t blocks = 1, steps = kBlock, bytes = 4 * kPanel * kBlock;

  static void add(Vec& sum, const uint8_t* record, int64_t step, Input input) {
    sum += load(record + 4 * step * kPanel) * input;
  }
};

// Weights of 16 bits, times two inputs at a time: rounded to bfloat16 where the processor
// multiplies such numbers, else as they are.
struct Bfloats {
  static constexpr bool whole = false;
  using Number = uint16_t;
  static constexpr int64_t blocks = 1, steps = kBlock / 2, bytes = 2 * kPanel * kBlock;
#if defined(__AVX512BF16__)
  using Input = uint32_t;
  static constexpr bool rounded = true;
  static void add(Vec& sum, const uint8_t* record, int64_t step, Input input) {
    sum = _mm512_dpbf16_ps(
        sum, (__m512bh)load<Ints>(record + 4 * step * kPanel), (__m512bh)_mm512_set1_epi32(input));
  }
#else
  struct Input {
    float first, second;
  };
  static constexpr bool rounded = false;
  static void add(Vec& sum, const uint8_t* record, int64_t step, Input input) {
    const Ints weights = load<Ints>(record + 4 * step * kPanel);
    sum += (Vec)(weights << 16) * input.first;
    sum += (Vec)(weights & ~0xffff) * input.second;
  }
#endif
};

// Calls work with the kind of a GGUF file's number, if there is one for it.
template <typename Work>
void with_kind(int64_t number, const Work& work) {
  switch (number) {
    case 0: return work(Floats{});
    case 30: return work(Bfloats{});
    case 2: return work(Whole<4, 1, false, false, 8, 18, 2, 0>{});    // Q4_0
    case 3: return work(Whole<4, 1, false, true, 0, 20, 4, 0>{});     // Q4_1
    case 6: return work(Whole<6, 1, false, false, 16, 22, 6, 0>{});   // Q5_0
    case 8: return work(Whole<8, 1, false, false, 128, 34, 2, 0>{});  // Q8_0
    case 12: return work(Whole<4, 8, true, true, 0, 144, 16, 0>{});   // Q4_K
    case 14: return work(Whole<6, 8, true, false, 32, 210, 0, 208>{});  // Q6_K
  }
}
