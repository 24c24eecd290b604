// What products with a matrix are given, for the kernels that call them.
#pragma once

#include <cstdint>

extern "C" struct LinearArgs {
  const void* x;
  const void* w;
  const void* bias;        // may be null
  const void* multiplier;  // [m, n] of out's dtype, may be null or out
  const void* residual;    // [m, n] of out's dtype, may be null or out
  void* out;
  int64_t m, n, k, x_stride, w_stride, multiplier_stride, residual_stride, out_stride;
  int32_t x_dtype, w_dtype, bias_dtype, out_dtype;
  int32_t conv1d;      // 1: w is [k, n]
  int32_t accumulate;  // 1: the product is added to what out holds
  int32_t activation;
};

extern "C" struct QuantizedLinearArgs {
  const void* x;
  const uint8_t* rows;     // [n, rows_stride] bytes
  const void* bias;        // may be null
  const void* multiplier;  // [m, n] of out's dtype, may be null or out
  const void* residual;    // [m, n] of out's dtype, may be null or out
  void* out;
  int64_t m, n, k, x_stride, rows_stride, multiplier_stride, residual_stride, out_stride, group;
  int32_t bits, scale_dtype, x_dtype, bias_dtype, out_dtype, activation;
  int32_t integer_nbytes;  // 2 or 1: x as integers of so many bytes; 0: x as fp32
  int32_t bf16_panels;     // many rows of x, and the weights that they meet, as bf16
  int32_t symmetric;       // rows without lows
  int32_t codebook;        // of codebooks.h, 0: codes are whole numbers
};

extern "C" int forebay_linear(const LinearArgs* a, float* scratch, int64_t scratch_floats, int threads);
extern "C" int forebay_linear_q(const QuantizedLinearArgs* a, float* scratch, int64_t scratch_floats, int threads);
