// y = act(x W^T + b) * multiplier + residual for a W of packed 4- or 8-bit groups (packing.py), by three routes: integer
// products on processors with AVX2 or of 64-bit ARM (integer_dot.h) or with AVX-512 and VNNI (vnni_dot.h for few rows of
// x, vnni_panels.h for many), and fp32, which unpacks a few rows at a time, many into panels (panels.h), and takes any x
// anywhere.
#include <algorithm>

#include "bf16_unpacked.h"
#include "finish.h"
#include "groups.h"
#include "integer_dot.h"
#include "panels.h"
#include "product_args.h"
#include "team.h"
#include "vnni_dot.h"
#include "vnni_panels.h"

using namespace forebay;

namespace {

// Rows of x held, and of those that are fp32 already or become panels' integers, as far as scratch goes.
constexpr int64_t M_BLOCK = 64, M_BLOCK_DIRECT = 256;
constexpr int64_t MAX_CHUNK = 1024;        // weight rows per task
constexpr int64_t CHUNK_NBYTES = 1 << 17;  // packed bytes per task: small beside L2, and a task takes some 10 µs
constexpr int64_t PRODUCTS = 4096;         // results that a task holds
constexpr int64_t UNPACK_ROWS = 8, UNPACK_K = 512;  // 16 KiB of fp32 weights at a time
constexpr int64_t PANELS_CHUNK = 64;       // weight rows per task in panels, of many rows of x; more of fewer
constexpr int64_t CHUNK_PRODUCTS = M_BLOCK_DIRECT * PANELS_CHUNK;
constexpr int64_t PANEL_ROWS = 6;          // rows of x from which panels are faster than rows unpacked

float bias_at(const QuantizedLinearArgs& a, int64_t n) {
  if (!a.bias) return 0.0f;
  if (a.bias_dtype == F32) return load_one(static_cast<const float*>(a.bias) + n);
  if (a.bias_dtype == BF16) return load_one(static_cast<const bf16*>(a.bias) + n);
  return load_one(static_cast<const f16*>(a.bias) + n);
}

// c[m, n] += m rows of x, arranged, times n rows that have a codebook.
template <int M>
void coded_product(const QuantizedLinearArgs& a, const GroupFormat& f, const float* x, int64_t xs, int64_t n0, int64_t n,
                   float* c, int64_t cs) {
  const uint8_t* rows = a.rows + n0 * a.rows_stride;
  const int64_t scales = f.codes_nbytes(), lows = f.scales_nbytes();
  auto scale_of = [&](const uint8_t* row, int64_t g) {
    return coded_scale(row + scales, f.symmetric ? nullptr : row + scales + lows, f.scale_dtype, g);
  };
  const auto product = a.codebook == E4M3 ? look_up_product<M, true, decltype(scale_of)>
                                          : look_up_product<M, false, decltype(scale_of)>;
  product(x, xs, rows, a.rows_stride, n, a.group, f.count, a.codebook, scale_of, c, cs);
}

// c[m, n] += x[m, k] times rows [n0, n1) unpacked to fp32.
void float_product(const QuantizedLinearArgs& a, const GroupFormat& f, const float* x, int64_t xs, int64_t m,
                   int64_t n0, int64_t n1, float* c, int64_t cs) {
  alignas(64) float w[UNPACK_ROWS * UNPACK_K];
  const int64_t step = std::max(a.group, UNPACK_K / a.group * a.group);
  for (int64_t n = n0; n < n1; n += UNPACK_ROWS) {
    const int64_t rows = std::min(UNPACK_ROWS, n1 - n);
    for (int64_t k = 0; k < a.k; k += step) {
      const int64_t left = std::min(step, a.k - k);
      for (int64_t j = 0; j < rows; ++j) dequantize_row(a.rows + (n + j) * a.rows_stride, f, k, left, w + j * step);
      multiply_dot(x + k, xs, w, step, m, rows, left, c + (n - n0), cs);
    }
  }
}

// Elements [k, k + n) of a packed row.
void unpack(const uint8_t* row, const GroupFormat& f, int64_t k, int64_t n, float* to) {
  const int64_t within = k % f.group, first = within ? std::min(f.group - within, n) : 0;
  if (within) dequantize_part(row, f, k / f.group, within, first, to);
  if (first < n) dequantize_row(row, f, k + first, n - first, to + first);
}

// The same by panels; rows of c hold whole ones.
void panel_product(const QuantizedLinearArgs& a, const GroupFormat& f, const float* x, int64_t xs, int64_t m,
                   int64_t n0, int64_t n, float* c, int64_t cs) {
  multiply_panels(x, xs, m, n, a.k, c, cs, [&](int64_t j0, int64_t rows, int64_t k0, int64_t depth, float* panel) {
    fill_panel(rows, depth, panel, [&](int64_t j, float* to) {
      unpack(a.rows + (n0 + j0 + j) * a.rows_stride, f, k0, depth, to);
    });
  }, [&](int64_t j, int64_t k0, int64_t depth) {
    const uint8_t *row = a.rows + (n0 + j) * a.rows_stride, *scales = row + f.codes_nbytes() + k0 / f.group * 2;
    call_in(row + k0 * f.bits / 8, 0, depth * f.bits / 8 + 63);
    call_in(scales, 0, depth / f.group * 2 + 63);
    if (!f.symmetric) call_in(scales + f.scales_nbytes(), 0, depth / f.group * 2 + 63);
  });
}

void upcast_row(const QuantizedLinearArgs& a, int64_t m, float* to) {
  if (a.x_dtype == F32) upcast(static_cast<const float*>(a.x) + m * a.x_stride, to, a.k);
  else if (a.x_dtype == BF16) upcast(static_cast<const bf16*>(a.x) + m * a.x_stride, to, a.k);
  else upcast(static_cast<const f16*>(a.x) + m * a.x_stride, to, a.k);
}

constexpr int64_t INT16_ROWS = 6;  // rows of x up to which integers are faster than bf16
constexpr int64_t CODED_INTEGER_ROWS = 5;  // rows of x up to which integers meet codes of a codebook

// Whether codes of a codebook are multiplied as integers here: in groups of a power of two as 16 bits with AVX-512 and
// VNNI, else as bytes, which hold some books alone.
bool codes_are_integers(int32_t codebook, int64_t group) {
#if FB_VNNI
  return codebook >= E2M1 && ((group & (group - 1)) == 0 || in_bytes(codebook));
#elif FB_AVX2_DOT
  return in_bytes(codebook);
#else
  return false;
#endif
}

// How a block's rows of x are held: as fp32, as bf16, or as integers for the kernels of one of two kinds of processor.
enum class Route { FLOAT, BF16, INTEGER, VNNI };

struct Work {
  GroupFormat f;
  const float* x;  // fp32 rows of the block
  int64_t xs;
  const bool* left;  // rows of the block that are not to be written, or null
  Route route;
  bool panels;  // many rows of x: weights are expanded once
  bool arranged;  // few rows of x for weights with a codebook
#if FB_INTEGER_DOT
  IntegerRows integers;
#endif
#if FB_VNNI
  vnni::Integers wide;
#endif
#if FB_BF16_UNPACKED
  const char* halves;  // rows of bf16_nbytes
#endif
};

Route route_of(const QuantizedLinearArgs& a) {
  if (a.codebook && (!a.integer_nbytes || a.m > CODED_INTEGER_ROWS || !codes_are_integers(a.codebook, a.group)))
    return Route::FLOAT;
#if FB_BF16_UNPACKED
  if (a.bf16_panels && a.m > INT16_ROWS) return Route::BF16;
#endif
  if (!a.integer_nbytes) return Route::FLOAT;
#if FB_VNNI
  if ((a.group & (a.group - 1)) == 0) return Route::VNNI;
#endif
  return Route::INTEGER;
}

#if FB_VNNI
template <int BITS, int NBYTES>
void vnni_product(const QuantizedLinearArgs& a, const Work& work, int64_t m, int64_t n0, int64_t n, float* c,
                  int64_t cs) {
  const uint8_t* rows = a.rows + n0 * a.rows_stride;
  if constexpr (BITS == 4 && NBYTES == 2) {
    if (a.codebook) {
      const auto coded = a.group == 16   ? vnni::dot_product<4, 2, 16, true>
                         : a.group == 32 ? vnni::dot_product<4, 2, 32, true>
                                         : vnni::dot_product<4, 2, 64, true>;
      coded(work.wide, m, rows, a.rows_stride, n, work.f, c, cs);
      return;
    }
  }
  const auto product = work.panels     ? a.symmetric ? vnni::panel_product<BITS, NBYTES, false>
                                                     : vnni::panel_product<BITS, NBYTES, true>
                       : a.group == 16 ? vnni::dot_product<BITS, NBYTES, 16>
                       : a.group == 32 ? vnni::dot_product<BITS, NBYTES, 32>
                                       : vnni::dot_product<BITS, NBYTES, 64>;
  product(work.wide, m, rows, a.rows_stride, n, work.f, c, cs);
}

void vnni_product(const QuantizedLinearArgs& a, const Work& work, int64_t m, int64_t n0, int64_t n, float* c,
                  int64_t cs) {
  if (a.bits == 4 && a.integer_nbytes == 2) vnni_product<4, 2>(a, work, m, n0, n, c, cs);
  else if (a.bits == 4) vnni_product<4, 1>(a, work, m, n0, n, c, cs);
  else if (a.integer_nbytes == 2) vnni_product<8, 2>(a, work, m, n0, n, c, cs);
  else vnni_product<8, 1>(a, work, m, n0, n, c, cs);
}
#endif

#if FB_INTEGER_DOT
// c[m, n] += the integers of the block times rows [n0, n0 + n), by integer_dot.h.
void integer_rows_product(const QuantizedLinearArgs& a, const Work& work, int64_t m, int64_t n0, int64_t n, float* c) {
  const uint8_t* rows = a.rows + n0 * a.rows_stride;
#define FB_PRODUCT(BITS, BYTES, SUB) \
  integer_product<BITS, BYTES, SUB>(work.integers, m, rows, a.rows_stride, n, work.f, c, n)
  const bool whole = a.group % 64 == 0;
#if FB_AVX2_DOT
  if (a.codebook) {
    const auto coded = a.group == 16 ? integer_product<4, 2, 16, true>
                       : whole       ? integer_product<4, 2, 64, true>
                                     : integer_product<4, 2, 32, true>;
    coded(work.integers, m, rows, a.rows_stride, n, work.f, c, n);
    return;
  }
#endif
  if (a.integer_nbytes == 2 && a.group == 16) a.bits == 4 ? FB_PRODUCT(4, 2, 16) : FB_PRODUCT(8, 2, 16);
  else if (a.integer_nbytes == 2 && a.bits == 4) whole ? FB_PRODUCT(4, 2, 64) : FB_PRODUCT(4, 2, 32);
  else if (a.integer_nbytes == 2) whole ? FB_PRODUCT(8, 2, 64) : FB_PRODUCT(8, 2, 32);
  else whole ? FB_PRODUCT(4, 1, 64) : FB_PRODUCT(4, 1, 32);
#undef FB_PRODUCT
}
#endif

void run_chunk(const QuantizedLinearArgs& a, const Work& work, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  alignas(64) float c[std::max(PRODUCTS, CHUNK_PRODUCTS)];
  const int64_t m = m1 - m0, n = n1 - n0, cs = work.panels ? round_up(n, PANEL) : n;
  for (int64_t j = 0; j < n; ++j) c[j] = bias_at(a, n0 + j);
  for (int64_t j = n; j < cs; ++j) c[j] = 0.0f;
  for (int64_t i = 1; i < m; ++i) std::memcpy(c + i * cs, c, size_t(cs) * 4);
  switch (work.route) {
#if FB_BF16_UNPACKED
    case Route::BF16: {
      const auto product = a.bits == 4 ? bf16_products::unpacked_product<4> : bf16_products::unpacked_product<8>;
      product(work.halves, m, a.rows + n0 * a.rows_stride, a.rows_stride, n, work.f, c, cs);
      break;
    }
#endif
#if FB_VNNI
    case Route::VNNI: vnni_product(a, work, m, n0, n, c, cs); break;
#endif
#if FB_INTEGER_DOT
    case Route::INTEGER: integer_rows_product(a, work, m, n0, n, c); break;
#endif
    default:
      if (work.arranged) {
        const auto product = m == 1 ? coded_product<1> : m == 2 ? coded_product<2> : m == 3 ? coded_product<3>
                                                                                            : coded_product<4>;
        product(a, work.f, work.x, work.xs, n0, n, c, cs);
      } else if (work.panels) panel_product(a, work.f, work.x, work.xs, m, n0, n, c, cs);
      else float_product(a, work.f, work.x, work.xs, m, n0, n1, c, cs);
  }
  for (int64_t i = 0, end; i < m; i = end + 1) {
    for (end = i; end < m && !(work.left && work.left[end]); ++end) {}
    write_product(a, c + i * cs, cs, m0 + i, m0 + end, n0, n1);
  }
}

void run_block(const QuantizedLinearArgs& a, const Work& work, int64_t m0, int64_t m1, int threads) {
  const int64_t m = m1 - m0, unit = 8;
  // Four tasks a thread even out a busy core.
  const int64_t share = (a.n + 4 * threads - 1) / (4 * threads);
  const int64_t fitting = std::min({MAX_CHUNK, PRODUCTS / m, std::max<int64_t>(unit, CHUNK_NBYTES / a.rows_stride)});
  const int64_t chunk = work.panels ? panel_chunk(a.n, std::max(PANELS_CHUNK, CHUNK_PRODUCTS / m), threads)
                                    : std::min((share + unit - 1) / unit, fitting / unit) * unit;
  const int64_t chunks = (a.n + chunk - 1) / chunk;
  parallel_for(chunks, threads, m * a.n * a.k / 32 + a.n * a.k / 32, [&](int64_t i) {  // 32 products, codes a ns
    run_chunk(a, work, m0, m1, i * chunk, std::min(a.n, (i + 1) * chunk));
  });
}

// Whether a block of so many rows of x is arranged for codes in registers.
bool arranges(const QuantizedLinearArgs& a, int64_t rows) {
  return a.codebook && rows <= FEW_CODED_ROWS && looks_up(a.codebook, a.group);
}

void run_float(const QuantizedLinearArgs& a, Work work, int64_t m0, int64_t m1, float* x, int threads) {
  work.route = Route::FLOAT;
  work.panels = m1 - m0 >= PANEL_ROWS;
  work.arranged = arranges(a, m1 - m0);
  if (work.arranged) {
    work.xs = round_up(a.k, a.group), work.x = x;
    for (int64_t m = m0; m < m1; ++m, x += work.xs) {
      const int64_t from = m * a.x_stride;
      if (a.x_dtype == F32) arrange_row(static_cast<const float*>(a.x) + from, a.k, a.group, a.codebook, x);
      else if (a.x_dtype == BF16) arrange_row(static_cast<const bf16*>(a.x) + from, a.k, a.group, a.codebook, x);
      else arrange_row(static_cast<const f16*>(a.x) + from, a.k, a.group, a.codebook, x);
    }
  } else if (a.x_dtype == F32) {
    work.x = static_cast<const float*>(a.x) + m0 * a.x_stride;
    work.xs = a.x_stride;
  } else {
    parallel_parts(m1 - m0, threads, (m1 - m0) * a.k / 8, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) upcast_row(a, m0 + m, x + m * a.k);
    });
    work.x = x;
    work.xs = a.k;
  }
  run_block(a, work, m0, m1, threads);
}

