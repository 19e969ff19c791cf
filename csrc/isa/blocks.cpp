// A panel in a file's blocks (blocks.h) times a few token rows. Where groups have integer scales, sums within a superblock are integers,
// which have one value on every instruction set. Superblocks are added in their order.
#include <cstddef>
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
constexpr size_t kFar = 49152;  // bytes to prefetch ahead where weights are not read in order
constexpr int kQuads = kStretch / 4;
constexpr size_t kStretches = kSuper / kStretch;
static_assert(sizeof(SuperFacts::stretches) / sizeof(StretchFacts) == kStretches);

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

// Shift each word left by the number in the same word of `by`, at most kMaxExponent.
PACELINE_INLINE i32v shift_words(i32v words, i32v by) {
#if defined(__AVX512F__)
    return (i32v)_mm512_sllv_epi16((__m512i)words, (__m512i)by);
#elif defined(__AVX2__)
    const i32v low = splat(1) << (by & 0xFFFF), high = splat(0x10000) << (i32v)((u32v)by >> 16);
    return (i32v)_mm256_mullo_epi16((__m256i)words, (__m256i)(low | high));
#else
    const u32v bits = (u32v)words, up = (u32v)by;
    return (i32v)((bits << (up & 0xFFFF) & 0xFFFF) | (bits & 0xFFFF0000) << (up >> 16));
#endif
}

// The low words of one vector and the high words of another.
PACELINE_INLINE i32v join_words(i32v low, i32v high) {
#if defined(__AVX512F__)
    return (i32v)_mm512_mask_blend_epi16(0xAAAAAAAA, (__m512i)low, (__m512i)high);
#elif defined(__AVX2__)
    return (i32v)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xAA);
#else
    return (low & 0xFFFF) | (high & (int32_t)0xFFFF0000);
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
    if constexpr (F.bytes()) return load_bytes(stretch + quad * kPanel * 4);
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

// Addresses of R rows of bytes that are equally far apart; with AVX-512 only every fourth row has an address of its own.
template <int R>
struct Bases {
#if defined(__AVX512F__)
    static constexpr int apart = 4;
#else
    static constexpr int apart = 1;
#endif
    const int8_t* of[(R + apart - 1) / apart];
    size_t width;

    PACELINE_INLINE void start(Bases& b, const void* first, size_t width) {
        b.width = width;
        PACELINE_UNROLL for (int r = 0; r < R; r += apart) b.of[r / apart] = static_cast<const int8_t*>(first) + r * width;
    }
    PACELINE_INLINE void advance(Bases& b, size_t bytes) {
        PACELINE_UNROLL for (int r = 0; r < R; r += apart) b.of[r / apart] += bytes;
    }
    // Four bytes of a row, in every lane.
    PACELINE_INLINE i32v four(const Bases& b, int r, int at) {
#if defined(__AVX512F__)
        return broadcast(b.of[r / apart], r % apart, b.width, at);
#else
        return splat_bytes(b.of[r] + at);
#endif
    }
};

// What the sum of a group begins with: -offset times the sum of its activations. Without an offset all scales have one sign, so that
// dropped bits would add up: then it is half of what is dropped, or, for one bit, all in every other group. part: group of the stretch.
template <BlockForm F, int R>
PACELINE_INLINE i32v start_of(const Bases<R>& facts, int r, int part, bool odd) {
    if constexpr (F.offset == 0) return splat(F.dropped() == 1 ? odd : 1 << F.dropped() >> 1);
    constexpr int up = F.offset == 128 ? 2 : 0, down = F.offset == 16 ? 1 : F.offset == 4 ? 3 : 0;
    static_assert(F.offset == 0 || kStartUnit << up >> down == F.offset);
    const int at = F.group == 16 ? (int)offsetof(StretchFacts, starts) + 4 * part : (int)offsetof(StretchFacts, start);
    return Bases<R>::four(facts, r, at) << up >> down;
}

template <BlockForm F>
PACELINE_INLINE f32v load_scales(const uint8_t* scales) {
    return F.scales == Scales::halves ? load_half((const uint16_t*)scales) : load_bfloat((const uint16_t*)scales);
}

