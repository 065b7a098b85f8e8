// Int8 products of a conv or a linear: forward and the gradient of its input.
//
// The shape of a convolution is a table: `source[p][t]` is the pixel of one sample's input that tap t meets at output
// pixel p, or -1 outside the map. Any rank, stride, padding and dilation is such a table, and so is the transposed
// convolution of the input's gradient; a linear has one tap that meets its own row. The layout is pixels by channels.

#include <omp.h>

#include <vector>

#include "layout.h"

using namespace dpq;

namespace {

constexpr int TILES = 96 / MR;  // tiles of rows that share a panel while it is in cache

inline int64_t steps_of(int64_t k) { return (k + 3) / 4; }

// The sizes of a product, and where the parts of its packed weight lie.
struct Product {
  int64_t batch, in_pixels, channels, pixels, taps, groups, columns, terms, zero, panels, offsets, depth, across;
  explicit Product(const int64_t* given) { std::memcpy(this, given, sizeof(Product)); }
};

// In which order output pixels come as rows: the pixels of one sample after another, in an order given, or one pixel of
// MR samples side by side, which leaves rows empty where the samples do not fill a tile. A tile takes the taps that any
// of its rows meets, so rows had better meet the same ones.
struct Order {
  const Product& s;
  const int32_t* order;
  int64_t rows;

  Order(const Product& s, const int32_t* order)
      : s(s), order(order), rows(s.across ? (s.batch + MR - 1) / MR * MR * s.pixels : s.batch * s.pixels) {}

  int64_t sample(int64_t row) const { return s.across ? row / (MR * s.pixels) * MR + row % MR : row / s.pixels; }
  int64_t pixel(int64_t row) const { return s.across ? row % (MR * s.pixels) / MR : order[row % s.pixels]; }
};

// The rows of a block of tiles: for each tile the taps that meet its pixels, and where; and where its results go.
struct Rows {
  int64_t taps;
  std::vector<const uint8_t*> pointers;  // [TILES][taps][MR]
  std::vector<int32_t> live;             // [TILES][taps]
  int64_t count[TILES];
  float* out[TILES][MR];  // null for a row that is not there
  float scale[TILES][MR];

  explicit Rows(int64_t taps) : taps(taps), pointers(TILES * taps * MR), live(TILES * taps) {}

  void fill(int64_t i, const uint8_t* const* sample, const int32_t* const* from, int64_t channels,
            const uint8_t* padding) {
    int64_t found = 0;
    for (int64_t t = 0; t < taps; t++) {
      const uint8_t** to = &pointers[(i * taps + found) * MR];
      bool met = false;
      for (int r = 0; r < MR; r++) {
        const int32_t pixel = from[r][t];
        met |= pixel >= 0;
        to[r] = pixel >= 0 ? sample[r] + pixel * channels : padding;
      }
      if (met) live[i * taps + found++] = int32_t(t);  // taps that meet nothing but padding are left out
    }
    count[i] = found;
  }
};

// Contractions whose sum could pass int32: in stretches of LONGEST, added up in 64 bits.
void long_sums(const Parts& parts, int depth, int zero, const uint8_t* padding, float (&sums)[MR][NR]) {
  int64_t wide[MR][NR] = {}, offset[NR] = {};
  Tile tile;
  for (int64_t j = 0; j < parts.count; j++)
    for (int64_t k = 0; k < parts.steps; k += LONGEST / 4) {
      const uint8_t* rows[MR];
      for (int r = 0; r < MR; r++) {
        const uint8_t* row = parts.rows[j * MR + r];
        rows[r] = row == padding ? row : row + 4 * k;  // padding is the same everywhere
      }
      const int8_t* panel = parts.panels[j] + k * STEP;
      const int64_t steps = std::min(parts.steps - k, LONGEST / 4);
      int32_t own[NR];
      zero_product(panel, steps, zero, own);
      for (int n = 0; n < NR; n++) offset[n] += own[n];
      multiply(tile, {rows, &panel, 1, steps}, depth);
      for (int r = 0; r < MR; r++)
        for (int n = 0; n < NR; n++) wide[r][n] += tile.sum[r][n];
    }
  for (int r = 0; r < MR; r++)
    for (int n = 0; n < NR; n++) sums[r][n] = float(wide[r][n] - offset[n]);
}

// One panel: term k of column n is w[n * by_column + k * by_term], zeros past the terms, anything past `width`.
void fill(const int8_t* w, int width, int64_t by_column, int64_t terms, int64_t by_term, int8_t* panel) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(w);
  const int64_t steps = steps_of(terms);
  if (by_term == 1) {
    const uint8_t* rows[NR];
    for (int n = 0; n < NR; n++) rows[n] = bytes + (n < width ? n : 0) * by_column;
    return panel_of_rows(rows, terms, 0, panel);
  }
  int64_t k = 0;
  for (; width == NR && by_column == 1 && k < terms / 4; k++) {
    const uint8_t* rows[4];
    for (int i = 0; i < 4; i++) rows[i] = bytes + (4 * k + i) * by_term;
    interleave(rows, NR, reinterpret_cast<uint8_t*>(panel + k * STEP));
  }
  std::memset(panel + k * STEP, 0, (steps - k) * STEP);
  for (; k < steps; k++)
    for (int n = 0; n < width; n++)
      for (int64_t i = 4 * k; i < std::min(4 * k + 4, terms); i++)
        panel[k * STEP + 4 * n + i % 4] = w[n * by_column + i * by_term];
}

}  // namespace

