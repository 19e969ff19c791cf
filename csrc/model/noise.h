// The noise of core/noise.py, bit for bit: a function of (key, token id) alone.
#pragma once

#include <cmath>
#include <cstdint>

namespace paceline {

// Two words that name one draw.
struct Key {
    uint32_t k0, k1;
};

inline uint32_t murmur(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

inline uint32_t lowbias(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// The key of the target's own choice at a position: `noise.key` in Python, lane CHOICE.
inline Key choice_key(uint64_t seed, uint32_t choice, uint32_t position) {
    Key key{0x243F6A88u, 0x85A308D3u};
    for (uint32_t word : {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), choice, uint32_t{0}, position})
        key = {murmur((key.k0 ^ word) + 0x9E3779B9u), lowbias((key.k1 ^ word) + 0x7F4A7C15u)};
    return key;
}

inline uint32_t leading_bits(Key key, uint32_t id) { return lowbias(lowbias(id ^ key.k0) + key.k1); }

inline uint64_t noise_bits(Key key, uint32_t id) {
    return uint64_t{leading_bits(key, id)} << 32 | murmur(murmur(id ^ key.k1) + key.k0);
}

// Standard Gumbel noise, both tails resolved to 64 bits.
inline double gumbel(Key key, uint32_t id) {
    const uint64_t n = noise_bits(key, id);
    const bool low = n < uint64_t{1} << 63;
    const double v = (static_cast<double>(low ? n : ~n) + 0.5) * 0x1p-64;  // the distance to the nearer end
    return -std::log(low ? -std::log1p(-v) : -std::log(v));
}

// A number just below the noise of any token id whose leading bits are h1.
inline double gumbel_floor(uint32_t h1) {
    constexpr double lowest = -3.9;  // -log(-log(2**-65)) is -3.81
    if (h1 == 0xFFFFFFFFu) return lowest;
    return -std::log(-std::log1p(-(h1 + 1.0) * 0x1p-32)) - 1e-9;
}

}  // namespace paceline
