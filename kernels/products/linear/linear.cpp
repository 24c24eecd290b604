// y = act(x W^T + b) * multiplier + residual. Few rows of x: each weight is loaded from memory once and upcast in
// registers. Many: panels of weights are expanded to fp32 (panels.h), once per 64 rows of x, or 256 that are fp32. bf16
// with bf16 takes the processor's instructions for it where there are any (bf16_products.h).
#include <algorithm>

#include "bf16_products.h"
#include "finish.h"
#include "panels.h"
#include "product_args.h"
#include "row_groups.h"
#include "team.h"

using namespace forebay;

namespace {

// Tried on Zen 3 (32 KiB L1, 512 KiB L2): other blocks cost 5 to 40 % at 1, 8 or 32 rows.
constexpr int64_t M_BLOCK = 64, M_BLOCK_DIRECT = 256;
constexpr int64_t N_CHUNK = 24;       // weight rows per task
constexpr int64_t K_BLOCK = 2048;     // 24 x 2048 bf16 is 96 KiB, resident in L2 while the rows of x pass
constexpr int64_t COLUMN_CHUNK = 768;
constexpr int64_t OUTER_K_BLOCK = 8;  // rows a power of two apart share one L1 set: 8 ways hold 8 rows
constexpr int64_t BF16_CHUNK_NBYTES = 1 << 18;  // of weights per task, of few rows of bf16 with bf16
// Rows of x that meet weights in groups, and weight rows of such a task, at most. On two cores of Zen 4 groups take 0.5
// to 0.7 of the time otherwise taken for 3 to 32 rows of fp32, with AVX2 too, and as long for 2; 0.5 to 0.9 for 5 to 32
// of bf16.
constexpr int64_t FEWEST_ROWS = 3, GROUP_ROWS = 48, GROUPS_CHUNK = 192;
constexpr int64_t PANELS_CHUNK = 64;  // weight rows per task in panels: 64 KiB of results
// Rows of x from which panels take less time, on one core of Zen 3: at 64 rows 88 GFLOP/s for 60 in fp32, 90 for 84 in
// bf16, which the other way reads at half the bytes.
template <class W> constexpr int64_t PANEL_ROWS = sizeof(W) == 4 ? 12 : 32;

}  // namespace

