// One panel of a matrix times a few token rows. A result depends on its own row and output only: every kernel, whatever
// the number of rows, adds the same products in the same order.
//
// A panel is 32 outputs. Its weights lie in the order they are read:
//   int8   for each quad of inputs, 32 lanes of 4 bytes, weight + 128
//   int4   for each block of 32 inputs: 32 scales and 32 minima (float16), then for each pair of quads 32 lanes of 4
//          bytes, the first quad in the low halves
//   f32, bf16   for each input, 32 numbers
#include "dot.h"
#include "kernels.h"
#if defined(__AMX_INT8__)
#include "tiles.h"
#endif

namespace paceline::PACELINE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;  // accumulators per row; with kMostRows rows, twice that many must fit the registers
constexpr int kMostRows = 6;
#else
constexpr int kVectors = 1;
constexpr int kMostRows = 4;
#endif
// What a kernel fetches while it computes: so many cache lines for each 256 bytes of weights, from a place on. A few rows
// are done with a panel in one piece and fetch what they soon read; more come in pieces, of which the first reads the
// panel from memory and the others from the cache: together they fetch the next panel, so that memory is never idle.
constexpr size_t kSoon = 6144;  // bytes: how long memory takes under load; with 2048, five rows took a tenth longer
struct Ahead {
    const uint8_t* from;
    size_t lines;
};

PACELINE_INLINE void fetch(Ahead& ahead) {
    __builtin_prefetch(ahead.from, 0, 2);
    if (ahead.lines > 1) __builtin_prefetch(ahead.from + 64, 0, 2);
    if (ahead.lines > 2) {
        __builtin_prefetch(ahead.from + 128, 0, 2);
        __builtin_prefetch(ahead.from + 192, 0, 2);
    }
    ahead.from += ahead.lines * 64;
}

constexpr size_t kStep = kVectors * kLanes;  // outputs computed together

#define PACELINE_UNROLL _Pragma("GCC unroll 8")

template <int R>
PACELINE_INLINE void finish(const f32v (&sums)[R][kVectors], const float* scales, float* out, size_t stride) {
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
            store(out + r * stride + v * kLanes, scales ? sums[r][v] * load(scales + v * kLanes) : sums[r][v]);
}

template <int R>
void int8_rows(const Int8Panel& panel, const QuantisedRows& rows, size_t first, Ahead ahead, float* out,
               size_t stride) {
    const int8_t* a[R];
    PACELINE_UNROLL for (int r = 0; r < R; ++r) a[r] = rows.values + (first + r) * rows.width;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const uint8_t* w = panel.weights + start * 4;
        f32v sums[R][kVectors];
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
        for (size_t g = 0; g < rows.num_groups; ++g) {
            i32v dots[R][kVectors], more[R][kVectors];  // two chains for a single row, which would wait for one
            PACELINE_UNROLL for (int r = 0; r < R; ++r)
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
                    dots[r][v] = splat(rows.sums[(first + r) * rows.num_groups + g]);
                    more[r][v] = splat(0);
                }
            constexpr size_t kPairs = kInt8Group / 8;
#pragma GCC unroll 8
            for (size_t pair = 0; pair < kPairs; ++pair, w += 2 * kPanel * 4) {
                fetch(ahead);
                PACELINE_UNROLL for (size_t half = 0; half < 2; ++half) {
                    i32v x[kVectors];
                    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                        x[v] = load_bytes(w + half * kPanel * 4 + v * kLanes * 4);
                    PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                        const i32v y = splat_bytes(a[r] + g * kInt8Group + pair * 8 + half * 4);
                        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                            dot(R <= 2 && half ? more[r][v] : dots[r][v], x[v], y);
                    }
                }
            }
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const f32v scale = splat(rows.scales[(first + r) * rows.num_groups + g]);
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                    sums[r][v] = fma(to_float(R <= 2 ? dots[r][v] + more[r][v] : dots[r][v]), scale, sums[r][v]);
            }
        }
        finish<R>(sums, panel.scales + start, out + start, stride);
    }
}

#if defined(__AVX512F__)

