#include "model/file_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/half.h"

namespace paceline {
namespace {

constexpr size_t kStretches = kSuper / kStretch;

uint16_t half_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// 16 bytes of two values each: the low halves come first.
void split_16(const uint8_t* packed, uint8_t* values) {
    for (size_t i = 0; i < 16; ++i) values[i] = packed[i] & 15, values[16 + i] = packed[i] >> 4;
}

// 32 bytes of two values each, of two groups.
void split_32(const uint8_t* packed, uint8_t* values) {
    for (size_t i = 0; i < 32; ++i) values[i] = packed[i] & 15, values[32 + i] = packed[i] >> 4;
}

// Scales and minima of 6 bits in 12 bytes, eight of each.
void read_k_scales(const uint8_t* p, FileBlock& b) {
    for (size_t i = 0; i < 4; ++i) {
        b.scales[i] = static_cast<int8_t>(p[i] & 63);
        b.minima[i] = p[4 + i] & 63;
        b.scales[4 + i] = static_cast<int8_t>((p[8 + i] & 15) | p[i] >> 6 << 4);
        b.minima[4 + i] = static_cast<uint8_t>(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
    }
}

void read_q4_k(const uint8_t* p, FileBlock& b) {
    b.scale = half_at(p), b.minimum_scale = half_at(p + 2);
    read_k_scales(p + 4, b);
    for (size_t i = 0; i < 4; ++i) split_32(p + 16 + 32 * i, b.values + 64 * i);
}

void read_q5_k(const uint8_t* p, FileBlock& b) {
    b.scale = half_at(p), b.minimum_scale = half_at(p + 2);
    read_k_scales(p + 4, b);
    for (size_t i = 0; i < 4; ++i) split_32(p + 48 + 32 * i, b.values + 64 * i);
    for (size_t i = 0; i < kSuper; ++i) b.values[i] |= static_cast<uint8_t>((p[16 + i % 32] >> i / 32 & 1) << 4);
}

void read_q6_k(const uint8_t* p, FileBlock& b) {
    for (size_t i = 0; i < kSuper; ++i) {
        const size_t half = i / 128, inner = i % 128;
        const uint8_t low = p[64 * half + inner % 64], high = p[128 + 32 * half + inner % 32];
        b.values[i] = static_cast<uint8_t>((inner < 64 ? low & 15 : low >> 4) | (high >> inner / 32 * 2 & 3) << 4);
    }
    std::memcpy(b.scales, p + 192, 16);
    b.scale = half_at(p + 208);
}

void read_q3_k(const uint8_t* p, FileBlock& b) {
    for (size_t i = 0; i < kSuper; ++i) {
        const int low = p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3, high = p[i % 32] >> i / 32 & 1;
        b.values[i] = static_cast<uint8_t>(low | high << 2);
    }
    for (size_t i = 0; i < 16; ++i) {
        const int low = i < 8 ? p[96 + i] & 15 : p[88 + i] >> 4, high = p[104 + i % 4] >> i / 4 * 2 & 3;
        b.scales[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
    b.scale = half_at(p + 108);
}

void read_iq4_xs(const uint8_t* p, FileBlock& b) {
    b.scale = half_at(p);
    for (size_t i = 0; i < 8; ++i) {
        const int low = p[4 + i / 2] >> i % 2 * 4 & 15, high = half_at(p + 2) >> 2 * i & 3;
        b.scales[i] = static_cast<int8_t>((low | high << 4) - 32);
        split_16(p + 8 + 16 * i, b.values + 32 * i);
    }
}

// Blocks of 32 with a float16 scale.
void read_iq4_nl(const uint8_t* p, FileBlock& b, size_t at) {
    b.float_scales[at] = half_at(p);
    split_16(p + 2, b.values + 32 * at);
}

// The scale 2**(e - 127) as bfloat16, halved as the codes are doubled; 255 is NaN.
void read_mxfp4(const uint8_t* p, FileBlock& b, size_t at) {
    const int e = *p - 1;
    b.float_scales[at] = static_cast<uint16_t>(*p == 255 ? 0x7FC0 : e > 0 ? e << 7 : e == 0 ? 0x40 : 0x20);
    split_16(p + 1, b.values + 32 * at);
}

void read_q5_0(const uint8_t* p, FileBlock& b, size_t at) {
    b.float_scales[at] = half_at(p);
    split_16(p + 6, b.values + 32 * at);
    for (size_t i = 0; i < 32; ++i) b.values[32 * at + i] |= static_cast<uint8_t>((p[2 + i / 8] >> i % 8 & 1) << 4);
}

void read_q8_0(const uint8_t* p, FileBlock& b, size_t at) {
    b.float_scales[at] = half_at(p);
    for (size_t i = 0; i < 32; ++i) b.values[32 * at + i] = p[2 + i] ^ 0x80;
}

// How a file stores a form: whole superblocks, or blocks of 32.
struct FileForm {
    size_t block_bytes;
    void (*super)(const uint8_t*, FileBlock&) = nullptr;
    void (*block)(const uint8_t*, FileBlock&, size_t at) = nullptr;
};

constexpr FileForm kFileForms[kNumBlockForms] = {
    {144, read_q4_k}, {176, read_q5_k}, {210, read_q6_k}, {110, read_q3_k}, {136, read_iq4_xs},
    {18, nullptr, read_iq4_nl}, {17, nullptr, read_mxfp4}, {22, nullptr, read_q5_0}, {34, nullptr, read_q8_0},
};

// Write the values of one stretch of a row.
void put_stretch(const BlockForm& form, const uint8_t* values, uint8_t* to, size_t lane) {
    if (form.bytes()) {
        for (size_t i = 0; i < kStretch; i += 4) std::memcpy(to + (i * kPanel / 4 + lane) * 4, values + i, 4);
        return;
    }
    for (size_t pair = 0; pair < kStretch / 8; ++pair)
        for (size_t i = 0; i < 4; ++i)
            to[(pair * kPanel + lane) * 4 + i] = static_cast<uint8_t>((values[8 * pair + i] & 15) | (values[8 * pair + 4 + i] & 15) << 4);
    if (!form.high_bits) return;
    uint8_t* const high = to + kStretch / 8 * kPanel * 4;
    const size_t per_vector = 8 / form.high_bits;
    for (size_t quad = 0; quad < kStretch / 4; ++quad)
        for (size_t i = 0; i < 4; ++i)
            high[(quad / per_vector * kPanel + lane) * 4 + i] |=
                static_cast<uint8_t>(values[4 * quad + i] >> 4 << quad % per_vector * form.high_bits);
}

uint8_t value_at(const BlockForm& form, const uint8_t* stretch, size_t lane, size_t i) {
    const size_t quad = i / 4;
    if (form.bytes()) return stretch[(quad * kPanel + lane) * 4 + i % 4];
    const uint8_t both = stretch[(quad / 2 * kPanel + lane) * 4 + i % 4];
    const auto low = static_cast<uint8_t>(quad % 2 ? both >> 4 : both & 15);
    if (form.codes != Codes::none) return kCodes[static_cast<int>(form.codes)][low];
    if (!form.high_bits) return low;
    const size_t per_vector = 8 / form.high_bits;
    const uint8_t high = stretch[((kStretch / 8 + quad / per_vector) * kPanel + lane) * 4 + i % 4];
    return static_cast<uint8_t>(low | (high >> quad % per_vector * form.high_bits & ((1 << form.high_bits) - 1)) << 4);
}

void put_half(uint8_t* to, uint16_t bits) { std::memcpy(to, &bits, sizeof bits); }

void put_header(const BlockForm& form, const FileBlock& b, uint8_t* header, size_t lane) {
    if (!form.floats()) put_half(header + lane * 2, b.scale);
    if (form.minima) put_half(header + form.minimum_at() + lane * 2, b.minimum_scale);
    for (size_t g = 0; g < form.num_groups(); ++g) {
        uint8_t* const to = header + form.scale_at(g, lane);
        if (form.floats())
            put_half(to, b.float_scales[g]);
        else
            *to = static_cast<uint8_t>(b.scales[g]);
        if (form.minima) header[form.minima_at() + (g / 4 * kPanel + lane) * 4 + g % 4] = b.minima[g];
    }
}

// The scale of a group, and its minimum.
struct Affine {
    float scale, minimum;
};

Affine affine_at(const BlockForm& form, const uint8_t* header, size_t lane, size_t group) {
    const uint8_t* const at = header + form.scale_at(group, lane);
    if (form.scales == Scales::halves) return {from_half(half_at(at)), 0.0f};
    if (form.scales == Scales::bfloats) return {std::bit_cast<float>(uint32_t{half_at(at)} << 16), 0.0f};
    const float scale = from_half(half_at(header + lane * 2)) * static_cast<float>(static_cast<int8_t>(*at));
    if (!form.minima) return {scale, 0.0f};
    const uint8_t minimum = header[form.minima_at() + (group / 4 * kPanel + lane) * 4 + group % 4];
    return {scale, from_half(half_at(header + form.minimum_at() + lane * 2)) * static_cast<float>(minimum)};
}

}  // namespace

size_t file_block(size_t form) { return kFileForms[form].super ? kSuper : kStretch; }

size_t file_row_bytes(size_t form, size_t width) { return width / file_block(form) * kFileForms[form].block_bytes; }

void put_file_row(size_t index, const uint8_t* row, size_t width, uint8_t* panel, size_t lane) {
    const BlockForm& form = kBlockForms[index];
    const FileForm& file = kFileForms[index];
    for (size_t left = width / kStretch; left > 0;) {
        const size_t count = std::min(left, kStretches);
        FileBlock b = {};
        if (file.super) file.super(row, b), row += file.block_bytes;
        else
            for (size_t i = 0; i < count; ++i, row += file.block_bytes) file.block(row, b, i);
        put_header(form, b, panel, lane);
        panel += form.header_bytes();
        for (size_t i = 0; i < count; ++i, panel += form.stretch_bytes()) put_stretch(form, b.values + i * kStretch, panel, lane);
        left -= count;
    }
}

void read_block_row(size_t index, const uint8_t* panel, size_t lane, size_t width, float* to) {
    const BlockForm& form = kBlockForms[index];
    for (size_t start = 0; start < width; start += kSuper) {
        const uint8_t* const header = panel;
        panel += form.header_bytes();
        for (size_t at = start; at < std::min(start + kSuper, width); at += kStretch, panel += form.stretch_bytes())
            for (size_t i = 0; i < kStretch; ++i) {
                const Affine a = affine_at(form, header, lane, (at - start + i) / form.group);
                const int value = value_at(form, panel, lane, i) - static_cast<int>(form.offset);
                to[at + i] = a.scale * static_cast<float>(value) - a.minimum;
            }
    }
}

}  // namespace paceline