// Bytes of a row of x as integers, and floats of its scales (and of its sums), for either kind of processor.
int64_t row_nbytes(const QuantizedLinearArgs& a) {
  return apart(round_up(round_up(a.k, a.group), 64) * a.integer_nbytes);
}
int64_t row_groups(const QuantizedLinearArgs& a) { return round_up((a.k + a.group - 1) / a.group, 16); }

#if FB_INTEGER_DOT
template <int BYTES, class T>
bool round_any(const QuantizedLinearArgs& a, const Work& work, const T* x, int64_t i, int64_t m) {
#if FB_VNNI
  if (work.route == Route::VNNI)
    return a.bits == 4 ? vnni::round_row<4, BYTES>(x, a.k, a.group, work.wide, i, m)
                       : vnni::round_row<8, BYTES>(x, a.k, a.group, work.wide, i, m);
#endif
  return round_row<BYTES>(x, a.k, a.group, a.bits, work.integers, i, m);
}

template <class T> bool round_any(const QuantizedLinearArgs& a, const Work& work, int64_t row, int64_t i, int64_t m) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  return a.integer_nbytes == 2 ? round_any<2>(a, work, x, i, m) : round_any<1>(a, work, x, i, m);
}

void run_integer(const QuantizedLinearArgs& a, Work work, int64_t m0, int64_t m1, float* scratch, int threads) {
  const int64_t m = m1 - m0, groups = row_groups(a);
  uint8_t* values = reinterpret_cast<uint8_t*>(scratch);
  float *scale = scratch + m * row_nbytes(a) / 4, *sum = scale + m * groups, *spare = sum + m * groups;
  work.route = route_of(a);
#if FB_VNNI
  work.wide = {values, scale, sum, round_up(round_up(a.k, a.group), vnni::UNIT), groups, row_nbytes(a),
               m > vnni::FEW_ROWS, a.symmetric ? 1 << (a.bits - 1) : 0};
  work.panels = work.route == Route::VNNI && work.wide.panels;
#endif
  work.integers = {values, scale, sum, work.f.count * a.group, round_up(work.f.count, 8)};
  bool left[M_BLOCK_DIRECT];
  parallel_for(m, threads, m * a.k / 2, [&](int64_t i) {
    left[i] = !(a.x_dtype == F32    ? round_any<float>(a, work, m0 + i, i, m)
                : a.x_dtype == BF16 ? round_any<bf16>(a, work, m0 + i, i, m)
                                    : round_any<f16>(a, work, m0 + i, i, m));
  });
  work.left = left;
  run_block(a, work, m0, m1, threads);
  work.left = nullptr;
  for (int64_t i = 0; i < m; ++i)
    if (left[i]) run_float(a, work, m0 + i, m0 + i + 1, spare, threads);
}
#endif

