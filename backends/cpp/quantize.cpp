// Stochastic rounding to codes: the arithmetic of dpquant_compile/rounding.py and bits.py, one loop for the maximum of a
// sample and one that rounds. Only operations that IEEE 754 rounds exactly, so that the codes are those of the reference.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr float TINY = std::numeric_limits<float>::min();
constexpr int32_t INFINITE = 0x7f800000;

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline int32_t pattern(float x) { int32_t b; std::memcpy(&b, &x, 4); return b; }
inline float number(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
inline float uniform(uint32_t bits) { return float(int32_t((bits >> 8) | 1)) * 0x1p-24f; }

// One element: its code plus the zero point.
struct Luq {
  static constexpr int zero = 64;
  static float unit(float high, float low) {
    const float s = std::max(high, low);
    return std::max((s >= TINY ? s : 0.0f) * 0x1p-6f, TINY);
  }
  static inline int32_t round(float t, uint32_t bits) {
    const int32_t p = pattern(t), cut = (1 << 23) - 1;
    const int32_t normal = int32_t(uint32_t(p) + (bits & uint32_t(cut))) & ~cut;
    const float v = std::fabs(t);
    const int32_t under = uniform(bits) < v ? ((p & INT32_MIN) | (127 << 23)) : 0;
    return int32_t(number(v >= 1.0f ? normal : under)) + zero;
  }
};

struct Uniform4 {
  static constexpr int zero = 8;
  static float unit(float high, float low) { return std::max(std::max(high / 7.0f, low / 8.0f), TINY); }
  static inline int32_t round(float t, uint32_t bits) {
    t = std::min(std::max(t, -8.0f), 7.0f);
    const float floor = std::floor(t);
    return int32_t(floor) + (uniform(bits) < t - floor ? 1 : 0) + zero;
  }
};

struct Shape {
  int64_t batch, pixels, channels;          // logical
  int64_t by_sample, by_pixel, by_channel;  // strides of x, in elements
  int64_t number_pixel, number_channel;     // how the random bits of an element are numbered
};

// The largest of x, of -x, and of the patterns of |x|, which put infinities and NaN above all numbers.
struct Range {
  float high = -std::numeric_limits<float>::infinity(), low = -std::numeric_limits<float>::infinity();
  int32_t size = 0;
  void include(const Range& other) {
    high = std::max(high, other.high), low = std::max(low, other.low), size = std::max(size, other.size);
  }
};

inline Range range_of(const float* x, int64_t count, int64_t stride) {
  Range r;
  float high = r.high, low = r.low;
  int32_t size = 0;
  if (stride == 1) {
#pragma omp simd reduction(max : high, low, size)
    for (int64_t i = 0; i < count; i++) {
      high = std::max(high, x[i]);
      low = std::max(low, -x[i]);
      size = std::max(size, pattern(x[i]) & INT32_MAX);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      high = std::max(high, x[i * stride]);
      low = std::max(low, -x[i * stride]);
      size = std::max(size, pattern(x[i * stride]) & INT32_MAX);
    }
  }
  r.high = high, r.low = low, r.size = size;
  return r;
}

// One run of elements; `stride` of x and `step` of the output are constants in the cases that matter.
template <class Format>
inline void round_run(const float* x, int64_t count, int64_t stride, float unit, bool ok, uint32_t k0, uint32_t k1,
                      uint32_t index, uint32_t by_index, uint8_t* out, int64_t step) {
  constexpr int64_t PIECE = 256;  // numbers on their way from words to bytes
  alignas(64) int32_t codes[PIECE];
  const float least = ok ? TINY : std::numeric_limits<float>::infinity();
  for (int64_t start = 0; start < count; start += PIECE) {
    const int32_t many = int32_t(std::min(PIECE, count - start));
    const float* from = x + start * stride;
    const uint32_t first = index + uint32_t(start) * by_index;
    if (stride == 1) {
#pragma omp simd
      for (int32_t i = 0; i < many; i++)
        codes[i] = Format::round((std::fabs(from[i]) >= least ? from[i] : 0.0f) / unit,
                                 mix(mix((first + uint32_t(i) * by_index) ^ k0) + k1));
    } else {
      for (int32_t i = 0; i < many; i++)
        codes[i] = Format::round((std::fabs(from[i * stride]) >= least ? from[i * stride] : 0.0f) / unit,
                                 mix(mix((first + uint32_t(i) * by_index) ^ k0) + k1));
    }
    uint8_t* to = out + start * step;
    if (step == 1)
      for (int32_t i = 0; i < many; i++) to[i] = uint8_t(codes[i]);
    else
      for (int32_t i = 0; i < many; i++) to[i * step] = uint8_t(codes[i]);
  }
}

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class Format>
void quantize(const float* x, const Shape& s, uint64_t key, const int64_t* samples, uint8_t* out, float* unit,
              int threads) {
  // The inner loop runs over whichever dimension lies densely in memory; long rows are cut for the threads' sake.
  const bool by_channel = s.by_channel == 1 || s.channels == 1;
  const int64_t inner = by_channel ? s.channels : s.pixels, outer = by_channel ? s.pixels : s.channels;
  const int64_t step_in = by_channel ? 1 : s.by_pixel, step_out = by_channel ? s.by_pixel : s.by_channel;
  const int64_t number_in = by_channel ? s.number_channel : s.number_pixel;
  const int64_t number_out = by_channel ? s.number_pixel : s.number_channel;
  const int64_t lie_in = by_channel ? 1 : s.channels, lie_out = by_channel ? s.channels : 1;
  const int64_t piece = 1 << 14, pieces = (inner + piece - 1) / piece;
  const int64_t chunk = std::max<int64_t>(1, piece / std::max<int64_t>(inner, 1)), chunks = (outer + chunk - 1) / chunk;
  const int64_t tasks = chunks * pieces;
  const bool dense = by_channel && s.by_pixel == s.channels && pieces == 1;
  std::vector<Range> ranges(s.batch * tasks);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s.batch * tasks; task++) {
      const int64_t b = task / tasks, from = task % tasks / pieces * chunk, to = std::min(outer, from + chunk);
      const int64_t first = task % pieces * piece, last = std::min(inner, first + piece);
      const float* at = x + b * s.by_sample + first * step_in;
      Range range;
      if (dense)
        range = range_of(at + from * step_out, (to - from) * inner, 1);
      else
        for (int64_t o = from; o < to; o++) range.include(range_of(at + o * step_out, last - first, step_in));
      ranges[task] = range;
    }
#pragma omp for schedule(static)
    for (int64_t b = 0; b < s.batch; b++) {
      Range range;
      for (int64_t t = b * tasks; t < (b + 1) * tasks; t++) range.include(ranges[t]);
      unit[b] = range.size < INFINITE ? Format::unit(range.high, range.low) : std::numeric_limits<float>::quiet_NaN();
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s.batch * tasks; task++) {
      const int64_t b = task / tasks, from = task % tasks / pieces * chunk, to = std::min(outer, from + chunk);
      const int64_t first = task % pieces * piece, last = std::min(inner, first + piece);
      const bool ok = unit[b] == unit[b];
      const float scale = ok ? unit[b] : 1.0f;
      const uint64_t mixed = mix64(key + (uint64_t(samples[b]) + 1) * 0x9e3779b97f4a7c15ull);
      const uint32_t k0 = uint32_t(mixed), k1 = uint32_t(mixed >> 32);
      for (int64_t o = from; o < to; o++)
        round_run<Format>(x + b * s.by_sample + o * step_out + first * step_in, last - first, step_in, scale, ok, k0, k1,
                          uint32_t(o * number_out + first * number_in), uint32_t(number_in),
                          out + b * s.pixels * s.channels + o * lie_out + first * lie_in, lie_in);
    }
  }
}

}  // namespace

extern "C" {

// Codes [batch][pixels][channels] plus the format's zero point, and the unit of each sample; NaN for a sample that is not
// finite, whose codes are zeros. Format 0 is luq_fp4, 1 is uniform4. `key` and the ids `samples` give the random bits, as
// `sample_keys` and `random_bits` of dpquant_compile/bits.py do.
void dpq_quantize(const float* x, const int64_t* shape, int64_t key, const int64_t* samples, int64_t format,
                  uint8_t* out, float* unit, int threads) {
  Shape s;
  std::memcpy(&s, shape, sizeof s);
  if (format == 0) quantize<Luq>(x, s, uint64_t(key), samples, out, unit, threads);
  else quantize<Uniform4>(x, s, uint64_t(key), samples, out, unit, threads);
}

}  // extern "C"
