// What all quantizers share: random bits, bit patterns, and how a tensor lies in memory. The arithmetic is that of
// numerics/rounding.py, numerics/integers.py and numerics/random_bits.py: only operations that IEEE 754 rounds exactly, so
// that the codes are those of the reference.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace dpq {

constexpr float TINY = std::numeric_limits<float>::min();
constexpr int32_t INFINITE = 0x7f800000;
constexpr int64_t PIECE = 256;  // numbers on their way from words to bytes

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline int32_t pattern(float x) { int32_t b; std::memcpy(&b, &x, 4); return b; }
inline float number(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
inline int32_t negative(float x) { return x <= -TINY ? 1 : 0; }
inline float uniform(uint32_t bits) { return float(int32_t((bits >> 8) | 1)) * 0x1p-24f; }

// The random bits of a sample's elements.
struct Bits {
  uint32_t k0, k1;
  Bits(uint64_t key, int64_t id) {
    const uint64_t mixed = mix64(key + (uint64_t(id) + 1) * 0x9e3779b97f4a7c15ull);
    k0 = uint32_t(mixed), k1 = uint32_t(mixed >> 32);
  }
  inline uint32_t at(uint32_t index) const { return mix(mix(index ^ k0) + k1); }
};

// A whole number near t: the nearest, ties to even, or a random neighbour of expected value t.
template <bool nearest>
inline float whole(float t, const Bits& bits, uint32_t index) {
  if (nearest) return std::nearbyint(t);
  const float floor = std::floor(t);
  return floor + (uniform(bits.at(index)) < t - floor ? 1.0f : 0.0f);
}

// size / steps, rounded up to 16 significant bits and to a normal number; `steps` of them are at most the largest.
inline float coarse(int32_t size, float steps) {
  const float s = number(size) >= TINY ? number(size) : 0.0f;
  const int32_t up = (pattern(std::max(s / steps, TINY)) + 0xff) & ~0xff;
  return number(std::min(up, pattern(std::numeric_limits<float>::max() / steps) & ~0xff));
}

struct Shape {
  int64_t batch, pixels, channels;          // logical
  int64_t by_sample, by_pixel, by_channel;  // strides of x, in elements
  int64_t number_pixel, number_channel;     // how the random bits of an element are numbered
  int64_t lie_pixel, lie_channel;           // strides of the codes
  explicit Shape(const int64_t* given) { std::memcpy(this, given, sizeof(Shape)); }
  int64_t size() const { return pixels * channels; }
};

}  // namespace dpq