// Prefetch `Count` lines. With fewer than four lines for each 256 bytes it prefetches some lines twice.
template <Level To, size_t Count>
PACELINE_INLINE void fetch_some(Prefetch& ahead) {
    const size_t step = ahead.lines * 16;
    PACELINE_UNROLL for (size_t i = 0; i < Count; ++i) fetch<To>(ahead.from), ahead.from += step;
}

// Prefetch, beside half a stretch, this half's share of what a piece prefetches.
template <BlockForm F>
PACELINE_INLINE void fetch_half(Prefetch& ahead) {
    constexpr size_t lines = (F.stretch_bytes() + F.header_bytes() * kStretch / kSuper + 127) / 128;
    if (ahead.lines == 0) return;
    if (ahead.once) return fetch_some<Level::past, lines>(ahead);
    if (ahead.lines > 1) return fetch_some<Level::second, lines>(ahead);
    PACELINE_UNROLL for (size_t i = 0; i < (lines + 3) / 4; ++i) fetch<Level::second>(ahead.from), ahead.from += 64;
}

// Minima of a superblock times sums of a row's activations.
PACELINE_INLINE void multiply_minima(const uint8_t* minima, const SuperFacts& facts, i32v (&found)[kVectors]) {
    constexpr int quads = kStretches / 4;
    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) found[v] = splat(0);
    PACELINE_UNROLL for (int part = 0; part < 2; ++part) {
        if (part == 1) PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) found[v] <<= 7;
        PACELINE_UNROLL for (int quad = 0; quad < quads; ++quad) {
            const i32v y = splat_bytes(facts.sums + (part * quads + quad) * 4);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dot(found[v], load_bytes(minima + (quad * kPanel + v * kLanes) * 4), y);
        }
    }
    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) found[v] = found[v] << splat(facts.sums_shift);
}

template <int R>
using Rows = i32v[R][kVectors];

// Where a stretch of a panel lies, and its rows.
template <int R>
struct Place {
    const uint8_t *scales, *weights;  // from the first computed output on
    Bases<R> values, facts;

    template <BlockForm F>
    PACELINE_INLINE void next_stretch(Place& at) {
        at.weights += F.stretch_bytes();
        Bases<R>::advance(at.values, kStretch), Bases<R>::advance(at.facts, sizeof(StretchFacts));
    }
};

// Sums of the products of groups. A group's first quad of inputs is multiplied for each row right after `finish(row)`, which takes the sums
// of the group before: so products go on beside the many small operations at the end of a group. part: which group of a stretch; odd:
// the second of every two groups.
template <BlockForm F, int R, class Finish>
PACELINE_INLINE void first_quad(const Place<R>& at, int part, bool odd, Rows<R>& dots, Finish finish) {
    constexpr int quads = F.group / 4;
    i32v x[kVectors];
    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load_values<F>(at.weights + v * kLanes * 4, part * quads);
    PACELINE_UNROLL for (int r = 0; r < R; ++r) {
        finish(r);
        const i32v start = start_of<F, R>(at.facts, r, part, odd), y = Bases<R>::four(at.values, r, part * quads * 4);
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dots[r][v] = start, dot(dots[r][v], x[v], y);
    }
}

template <BlockForm F, int R>
PACELINE_INLINE void other_quads(const Place<R>& at, int part, Prefetch& ahead, Rows<R>& dots) {
    constexpr int quads = F.group / 4;
    PACELINE_UNROLL for (int i = part * quads + 1; i < (part + 1) * quads; ++i) {
        if (i % (kQuads / 2) == 1) fetch_half<F>(ahead);
        i32v x[kVectors];
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load_values<F>(at.weights + v * kLanes * 4, i);
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            const i32v y = Bases<R>::four(at.values, r, i * 4);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dot(dots[r][v], x[v], y);
        }
    }
}

// Keep the compiler from computing a number later than here.
PACELINE_INLINE void pin(i32v& x) {
#if defined(__AVX2__)
    __asm__("" : "+v"(x));
#endif
}

constexpr auto kNothing = [](int) {};

