// The keystream of AES-256 in counter mode: four blocks to a register with VAES, one with AES-NI, else none.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AES__)
#include <immintrin.h>
#endif

namespace dpq {

constexpr int BLOCK = 16;  // bytes

// Zeros that the compiler may not leave out, though nothing reads them.
inline void wipe(void* memory, size_t size) {
  std::memset(memory, 0, size);
  asm volatile("" : : "r"(memory) : "memory");
}

#if defined(__AES__)

#if defined(__VAES__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define DPQ_VAES 1
constexpr const char* CIPHER = "VAES";
#else
#define DPQ_VAES 0
constexpr const char* CIPHER = "AES-NI";
#endif

// The round keys of a key; they are wiped when it goes.
class Cipher {
 public:
  explicit Cipher(const uint8_t* key) {
    keys[0] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key));
    keys[1] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key + BLOCK));
    expand<2, 0x01>(), expand<4, 0x02>(), expand<6, 0x04>(), expand<8, 0x08>();
    expand<10, 0x10>(), expand<12, 0x20>(), expand<14, 0x40>();
  }
  ~Cipher() { wipe(keys, sizeof(keys)); }
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // The encrypted counter values from `counter` on. Requires: `blocks` is a multiple of 4.
  void keystream(unsigned __int128 counter, int64_t blocks, uint8_t* out) const {
#if DPQ_VAES
    int64_t i = 0;
    for (; i + 32 <= blocks; i += 32) encrypt<8>(counter + i, out + BLOCK * i);
    for (; i < blocks; i += 4) encrypt<1>(counter + i, out + BLOCK * i);
#else
    for (int64_t i = 0; i < blocks; i += 4) encrypt<4>(counter + i, out + BLOCK * i);
#endif
  }

 private:
  static constexpr int ROUNDS = 14;
  __m128i keys[ROUNDS + 1];

  static __m128i mixed(__m128i key, __m128i word) {
    for (int i = 0; i < 3; i++) key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    return _mm_xor_si128(key, word);
  }

  template <int AT, int RCON>
  void expand() {
    keys[AT] = mixed(keys[AT - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[AT - 1], RCON), 0xff));
    if (AT < ROUNDS)
      keys[AT + 1] = mixed(keys[AT - 1], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[AT], 0), 0xaa));
  }

  // A counter value as the standard writes it, the highest byte first.
  static __m128i block_of(unsigned __int128 counter) {
    const __m128i reverse = _mm_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm_shuffle_epi8(_mm_set_epi64x(int64_t(counter >> 64), int64_t(counter)), reverse);
  }

#if DPQ_VAES
  // N registers of four blocks: enough of them hide the latency of a round.
  template <int N>
  void encrypt(unsigned __int128 counter, uint8_t* out) const {
    const __m512i reverse = _mm512_broadcast_i32x4(_mm_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m512i first = _mm512_broadcast_i32x4(_mm_set_epi64x(int64_t(counter >> 64), int64_t(counter)));
    const __m512i one = _mm512_set1_epi64(1);
    __m512i state[N];
    for (int i = 0; i < N; i++) {
      const int64_t at = 4 * i;
      const __m512i next = _mm512_add_epi64(first, _mm512_set_epi64(0, at + 3, 0, at + 2, 0, at + 1, 0, at));
      // Where the low half has wrapped, one goes to the high half.
      const __mmask8 wrapped = _mm512_mask_cmplt_epu64_mask(0x55, next, first);
      state[i] = _mm512_shuffle_epi8(_mm512_mask_add_epi64(next, __mmask8(wrapped << 1), next, one), reverse);
    }
    for (int i = 0; i < N; i++) state[i] = _mm512_xor_si512(state[i], _mm512_broadcast_i32x4(keys[0]));
    for (int round = 1; round < ROUNDS; round++) {
      const __m512i key = _mm512_broadcast_i32x4(keys[round]);
      for (int i = 0; i < N; i++) state[i] = _mm512_aesenc_epi128(state[i], key);
    }
    for (int i = 0; i < N; i++)
      _mm512_storeu_si512(out + 4 * BLOCK * i, _mm512_aesenclast_epi128(state[i], _mm512_broadcast_i32x4(keys[ROUNDS])));
  }
#else
  template <int N>
  void encrypt(unsigned __int128 counter, uint8_t* out) const {
    __m128i state[N];
    for (int i = 0; i < N; i++) state[i] = _mm_xor_si128(block_of(counter + i), keys[0]);
    for (int round = 1; round < ROUNDS; round++)
      for (int i = 0; i < N; i++) state[i] = _mm_aesenc_si128(state[i], keys[round]);
    for (int i = 0; i < N; i++)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + BLOCK * i), _mm_aesenclast_si128(state[i], keys[ROUNDS]));
  }
#endif
};

#else

constexpr const char* CIPHER = "";

#endif

}  // namespace dpq
