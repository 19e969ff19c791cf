// Byte products in tiles (AMX): one instruction takes 16 rows, 16 outputs and 64 inputs. The 32-bit sums are exact, so that a row's
// results have the same bits as with any other kernel.
#pragma once

#include "dot.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {

constexpr size_t kTile = kTileLanes;    // rows of a tile, and outputs
constexpr size_t kMinTileRows = 3;  // with fewer rows every kernel waits for memory
static_assert(kInt8Group == 64 && kPanel == 2 * kTile, "the panels are packed as tiles read them");

// The eight registers, as macros because the assembler needs numbers. With rows for two tiles every load serves two products.
#define PACELINE_SUMS 0
#define PACELINE_MORE_SUMS 1  // of the second tile of rows
#define PACELINE_OTHER_SUMS 2  // of the other half of the panel
#define PACELINE_MORE_OTHER_SUMS 3
#define PACELINE_ROWS 4
#define PACELINE_MORE_ROWS 5
#define PACELINE_WEIGHTS 6
#define PACELINE_OTHER_WEIGHTS 7

// Shape this thread's registers: `rows` rows of 16 sums or 64 activations, or the weights of 64 inputs.
PACELINE_INLINE void load_shapes(size_t rows) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int tile = 0; tile < 8; ++tile)
        config.rows[tile] = (uint8_t)(tile == PACELINE_WEIGHTS || tile == PACELINE_OTHER_WEIGHTS ? kInt8Group / 4 : rows);
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC assumes that only its first bytes are read
    _tile_loadconfig(&config);
}

// Registers keep their shapes until the run of the thread pool ends, as shaping takes as long as ten products. They keep them no longer:
// other libraries in the process shape a thread's registers, too.
static thread_local size_t shaped_rows = 0;

PACELINE_INLINE void shape_tiles(size_t rows) {
    if (shaped_rows != rows) load_shapes(shaped_rows = rows);
}

PACELINE_INLINE void leave_tiles() {
    if (shaped_rows) _tile_release();
    shaped_rows = 0;
}

// Sums of a panel and some rows in memory, as vectors cannot read tile registers: [half of the outputs, tile of rows] of 16 x 16.
struct alignas(64) TileSums {
    int32_t of[4][kTile * kTile];
};

// Place of the sums in the result.
struct TileOut {
    const float* scales;  // scales of the outputs
    size_t first;         // first row
    float* out;
};

PACELINE_INLINE void scale_tile(const int32_t* sums, const float* output_scales, const float* row_scales, size_t count, float* out,
                                size_t stride) {
    const f32v output_scale = load(output_scales);
    for (size_t r = 0; r < count; ++r, sums += kTile, out += stride)
        store(out, scaled_sum((i32v)_mm512_load_si512(sums), splat(row_scales[r]), output_scale));
}

// Rows of a piece: one tile, or two that may overlap, as the second ends where the piece does.
struct Piece {
    size_t size, tile;                           // rows of the piece, and of a tile
    size_t more() const { return size - tile; }  // first row of the second tile
};

template <bool Two>
PACELINE_INLINE void scale_sums(const TileSums& sums, const TileOut& to, Piece piece, const SpreadRows& rows, size_t stride) {
    for (int half = 0; half < 2; ++half)
        for (int tile = 0; tile < (Two ? 2 : 1); ++tile) {
            const size_t from = tile * piece.more();
            scale_tile(sums.of[2 * half + tile], to.scales + half * kTile, rows.scales + to.first + from, piece.tile,
                       to.out + from * stride + half * kTile, stride);
        }
}

