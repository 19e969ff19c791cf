// Vectors of 64 bytes by the compiler's own vector types: one source for every instruction set, and the same bits on
// all of them as long as no product and sum are contracted.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline::PACELINE_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

#define PACELINE_INLINE static inline __attribute__((always_inline))

PACELINE_INLINE f32x16 load(const float* p) {
    f32x16 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

PACELINE_INLINE void store(float* p, f32x16 v) { __builtin_memcpy(p, &v, sizeof v); }

PACELINE_INLINE f32x16 splat(float x) { return f32x16{} + x; }

// The larger of each pair; b where a is NaN.
PACELINE_INLINE f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

PACELINE_INLINE float largest(f32x16 v) {
    float best = v[0];
    for (int i = 1; i < 16; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

// exp of numbers at most 88, within 2 units in the last place (Cody and Waite's reduction, the minimax polynomial of
// the Cephes library); 0 below -87.
PACELINE_INLINE f32x16 exp(f32x16 x) {
    const f32x16 shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    const f32x16 n = (x * 1.44269504f + shift) - shift;
    f32x16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const f32x16 tiny = splat(-87.0f);
    const i32x16 power = (__builtin_convertvector(x < tiny ? splat(0.0f) : n, i32x16) + 127) << 23;
    f32x16 scale;
    __builtin_memcpy(&scale, &power, sizeof scale);
    return x < tiny ? splat(0.0f) : p * scale;
}

}  // namespace paceline::PACELINE_ISA
