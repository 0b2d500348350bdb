// Packed weights: what they look like, and what multiplies them.
//
// 16 outputs make a panel, 32 inputs a block. A block of a panel holds, of 32 bits, the weights input
// by input, 16 outputs each; else pairs of inputs, of each output the two beside each other. Those
// of four bits have 32 bits for eight inputs of an output, the even ones in the low half.

#pragma once

#include "vec.h"

#if defined(__AVX512BF16__)
#define PASTA_BFLOAT16 1
#endif
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PASTA_SHORTS 1
#include <immintrin.h>
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

  static Vec floats(Vec sums) { return sums; }

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
// Weights of 16 bits, which lie as they are read, times inputs rounded to bfloat16, two at a time.
struct Bfloats {
  using Input = uint32_t;
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

  static Vec floats(Vec sums) { return sums; }
  static void unpack(int64_t, const uint8_t*, uint8_t*) {}
};
#else
using Bfloats = Floats;
#endif

#ifdef PASTA_SHORTS
// Whole numbers of eight and four bits, times inputs as whole numbers of 16, two at a time.
struct Shorts {
  using Input = uint32_t;
  static constexpr int64_t bits = 0, steps = kBlock / 2, bytes = 64;
  struct Sixteen {
    Ints lane[kLanes];
  };

  static Sixteen weights(const uint8_t* from) {
    Sixteen found;
    for (int64_t lane = 0; lane < kLanes; ++lane) found.lane[lane] = load_ints(from + 4 * kWidth * lane);
    return found;
  }

  static void add(Sixteen& sums, const Sixteen& weights, Input input) {
    const Ints inputs = static_cast<int32_t>(input) - Ints{};
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sums.lane[lane] += sums_of_pairs(weights.lane[lane], inputs);
  }

  static Vec floats(Ints sums) { return __builtin_convertvector(sums, Vec); }

  // A block as [16 pairs of inputs, 16 outputs, 2] of 16 bits.
  static void unpack(int64_t bits, const uint8_t* block, uint8_t* room) {
    if (bits == 8) {
      const auto* from = reinterpret_cast<const int8_t*>(block);
      for (int64_t at = 0; at < kBlock * kPanel; ++at) reinterpret_cast<int16_t*>(room)[at] = from[at];
      return;
    }
    for (int64_t quarter = 0; quarter < 4; ++quarter)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const Ints words = load_ints(block + 64 * quarter + 4 * kWidth * lane);
        for (int64_t pair = 0; pair < 4; ++pair)
          store_ints(
              room + 64 * (4 * quarter + pair) + 4 * kWidth * lane,
              words >> 4 * static_cast<int>(pair) & 0x000f000f);
      }
  }

  static Ints sums_of_pairs(Ints x, Ints y) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
    return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
  }
};
#else
using Shorts = Floats;
#endif
