// One panel of a matrix times a few token rows. A result depends on its own row and output only: every kernel, for any number of
// rows, adds the same products in the same order. A panel is 32 outputs. Its weights lie in the order in which they are read:
//   int8       for each quad of (spread) inputs 32 lanes of 4 bytes, weight + 128
//   int4_row   for each pair of such quads 32 lanes of 4 bytes, weight + 7.5, the first quad in the low 4 bits
//   int4       for each block of 32 inputs: 32 scales and 32 minima (float16), then for each pair of quads as int4_row
//   f32, bf16  for each input 32 numbers
#include "dot.h"
#include "kernels.h"
#include "pieces.h"
#if defined(__AMX_INT8__)
#include "tiles.h"
#endif

namespace paceline::PACELINE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;  // accumulators per row; for kMaxRows rows twice this number must fit the registers
constexpr int kMaxRows = 6;
constexpr int kMaxSpreadRows = 12;
#else
constexpr int kVectors = 1;
constexpr int kMaxRows = 4;
constexpr int kMaxSpreadRows = 8;  // most spread rows at once: their sums take half the registers
#endif
static_assert(kMaxSpreadRows <= kMostInPiece);
constexpr size_t kStep = kVectors * kLanes;  // outputs computed together
constexpr size_t kFetched = 256;             // bytes of weights that are read between two prefetches

template <int R>
PACELINE_INLINE void finish(const f32v (&sums)[R][kVectors], float* out, size_t stride) {
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) store(out + r * stride + v * kLanes, sums[r][v]);
}

// Formats of weights that are multiplied with `SpreadRows`. Inputs are read eight at a time: two quads.
struct Int8Weights {
    static constexpr size_t kPairBytes = 2 * kPanel * 4;

    PACELINE_INLINE i32v load(const uint8_t* pair, int quad) { return load_bytes(pair + quad * kPanel * 4); }
    PACELINE_INLINE i32v start(int32_t row_sum) { return splat(row_sum); }
    PACELINE_INLINE i32v whole(i32v sums, int32_t) { return sums; }
};

// Weights of 4 bits are n + 1/2 for integers n, so that sums are doubled.
struct Int4Weights {
    static constexpr size_t kPairBytes = kPanel * 4;

    PACELINE_INLINE i32v load(const uint8_t* pair, int quad) { return (load_bytes(pair) >> 4 * quad) & splat(0x0F0F0F0F); }
    PACELINE_INLINE i32v start(int32_t) { return splat(0); }
    PACELINE_INLINE i32v whole(i32v sums, int32_t row_sum) { return sums + sums + splat(row_sum / 128 * 15); }
};

// A page ahead that a piece of rows prefetches beside its weights: two lines of keys and two of values each time.
struct PageFetch {
    const uint8_t *keys, *values;
    size_t step;  // bytes to the next two lines: at most two lines, fewer where a piece reaches the page's end with them
};

struct NoPage {};

PACELINE_INLINE void fetch_page(NoPage) {}

PACELINE_INLINE void fetch_page(PageFetch& page) {
    fetch<Level::second>(page.keys), fetch<Level::second>(page.keys + 64);
    fetch<Level::second>(page.values), fetch<Level::second>(page.values + 64);
    page.keys += page.step, page.values += page.step;
}

// The next page ahead, for a piece that reads so many bytes of weights.
PACELINE_INLINE PageFetch take_page(PagesAhead& pages, size_t weight_bytes) {
    const size_t at = static_cast<size_t>(*pages.next++) * pages.bytes, times = weight_bytes / kFetched;
    const size_t step = (pages.bytes + times - 1) / times;
    return {pages.keys + at, pages.values + at, step < 128 ? step : 128};
}

// Inputs of a panel that are multiplied at once: all of them.
struct AllInputs {
    static constexpr size_t begin = 0;
    static constexpr size_t end_of(size_t width) { return width; }
};

// Inputs of a panel that are multiplied at once: some. Sums of the inputs before lie in `out`, as integers.
struct SomeInputs {
    size_t begin, end;
    size_t end_of(size_t) const { return end; }
};

template <class Form, int R>
PACELINE_INLINE void start_spread(i32v (&sums)[R][kVectors], const SpreadRows& rows, size_t first, bool is_first, const float* out,
                                  size_t stride) {
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
            sums[r][v] = is_first ? Form::start(rows.sums[(first + r) * kTileLanes]) : (i32v)load(out + r * stride + v * kLanes);
}

// True if the next lines are prefetched before a quad of the pair of quads that starts at `input`.
template <class Form>
PACELINE_INLINE bool fetches_at(size_t input, int quad) { return quad == 0 && input * Form::kPairBytes % (8 * kFetched) == 0; }

