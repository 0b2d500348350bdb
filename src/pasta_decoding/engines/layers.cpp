// What a decoder computes between its linear layers, a row at a time: a row's result does not depend,
// to the bit, on the other rows.
//
// Shapes: Q tokens, N rows, I numbers of a row, H heads of width D.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kAlone = 20000;  // numbers that are not worth a second thread

template <typename Work>
void for_rows(int64_t rows, int64_t width, const Work& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kAlone / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

// Return input_NI / root of its mean square, times weight_I.
Tensor rms_norm(const Tensor& input_NI, const Tensor& weight_I, double epsilon) {
  const Tensor rows = input_NI.contiguous();
  const int64_t width = rows.size(-1);
  Tensor out_NI = at::empty_like(rows);
  const float* weight = weight_I.const_data_ptr<float>();
  for_rows(rows.numel() / width, width, [&](int64_t row) {
    const float* in = rows.const_data_ptr<float>() + row * width;
    const float squares = at::vec::map_reduce_all<float>(
        [](Vec x) { return x * x; }, [](Vec x, Vec y) { return x + y; }, in, width);
    const Vec scale(1.f / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(epsilon)));
    at::vec::map2<float>(
        [scale](Vec x, Vec w) { return x * scale * w; },
        out_NI.mutable_data_ptr<float>() + row * width, in, weight, width);
  });
  return out_NI;
}

Vec silu(Vec x) { return x / (Vec(1.f) + x.neg().exp()); }

Vec gelu_tanh(Vec x) {
  const Vec inner = Vec(0.7978845608028654f) * (x + Vec(0.044715f) * x * x * x);
  return Vec(0.5f) * x * (Vec(1.f) + inner.tanh());
}

// Return act(gate) * up of rows [gate, up].
Tensor gated(const Tensor& gate_up_N2I, bool gelu) {
  const int64_t rows = gate_up_N2I.size(0), width = gate_up_N2I.size(1) / 2;
  Tensor out_NI = at::empty({rows, width}, gate_up_N2I.options());
  for_rows(rows, width, [&](int64_t row) {
    const float* gate = gate_up_N2I.const_data_ptr<float>() + row * 2 * width;
    float* out = out_NI.mutable_data_ptr<float>() + row * width;
    if (gelu)
      at::vec::map2<float>(
          [](Vec x, Vec y) { return gelu_tanh(x) * y; }, out, gate, gate + width, width);
    else
      at::vec::map2<float>(
          [](Vec x, Vec y) { return silu(x) * y; }, out, gate, gate + width, width);
  });
  return out_NI;
}

// Rotate heads in place: their first halves by -sin of the second ones, and the reverse.
void rotate_(Tensor& heads_QHD, const Tensor& cos_QD, const Tensor& sin_QD) {
  const int64_t heads = heads_QHD.size(1), half = heads_QHD.size(2) / 2;
  TORCH_CHECK(heads_QHD.stride(2) == 1, "a head's numbers follow each other");
  for_rows(heads_QHD.size(0), heads * half, [&](int64_t row) {
    const float* cos = cos_QD.const_data_ptr<float>() + row * half;
    const float* sin = sin_QD.const_data_ptr<float>() + row * half;
    for (int64_t head = 0; head < heads; ++head) {
      float* first = heads_QHD.mutable_data_ptr<float>() + row * heads_QHD.stride(0) +
                     head * heads_QHD.stride(1);
      for (int64_t at = 0; at < half; ++at) {
        const float x = first[at], y = first[half + at];
        first[at] = x * cos[at] - y * sin[at];
        first[half + at] = y * cos[at] + x * sin[at];
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pasta_fast, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("gated", gated);
  library.impl("rotate_", rotate_);
}