// One group of inputs for two panels: sums[r * 64 + o] += what it adds. With four vectors of outputs each spread
// activation serves four products: the kernel is bound by how many instructions a core takes in, above all where another
// tenant shares it. Float sums are in memory, as the registers hold 24 integer ones. Apart, so that nothing else
// competes for registers.
template <int R, bool Fetch>
PACELINE_APART void int8_group_of_two(const uint8_t* w, const QuantisedRows& rows, size_t first, size_t g, Ahead ahead,
                                      float* sums) {
    const uint8_t* const other = w + rows.width * kPanel;
    const int8_t* const a = rows.values + first * rows.width + g * kInt8Group;
    const size_t width = rows.width, stride = rows.num_groups, at = first * stride + g;
    i32v dots[R][2 * kVectors];
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < 2 * kVectors; ++v) dots[r][v] = splat(rows.sums[at + r * stride]);
#pragma GCC unroll 16
    for (size_t quad = 0; quad < kInt8Group / 4; ++quad) {
        if (Fetch) fetch(ahead);
        i32v x[2 * kVectors];
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
            x[v] = load_bytes(w + quad * kPanel * 4 + v * kLanes * 4);
            x[kVectors + v] = load_bytes(other + quad * kPanel * 4 + v * kLanes * 4);
        }
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            const i32v y = splat_bytes(a + r * width + quad * 4);
            PACELINE_UNROLL for (int v = 0; v < 2 * kVectors; ++v) dot(dots[r][v], x[v], y);
        }
    }
    PACELINE_UNROLL for (int r = 0; r < R; ++r) {
        const f32v scale = splat(rows.scales[at + r * stride]);
        PACELINE_UNROLL for (int v = 0; v < 2 * kVectors; ++v) {
            float* to = sums + r * 2 * kPanel + v * kLanes;
            store(to, fma(to_float(dots[r][v]), scale, load(to)));
        }
    }
}

template <int R>
void int8_rows_of_two(const Int8Panel& panel, const QuantisedRows& rows, size_t first, Ahead ahead, bool helps,
                      float* out, size_t stride) {
    alignas(64) float sums[R * 2 * kPanel] = {};
    for (size_t g = 0; g < rows.num_groups; ++g) {
        const uint8_t* w = panel.weights + g * kInt8Group * kPanel;
        if (helps)
            int8_group_of_two<R, true>(w, rows, first, g, ahead, sums);
        else
            int8_group_of_two<R, false>(w, rows, first, g, ahead, sums);
        ahead.from += ahead.lines * 64 * (kInt8Group / 4);
    }
    for (int r = 0; r < R; ++r)
        for (size_t o = 0; o < 2 * kPanel; o += kLanes)
            store(out + r * stride + o, load(sums + r * 2 * kPanel + o) * load(panel.scales + o));
}

#endif

template <int R>
void int4_rows(const uint8_t* panel, const QuantisedRows& rows, size_t first, Ahead ahead, float* out, size_t stride) {
    const i32v low = splat(0x0F0F0F0F);
    const int8_t* a[R];
    PACELINE_UNROLL for (int r = 0; r < R; ++r) a[r] = rows.values + (first + r) * rows.width;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const uint8_t* block = panel;
        f32v sums[R][kVectors];
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
        for (size_t g = 0; g < rows.num_groups; ++g, block += kInt4BlockBytes) {
            const uint8_t* w = block + kPanel * 4 + start * 4;
            i32v dots[R][kVectors], more[R][kVectors];
            PACELINE_UNROLL for (int r = 0; r < R; ++r)
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dots[r][v] = more[r][v] = splat(0);
#pragma GCC unroll 8
            for (size_t pair = 0; pair < kInt4Group / 8; ++pair, w += kPanel * 4) {
                if (pair % 2 == 0) fetch(ahead);
                i32v x[2][kVectors];
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
                    const i32v both = load_bytes(w + v * kLanes * 4);
                    x[0][v] = both & low;
                    x[1][v] = (both >> 4) & low;
                }
                PACELINE_UNROLL for (size_t half = 0; half < 2; ++half)
                    PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                        const i32v y = splat_bytes(a[r] + g * kInt4Group + pair * 8 + half * 4);
                        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                            dot(R <= 2 && half ? more[r][v] : dots[r][v], x[half][v], y);
                    }
            }
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(block) + start;
            f32v d[kVectors], m[kVectors];
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
                d[v] = load_half(scales + v * kLanes);
                m[v] = load_half(scales + kPanel + v * kLanes);
            }
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const size_t at = (first + r) * rows.num_groups + g;
                const f32v scale = splat(rows.scales[at]);
                const f32v total = splat(rows.scales[at] * (float)rows.sums[at]);
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
                    const i32v dotted = R <= 2 ? dots[r][v] + more[r][v] : dots[r][v];
                    sums[r][v] = fma(to_float(dotted) * scale, d[v], sums[r][v]);
                    sums[r][v] = fma(total, m[v], sums[r][v]);
                }
            }
        }
        finish<R>(sums, nullptr, out + start, stride);
    }
}

PACELINE_INLINE f32v load_weight(const float* p) { return load(p); }
PACELINE_INLINE f32v load_weight(const uint16_t* p) { return load_bfloat(p); }

