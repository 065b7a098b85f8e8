// Rounding to int4 with a multiplier for each group of a sample: `round_int4` of numerics/integers.py with scale "channel"
// or "block". A code is level times multiplier plus the zero point, so that all codes of a sample have one unit.

#include <omp.h>

#include <vector>

#include "rounding.h"

using namespace dpq;

namespace {

constexpr int ZERO = 64, BLOCK_ZERO = 128;  // of codes in channels, and in blocks
constexpr int64_t GROUP = 16;          // elements of a block, and the fewest that share a multiplier
constexpr int TRIED = 2;               // multipliers, for blocks that are rounded to nearest
constexpr int64_t STRETCH = 128;       // numbers of several pixels that are taken in one loop

// The largest pattern of |x|, and whether any x is negative; numbers under TINY count as zero.
struct Top {
  int32_t size = 0, negative = 0;
  void include(const Top& other) { size = std::max(size, other.size), negative |= other.negative; }
};

// tops[i] = max(tops[i], |x[i]|)
[[gnu::noinline]] int32_t include_line(const float* x, int64_t count, int32_t* tops) {
  int32_t below = 0;
#pragma omp simd reduction(| : below)
  for (int64_t i = 0; i < count; i++) {
    const int32_t size = pattern(x[i]) & INT32_MAX;
    tops[i] = tops[i] > size ? tops[i] : size;  // std::max of references is not made a vector instruction
    below |= negative(x[i]);
  }
  return below;
}

[[gnu::noinline]] Top top_of(const float* x, int64_t count, int64_t stride) {
  int32_t size = 0, below = 0;
  if (stride == 1) {
#pragma omp simd reduction(max : size) reduction(| : below)
    for (int64_t i = 0; i < count; i++) size = std::max(size, pattern(x[i]) & INT32_MAX), below |= negative(x[i]);
  } else {
    for (int64_t i = 0; i < count; i++)
      size = std::max(size, pattern(x[i * stride]) & INT32_MAX), below |= negative(x[i * stride]);
  }
  return {size, below};
}

// What the rounding of a sample goes by.
struct Sample {
  float unit, top, most, least;  // `top` is the largest level, `most` the largest multiplier
  int32_t zero;
  Bits bits;

  Sample(const Top& all, bool blocks, uint64_t key, int64_t id, float* out)
      : unit(1.0f), top(all.negative ? 7.0f : 15.0f), most(blocks && all.negative ? 16.0f : 8.0f),
        least(std::numeric_limits<float>::quiet_NaN()), zero(blocks ? BLOCK_ZERO : ZERO), bits(key, id) {
    *out = std::numeric_limits<float>::quiet_NaN();
    if (all.size >= INFINITE) return;
    *out = unit = coarse(all.size, top * most), least = TINY;
  }

  // The multiplier of a group whose largest magnitude has this pattern.
  inline float multiplier(int32_t size) const {
    const float largest = number(size), covered = unit * top;
    return std::min(std::max(std::ceil((largest >= TINY ? largest : 0.0f) / covered), 1.0f), most);
  }
};

// The sum of GROUP numbers: halves are added, then halves of these. The order is part of the format.
inline float sum_of_halves(const float* x) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight low, high;
  std::memcpy(&low, x, sizeof low), std::memcpy(&high, x + 8, sizeof high);
  low += high;
  Four first, second;
  std::memcpy(&first, &low, sizeof first);
  std::memcpy(&second, reinterpret_cast<const char*>(&low) + sizeof first, sizeof second);
  first += second;
  return (first[0] + first[2]) + (first[1] + first[3]);
}

// Blocks of a line, MANY at a time: what is one number for each of them is a loop of its own, which vectorizes.
struct Blocks {
  static constexpr int64_t MANY = 64;
  alignas(64) float own[MANY][GROUP];  // zeros past the end of the line
  alignas(64) float covering[MANY];    // the smallest multiplier that covers a block
  int64_t count;

