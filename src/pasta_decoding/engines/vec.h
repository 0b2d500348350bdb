// Vectors of floats as wide as the processor's, by the compiler's own extension, and threads.
//
// Everything here computes a number in the same way wherever it stands, so results do not depend on
// what else is computed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__)
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

inline float total(Vec x) {
  for (int half = kWidth / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) x[lane] += x[lane + half];
  return x[0];
}

inline float from_bits(uint32_t bits) { return load<float>(&bits); }

// e to the x, to one part in ten million; exactly 0 from -87 down. A polynomial after Cephes' expf,
// of which compilers make vectors.
inline float exp_of(float x) {
  const float near = x < 88.f ? x : 88.f, kept = near > -87.f ? near : -87.f;
  const float round = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
  const float power = (kept * 1.44269504f + round) - round;
  const float rest = kept - power * 0.693359375f + power * 2.12194440e-4f;
  const float high = (1.9875691500e-4f * rest + 1.3981999507e-3f) * rest + 8.3334519073e-3f;
  const float low = ((high * rest + 4.1665795894e-2f) * rest + 1.6666665459e-1f) * rest + .5f;
  const float sum = low * rest * rest + rest + 1.f;
  const auto exponent = static_cast<uint32_t>(static_cast<int32_t>(power) + 127);
  const float scaled = sum * from_bits(exponent << 23);
  return x > -87.f ? scaled : 0.f;
}

inline void convert(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }
inline void convert(const uint16_t* from, float* to, int64_t count) {  // of bfloat16
  for (int64_t at = 0; at < count; ++at) to[at] = from_bits(uint32_t{from[at]} << 16);
}
inline void convert(const float* from, uint16_t* to, int64_t count) {
  for (int64_t at = 0; at < count; ++at) {
    const auto bits = load<uint32_t>(from + at);  // to the nearest, or the even one
    to[at] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// Work of `tasks` parts, a row of them for each thread; few are not worth a second thread.
template <typename Work>
void share(int64_t tasks, int threads, const Work& work) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tasks > 4)
  for (int64_t task = 0; task < tasks; ++task) work(task);
}
