// What a decoder computes between its linear layers, a row at a time.
//
// Shapes: Q tokens, N rows, I numbers of a row, H heads of width D.

#include "vec.h"

namespace {

constexpr int64_t kAlone = 20000;  // numbers that are not worth a second thread

template <typename Work>
void for_rows(int64_t rows, int64_t width, int threads, const Work& work) {
  share(rows, rows * width < kAlone ? 1 : threads, work);
}

Vec silu(Vec x) { return x / (1.f + exp(-x)); }

Vec gelu_tanh(Vec x) {  // 1 + tanh(z) = 2 / (1 + exp(-2 z))
  return x / (1.f + exp(-1.5957691216057308f * (x + .044715f * x * x * x)));
}

}  // namespace

// out_NI = input_NI / root of its mean square, times weight_I.
extern "C" void pasta_rms_norm(
    const float* input, const float* weight, float* out, int64_t rows, int64_t width,
    float epsilon, int threads) {
  for_rows(rows, width, threads, [=](int64_t row) {
    const float* in = input + row * width;
    Vec squares{};
    int64_t at = 0;
    for (; at + kWidth <= width; at += kWidth) squares += load(in + at) * load(in + at);
    float sum = total(squares);
    for (; at < width; ++at) sum += in[at] * in[at];
    const float scale = 1.f / std::sqrt(sum / static_cast<float>(width) + epsilon);
    map(in, weight, out + row * width, width, [=](Vec x, Vec w) { return x * scale * w; });
  });
}

// out_NI = act(gate) * up of rows [gate, up].
extern "C" void pasta_gated(
    const float* gate_up, float* out, int64_t rows, int64_t width, bool gelu, int threads) {
  for_rows(rows, width, threads, [=](int64_t row) {
    const float* gate = gate_up + row * 2 * width;
    if (gelu)
      map(gate, gate + width, out + row * width, width,
          [](Vec x, Vec y) { return gelu_tanh(x) * y; });
    else
      map(gate, gate + width, out + row * width, width, [](Vec x, Vec y) { return silu(x) * y; });
  });
}

// Rotate heads_QHD in place: their first halves by -sin of the second ones, and the reverse.
extern "C" void pasta_rotate(
    float* heads, const float* cos_QD, const float* sin_QD, int64_t tokens, int64_t heads_count,
    int64_t half, int64_t stride, int threads) {
  for_rows(tokens, heads_count * half, threads, [=](int64_t token) {
    const float *cos = cos_QD + token * half, *sin = sin_QD + token * half;
    for (int64_t head = 0; head < heads_count; ++head) {
      float *first = heads + token * stride + head * 2 * half, *second = first + half;
      for (int64_t at = 0; at < half; ++at) {
        const float x = first[at], y = second[at];
        first[at] = x * cos[at] - y * sin[at];
        second[at] = y * cos[at] + x * sin[at];
      }
    }
  });
}
