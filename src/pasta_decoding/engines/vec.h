// Vectors of floats as wide as the processor's, by the compiler's own extension, and threads.
//
// Everything here computes a number in the same way in every lane and for every caller, so results
// do not depend on what else is computed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
constexpr int kWidth = 16;  // floats of a vector
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

// Read a T at any address.
template <typename T = Vec>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(Vec)); }

// The sum of the lanes.
inline float total(Vec x) {
  for (int half = kWidth / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) x[lane] += x[lane + half];
  return x[0];
}

inline float from_bits(uint32_t bits) { return load<float>(&bits); }

// 1.5 * 2^23: a float that is added to it loses its fraction, so (x + kRound) - kRound is the
// integer next to x.
constexpr float kRound = 12582912.f;

// e to the x, to one part in ten million; exactly 0 from -87 down. A polynomial after Cephes' expf,
// of which compilers make vectors.
inline float exp_of(float x) {
  const float below_88 = x < 88.f ? x : 88.f;
  const float clamped = below_88 > -87.f ? below_88 : -87.f;
  const float power = (clamped * 1.44269504f + kRound) - kRound;
  const float rest = clamped - power * 0.693359375f + power * 2.12194440e-4f;
  const float high = (1.9875691500e-4f * rest + 1.3981999507e-3f) * rest + 8.3334519073e-3f;
  const float low = ((high * rest + 4.1665795894e-2f) * rest + 1.6666665459e-1f) * rest + .5f;
  const float sum = low * rest * rest + rest + 1.f;
  const auto exponent = static_cast<uint32_t>(static_cast<int32_t>(power) + 127);
  const float scaled = sum * from_bits(exponent << 23);
  return x > -87.f ? scaled : 0.f;
}

// Copy numbers of the cache (float32, or bfloat16 as uint16_t) to floats, and the reverse.
inline void convert(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }
inline void convert(const uint16_t* from, float* to, int64_t count) {
  for (int64_t at = 0; at < count; ++at) to[at] = from_bits(uint32_t{from[at]} << 16);
}
inline void convert(const float* from, uint16_t* to, int64_t count) {
  for (int64_t at = 0; at < count; ++at) {
    const auto bits = load<uint32_t>(from + at);
    const uint32_t is_odd = bits >> 16 & 1;  // a tie goes to the even number
    to[at] = static_cast<uint16_t>((bits + 0x7fff + is_odd) >> 16);
  }
}

// Eight-bit integers made 32 bits wide, by hand: compilers convert them one by one.
inline Ints from_int8s(const uint8_t* from) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}

// Finite float16 numbers made 32 bits wide.
inline Vec from_float16s(const uint8_t* from) {
#if defined(__AVX512BW__)
  return (Vec)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(load<__m128i>(from));
#else
  float numbers[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) {
    const int bits = load<uint16_t>(from + 2 * lane);
    const bool is_negative = bits >> 15;
    // Exponents of float16 are 112 smaller than those of float32.
    numbers[lane] = from_bits((bits & 0x7fff) << 13) * (is_negative ? -0x1p112f : 0x1p112f);
  }
  return load(numbers);
#endif
}

// Call work(0) to work(tasks - 1), shared evenly among threads; few are not worth a second thread.
// The work must not throw: no exception may leave a thread.
template <typename Work>
void run_tasks(int64_t tasks, int threads, const Work& work) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tasks > 4)
  for (int64_t task = 0; task < tasks; ++task) work(task);
}
