// Int8 products of a conv or a linear: forward and the gradient of its input.
//
// The shape of a convolution is a table: `source[p][t]` is the pixel of one sample's input that tap t meets at output
// pixel p, or -1 outside the map. Any rank, stride, padding and dilation is such a table, and so is the transposed
// convolution of the input's gradient; a linear has one tap that meets its own row. The layout is pixels by channels.

#include <omp.h>

#include <vector>

#include "tile.h"

using namespace dpq;

namespace {

constexpr int TILES = 96 / MR;  // tiles of rows that share a panel while it is in cache

inline int64_t steps_of(int64_t k) { return (k + 3) / 4; }

// The rows of a block of tiles: for each tile the taps that meet its pixels, and where.
struct Rows {
  int64_t taps;
  std::vector<const uint8_t*> pointers;  // [TILES][taps][MR]
  std::vector<int32_t> live;             // [TILES][taps]
  int64_t count[TILES];

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
      zero_product(panel, steps, zero, depth, own);
      for (int n = 0; n < NR; n++) offset[n] += own[n];
      multiply(tile, {rows, &panel, 1, steps}, depth);
      for (int r = 0; r < MR; r++)
        for (int n = 0; n < NR; n++) wide[r][n] += tile.sum[r][n];
    }
  for (int r = 0; r < MR; r++)
    for (int n = 0; n < NR; n++) sums[r][n] = float(wide[r][n] - offset[n]);
}

}  // namespace

extern "C" {

const char* dpq_name() { return NAME; }
int dpq_columns() { return NR; }
int dpq_slack() { return SLACK_BYTES; }

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
    int8_t* first_panel = panels + gb * taps * steps * STEP;
    if (width < NR) std::memset(first_panel, 0, taps * steps * STEP);
    const int8_t* corner = w + g * by_group + first * by_column;
    // Four terms at a time; the inner of the two loops runs along the memory.
    const bool along_terms = by_term < by_column;
    const int64_t outer = along_terms ? width : steps, inner = along_terms ? steps : width;
    for (int64_t i = 0; i < outer; i++)
      for (int64_t j = 0; j < inner; j++) {
        const int64_t n = along_terms ? i : j, k = 4 * (along_terms ? j : i);
        const int8_t* from = corner + n * by_column + k * by_term;
        int8_t* to = first_panel + k * NR + n * 4;
        const int many = int(std::min<int64_t>(4, terms - k));
        for (int64_t t = 0; t < taps; t++, from += by_tap, to += steps * STEP) {
          int8_t four[4] = {};
          for (int m = 0; m < many; m++) four[m] = from[m * by_term];
          std::memcpy(to, four, 4);
        }
      }
    for (int64_t t = 0; t < taps; t++) {
      const int8_t* panel = first_panel + t * steps * STEP;
      const int own = safe_depth(panel, steps, int(largest));
      zero_product(panel, steps, int(zero), own, offsets + (gb * taps + t) * NR);
      least = std::min(least, own);
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
void dpq_products(const uint8_t* a, int64_t batch, int64_t in_pixels, int64_t channels, const int32_t* source,
                  const int32_t* order, int64_t pixels, int64_t taps, const int8_t* panels, const int32_t* offsets,
                  const uint8_t* depth, int64_t groups, int64_t columns, int64_t terms, int64_t zero,
                  const float* unit, const float* weight_unit, const float* bias, float* out, int threads) {
  const int64_t blocks = (columns + NR - 1) / NR, steps = steps_of(terms), rows = batch * pixels;
  const int64_t row_blocks = (rows + MR * TILES - 1) / (MR * TILES);
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
          const int64_t start = number * MR * TILES, tiles = std::min<int64_t>(TILES, (rows - start + MR - 1) / MR);
          for (int64_t i = 0; i < tiles; i++) {
            const uint8_t* sample[MR];
            const int32_t* from[MR];
            for (int r = 0; r < MR; r++) {
              const int64_t row = std::min(start + i * MR + r, rows - 1);
              from[r] = source + order[row % pixels] * taps;
              sample[r] = a + row / pixels * in_pixels * channels + g * terms;
            }
            block.fill(i, sample, from, channels, padding.data());
          }
          for (int64_t b = blocks * share / shares; b < blocks * (share + 1) / shares; b++) {
            const int64_t gb = g * blocks + b, column = g * columns + b * NR;
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
              for (int r = 0; r < MR && start + i * MR + r < rows; r++) {
                const int64_t row = start + i * MR + r, place = row / pixels * pixels + order[row % pixels];
                const float scale = unit[row / pixels] * *weight_unit;
                float* to = out + place * groups * columns + column;
                if (bias)
                  for (int n = 0; n < valid; n++) to[n] = sums[r][n] * scale + bias[column + n];
                else
                  for (int n = 0; n < valid; n++) to[n] = sums[r][n] * scale;
              }
            }
          }
        }
  }
}

}  // extern "C"