// The products of a superblock whose groups of 32 have integer scales. Sums of two groups become words of one vector, so that one
// instruction scales both and adds them up.
template <BlockForm F, int R>
PACELINE_INLINE void multiply_super(Place<R>& at, size_t, Prefetch& ahead, i32v (&whole)[R][kVectors]) {
    Rows<R> low, high;
    first_quad<F, R>(at, 0, false, low, kNothing);
    for (size_t left = F.num_groups() / 2; left > 0; --left) {
        other_quads<F, R>(at, 0, ahead, low);
        Place<R>::template next_stretch<F>(at);
        first_quad<F, R>(at, 0, true, high, [&](int r) __attribute__((always_inline)) {
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) low[r][v] = low[r][v] >> F.dropped(), pin(low[r][v]);
        });
        other_quads<F, R>(at, 0, ahead, high);
        Place<R>::template next_stretch<F>(at);
        i32v scales[kVectors];
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) scales[v] = load_words(at.scales + v * kLanes * 2);
        const auto finish = [&](int r) __attribute__((always_inline)) {
            constexpr int of_low = (int)offsetof(StretchFacts, exponent_pair) - 2 * (int)sizeof(StretchFacts);
            const i32v exponents = Bases<R>::four(at.facts, r, of_low);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                dot_words(whole[r][v], join_words(low[r][v], high[r][v] << (16 - F.dropped())), shift_words(scales[v], exponents));
        };
        if (left > 1) first_quad<F, R>(at, 0, false, low, finish);
        else PACELINE_UNROLL for (int r = 0; r < R; ++r) finish(r);
        at.scales += kPanel * 2;
    }
}

// The same for groups of 16.
template <BlockForm F, int R>
    requires(!F.floats() && F.group == 16)
PACELINE_INLINE void multiply_super(Place<R>& at, size_t, Prefetch& ahead, i32v (&whole)[R][kVectors]) {
    Rows<R> dots;
    first_quad<F, R>(at, 0, false, dots, kNothing);
    for (size_t left = kStretches; left > 0; --left) {
        i32v scales[kVectors];
        const auto finish_at = [&](int r, int exponent_at) __attribute__((always_inline)) {
            const i32v exponent = Bases<R>::four(at.facts, r, exponent_at);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) whole[r][v] += dots[r][v] * (scales[v] << exponent);
        };
        other_quads<F, R>(at, 0, ahead, dots);
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) scales[v] = load_signed(at.scales + v * kLanes);
        first_quad<F, R>(at, 1, false, dots, [&](int r) __attribute__((always_inline)) { finish_at(r, offsetof(StretchFacts, exponent)); });
        other_quads<F, R>(at, 1, ahead, dots);
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) scales[v] = load_signed(at.scales + kPanel + v * kLanes);
        Place<R>::template next_stretch<F>(at);
        const auto finish = [&](int r) __attribute__((always_inline)) {
            finish_at(r, (int)offsetof(StretchFacts, exponent) - (int)sizeof(StretchFacts));
        };
        if (left > 1) first_quad<F, R>(at, 0, false, dots, finish);
        else PACELINE_UNROLL for (int r = 0; r < R; ++r) finish(r);
        at.scales += kPanel * 2;
    }
}

// The products of a superblock whose groups have float scales; its last stretches may be missing.
template <BlockForm F, int R>
    requires(F.floats())
PACELINE_INLINE void multiply_super(Place<R>& at, size_t num_stretches, Prefetch& ahead, f32v (&whole)[R][kVectors]) {
    Rows<R> dots;
    first_quad<F, R>(at, 0, false, dots, kNothing);
    for (size_t left = num_stretches; left > 0; --left) {
        other_quads<F, R>(at, 0, ahead, dots);
        Place<R>::template next_stretch<F>(at);
        f32v scales[kVectors];
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) scales[v] = load_scales<F>(at.scales + v * kLanes * 2);
        const auto finish = [&](int r) __attribute__((always_inline)) {
            const i32v exponent = Bases<R>::four(at.facts, r, (int)offsetof(StretchFacts, exponent) - (int)sizeof(StretchFacts));
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) whole[r][v] = fma(to_float(dots[r][v] << exponent), scales[v], whole[r][v]);
        };
        if (left > 1) first_quad<F, R>(at, 0, false, dots, finish);
        else PACELINE_UNROLL for (int r = 0; r < R; ++r) finish(r);
        at.scales += kPanel * 2;
    }
}

