// Products of bytes in tiles (AMX): 16 rows, 16 outputs and 64 inputs, a group, by one instruction.
//
// The 32-bit sums are exact, and are scaled and added up group after group as the kernels for a few rows do it, so a
// row's numbers are the same bits whichever of them computes it.
#pragma once

#include "dot.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {

constexpr size_t kTile = 16;            // rows of a tile, and outputs
constexpr size_t kLeastRowsOfTile = 16;  // fewer rows wait for memory with any kernel
static_assert(kInt8Group == 64 && kPanel == 2 * kTile, "the panels are packed as tiles read them");

// Which register holds what, each twice, for a group and the next: names that reach the assembler as numbers.
#define PACELINE_SUMS 0
#define PACELINE_OTHER_SUMS 1
#define PACELINE_ACTIVATIONS 2
#define PACELINE_OTHER_ACTIVATIONS 3
#define PACELINE_WEIGHTS 4
#define PACELINE_OTHER_WEIGHTS 5

// Give the registers their shapes: `rows` rows of 16 sums or 64 activations, or a group's weights.
PACELINE_INLINE void shape_tiles(size_t rows) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    static_assert(sizeof config == 64);
    for (int tile = 0; tile < 16; ++tile) {
        config.row_bytes[tile] = tile < 8 ? 64 : 0;
        config.rows[tile] = (uint8_t)(tile == PACELINE_WEIGHTS || tile == PACELINE_OTHER_WEIGHTS ? kInt8Group / 4 : tile < 8 ? rows : 0);
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC thinks that only its first bytes are read
    _tile_loadconfig(&config);
}

// Begin with the sums of group g; they reach memory by a store of their own, since vectors cannot read tile registers.
#define PACELINE_BEGIN(which, g)                                                              \
    _tile_zero(PACELINE_##which##SUMS);                                                       \
    _tile_loadd(PACELINE_##which##ACTIVATIONS, a + (g) * kInt8Group, rows.width);             \
    _tile_loadd(PACELINE_##which##WEIGHTS, weights + (g) * kInt8Group * kPanel, kPanel * 4);  \
    _tile_dpbsud(PACELINE_##which##SUMS, PACELINE_##which##ACTIVATIONS, PACELINE_##which##WEIGHTS)

// R rows from `first` on and 16 outputs. `lines` cache lines from `ahead` on are fetched with each group. While vectors
// scale a group's sums, the tiles are at the next two.
template <int R>
PACELINE_APART void int8_tile(const uint8_t* weights, const float* output_scales, const QuantisedRows& rows, size_t first,
                              const uint8_t* ahead, size_t lines, float* out, size_t stride) {
    alignas(64) int32_t dots[2][kTile * kTile];
    const size_t num_groups = rows.num_groups;
    const int8_t* a = rows.values + first * rows.width;
    const float* scales = rows.scales + first * num_groups;
    const int32_t* offsets = rows.sums + first * num_groups;
    f32v sums[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = splat(0.0f);
    PACELINE_BEGIN(, 0);
    if (num_groups > 1) {
        PACELINE_BEGIN(OTHER_, 1);
    }
    _tile_stored(PACELINE_SUMS, dots[0], kTile * 4);
    const auto scale_up = [&](size_t g) __attribute__((always_inline)) {
        for (size_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const i32v sum = (i32v)_mm512_load_si512(dots[g % 2] + r * kTile) + splat(offsets[r * num_groups + g]);
            sums[r] = fma(to_float(sum), splat(scales[r * num_groups + g]), sums[r]);
        }
    };
    for (size_t g = 0; g < num_groups; g += 2) {
        if (g + 2 < num_groups) {
            PACELINE_BEGIN(, g + 2);
        }
        if (g + 1 < num_groups) _tile_stored(PACELINE_OTHER_SUMS, dots[1], kTile * 4);
        scale_up(g);
        if (g + 1 == num_groups) break;
        if (g + 3 < num_groups) {
            PACELINE_BEGIN(OTHER_, g + 3);
        }
        if (g + 2 < num_groups) _tile_stored(PACELINE_SUMS, dots[0], kTile * 4);
        scale_up(g + 1);
    }
    const f32v scale = load(output_scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(out + r * stride, sums[r] * scale);
}

using Int8Tile = void (*)(const uint8_t*, const float*, const QuantisedRows&, size_t, const uint8_t*, size_t, float*, size_t);
constexpr Int8Tile kInt8Tiles[kTile] = {
    int8_tile<1>, int8_tile<2>,  int8_tile<3>,  int8_tile<4>,  int8_tile<5>,  int8_tile<6>,  int8_tile<7>,  int8_tile<8>,
    int8_tile<9>, int8_tile<10>, int8_tile<11>, int8_tile<12>, int8_tile<13>, int8_tile<14>, int8_tile<15>, int8_tile<16>};

// Rows first..end times panels side by side, as `GemmKernels::int8`. A tile of outputs stays in the first cache for all
// of the rows, which come in pieces of almost equal size.
PACELINE_INLINE void int8_in_tiles(const Int8Panel& panel, size_t num_panels, const QuantisedRows& rows, size_t first,
                                   size_t end, float* out, size_t stride) {
    const size_t num_pieces = (end - first + kTile - 1) / kTile, least = (end - first) / num_pieces;
    const size_t num_longer = (end - first) % num_pieces;  // pieces of one row more, first
    const size_t lines = (kTile + num_pieces - 1) / num_pieces;  // that a piece fetches of the next panels
    const uint8_t* ahead = panel.weights + num_panels * rows.width * kPanel;
    size_t shaped = 0;
    for (size_t column = 0; column < 2 * num_panels; ++column) {
        const uint8_t* weights = panel.weights + column / 2 * rows.width * kPanel + column % 2 * kTile * 4;
        for (size_t piece = 0, row = 0; piece < num_pieces; ++piece) {
            const size_t count = least + (piece < num_longer);
            if (count != shaped) shape_tiles(shaped = count);
            kInt8Tiles[count - 1](weights, panel.scales + column * kTile, rows, first + row, ahead, lines,
                                  out + row * stride + column * kTile, stride);
            ahead += rows.num_groups * lines * 64;
            row += count;
        }
    }
    _tile_release();
}

}  // namespace paceline::PACELINE_ISA
