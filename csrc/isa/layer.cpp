// Operations on one token between matrix products: norm, quantisation, rotation, activation.
#include "kernels.h"
#include "quantise.h"

namespace paceline::PACELINE_ISA {
namespace {

// Root-mean-square norm (arXiv 1910.07467). Four interleaved sums hide the latency of additions; they are added in order, then their
// lanes by halving.
void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out) {
    f32v squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    size_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int v = 0; v < 4; ++v) squares[v] = fma(load(x + i + v * kLanes), load(x + i + v * kLanes), squares[v]);
    for (; i + kLanes <= n; i += kLanes) squares[0] = fma(load(x + i), load(x + i), squares[0]);
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (size_t j = i; j < n; ++j) total += x[j] * x[j];
    const float inverse = 1.0f / __builtin_sqrtf(total / (float)n + eps);
    for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * inverse * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void add(float* x, const float* y, size_t n) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + load(y + i));
    for (; i < n; ++i) x[i] += y[i];
}

void scale(const float* x, size_t n, float factor, float* out) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * factor);
    for (; i < n; ++i) out[i] = x[i] * factor;
}

// Quantise x [width] in groups: q = round(x / scale), scale = max |x| / 127, and sums of q. width is a multiple of the group, which is
// a multiple of the vector; x is padded with zeros.
void quantise(const float* x, size_t width, size_t group, int8_t* q, float* scales, int32_t* sums) {
    for (size_t start = 0, g = 0; start < width; start += group, ++g) {
        const float top = bound(x + start, group), inverse = top > 0.0f ? 127.0f / top : 0.0f;
        const bool finite = top >= 0.0f && inverse < __builtin_inff();
        sums[g] = finite ? quantise_group<true>(x + start, group, inverse, q + start)
                         : quantise_group<false>(x + start, group, inverse, q + start);
        scales[g] = top / 127.0f;
    }
}

typedef double f64v __attribute__((vector_size(PACELINE_VECTOR_BYTES)));

// Half a vector of numbers, in double.
PACELINE_INLINE f64v load_half_wide(const float* p) {
    float v __attribute__((vector_size(PACELINE_VECTOR_BYTES / 2)));
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, f64v);
}

// The integers q from 0 to 15 for which (q - 7.5) * step is nearest to x, 0 for NaN; and with the odd numbers 2q - 15 the sums of their
// products with x and of their squares. n: a multiple of 16. Sums go in the same order for every length of vector.
void to_int4(const float* x, size_t n, float step, int8_t* q, double* products, int32_t* squares) {
    constexpr int kParts = 16 / kLanes;
    f64v sums[2 * kParts] = {};
    i32v total = splat(0);
    for (size_t i = 0; i < n; i += 16) {
        float odd[16];
        for (int part = 0; part < kParts; ++part) {
            const f32v place = larger(load(x + i + part * kLanes) / step + 8.0f, splat(0.0f));
            const i32v whole = __builtin_convertvector(place < splat(15.0f) ? place : splat(15.0f), i32v), twice = 2 * whole - 15;
            total += twice * twice;
            store_bytes(q + i + part * kLanes, whole);
            store(odd + part * kLanes, to_float(twice));
        }
        for (int half = 0; half < 2 * kParts; ++half)
            sums[half] += load_half_wide(odd + half * kLanes / 2) * load_half_wide(x + i + half * kLanes / 2);
    }
    *products = 0.0, *squares = sum(total);
    for (const f64v& part : sums)
        for (int lane = 0; lane < kLanes / 2; ++lane) *products += part[lane];
}

// The sum and the difference of each lane and the lane H further.
template <int H>
PACELINE_INLINE f32v sum_and_difference(f32v v) {
    f32v sign, other;
    i32v partners;
    for (int lane = 0; lane < kLanes; ++lane) sign[lane] = lane & H ? -1.0f : 1.0f, partners[lane] = lane ^ H;
#if defined(__clang__)
    for (int lane = 0; lane < kLanes; ++lane) other[lane] = v[lane ^ H];
#else
    other = __builtin_shuffle(v, partners);
#endif
    return fma(v, sign, other);
}

PACELINE_INLINE f32v within_lanes(f32v v) {
    v = sum_and_difference<2>(sum_and_difference<1>(v));
    if constexpr (kLanes > 4) v = sum_and_difference<4>(v);
    if constexpr (kLanes > 8) v = sum_and_difference<8>(v);
    return v;
}

// Sums and differences between R vectors, neighbours first.
template <int R>
PACELINE_INLINE void across(f32v (&v)[R]) {
    PACELINE_UNROLL for (int apart = 1; apart < R; apart *= 2)
        PACELINE_UNROLL for (int i = 0; i < R; ++i)
            if (!(i & apart)) {
                const f32v a = v[i], b = v[i + apart];
                v[i] = a + b;
                v[i + apart] = a - b;
            }
}

