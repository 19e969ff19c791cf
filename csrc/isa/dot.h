// Sums of four byte products in each 32-bit lane, exact on every instruction set.
#pragma once

#include "simd.h"

namespace paceline::PACELINE_ISA {

PACELINE_INLINE i32v load_bytes(const uint8_t* p) {
    i32v v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// The same four signed bytes in every lane.
PACELINE_INLINE i32v splat_bytes(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return splat(four);
}

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

// Inline assembly, as GCC otherwise moves accumulators through the stack.
PACELINE_INLINE void dot(i32v& sums, i32v weights, i32v activations) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(activations));
}

#if defined(PACELINE_SANITIZE)

// The function below for sanitizers: these do not see reads of assembly, and in their code `bytes` is no constant, as assembly needs.
PACELINE_INLINE i32v broadcast(const int8_t* base, int times, size_t width, int bytes) {
    return splat_bytes(base + times * width + bytes);
}

#else

// Four activations at base + times * width + bytes, in every lane; times: 0 to 3. Assembly, as the compiler would compute the address
// of each row. The last operand tells it that memory behind the base is read.
PACELINE_INLINE i32v broadcast(const int8_t* base, int times, size_t width, int bytes) {
    const auto& read = *reinterpret_cast<const int8_t(*)[]>(base);
    const size_t triple = 3 * width;
    i32v y;
    if (times == 0)
        __asm__("vpbroadcastd %c2(%1), %0" : "=v"(y) : "r"(base), "i"(bytes), "m"(read));
    else if (times == 1)
        __asm__("vpbroadcastd %c3(%1,%2), %0" : "=v"(y) : "r"(base), "r"(width), "i"(bytes), "m"(read));
    else if (times == 2)
        __asm__("vpbroadcastd %c3(%1,%2,2), %0" : "=v"(y) : "r"(base), "r"(width), "i"(bytes), "m"(read));
    else
        __asm__("vpbroadcastd %c3(%1,%2), %0" : "=v"(y) : "r"(base), "r"(triple), "i"(bytes), "m"(read));
    return y;
}

#endif

#elif defined(__AVXVNNI__)

PACELINE_INLINE void dot(i32v& sums, i32v weights, i32v activations) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(activations));
}

#elif defined(__AVX2__)

// Odd and even bytes are widened apart: the 16-bit pair sums of vpmaddubsw would saturate with weights above 128.
PACELINE_INLINE void dot(i32v& sums, i32v weights, i32v activations) {
    const __m256i w = (__m256i)weights, a = (__m256i)activations;
    const __m256i even_w = _mm256_and_si256(w, _mm256_set1_epi16(0x00FF)), odd_w = _mm256_srli_epi16(w, 8);
    const __m256i even_a = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd_a = _mm256_srai_epi16(a, 8);
    const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(even_w, even_a), _mm256_madd_epi16(odd_w, odd_a));
    sums = (i32v)_mm256_add_epi32((__m256i)sums, pairs);
}

#else

PACELINE_INLINE void dot(i32v& sums, i32v weights, i32v activations) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t w = (uint32_t)weights[lane], a = (uint32_t)activations[lane];
        for (int byte = 0; byte < 4; ++byte)
            sums[lane] += (int32_t)(uint8_t)(w >> 8 * byte) * (int32_t)(int8_t)(a >> 8 * byte);
    }
}

#endif

// Load kLanes pairs of signed bytes as words of 16 bits.
PACELINE_INLINE i32v load_words(const uint8_t* p) {
#if defined(__AVX512F__)
    return (i32v)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (i32v)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
    i32v v;
    for (int i = 0; i < kLanes; ++i) v[i] = (uint16_t)(int8_t)p[2 * i] | (int32_t)((uint32_t)(int8_t)p[2 * i + 1] << 16);
    return v;
#endif
}

// Add the products of two signed words of 16 bits in each lane.
PACELINE_INLINE void dot_words(i32v& sums, i32v a, i32v b) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
#elif defined(__AVXVNNI__)
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
#elif defined(__AVX2__)
    sums += (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    for (int lane = 0; lane < kLanes; ++lane)
        sums[lane] += (int16_t)a[lane] * (int16_t)b[lane] + (a[lane] >> 16) * (b[lane] >> 16);
#endif
}

// The scaled result of an integer sum over `SpreadRows`: every kernel ends with these operations.
PACELINE_INLINE f32v scaled_sum(i32v sums, f32v row_scale, f32v output_scale) { return to_float(sums) * row_scale * output_scale; }

}  // namespace paceline::PACELINE_ISA
