// A panel in a file's blocks (blocks.h) times a few token rows. Sums within a superblock are exact integers where groups have integer
// scales, so that they have one value on every instruction set; superblocks are added in their order.
#include <type_traits>

#include "blocks.h"
#include "dot.h"
#include "pieces.h"
#include "quantise.h"

namespace paceline::PACELINE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;
constexpr int kMaxRows = 6;
#else
constexpr int kVectors = 1;
constexpr int kMaxRows = 4;
#endif
constexpr size_t kStep = kVectors * kLanes;  // outputs computed together
constexpr int kQuads = kStretch / 4;

// Look up bytes below 16 in a table.
PACELINE_INLINE i32v coded(const uint8_t* codes, i32v bytes) {
#if defined(__AVX512BW__)
    return (i32v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes)), (__m512i)bytes);
#elif defined(__AVX2__)
    return (i32v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes)), (__m256i)bytes);
#else
    uint8_t all[sizeof bytes];
    __builtin_memcpy(all, &bytes, sizeof all);
    for (size_t i = 0; i < sizeof all; ++i) all[i] = codes[all[i]];
    __builtin_memcpy(&bytes, all, sizeof all);
    return bytes;
#endif
}

// Load kLanes signed bytes as integers.
PACELINE_INLINE i32v load_signed(const uint8_t* p) {
#if defined(__AVX512F__)
    return (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    i32v v;
    for (int i = 0; i < kLanes; ++i) v[i] = (int8_t)p[i];
    return v;
#endif
}

// Load a quad of inputs of a stretch, for kLanes outputs: unsigned bytes, each value plus the form's offset.
template <BlockForm F>
PACELINE_INLINE i32v load_values(const uint8_t* stretch, int quad) {
    i32v x = load_bytes(stretch + quad / 2 * kPanel * 4);
    x = (quad % 2 ? x >> 4 : x) & splat(0x0F0F0F0F);
    if constexpr (F.codes != Codes::none) return coded(kCodes[(int)F.codes], x);
    if constexpr (F.high_bits > 0) {
        constexpr int bits = F.high_bits, per_vector = 8 / bits;
        constexpr auto mask = (int32_t)(((1u << bits) - 1) * 0x10101010u);
        const i32v high = load_bytes(stretch + (kQuads / 2 + quad / per_vector) * kPanel * 4);
        const int up = 4 - quad % per_vector * bits;
        x |= (up > 0 ? high << up : high >> -up) & splat(mask);
    }
    return x;
}

// -offset times the sum of a group of activations, in every lane.
template <BlockForm F>
PACELINE_INLINE i32v start_of(const int32_t* sums, size_t group) {
    if constexpr (F.offset == 0) return splat(0);
    const i32v units = splat(sums[(F.group == 16 ? 0 : kSuper / 16) + group]);
    if constexpr (F.offset > kStartUnit) return units * (int)(F.offset / kStartUnit);
    constexpr int down = F.offset == 32 ? 0 : F.offset == 16 ? 1 : 3;
    static_assert(F.offset >= kStartUnit || kStartUnit >> down == F.offset || F.offset == 0);
    return units >> down;
}

template <BlockForm F>
using Whole = std::conditional_t<F.floats(), f32v, i32v>;

template <BlockForm F>
PACELINE_INLINE Whole<F> load_scales(const uint8_t* scales) {
    if constexpr (F.scales == Scales::halves) return load_half((const uint16_t*)scales);
    else if constexpr (F.scales == Scales::bfloats) return load_bfloat((const uint16_t*)scales);
    else return load_signed(scales);
}

PACELINE_INLINE void add_scaled(i32v& whole, i32v dots, i32v scale) { whole += dots * scale; }
PACELINE_INLINE void add_scaled(f32v& whole, i32v dots, f32v scale) { whole = fma(to_float(dots), scale, whole); }

// Where R rows lie; with AVX-512 only every fourth row has an address of its own.
template <int R>
struct Bases {
#if defined(__AVX512F__)
    static constexpr int apart = 4;
#else
    static constexpr int apart = 1;
#endif
    const int8_t* of[(R + apart - 1) / apart];
    size_t width;

    PACELINE_INLINE void start(Bases& b, const int8_t* values, size_t width) {
        b.width = width;
        PACELINE_UNROLL for (int r = 0; r < R; r += apart) b.of[r / apart] = values + r * width;
    }
    PACELINE_INLINE void advance(Bases& b) {
        PACELINE_UNROLL for (int r = 0; r < R; r += apart) b.of[r / apart] += kStretch;
    }
    PACELINE_INLINE i32v quad(const Bases& b, int r, int quad) {
#if defined(__AVX512F__)
        return broadcast(b.of[r / apart], r % apart, b.width, quad * 4);
#else
        return splat_bytes(b.of[r] + quad * 4);
#endif
    }
};

// Prefetch the lines of a stretch and its share of the header, four at a time, beside some of its quads.
template <BlockForm F>
PACELINE_INLINE void fetch_beside(Prefetch& ahead, int quad) {
    constexpr int times = (F.stretch_bytes() + F.header_bytes() * kStretch / kSuper + 255) / 256;
    if (quad == 0 || quad * times / kQuads > (quad - 1) * times / kQuads) fetch(ahead);
}

// Multiply one stretch of R rows: into `whole` go the products of each group with its scale.
template <BlockForm F, int R>
PACELINE_INLINE void stretch_rows(const uint8_t* w, const uint8_t* scales, const int32_t* const (&sums)[R], size_t stretch,
                                  const Bases<R>& a, Prefetch& ahead, Whole<F> (&whole)[R][kVectors]) {
    constexpr int parts = kStretch / F.group, quads = kQuads / parts;
    PACELINE_UNROLL for (int part = 0; part < parts; ++part) {
        const size_t group = stretch * parts + part;
        i32v dots[R][kVectors];
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            const i32v start = start_of<F>(sums[r], group);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dots[r][v] = start;
        }
        PACELINE_UNROLL for (int i = 0; i < quads; ++i) {
            const int quad = part * quads + i;
            fetch_beside<F>(ahead, quad);
            i32v x[kVectors];
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load_values<F>(w + v * kLanes * 4, quad);
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const i32v y = Bases<R>::quad(a, r, quad);
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dot(dots[r][v], x[v], y);
            }
        }
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
            const Whole<F> scale = load_scales<F>(scales + (group * kPanel + v * kLanes) * (F.floats() ? 2 : 1));
            PACELINE_UNROLL for (int r = 0; r < R; ++r) add_scaled(whole[r][v], dots[r][v], scale);
        }
    }
}