// The same in place, between numbers that are apart, 2 * apart, ... from each other, in each stretch of R * apart.
template <int R>
PACELINE_INLINE void across(float* y, size_t block, size_t apart) {
    for (size_t stretch = 0; stretch < block; stretch += R * apart)
        for (float* at = y + stretch; at < y + stretch + apart; at += kLanes) {
            f32v v[R];
            PACELINE_UNROLL for (int i = 0; i < R; ++i) v[i] = load(at + i * apart);
            across(v);
            PACELINE_UNROLL for (int i = 0; i < R; ++i) store(at + i * apart, v[i]);
        }
}

// Neighbours first, then numbers two apart, and so on: the same sums in the same order for every length of vector. It does as many steps
// at once as registers allow.
void hadamard(const float* x, size_t width, float* out) {
    constexpr size_t kFirst = 64;  // numbers; the width is a multiple
    const size_t block = hadamard_block(width);
    for (size_t start = 0; start < width; start += kFirst) {
        f32v v[kFirst / kLanes];
        PACELINE_UNROLL for (size_t i = 0; i < kFirst / kLanes; ++i) v[i] = within_lanes(load(x + start + i * kLanes));
        across(v);
        PACELINE_UNROLL for (size_t i = 0; i < kFirst / kLanes; ++i) store(out + start + i * kLanes, v[i]);
    }
    for (float* y = out; y < out + width; y += block)
        for (size_t apart = kFirst; apart < block;) {
            const size_t left = block / apart;
            if (left >= 8)
                across<8>(y, block, apart), apart *= 8;
            else if (left == 4)
                across<4>(y, block, apart), apart *= 4;
            else
                across<2>(y, block, apart), apart *= 2;
        }
}

// Rotate a head of n numbers, number i paired with i + n / 2, and scale it (RoPE). May work in place.
void rotate(const float* x, const float* cosines, const float* sines, size_t n, float scale, float* out) {
    const float* const y = x + n / 2;
    float* const far = out + n / 2;
    size_t i = 0;
    for (; i + kLanes <= n / 2; i += kLanes) {
        const f32v a = load(x + i), b = load(y + i), c = load(cosines + i), s = load(sines + i);
        store(out + i, (a * c - b * s) * scale);
        store(far + i, (b * c + a * s) * scale);
    }
    for (; i < n / 2; ++i) {
        const float a = x[i], b = y[i];
        out[i] = (a * cosines[i] - b * sines[i]) * scale;
        far[i] = (b * cosines[i] + a * sines[i]) * scale;
    }
}

// x * logistic(z)
PACELINE_INLINE f32v gated(f32v x, f32v z) {
    const f32v within = -larger(z, splat(-87.0f));
    return x / (1.0f + exp_within(larger(within, splat(-87.0f)), splat(-1)));
}

// gate = silu(gate) * up; n is a multiple of 16.
void silu_mul(float* gate, const float* up, size_t n) {
    for (size_t i = 0; i < n; i += kLanes) {
        const f32v x = load(gate + i);
        store(gate + i, gated(x, x) * load(up + i));
    }
}

// gate = gelu(gate) * up, gelu by its tanh: 0.5 (1 + tanh u) = logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
void gelu_mul(float* gate, const float* up, size_t n) {
    for (size_t i = 0; i < n; i += kLanes) {
        const f32v x = load(gate + i);
        store(gate + i, gated(x, x * fma(x * x, splat(0.0713548163f), splat(1.59576912f))) * load(up + i));
    }
}

// gate = (up + 1) * g * logistic(1.702 g) with gate at most 7 and up between -7 and 7; NaN stays NaN.
void clamped_mul(float* gate, const float* up, size_t n) {
    const f32v limit = splat(7.0f);
    for (size_t i = 0; i < n; i += kLanes) {
        const f32v g = load(gate + i), u = load(up + i);
        const f32v x = g > limit ? limit : g, most = u > limit ? limit : u;
        store(gate + i, gated(x, x * splat(1.702f)) * ((most < -limit ? -limit : most) + 1.0f));
    }
}

void cap(float* x, size_t n, float most) { cap_all(x, n, most); }

// To float16, clamped to its largest finite number; NaN stays NaN.
void to_halves(const float* x, size_t n, uint16_t* out) {
    constexpr float limit = 65504.0f;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const f32v v = load(x + i), low = v > splat(limit) ? splat(limit) : v;
        store_half(out + i, low < splat(-limit) ? splat(-limit) : low);
    }
    for (; i < n; ++i) out[i] = to_half(x[i] > limit ? limit : x[i] < -limit ? -limit : x[i]);
}

void from_halves(const uint16_t* x, size_t n, float* out) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load_half(x + i));
    uint16_t last[kLanes] = {};  // padded to a vector: there is no load of single numbers
    for (size_t left = i; left < n; ++left) last[left - i] = x[left];
    const f32v v = load_half(last);
    for (; i < n; ++i) out[i] = v[i % kLanes];
}

}  // namespace

extern const LayerKernels layer_kernels;
const LayerKernels layer_kernels = {rms_norm, add,      scale,    quantise,    to_int4, hadamard,  rotate,
                                    silu_mul, gelu_mul, clamped_mul, cap,         to_halves, from_halves};

}  // namespace paceline::PACELINE_ISA
