// The Hadamard rotation of blocks of 64 or 16 neighbouring numbers, in the order of `rotate_features` of
// numerics/hadamard.py: (a, b) → (a + b, a − b), the nearest neighbours first, then times a power of two.

#include <omp.h>

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// 16 numbers. `within` does the four levels inside of them: each number is added to its partner, and of the second of
// the two the sign is turned first, so that a − b is a + (−b).
#if defined(__AVX512F__) && defined(__AVX512DQ__)

struct Row {
  __m512 v;
};

inline Row load(const float* x) { return {_mm512_loadu_ps(x)}; }
inline void store(float* x, Row a, float factor) { _mm512_storeu_ps(x, _mm512_mul_ps(a.v, _mm512_set1_ps(factor))); }
inline Row add(Row a, Row b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Row subtract(Row a, Row b) { return {_mm512_sub_ps(a.v, b.v)}; }

inline __m512 level(__m512 v, __m512 partners, __mmask16 second) {
  const __m512 minus = _mm512_set1_ps(-0.0f);
  return _mm512_add_ps(partners, _mm512_mask_xor_ps(v, second, v, minus));
}

inline Row within(Row a) {
  __m512 v = a.v;
  v = level(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
  v = level(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
  v = level(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
  v = level(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
  return {v};
}

#elif defined(__AVX2__)

struct Row {
  __m256 low, high;
};

inline Row load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline void store(float* x, Row a, float factor) {
  _mm256_storeu_ps(x, _mm256_mul_ps(a.low, _mm256_set1_ps(factor)));
  _mm256_storeu_ps(x + 8, _mm256_mul_ps(a.high, _mm256_set1_ps(factor)));
}
inline Row add(Row a, Row b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Row subtract(Row a, Row b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }

inline __m256 within_half(__m256 v) {
  const float n = -0.0f;
  v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, _mm256_setr_ps(0, n, 0, n, 0, n, 0, n)));
  v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, _mm256_setr_ps(0, 0, n, n, 0, 0, n, n)));
  return _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, _mm256_setr_ps(0, 0, 0, 0, n, n, n, n)));
}

inline Row within(Row a) {
  const __m256 low = within_half(a.low), high = within_half(a.high);
  return {_mm256_add_ps(low, high), _mm256_sub_ps(low, high)};
}

#else

struct Row {
  float v[16];
};

inline Row load(const float* x) {
  Row a;
  for (int i = 0; i < 16; i++) a.v[i] = x[i];
  return a;
}
inline void store(float* x, Row a, float factor) {
  for (int i = 0; i < 16; i++) x[i] = a.v[i] * factor;
}
inline Row add(Row a, Row b) {
  for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
  return a;
}
inline Row subtract(Row a, Row b) {
  for (int i = 0; i < 16; i++) a.v[i] -= b.v[i];
  return a;
}

inline Row within(Row a) {
  for (int step = 1; step < 16; step *= 2)
    for (int at = 0; at < 16; at += 2 * step)
      for (int i = at; i < at + step; i++) {
        const float first = a.v[i], second = a.v[i + step];
        a.v[i] = first + second;
        a.v[i + step] = first - second;
      }
  return a;
}

#endif

void rotate16(const float* x, int64_t blocks, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < blocks; at++) store(out + 16 * at, within(load(x + 16 * at)), 0.25f);
}

void rotate64(const float* x, int64_t blocks, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < blocks; at++) {
    const float* from = x + 64 * at;
    const Row a = within(load(from)), b = within(load(from + 16));
    const Row c = within(load(from + 32)), d = within(load(from + 48));
    const Row first = add(a, b), second = subtract(a, b), third = add(c, d), fourth = subtract(c, d);
    float* to = out + 64 * at;
    store(to, add(first, third), 0.125f);
    store(to + 16, add(second, fourth), 0.125f);
    store(to + 32, subtract(first, third), 0.125f);
    store(to + 48, subtract(second, fourth), 0.125f);
  }
}

}  // namespace

extern "C" {

// `blocks` blocks of `size` numbers, 64 or 16.
void dpq_rotate(const float* x, int64_t blocks, int64_t size, float* out, int threads) {
  if (size == 64)
    rotate64(x, blocks, out, threads);
  else
    rotate16(x, blocks, out, threads);
}

}  // extern "C"