  Blocks(const float* x, int64_t numbers, const Sample& sample) {
    const int64_t length = std::min(MANY * GROUP, numbers);
    const float covered = sample.unit * sample.top;
    count = (length + GROUP - 1) / GROUP;
    float* flat = own[0];
#pragma omp simd
    for (int64_t i = 0; i < length; i++) flat[i] = std::fabs(x[i]) >= sample.least ? x[i] : 0.0f;
    std::fill(flat + length, flat + count * GROUP, 0.0f);
    for (int64_t b = 0; b < count; b++) {
      int32_t size = 0;
#pragma omp simd reduction(max : size)
      for (int i = 0; i < GROUP; i++) size = std::max(size, pattern(own[b][i]) & INT32_MAX);
      covering[b] = number(size);
    }
#pragma omp simd
    for (int64_t b = 0; b < count; b++)
      covering[b] = std::min(std::max(std::ceil(covering[b] / covered), 1.0f), sample.most);
  }
};

// One over each multiple of a sample's unit.
struct Reciprocals {
  float of[17];
  explicit Reciprocals(const Sample& sample) {
    for (int m = 1; m <= 16; m++) of[m] = 1.0f / (sample.unit * float(m));
  }
};

// The multipliers of a line of blocks, and their reciprocals in steps. The results have room for whole blocks.
[[gnu::noinline]] void block_multipliers(const float* x, int64_t count, const Sample sample, float* multiplier, float* by) {
  const Reciprocals table(sample);
  for (int64_t start = 0; start < count; start += Blocks::MANY * GROUP) {
    const Blocks blocks(x + start, count - start, sample);
    for (int64_t b = 0; b < blocks.count; b++)
      for (int i = 0; i < GROUP; i++) {
        multiplier[start + b * GROUP + i] = blocks.covering[b];
        by[start + b * GROUP + i] = table.of[int(blocks.covering[b])];
      }
  }
}

// A line of blocks, to nearest: a block takes of the multiplier that covers it and those below the one whose levels are
// nearest, the larger in a tie. The codes of each are at hand when it is chosen, so they are not computed again.
[[gnu::noinline]] void nearest_blocks(const float* x, int64_t count, const Sample sample, uint8_t* out, int64_t step) {
  const float by_unit = 1.0f / sample.unit;
  for (int64_t start = 0; start < count; start += Blocks::MANY * GROUP) {
    const Blocks blocks(x + start, count - start, sample);
    alignas(64) int32_t codes[TRIED][Blocks::MANY][GROUP], other[Blocks::MANY];
    alignas(64) float tried[TRIED][Blocks::MANY], by[TRIED][Blocks::MANY], sums[TRIED][Blocks::MANY];
    for (int less = 0; less < TRIED; less++)
#pragma omp simd
      for (int64_t b = 0; b < blocks.count; b++) {
        tried[less][b] = std::max(blocks.covering[b] - float(less), 1.0f);
        by[less][b] = 1.0f / (sample.unit * tried[less][b]);
      }
    for (int64_t b = 0; b < blocks.count; b++) {
      alignas(64) float error[TRIED][GROUP];
#pragma omp simd
      for (int i = 0; i < GROUP; i++) {
        const float x = blocks.own[b][i], exact = x * by_unit;
#pragma GCC unroll 2
        for (int less = 0; less < TRIED; less++) {
          const float level = std::nearbyint(std::min(std::max(x * by[less][b], -sample.top), sample.top));
          const float code = level * tried[less][b], off = code - exact;
          error[less][i] = off * off;
          codes[less][b][i] = int32_t(code) + sample.zero;
        }
      }
      for (int less = 0; less < TRIED; less++) sums[less][b] = sum_of_halves(error[less]);
    }
    for (int less = 1; less < TRIED; less++) {
#pragma omp simd
      for (int64_t b = 0; b < blocks.count; b++) {
        other[b] = sums[less][b] < sums[0][b] ? -1 : 0;  // a mask, not a branch, which would be wrong half of the time
        sums[0][b] = std::min(sums[0][b], sums[less][b]);
      }
      for (int64_t b = 0; b < blocks.count; b++)
#pragma omp simd
        for (int i = 0; i < GROUP; i++) codes[0][b][i] ^= (codes[0][b][i] ^ codes[less][b][i]) & other[b];
    }
    const int32_t* flat = codes[0][0];
    const int64_t length = std::min(Blocks::MANY * GROUP, count - start);
    uint8_t* to = out + start * step;
    if (step == 1)
      for (int64_t i = 0; i < length; i++) to[i] = uint8_t(flat[i]);
    else
      for (int64_t i = 0; i < length; i++) to[i * step] = uint8_t(flat[i]);
  }
}

