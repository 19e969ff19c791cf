// Matrices in the values and scales of a GGUF file. A panel is 32 outputs; a superblock of it, 256 inputs (the last one perhaps fewer).
// Forms differ in bits, in inputs of a group and in the kind of its scale; one kernel serves them all. A superblock is:
//   32 scales and, with minima, 32 of these (float16), unless groups have float scales
//   for each group 32 scales: 16-bit floats, or signed bytes; of groups of 32 with bytes for each two 32 lanes of both scales
//   with minima: for each quad of groups 32 lanes of 4 bytes, the groups' minima
//   for each stretch of 32 inputs: low bits, for each pair of quads of inputs 32 lanes of 4 bytes, the first quad in the low 4 bits; then
//   high bits, for each vector of quads 32 lanes of 4 bytes, the first quad in the lowest bits.
//   Of whole bytes 32 lanes for each quad
// weight = scale * group scale * (value - offset) - minima's scale * group's minimum
#pragma once

#include <string_view>

#include "kernels.h"

namespace paceline {

constexpr size_t kSuper = 256;    // inputs of a superblock
constexpr size_t kStretch = 32;   // inputs that one step of a kernel takes
constexpr size_t kStartUnit = 32; // sums of activations are stored times -32
constexpr int kMaxExponent = 4;   // largest exponent of a stretch of activations

enum class Scales { integers, halves, bfloats };  // kinds of group scales
enum class Codes { none, normal, fp4 };           // tables of what 4 bits stand for; none: they are the number

// Facts of a form.
struct BlockForm {
    size_t high_bits;  // 0, 1, 2 or 4, above the low 4
    size_t group;      // inputs: 16 or 32
    size_t offset;     // the stored value that stands for zero
    size_t most = 0, most_scale = 0;  // where groups have integer scales: the largest distance from zero, and the largest scale
    Scales scales = Scales::integers;
    bool minima = false;
    Codes codes = Codes::none;

    constexpr bool floats() const { return scales != Scales::integers; }
    constexpr bool bytes() const { return high_bits == 4; }
    constexpr size_t num_groups() const { return kSuper / group; }
    constexpr size_t minimum_at() const { return kPanel * 2; }
    constexpr size_t scales_at() const { return floats() ? 0 : kPanel * (minima ? 4 : 2); }
    constexpr size_t minima_at() const { return scales_at() + num_groups() * kPanel * (floats() ? 2 : 1); }
    constexpr size_t header_bytes() const { return minima_at() + (minima ? num_groups() * kPanel : 0); }
    constexpr size_t stretch_bytes() const { return kPanel * kStretch * (4 + high_bits) / 8; }
    constexpr bool in_pairs() const { return !floats() && group == kStretch; }
    // Where the scale of a group lies in the header.
    constexpr size_t scale_at(size_t index, size_t lane) const {
        if (in_pairs()) return scales_at() + (index / 2 * kPanel + lane) * 2 + index % 2;
        return scales_at() + (index * kPanel + lane) * (floats() ? 2 : 1);
    }
    // Low bits that are dropped from a group's sum of products, so that two fit a lane.
    constexpr int dropped() const {
        int bits = 0;
        while (in_pairs() && (group * 127 * most >> bits) + 1 >= size_t{1} << 15) ++bits;
        return bits;
    }
    // True if a superblock's sum of scaled products fits 32 bits.
    constexpr bool fits() const {
        const size_t sums = (kSuper * 127 * most >> dropped()) + num_groups();
        return sums * (most_scale << kMaxExponent) < size_t{1} << 31;
    }
    constexpr size_t panel_bytes(size_t width) const {
        return (width + kSuper - 1) / kSuper * header_bytes() + (width + kStretch - 1) / kStretch * stretch_bytes();
    }
};

// The forms, in the order of `WeightType` from q4_k on.
inline constexpr BlockForm kBlockForms[] = {
    {.high_bits = 0, .group = 32, .offset = 0, .most = 15, .most_scale = 63, .minima = true},             // Q4_K
    {.high_bits = 1, .group = 32, .offset = 0, .most = 31, .most_scale = 63, .minima = true},             // Q5_K
    {.high_bits = 2, .group = 16, .offset = 32, .most = 32, .most_scale = 128},                           // Q6_K
    {.high_bits = 0, .group = 16, .offset = 4, .most = 4, .most_scale = 32},                              // Q3_K
    {.high_bits = 0, .group = 32, .offset = 128, .most = 127, .most_scale = 32, .codes = Codes::normal},  // IQ4_XS
    {.high_bits = 0, .group = 32, .offset = 128, .scales = Scales::halves, .codes = Codes::normal},       // IQ4_NL
    {.high_bits = 0, .group = 32, .offset = 16, .scales = Scales::bfloats, .codes = Codes::fp4},          // MXFP4
    {.high_bits = 1, .group = 32, .offset = 16, .scales = Scales::halves},                                // Q5_0
    {.high_bits = 4, .group = 32, .offset = 128, .scales = Scales::halves},                               // Q8_0
};
static_assert(sizeof kBlockForms / sizeof kBlockForms[0] == kNumBlockForms);
static_assert([] {
    bool fit = true;
    for (const BlockForm& form : kBlockForms) fit &= form.fits();
    return fit;
}());

// The forms' names in GGUF, which are also names of types of weights.
inline constexpr std::string_view kBlockNames[kNumBlockForms] = {"Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS", "IQ4_NL", "MXFP4", "Q5_0", "Q8_0"};

// What a value of 4 bits stands for, plus the offset: IQ4's are quantiles of a normal distribution, FP4's are doubled.
inline constexpr uint8_t kCodes[][16] = {
    {},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
};

}  // namespace paceline