extern "C" {

const char* dpq_name() { return NAME; }
int dpq_columns() { return NR; }
int dpq_rows() { return MR; }
int dpq_slack() { return SLACK_BYTES; }

// out[t][i] = codes[i][t] - zero: a weight [count][taps] by tap. Requires: SLACK_BYTES behind `codes`.
void dpq_by_tap(const uint8_t* codes, int64_t count, int64_t taps, int64_t zero, int8_t* out, int threads) {
  constexpr int64_t PIECE = 1 << 12;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < count; start += PIECE)
    taps_first(codes + start * taps, std::min(PIECE, count - start), taps, uint8_t(zero),
               reinterpret_cast<uint8_t*>(out + start), count);
}

// Panels of a weight: column n, term k of tap t and group g is w[g*by_group + n*by_column + k*by_term + t*by_tap].
//   panels [groups][blocks][taps][steps(terms)][NR][4], offsets [groups][blocks][taps][NR], depth [groups][blocks]
// `zero` and `largest` are the zero point of the rows, and the most that a code plus zero point can be.
void dpq_pack(const int8_t* w, int64_t groups, int64_t columns, int64_t terms, int64_t taps, int64_t by_group,
              int64_t by_column, int64_t by_term, int64_t by_tap, int64_t zero, int64_t largest, int8_t* panels,
              int32_t* offsets, uint8_t* depth, int threads) {
  const int64_t blocks = (columns + NR - 1) / NR, steps = steps_of(terms);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t gb = 0; gb < groups * blocks; gb++) {
    const int64_t g = gb / blocks, first = gb % blocks * NR;
    const int width = int(std::min<int64_t>(NR, columns - first));
    int least = DEEP;
    for (int64_t t = 0; t < taps; t++) {
      int8_t* panel = panels + (gb * taps + t) * steps * STEP;
      fill(w + g * by_group + first * by_column + t * by_tap, width, by_column, terms, by_term, panel);
      least = std::min(least, safe_depth(panel, steps, int(largest)));
      zero_product(panel, steps, int(zero), offsets + (gb * taps + t) * NR);
    }
    depth[gb] = uint8_t(least);
  }
}

// rows[b][p][t*channels + c] = a[b][source[p][t]][c], the zero point outside the map
void dpq_unfold(const uint8_t* a, const int32_t* source, int64_t batch, int64_t in_pixels, int64_t channels,
                int64_t pixels, int64_t taps, int64_t zero, uint8_t* rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < batch * pixels; row++) {
    const uint8_t* sample = a + row / pixels * in_pixels * channels;
    const int32_t* from = source + row % pixels * taps;
    uint8_t* to = rows + row * taps * channels;
    for (int64_t t = 0; t < taps;) {
      int64_t many = 1;  // taps that meet pixels which follow one another, or nothing
      while (t + many < taps && from[t + many] == (from[t] < 0 ? -1 : from[t] + many)) many++;
      if (from[t] < 0) std::memset(to, int(zero), many * channels);
      else std::memcpy(to, sample + from[t] * channels, many * channels);
      t += many, to += many * channels;
    }
  }
}