namespace {

float bias_at(const LinearArgs& a, int64_t n) {
  if (!a.bias) return 0.0f;
  if (a.bias_dtype == F32) return load_one(static_cast<const float*>(a.bias) + n);
  if (a.bias_dtype == BF16) return load_one(static_cast<const bf16*>(a.bias) + n);
  return load_one(static_cast<const f16*>(a.bias) + n);
}

template <class O> void add_out(const LinearArgs& a, float* c, int64_t cs, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  for (int64_t m = m0; m < m1; ++m)
    for (int64_t n = n0; n < n1; ++n)
      c[(m - m0) * cs + n - n0] += load_one(static_cast<const O*>(a.out) + m * a.out_stride + n);
}

void upcast_row(const LinearArgs& a, int64_t m, float* to) {
  if (a.x_dtype == BF16) upcast(static_cast<const bf16*>(a.x) + m * a.x_stride, to, a.k);
  else if (a.x_dtype == F16) upcast(static_cast<const f16*>(a.x) + m * a.x_stride, to, a.k);
}

void begin_rows(const LinearArgs& a, float* c, int64_t cs, int64_t m, int64_t n0, int64_t n) {
  for (int64_t j = 0; j < n; ++j) c[j] = bias_at(a, n0 + j);
  for (int64_t j = n; j < cs; ++j) c[j] = 0.0f;
  for (int64_t i = 1; i < m; ++i) std::memcpy(c + i * cs, c, size_t(cs) * 4);
}

void end_rows(const LinearArgs& a, float* c, int64_t cs, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if (a.accumulate) {
    if (a.out_dtype == F32) add_out<float>(a, c, cs, m0, m1, n0, n1);
    else if (a.out_dtype == BF16) add_out<bf16>(a, c, cs, m0, m1, n0, n1);
    else add_out<f16>(a, c, cs, m0, m1, n0, n1);
  }
  write_product(a, c, cs, m0, m1, n0, n1);
}

// One task: rows [m0, m1) of x against weight rows (columns, for conv1d) [n0, n1).
template <class W>
void run_chunk(const LinearArgs& a, const float* x, int64_t xs, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  alignas(64) float c[M_BLOCK * std::max(N_CHUNK, COLUMN_CHUNK)];
  const int64_t m = m1 - m0, n = n1 - n0, cs = (n + VL - 1) / VL * VL;
  begin_rows(a, c, cs, m, n0, n);
  const W* w = static_cast<const W*>(a.w);
  if (a.conv1d)
    for (int64_t k0 = 0; k0 < a.k; k0 += OUTER_K_BLOCK)
      multiply_outer(x + k0, xs, w + k0 * a.w_stride + n0, a.w_stride, m, n, std::min(OUTER_K_BLOCK, a.k - k0), c, cs);
  else
    for (int64_t k0 = 0; k0 < a.k; k0 += K_BLOCK)  // more rows of x are in groups or meet panels
      multiply_dot<FB_ROW_GROUPS>(x + k0, xs, w + n0 * a.w_stride + k0, a.w_stride, m, n, std::min(K_BLOCK, a.k - k0), c, cs);
  end_rows(a, c, cs, m0, m1, n0, n1);
}

#if FB_ROW_GROUPS
bool in_groups(const LinearArgs& a) { return !a.conv1d && a.m >= FEWEST_ROWS && a.m <= GROUP_ROWS; }

// m rows of x from m0 on in groups, which are packed, against weight rows [n0, n1).
template <class Kind>
void run_groups(const LinearArgs& a, const vf* packed, int64_t m0, int64_t m, int64_t n0, int64_t n1) {
  alignas(64) float c[(GROUP_ROWS + GROUP) * GROUPS_CHUNK], sums[sums_of_groups(GROUP_ROWS, GROUPS_CHUNK)];
  const int64_t n = n1 - n0, cs = round_up(n, VL), one = (n + GROUP) * GROUP;
  for (int64_t j = 0; j < n + GROUP; ++j) std::fill_n(sums + j * GROUP, GROUP, j < n ? bias_at(a, n0 + j) : 0.0f);
  for (int64_t g = 1; g < (m + GROUP - 1) / GROUP; ++g) std::memcpy(sums + g * one, sums, size_t(one) * 4);
  const auto* w = static_cast<const typename Kind::Weight*>(a.w) + n0 * a.w_stride;
  for (int64_t k0 = 0; k0 < a.k; k0 += std::min(a.k, Kind::BLOCK))
    multiply_groups<Kind>(packed + k0 / Kind::STEP * m, w + k0, a.w_stride, m, n, std::min(Kind::BLOCK, a.k - k0),
                          sums);
  write_groups(sums, m, n, c, cs);
  end_rows(a, c, cs, m0, m0 + m, n0, n1);
}

// x[m, k] from (m0, k0) on as groups of this kind take it.
template <class Packs>
void pack_any(const LinearArgs& a, int64_t m0, int64_t k0, int64_t m, int64_t k, vf* packed) {
  const int64_t at = m0 * a.x_stride + k0;
  if constexpr (Packs::STEP == VL) {
    if (a.x_dtype == F32) return pack_groups<Packs>(static_cast<const float*>(a.x) + at, a.x_stride, m, k, packed);
    if (a.x_dtype == F16) return pack_groups<Packs>(static_cast<const f16*>(a.x) + at, a.x_stride, m, k, packed);
  }
  pack_groups<Packs>(static_cast<const bf16*>(a.x) + at, a.x_stride, m, k, packed);
}

template <class Kind> void run_in_groups(const LinearArgs& a, float* scratch, int64_t scratch_floats, int threads) {
  const int64_t row = std::max<int64_t>(1, vectors_of<Kind>(a.k)), share = (a.n + 4 * threads - 1) / (4 * threads);
  // Whole lines: vectors that lie in two of them are loaded at half the rate.
  auto* packed = reinterpret_cast<vf*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  const int64_t most = std::clamp<int64_t>((scratch_floats - VL) / VL / row, 1, GROUP_ROWS);
  const int64_t chunk = std::min(GROUPS_CHUNK, round_up(share, TOGETHER));
  for (int64_t m0 = 0; m0 < a.m; m0 += most) {
    const int64_t m = std::min(most, a.m - m0);
    for (int64_t k0 = 0; k0 < a.k; k0 += std::min(a.k, Kind::BLOCK))
      pack_any<typename Kind::Packs>(a, m0, k0, m, std::min(Kind::BLOCK, a.k - k0), packed + k0 / Kind::STEP * m);
    // 64 products a ns, or 16 GB/s of weights.
    parallel_for((a.n + chunk - 1) / chunk, threads, m * a.n * a.k / 64 + a.n * a.k / 8, [&](int64_t i) {
      run_groups<Kind>(a, packed, m0, m, i * chunk, std::min(a.n, (i + 1) * chunk));
    });
  }
}
#endif

// The same in panels.
template <class W>
void run_panels(const LinearArgs& a, const float* x, int64_t xs, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  alignas(64) float c[M_BLOCK_DIRECT * PANELS_CHUNK];
  const int64_t m = m1 - m0, n = n1 - n0, cs = round_up(n, PANEL);
  begin_rows(a, c, cs, m, n0, n);
  const W* w = static_cast<const W*>(a.w);
  multiply_panels(x, xs, m, n, a.k, c, cs, [&](int64_t j0, int64_t rows, int64_t k0, int64_t depth, float* panel) {
    if (a.conv1d) {
      for (int64_t i = 0; i < depth; ++i, panel += PANEL) {
        upcast(w + (k0 + i) * a.w_stride + n0 + j0, panel, rows);
        std::memset(panel + rows, 0, size_t(PANEL - rows) * 4);
      }
    } else {
      fill_panel(rows, depth, panel, [&](int64_t j, float* to) {
        upcast(w + (n0 + j0 + j) * a.w_stride + k0, to, depth);
      });
    }
  }, [&](int64_t j, int64_t k0, int64_t depth) {
    if (!a.conv1d) call_in(w + (n0 + j) * a.w_stride + k0, 0, depth * int64_t(sizeof(W)) + 63);
  });
  end_rows(a, c, cs, m0, m1, n0, n1);
}

#if FB_BF16
bool takes_bf16(const LinearArgs& a) {
  const bool both = a.x_dtype == BF16 && a.w_dtype == BF16;
  return both && (a.m > bf16_products::FEW_ROWS || !a.conv1d);
}

// Rows [m0, m1) of x, as they lie or as panels want them, against weight rows (columns) [n0, n1).
void run_bf16_chunk(const LinearArgs& a, const char* x, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  alignas(64) float c[M_BLOCK_DIRECT * PANELS_CHUNK];
  const int64_t m = m1 - m0, n = n1 - n0, cs = round_up(n, PANEL);
  begin_rows(a, c, cs, m, n0, n);
  const bf16* w = static_cast<const bf16*>(a.w) + (a.conv1d ? n0 : n0 * a.w_stride);
  using bf16_products::Weights;
  if (x && a.conv1d) bf16_products::panel_product<Weights::COLUMNS>(x, m, w, a.w_stride, n, a.k, c, cs);
  else if (x) bf16_products::panel_product<Weights::STREAM>(x, m, w, a.w_stride, n, a.k, c, cs);
  else bf16_products::dot_product(static_cast<const bf16*>(a.x) + m0 * a.x_stride, a.x_stride, w, a.w_stride, m, n,
                                  a.k, c, cs);
  end_rows(a, c, cs, m0, m1, n0, n1);
}

void run_bf16(const LinearArgs& a, float* scratch, int64_t scratch_floats, int threads) {
  const int64_t nbytes = bf16_products::row_nbytes(a.k);
  const bool panels = a.m > bf16_products::FEW_ROWS;
  const int64_t m_block = panels ? std::min({M_BLOCK_DIRECT, a.m, scratch_floats * 4 / nbytes}) : a.m;
  char* x = panels ? reinterpret_cast<char*>(scratch) : nullptr;
  for (int64_t m0 = 0; m0 < a.m; m0 += m_block) {
    const int64_t m1 = std::min(a.m, m0 + m_block), m = m1 - m0;
    if (panels)
      parallel_parts(m, threads, m * a.k / 8, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          bf16_products::copy_row(static_cast<const bf16*>(a.x) + (m0 + i) * a.x_stride, a.k, x + i * nbytes);
      });
    const int64_t most = std::max(PANELS_CHUNK, M_BLOCK_DIRECT * PANELS_CHUNK / m / PANEL * PANEL);
    const int64_t share = (a.n + 4 * threads - 1) / (4 * threads);
    const int64_t rows = std::max<int64_t>(8, BF16_CHUNK_NBYTES / (2 * a.k + 1)) / 4 * 4;
    const int64_t chunk = panels ? panel_chunk(a.n, std::min(most, round_up(share, PANEL)), threads)
                                 : std::min({round_up(share, 4), rows, most});
    // 128 products a ns, or 16 GB/s of weights.
    parallel_for((a.n + chunk - 1) / chunk, threads, m * a.n * a.k / 128 + a.n * a.k / 8, [&](int64_t i) {
      run_bf16_chunk(a, x, m0, m1, i * chunk, std::min(a.n, (i + 1) * chunk));
    });
  }
}
#endif

