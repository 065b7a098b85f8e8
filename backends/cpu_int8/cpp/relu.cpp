// One bit for each element of a map: what the backward of a ReLU has to know of it. A word of memory is eight elements.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PIECE = 1 << 12;  // bytes of bits that a thread takes at a time

inline uint8_t bits_of(const float* x, int count) {
  uint8_t bits = 0;
  for (int i = 0; i < count; i++) bits |= uint8_t(!(x[i] <= 0.0f)) << i;
  return bits;
}

void pack(const float* x, int64_t bytes, uint8_t* bits) {
  for (int64_t i = 0; i < bytes; i++) {
#if defined(__AVX2__)
    const __m256 positive = _mm256_cmp_ps(_mm256_loadu_ps(x + 8 * i), _mm256_setzero_ps(), _CMP_NLE_UQ);
    bits[i] = uint8_t(_mm256_movemask_ps(positive));
#else
    bits[i] = bits_of(x + 8 * i, 8);
#endif
  }
}

void mask(const float* x, int64_t bytes, const uint8_t* bits, float* out) {
#if defined(__AVX2__)
  const __m256i which = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
#endif
  for (int64_t i = 0; i < bytes; i++) {
#if defined(__AVX2__)
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits[i]), which), which);
    _mm256_storeu_ps(out + 8 * i, _mm256_and_ps(_mm256_loadu_ps(x + 8 * i), _mm256_castsi256_ps(set)));
#else
    for (int j = 0; j < 8; j++) out[8 * i + j] = bits[i] >> j & 1 ? x[8 * i + j] : 0.0f;
#endif
  }
}

}  // namespace

extern "C" {

// bits[i / 8] >> (i % 8) & 1 is 0 where x[i] <= 0, else 1; for NaN 1, since there a gradient goes through.
void dpq_positive_bits(const float* x, int64_t size, uint8_t* bits, int threads) {
  const int64_t whole = size / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < whole; at += PIECE) pack(x + 8 * at, std::min(PIECE, whole - at), bits + at);
  if (size % 8) bits[whole] = bits_of(x + 8 * whole, int(size % 8));
}

// out[i] = x[i] where the bit is set, else 0. `out` may be `x`.
void dpq_masked_by_bits(const float* x, int64_t size, const uint8_t* bits, float* out, int threads) {
  const int64_t whole = size / 8;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < whole; at += PIECE)
    mask(x + 8 * at, std::min(PIECE, whole - at), bits + at, out + 8 * at);
  for (int64_t i = 8 * whole; i < size; i++) out[i] = bits[whole] >> (i % 8) & 1 ? x[i] : 0.0f;
}

}  // extern "C"