// A line of elements, each with a reciprocal, a multiplier and the number of its random bits.
template <bool nearest>
[[gnu::noinline]] void round_line(const float* x, int64_t count, int64_t stride, const float* by, const float* multiplier,
                                  const Sample sample, uint32_t base, const uint32_t* numbers, uint8_t* out, int64_t step) {
  alignas(64) int32_t codes[PIECE];
  const auto code = [&](float value, int64_t i) {
    const float t = (std::fabs(value) >= sample.least ? value : 0.0f) * by[i];
    const float level = whole<nearest>(std::min(std::max(t, -sample.top), sample.top), sample.bits, base + numbers[i]);
    return int32_t(level * multiplier[i]) + sample.zero;
  };
  for (int64_t start = 0; start < count; start += PIECE) {
    const int32_t length = int32_t(std::min(PIECE, count - start));
    if (stride == 1) {
#pragma omp simd
      for (int32_t i = 0; i < length; i++) codes[i] = code(x[start + i], start + i);
    } else {
      for (int32_t i = 0; i < length; i++) codes[i] = code(x[(start + i) * stride], start + i);
    }
    uint8_t* to = out + start * step;
    if (step == 1)
      for (int32_t i = 0; i < length; i++) to[i] = uint8_t(codes[i]);
    else
      for (int32_t i = 0; i < length; i++) to[i * step] = uint8_t(codes[i]);
  }
}

// Fill `count` numbers of each of two arrays by the first `width` of them, again and again.
inline void repeat(float* first, float* second, int64_t width, int64_t count) {
  for (int64_t i = width; i < count; i++) first[i] = first[i - width], second[i] = second[i - width];
}

// One sample, with `threads` for the work inside it.
template <bool nearest>
struct Rounder {
  const Shape& s;
  bool last;                      // channels lie densely
  int64_t pixels_at_once = 1;     // in a loop over channels, where pixels follow one another
  std::vector<uint32_t> numbers;  // of the random bits: for the elements of these pixels, or for the pixels of a channel

  Rounder(const Shape& s, bool channels_last) : s(s), last(channels_last) {
    if (last && s.by_pixel == s.channels && s.lie_pixel == s.channels && s.lie_channel == 1)
      while (pixels_at_once < GROUP && 2 * pixels_at_once * s.channels <= STRETCH) pixels_at_once *= 2;
    numbers.resize(std::max(pixels_at_once * s.channels, s.pixels));
    if (last)
      for (int64_t p = 0; p < pixels_at_once; p++)
        for (int64_t c = 0; c < s.channels; c++)
          numbers[p * s.channels + c] = uint32_t(p * s.number_pixel + c * s.number_channel);
    else
      for (int64_t p = 0; p < s.pixels; p++) numbers[p] = uint32_t(p * s.number_pixel);
  }

  // The largest magnitudes of the channels over GROUP pixels, or however many there are.
  int32_t tops_of(const float* x, int64_t first, int64_t end, int32_t* wide, int32_t* tops) const {
    const int64_t width = pixels_at_once * s.channels;
    int32_t below = 0;
    std::fill_n(wide, width, 0);
    for (int64_t p = first; p < end; p += pixels_at_once)
      below |= include_line(x + p * s.by_pixel, std::min(pixels_at_once, end - p) * s.channels, wide);
    for (int64_t c = 0; c < s.channels; c++) tops[c] = wide[c];
    for (int64_t p = 1; p < pixels_at_once; p++)
      for (int64_t c = 0; c < s.channels; c++) {
        const int32_t other = wide[p * s.channels + c];
        tops[c] = tops[c] > other ? tops[c] : other;
      }
    return below;
  }