template <class Form>
PACELINE_INLINE void load_quad(i32v (&x)[kVectors], const uint8_t* pair, int quad) {
    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = Form::load(pair + v * kLanes * 4, quad);
}

template <int R>
PACELINE_INLINE void keep_sums(const i32v (&sums)[R][kVectors], float* out, size_t stride) {
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) store(out + r * stride + v * kLanes, (f32v)sums[r][v]);
}

template <class Form, int R>
PACELINE_INLINE void finish_spread(const i32v (&sums)[R][kVectors], const SpreadPanel& panel, const SpreadRows& rows, size_t first,
                                   size_t start, float* out, size_t stride) {
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
            const size_t at = start + v * kLanes;
            const i32v whole = Form::whole(sums[r][v], rows.sums[(first + r) * kTileLanes]);
            store(out + r * stride + at, scaled_sum(whole, splat(rows.scales[first + r]), load(panel.scales + at)));
        }
}

// Multiply R rows with a panel, kVectors vectors of outputs at a time.
template <class Form, int R, class Inputs>
PACELINE_APART void spread_rows(const SpreadPanel& panel, const SpreadRows& rows, Inputs part, size_t first, Prefetch ahead,
                               float* out, size_t stride) {
    const int8_t* const a = rows.values + first * rows.width;
    const size_t width = rows.width;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const uint8_t* w = panel.weights + part.begin / 8 * Form::kPairBytes + start * 4;
        i32v sums[R][kVectors];
        start_spread<Form>(sums, rows, first, part.begin == 0, out + start, stride);
        for (size_t input = part.begin; input < part.end_of(width); input += 8, w += Form::kPairBytes) {
            PACELINE_UNROLL for (int quad = 0; quad < 2; ++quad) {
                if (fetches_at<Form>(input, quad)) fetch(ahead);
                i32v x[kVectors];
                load_quad<Form>(x, w, quad);
                PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                    const i32v y = splat_bytes(a + r * width + input + quad * 4);
                    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dot(sums[r][v], x[v], y);
                }
            }
        }
        if (part.end_of(width) == width) finish_spread<Form>(sums, panel, rows, first, start, out, stride);
        else keep_sums(sums, out + start, stride);
    }
}

#if defined(__AVX512F__)
// The same for more rows: each quad of activations is broadcast once for both vectors of weights. 12 rows then take 14 loads for 24
// products, so that products are the bottleneck, and a page is prefetched beside them.
template <class Form, int R, class Inputs, class Page>
PACELINE_APART void spread_many_rows(const SpreadPanel& panel, const SpreadRows& rows, Inputs part, size_t first,
                                     Prefetch ahead, Page page, float* out, size_t stride) {
    const size_t width = rows.width;
    const uint8_t* w = panel.weights + part.begin / 8 * Form::kPairBytes;
    const int8_t* bases[(R + 3) / 4];  // of every fourth row: there are not enough registers for all
    i32v sums[R][kVectors];
    PACELINE_UNROLL for (int r = 0; r < R; r += 4) bases[r / 4] = rows.values + (first + r) * width + part.begin;
    start_spread<Form>(sums, rows, first, part.begin == 0, out, stride);
    for (size_t input = part.begin; input < part.end_of(width); input += 8, w += Form::kPairBytes) {
        PACELINE_UNROLL for (int quad = 0; quad < 2; ++quad) {
            if (fetches_at<Form>(input, quad)) fetch(ahead), fetch_page(page);
            i32v x[kVectors];
            load_quad<Form>(x, w, quad);
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const i32v y = broadcast(bases[r / 4], r % 4, width, quad * 4);
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dot(sums[r][v], x[v], y);
            }
        }
        PACELINE_UNROLL for (int r = 0; r < R; r += 4) bases[r / 4] += 8;
    }
    if (part.end_of(width) == width) finish_spread<Form>(sums, panel, rows, first, 0, out, stride);
    else keep_sums(sums, out, stride);
}
#endif

template <int R>
void int4_rows(const uint8_t* panel, const QuantisedRows& rows, size_t first, Prefetch ahead, float* out, size_t stride) {
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
        finish<R>(sums, out + start, stride);
    }
}

PACELINE_INLINE f32v load_weight(const float* p) { return load(p); }
PACELINE_INLINE f32v load_weight(const uint16_t* p) { return load_bfloat(p); }

template <int R, class W>
void float_rows(const W* panel, const FloatRows& rows, size_t first, Prefetch ahead, float* out, size_t stride) {
    const float* a[R];
    PACELINE_UNROLL for (int r = 0; r < R; ++r) a[r] = rows.values + (first + r) * rows.width;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const W* w = panel + start;
        f32v sums[R][kVectors];
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
        for (size_t k = 0; k < rows.width; ++k, w += kPanel) {
            f32v x[kVectors];
            if (k % (kFetched / (kPanel * sizeof(W))) == 0) fetch(ahead);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load_weight(w + v * kLanes);
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const f32v y = splat(a[r][k]);
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(x[v], y, sums[r][v]);
            }
        }
        finish<R>(sums, out + start, stride);
    }
}