#if FB_BF16_UNPACKED
int64_t bf16_nbytes(const QuantizedLinearArgs& a) { return bf16_products::row_nbytes(round_up(a.k, a.group)); }

void run_bf16(const QuantizedLinearArgs& a, Work work, int64_t m0, int64_t m1, float* scratch, int threads) {
  char* to = reinterpret_cast<char*>(scratch);
  const int64_t nbytes = bf16_nbytes(a);
  parallel_parts(m1 - m0, threads, (m1 - m0) * a.k / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = (m0 + i) * a.x_stride;
      char* row = to + i * nbytes;
      if (a.x_dtype == F32) bf16_products::round_row(static_cast<const float*>(a.x) + from, a.k, row);
      else bf16_products::copy_row(static_cast<const bf16*>(a.x) + from, a.k, row);
      const int64_t written = bf16_products::row_nbytes(a.k);
      std::memset(row + written, 0, size_t(nbytes - written));
    }
  });
  work.halves = to, work.panels = true, work.route = Route::BF16;
  run_block(a, work, m0, m1, threads);
}
#endif

// Floats of scratch that `rows` rows of x take.
int64_t scratch_floats_for(const QuantizedLinearArgs& a, int64_t rows) {
#if FB_BF16_UNPACKED
  if (route_of(a) == Route::BF16) return rows * bf16_nbytes(a) / 4;
#endif
  if (route_of(a) == Route::FLOAT && arranges(a, rows)) return rows * round_up(a.k, a.group);
  if (route_of(a) == Route::FLOAT) return a.x_dtype == F32 ? 0 : rows * a.k;
  return rows * (2 * row_groups(a) + row_nbytes(a) / 4) + (a.codebook ? round_up(a.k, a.group) : a.k);
}

