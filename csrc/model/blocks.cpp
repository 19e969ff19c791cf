#include "model/blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/half.h"

namespace paceline {
namespace {

constexpr size_t kSmall = 32, kSuper = 256;  // weights of a block; formats ending in K have blocks of small blocks

float half_at(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return from_half(bits);
}

void unpack_f32(const uint8_t* block, float* to) { std::memcpy(to, block, sizeof(float)); }
void unpack_f16(const uint8_t* block, float* to) { *to = half_at(block); }

void unpack_bf16(const uint8_t* block, float* to) {
    uint16_t bits;
    std::memcpy(&bits, block, sizeof bits);
    *to = std::bit_cast<float>(uint32_t{bits} << 16);
}

// `low` numbers of 4 bits: first the low halves of all bytes, then the high ones.
void unpack_q4_0(const uint8_t* block, float* to) {
    const float scale = half_at(block);
    for (size_t i = 0; i < kSmall / 2; ++i) {
        to[i] = scale * static_cast<float>((block[2 + i] & 15) - 8);
        to[i + kSmall / 2] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
    }
}

void unpack_q4_1(const uint8_t* block, float* to) {
    const float scale = half_at(block), minimum = half_at(block + 2);
    for (size_t i = 0; i < kSmall / 2; ++i) {
        to[i] = scale * static_cast<float>(block[4 + i] & 15) + minimum;
        to[i + kSmall / 2] = scale * static_cast<float>(block[4 + i] >> 4) + minimum;
    }
}

// Read 32 numbers of 5 bits: the fifth bits of all stand before the other bits.
void read_fives(const uint8_t* at, int* to) {
    uint32_t fifths;
    std::memcpy(&fifths, at, sizeof fifths);
    for (size_t i = 0; i < kSmall / 2; ++i) {
        to[i] = (at[4 + i] & 15) | static_cast<int>(fifths >> i & 1) << 4;
        to[i + kSmall / 2] = at[4 + i] >> 4 | static_cast<int>(fifths >> (i + kSmall / 2) & 1) << 4;
    }
}

void unpack_q5_0(const uint8_t* block, float* to) {
    int values[kSmall];
    read_fives(block + 2, values);
    const float scale = half_at(block);
    for (size_t i = 0; i < kSmall; ++i) to[i] = scale * static_cast<float>(values[i] - 16);
}

void unpack_q5_1(const uint8_t* block, float* to) {
    int values[kSmall];
    read_fives(block + 4, values);
    const float scale = half_at(block), minimum = half_at(block + 2);
    for (size_t i = 0; i < kSmall; ++i) to[i] = scale * static_cast<float>(values[i]) + minimum;
}

void unpack_q8_0(const uint8_t* block, float* to) {
    const float scale = half_at(block);
    for (size_t i = 0; i < kSmall; ++i) to[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

// Scales and minima of the 8 small blocks of a large one, 6 bits each in 12 bytes, times the large one's own.
struct Scales {
    float scales[8], minima[8];

    explicit Scales(const uint8_t* block) {
        const float scale = half_at(block), minimum = half_at(block + 2);
        const uint8_t* at = block + 4;
        for (size_t i = 0; i < 4; ++i) {
            scales[i] = scale * static_cast<float>(at[i] & 63), minima[i] = minimum * static_cast<float>(at[i + 4] & 63);
            scales[i + 4] = scale * static_cast<float>((at[i + 8] & 15) | at[i] >> 6 << 4);
            minima[i + 4] = minimum * static_cast<float>(at[i + 8] >> 4 | at[i + 4] >> 6 << 4);
        }
    }
};

// high: one byte for each of 32 columns, a fifth bit of every small block; null: there are none.
void unpack_small_blocks(const Scales& found, const uint8_t* low, const uint8_t* high, float* to) {
    for (size_t small = 0; small < 8; ++small, to += kSmall) {
        const uint8_t* at = low + small / 2 * kSmall;
        const int shift = small % 2 ? 4 : 0;
        const float scale = found.scales[small], minimum = found.minima[small];
        for (size_t i = 0; i < kSmall; ++i) {
            const int fifth = high ? (high[i] >> small & 1) << 4 : 0;
            to[i] = scale * static_cast<float>((at[i] >> shift & 15) | fifth) - minimum;
        }
    }
}

void unpack_q4_k(const uint8_t* block, float* to) { unpack_small_blocks(Scales(block), block + 16, nullptr, to); }
void unpack_q5_k(const uint8_t* block, float* to) { unpack_small_blocks(Scales(block), block + 48, block + 16, to); }

void unpack_q6_k(const uint8_t* block, float* to) {
    const float scale = half_at(block + 208);
    for (size_t part = 0; part < kSuper / kSmall; ++part, to += kSmall) {  // four parts share 64 low and 32 high bytes
        const size_t half = part / 4, quarter = part % 4;
        const uint8_t *low = block + half * 64 + quarter % 2 * kSmall, *high = block + 128 + half * kSmall;
        const uint8_t* scales = block + 192 + part * 2;
        const int low_shift = quarter < 2 ? 0 : 4, high_shift = static_cast<int>(quarter) * 2;
        for (size_t i = 0; i < kSmall; ++i) {
            const int value = ((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32;
            to[i] = scale * static_cast<float>(static_cast<int8_t>(scales[i / 16])) * static_cast<float>(value);
        }
    }
}

constexpr BlockFormat kFormats[] = {
    {"F32", 1, 4, unpack_f32},
    {"F16", 1, 2, unpack_f16},
    {"BF16", 1, 2, unpack_bf16},
    {"Q4_0", kSmall, 18, unpack_q4_0},
    {"Q4_1", kSmall, 20, unpack_q4_1},
    {"Q5_0", kSmall, 22, unpack_q5_0},
    {"Q5_1", kSmall, 24, unpack_q5_1},
    {"Q8_0", kSmall, 34, unpack_q8_0},
    {"Q4_K", kSuper, 144, unpack_q4_k},
    {"Q5_K", kSuper, 176, unpack_q5_k},
    {"Q6_K", kSuper, 210, unpack_q6_k},
};

}  // namespace

const BlockFormat* block_format(std::string_view name) {
    const auto found = std::ranges::find(kFormats, name, &BlockFormat::name);
    return found == std::end(kFormats) ? nullptr : found;
}

std::span<const BlockFormat> block_formats() { return kFormats; }

}  // namespace paceline
