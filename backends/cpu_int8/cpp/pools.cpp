// The gradient of max pooling of channels-last maps in float32: each row of a map gathers what windows send it.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

struct Pool {
  int64_t batch, channels, height, width, out_height, out_width;
  int64_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
  explicit Pool(const int64_t* given) { std::memcpy(this, given, sizeof(Pool)); }
};

inline void add_where(const float* grad, const int8_t* taps, int8_t tap, int64_t count, float* out) {
#pragma omp simd
  for (int64_t c = 0; c < count; c++) out[c] += taps[c] == tap ? grad[c] : 0.0f;
}

}  // namespace

extern "C" {

// out[b][i][c] = Σ grad[b][o][c] over the windows o, in their order, whose maximum taps[b][o][c] is the pixel i
void dpq_max_pool_grad(const int64_t* shape, const float* grad, const int8_t* taps, float* out, int threads) {
  const Pool s(shape);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t y = 0; y < s.height; y++) {
      float* row = out + (b * s.height + y) * s.width * s.channels;
      std::fill_n(row, s.width * s.channels, 0.0f);
      for (int64_t oy = 0; oy < s.out_height; oy++) {
        const int64_t ky = y + s.pad_height - oy * s.stride_height;
        if (ky < 0 || ky >= s.kernel_height) continue;
        for (int64_t ox = 0; ox < s.out_width; ox++) {
          const int64_t window = ((b * s.out_height + oy) * s.out_width + ox) * s.channels;
          for (int64_t kx = 0; kx < s.kernel_width; kx++) {
            const int64_t x = ox * s.stride_width - s.pad_width + kx;
            if (x >= 0 && x < s.width)
              add_where(grad + window, taps + window, int8_t(ky * s.kernel_width + kx), s.channels,
                        row + x * s.channels);
          }
        }
      }
    }
}

}  // extern "C"