// Add a superblock's sums, scaled, to those of the superblocks before. start: first output.
template <BlockForm F, int R, class Whole>
PACELINE_INLINE void add_super(const uint8_t* header, size_t start, const SuperFacts* first, size_t num_supers,
                               const Whole (&whole)[R][kVectors], f32v (&totals)[R][kVectors]) {
    f32v scale[kVectors], minimum_scale[kVectors];
    PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
        const size_t at = (start + v * kLanes) * 2;
        if constexpr (!F.floats()) scale[v] = load_half((const uint16_t*)(header + at)) * (float)(1 << F.dropped());
        if constexpr (F.minima) minimum_scale[v] = -load_half((const uint16_t*)(header + F.minimum_at() + at));
    }
    PACELINE_UNROLL for (int r = 0; r < R; ++r) {
        const SuperFacts& facts = first[r * num_supers];
        i32v least[kVectors];
        if constexpr (F.minima) multiply_minima(header + F.minima_at() + start * 4, facts, least);
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
            f32v sum;
            if constexpr (F.floats()) sum = whole[r][v];
            else sum = to_float(whole[r][v]) * scale[v];
            if constexpr (F.minima) sum = fma(to_float(least[v]), minimum_scale[v], sum);
            totals[r][v] = fma(sum, splat(facts.unit), totals[r][v]);
        }
    }
}

// Some superblocks of a panel.
struct Part {
    const uint8_t* header;  // header of the first superblock
    size_t super, num_stretches;
};

// Multiply R rows with a part of a panel, kStep outputs at a time. Behind the panel's first part `out` holds the sums so far.
template <BlockForm F, int R>
PACELINE_APART void block_rows(const Part& part, const BlockRows& rows, size_t first, Prefetch ahead, float* out, size_t stride) {
    using Whole = std::conditional_t<F.floats(), f32v, i32v>;
    const uint8_t* const soon = ahead.from;
    for (size_t start = 0; start < kPanel; start += kStep) {
        const uint8_t* header = part.header;
        const SuperFacts* facts = rows.facts + first * rows.num_supers + part.super;
        f32v totals[R][kVectors] = {};
        Place<R> at;
        Bases<R>::start(at.values, rows.values + (first * rows.num_supers + part.super) * kSuper, rows.num_supers * kSuper);
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
                float* const to = out + r * stride + start + v * kLanes;
                if (part.super > 0) totals[r][v] = load(to);
                else if (R > 2) __builtin_prefetch(to, 1);  // otherwise these stores, and stores of sums behind them, would wait for memory
            }
        for (size_t left = part.num_stretches; left > 0; ++facts) {
            const size_t count = left < kStretches ? left : kStretches;
            Whole whole[R][kVectors] = {};
            ahead.from = soon + (header - part.header) * ahead.lines / 4;
            // The processor's prefetching follows lines in order, but kernels need a header's last.
            if (ahead.lines == 0) PACELINE_UNROLL for (size_t i = 0; i < F.header_bytes(); i += 64) __builtin_prefetch(header + i);
            at.scales = header + F.scale_at(0, start), at.weights = header + F.header_bytes() + start * 4;
            Bases<R>::start(at.facts, facts, rows.num_supers * sizeof(SuperFacts));
            multiply_super<F, R>(at, count, ahead, whole);
            add_super<F, R>(header, start, facts, rows.num_supers, whole, totals);
            header += F.header_bytes() + count * F.stretch_bytes();
            left -= count;
        }
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) store(out + r * stride + start + v * kLanes, totals[r][v]);
    }
}

template <BlockForm F>
void multiply_part(const Part& part, const BlockRows& rows, size_t first, size_t end, float* out, size_t stride) {
    const size_t bytes = F.panel_bytes(part.num_stretches * kStretch);
    in_pieces(kMaxRows, first, end, part.header, bytes, [&, start = first](size_t at, size_t count, Prefetch ahead) {
        float* to = out + (at - start) * stride;
        if (ahead.from == part.header) ahead.lines = 0;
        // The processor's prefetching does not follow a stretch with high bits, which lie behind the low ones.
        if (F.high_bits % 4 && count == end - start && ahead.lines == 0) ahead = {part.header + kFar, 4, false};
        with_rows<kMaxRows>(count, [&]<int R>() { block_rows<F, R>(part, rows, at, ahead, to, stride); });
    });
}

