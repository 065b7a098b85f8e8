// The inner loop of every int8 product: a tile of MR rows by NR columns.
//
// Rows are unsigned bytes (a code plus the zero point), columns are signed bytes, four steps of the contraction side by
// side, as dot-product instructions want them. Sums are exact int32.
//
//   panel   [steps][NR][4] int8: NR columns, the contraction in steps of four, zeros past its end
//   depth   how many steps may be added up in 16 bits before they are widened. Without dot-product instructions, AVX2
//           multiplies into 16 bits, and widening each product costs as much as the product. `pack` finds, from the
//           numbers that are really in a panel, how many steps cannot overflow, so the result is exact all the same. Of
//           8-bit codes not even one may: depth 0 multiplies the upper seven bits of a row and the lowest apart.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace dpq {

constexpr int DEEP = 4;  // the depth that `pack` tries first

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int LANES = 16;
constexpr const char* NAME = "AVX512-VNNI";
using Vector = __m512i;
inline Vector zero() { return _mm512_setzero_si512(); }
inline Vector load(const void* p) { return _mm512_loadu_si512(p); }
inline void store(void* p, Vector v) { _mm512_storeu_si512(p, v); }
inline Vector add(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
inline Vector broadcast(const uint8_t* p) { int32_t v; std::memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
inline Vector dot(Vector acc, Vector u, Vector s) { return _mm512_dpbusd_epi32(acc, u, s); }
inline void add_scaled(float* to, Vector v, float factor) {
  const __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_cvtepi32_ps(v));
  _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), scaled));
}
#define DPQ_DOT 1

#elif defined(__AVX2__)

constexpr int LANES = 8;
using Vector = __m256i;
inline Vector zero() { return _mm256_setzero_si256(); }
inline Vector load(const void* p) { return _mm256_loadu_si256(static_cast<const Vector*>(p)); }
inline void store(void* p, Vector v) { _mm256_storeu_si256(static_cast<Vector*>(p), v); }
inline Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
inline Vector broadcast(const uint8_t* p) { int32_t v; std::memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
inline void add_scaled(float* to, Vector v, float factor) {
  const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(v));
  _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), scaled));
}
#if defined(__AVXVNNI__)
constexpr const char* NAME = "AVX-VNNI";
inline Vector dot(Vector acc, Vector u, Vector s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
#define DPQ_DOT 1
#else
constexpr const char* NAME = "AVX2";
#endif

#else

constexpr int LANES = 4;
struct Vector { int32_t v[LANES]; };
inline Vector zero() { return {}; }
inline Vector load(const void* p) { Vector r; std::memcpy(&r, p, sizeof r); return r; }
inline void store(void* p, Vector v) { std::memcpy(p, &v, sizeof v); }
inline Vector add(Vector a, Vector b) { for (int i = 0; i < LANES; i++) a.v[i] += b.v[i]; return a; }
inline Vector broadcast(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return {{v, v, v, v}};
}
inline void add_scaled(float* to, Vector v, float factor) {
  for (int i = 0; i < LANES; i++) to[i] += factor * float(v.v[i]);
}
#if defined(__ARM_FEATURE_DOTPROD)
constexpr const char* NAME = "NEON dot product";
inline Vector dot(Vector acc, Vector u, Vector s) {
  // Signed times signed only: u - 128 is signed, and 128 times the sum of s makes up for it.
  int8x16_t b, ones = vdupq_n_s8(1);
  uint8x16_t a;
  int32x4_t c;
  std::memcpy(&a, &u, 16), std::memcpy(&b, &s, 16), std::memcpy(&c, &acc, 16);
  c = vdotq_s32(c, vreinterpretq_s8_u8(veorq_u8(a, vdupq_n_u8(128))), b);
  c = vaddq_s32(c, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), ones, b), 7));
  std::memcpy(&acc, &c, 16);
  return acc;
}
#else
constexpr const char* NAME = "scalar";
inline Vector dot(Vector acc, Vector u, Vector s) {
  uint8_t a[4 * LANES];
  int8_t b[4 * LANES];
  std::memcpy(a, &u, sizeof a), std::memcpy(b, &s, sizeof b);
  for (int i = 0; i < 4 * LANES; i++) acc.v[i / 4] += int32_t(a[i]) * b[i];
  return acc;
}
#endif
#define DPQ_DOT 1

#endif