template <class W> void run(const LinearArgs& a, float* scratch, int64_t scratch_floats, int threads) {
#if FB_ROW_GROUPS
  if (in_groups(a)) return run_in_groups<Fp32Rows<W>>(a, scratch, scratch_floats, threads);
#endif
  const bool direct = a.x_dtype == F32, panels = a.m >= PANEL_ROWS<W>;
  const int64_t fitting = a.k ? std::max<int64_t>(1, scratch_floats / a.k) : M_BLOCK;
  const int64_t m_block = direct ? (panels ? M_BLOCK_DIRECT : M_BLOCK) : std::min(M_BLOCK, fitting);
  const int64_t unit = a.conv1d ? 8 * VL : 12, most = a.conv1d ? COLUMN_CHUNK : N_CHUNK;
  // Four tasks a thread even out a busy core; a task is never smaller than one register block.
  const int64_t share = (a.n + 4 * threads - 1) / (4 * threads);
  const int64_t chunk =
      panels ? panel_chunk(a.n, PANELS_CHUNK, threads) : std::min(most, (share + unit - 1) / unit * unit);
  const int64_t chunks = (a.n + chunk - 1) / chunk;
  for (int64_t m0 = 0; m0 < a.m; m0 += m_block) {
    const int64_t m1 = std::min(a.m, m0 + m_block);
    const float* x = scratch;
    int64_t xs = a.k;
    if (direct) {
      x = static_cast<const float*>(a.x) + m0 * a.x_stride;
      xs = a.x_stride;
    } else {
      parallel_parts(m1 - m0, threads, (m1 - m0) * a.k / 8, [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; ++m) upcast_row(a, m0 + m, scratch + m * a.k);
      });
    }
    // 32 products a ns, or 16 GB/s of weights.
    parallel_for(chunks, threads, (m1 - m0) * a.n * a.k / 32 + a.n * a.k / 8, [&](int64_t i) {
      const auto task = panels ? run_panels<W> : run_chunk<W>;
      task(a, x, xs, m0, m1, i * chunk, std::min(a.n, (i + 1) * chunk));
    });
  }
}

}  // namespace

// `scratch` holds scratch_floats >= k + 64 floats, unless x is fp32 and its rows are in no groups. Writes out[m, n] only.
extern "C" int forebay_linear(const LinearArgs* a, float* scratch, int64_t scratch_floats, int threads) {
  if (a->m == 0 || a->n == 0) return 0;
#if FB_BF16
  if (takes_bf16(*a)) {
    if (in_groups(*a) && a->m > bf16_products::FEW_ROWS)
      run_in_groups<bf16_products::GroupRows>(*a, scratch, scratch_floats, threads);
    else
      run_bf16(*a, scratch, scratch_floats, threads);
    return 0;
  }
#endif
  if (a->w_dtype == F32) run<float>(*a, scratch, scratch_floats, threads);
  else if (a->w_dtype == BF16) run<bf16>(*a, scratch, scratch_floats, threads);
  else run<f16>(*a, scratch, scratch_floats, threads);
  return 0;
}
