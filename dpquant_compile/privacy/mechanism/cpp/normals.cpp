// Normals from the keystream of AES-256 in counter mode, by the Box-Muller transform: `privacy/mechanism/normals.py`
// has the same arithmetic in torch. Each operation rounds once, so every compiler and CPU gives the same bits.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "aes.h"

namespace {

constexpr int LANES = 16;                  // pairs of a group
constexpr int NORMALS = 2 * LANES;         // of a group
constexpr int WORDS = 3 * LANES;           // of a group
constexpr int BLOCKS = WORDS * 4 / dpq::BLOCK;  // of a group
constexpr int64_t CHUNK = 16;              // groups whose keystream waits in the nearest cache
constexpr int64_t PIECE = 64;              // chunks that a thread takes at least

template <class To, class From>
inline To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &value, sizeof(to));
  return to;
}

// -2 ln(u) for a normal u below 1: the polynomial of Cephes' logf between sqrt(1/2) and sqrt(2).
inline float minus_two_log(float u) {
  const int32_t half_root = 0x3f3504f3;
  const int32_t apart = bits_of<int32_t>(u) - half_root;
  const float e = float(apart >> 23);
  const float f = bits_of<float>((apart & 0x7fffff) + half_root) - 1.0f;
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * z + e * -2.12194440e-4f;
  p = p + z * -0.5f;
  return ((f + p) + e * 0.693359375f) * -2.0f;
}

// The normals of one group, all cosines and then all sines.
inline void transform(const int32_t* words, float std, float* out) {
#pragma omp simd simdlen(16)
  for (int i = 0; i < LANES; i++) {
    const float high = float((words[i] >> 8) & 0xffffff), low = float((words[LANES + i] >> 8) & 0xffffff);
    const float u = high * 0x1p-24f + (low + 0.5f) * 0x1p-48f;
    const float radius = std::sqrt(minus_two_log(u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f));
    const int32_t word = words[2 * LANES + i];
    // An eighth of the circle to either side, in units of quarters; the added half keeps it away from zero.
    const float t = (float(int32_t(uint32_t(word) << 2) >> 2) + 0.5f) * 0x1p-30f;
    const float y = t * t;
    const float sine = t * (((y * -4.602177e-3f + 7.9680227e-2f) * y + -6.459635e-1f) * y + 1.5707964f);
    const float cosine = (((y * 9.072072e-4f + -2.0861726e-2f) * y + 2.5366944e-1f) * y + -1.2337005f) * y + 1.0f;
    // The quarter: the upper bit turns the cosine's sign, the next one swaps the two.
    const float turned = bits_of<float>(bits_of<int32_t>(cosine) ^ (word & INT32_MIN));
    const bool swap = word & 0x40000000;
    out[i] = radius * (swap ? sine : turned) * std;
    out[LANES + i] = radius * (swap ? turned : sine) * std;
  }
}

#if defined(__AES__)
unsigned __int128 number_of(const uint8_t* big_endian) {
  unsigned __int128 number = 0;
  for (int i = 0; i < dpq::BLOCK; i++) number = number << 8 | big_endian[i];
  return number;
}
#endif

}  // namespace

extern "C" {

// The instructions that encrypt; empty if there are none, and no `dpq_keystream` and `dpq_normals`.
const char* dpq_cipher() { return dpq::CIPHER; }

// out[group] = the normals of words[group], times std
void dpq_transform(const int32_t* words, int64_t groups, float std, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < groups; at++) transform(words + WORDS * at, std, out + NORMALS * at);
}

#if defined(__AES__)
// The encrypted counter values from `counter` on. Requires: `blocks` is a multiple of 4.
void dpq_keystream(const uint8_t* key, const uint8_t* counter, int64_t blocks, uint8_t* out, int threads) {
  (void)threads;
  dpq::Cipher(key).keystream(number_of(counter), blocks, out);
}

// out[group] = the normals of the group's twelve blocks of the keystream from `counter` on, times std
void dpq_normals(const uint8_t* key, const uint8_t* counter, int64_t groups, float std, float* out, int threads) {
  const dpq::Cipher cipher(key);
  const unsigned __int128 first = number_of(counter);
#pragma omp parallel num_threads(threads)
  {
    alignas(64) int32_t words[WORDS * CHUNK];
#pragma omp for schedule(static, PIECE)
    for (int64_t chunk = 0; chunk < (groups + CHUNK - 1) / CHUNK; chunk++) {
      const int64_t at = chunk * CHUNK, count = std::min(CHUNK, groups - at);
      cipher.keystream(first + BLOCKS * at, BLOCKS * count, reinterpret_cast<uint8_t*>(words));
      for (int64_t i = 0; i < count; i++) transform(words + WORDS * i, std, out + NORMALS * (at + i));
    }
    dpq::wipe(words, sizeof(words));
  }
}
#endif
}