// A tile's sums must stay in registers: 2 MR of them, beside two vectors of columns and one of a row.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int MR = 8;  // of 32 registers
#elif defined(__AVXVNNI__)
constexpr int MR = 6;  // of 16
#elif defined(DPQ_DOT)
constexpr int MR = 4;
#else
constexpr int MR = 3;  // of 16, with as many 16-bit parts of the sums
#endif
constexpr int VECTORS = 2;
constexpr int NR = VECTORS * LANES;
constexpr int STEP = NR * 4;                      // bytes of a panel per step
constexpr int64_t LONGEST = int64_t(1) << 16;     // terms whose sum fits int32: 255 · 127 · 2^16 < 2^31
constexpr int SLACK_BYTES = 64;                   // rows may be read this far past their end

struct Tile {
  alignas(64) int32_t sum[MR][NR];
};

// A contraction in parts that lie apart, such as the taps of a conv: rows [parts][MR] and one panel for each.
struct Parts {
  const uint8_t* const* rows;
  const int8_t* const* panels;
  int64_t count;
  int64_t steps;       // of each part
  int64_t stride = 4;  // bytes from one step of a row to the next
};

// The rows of a tile with their sums: each a member of its own, since arrays of them would live in memory.
#if defined(DPQ_DOT)

template <int rows>
struct Strip {
  const uint8_t* at;
  Vector c0 = zero(), c1 = zero();
  Strip<rows - 1> rest;

  inline void begin(const uint8_t* const* from) { at = *from, rest.begin(from + 1); }
  inline void step(int64_t offset, Vector b0, Vector b1) {
    const Vector u = broadcast(at + offset);
    c0 = dot(c0, u, b0), c1 = dot(c1, u, b1);
    rest.step(offset, b0, b1);
  }
  inline void write(int32_t (*sum)[NR]) const { store(*sum, c0), store(*sum + LANES, c1), rest.write(sum + 1); }
  // sum += factor · (these + offsets)
  inline void weigh(float (*sum)[NR], Vector o0, Vector o1, float factor) const {
    add_scaled(*sum, add(c0, o0), factor), add_scaled(*sum + LANES, add(c1, o1), factor);
    rest.weigh(sum + 1, o0, o1, factor);
  }
};

template <>
struct Strip<0> {
  inline void begin(const uint8_t* const*) {}
  inline void step(int64_t, Vector, Vector) {}
  inline void write(int32_t (*)[NR]) const {}
  inline void weigh(float (*)[NR], Vector, Vector, float) const {}
};

struct Sums : Strip<MR> {
  // `depth` steps from `offset` on
  template <int depth>
  inline void advance(int64_t offset, int64_t stride, const int8_t* panel) {
#pragma GCC unroll 4
    for (int d = 0; d < depth; d++)
      step(offset + d * stride, load(panel + d * STEP), load(panel + d * STEP + 4 * LANES));
  }
};

#else

struct Sums {
  const uint8_t *a0, *a1, *a2;
  Vector c00 = zero(), c01 = zero(), c10 = zero(), c11 = zero(), c20 = zero(), c21 = zero();

  inline void begin(const uint8_t* const* from) { a0 = from[0], a1 = from[1], a2 = from[2]; }

  template <int depth>
  inline void advance(int64_t offset, int64_t stride, const int8_t* panel) {
    Vector n00, n01, n10, n11, n20, n21;
#pragma GCC unroll 4
    for (int d = 0; d < depth; d++) {
      Vector b0 = load(panel + d * STEP), b1 = load(panel + d * STEP + 4 * LANES);
      const int64_t at = offset + d * stride;
      const Vector u0 = broadcast(a0 + at), u1 = broadcast(a1 + at), u2 = broadcast(a2 + at);
      asm volatile("" : "+x"(b0), "+x"(b1));  // in registers: else each of three multiplications loads them anew
      const Vector p00 = _mm256_maddubs_epi16(u0, b0), p01 = _mm256_maddubs_epi16(u0, b1);
      const Vector p10 = _mm256_maddubs_epi16(u1, b0), p11 = _mm256_maddubs_epi16(u1, b1);
      const Vector p20 = _mm256_maddubs_epi16(u2, b0), p21 = _mm256_maddubs_epi16(u2, b1);
      n00 = d ? _mm256_add_epi16(n00, p00) : p00, n01 = d ? _mm256_add_epi16(n01, p01) : p01;
      n10 = d ? _mm256_add_epi16(n10, p10) : p10, n11 = d ? _mm256_add_epi16(n11, p11) : p11;
      n20 = d ? _mm256_add_epi16(n20, p20) : p20, n21 = d ? _mm256_add_epi16(n21, p21) : p21;
      // Left alone, the compiler multiplies ahead of the additions and runs out of registers.
      asm volatile("" : "+x"(n00), "+x"(n01), "+x"(n10), "+x"(n11), "+x"(n20), "+x"(n21));
    }
    const Vector ones = _mm256_set1_epi16(1);
    c00 = add(c00, _mm256_madd_epi16(n00, ones)), c01 = add(c01, _mm256_madd_epi16(n01, ones));
    c10 = add(c10, _mm256_madd_epi16(n10, ones)), c11 = add(c11, _mm256_madd_epi16(n11, ones));
    c20 = add(c20, _mm256_madd_epi16(n20, ones)), c21 = add(c21, _mm256_madd_epi16(n21, ones));
  }