  // Multipliers of channels and their reciprocals, from maxima; several channels in a row share one if they have few pixels.
  void multipliers(const Sample& sample, int32_t* tops, float* multiplier, float* by) const {
    const int64_t together = s.pixels >= GROUP ? 1 : (GROUP + s.pixels - 1) / s.pixels;
    for (int64_t first = 0; together > 1 && first < s.channels; first += together) {
      const int64_t end = std::min(first + together, s.channels);
      std::fill(tops + first, tops + end, *std::max_element(tops + first, tops + end));
    }
#pragma omp simd
    for (int64_t c = 0; c < s.channels; c++) multiplier[c] = sample.multiplier(tops[c]);
#pragma omp simd
    for (int64_t c = 0; c < s.channels; c++) by[c] = 1.0f / (sample.unit * multiplier[c]);
  }

  void by_channel(const float* x, uint64_t key, int64_t id, uint8_t* out, float* unit, int threads) const {
    if (last) channels_last(x, key, id, out, unit, threads);
    else if (s.pixels >= GROUP) channels_first(x, key, id, out, unit, threads);
    else few_pixels(x, key, id, out, unit, threads);
  }

  void channels_last(const float* x, uint64_t key, int64_t id, uint8_t* out, float* unit, int threads) const {
    const int64_t width = pixels_at_once * s.channels, groups = (s.pixels + GROUP - 1) / GROUP;
    std::vector<int32_t> tops(groups * s.channels);
    int32_t size = 0, below = 0;
#pragma omp parallel num_threads(threads)
    {
      std::vector<int32_t> wide(width);
#pragma omp for schedule(static) reduction(max : size) reduction(| : below)
      for (int64_t g = 0; g < groups; g++) {
        int32_t* own = tops.data() + g * s.channels;
        below |= tops_of(x, g * GROUP, std::min((g + 1) * GROUP, s.pixels), wide.data(), own);
        for (int64_t c = 0; c < s.channels; c++) size = size > own[c] ? size : own[c];
      }
    }
    const Sample sample(Top{size, below}, false, key, id, unit);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> multiplier(width), by(width);
#pragma omp for schedule(static)
      for (int64_t g = 0; g < groups; g++) {
        multipliers(sample, tops.data() + g * s.channels, multiplier.data(), by.data());
        repeat(multiplier.data(), by.data(), s.channels, width);
        const int64_t end = std::min((g + 1) * GROUP, s.pixels);
        for (int64_t p = g * GROUP; p < end; p += pixels_at_once)
          round_line<nearest>(x + p * s.by_pixel, std::min(pixels_at_once, end - p) * s.channels, 1, by.data(),
                              multiplier.data(), sample, uint32_t(p * s.number_pixel), numbers.data(),
                              out + p * s.lie_pixel, s.lie_channel);
      }
    }
  }

  // A channel's pixels in blocks.
  void channels_first(const float* x, uint64_t key, int64_t id, uint8_t* out, float* unit, int threads) const {
    const Sample sample(top_of_all(x, threads), false, key, id, unit);
#pragma omp parallel num_threads(threads)
    {
      const int64_t whole = (s.pixels + GROUP - 1) / GROUP * GROUP;
      std::vector<float> line(s.pixels), multiplier(whole), by(whole);
#pragma omp for schedule(static)
      for (int64_t c = 0; c < s.channels; c++) {
        const float* from = x + c * s.by_channel;
        if (s.by_pixel != 1) {
          for (int64_t p = 0; p < s.pixels; p++) line[p] = from[p * s.by_pixel];
          from = line.data();
        }
        block_multipliers(from, s.pixels, sample, multiplier.data(), by.data());
        round_line<nearest>(from, s.pixels, 1, by.data(), multiplier.data(), sample, uint32_t(c * s.number_channel),
                            numbers.data(), out + c * s.lie_channel, s.lie_pixel);
      }
    }
  }

  void few_pixels(const float* x, uint64_t key, int64_t id, uint8_t* out, float* unit, int threads) const {
    std::vector<int32_t> tops(s.channels);
    Top all;
    for (int64_t c = 0; c < s.channels; c++) {
      const Top own = top_of(x + c * s.by_channel, s.pixels, s.by_pixel);
      tops[c] = own.size, all.include(own);
    }
    const Sample sample(all, false, key, id, unit);
    std::vector<float> multiplier(s.channels), by(s.channels);
    multipliers(sample, tops.data(), multiplier.data(), by.data());
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> factors(s.pixels), reciprocals(s.pixels);
#pragma omp for schedule(static)
      for (int64_t c = 0; c < s.channels; c++) {
        std::fill(factors.begin(), factors.end(), multiplier[c]), std::fill(reciprocals.begin(), reciprocals.end(), by[c]);
        round_line<nearest>(x + c * s.by_channel, s.pixels, s.by_pixel, reciprocals.data(), factors.data(), sample,
                            uint32_t(c * s.number_channel), numbers.data(), out + c * s.lie_channel, s.lie_pixel);
      }
    }
  }

  Top top_of_all(const float* x, int threads) const {
    const int64_t lines = last ? s.pixels : s.channels, length = last ? s.channels : s.pixels;
    const int64_t by_line = last ? s.by_pixel : s.by_channel, step = last ? s.by_channel : s.by_pixel;
    int32_t size = 0, below = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : size) reduction(| : below)
    for (int64_t i = 0; i < lines; i++) {
      const Top own = top_of(x + i * by_line, length, step);
      size = std::max(size, own.size), below |= own.negative;
    }
    return {size, below};
  }

  void by_block(const float* x, uint64_t key, int64_t id, uint8_t* out, float* unit, int threads) const {
    const Sample sample(top_of_all(x, threads), true, key, id, unit);
#pragma omp parallel num_threads(threads)
    {
      const int64_t whole = (s.channels + GROUP - 1) / GROUP * GROUP;
      std::vector<float> line(s.channels), multiplier(whole), by(whole);
      std::vector<uint32_t> channel_numbers(s.channels);
      for (int64_t c = 0; c < s.channels; c++) channel_numbers[c] = uint32_t(c * s.number_channel);
#pragma omp for schedule(static)
      for (int64_t p = 0; p < s.pixels; p++) {
        const float* from = x + p * s.by_pixel;
        if (s.by_channel != 1) {
          for (int64_t c = 0; c < s.channels; c++) line[c] = from[c * s.by_channel];
          from = line.data();
        }
        if (nearest) {
          nearest_blocks(from, s.channels, sample, out + p * s.lie_pixel, s.lie_channel);
          continue;
        }
        block_multipliers(from, s.channels, sample, multiplier.data(), by.data());
        round_line<false>(from, s.channels, 1, by.data(), multiplier.data(), sample, uint32_t(p * s.number_pixel),
                          channel_numbers.data(), out + p * s.lie_pixel, s.lie_channel);
      }
    }
  }
};