// Sums of minima times sums of activations, exact.
PACELINE_INLINE i32v minima_of(const uint8_t* minima, const int32_t* sums) {
    constexpr int quads = kSuper / kStretch / 4;
    const auto* parts = reinterpret_cast<const int8_t*>(sums + kSuper / 16 + kSuper / 32);
    i32v found = splat(0);
    PACELINE_UNROLL for (int quad = 0; quad < quads; ++quad) dot(found, load_bytes(minima + quad * kPanel * 4), splat_bytes(parts + quad * 4));
    found <<= 6;
    PACELINE_UNROLL for (int quad = 0; quad < quads; ++quad)
        dot(found, load_bytes(minima + quad * kPanel * 4), splat_bytes(parts + (quads + quad) * 4));
    return found;
}

// Add a superblock's sums, scaled, to those of the superblocks before. start: first output.
template <BlockForm F, int R>
PACELINE_INLINE void add_super(const uint8_t* header, size_t start, const int32_t* const (&sums)[R], const float* const (&row_scales)[R],
                               const Whole<F> (&whole)[R][kVectors], f32v (&totals)[R][kVectors]) {
    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
        const size_t lane = start + v * kLanes;
        f32v scale, minimum_scale;
        if constexpr (!F.floats()) scale = load_half((const uint16_t*)header + lane);
        if constexpr (F.minima) minimum_scale = -load_half((const uint16_t*)(header + F.minimum_at()) + lane);
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            f32v sum;
            if constexpr (F.floats()) sum = whole[r][v];
            else sum = to_float(whole[r][v]) * scale;
            if constexpr (F.minima) sum = fma(to_float(minima_of(header + F.minima_at() + lane * 4, sums[r])), minimum_scale, sum);
            totals[r][v] = fma(sum, splat(*row_scales[r]), totals[r][v]);
        }
    }
}

