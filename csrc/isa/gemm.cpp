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

namespace paceline::PACELINE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;  // accumulators per row; with kMostRows rows, twice that many must fit the registers
constexpr int kMostRows = 6;
#else
constexpr int kVectors = 1;
constexpr int kMostRows = 4;
#endif
// How far ahead weights are fetched. Rows that come in several pieces read a panel once from memory and then from the
// cache: their last piece fetches the next panel, so that memory is never idle.
constexpr size_t kAhead = 1024;
constexpr size_t kStep = kVectors * kLanes;  // outputs computed together

#define PACELINE_UNROLL _Pragma("GCC unroll 8")

template <int R>
PACELINE_INLINE void finish(const f32v (&sums)[R][kVectors], const float* scales, float* out, size_t stride) {
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
            store(out + r * stride + v * kLanes, scales ? sums[r][v] * load(scales + v * kLanes) : sums[r][v]);
}

template <int R>
void int8_rows(const Int8Panel& panel, const QuantisedRows& rows, size_t first, size_t ahead, float* out,
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
                PACELINE_UNROLL for (size_t line = 0; line < 2 * kPanel * 4; line += 64)
                    __builtin_prefetch(w + ahead + line, 0, 2);
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

template <int R>
void int4_rows(const uint8_t* panel, const QuantisedRows& rows, size_t first, size_t ahead, float* out, size_t stride) {
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
                PACELINE_UNROLL for (size_t line = 0; line < kPanel * 4; line += 64)
                    __builtin_prefetch(w + ahead + line, 0, 2);
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
void float_rows(const W* panel, const FloatRows& rows, size_t first, size_t ahead, float* out, size_t stride) {
    const float* a[R];
    PACELINE_UNROLL for (int r = 0; r < R; ++r) a[r] = rows.values + (first + r) * rows.width;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const W* w = panel + start;
        f32v sums[R][kVectors];
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
        for (size_t k = 0; k < rows.width; ++k, w += kPanel) {
            f32v x[kVectors];
            for (size_t line = 0; line < kPanel * sizeof(W); line += 64)
                __builtin_prefetch(reinterpret_cast<const uint8_t*>(w) + ahead + line, 0, 2);
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
PACELINE_INLINE void in_pieces(size_t first, size_t end, size_t panel_bytes, Kernel kernel) {
    const bool single = end - first <= kMostRows;
    while (first < end) {
        const size_t left = end - first, pieces = (left + kMostRows - 1) / kMostRows;
        const size_t count = (left + pieces - 1) / pieces;
        kernel(first, count, pieces > 1 || single ? kAhead : panel_bytes);
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

void int8_panel(const Int8Panel& panel, const QuantisedRows& rows, size_t first, size_t end, float* out,
                size_t stride) {
    in_pieces(first, end, rows.width * kPanel, [&](size_t at, size_t count, size_t ahead) {
        float* to = out + (at - first) * stride;
#define PACELINE_CALL(R) int8_rows<R>(panel, rows, at, ahead, to, stride)
        PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
    });
}

void int4_panel(const uint8_t* panel, const QuantisedRows& rows, size_t first, size_t end, float* out, size_t stride) {
    in_pieces(first, end, rows.num_groups * kInt4BlockBytes, [&](size_t at, size_t count, size_t ahead) {
        float* to = out + (at - first) * stride;
#define PACELINE_CALL(R) int4_rows<R>(panel, rows, at, ahead, to, stride)
        PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
    });
}

template <class W>
void float_panel(const W* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride) {
    in_pieces(first, end, rows.width * kPanel * sizeof(W), [&](size_t at, size_t count, size_t ahead) {
        float* to = out + (at - first) * stride;
#define PACELINE_CALL(R) float_rows<R, W>(panel, rows, at, ahead, to, stride)
        PACELINE_FOR_ROWS(count, PACELINE_CALL)
#undef PACELINE_CALL
    });
}

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {int8_panel, int4_panel, float_panel<float>, float_panel<uint16_t>};

}  // namespace paceline::PACELINE_ISA