template <bool nearest>
void quantize(const float* x, const Shape& s, uint64_t key, const int64_t* samples, bool blocks, uint8_t* out, float* unit,
              int threads) {
  const Rounder<nearest> rounder(s, s.by_channel == 1 && s.channels > 1);
  const auto one = [&](int64_t b, int inside) {
    const float* from = x + b * s.by_sample;
    if (blocks) rounder.by_block(from, key, samples[b], out + b * s.size(), unit + b, inside);
    else rounder.by_channel(from, key, samples[b], out + b * s.size(), unit + b, inside);
  };
  if (threads == 1 || s.batch >= 4 * threads) {  // a sample at a time: it is still in cache when it is rounded
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < s.batch; b++) one(b, 1);
  } else {
    for (int64_t b = 0; b < s.batch; b++) one(b, threads);
  }
}

}  // namespace

extern "C" {

// As dpq_quantize, for int4 in groups: with `blocks` 16 channels of a pixel, else 16 pixels of a channel.
void dpq_quantize_groups(const float* x, const int64_t* shape, int64_t key, const int64_t* samples, int64_t blocks,
                         int64_t nearest, uint8_t* out, float* unit, int threads) {
  const Shape s(shape);
  if (nearest) quantize<true>(x, s, uint64_t(key), samples, blocks != 0, out, unit, threads);
  else quantize<false>(x, s, uint64_t(key), samples, blocks != 0, out, unit, threads);
}

}  // extern "C"
