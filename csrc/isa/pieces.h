// Rows in pieces, and what a piece prefetches. Few rows are one piece, which prefetches the weights that it will soon read. More rows come
// in several pieces: the first reads the panel from memory, the others from the cache, and together they fetch the next panel, so
// that memory is never idle.
#pragma once

#include "simd.h"

namespace paceline::PACELINE_ISA {

constexpr size_t kPartBytes = 29000;  // bytes of a panel that several pieces read in turn: with the rows of a piece they fit the L1 cache

struct Prefetch {
    const uint8_t* from;
    size_t lines;  // 1, 2 or 4 for each 256 bytes of weights that are read, or none
    bool once;     // few pieces read these weights, so that no cache needs to keep them
};

template <Level To>
PACELINE_INLINE void fetch_lines(const Prefetch& ahead) {
    fetch<To>(ahead.from);
    if (ahead.lines > 1) fetch<To>(ahead.from + 64);
    if (ahead.lines > 2) fetch<To>(ahead.from + 128), fetch<To>(ahead.from + 192);
}

PACELINE_INLINE void fetch(Prefetch& ahead) {
    if (ahead.lines == 0) return;
    if (ahead.once) fetch_lines<Level::past>(ahead);
    else fetch_lines<Level::second>(ahead);
    ahead.from += ahead.lines * 64;
}

// Cut rows into pieces of almost equal size, at most `max_rows` each: 10 rows become 5 and 5 rather than 6 and 4 or 8 and 2.
template <class Kernel>
PACELINE_INLINE void in_pieces(size_t max_rows, size_t first, size_t end, const void* panel, size_t panel_bytes, Kernel kernel) {
    const uint8_t* const here = static_cast<const uint8_t*>(panel);
    const size_t num_pieces = (end - first + max_rows - 1) / max_rows;
    if (num_pieces == 1) {
        const auto [bytes, past] = prefetching[end - first];
        return kernel(first, end - first, Prefetch{here + bytes, bytes ? size_t{4} : 0, past});
    }
    for (size_t piece = 0; piece < num_pieces; ++piece) {
        const size_t pieces = num_pieces - piece, count = (end - first + pieces - 1) / pieces;
        const size_t lines = num_pieces < 4 ? 2 : 1, share = panel_bytes * lines / 4;
        const bool helps = piece * lines < 4;
        kernel(first, count, Prefetch{helps ? here + panel_bytes + piece * share : here, lines, kFetchesPastCaches && num_pieces < 4});
        first += count;
    }
}

// Call with a number of rows, at most `Max`, as a constant.
template <int Max, int R = 1, class Call>
PACELINE_INLINE void with_rows(size_t count, Call call) {
    if constexpr (R < Max)
        if (count > (size_t)R) return with_rows<Max, R + 1>(count, call);
    call.template operator()<R>();
}

}  // namespace paceline::PACELINE_ISA