  // One step of rows whose products with a panel pass 16 bits.
  inline void advance_wide(int64_t offset, const int8_t* panel) {
    const Vector b0 = load(panel), b1 = load(panel + 4 * LANES);
    wide(broadcast(a0 + offset), b0, b1, c00, c01);
    wide(broadcast(a1 + offset), b0, b1, c10, c11);
    wide(broadcast(a2 + offset), b0, b1, c20, c21);
  }

  static inline void wide(Vector u, Vector b0, Vector b1, Vector& c0, Vector& c1) {
    const Vector ones = _mm256_set1_epi16(1), twos = _mm256_set1_epi16(2);
    const Vector upper = _mm256_and_si256(_mm256_srli_epi16(u, 1), _mm256_set1_epi8(127));
    const Vector lowest = _mm256_and_si256(u, _mm256_set1_epi8(1));
    c0 = add(c0, add(_mm256_madd_epi16(_mm256_maddubs_epi16(upper, b0), twos),
                     _mm256_madd_epi16(_mm256_maddubs_epi16(lowest, b0), ones)));
    c1 = add(c1, add(_mm256_madd_epi16(_mm256_maddubs_epi16(upper, b1), twos),
                     _mm256_madd_epi16(_mm256_maddubs_epi16(lowest, b1), ones)));
  }

  inline void write(int32_t (*sum)[NR]) const {
    store(sum[0], c00), store(sum[0] + LANES, c01);
    store(sum[1], c10), store(sum[1] + LANES, c11);
    store(sum[2], c20), store(sum[2] + LANES, c21);
  }

  inline void weigh(float (*sum)[NR], Vector o0, Vector o1, float factor) const {
    add_scaled(sum[0], add(c00, o0), factor), add_scaled(sum[0] + LANES, add(c01, o1), factor);
    add_scaled(sum[1], add(c10, o0), factor), add_scaled(sum[1] + LANES, add(c11, o1), factor);
    add_scaled(sum[2], add(c20, o0), factor), add_scaled(sum[2] + LANES, add(c21, o1), factor);
  }
};

#endif

// tile = Σ over parts of rows · panel; `fixed` is the stride where the compiler shall know it, else 0
template <int depth, int fixed>
inline void multiply(Tile& tile, const Parts& parts) {
  const int64_t stride = fixed ? fixed : parts.stride;
  Sums sums;
  for (int64_t part = 0; part < parts.count; part++) {
    sums.begin(parts.rows + part * MR);
    const int8_t* panel = parts.panels[part];
    int64_t left = parts.steps, offset = 0;
    for (; left >= depth; left -= depth, panel += depth * STEP, offset += depth * stride)
      sums.advance<depth>(offset, stride, panel);
    for (; left > 0; left--, panel += STEP, offset += stride) sums.advance<1>(offset, stride, panel);
  }
  sums.write(tile.sum);
}

#if !defined(DPQ_DOT)
inline void multiply_wide(Tile& tile, const Parts& parts) {
  Sums sums;
  for (int64_t part = 0; part < parts.count; part++) {
    sums.begin(parts.rows + part * MR);
    for (int64_t k = 0; k < parts.steps; k++) sums.advance_wide(k * parts.stride, parts.panels[part] + k * STEP);
  }
  sums.write(tile.sum);
}
#endif

template <int fixed = 4>
inline void multiply(Tile& tile, const Parts& parts, int depth) {
#if !defined(DPQ_DOT)
  if (depth == 0) return multiply_wide(tile, parts);
#endif
  if (depth >= 4) multiply<4, fixed>(tile, parts);
  else if (depth >= 2) multiply<2, fixed>(tile, parts);
  else multiply<1, fixed>(tile, parts);
}

