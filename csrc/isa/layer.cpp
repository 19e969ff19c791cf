// What happens to one token between matrix products: norm, quantisation, rotation, activation.
#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_ISA {
namespace {

// Root-mean-square norm (arXiv 1910.07467). Sums run over vectors in order, then over lanes by halving.
void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out) {
    f32v squares = splat(0.0f);
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
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

// max |x| of n numbers, n a multiple of the vector; NaN if any is NaN or infinite.
PACELINE_INLINE float bound(const float* x, size_t n) {
    f32v most = splat(0.0f), poison = splat(0.0f);
    for (size_t i = 0; i < n; i += kLanes) {
        const f32v v = load(x + i);
        most = larger(larger(v, -v), most);
        poison += v * 0.0f;
    }
    return largest(most) + sum(poison);
}

// round(x * factor); 0 where x is NaN or infinite, as no NaN becomes a number.
PACELINE_INLINE i32v rounded(const float* x, float factor) {
    const f32v whole = nearest(load(x) * factor);
    return __builtin_convertvector(whole == whole ? whole : splat(0.0f), i32v);
}

// x [width], zeros from its end on, in groups: q = round(x / scale), scale = max |x| / 127, sums of q.
// width is a multiple of the group, which is a multiple of the vector.
void quantise(const float* x, size_t width, size_t group, int8_t* q, float* scales, int32_t* sums) {
    for (size_t start = 0, g = 0; start < width; start += group, ++g) {
        const float top = bound(x + start, group), inverse = top > 0.0f ? 127.0f / top : 0.0f;
        i32v total = splat(0);
        for (size_t i = start; i < start + group; i += kLanes) {
            const i32v v = rounded(x + i, inverse);
            total += v;
            store_bytes(q + i, v);
        }
        scales[g] = top / 127.0f;
        sums[g] = sum(total);
    }
}

// Each lane and the one H lanes further: their sum and their difference.
template <int H>
PACELINE_INLINE f32v sum_and_difference(f32v v) {
    f32v sign, other;
    i32v places;
    for (int lane = 0; lane < kLanes; ++lane) sign[lane] = lane & H ? -1.0f : 1.0f, places[lane] = lane ^ H;
#if defined(__clang__)
    for (int lane = 0; lane < kLanes; ++lane) other[lane] = v[lane ^ H];
#else
    other = __builtin_shuffle(v, places);
#endif
    return v * sign + other;
}

PACELINE_INLINE f32v within_lanes(f32v v) {
    v = sum_and_difference<2>(sum_and_difference<1>(v));
    if constexpr (kLanes > 4) v = sum_and_difference<4>(v);
    if constexpr (kLanes > 8) v = sum_and_difference<8>(v);
    return v;
}

// Neighbours first, then those two apart, and so on: the same sums in the same order whatever a vector holds.
void hadamard(const float* x, size_t width, float* out) {
    const size_t block = hadamard_block(width);
    for (size_t start = 0; start < width; start += block) {
        float* y = out + start;
        for (size_t i = 0; i < block; i += kLanes) store(y + i, within_lanes(load(x + start + i)));
        for (size_t apart = kLanes; apart < block; apart *= 2)
            for (size_t pair = 0; pair < block; pair += 2 * apart)
                for (size_t i = pair; i < pair + apart; i += kLanes) {
                    const f32v a = load(y + i), b = load(y + i + apart);
                    store(y + i, a + b);
                    store(y + i + apart, a - b);
                }
    }
}

// Turn a head of n numbers, number i paired with i + n / 2.
void rotate(float* x, const float* cosines, const float* sines, size_t n) {
    float* y = x + n / 2;
    size_t i = 0;
    for (; i + kLanes <= n / 2; i += kLanes) {
        const f32v a = load(x + i), b = load(y + i), c = load(cosines + i), s = load(sines + i);
        store(x + i, a * c - b * s);
        store(y + i, b * c + a * s);
    }
    for (; i < n / 2; ++i) {
        const float a = x[i], b = y[i];
        x[i] = a * cosines[i] - b * sines[i];
        y[i] = b * cosines[i] + a * sines[i];
    }
}

// x * logistic(z)
PACELINE_INLINE f32v gated(f32v x, f32v z) { return x / (1.0f + exp(-larger(z, splat(-87.0f)))); }

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

// Half precision, no number beyond its largest; NaN stays NaN.
void to_halves(const float* x, size_t n, uint16_t* out) {
    constexpr float most = 65504.0f;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const f32v v = load(x + i), low = v > splat(most) ? splat(most) : v;
        store_half(out + i, low < splat(-most) ? splat(-most) : low);
    }
    for (; i < n; ++i) out[i] = to_half(x[i] > most ? most : x[i] < -most ? -most : x[i]);
}

void from_halves(const uint16_t* x, size_t n, float* out) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load_half(x + i));
    uint16_t last[kLanes] = {};  // a vector of them, as one alone has no load
    for (size_t left = i; left < n; ++left) last[left - i] = x[left];
    const f32v v = load_half(last);
    for (; i < n; ++i) out[i] = v[i % kLanes];
}

}  // namespace

extern const LayerKernels layer_kernels;
const LayerKernels layer_kernels = {rms_norm, add, quantise, hadamard, rotate, silu_mul, gelu_mul, to_halves, from_halves};

}  // namespace paceline::PACELINE_ISA