void run(const QuantizedLinearArgs& a, float* scratch, int64_t scratch_floats, int threads) {
  Work work = {};
  work.f = {a.group, (a.k + a.group - 1) / a.group, a.bits, a.scale_dtype, a.symmetric, a.codebook};
  const Route route = route_of(a);
  const bool large = route == Route::VNNI || route == Route::BF16 || (route == Route::FLOAT && a.x_dtype == F32);
  int64_t block = std::min(large ? M_BLOCK_DIRECT : M_BLOCK, a.m);
  while (block > 1 && scratch_floats_for(a, block) > scratch_floats) block = (block + 1) / 2;
  for (int64_t m0 = 0; m0 < a.m; m0 += block) {
    const int64_t m1 = std::min(a.m, m0 + block);
#if FB_BF16_UNPACKED
    if (route == Route::BF16) { run_bf16(a, work, m0, m1, scratch, threads); continue; }
#endif
#if FB_INTEGER_DOT
    if (route != Route::FLOAT) { run_integer(a, work, m0, m1, scratch, threads); continue; }
#endif
    run_float(a, work, m0, m1, scratch, threads);
  }
}

}  // namespace

// 1 where the routes by integers exist, 2 where those for VNNI do, 3 where that by bf16 does too.
extern "C" int forebay_integer_dot() {
#if FB_BF16_UNPACKED
  return 3;
#elif FB_VNNI
  return 2;
#elif FB_INTEGER_DOT
  return 1;
#else
  return 0;
#endif
}

