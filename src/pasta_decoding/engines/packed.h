// Packed weights: what they look like, and what multiplies them.
//
// 16 outputs make a panel, 32 inputs a block. A block of a panel holds, of 32 bits, the weights input
// by input, 16 outputs each; else pairs of inputs, of each output the two beside each other. Those
// of four bits have 32 bits for eight inputs of an output, the even ones in the low half.

#pragma once

#include "vec.h"

#if defined(__AVX2__)
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

// What multiplies and sums 16 outputs, a lane of them at a time: a step of a block takes one input or
// two. `at` is where the block of a panel begins.

// Weights of 32 bits times inputs as they are.
struct Floats {
  using Input = float;
  using Sum = Vec;
  static constexpr int64_t steps = kBlock;

  static Vec weights(const uint8_t* at, int64_t step, int64_t lane) {
    return load(reinterpret_cast<const float*>(at) + step * kPanel + lane * kWidth);
  }
  static void add(Vec& sum, Vec weights, Input input) { sum += weights * input; }
};

// Weights of 16 bits, times two inputs at a time: rounded to bfloat16 where the processor multiplies
// such numbers, else as they are.
struct Bfloats {
  using Sum = Vec;
  static constexpr int64_t steps = kBlock / 2;

  static Ints weights(const uint8_t* at, int64_t step, int64_t lane) {
    return load<Ints>(at + 4 * (step * kPanel + lane * kWidth));
  }
#if defined(__AVX512BF16__)
  using Input = uint32_t;
  static void add(Vec& sum, Ints weights, Input input) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(input));
  }
#else
  struct Input {
    float first, second;
  };
  static void add(Vec& sum, Ints weights, Input input) {
    sum += (Vec)(weights << 16) * input.first;
    sum += (Vec)(weights & ~0xffff) * input.second;
  }
#endif
};

// Whole numbers of 16 bits, of weights and of two inputs at a time.
struct Shorts {
  using Input = int32_t;
  using Sum = Ints;
  static constexpr int64_t steps = kBlock / 2;

  static void add(Ints& sum, Ints weights, Input input) {
    const Ints inputs = input - Ints{};
#if defined(__AVX512BW__)
    sum += (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)inputs);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    sum += (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
#else
    sum += (weights << 16 >> 16) * (inputs << 16 >> 16) + (weights >> 16) * (inputs >> 16);
#endif
  }
};

struct Eights : Shorts {
  static Ints weights(const uint8_t* at, int64_t step, int64_t lane) {
    typedef int8_t Bytes __attribute__((vector_size(2 * kWidth)));
    typedef int16_t Pairs __attribute__((vector_size(4 * kWidth)));
    return (Ints)__builtin_convertvector(
        load<Bytes>(at + 2 * (step * kPanel + lane * kWidth)), Pairs);
  }
};

struct Fours : Shorts {
  static Ints weights(const uint8_t* at, int64_t step, int64_t lane) {
    const Ints words = load<Ints>(at + 4 * (step / 4 * kPanel + lane * kWidth));
    return words >> 4 * static_cast<int>(step % 4) & 0x000f000f;
  }
};
