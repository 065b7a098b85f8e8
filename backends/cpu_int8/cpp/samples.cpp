// Per-sample weight gradients in int8: their norms, their weighted sum, and themselves.
//
// The gradient of sample b is G[n][t][c] = Σ_p d[b][p][n] x[b][source[p][t]][c], in codes; units are multiplied in by
// the caller or at the end. `x` and `d` are codes plus their zero points, pixels by channels.

#include <omp.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "layout.h"

using namespace dpq;

namespace {

struct Problem {
  int64_t batch, in_pixels, channels, pixels, features, groups, taps;
  int64_t x_zero, x_largest, d_zero, d_largest;  // zero points of the codes, and the largest of code plus zero point
};

struct Shape : Problem {
  int64_t terms, columns, rows, steps, blocks, tiles;  // of one group: input channels, taps × channels, features
  explicit Shape(const int64_t* given) {
    std::memcpy(static_cast<Problem*>(this), given, sizeof(Problem));
    terms = channels / groups, columns = taps * terms, rows = features / groups;
    steps = (pixels + 3) / 4;
    blocks = (columns + NR - 1) / NR, tiles = (rows + MR - 1) / MR;
  }
  int64_t sample() const { return tiles * steps * MR * 4; }  // bytes of a sample's output gradients, see `by_tile`
};

// NR columns (tap, channel) of one sample's unfolded input: a panel whose contraction runs over pixels.
void unfold(const Shape& s, const uint8_t* x, const int32_t* source, int64_t g, int64_t first, int8_t* panel) {
  const int64_t width = std::min<int64_t>(NR, s.columns - first);
  int64_t tap[NR], channel[NR];
  for (int64_t n = 0; n < width; n++) tap[n] = (first + n) / s.terms, channel[n] = (first + n) % s.terms + g * s.terms;
  const uint8_t zero = uint8_t(s.x_zero);
  const bool dense = width == NR && tap[0] == tap[NR - 1];
  if (!dense) std::memset(panel, 0, s.steps * STEP);
  for (int64_t k = 0; k < s.steps; k++) {
    int8_t* to = panel + k * STEP;
    if (dense) {
      static const uint8_t nothing[NR] = {};
      alignas(64) uint8_t signed_rows[4][NR];
      const uint8_t* rows[4];
      for (int i = 0; i < 4; i++) {
        const int64_t p = 4 * k + i;
        const int32_t pixel = p < s.pixels ? source[p * s.taps + tap[0]] : -1;
        rows[i] = pixel < 0 ? nothing : signed_rows[i];
        const uint8_t* from = x + pixel * s.channels + channel[0];
        if (pixel >= 0)
          for (int n = 0; n < NR; n++) signed_rows[i][n] = uint8_t(from[n] - zero);
      }
      interleave(rows, NR, reinterpret_cast<uint8_t*>(to));
      continue;
    }
    for (int i = 0; i < 4 && 4 * k + i < s.pixels; i++)
      for (int64_t n = 0; n < width; n++) {
        const int32_t pixel = source[(4 * k + i) * s.taps + tap[n]];
        if (pixel >= 0) to[4 * n + i] = int8_t(x[pixel * s.channels + channel[n]] - zero);
      }
  }
}

// Calls use(first row of a tile, valid rows, exact sums) for one block of columns of one sample's gradient, whose rows
// are those of `by_tile`.
template <class Use>
void gradient(const Shape& s, const uint8_t* rows, const int8_t* panel, Use use) {
  const int depth = safe_depth(panel, s.steps, int(s.d_largest));
  int32_t offset[NR];
  zero_product(panel, s.steps, int(s.d_zero), offset);
  const uint8_t* at[MR];
  Tile tile;
  for (int64_t r = 0; r < s.rows; r += MR) {
    for (int i = 0; i < MR; i++) at[i] = rows + r * s.steps * 4 + i * 4;
    multiply<4 * MR>(tile, {at, &panel, 1, s.steps, 4 * MR}, depth);
    for (int i = 0; i < MR; i++)
      for (int n = 0; n < NR; n++) tile.sum[i][n] -= offset[n];
    use(r, int(std::min<int64_t>(MR, s.rows - r)), tile);
  }
}

// One group of the output gradients, [batch][tiles][steps][MR][4]: four pixels of a feature side by side, and what a tile
// reads in one piece. Rows past the last are not zeros, but nobody reads their sums.
std::unique_ptr<uint8_t[]> by_tile(const Shape& s, const uint8_t* d, int64_t g, int threads) {
  std::unique_ptr<uint8_t[]> all(new uint8_t[s.batch * s.sample() + SLACK_BYTES]);
  const std::vector<uint8_t> padding(s.rows, uint8_t(s.d_zero));
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint8_t> line(s.tiles * MR * 4);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t k = 0; k < s.steps; k++) {
        const uint8_t* rows[4];
        for (int i = 0; i < 4; i++)
          rows[i] = 4 * k + i < s.pixels ? d + (b * s.pixels + 4 * k + i) * s.features + g * s.rows : padding.data();
        interleave(rows, s.rows, line.data());
        uint8_t* to = all.get() + b * s.sample() + k * MR * 4;
        for (int64_t t = 0; t < s.tiles; t++) std::memcpy(to + t * s.steps * MR * 4, line.data() + t * MR * 4, MR * 4);
      }
  }
  return all;
}

