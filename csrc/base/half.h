// float16 by integer arithmetic, the same on every machine.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace paceline {

inline float from_half(uint16_t h) {
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023u, sign = (h & 0x8000u) << 16;
    if (exponent == 0) return std::copysign(static_cast<float>(mantissa) * 0x1p-24f, std::bit_cast<float>(sign | 0x3F800000));
    return std::bit_cast<float>(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

// x as float16, rounded to nearest, ties to even; too large numbers become infinite.
inline uint16_t to_half(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float a = std::fabs(x);
    if (!(a < 65520.0f)) return static_cast<uint16_t>(sign | (a != a ? 0x7E00 : 0x7C00));
    if (a < 0x1p-14f) return static_cast<uint16_t>(sign | std::lrintf(std::ldexp(a, 24)));
    int exponent;
    const float mantissa = std::frexp(a, &exponent);  // in [0.5, 1)
    const long rounded = std::lrintf(std::ldexp(mantissa, 11));  // in [1024, 2048]
    return static_cast<uint16_t>(sign | ((exponent + 13) * 1024 + rounded));
}

}  // namespace paceline
