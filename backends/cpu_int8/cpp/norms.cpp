// Group normalisation of channels-last maps in float32, with what follows it: a map that is added, and a ReLU. A sample
// at a time: its map is read several times and stays in cache. Channels come by WIDTH, of which there is a whole number.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t WIDTH = 16;
constexpr int64_t STRETCH = 32;  // pixels whose sum is taken in float32, before it is added to one in doubles

struct Norm {
  int64_t batch, pixels, channels, groups;
  explicit Norm(const int64_t* given) { std::memcpy(this, given, sizeof(Norm)); }
  int64_t size() const { return pixels * channels; }
  int64_t wide() const { return channels / groups; }
};

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* p) { Vector v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

// A bit for each number: 0 where it is zero or less, 1 elsewhere, NaN too.
inline uint16_t positive(Vector v) {
#if defined(__AVX512F__)
  __m512 x;
  std::memcpy(&x, &v, sizeof x);
  return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NLE_UQ);
#elif defined(__AVX2__)
  __m256 x[2];
  std::memcpy(x, &v, sizeof x);
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x[0], _mm256_setzero_ps(), _CMP_NLE_UQ));
  return uint16_t(low | _mm256_movemask_ps(_mm256_cmp_ps(x[1], _mm256_setzero_ps(), _CMP_NLE_UQ)) << 8);
#else
  uint16_t bits = 0;
  for (int i = 0; i < WIDTH; i++) bits |= uint16_t(uint16_t(!(v[i] <= 0.0f)) << i);
  return bits;
#endif
}

// The numbers whose bit is set, zeros elsewhere.
inline Vector kept(Vector v, uint16_t bits) {
#if defined(__AVX512F__)
  __m512 x;
  std::memcpy(&x, &v, sizeof x);
  x = _mm512_maskz_mov_ps(bits, x);
  std::memcpy(&v, &x, sizeof v);
#else
  for (int i = 0; i < WIDTH; i++) v[i] = bits >> i & 1 ? v[i] : 0.0f;
#endif
  return v;
}

// total[c] += Σ over pixels of value(pixel, c), for WIDTH channels from c on: several sums of both kinds at once.
template <int count, class Value>
inline void sum_pixels(int64_t pixels, int64_t c, double* const (&total)[count], Value value) {
  for (int64_t first = 0; first < pixels; first += STRETCH) {
    const int64_t end = std::min(first + STRETCH, pixels);
    Vector even[count] = {}, odd[count] = {};
    int64_t p = first;
    for (; p + 2 <= end; p += 2) value(p, even), value(p + 1, odd);
    if (p < end) value(p, even);
    for (int k = 0; k < count; k++)
      for (int i = 0; i < WIDTH; i++) total[k][c + i] += double(even[k][i] + odd[k][i]);
  }
}

template <bool relu, bool adds>
void forward(const Norm& n, const float* x, const float* other, const float* weight, const float* bias, double eps,
             float* y, float* mean, float* rstd, uint16_t* bits) {
  std::vector<double> sums(n.channels);
  std::vector<float> shift(n.channels), scale(n.channels), add(n.channels);
  const double count = double(n.pixels) * double(n.wide());
  std::fill(sums.begin(), sums.end(), 0.0);
  for (int64_t c = 0; c < n.channels; c += WIDTH)
    sum_pixels<1>(n.pixels, c, {sums.data()}, [&](int64_t p, Vector* to) { to[0] += load(x + p * n.channels + c); });
  for (int64_t g = 0; g < n.groups; g++) {
    double total = 0.0;
    for (int64_t c = g * n.wide(); c < (g + 1) * n.wide(); c++) total += sums[c];
    mean[g] = float(total / count);
    std::fill_n(shift.begin() + g * n.wide(), n.wide(), mean[g]);
  }
  std::fill(sums.begin(), sums.end(), 0.0);
  for (int64_t c = 0; c < n.channels; c += WIDTH) {
    const Vector m = load(shift.data() + c);
    sum_pixels<1>(n.pixels, c, {sums.data()}, [&](int64_t p, Vector* to) {
      const Vector off = load(x + p * n.channels + c) - m;
      to[0] += off * off;
    });
  }
  for (int64_t g = 0; g < n.groups; g++) {
    double total = 0.0;
    for (int64_t c = g * n.wide(); c < (g + 1) * n.wide(); c++) total += sums[c];
    rstd[g] = float(1.0 / std::sqrt(total / count + eps));
    for (int64_t c = g * n.wide(); c < (g + 1) * n.wide(); c++)
      scale[c] = weight ? rstd[g] * weight[c] : rstd[g], add[c] = bias ? bias[c] : 0.0f;
  }
  for (int64_t p = 0; p < n.pixels; p++)
    for (int64_t c = 0; c < n.channels; c += WIDTH) {
      const int64_t at = p * n.channels + c;
      Vector v = (load(x + at) - load(shift.data() + c)) * load(scale.data() + c) + load(add.data() + c);
      if (adds) v += load(other + at);
      if (relu) {
        const uint16_t own = positive(v);
        std::memcpy(bits + at / WIDTH, &own, sizeof own);
        v = kept(v, own);
      }
      store(y + at, v);
    }
}

