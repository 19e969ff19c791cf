// Activations as int8 with a scale.
#pragma once

#include "simd.h"

namespace paceline::PACELINE_ISA {

// The float with these bits, whose sign bit is 0; NaN if it is infinite.
PACELINE_INLINE float finite(int32_t bits) { return bits >= 0x7F800000 ? __builtin_nanf("") : ((f32v)splat(bits))[0]; }

// max |x| of n numbers, n a multiple of the vector; NaN if any is NaN or infinite. Compared as integers: the bits of floats without a
// sign are ordered as the floats are, infinity and NaN last.
PACELINE_INLINE float bound(const float* x, size_t n) {
    i32v maxima = splat(0);
    for (size_t i = 0; i < n; i += kLanes) {
        const i32v bits = (i32v)magnitude(load(x + i));
        maxima = bits > maxima ? bits : maxima;
    }
    return finite(largest(maxima));
}

// round(x * factor); 0 where x is NaN or infinite.
PACELINE_INLINE i32v rounded(const float* x, float factor) {
    const f32v whole = nearest(load(x) * factor);
    return __builtin_convertvector(whole == whole ? whole : splat(0.0f), i32v);
}

// Write q = round(x * factor) of n numbers. Returns the sum of q.
template <bool Finite>
PACELINE_INLINE int32_t quantise_group(const float* x, size_t n, float factor, int8_t* q) {
    i32v total = splat(0);
    for (size_t i = 0; i < n; i += kLanes) {
        const i32v v = Finite ? to_nearest(load(x + i) * factor) : rounded(x + i, factor);
        total += v;
        store_bytes(q + i, v);
    }
    return sum(total);
}

}  // namespace paceline::PACELINE_ISA