// 1 where there is a route by integers for codebooks whose numbers fit bytes, 2 for all of 16 numbers. Groups that it does
// not take are multiplied as floats.
extern "C" int forebay_integer_codebooks() { return codes_are_integers(NF4, 64) ? 2 : codes_are_integers(E2M1, 64); }

// Needs a group of 16 (then K a multiple of 32, and x as integers of 16 bits or as fp32), or a multiple of 32 up to 512,
// and scratch for one row of x. Writes out[m, n] only.
extern "C" int forebay_linear_q(const QuantizedLinearArgs* a, float* scratch, int64_t scratch_floats,
                                        int threads) {
  if (a->m == 0 || a->n == 0) return 0;
  const bool pairs = a->group == 16 && a->k % 32 == 0 && a->integer_nbytes != 1;
  if ((a->group % 32 && !pairs) || a->group > UNPACK_K || scratch_floats_for(*a, 1) > scratch_floats) return 1;
  if (a->integer_nbytes && !forebay_integer_dot()) return 1;
  if (a->codebook && a->integer_nbytes && (a->integer_nbytes != 2 || !codes_are_integers(a->codebook, 64))) return 1;
  if (a->codebook && a->bf16_panels) return 1;
  if (a->bf16_panels && (forebay_integer_dot() < 3 || a->x_dtype == F16)) return 1;
  if (a->integer_nbytes == 1 && a->bits == 8 && route_of(*a) == Route::INTEGER) return 1;
  run(*a, scratch, scratch_floats, threads);
  return 0;
}