template <int R, class W>
void float_rows(const W* panel, const FloatRows& rows, size_t first, Ahead ahead, float* out, size_t stride) {
    const float* a[R];
    PACELINE_UNROLL for (int r = 0; r < R; ++r) a[r] = rows.values + (first + r) * rows.width;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const W* w = panel + start;
        f32v sums[R][kVectors];
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
        for (size_t k = 0; k < rows.width; ++k, w += kPanel) {
            f32v x[kVectors];
            if (k % (256 / (kPanel * sizeof(W))) == 0) fetch(ahead);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load_weight(w + v * kLanes);
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const f32v y = splat(a[r][k]);
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(x[v], y, sums[r][v]);
            }
        }
        finish<R>(sums, nullptr, out + start, stride);
    }
}

// Cut rows into pieces of almost equal size that the kernels can take: 8 rows are 4 and 4 rather than 6 and 2.
template <class Kernel>
PACELINE_INLINE void in_pieces(size_t first, size_t end, const void* panel, size_t panel_bytes, Kernel kernel) {
    const uint8_t* const here = static_cast<const uint8_t*>(panel);
    const size_t num_pieces = (end - first + kMostRows - 1) / kMostRows;
    for (size_t piece = 0; piece < num_pieces; ++piece) {
        const size_t pieces = num_pieces - piece, count = (end - first + pieces - 1) / pieces;
        const size_t lines = num_pieces == 1 ? 4 : num_pieces == 2 ? 2 : 1, share = panel_bytes * lines / 4;
        const bool helps = piece * lines < 4;
        kernel(first, count, num_pieces == 1 ? Ahead{here + kSoon, lines}
                                             : Ahead{helps ? here + panel_bytes + piece * share : here, lines}, helps);
        first += count;
    }
}

#if defined(__AVX512F__)
#define PACELINE_FOR_ROWS(count, call)         \
    switch (count) {                           \
        case 1: call(1); break;                \
        case 2: call(2); break;                \
        case 3: call(3); break;                \
        case 4: call(4); break;                \
        case 5: call(5); break;                \
        default: call(6); break;               \
    }
#else
#define PACELINE_FOR_ROWS(count, call)         \
    switch (count) {                           \
        case 1: call(1); break;                \
        case 2: call(2); break;                \
        case 3: call(3); break;                \
        default: call(4); break;               \
    }
#endif

void int8_one_panel(const Int8Panel& panel, const QuantisedRows& rows, size_t first, size_t end, float* out,
                    size_t stride) {
    in_pieces(first, end, panel.weights, rows.width * kPanel, [&, start = first](size_t at, size_t count, Ahead ahead, bool) {
        float* to = out + (at - start) * stride;
#define PACELINE_CALL(R) int8_rows<R>(panel, rows, at, ahead, to, stride)
        PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
    });
}

void int8_panels(const Int8Panel& panel, size_t num_panels, const QuantisedRows& rows, size_t first, size_t end,
                 float* out, size_t stride) {
#if defined(__AMX_INT8__)
    if (end - first >= kLeastRowsOfTile) return int8_in_tiles(panel, num_panels, rows, first, end, out, stride);
#endif
#if defined(__AVX512F__)
    if (num_panels == 2 && end - first >= kLeastRowsOfPair) {
        in_pieces(first, end, panel.weights, 2 * rows.width * kPanel,
                  [&, start = first](size_t at, size_t count, Ahead ahead, bool helps) {
                      float* to = out + (at - start) * stride;
#define PACELINE_CALL(R) int8_rows_of_two<R>(panel, rows, at, ahead, helps, to, stride)
                      PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
                  });
        return;
    }
#endif
    for (size_t i = 0; i < num_panels; ++i)
        int8_one_panel({panel.weights + i * rows.width * kPanel, panel.scales + i * kPanel}, rows, first, end,
                       out + i * kPanel, stride);
}

void int4_panel(const uint8_t* panel, const QuantisedRows& rows, size_t first, size_t end, float* out, size_t stride) {
    in_pieces(first, end, panel, rows.num_groups * kInt4BlockBytes, [&, start = first](size_t at, size_t count, Ahead ahead, bool) {
        float* to = out + (at - start) * stride;
#define PACELINE_CALL(R) int4_rows<R>(panel, rows, at, ahead, to, stride)
        PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
    });
}

template <class W>
void float_panel(const W* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride) {
    in_pieces(first, end, panel, rows.width * kPanel * sizeof(W), [&, start = first](size_t at, size_t count, Ahead ahead, bool) {
        float* to = out + (at - start) * stride;
#define PACELINE_CALL(R) float_rows<R, W>(panel, rows, at, ahead, to, stride)
        PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
    });
}

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {int8_panels, int4_panel, float_panel<float>, float_panel<uint16_t>};

}  // namespace paceline::PACELINE_ISA
