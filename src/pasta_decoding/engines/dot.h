// Sums over a group of inputs of levels times inputs of eight bits, one an output: what each
// processor has for them.
//
//   GroupSum            the sums of kPanel outputs
//   start(pair, offset) sums that begin at -offset times inputs whose sum is given, see `pair_sums`
//   add(sum, ...)       adds a quad: four levels of each output, and the four inputs of all
//   scaled(sum, ...)    the sums times the factors of the group

#pragma once

#include "vec.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)

using GroupSum = Ints;

inline GroupSum start(int32_t pair, int offset) {
  const int32_t low = static_cast<int16_t>(pair), high = pair >> 16;
  return (low + high) * -offset - Ints{};
}
inline void add(GroupSum& sum, Ints levels, int32_t quad) {
  const Ints inputs = quad - Ints{};
#if defined(__AVX512VNNI__)
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)inputs);
#elif defined(__AVXVNNI__)
  sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)levels, (__m256i)inputs);
#else
  for (int bit = 0; bit < 32; bit += 8)
    sum += (levels >> bit & 255) * (inputs << (24 - bit) >> 24);
#endif
}
inline Ints scaled(GroupSum sum, Ints factors) { return sum * factors; }

#else

// Two sums of 16 bits for an output, of the first and of the second pairs of quads. None overflows:
// a group has 16 levels of six bits, or 32 of four, and inputs are at most 127.
typedef uint16_t GroupSum __attribute__((vector_size(4 * kWidth)));

inline GroupSum start(int32_t pair, int offset) {
  return (GroupSum)(pair - Ints{}) * static_cast<uint16_t>(-offset);
}
inline void add(GroupSum& sum, Ints levels, int32_t quad) {
  const Ints inputs = quad - Ints{};
#if defined(__AVX512BW__)
  sum += (GroupSum)_mm512_maddubs_epi16((__m512i)levels, (__m512i)inputs);
#else
  sum += (GroupSum)_mm256_maddubs_epi16((__m256i)levels, (__m256i)inputs);
#endif
  asm("" : "+v"(sum));  // else the compiler first makes all products, and has no registers left
}
inline Ints scaled(GroupSum sum, Ints factors) {
  const Ints pairs = (factors & 0xffff) | factors << 16;
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)sum, (__m512i)pairs);
#else
  return (Ints)_mm256_madd_epi16((__m256i)sum, (__m256i)pairs);
#endif
}

#endif