// Rows in several pieces read a panel in parts that the L1 cache keeps for all pieces.
template <BlockForm F>
void block_panel(const uint8_t* panel, const BlockRows& rows, size_t first, size_t end, float* out, size_t stride) {
    const size_t bytes = F.panel_bytes(rows.num_stretches * kStretch);
    const size_t num_parts = end - first > kMaxRows ? (bytes + kPartBytes - 1) / kPartBytes : 1;
    for (size_t i = 0; i < num_parts; ++i) {
        const size_t super = rows.num_supers * i / num_parts, behind = rows.num_supers * (i + 1) / num_parts * kStretches;
        const size_t end_stretch = behind < rows.num_stretches ? behind : rows.num_stretches;
        multiply_part<F>({panel + super * F.panel_bytes(kSuper), super, end_stretch - super * kStretches}, rows, first, end, out, stride);
    }
}

// The smallest exponent with which a stretch, of numbers up to `top`, stays within 127 steps. super_top: largest of its superblock.
int exponent_of(float top, float super_top) {
    int exponent = kMaxExponent;
    while (exponent > 0 && top * (float)(2 << (kMaxExponent - exponent)) <= super_top) --exponent;
    return exponent;
}

// Write sums of stretches in 15 bits. sums: [kStretches]
void put_sums(const int32_t* sums, SuperFacts& facts) {
    int shift = 0;
    for (size_t i = 0; i < kStretches; ++i)
        while ((sums[i] < 0 ? -sums[i] : sums[i]) >> shift >= (1 << 14) - 1) ++shift;
    for (size_t i = 0; i < kStretches; ++i) {
        const int32_t sum = (sums[i] + (1 << shift >> 1)) >> shift;
        facts.sums[i] = (int8_t)(sum >> 7);
        facts.sums[kStretches + i] = (int8_t)(sum & 127);
    }
    facts.sums_shift = shift;
}

// Quantise a stretch; returns the sum of its bytes.
int32_t quantise_stretch(const float* x, float inverse, int8_t* values, StretchFacts& facts) {
    int32_t total = 0;
    for (size_t i = 0; i < kStretch; i += 16) {
        const int32_t sum = inverse < __builtin_inff() ? quantise_group<true>(x + i, 16, inverse, values + i)
                                                       : quantise_group<false>(x + i, 16, inverse, values + i);
        facts.starts[i / 16] = sum * -(int)kStartUnit;
        total += sum;
    }
    facts.start = total * -(int)kStartUnit;
    return total;
}

// count: inputs, fewer than kSuper at the end of a row.
void quantise_super(const float* x, size_t count, int8_t* values, SuperFacts& facts) {
    constexpr float steps = 127.0f * (1 << kMaxExponent);
    const float top = bound(x, count), inverse = top > 0.0f ? 127.0f / top : top == 0.0f ? 0.0f : __builtin_inff();
    int32_t sums[kStretches] = {};
    facts = {};
    for (size_t i = 0; i < count / kStretch; ++i) {
        const int exponent = exponent_of(bound(x + i * kStretch, kStretch), top);
        const float factor = inverse * (float)(1 << (kMaxExponent - exponent));
        StretchFacts& own = facts.stretches[i];
        sums[i] = quantise_stretch(x + i * kStretch, factor, values + i * kStretch, own) * (1 << exponent);
        own.exponent = exponent;
        own.exponent_pair |= exponent;
        if (i > 0) facts.stretches[i - 1].exponent_pair |= exponent << 16;
    }
    put_sums(sums, facts);
    facts.unit = top / steps;
}

void quantise(const float* x, size_t width, int8_t* values, SuperFacts* facts) {
    for (size_t start = 0; start < width; start += kSuper, ++facts)
        quantise_super(x + start, width - start < kSuper ? width - start : kSuper, values + start, *facts);
}

}  // namespace

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {
    {block_panel<kBlockForms[0]>, block_panel<kBlockForms[1]>, block_panel<kBlockForms[2]>, block_panel<kBlockForms[3]>,
     block_panel<kBlockForms[4]>, block_panel<kBlockForms[5]>, block_panel<kBlockForms[6]>, block_panel<kBlockForms[7]>,
     block_panel<kBlockForms[8]>}, quantise};

}  // namespace paceline::PACELINE_ISA
