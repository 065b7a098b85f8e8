// Rounding to codes with one scale per sample: one loop for the maximum of a sample and one that rounds.
//
// The inner loops are functions of their own that are never inlined: inside a parallel region the compiler gives up on
// keeping their constants in registers, and they take twice the time.

#include <omp.h>

#include <vector>

#include "rounding.h"

using namespace dpq;

namespace {

// The largest of x and of -x, and of the patterns of |x|, which put infinities and NaN above all numbers; and whether any
// x is negative. A format says which of these it goes by.
struct Range {
  float high = -std::numeric_limits<float>::infinity(), low = -std::numeric_limits<float>::infinity();
  int32_t size = 0, below = 0;
  void include(const Range& other) {
    high = std::max(high, other.high), low = std::max(low, other.low), size = std::max(size, other.size);
    below |= other.below;
  }
};

enum class By { size, sign, ends };

// What the rounding of a sample goes by.
struct Sample {
  float unit;
  float by;     // what t is: x / unit, or x times this reciprocal
  float top;    // the largest level
  float least;  // what is smaller in size counts as zero; NaN if all of a sample does
  Bits bits;
};

// A format: the zero point, the unit of a sample, and one element's code plus the zero point.
struct Luq {
  static constexpr int zero = 64;
  static constexpr By by = By::size;
  static void scale(const Range& range, Sample& s) {
    const float size = number(range.size);
    s.unit = std::max((size >= TINY ? size : 0.0f) * 0x1p-6f, TINY);
  }
  static inline int32_t round(float x, const Sample& s, uint32_t index) {
    const float t = x / s.unit;
    const uint32_t bits = s.bits.at(index);
    const int32_t p = pattern(t), cut = (1 << 23) - 1;
    const int32_t normal = int32_t(uint32_t(p) + (bits & uint32_t(cut))) & ~cut;
    const float v = std::fabs(t);
    const int32_t under = uniform(bits) < v ? ((p & INT32_MIN) | (127 << 23)) : 0;
    return int32_t(number(v >= 1.0f ? normal : under)) + zero;
  }
};

template <bool nearest>
struct Uniform4 {
  static constexpr int zero = 8;
  static constexpr By by = By::ends;
  static void scale(const Range& range, Sample& s) {
    s.unit = std::max(std::max(range.high / 7.0f, range.low / 8.0f), TINY);
  }
  static inline int32_t round(float x, const Sample& s, uint32_t index) {
    const float t = std::min(std::max(x / s.unit, -8.0f), 7.0f);
    return int32_t(whole<nearest>(t, s.bits, index)) + zero;
  }
};

template <bool nearest>
struct Int8 {
  static constexpr int zero = 128;
  static constexpr By by = By::size;
  static void scale(const Range& range, Sample& s) {
    s.top = 127.0f, s.unit = coarse(range.size, s.top), s.by = 1.0f / s.unit;
  }
  static inline int32_t round(float x, const Sample& s, uint32_t index) {
    const float t = std::min(std::max(x * s.by, -s.top), s.top);
    return int32_t(whole<nearest>(t, s.bits, index)) + zero;
  }
};

template <bool nearest>
struct Int4 : Int8<nearest> {
  static constexpr int zero = 64;
  static constexpr By by = By::sign;
  static void scale(const Range& range, Sample& s) {
    s.top = range.below ? 7.0f : 15.0f, s.unit = coarse(range.size, s.top), s.by = 1.0f / s.unit;
  }
  static inline int32_t round(float x, const Sample& s, uint32_t index) {
    return Int8<nearest>::round(x, s, index) - Int8<nearest>::zero + zero;
  }
};

template <class Format>
[[gnu::noinline]] Range range_of(const float* x, int64_t count, int64_t stride) {
  Range r;
  float high = r.high, low = r.low;
  int32_t size = 0, below = 0;
  if (stride == 1 && Format::by == By::size) {
#pragma omp simd reduction(max : size)
    for (int64_t i = 0; i < count; i++) size = std::max(size, pattern(x[i]) & INT32_MAX);
  } else if (stride == 1 && Format::by == By::sign) {
#pragma omp simd reduction(max : size) reduction(| : below)
    for (int64_t i = 0; i < count; i++) size = std::max(size, pattern(x[i]) & INT32_MAX), below |= negative(x[i]);
  } else if (stride == 1) {
#pragma omp simd reduction(max : high, low, size)
    for (int64_t i = 0; i < count; i++) {
      high = std::max(high, x[i]);
      low = std::max(low, -x[i]);
      size = std::max(size, pattern(x[i]) & INT32_MAX);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      const float value = x[i * stride];
      high = std::max(high, value), low = std::max(low, -value);
      size = std::max(size, pattern(value) & INT32_MAX), below |= negative(value);
    }
  }
  r.high = high, r.low = low, r.size = size, r.below = below;
  return r;
}

template <class Format>
inline int32_t code_of(float x, uint32_t index, const Sample& s) {
  return Format::round(std::fabs(x) >= s.least ? x : 0.0f, s, index);
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
    lie_in = by_channel ? s.lie_channel : s.lie_pixel, lie_out = by_channel ? s.lie_pixel : s.lie_channel;
    dense = by_channel && lie_in == 1 && ((s.by_pixel == s.channels && lie_out == s.channels) || s.pixels == 1);
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
  Sample s{1.0f, 1.0f, 0.0f, std::numeric_limits<float>::quiet_NaN(), Bits(key, id)};
  *unit = std::numeric_limits<float>::quiet_NaN();
  if (range.size < INFINITE) {
    s.least = TINY;
    Format::scale(range, s);
    *unit = s.unit;
  }
  return s;
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
// finite, whose codes are zeros. Format 0 is luq_fp4, 1 uniform4, 2 int4, 3 int8; all but the first also to nearest. `key`
// and the ids `samples` give the random bits, as `sample_keys` and `random_bits` of numerics/random_bits.py do.
void dpq_quantize(const float* x, const int64_t* shape, int64_t key, const int64_t* samples, int64_t format,
                  int64_t nearest, uint8_t* out, float* unit, int threads) {
  const auto run = [&](auto kind) { quantize<decltype(kind)>(x, Shape(shape), uint64_t(key), samples, out, unit, threads); };
  if (format == 0) run(Luq());
  else if (format == 1) nearest ? run(Uniform4<true>()) : run(Uniform4<false>());
  else if (format == 2) nearest ? run(Int4<true>()) : run(Int4<false>());
  else nearest ? run(Int8<true>()) : run(Int8<false>());
}

}  // extern "C"