// Multiply R rows with a panel, kStep outputs at a time.
template <BlockForm F, int R>
PACELINE_APART void block_rows(const uint8_t* panel, const BlockRows& rows, size_t first, Prefetch ahead, float* out, size_t stride) {
    constexpr size_t scale_bytes = F.floats() ? 2 : 1;
    const uint8_t* const soon = ahead.from;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const uint8_t* at = panel;
        f32v totals[R][kVectors];
        const int32_t* sums[R];
        const float* row_scales[R];
        Bases<R> a;
        Bases<R>::start(a, rows.values + first * rows.num_supers * kSuper, rows.num_supers * kSuper);
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            sums[r] = rows.sums + (first + r) * rows.num_supers * kRowSums;
            row_scales[r] = rows.scales + (first + r) * rows.num_supers;
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) totals[r][v] = splat(0.0f);
        }
        for (size_t left = rows.num_stretches; left > 0;) {
            const size_t count = left < kSuper / kStretch ? left : kSuper / kStretch;
            ahead.from = soon + (at - panel) * ahead.lines / 4;
            const uint8_t *scales = at + F.scales_at() + start * scale_bytes, *w = at + F.header_bytes() + start * 4;
            Whole<F> whole[R][kVectors];
            PACELINE_UNROLL for (int r = 0; r < R; ++r)
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) whole[r][v] = Whole<F>{};
            for (size_t stretch = 0; stretch < count; ++stretch, w += F.stretch_bytes()) {
                stretch_rows<F, R>(w, scales, sums, stretch, a, ahead, whole);
                Bases<R>::advance(a);
            }
            add_super<F, R>(at, start, sums, row_scales, whole, totals);
            PACELINE_UNROLL for (int r = 0; r < R; ++r) sums[r] += kRowSums, ++row_scales[r];
            at += F.header_bytes() + count * F.stretch_bytes();
            left -= count;
        }
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) store(out + r * stride + start + v * kLanes, totals[r][v]);
    }
}

template <BlockForm F>
void block_panel(const uint8_t* panel, const BlockRows& rows, size_t first, size_t end, float* out, size_t stride) {
    const size_t bytes = F.panel_bytes(rows.num_stretches * kStretch);
    in_pieces(kMaxRows, first, end, panel, bytes, [&, start = first](size_t at, size_t count, Prefetch ahead) {
        float* to = out + (at - start) * stride;
        with_rows<kMaxRows>(count, [&]<int R>() { block_rows<F, R>(panel, rows, at, ahead, to, stride); });
    });
}

// Write the sums of a superblock's values: -32 times those of 16 and of 32; those of 32 as 64ths and rests.
// of_16: [kSuper / 16]
void put_sums(const int32_t* of_16, int32_t* sums) {
    constexpr size_t pairs = kSuper / 32;
    int8_t parts[2 * pairs];
    for (size_t i = 0; i < 2 * pairs; ++i) sums[i] = of_16[i] * -(int)kStartUnit;
    for (size_t i = 0; i < pairs; ++i) {
        const int32_t sum = of_16[2 * i] + of_16[2 * i + 1];
        sums[2 * pairs + i] = sum * -(int)kStartUnit;
        parts[i] = (int8_t)(sum >> 6);
        parts[pairs + i] = (int8_t)(sum & 63);
    }
    __builtin_memcpy(sums + 3 * pairs, parts, sizeof parts);
}

void quantise(const float* x, size_t width, int8_t* values, float* scales, int32_t* sums) {
    for (size_t start = 0; start < width; start += kSuper, ++scales, sums += kRowSums) {
        const size_t count = width - start < kSuper ? width - start : kSuper;
        const float top = bound(x + start, count), inverse = top > 0.0f ? 127.0f / top : 0.0f;
        const bool finite = top >= 0.0f && inverse < __builtin_inff();
        int32_t of_16[kSuper / 16] = {};
        for (size_t i = 0; i < count; i += 16)
            of_16[i / 16] = finite ? quantise_group<true>(x + start + i, 16, inverse, values + start + i)
                                   : quantise_group<false>(x + start + i, 16, inverse, values + start + i);
        put_sums(of_16, sums);
        *scales = top / 127.0f;
    }
}

}  // namespace

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {
    {block_panel<kBlockForms[0]>, block_panel<kBlockForms[1]>, block_panel<kBlockForms[2]>, block_panel<kBlockForms[3]>,
     block_panel<kBlockForms[4]>, block_panel<kBlockForms[5]>, block_panel<kBlockForms[6]>, block_panel<kBlockForms[7]>,
     block_panel<kBlockForms[8]>},
    quantise};

}  // namespace paceline::PACELINE_ISA