// Lower triangle of the gram matrix of `count` rows of `terms` codes, `stride` apart.
void gram(int zero, int largest, const uint8_t* rows, int64_t count, int64_t terms, int64_t stride,
          std::vector<int8_t>& panel, int32_t* out) {
  const int64_t steps = (terms + 3) / 4;
  panel.resize(steps * STEP);
  Tile tile;
  for (int64_t first = 0; first < count; first += NR) {
    const int64_t width = std::min<int64_t>(NR, count - first);
    const uint8_t* at_column[NR];
    for (int n = 0; n < NR; n++) at_column[n] = rows + (first + (n < width ? n : 0)) * stride;
    panel_of_rows(at_column, terms, zero, panel.data());
    const int depth = safe_depth(panel.data(), steps, largest);
    int32_t offset[NR];
    zero_product(panel.data(), steps, zero, offset);
    const int8_t* columns = panel.data();
    for (int64_t r = first / MR * MR; r < count; r += MR) {
      const uint8_t* at[MR];
      for (int i = 0; i < MR; i++) at[i] = rows + std::min(r + i, count - 1) * stride;
      multiply(tile, {at, &columns, 1, steps}, depth);
      for (int64_t i = 0; i < std::min<int64_t>(MR, count - r); i++)
        for (int64_t n = 0; n < width; n++)
          out[(r + i) * count + first + n] = int32_t(uint32_t(tile.sum[i][n]) - uint32_t(offset[n]));
    }
  }
}

struct Run { int32_t to, from, length; };

// For each tap, the stretches of output pixels whose input pixels follow one another.
std::vector<std::vector<Run>> runs(const Shape& s, const int32_t* source) {
  std::vector<std::vector<Run>> all(s.taps);
  for (int64_t t = 0; t < s.taps; t++)
    for (int64_t p = 0; p < s.pixels; p++) {
      const int32_t at = source[p * s.taps + t];
      if (at < 0) continue;
      if (!all[t].empty()) {
        Run& last = all[t].back();
        if (last.to + last.length == p && last.from + last.length == at) {
          last.length++;
          continue;
        }
      }
      all[t].push_back({int32_t(p), at, 1});
    }
  return all;
}

// Samples that are weighed together, as many as stay in cache: a tile's weighted sum is read and written once for all.
struct Batch {
  static constexpr int64_t BYTES = 1 << 18;
  int64_t size, most, count = 0;
  std::vector<int8_t> panels;
  std::vector<int32_t> offsets;
  std::vector<float> factors;
  std::vector<int64_t> samples;

  explicit Batch(const Shape& s)
      : size(s.steps * STEP), most(std::min(s.batch, std::max<int64_t>(1, BYTES / std::max<int64_t>(1, size)))),
        panels(most * size), offsets(most * NR), factors(most), samples(most) {}

  int8_t* next() { return panels.data() + count * size; }

  // The panel that was written to `next`.
  void add(const Shape& s, int64_t sample, float factor) {
    int32_t* offset = offsets.data() + count * NR;
    zero_product(next(), s.steps, int(s.d_zero), offset);
    for (int n = 0; n < NR; n++) offset[n] = -offset[n];
    factors[count] = factor, samples[count] = sample;
    count++;
  }