// Multiply with some inputs of a panel, at most MaxRows rows at a time.
template <class Form, int MaxRows, class Inputs>
PACELINE_INLINE void spread_inputs(const SpreadPanel& panel, const SpreadRows& rows, Inputs part, size_t first, size_t end, float* out,
                                   size_t stride) {
    const uint8_t* const here = panel.weights + part.begin / 8 * Form::kPairBytes;
    const size_t bytes = (part.end_of(rows.width) - part.begin) / 8 * Form::kPairBytes;
    [[maybe_unused]] PagesAhead& pages = pages_ahead;
    in_pieces(MaxRows, first, end, here, bytes, [&, start = first](size_t at, size_t count, Prefetch ahead) {
        float* to = out + (at - start) * stride;
        with_rows<MaxRows>(count, [&]<int R>() {
#if defined(__AVX512F__)
            if constexpr (R > kMaxRows) {
                const auto multiply = [&](auto page) { spread_many_rows<Form, R>(panel, rows, part, at, ahead, page, to, stride); };
                return pages.next == pages.end ? multiply(NoPage{}) : multiply(take_page(pages, bytes));
            } else
#endif
            spread_rows<Form, R>(panel, rows, part, at, ahead, to, stride);
        });
    });
}

// Up to twice as many rows as one piece takes read a panel in parts that the L1 cache keeps for all pieces: on a Zen 5 (48 kB) 16 and 24
// rows take 2 to 6 % less time, more rows lose time. Pieces have at most 8 rows: two of twelve would fetch what is next in bursts, too late.
template <class Form>
void spread_panel(const SpreadPanel& panel, const SpreadRows& rows, size_t first, size_t end, float* out, size_t stride) {
    if (end - first <= kMaxSpreadRows || end - first > 2 * kMaxSpreadRows)
        return spread_inputs<Form, kMaxSpreadRows>(panel, rows, AllInputs{}, first, end, out, stride);
    const size_t groups = rows.width / kInt8Group, num_parts = (rows.width / 8 * Form::kPairBytes + kPartBytes - 1) / kPartBytes;
    for (size_t i = 0; i < num_parts; ++i) {
        const SomeInputs part{groups * i / num_parts * kInt8Group, groups * (i + 1) / num_parts * kInt8Group};
        spread_inputs<Form, 8>(panel, rows, part, first, end, out, stride);
    }
}

template <class Form>
void spread_panels(const SpreadPanel& panels, size_t num_panels, const SpreadRows& rows, size_t first, size_t end, float* out,
                   size_t stride) {
    const size_t panel_bytes = rows.width / 8 * Form::kPairBytes;
    for (size_t i = 0; i < num_panels; ++i)
        spread_panel<Form>({panels.weights + i * panel_bytes, panels.scales + i * kPanel}, rows, first, end, out + i * kPanel, stride);
}

void int8_panels(const SpreadPanel& panels, size_t num_panels, const SpreadRows& rows, size_t first, size_t end, float* out,
                 size_t stride) {
#if defined(__AMX_INT8__)
    if (end - first >= kMinTileRows) return int8_in_tiles(panels, num_panels, rows, first, end, out, stride);
#endif
    spread_panels<Int8Weights>(panels, num_panels, rows, first, end, out, stride);
}

void int4_panel(const uint8_t* panel, const QuantisedRows& rows, size_t first, size_t end, float* out, size_t stride) {
    in_pieces(kMaxRows, first, end, panel, rows.num_groups * kInt4BlockBytes, [&, start = first](size_t at, size_t count, Prefetch ahead) {
        float* to = out + (at - start) * stride;
        with_rows<kMaxRows>(count, [&]<int R>() { int4_rows<R>(panel, rows, at, ahead, to, stride); });
    });
}

template <class W>
void float_panel(const W* panel, const FloatRows& rows, size_t first, size_t end, float* out, size_t stride) {
    in_pieces(kMaxRows, first, end, panel, rows.width * kPanel * sizeof(W), [&, start = first](size_t at, size_t count, Prefetch ahead) {
        float* to = out + (at - start) * stride;
        with_rows<kMaxRows>(count, [&]<int R>() { float_rows<R, W>(panel, rows, at, ahead, to, stride); });
    });
}

void leave() {
#if defined(__AMX_INT8__)
    leave_tiles();
#endif
}

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {int8_panels, spread_panels<Int4Weights>, int4_panel, float_panel<float>, float_panel<uint16_t>, leave};

}  // namespace paceline::PACELINE_ISA
