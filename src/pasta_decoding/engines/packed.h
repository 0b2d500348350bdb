// Packed weights: what they look like, and what multiplies them.
//
// 16 outputs make a panel, 32 inputs a block. A block of a panel holds, of 32 bits, the weights input
// by input, 16 outputs each; else pairs of inputs, of each output the two beside each other. Those
// of four bits have 32 bits for eight inputs of an output, the even ones in the low half.

#pragma once

#include "vec.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define PASTA_BFLOAT16 1
#endif

constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 32;
constexpr int64_t kLanes = kPanel / kWidth;

// A matrix [O, I], packed by engines/packed.py.
struct Matrix {
  const uint8_t* weights;  // [P, B, bytes of a block]
  const uint16_t* scales;  // float16 [P, B / scale_blocks, 1 or 2, 16], a minimum behind each; or null
  const int8_t* factors;   // [P, B * groups, 1 or 2, 16], which multiply the scales; or null
  int64_t bits, outputs, blocks, scale_blocks, groups;  // groups of inputs, in a block, with a factor

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t block_bytes() const { return kPanel * kBlock * bits / 8; }
  int64_t numbers() const { return bits == 4 ? 2 : 1; }
};

// What multiplies and sums 16 outputs. A step of it takes one input or two.
struct Floats {
  using Input = float;
  static constexpr int64_t bits = 32;  // of weights that need not be unpacked
  static constexpr int64_t steps = kBlock, bytes = 64;  // steps of a block; bytes of a step's weights
  struct Sixteen {
    Vec lane[kLanes];
  };

  static Sixteen weights(const uint8_t* from) {
    Sixteen found;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      found.lane[lane] = load(reinterpret_cast<const float*>(from) + lane * kWidth);
    return found;
  }

  static void add(Sixteen& sums, const Sixteen& weights, Input input) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums.lane[lane] += weights.lane[lane] * input;
  }

  // A block of fewer bits as [32 inputs, 16 outputs].
  static void unpack(int64_t bits, const uint8_t* block, uint8_t* room) {
    auto* out = reinterpret_cast<float*>(room);
    if (bits == 16) unpack_sixteen(reinterpret_cast<const uint32_t*>(block), out);
    if (bits == 8) unpack_eight(reinterpret_cast<const int16_t*>(block), out);
    if (bits == 4) unpack_four(reinterpret_cast<const uint32_t*>(block), out);
  }

  static void unpack_sixteen(const uint32_t* __restrict words, float* __restrict out) {
    for (int64_t pair = 0; pair < 16; ++pair)
      for (int64_t o = 0; o < kPanel; ++o) {
        const uint32_t word = words[pair * kPanel + o];
        out[2 * pair * kPanel + o] = from_bits(word << 16);
        out[(2 * pair + 1) * kPanel + o] = from_bits(word & 0xffff0000u);
      }
  }

  static void unpack_eight(const int16_t* __restrict words, float* __restrict out) {
    for (int64_t pair = 0; pair < 16; ++pair)
      for (int64_t o = 0; o < kPanel; ++o) {
        const int32_t word = words[pair * kPanel + o];
        out[2 * pair * kPanel + o] = static_cast<float>((word << 24) >> 24);
        out[(2 * pair + 1) * kPanel + o] = static_cast<float>(word >> 8);
      }
  }

  static void unpack_four(const uint32_t* __restrict words, float* __restrict out) {
    for (int64_t quarter = 0; quarter < 4; ++quarter)
      for (int64_t place = 0; place < 8; ++place) {
        const int shift = static_cast<int>(4 * (place / 2) + 16 * (place % 2));
        for (int64_t o = 0; o < kPanel; ++o) {
          const auto level = static_cast<int32_t>(words[quarter * kPanel + o] >> shift & 15);
          out[(8 * quarter + place) * kPanel + o] = static_cast<float>(level);
        }
      }
  }
};

#ifdef PASTA_BFLOAT16
struct Pairs {
  using Input = uint32_t;  // two of bfloat16, the first in the low half
  static constexpr int64_t bits = 16, steps = kBlock / 2, bytes = 64;
  struct Sixteen {
    Vec lane[1];
  };
  static_assert(kLanes == 1);

  static __m512i weights(const uint8_t* from) { return _mm512_loadu_si512(from); }

  static void add(Sixteen& sums, __m512i weights, Input input) {
    const __m512i inputs = _mm512_set1_epi32(static_cast<int32_t>(input));
    sums.lane[0] = _mm512_dpbf16_ps(sums.lane[0], (__m512bh)weights, (__m512bh)inputs);
  }

  // A block of fewer bits as [16 pairs of inputs, 16 outputs, 2]; eight are exact in bfloat16.
  static void unpack(int64_t bits, const uint8_t* block, uint8_t* room) {
    for (int64_t pair = 0; bits == 8 && pair < 16; ++pair) {
      const auto* half = reinterpret_cast<const __m128i*>(block + 32 * pair);
      const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(half));
      const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(half + 1));
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
      _mm512_storeu_si512(room + 64 * pair, (__m512i)both);
    }
    // The table is looked up with five bits, so it is written twice.
    alignas(64) static constexpr uint16_t kLevels[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_load_si512(kLevels);
    for (int64_t quarter = 0; bits == 4 && quarter < 4; ++quarter) {
      __m512i words = _mm512_loadu_si512(block + 64 * quarter);
      for (int64_t pair = 0; pair < 4; ++pair, words = _mm512_srli_epi16(words, 4))
        _mm512_storeu_si512(
            room + 64 * (4 * quarter + pair), _mm512_permutexvar_epi16(words, table));
    }
  }
};
using Low = Pairs;
#else
using Low = Floats;
#endif