  // total += what they make of the output gradients `rows`, see `by_tile`
  void weigh_into(const Shape& s, const uint8_t* rows, float* total) {
    for (int64_t t = 0; t < s.tiles && count; t++) {
      const Weighted w{rows + t * s.steps * MR * 4, s.sample(),     panels.data(), offsets.data(),
                       factors.data(),              samples.data(), count,         s.steps};
      float(*sum)[NR] = reinterpret_cast<float(*)[NR]>(total + t * MR * NR);
      if (s.steps == 1) weigh<1>(sum, w);
      else if (s.steps == 2) weigh<2>(sum, w);
      else if (s.steps == DEEP) weigh<DEEP>(sum, w);
      else weigh<0>(sum, w);
    }
    count = 0;
  }
};

// What the codes of a sample's gradient stand for. In doubles: a factor times one unit may lie where float32 has few
// digits, or none. Where float32 cannot hold it, a gradient of a finite norm is zero: NaN leaves that sample out, since
// infinity times zero would be in the sum of all.
std::vector<float> scales(const Shape& s, const float* factors, const float* x_unit, const float* d_unit) {
  std::vector<float> all(s.batch);
  for (int64_t b = 0; b < s.batch; b++) {
    const double scale = double(factors[b]) * double(x_unit[b]) * double(d_unit[b]);
    all[b] = scale > double(std::numeric_limits<float>::max()) ? std::numeric_limits<float>::quiet_NaN() : float(scale);
  }
  return all;
}

double squares(const uint8_t* codes, int64_t count, int zero) {
  int64_t total = 0;
  for (int64_t start = 0; start < count; start += 1 << 16) {  // pieces whose sums fit 32 bits
    int32_t sum = 0;
    for (int64_t i = start; i < std::min<int64_t>(count, start + (1 << 16)); i++)
      sum += (int32_t(codes[i]) - zero) * (int32_t(codes[i]) - zero);
    total += sum;
  }
  return double(total);
}

}  // namespace

