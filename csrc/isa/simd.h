// Vectors of the instruction set's own width: vector types of the compiler, and intrinsics where these do not suffice. Built without
// contraction: a product and a sum are fused only by `fma`, so that a kernel's bits depend on its instruction set alone.
#pragma once

#include "kernels.h"

#if defined(__x86_64__) && (defined(__AVX512F__) || defined(__AVX2__))
#include <immintrin.h>
#endif

#define PACELINE_INLINE static inline __attribute__((always_inline))
#define PACELINE_APART __attribute__((noinline))  // not inlined, so that it has all registers
#define PACELINE_UNROLL _Pragma("GCC unroll 32")  // unrolls whole loops, so that arrays of vectors become registers

#if defined(__AVX512F__)
#define PACELINE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PACELINE_VECTOR_BYTES 32
#else
#define PACELINE_VECTOR_BYTES 16
#endif

namespace paceline::PACELINE_ISA {

constexpr int kLanes = PACELINE_VECTOR_BYTES / 4;

typedef float f32v __attribute__((vector_size(PACELINE_VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(PACELINE_VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(PACELINE_VECTOR_BYTES)));

PACELINE_INLINE f32v load(const float* p) {
    f32v v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

PACELINE_INLINE void store(float* p, f32v v) { __builtin_memcpy(p, &v, sizeof v); }

enum class Level { second, past };  // cache to prefetch into: L2, or only L1, past the larger caches

// Prefetch a cache line.
template <Level To>
PACELINE_INLINE void fetch(const void* p) {
    __builtin_prefetch(p, 0, To == Level::past ? 0 : 2);
}

// Prefetch a cache line that will be read once, and then not before every cache has dropped it.
PACELINE_INLINE void fetch_once(const void* p) { kFetchesPastCaches ? fetch<Level::past>(p) : fetch<Level::second>(p); }

PACELINE_INLINE f32v splat(float x) { return x - f32v{}; }  // the compiler may fold this, but not 0 + x
PACELINE_INLINE i32v splat(int32_t x) { return i32v{} + x; }

// Load kLanes float16 numbers as float32.
PACELINE_INLINE f32v load_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    f32v v;
    for (int i = 0; i < kLanes; ++i) {
        _Float16 h;
        __builtin_memcpy(&h, p + i, sizeof h);
        v[i] = (float)h;
    }
    return v;
#endif
}

PACELINE_INLINE uint16_t to_half(float x) {
    uint16_t bits;
#if defined(__F16C__)
    bits = (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const _Float16 h = (_Float16)x;
    __builtin_memcpy(&bits, &h, sizeof bits);
#endif
    return bits;
}

PACELINE_INLINE void store_half(uint16_t* p, f32v v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = to_half(v[i]);
#endif
}

// Load kLanes bfloat16 numbers as float32, of which they are the upper 16 bits.
PACELINE_INLINE f32v load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
    return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    u32v bits;
    for (int i = 0; i < kLanes; ++i) bits[i] = (uint32_t)p[i] << 16;
    return (f32v)bits;
#endif
}

// a * b + c, rounded once if the instruction set can.
PACELINE_INLINE f32v fma(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The larger of each pair; b where a is NaN.
PACELINE_INLINE f32v larger(f32v a, f32v b) {
#if defined(__AVX512F__)
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

PACELINE_INLINE f32v magnitude(f32v v) { return (f32v)((i32v)v & 0x7FFFFFFF); }

PACELINE_INLINE float largest(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

PACELINE_INLINE int32_t largest(i32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// The sum of all lanes by halving, always in the same order.
PACELINE_INLINE float sum(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) v[i] += v[i + width];
    return v[0];
#endif
}

PACELINE_INLINE int32_t sum(i32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += v[i];
    return total;
#endif
}

// Store integers from -128 to 127 as bytes.
PACELINE_INLINE void store_bytes(int8_t* p, i32v v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = (int8_t)v[i];
#endif
}

PACELINE_INLINE f32v to_float(u32v v) {
#if defined(__AVX512F__)
    return (f32v)_mm512_cvtepu32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, f32v);
#endif
}

PACELINE_INLINE f32v to_float(i32v v) { return __builtin_convertvector(v, f32v); }

// Rounded to the nearest integer, ties to even; |x| < 2**22.
PACELINE_INLINE f32v nearest(f32v x) {
#if defined(__AVX512F__)
    return (f32v)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const f32v shift = splat(12582912.0f);  // 1.5 * 2**23
    return (x + shift) - shift;
#endif
}

// The same, as integers.
PACELINE_INLINE i32v to_nearest(f32v x) {
#if defined(__AVX512F__)
    return (i32v)_mm512_cvtps_epi32((__m512)x);
#else
    return __builtin_convertvector(nearest(x), i32v);
#endif
}

// p * 2**n for integers n; 0 where `valid` is not all ones.
PACELINE_INLINE f32v scaled(f32v p, f32v n, i32v valid) {
#if defined(__AVX512F__)
    return (f32v)_mm512_maskz_scalef_ps(_mm512_movepi32_mask((__m512i)valid), (__m512)p, (__m512)n);
#else
    const i32v power = (__builtin_convertvector(n, i32v) + 127) << 23;
    return (f32v)((i32v)(p * (f32v)power) & valid);
#endif
}

// exp of numbers from -87.5 to 88, within 2 units in the last place: Cody and Waite's reduction, and the minimax polynomial of the Cephes
// library. 0 where `valid` is not all ones.
PACELINE_INLINE f32v exp_within(f32v x, i32v valid) {
    const f32v n = nearest(x * 1.44269504f);
    f32v r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32v p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    return scaled(p, n, valid);
}

// exp of numbers at most 88; 0 below -87.5 and for NaN, which attention never hands on.
PACELINE_INLINE f32v exp(f32v x) {
    const f32v floor = splat(-87.5f);
    return exp_within(larger(x, floor), x > floor);
}

// x = cap * tanh(x / cap) of n numbers, a multiple of 16, by tanh |y| = (1 - exp(-2 |y|)) / (1 + exp(-2 |y|)). NaN stays NaN.
PACELINE_INLINE void cap_all(float* x, size_t n, float cap) {
    for (size_t i = 0; i < n; i += kLanes) {
        const f32v v = load(x + i), e = exp(magnitude(v) * (-2.0f / cap)), size = (1.0f - e) / (1.0f + e) * cap;
        const f32v capped = v < splat(0.0f) ? -size : size;
        store(x + i, v == v ? capped : v);
    }
}

}  // namespace paceline::PACELINE_ISA
