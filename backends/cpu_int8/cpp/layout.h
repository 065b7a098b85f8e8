// Bytes and words in another order: what is laid out for the products goes through here. By vector instructions where
// there are any; the plain loops behind them do the rest, and all of it elsewhere.

#pragma once

#include <algorithm>

#include "tile.h"

namespace dpq {

// Four rows of `width` bytes side by side: out[4 i + j] = row j [i]
inline void interleave(const uint8_t* const (&rows)[4], int64_t width, uint8_t* out) {
  int64_t i = 0;
#if defined(__SSE2__)
  for (; i + 16 <= width; i += 16) {
    __m128i r[4];
    for (int j = 0; j < 4; j++) r[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j] + i));
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpacklo_epi8(r[2], r[3]);
    const __m128i c = _mm_unpackhi_epi8(r[0], r[1]), d = _mm_unpackhi_epi8(r[2], r[3]);
    __m128i* at = reinterpret_cast<__m128i*>(out + 4 * i);
    _mm_storeu_si128(at, _mm_unpacklo_epi16(a, b)), _mm_storeu_si128(at + 1, _mm_unpackhi_epi16(a, b));
    _mm_storeu_si128(at + 2, _mm_unpacklo_epi16(c, d)), _mm_storeu_si128(at + 3, _mm_unpackhi_epi16(c, d));
  }
#endif
  for (; i < width; i++)
    for (int j = 0; j < 4; j++) out[4 * i + j] = rows[j][i];
}

// NR rows of `terms` bytes as a panel: out[k][n][i] = row n [4 k + i] - zero, zeros past the end
inline void panel_of_rows(const uint8_t* const (&rows)[NR], int64_t terms, int zero, int8_t* out) {
  int64_t k = 0;
#if defined(__SSE2__)
  const __m128i zeros = _mm_set1_epi8(char(zero));
  for (; 4 * k + 16 <= terms; k += 4)
    for (int n = 0; n < NR; n += 4) {
      __m128i r[4];
      for (int j = 0; j < 4; j++)
        r[j] = _mm_sub_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[n + j] + 4 * k)), zeros);
      const __m128i a = _mm_unpacklo_epi32(r[0], r[1]), b = _mm_unpacklo_epi32(r[2], r[3]);
      const __m128i c = _mm_unpackhi_epi32(r[0], r[1]), d = _mm_unpackhi_epi32(r[2], r[3]);
      __m128i* to = reinterpret_cast<__m128i*>(out + k * STEP + 4 * n);
      constexpr int next = STEP / sizeof(__m128i);
      _mm_storeu_si128(to, _mm_unpacklo_epi64(a, b)), _mm_storeu_si128(to + next, _mm_unpackhi_epi64(a, b));
      _mm_storeu_si128(to + 2 * next, _mm_unpacklo_epi64(c, d));
      _mm_storeu_si128(to + 3 * next, _mm_unpackhi_epi64(c, d));
    }
#endif
  for (; 4 * k < terms; k++)
    for (int n = 0; n < NR; n++)
      for (int i = 0; i < 4; i++)
        out[k * STEP + 4 * n + i] = 4 * k + i < terms ? int8_t(rows[n][4 * k + i] - zero) : int8_t(0);
}

#if defined(__SSE2__)
// The two halves of sixteen vectors, interleaved by bytes. Four times this is a transposition.
inline void shuffle(const __m128i (&from)[16], __m128i (&to)[16]) {
  for (int j = 0; j < 8; j++) {
    to[2 * j] = _mm_unpacklo_epi8(from[j], from[j + 8]);
    to[2 * j + 1] = _mm_unpackhi_epi8(from[j], from[j + 8]);
  }
}
#endif

// out[t * next + i] = in[i * taps + t] - zero; may read 15 bytes past the end of `in`
inline void taps_first(const uint8_t* in, int64_t count, int64_t taps, uint8_t zero, uint8_t* out, int64_t next) {
  int64_t i = 0;
#if defined(__SSE2__)
  const __m128i zeros = _mm_set1_epi8(char(zero));
  for (; taps > 1 && i + 16 <= count; i += 16)
    for (int64_t first = 0; first < taps; first += 16) {
      __m128i a[16], b[16];
      for (int j = 0; j < 16; j++)
        a[j] = _mm_sub_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + (i + j) * taps + first)), zeros);
      for (int round = 0; round < 2; round++) {
        shuffle(a, b);
        shuffle(b, a);
      }
      const int64_t many = std::min<int64_t>(16, taps - first);
      for (int64_t t = 0; t < many; t++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (first + t) * next + i), a[t]);
    }
#endif
  for (int64_t t = 0; t < taps; t++)
    for (int64_t j = i; j < count; j++) out[t * next + j] = uint8_t(in[j * taps + t] - zero);
}

}  // namespace dpq
