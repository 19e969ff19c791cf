// float16 by integer arithmetic, for code that runs once per weight and need not be fast.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace paceline {

inline float from_half(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    float x;
    if (exponent == 31)
        x = mantissa ? NAN : INFINITY;
    else
        x = exponent ? std::ldexp(static_cast<float>(mantissa | 1024), exponent - 25) : std::ldexp(static_cast<float>(mantissa), -24);
    return h & 0x8000 ? -x : x;
}

// Rounded to nearest, ties to even; too large numbers become infinite.
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
