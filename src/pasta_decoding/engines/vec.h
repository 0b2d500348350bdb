// Vectors of floats as wide as the processor's, by the compiler's own extension, and threads.
//
// Everything here computes a number in the same way wherever it stands, so results do not depend on
// what else is computed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

template <typename T = Vec>
T load(const void* from) {
  T found;
  std::memcpy(&found, from, sizeof(T));
  return found;
}
inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(Vec)); }
inline Vec splat(float x) { return x - Vec{}; }

inline float total(Vec x) {
  float sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) sum += x[lane];
  return sum;
}

// e to the x, to one part in ten million; exactly 0 from -87 down. A polynomial after Cephes' expf.
inline Vec exp(Vec x) {
  const Vec near = x < 88.f ? x : splat(88.f);
  const Vec kept = near > -87.f ? near : splat(-87.f);
  const Vec round = splat(12582912.f);  // 1.5 * 2^23: what is added to it loses its fraction
  const Vec power = (kept * 1.44269504f + round) - round;
  const Vec rest = kept - power * 0.693359375f + power * 2.12194440e-4f;
  Vec sum = splat(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, .5f})
    sum = sum * rest + next;
  sum = sum * rest * rest + rest + 1.f;
  const Ints bits = (__builtin_convertvector(power, Ints) + 127) << 23;
  return x > -87.f ? sum * __builtin_bit_cast(Vec, bits) : Vec{};
}

inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float from_bfloat16(uint16_t number) { return from_bits(uint32_t{number} << 16); }

// The nearest one, of two the even one.
inline uint16_t to_bfloat16(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_float16(uint16_t number) {  // of finite ones
  const float size = from_bits((number & 0x7fffu) << 13) * 0x1p112f;
  return from_bits(__builtin_bit_cast(uint32_t, size) | (number & 0x8000u) << 16);
}

inline void convert(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }
inline void convert(const uint16_t* from, float* to, int64_t count) {
  for (int64_t at = 0; at < count; ++at) to[at] = from_bfloat16(from[at]);
}
inline void convert(const float* from, uint16_t* to, int64_t count) {
  for (int64_t at = 0; at < count; ++at) to[at] = to_bfloat16(from[at]);
}

// out = f(x, y), a vector at a time.
template <typename F>
void map(const float* x, const float* y, float* out, int64_t count, const F& f) {
  int64_t at = 0;
  for (; at + kWidth <= count; at += kWidth) store(out + at, f(load(x + at), load(y + at)));
  if (at == count) return;
  float left[3][kWidth] = {};
  std::copy(x + at, x + count, left[0]);
  std::copy(y + at, y + count, left[1]);
  store(left[2], f(load(left[0]), load(left[1])));
  std::copy_n(left[2], count - at, out + at);
}

// Work of `tasks` parts, a row of them for each thread.
template <typename Work>
void share(int64_t tasks, int threads, const Work& work) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < tasks; ++task) work(task);
}