template <bool relu>
void backward(const Norm& n, const float* grad, const uint16_t* bits, const float* x, const float* mean,
              const float* rstd, const float* weight, float* dx, float* to_weight, float* to_bias, float* to_other) {
  std::vector<double> by_bias(n.channels, 0.0), by_weight(n.channels, 0.0);
  std::vector<float> shift(n.channels), by_grad(n.channels), by_x(n.channels), add(n.channels);
  for (int64_t c = 0; c < n.channels; c++) shift[c] = mean[c / n.wide()];
  const auto masked = [&](int64_t at) {
    const Vector g = load(grad + at);
    if (!relu) return g;
    uint16_t own;
    std::memcpy(&own, bits + at / WIDTH, sizeof own);
    return kept(g, own);
  };
  for (int64_t c = 0; c < n.channels; c += WIDTH) {
    const Vector m = load(shift.data() + c);
    sum_pixels<2>(n.pixels, c, {by_bias.data(), by_weight.data()}, [&](int64_t p, Vector* to) {
      const int64_t at = p * n.channels + c;
      const Vector g = masked(at);
      to[0] += g, to[1] += g * (load(x + at) - m);
    });
  }
  for (int64_t c = 0; c < n.channels; c++) {
    to_bias[c] = float(by_bias[c]);
    to_weight[c] = float(by_weight[c] * double(rstd[c / n.wide()]));
  }
  const double count = double(n.pixels) * double(n.wide());
  for (int64_t g = 0; g < n.groups; g++) {
    double first = 0.0, second = 0.0;
    for (int64_t c = g * n.wide(); c < (g + 1) * n.wide(); c++) {
      const double w = weight ? double(weight[c]) : 1.0;
      first += w * by_bias[c], second += w * by_weight[c];
    }
    const double r = rstd[g];
    for (int64_t c = g * n.wide(); c < (g + 1) * n.wide(); c++) {
      by_grad[c] = weight ? rstd[g] * weight[c] : rstd[g];
      by_x[c] = float(-second / count * r * r * r), add[c] = float(-first / count * r);
    }
  }
  for (int64_t p = 0; p < n.pixels; p++)
    for (int64_t c = 0; c < n.channels; c += WIDTH) {
      const int64_t at = p * n.channels + c;
      const Vector g = masked(at);
      if (to_other) store(to_other + at, g);
      const Vector off = load(x + at) - load(shift.data() + c);
      store(dx + at, g * load(by_grad.data() + c) + off * load(by_x.data() + c) + load(add.data() + c));
    }
}

}  // namespace

extern "C" {

// y[b][p][c] = (x - mean of its group) · rstd · weight[c] + bias[c], + `other` if there is one, and with `relu` the
// positive part, of which bit c % 16 of bits[b][p][c / 16] says where it is. `weight` and `bias` may be null.
void dpq_norm(const int64_t* shape, const float* x, const float* other, const float* weight, const float* bias,
              const double* eps, int64_t relu, float* y, float* mean, float* rstd, uint16_t* bits, int threads) {
  const Norm n(shape);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < n.batch; b++) {
    const auto run = [&](auto kind) {
      kind(n, x + b * n.size(), other + (other ? b * n.size() : 0), weight, bias, *eps, y + b * n.size(),
           mean + b * n.groups, rstd + b * n.groups, bits + (relu ? b * n.size() / WIDTH : 0));
    };
    if (relu) other ? run(forward<true, true>) : run(forward<true, false>);
    else other ? run(forward<false, true>) : run(forward<false, false>);
  }
}

// The gradients of x, and of `other` where `to_other` is given; and for each sample those of weight and bias.
void dpq_norm_grad(const int64_t* shape, const float* grad, const uint16_t* bits, const float* x, const float* mean,
                   const float* rstd, const float* weight, int64_t relu, float* dx, float* to_weight, float* to_bias,
                   float* to_other, int threads) {
  const Norm n(shape);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < n.batch; b++) {
    const auto run = [&](auto kind) {
      kind(n, grad + b * n.size(), bits + (relu ? b * n.size() / WIDTH : 0), x + b * n.size(), mean + b * n.groups,
           rstd + b * n.groups, weight, dx + b * n.size(), to_weight + b * n.channels, to_bias + b * n.channels,
           to_other ? to_other + b * n.size() : nullptr);
    };
    relu ? run(backward<true>) : run(backward<false>);
  }
}

}  // extern "C"
