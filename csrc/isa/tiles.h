// Products of bytes in tiles (AMX): 16 rows, 16 outputs and 64 inputs by one instruction.
//
// The 32-bit sums are exact, so a row's numbers are the same bits whichever kernel computes it.
#pragma once

#include "dot.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {

constexpr size_t kTile = kTileLanes;            // rows of a tile, and outputs
constexpr size_t kLeastRowsOfTile = 3;          // fewer rows wait for memory with any kernel
constexpr size_t kMostStackedRows = kTile / 2;  // whose halves fit one tile
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

// The sums of a panel and some rows, on their way out: vectors cannot read tile registers. Two halves of 16 outputs.
struct alignas(64) TileSums {
    int32_t of[4][kTile * kTile];
};

// What they are the sums of, and where they belong.
struct TileOut {
    const float* scales;  // of the outputs
    size_t first, count;  // rows
    float* out;
};

// Scale them; the halves of a row lie one behind the other if it was `Stacked`, else in tiles of their own.
template <bool Stacked>
PACELINE_INLINE void scale_sums(const TileSums& sums, const TileOut& to, const SplitRows& rows, size_t stride) {
    constexpr size_t row = Stacked ? 2 * kTile : kTile, low = Stacked ? kTile : kTile * kTile;
    for (int half = 0; half < 2; ++half) {
        const f32v output_scale = load(to.scales + half * kTile);
        const int32_t* of = sums.of[Stacked ? half : 2 * half];
        for (size_t r = 0; r < to.count; ++r, of += row)
            store(to.out + r * stride + half * kTile,
                  scaled_sum((i32v)_mm512_load_si512(of), (i32v)_mm512_load_si512(of + low),
                             splat(rows.scales[to.first + r]), output_scale));
    }
}

PACELINE_INLINE void fetch_lines(const uint8_t*& ahead, size_t count) {
    for (size_t line = 0; line < count; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
}

// Rows from `first` on times a panel. `Stacked`: at most 8 rows, whose halves lie one behind the other, so that one tile holds
// both: half the products. `lines` cache lines from `ahead` on are fetched at each of four places for each tile of inputs:
// all at once they would take every place that loads wait in. What came `before` is scaled on the way, out of the place
// that these sums will take: scaled at once, it would wait for its own way through memory, and all else with it. Sums begin
// with what corrects them for the same reason.
template <bool Stacked>
PACELINE_INLINE void int8_tiles(const uint8_t* w, const SplitRows& rows, size_t first, const uint8_t* ahead, size_t lines,
                                TileSums& sums, const TileOut* before, size_t stride) {
    constexpr size_t next = Stacked ? kTile : 2 * kTile;
    const size_t from = Stacked ? rows.width : 2 * rows.width;  // a row of a tile to the next
    const size_t scaled_at = rows.width > 2 * kInt8Group ? 2 * kInt8Group : 0;
    const int32_t* starts = rows.sums + first * 2 * kTile;
    const int8_t* a = rows.values + first * 2 * rows.width;
    _tile_loadd(PACELINE_HIGHS, starts, next * 4);
    _tile_loadd(PACELINE_OTHER_HIGHS, starts, next * 4);
    if (!Stacked) _tile_loadd(PACELINE_LOWS, starts + kTile, next * 4);
    if (!Stacked) _tile_loadd(PACELINE_OTHER_LOWS, starts + kTile, next * 4);
    for (size_t k = 0; k < rows.width; k += kInt8Group, a += kInt8Group, w += kInt8Group * kPanel) {
        _tile_loadd(PACELINE_ROWS_HIGH, a, from);
        fetch_lines(ahead, lines);
        _tile_loadd(PACELINE_WEIGHTS, w, kPanel * 4);
        fetch_lines(ahead, lines);
        _tile_dpbsud(PACELINE_HIGHS, PACELINE_ROWS_HIGH, PACELINE_WEIGHTS);
        if (!Stacked) _tile_loadd(PACELINE_ROWS_LOW, a + rows.width, from);
        if (!Stacked) _tile_dpbsud(PACELINE_LOWS, PACELINE_ROWS_LOW, PACELINE_WEIGHTS);
        fetch_lines(ahead, lines);
        _tile_loadd(PACELINE_OTHER_WEIGHTS, w + kTile * 4, kPanel * 4);
        fetch_lines(ahead, lines);
        _tile_dpbsud(PACELINE_OTHER_HIGHS, PACELINE_ROWS_HIGH, PACELINE_OTHER_WEIGHTS);
        if (!Stacked) _tile_dpbsud(PACELINE_OTHER_LOWS, PACELINE_ROWS_LOW, PACELINE_OTHER_WEIGHTS);
        if (before && k == scaled_at) scale_sums<Stacked>(sums, *before, rows, stride);
    }
    _tile_stored(PACELINE_HIGHS, sums.of[0], kTile * 4);
    _tile_stored(PACELINE_OTHER_HIGHS, sums.of[Stacked ? 1 : 2], kTile * 4);
    if (!Stacked) _tile_stored(PACELINE_LOWS, sums.of[1], kTile * 4);
    if (!Stacked) _tile_stored(PACELINE_OTHER_LOWS, sums.of[3], kTile * 4);
}

// Rows first..end times panels side by side, as `GemmKernels::int8`. Rows come in pieces of one size, of which the last
// repeats some of the one before; together they fetch the next panel.
template <bool Stacked>
PACELINE_INLINE void int8_in_pieces(const Int8Panel& panel, size_t num_panels, const SplitRows& rows, size_t first, size_t end,
                                    float* out, size_t stride) {
    const size_t num_rows = end - first, num_pieces = (num_rows + kTile - 1) / kTile;
    const size_t size = (num_rows + num_pieces - 1) / num_pieces, bytes = rows.width * kPanel;
    constexpr size_t all_lines = kInt8Group * kPanel / 64 / 4;
    const size_t lines = (all_lines + num_pieces - 1) / num_pieces;  // of a piece
    const uint8_t* ahead = panel.weights + (num_pieces == 1 ? kSoon : bytes);
    TileSums sums;
    TileOut out_of[2];
    size_t done = 0;
    shape_tiles(Stacked ? 2 * size : size);
    for (size_t p = 0; p < num_panels; ++p)
        for (size_t piece = 0; piece < num_pieces; ++piece, ++done) {
            const size_t row = piece + 1 < num_pieces ? piece * size : num_rows - size;
            out_of[done % 2] = {panel.scales + p * kPanel, first + row, size, out + row * stride + p * kPanel};
            int8_tiles<Stacked>(panel.weights + p * bytes, rows, first + row, ahead, lines, sums,
                                done ? &out_of[(done + 1) % 2] : nullptr, stride);
            ahead += rows.width / kInt8Group * lines * 4 * 64;
        }
    if (done) scale_sums<Stacked>(sums, out_of[(done + 1) % 2], rows, stride);
}

PACELINE_INLINE void int8_in_tiles(const Int8Panel& panel, size_t num_panels, const SplitRows& rows, size_t first, size_t end,
                                   float* out, size_t stride) {
    const auto multiply = end - first <= kMostStackedRows ? int8_in_pieces<true> : int8_in_pieces<false>;
    multiply(panel, num_panels, rows, first, end, out, stride);
}

}  // namespace paceline::PACELINE_ISA