extern "C" {

// norms[b] = Σ G², by way of the gradient's tiles
void dpq_norms_direct(const int64_t* shape, const uint8_t* x, const uint8_t* d, const int32_t* source, double* norms,
                      int threads) {
  const Shape s(shape);
  std::fill_n(norms, s.batch, 0.0);
  for (int64_t g = 0; g < s.groups; g++) {
    const std::unique_ptr<uint8_t[]> rows = by_tile(s, d, g, threads);
#pragma omp parallel num_threads(threads)
    {
      std::vector<int8_t> panel(s.steps * STEP);
#pragma omp for schedule(dynamic)
      for (int64_t b = 0; b < s.batch; b++) {
        double total = 0.0;
        for (int64_t block = 0; block < s.blocks; block++) {
          unfold(s, x + b * s.in_pixels * s.channels, source, g, block * NR, panel.data());
          gradient(s, rows.get() + b * s.sample(), panel.data(), [&](int64_t, int valid, const Tile& tile) {
            double part[NR] = {};
            for (int i = 0; i < valid; i++)
              for (int n = 0; n < NR; n++) part[n] += double(tile.sum[i][n]) * double(tile.sum[i][n]);
            for (int n = 0; n < NR; n++) total += part[n];
          });
        }
        norms[b] += total;
      }
    }
  }
}

// norms[b] = Σ G², by way of gram matrices of pixels. Requires: Σ G² < 2^63, and sums of a gram matrix that fit int32.
void dpq_norms_gram(const int64_t* shape, const uint8_t* x, const uint8_t* d, const int32_t* source, double* norms,
                    int threads) {
  const Shape s(shape);
  const auto stretches = runs(s, source);
#pragma omp parallel num_threads(threads)
  {
    std::vector<int32_t> left(s.pixels * s.pixels), right(s.in_pixels * s.in_pixels), sum(s.pixels);
    std::vector<int8_t> panel;
#pragma omp for schedule(dynamic)
    for (int64_t b = 0; b < s.batch; b++) {
      // Terms of both signs, which cancel: exact in integers, and right modulo 2^64 whatever they come to on the way.
      uint64_t total = 0;
      for (int64_t g = 0; g < s.groups; g++) {
        gram(int(s.d_zero), int(s.d_largest), d + b * s.pixels * s.features + g * s.rows, s.pixels, s.rows, s.features,
             panel, left.data());
        gram(int(s.x_zero), int(s.x_largest), x + b * s.in_pixels * s.channels + g * s.terms, s.in_pixels, s.terms,
             s.channels, panel, right.data());
        for (int64_t p = 0; p < s.pixels; p++) {
          std::fill_n(sum.data(), p + 1, 0);
          for (int64_t t = 0; t < s.taps; t++) {
            const int32_t at = source[p * s.taps + t];
            if (at < 0) continue;
            const int32_t* from = right.data() + int64_t(at) * s.in_pixels;
            for (const Run& run : stretches[t]) {
              if (run.to > p) break;
              const int64_t many = std::min<int64_t>(run.length, p + 1 - run.to);
              for (int64_t i = 0; i < many; i++) sum[run.to + i] += from[run.from + i];
            }
          }
          const int32_t* other = left.data() + p * s.pixels;
          uint64_t twice = 0;
          for (int64_t q = 0; q < p; q++) twice += uint64_t(int64_t(sum[q]) * int64_t(other[q]));
          total += 2 * twice + uint64_t(int64_t(sum[p]) * int64_t(other[p]));
        }
      }
      norms[b] = double(total);
    }
  }
}

// The norms of gradients of codes as those of the numbers: times the squares of both units. With `slack`, first comes
// what float32 matrix products over the batch may be off by, see reference/per_sample.py. Units whose product float32
// cannot hold make a weight gradient that it cannot hold either: infinite, so that the sample is left out, and counted.
void dpq_scale_norms(const int64_t* shape, const uint8_t* x, const uint8_t* d, int64_t slack, const float* x_unit,
                     const float* d_unit, double* norms, int threads) {
  const Shape s(shape);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < s.batch; b++) {
    if (slack) {
      const int64_t widths[2] = {s.in_pixels * s.channels, s.pixels * s.features};
      norms[b] += double(s.taps) * 0x1p-26 * squares(x + b * widths[0], widths[0], int(s.x_zero)) *
                  squares(d + b * widths[1], widths[1], int(s.d_zero));
    }
    const double unit = double(x_unit[b]) * double(d_unit[b]);
    norms[b] = unit > double(std::numeric_limits<float>::max()) ? std::numeric_limits<double>::infinity()
                                                                : norms[b] * (unit * unit);
  }
}

// out[n][c][t] = Σ_b factor[b] x_unit[b] d_unit[b] G_b; samples for which that product is NaN are left out
void dpq_weighted(const int64_t* shape, const uint8_t* x, const uint8_t* d, const int32_t* source, const float* factors,
                  const float* x_unit, const float* d_unit, float* out, int threads) {
  const Shape s(shape);
  const std::vector<float> scale = scales(s, factors, x_unit, d_unit);
  for (int64_t g = 0; g < s.groups; g++) {
    const std::unique_ptr<uint8_t[]> rows = by_tile(s, d, g, threads);
#pragma omp parallel num_threads(threads)
    {
      Batch together(s);
      std::vector<float> total(s.tiles * MR * NR);
#pragma omp for schedule(dynamic)
      for (int64_t block = 0; block < s.blocks; block++) {
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t b = 0; b < s.batch; b++) {
          const float factor = scale[b];
          if (factor != factor) continue;
          int8_t* panel = together.next();
          unfold(s, x + b * s.in_pixels * s.channels, source, g, block * NR, panel);
          if (safe_depth(panel, s.steps, int(s.d_largest)) >= std::min<int64_t>(s.steps, DEEP)) {
            together.add(s, b, factor);
            if (together.count == together.most) together.weigh_into(s, rows.get(), total.data());
            continue;
          }
          gradient(s, rows.get() + b * s.sample(), panel, [&](int64_t r, int, const Tile& tile) {
            float* to = total.data() + r * NR;
            for (int i = 0; i < MR; i++)
              for (int n = 0; n < NR; n++) to[i * NR + n] += factor * float(tile.sum[i][n]);
          });
        }
        together.weigh_into(s, rows.get(), total.data());
        const int64_t width = std::min<int64_t>(NR, s.columns - block * NR);
        int64_t place[NR];
        for (int64_t n = 0; n < width; n++)
          place[n] = (block * NR + n) % s.terms * s.taps + (block * NR + n) / s.terms;
        for (int64_t r = 0; r < s.rows; r++) {
          float* to = out + (g * s.rows + r) * s.columns;
          for (int64_t n = 0; n < width; n++) to[place[n]] = total[r * NR + n];
        }
      }
    }
  }
}