// sum += factor · (rows · panel + offset) for several samples, whose panels are all safe for DEEP steps. A tile's exact
// sums go from registers into the weighted ones: by way of memory they would cost as much as a short contraction.
struct Weighted {
  const uint8_t* rows;     // of the first sample: [steps][MR][4]
  int64_t next_rows;       // bytes to the rows of the next sample
  const int8_t* panels;    // [samples][steps]
  const int32_t* offsets;  // [samples][NR]
  const float* factors;    // [samples]
  const int64_t* samples;  // their numbers
  int64_t count, steps;
};

// `fixed` is the number of steps where the compiler shall know it, else 0
template <int fixed>
inline void weigh(float (*sum)[NR], const Weighted& w) {
  for (int64_t i = 0; i < w.count; i++) {
    const uint8_t* at[MR];
    for (int r = 0; r < MR; r++) at[r] = w.rows + w.samples[i] * w.next_rows + 4 * r;
    const int8_t* panel = w.panels + i * (fixed ? fixed : w.steps) * STEP;
    Sums sums;
    sums.begin(at);
    if (fixed) {
      sums.template advance<fixed ? fixed : 1>(0, 4 * MR, panel);
    } else {
      int64_t k = 0;
      for (; k + DEEP <= w.steps; k += DEEP) sums.template advance<DEEP>(k * 4 * MR, 4 * MR, panel + k * STEP);
      for (; k < w.steps; k++) sums.template advance<1>(k * 4 * MR, 4 * MR, panel + k * STEP);
    }
    const int32_t* offset = w.offsets + i * NR;
    sums.weigh(sum, load(offset), load(offset + LANES), w.factors[i]);
  }
}

// The depth that is safe for a panel and rows of at most `largest`: the sums of products of that many consecutive steps,
// two products per step and lane, must fit int16. 0 if those of a single step may not.
inline int safe_depth(const int8_t* panel, int64_t steps, int largest) {
#if defined(DPQ_DOT)
  (void)panel, (void)steps, (void)largest;
  return DEEP;
#else
  const Vector none = zero(), ones = _mm256_set1_epi8(1);
  Vector worst1 = none, worst2 = none, worst4 = none;
  for (int64_t k = 0; k < steps; k += 4)
    for (int v = 0; v < VECTORS; v++) {
      Vector size[4];
      for (int d = 0; d < 4; d++) {
        const Vector b = k + d < steps ? load(panel + (k + d) * STEP + v * 4 * LANES) : none;
        size[d] = _mm256_maddubs_epi16(_mm256_abs_epi8(b), ones);
        worst1 = _mm256_max_epi16(worst1, size[d]);
      }
      const Vector first = _mm256_add_epi16(size[0], size[1]), second = _mm256_add_epi16(size[2], size[3]);
      worst2 = _mm256_max_epi16(worst2, _mm256_max_epi16(first, second));
      worst4 = _mm256_max_epi16(worst4, _mm256_add_epi16(first, second));
    }
  alignas(32) int16_t lanes[3][16];
  store(lanes[0], worst1), store(lanes[1], worst2), store(lanes[2], worst4);
  int most[3] = {0, 0, 0};
  for (int i = 0; i < 16; i++)
    for (int d = 0; d < 3; d++) most[d] = std::max<int>(most[d], lanes[d][i]);
  const int limit = 32767 / largest;
  return most[2] <= limit ? 4 : most[1] <= limit ? 2 : most[0] <= limit ? 1 : 0;
#endif
}

// What rows that hold nothing but the zero point make of a panel: to be taken off every row.
inline void zero_product(const int8_t* panel, int64_t steps, int zero_point, int32_t* out) {
  const uint8_t row[4] = {uint8_t(zero_point), uint8_t(zero_point), uint8_t(zero_point), uint8_t(zero_point)};
  const Vector u = broadcast(row);
  Vector sums[VECTORS] = {zero(), zero()};
  for (int64_t k = 0; k < steps; k++)
    for (int v = 0; v < VECTORS; v++) {
      const Vector b = load(panel + k * STEP + v * 4 * LANES);
#if defined(DPQ_DOT)
      sums[v] = dot(sums[v], u, b);
#else
      sums[v] = add(sums[v], _mm256_madd_epi16(_mm256_maddubs_epi16(u, b), _mm256_set1_epi16(1)));
#endif
    }
  for (int v = 0; v < VECTORS; v++) store(out + v * LANES, sums[v]);
}

}  // namespace dpq
