// Stochastic rounding to codes: the arithmetic of numerics/rounding.py and random_bits.py, one loop for the maximum of a
// sample and one that rounds. Only operations that IEEE 754 rounds exactly, so that the codes are those of the reference.
//
// The inner loops are functions of their own that are never inlined: inside a parallel region the compiler gives up on
// keeping their constants in registers, and they take twice the time.

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

// The largest of x and of -x, and of the patterns of |x|, which put infinities and NaN above all numbers.
struct Range {
  float high = -std::numeric_limits<float>::infinity(), low = -std::numeric_limits<float>::infinity();
  int32_t size = 0;
  void include(const Range& other) {
    high = std::max(high, other.high), low = std::max(low, other.low), size = std::max(size, other.size);
  }
};

// A format: the unit of a sample, and one element's code plus the zero point.
struct Luq {
  static constexpr int zero = 64;
  static constexpr bool symmetric = true;  // the size alone makes the unit
  static float unit(const Range& range) {
    const float s = number(range.size);
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
  static constexpr bool symmetric = false;
  static float unit(const Range& range) { return std::max(std::max(range.high / 7.0f, range.low / 8.0f), TINY); }
  static inline int32_t round(float t, uint32_t bits) {
    t = std::min(std::max(t, -8.0f), 7.0f);
    const float floor = std::floor(t);
    return int32_t(floor) + (uniform(bits) < t - floor ? 1 : 0) + zero;
  }
};

template <class Format>
[[gnu::noinline]] Range range_of(const float* x, int64_t count, int64_t stride) {
  Range r;
  float high = r.high, low = r.low;
  int32_t size = 0;
  if (stride == 1 && Format::symmetric) {
#pragma omp simd reduction(max : size)
    for (int64_t i = 0; i < count; i++) size = std::max(size, pattern(x[i]) & INT32_MAX);
  } else if (stride == 1) {
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

// What the rounding of a sample goes by.
struct Sample {
  float unit, least;  // what is smaller in size than `least` counts as zero
  uint32_t k0, k1;
};

constexpr int64_t PIECE = 256;  // numbers on their way from words to bytes

template <class Format>
inline int32_t code_of(float x, uint32_t index, const Sample& s) {
  return Format::round((std::fabs(x) >= s.least ? x : 0.0f) / s.unit, mix(mix(index ^ s.k0) + s.k1));
}

// A run of elements whose bits are numbered index, index + by_index, …; `step` from one byte of the output to the next.
template <class Format>
[[gnu::noinline]] void round_run(const float* x, int64_t count, int64_t stride, const Sample sample, uint32_t index,
                                 uint32_t by_index, uint8_t* out, int64_t step) {
  alignas(64) int32_t codes[PIECE];
  for (int64_t start = 0; start < count; start += PIECE) {
    const int32_t many = int32_t(std::min(PIECE, count - start));
    const float* from = x + start * stride;
    const uint32_t first = index + uint32_t(start) * by_index;
    if (stride == 1 && by_index == 1) {
#pragma omp simd
      for (int32_t i = 0; i < many; i++) codes[i] = code_of<Format>(from[i], first + uint32_t(i), sample);
    } else if (stride == 1) {
#pragma omp simd
      for (int32_t i = 0; i < many; i++) codes[i] = code_of<Format>(from[i], first + uint32_t(i) * by_index, sample);
    } else {
      for (int32_t i = 0; i < many; i++)
        codes[i] = code_of<Format>(from[i * stride], first + uint32_t(i) * by_index, sample);
    }
    uint8_t* to = out + start * step;
    if (step == 1)
      for (int32_t i = 0; i < many; i++) to[i] = uint8_t(codes[i]);
    else
      for (int32_t i = 0; i < many; i++) to[i * step] = uint8_t(codes[i]);
  }
}

// The same for dense elements with a list of their numbers.
template <class Format>
[[gnu::noinline]] void round_listed(const float* x, int64_t count, const Sample sample, const uint32_t* index,
                                    uint8_t* out) {
  alignas(64) int32_t codes[PIECE];
  for (int64_t start = 0; start < count; start += PIECE) {
    const int32_t many = int32_t(std::min(PIECE, count - start));
#pragma omp simd
    for (int32_t i = 0; i < many; i++) codes[i] = code_of<Format>(x[start + i], index[start + i], sample);
    for (int32_t i = 0; i < many; i++) out[start + i] = uint8_t(codes[i]);
  }
}

struct Shape {
  int64_t batch, pixels, channels;          // logical
  int64_t by_sample, by_pixel, by_channel;  // strides of x, in elements
  int64_t number_pixel, number_channel;     // how the random bits of an element are numbered
};

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A tensor as lines: the inner loop runs over whichever dimension lies densely in memory.
template <class Format>
struct Lines {
  Shape s;
  bool by_channel;
  int64_t length, count;             // of a line, of lines in a sample
  int64_t step_in, step_out;         // in x
  int64_t number_in, number_out;     // of the random bits
  int64_t lie_in, lie_out;           // in the output
  bool dense;                        // lines follow one another, in x and in the output
  std::vector<uint32_t> numbers;     // of all elements of a sample, where that is quicker

  explicit Lines(const Shape& s) : s(s), by_channel(s.by_channel == 1 || s.channels == 1) {
    length = by_channel ? s.channels : s.pixels, count = by_channel ? s.pixels : s.channels;
    step_in = by_channel ? 1 : s.by_pixel, step_out = by_channel ? s.by_pixel : s.by_channel;
    number_in = by_channel ? s.number_channel : s.number_pixel;
    number_out = by_channel ? s.number_pixel : s.number_channel;
    lie_in = by_channel ? 1 : s.channels, lie_out = by_channel ? s.channels : 1;
    dense = by_channel && (s.by_pixel == s.channels || s.pixels == 1);
    if (!dense || count == 1 || length >= SHORT || size() > LISTED || s.batch < FEW) return;
    numbers.resize(size());
    for (int64_t o = 0; o < count; o++)
      for (int64_t i = 0; i < length; i++) numbers[o * length + i] = uint32_t(o * number_out + i * number_in);
  }

  // Short lines are better taken in one by a list of numbers, which must stay in cache and be used several times.
  static constexpr int64_t SHORT = 512, LISTED = 1 << 16, FEW = 4;

  int64_t size() const { return length * count; }

  // The elements `from` to `to` of a sample, counted line by line: use(line, first, last)
  template <class Use>
  void each(int64_t from, int64_t to, Use use) const {
    for (int64_t at = from; at < to;) {
      const int64_t line = at / length, first = at % length, last = std::min(length, first + to - at);
      use(line, first, last);
      at += last - first;
    }
  }

  Range range(const float* x, int64_t from, int64_t to) const {
    if (dense) return range_of<Format>(x + from, to - from, 1);
    Range all;
    each(from, to, [&](int64_t line, int64_t first, int64_t last) {
      all.include(range_of<Format>(x + line * step_out + first * step_in, last - first, step_in));
    });
    return all;
  }

  void round(const float* x, int64_t from, int64_t to, const Sample& sample, uint8_t* out) const {
    if (!numbers.empty()) return round_listed<Format>(x + from, to - from, sample, numbers.data() + from, out + from);
    each(from, to, [&](int64_t line, int64_t first, int64_t last) {
      round_run<Format>(x + line * step_out + first * step_in, last - first, step_in, sample,
                        uint32_t(line * number_out + first * number_in), uint32_t(number_in),
                        out + line * lie_out + first * lie_in, lie_in);
    });
  }
};

template <class Format>
Sample sample_of(const Range& range, uint64_t key, int64_t id, float* unit) {
  const bool ok = range.size < INFINITE;
  *unit = ok ? Format::unit(range) : std::numeric_limits<float>::quiet_NaN();
  const uint64_t mixed = mix64(key + (uint64_t(id) + 1) * 0x9e3779b97f4a7c15ull);
  const float least = ok ? TINY : std::numeric_limits<float>::infinity();
  return {ok ? *unit : 1.0f, least, uint32_t(mixed), uint32_t(mixed >> 32)};
}

template <class Format>
void quantize(const float* x, const Shape& s, uint64_t key, const int64_t* samples, uint8_t* out, float* unit,
              int threads) {
  const Lines<Format> lines(s);
  const int64_t size = lines.size();
  if (threads == 1 || s.batch >= 4 * threads) {  // a sample at a time: it is still in cache when it is rounded
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < s.batch; b++) {
      const float* from = x + b * s.by_sample;
      const Sample sample = sample_of<Format>(lines.range(from, 0, size), key, samples[b], unit + b);
      lines.round(from, 0, size, sample, out + b * size);
    }
    return;
  }
  const int64_t piece = 1 << 14, pieces = (size + piece - 1) / piece;
  std::vector<Range> ranges(pieces);
  for (int64_t b = 0; b < s.batch; b++) {
    const float* from = x + b * s.by_sample;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < pieces; i++) ranges[i] = lines.range(from, i * piece, std::min(size, (i + 1) * piece));
    Range range;
    for (const Range& part : ranges) range.include(part);
    const Sample sample = sample_of<Format>(range, key, samples[b], unit + b);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < pieces; i++)
      lines.round(from, i * piece, std::min(size, (i + 1) * piece), sample, out + b * size);
  }
}

}  // namespace

extern "C" {

// Codes [batch][pixels][channels] plus the format's zero point, and the unit of each sample; NaN for a sample that is not
// finite, whose codes are zeros. Format 0 is luq_fp4, 1 is uniform4. `key` and the ids `samples` give the random bits, as
// `sample_keys` and `random_bits` of numerics/random_bits.py do.
void dpq_quantize(const float* x, const int64_t* shape, int64_t key, const int64_t* samples, int64_t format,
                  uint8_t* out, float* unit, int threads) {
  Shape s;
  std::memcpy(&s, shape, sizeof s);
  if (format == 0) quantize<Luq>(x, s, uint64_t(key), samples, out, unit, threads);
  else quantize<Uniform4>(x, s, uint64_t(key), samples, out, unit, threads);
}

}  // extern "C"