// The operands of float32 matrix products over the batch, one product for each tap that meets a pixel, in their order:
//   left [tap][pixels it meets][batch][features] = factor[b] x_unit[b] d_unit[b] d, right [..][channels] = x
// Samples whose scale is NaN are zeros. For maps so small that sums of codes would be widened after every product.
void dpq_tap_rows(const int64_t* shape, const uint8_t* x, const uint8_t* d, const int32_t* source, const float* factors,
                  const float* x_unit, const float* d_unit, float* left, float* right, int threads) {
  const Shape s(shape);
  const std::vector<float> scale = scales(s, factors, x_unit, d_unit);
  std::vector<int32_t> from, to;
  for (int64_t t = 0; t < s.taps; t++)
    for (int64_t p = 0; p < s.pixels; p++)
      if (source[p * s.taps + t] >= 0) from.push_back(source[p * s.taps + t]), to.push_back(int32_t(p));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < int64_t(to.size()) * s.batch; row++) {
    const int64_t b = row % s.batch;
    const float factor = scale[b] == scale[b] ? scale[b] : 0.0f;
    const uint8_t* d_row = d + (b * s.pixels + to[row / s.batch]) * s.features;
    const uint8_t* x_row = x + (b * s.in_pixels + from[row / s.batch]) * s.channels;
    for (int64_t n = 0; n < s.features; n++) left[row * s.features + n] = float(int(d_row[n]) - int(s.d_zero)) * factor;
    for (int64_t c = 0; c < s.channels; c++) right[row * s.channels + c] = float(int(x_row[c]) - int(s.x_zero));
  }
}

// out[i][t] = grads[place[t]][i], zero where the place is -1: gradients of taps as one of the weight
void dpq_taps_last(const float* grads, const int64_t* place, int64_t count, int64_t taps, float* out, int threads) {
  constexpr int64_t PIECE = 512;  // whose results stay in cache until all taps are there
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < count; start += PIECE) {
    const int64_t many = std::min(PIECE, count - start);
    for (int64_t t = 0; t < taps; t++) {
      float* to = out + start * taps + t;
      const float* from = grads + place[t] * count + start;
      if (place[t] < 0)
        for (int64_t i = 0; i < many; i++) to[i * taps] = 0.0f;
      else
        for (int64_t i = 0; i < many; i++) to[i * taps] = from[i];
    }
  }
}

// out[b][n][t][c] = x_unit[b] d_unit[b] G_b
void dpq_sample_grads(const int64_t* shape, const uint8_t* x, const uint8_t* d, const int32_t* source,
                      const float* x_unit, const float* d_unit, float* out, int threads) {
  const Shape s(shape);
  for (int64_t g = 0; g < s.groups; g++) {
    const std::unique_ptr<uint8_t[]> rows = by_tile(s, d, g, threads);
#pragma omp parallel num_threads(threads)
    {
      std::vector<int8_t> panel(s.steps * STEP);
#pragma omp for schedule(dynamic)
      for (int64_t b = 0; b < s.batch; b++)
        for (int64_t block = 0; block < s.blocks; block++) {
          unfold(s, x + b * s.in_pixels * s.channels, source, g, block * NR, panel.data());
          const int64_t width = std::min<int64_t>(NR, s.columns - block * NR);
          const float unit = x_unit[b] * d_unit[b];
          float* first = out + (b * s.features + g * s.rows) * s.columns + block * NR;
          gradient(s, rows.get() + b * s.sample(), panel.data(), [&](int64_t r, int valid, const Tile& tile) {
            for (int i = 0; i < valid; i++)
              for (int64_t n = 0; n < width; n++)
                first[(r + i) * s.columns + n] = unit * float(tile.sum[i][n]);
          });
        }
    }
  }
}

}  // extern "C"
