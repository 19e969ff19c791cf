// Products of bytes in tiles (AMX): 16 rows, 16 outputs and 64 inputs by one instruction.
//
// The 32-bit sums are exact, so a row's numbers are the same bits whichever kernel computes it.
#pragma once

#include "dot.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {

constexpr size_t kTile = 16;            // rows of a tile, and outputs
constexpr size_t kLeastRowsOfTile = 7;  // fewer rows wait for memory with any kernel
static_assert(kInt8Group == 64 && kPanel == 2 * kTile, "the panels are packed as tiles read them");

// Which register holds what, names that reach the assembler as numbers: all eight. Every load serves two products.
#define PACELINE_HIGHS 0
#define PACELINE_LOWS 1
#define PACELINE_OTHER_HIGHS 2
#define PACELINE_OTHER_LOWS 3
#define PACELINE_ROWS_HIGH 4
#define PACELINE_ROWS_LOW 5
#define PACELINE_WEIGHTS 6
#define PACELINE_OTHER_WEIGHTS 7

// Give this thread's registers their shapes: `rows` rows of 16 sums or 64 activations, or the weights of 64 inputs.
PACELINE_INLINE void load_shapes(size_t rows) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int tile = 0; tile < 8; ++tile)
        config.rows[tile] = (uint8_t)(tile == PACELINE_WEIGHTS || tile == PACELINE_OTHER_WEIGHTS ? kInt8Group / 4 : rows);
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC thinks that only its first bytes are read
    _tile_loadconfig(&config);
}

// They keep them until the run of a team is over, as shaping them anew takes as long as ten products. Longer they may not:
// others in the process, such as a library that trains, shape a thread's registers for themselves.
static thread_local size_t shaped_rows = 0;

PACELINE_INLINE void shape_tiles(size_t rows) {
    if (shaped_rows != rows) load_shapes(shaped_rows = rows);
}

PACELINE_INLINE void leave_tiles() {
    if (shaped_rows) _tile_release();
    shaped_rows = 0;
}

// Scale 16 outputs of some rows; sums reach memory by a store of their own, since vectors cannot read tile registers.
PACELINE_INLINE void scale_tile(const int32_t* highs, const int32_t* lows, const float* output_scales, const SplitRows& rows,
                                size_t first, size_t count, float* out, size_t stride) {
    const f32v output_scale = load(output_scales);
    for (size_t r = 0; r < count; ++r) {
        const int32_t* offsets = rows.sums + 2 * (first + r);
        const i32v high = (i32v)_mm512_load_si512(highs + r * kTile) + splat(offsets[0]);
        const i32v low = (i32v)_mm512_load_si512(lows + r * kTile) + splat(offsets[1]);
        store(out + r * stride, scaled_sum(high, low, splat(rows.scales[first + r]), output_scale));
    }
}

// `count` rows from `first` on, at most 16, and a panel. `lines` cache lines from `ahead` on are fetched with each tile of
// inputs, between the products: all at once they would take every place that loads wait in.
PACELINE_INLINE void int8_tiles(const Int8Panel& panel, const SplitRows& rows, size_t first, size_t count,
                                const uint8_t* ahead, size_t lines, float* out, size_t stride) {
    alignas(64) int32_t sums[4][kTile * kTile];
    const int8_t* a = rows.values + first * 2 * rows.width;
    const uint8_t* w = panel.weights;
    _tile_zero(PACELINE_HIGHS);
    _tile_zero(PACELINE_LOWS);
    _tile_zero(PACELINE_OTHER_HIGHS);
    _tile_zero(PACELINE_OTHER_LOWS);
    for (size_t k = 0; k < rows.width; k += kInt8Group, a += kInt8Group, w += kInt8Group * kPanel) {
        _tile_loadd(PACELINE_WEIGHTS, w, kPanel * 4);
        _tile_loadd(PACELINE_ROWS_HIGH, a, 2 * rows.width);
        for (size_t line = 0; line < lines; line += 4, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_dpbsud(PACELINE_HIGHS, PACELINE_ROWS_HIGH, PACELINE_WEIGHTS);
        _tile_loadd(PACELINE_ROWS_LOW, a + rows.width, 2 * rows.width);
        for (size_t line = 0; line < lines; line += 4, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_dpbsud(PACELINE_LOWS, PACELINE_ROWS_LOW, PACELINE_WEIGHTS);
        _tile_loadd(PACELINE_OTHER_WEIGHTS, w + kTile * 4, kPanel * 4);
        for (size_t line = 0; line < lines; line += 4, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_dpbsud(PACELINE_OTHER_HIGHS, PACELINE_ROWS_HIGH, PACELINE_OTHER_WEIGHTS);
        for (size_t line = 0; line < lines; line += 4, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_dpbsud(PACELINE_OTHER_LOWS, PACELINE_ROWS_LOW, PACELINE_OTHER_WEIGHTS);
    }
    _tile_stored(PACELINE_HIGHS, sums[0], kTile * 4);
    _tile_stored(PACELINE_LOWS, sums[1], kTile * 4);
    _tile_stored(PACELINE_OTHER_HIGHS, sums[2], kTile * 4);
    _tile_stored(PACELINE_OTHER_LOWS, sums[3], kTile * 4);
    scale_tile(sums[0], sums[1], panel.scales, rows, first, count, out, stride);
    scale_tile(sums[2], sums[3], panel.scales + kTile, rows, first, count, out + kTile, stride);
}

// Rows first..end times panels side by side, as `GemmKernels::int8`. Rows come in pieces of one size, of which the last
// repeats some of the one before; together they fetch the next panel.
PACELINE_INLINE void int8_in_tiles(const Int8Panel& panel, size_t num_panels, const SplitRows& rows, size_t first, size_t end,
                                   float* out, size_t stride) {
    const size_t num_rows = end - first, num_pieces = (num_rows + kTile - 1) / kTile;
    const size_t size = (num_rows + num_pieces - 1) / num_pieces;
    const size_t all_lines = kInt8Group * kPanel / 64, lines = (all_lines + num_pieces - 1) / num_pieces;  // of a piece
    const uint8_t* ahead = panel.weights + (num_pieces == 1 ? kSoon : num_panels * rows.width * kPanel);
    shape_tiles(size);
    for (size_t p = 0; p < num_panels; ++p) {
        const Int8Panel own = {panel.weights + p * rows.width * kPanel, panel.scales + p * kPanel};
        for (size_t piece = 0; piece < num_pieces; ++piece) {
            const size_t row = piece + 1 < num_pieces ? piece * size : num_rows - size;
            int8_tiles(own, rows, first + row, size, ahead, lines, out + row * stride + p * kPanel, stride);
            ahead += rows.width / kInt8Group * lines * 64;
        }
    }
}

}  // namespace paceline::PACELINE_ISA