// out[b][p][g*columns + n] = unit[b] · weight_unit · Σ_t Σ_k (a[b][source[p][t]][g*terms + k] - zero) w + bias[n]
//   a        [batch][in_pixels][channels] codes plus `zero`; SLACK_BYTES of the allocation lie behind it
//   order    the output pixels in an order in which neighbours meet the same taps
//   packed   a weight: its unit at the start, the rest where `shape` says
void dpq_products(const int64_t* shape, const uint8_t* a, const int32_t* source, const int32_t* order,
                  const uint8_t* packed, const float* unit, const float* bias, float* out, int threads) {
  const Product s(shape);
  const int64_t batch = s.batch, in_pixels = s.in_pixels, channels = s.channels, pixels = s.pixels, taps = s.taps;
  const int64_t groups = s.groups, columns = s.columns, terms = s.terms, zero = s.zero;
  const float* weight_unit = reinterpret_cast<const float*>(packed);
  const int8_t* panels = reinterpret_cast<const int8_t*>(packed + s.panels);
  const int32_t* offsets = reinterpret_cast<const int32_t*>(packed + s.offsets);
  const uint8_t* depth = packed + s.depth;
  const Order rows(s, order);
  const int64_t blocks = (columns + NR - 1) / NR, steps = steps_of(terms);
  const int64_t row_blocks = (rows.rows + MR * TILES - 1) / (MR * TILES);
  // Few rows: let threads share the columns as well.
  const int64_t shares = row_blocks >= 4 * threads ? 1 : std::min<int64_t>(blocks, 4 * threads);
  const std::vector<uint8_t> padding(4 * steps + SLACK_BYTES, uint8_t(zero));
#pragma omp parallel num_threads(threads)
  {
    Rows block(taps);
    std::vector<const int8_t*> at(taps);
    std::vector<int32_t> all(NR);
#pragma omp for schedule(dynamic) collapse(3)
    for (int64_t g = 0; g < groups; g++)
      for (int64_t number = 0; number < row_blocks; number++)
        for (int64_t share = 0; share < shares; share++) {
          const int64_t start = number * MR * TILES;
          const int64_t tiles = std::min<int64_t>(TILES, (rows.rows - start + MR - 1) / MR);
          for (int64_t i = 0; i < tiles; i++) {
            const uint8_t* sample[MR];
            const int32_t* from[MR];
            for (int r = 0; r < MR; r++) {
              const int64_t row = std::min(start + i * MR + r, rows.rows - 1), pixel = rows.pixel(row);
              const int64_t own = std::min(rows.sample(row), batch - 1);
              const bool there = start + i * MR + r < rows.rows && rows.sample(row) < batch;
              from[r] = source + pixel * taps;
              sample[r] = a + own * in_pixels * channels + g * terms;
              block.out[i][r] = there ? out + (own * pixels + pixel) * groups * columns + g * columns : nullptr;
              block.scale[i][r] = unit[own] * *weight_unit;
            }
            block.fill(i, sample, from, channels, padding.data());
          }
          for (int64_t b = blocks * share / shares; b < blocks * (share + 1) / shares; b++) {
            const int64_t gb = g * blocks + b;
            const float* own_bias = bias ? bias + g * columns + b * NR : nullptr;
            const int valid = int(std::min<int64_t>(NR, columns - b * NR));
            std::fill(all.begin(), all.end(), 0);
            for (int64_t t = 0; t < taps; t++)
              for (int n = 0; n < NR; n++) all[n] += offsets[(gb * taps + t) * NR + n];
            for (int64_t i = 0; i < tiles; i++) {
              int32_t some[NR] = {};
              const int32_t* offset = all.data();
              for (int64_t j = 0; j < block.count[i]; j++)
                at[j] = panels + (gb * taps + block.live[i * taps + j]) * steps * STEP;
              if (block.count[i] < taps) {
                for (int64_t j = 0; j < block.count[i]; j++)
                  for (int n = 0; n < NR; n++) some[n] += offsets[(gb * taps + block.live[i * taps + j]) * NR + n];
                offset = some;
              }
              const Parts parts{&block.pointers[i * taps * MR], at.data(), block.count[i], steps};
              float sums[MR][NR];
              if (parts.count * steps * 4 <= LONGEST) {
                Tile tile;
                multiply(tile, parts, depth[gb]);
                for (int r = 0; r < MR; r++)
                  for (int n = 0; n < NR; n++) sums[r][n] = float(tile.sum[r][n] - offset[n]);
              } else {
                long_sums(parts, depth[gb], int(zero), padding.data(), sums);
              }
              for (int r = 0; r < MR; r++) {
                if (!block.out[i][r]) continue;
                float* to = block.out[i][r] + b * NR;
                const float scale = block.scale[i][r];
                if (own_bias)
                  for (int n = 0; n < valid; n++) to[n] = sums[r][n] * scale + own_bias[n];
                else
                  for (int n = 0; n < valid; n++) to[n] = sums[r][n] * scale;
              }
            }
          }
        }
  }
}

}  // extern "C"