PACELINE_INLINE void fetch_lines(const uint8_t*& ahead, size_t count) {
    for (size_t line = 0; line < count; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
}

// Multiply the rows of a piece, from `first` on, with a panel. `lines` cache lines from `ahead` on are prefetched at each of four points
// per tile of inputs: all at once they would fill the queue of loads. The sums of the piece `before` are scaled meanwhile, from the
// memory that these sums will take: right after their store, scaling would stall on it. Sums start at their correction for the
// same reason.
template <bool Two>
PACELINE_INLINE void int8_tiles(const uint8_t* w, const SpreadRows& rows, size_t first, Piece piece, const uint8_t* ahead, size_t lines,
                                TileSums& sums, const TileOut* before, size_t stride) {
    const size_t scaled_at = rows.width > 2 * kInt8Group ? 2 * kInt8Group : 0;
    const int32_t *starts = rows.sums + first * kTile, *more_starts = starts + piece.more() * kTile;
    const int8_t *a = rows.values + first * rows.width, *more = a + piece.more() * rows.width;
    _tile_loadd(PACELINE_SUMS, starts, kTile * 4);
    _tile_loadd(PACELINE_OTHER_SUMS, starts, kTile * 4);
    if (Two) _tile_loadd(PACELINE_MORE_SUMS, more_starts, kTile * 4);
    if (Two) _tile_loadd(PACELINE_MORE_OTHER_SUMS, more_starts, kTile * 4);
    for (size_t k = 0; k < rows.width; k += kInt8Group, w += kInt8Group * kPanel) {
        _tile_loadd(PACELINE_ROWS, a + k, rows.width);
        fetch_lines(ahead, lines);
        _tile_loadd(PACELINE_WEIGHTS, w, kPanel * 4);
        fetch_lines(ahead, lines);
        _tile_dpbsud(PACELINE_SUMS, PACELINE_ROWS, PACELINE_WEIGHTS);
        if (Two) _tile_loadd(PACELINE_MORE_ROWS, more + k, rows.width);
        if (Two) _tile_dpbsud(PACELINE_MORE_SUMS, PACELINE_MORE_ROWS, PACELINE_WEIGHTS);
        fetch_lines(ahead, lines);
        _tile_loadd(PACELINE_OTHER_WEIGHTS, w + kTile * 4, kPanel * 4);
        fetch_lines(ahead, lines);
        _tile_dpbsud(PACELINE_OTHER_SUMS, PACELINE_ROWS, PACELINE_OTHER_WEIGHTS);
        if (Two) _tile_dpbsud(PACELINE_MORE_OTHER_SUMS, PACELINE_MORE_ROWS, PACELINE_OTHER_WEIGHTS);
        if (before && k == scaled_at) scale_sums<Two>(sums, *before, piece, rows, stride);
    }
    _tile_stored(PACELINE_SUMS, sums.of[0], kTile * 4);
    _tile_stored(PACELINE_OTHER_SUMS, sums.of[2], kTile * 4);
    if (Two) _tile_stored(PACELINE_MORE_SUMS, sums.of[1], kTile * 4);
    if (Two) _tile_stored(PACELINE_MORE_OTHER_SUMS, sums.of[3], kTile * 4);
}

// Multiply rows first..end with adjacent panels, as `GemmKernels::int8`. Rows come in pieces of one size, of which the last repeats some
// rows of the one before; together they prefetch the next panel.
template <bool Two>
PACELINE_INLINE void int8_in_pieces(const SpreadPanel& panel, size_t num_panels, const SpreadRows& rows, size_t first, size_t end,
                                    float* out, size_t stride) {
    constexpr size_t max_rows = Two ? 2 * kTile : kTile, all_lines = kInt8Group * kPanel / 64 / 4;
    const size_t num_rows = end - first, num_pieces = (num_rows + max_rows - 1) / max_rows, bytes = rows.width * kPanel;
    const size_t size = (num_rows + num_pieces - 1) / num_pieces;
    const Piece piece{size, Two ? (size + 1) / 2 : size};
    const size_t lines = (all_lines + num_pieces - 1) / num_pieces;  // lines that a piece prefetches
    const uint8_t* ahead = panel.weights + (num_pieces == 1 ? kSoon : bytes);
    TileSums sums;
    TileOut out_of[2];
    size_t done = 0;
    shape_tiles(piece.tile);
    for (size_t p = 0; p < num_panels; ++p)
        for (size_t i = 0; i < num_pieces; ++i, ++done) {
            const size_t row = i + 1 < num_pieces ? i * size : num_rows - size;
            out_of[done % 2] = {panel.scales + p * kPanel, first + row, out + row * stride + p * kPanel};
            int8_tiles<Two>(panel.weights + p * bytes, rows, first + row, piece, ahead, lines, sums,
                            done ? &out_of[(done + 1) % 2] : nullptr, stride);
            ahead += rows.width / kInt8Group * lines * 4 * 64;
        }
    if (done) scale_sums<Two>(sums, out_of[(done + 1) % 2], piece, rows, stride);
}

PACELINE_INLINE void int8_in_tiles(const SpreadPanel& panel, size_t num_panels, const SpreadRows& rows, size_t first, size_t end,
                                   float* out, size_t stride) {
    const auto multiply = end - first <= kTile ? int8_in_pieces<false> : int8_in_pieces<true>;
    multiply(panel, num_panels, rows, first, end, out, stride);
}

}  // namespace paceline::PACELINE_ISA
