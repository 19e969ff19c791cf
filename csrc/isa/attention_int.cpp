// Attention to integer keys and values, with a scale for each token and head. Each 32-bit lane takes two exact products of 16 bits: twice
// as many products as in floating point, without widening. The limits below keep every sum within 31 bits, over 256 dimensions or 64 keys.
// Probabilities have 14 bits, relative to the largest of their span: they lose less than the activations around them.
#include "attention.h"
#include "dot.h"
#include "quantise.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr float kQueryLimit = 2047.0f, kWeightLimit = 16383.0f;
template <class T>
constexpr float kKeyLimit = sizeof(T) == 2 ? 4095.0f : 127.0f;
template <class T>
constexpr float kValueLimit = sizeof(T) == 2 ? 2047.0f : 127.0f;
constexpr size_t kMaxDims = 256;

// Bytes of a head's part of a page: keys as [head_dim / 2][16][2], values as [8][head_dim][2], then the scales of 16 tokens.
template <class T>
size_t page_bytes(size_t head_dim) {
    return head_dim * kPageTokens * sizeof(T) + kPageTokens * sizeof(float);
}

template <class T>
PACELINE_INLINE const float* scales_of(const T* page, size_t head_dim) {
    return reinterpret_cast<const float*>(page + head_dim * kPageTokens);
}

PACELINE_INLINE i32v load_pairs(const int16_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }

PACELINE_INLINE i32v load_pairs(const int8_t* p) { return load_words(reinterpret_cast<const uint8_t*>(p)); }

PACELINE_INLINE i32v splat_pair(const int16_t* p) { return splat_bytes(reinterpret_cast<const int8_t*>(p)); }

// Store integers of at most 15 bits as int16.
PACELINE_INLINE void store_int16(int16_t* p, i32v v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = (int16_t)v[i];
#endif
}

// to = round(x * limit / max |x|), n a multiple of 16. Returns the value of one unit, NaN if a number is not finite. May work in place.
PACELINE_INLINE float quantise(const float* x, size_t n, float limit, int16_t* to) {
    const float top = bound(x, n), inverse = top > 0.0f ? limit / top : 0.0f;
    for (size_t i = 0; i < n; i += kLanes)
        store_int16(to + i, to_nearest(load(x + i) * inverse));
    return top / limit;
}

// Store n numbers, a multiple of 16, at indices 0, 2, 4, ... of `to`, or 1, 3, 5, ... The others stay untouched: another thread may
// write them.
template <class T>
PACELINE_INLINE void store_every_other(T* to, bool odd, const int16_t* x, size_t n) {
    for (size_t i = 0; i < n; ++i) to[2 * i + odd] = static_cast<T>(x[i]);
}

#if defined(__AVX512BW__)
PACELINE_INLINE void store_every_other(int16_t* to, bool odd, const int16_t* x, size_t n) {
    const __mmask32 lanes = odd ? 0xAAAAAAAA : 0x55555555;
    for (size_t i = 0; i < n; i += 16) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + i)));
        _mm512_mask_storeu_epi16(to + 2 * i, lanes, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
    }
}
#endif

template <int R, int P, class T>
PACELINE_APART void score_rows(const T* const* pages, size_t head_dim, const int16_t* queries, const float* units, float* scores) {
    i32v sums[P][R][kVectors];
    PACELINE_UNROLL for (int p = 0; p < P; ++p)
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[p][r][v] = splat(0);
    for (size_t d = 0; d < head_dim; d += 2) {
        i32v k[P][kVectors];
        PACELINE_UNROLL for (int p = 0; p < P; ++p) {
            fetch_once(pages[p + kPagesAtOnce] + d * kPageTokens);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                k[p][v] = load_pairs(pages[p] + d * kPageTokens + 2 * v * kLanes);
        }
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            const i32v q = splat_pair(queries + r * 2 * kQueryStride + d);
            PACELINE_UNROLL for (int p = 0; p < P; ++p)
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) dot_words(sums[p][r][v], q, k[p][v]);
        }
    }
    PACELINE_UNROLL for (int p = 0; p < P; ++p)
        PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) {
            const f32v scale = load(scales_of(pages[p], head_dim) + v * kLanes);
            PACELINE_UNROLL for (int r = 0; r < R; ++r)
                store(scores + r * kSpan + p * kPageTokens + v * kLanes, to_float(sums[p][r][v]) * (scale * units[r]));
        }
}

template <int R, class T>
PACELINE_INLINE void score_pages(const T* const* pages, size_t num_pages, size_t head_dim, const int16_t* queries,
                                 const float* units, float* scores) {
    constexpr int at_once = 4 * R <= 2 * kMaxQueries ? 4 : 2 * R <= 2 * kMaxQueries ? 2 : 1;  // as many as registers allow
    size_t page = 0;
    for (; page + at_once <= num_pages; page += at_once)
        score_rows<R, at_once, T>(pages + page, head_dim, queries, units, scores + page * kPageTokens);
    for (; page < num_pages; ++page)
        score_rows<R, 1, T>(pages + page, head_dim, queries, units, scores + page * kPageTokens);
}

// mixed[r] += sum over pairs of keys, at most 64 keys, for W vectors of the head from dimension `offset` on.
template <int R, int W, class T>
PACELINE_APART void mix_rows(const T* const* pages, size_t offset, size_t count, size_t head_dim, const int16_t* weights,
              const float* units, float* mixed) {
    i32v sums[R][W];
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < W; ++v) sums[r][v] = splat(0);
    for (size_t page = 0; page * kPageTokens < count; ++page) {
        const T *values = pages[page] + 2 * offset, *next = pages[page + kPagesAtOnce] + 2 * offset;
        const size_t left = count - page * kPageTokens, keys = left < kPageTokens ? left : kPageTokens;
        const int16_t* w = weights + page * kPageTokens;
        for (size_t j = 0; j < keys; j += 2, values += 2 * head_dim, next += 2 * head_dim, w += 2) {
            i32v x[W];
            PACELINE_UNROLL for (int v = 0; v < W; ++v) {
                x[v] = load_pairs(values + 2 * v * kLanes);
                fetch_once(next + 2 * v * kLanes);
            }
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const i32v pair = splat_pair(w + r * 2 * kSpan);
                PACELINE_UNROLL for (int v = 0; v < W; ++v) dot_words(sums[r][v], pair, x[v]);
            }
        }
    }
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < W; ++v) {
            float* to = mixed + r * head_dim + offset + v * kLanes;
            store(to, fma(to_float(sums[r][v]), splat(units[r]), load(to)));
        }
}

template <int R, class T>
PACELINE_INLINE void mix(const T* const* pages, size_t count, size_t head_dim, const int16_t* weights, const float* units, float* mixed) {
    constexpr int wide = 2 * R <= kMaxQueries ? 4 : 2;
    size_t d = 0;
    for (; d + wide * kLanes <= head_dim; d += wide * kLanes)
        mix_rows<R, wide>(pages, d, count, head_dim, weights, units, mixed);
    for (; d < head_dim; d += kLanes) mix_rows<R, 1>(pages, d, count, head_dim, weights, units, mixed);
}

// The largest of a query's scores `hidden` to `count`, those of keys that it attends to. The others of these pages become -inf.
PACELINE_INLINE float top_score(float* scores, size_t hidden, size_t count) {
    for (size_t i = 0; i < hidden; ++i) scores[i] = -__builtin_inff();
    for (size_t i = count; i < round_up(count, kPageTokens); ++i) scores[i] = -__builtin_inff();
    f32v maxima = splat(-__builtin_inff());
    for (size_t i = 0; i < round_up(count, kPageTokens); i += kLanes) maxima = larger(load(scores + i), maxima);
    return largest(maxima);
}

// exp(x - top) for x <= top, as 2 ** (whole + rest), by a minimax polynomial that is within 4e-6: the result is rounded to 14 bits. 0 for
// results below 1e-38, and for NaN.
PACELINE_INLINE f32v exp_below(f32v x, float top) {
    constexpr float kLog2E = 1.44269504f;
    const f32v power = fma(x, splat(kLog2E), splat(-top * kLog2E)), floor = splat(-126.0f);
    const f32v within = larger(power, floor), whole = nearest(within), rest = within - whole;
    f32v p = splat(9.5701e-3f);
    p = fma(p, rest, splat(5.591786e-2f));
    p = fma(p, rest, splat(2.4024745e-1f));
    p = fma(p, rest, splat(6.9312181e-1f));
    p = fma(p, rest, splat(9.9999926e-1f));
    return scaled(p, whole, power > floor);
}

// Replace scores by weights: probabilities times the scales of the values. Returns the largest weight. This and the total are NaN if a
// key that the query attends to, or its value, is not finite: weights are compared by their bits, and the bits of NaN are the largest.
template <class T>
PACELINE_INLINE float weigh(float* scores, size_t count, const Pages<T>& pages, size_t head_dim, float top, float* total) {
    const f32v none = splat(-__builtin_inff());  // the score of a slot without a key, whose scales may be anything
    f32v sums[kVectors];
    u32v heaviest = (u32v)splat(0);
    for (int v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
    for (size_t page = 0; page < round_up(count, kPageTokens) / kPageTokens; ++page) {
        const float* scales = scales_of(pages.values[page], head_dim);
        for (int v = 0; v < kVectors; ++v) {
            float* at = scores + page * kPageTokens + v * kLanes;
            const f32v score = load(at), prob = exp_below(score, top);
            const f32v any = fma(prob, load(scales + v * kLanes), score - score), weight = score == none ? splat(0.0f) : any;
            sums[v] += prob;
            heaviest = (u32v)weight > heaviest ? (u32v)weight : heaviest;
            store(at, weight);
        }
    }
    for (int v = 1; v < kVectors; ++v) sums[0] += sums[v];
    const float most = finite(largest((i32v)(heaviest & 0x7FFFFFFFu)));
    *total = most == most ? sum(sums[0]) : most;
    return most;
}

// Round weights to integers in place, 0 in slots without a key. Returns the value of one unit.
PACELINE_INLINE float round_weights(float* scores, size_t hidden, size_t count, size_t num_slots, float heaviest) {
    const float inverse = heaviest > 0.0f ? kWeightLimit / heaviest : 0.0f;
    int16_t* const whole = reinterpret_cast<int16_t*>(scores);
    for (size_t i = 0; i < hidden; ++i) scores[i] = 0.0f;
    for (size_t i = count; i < round_up(count, kPageTokens); ++i) scores[i] = 0.0f;
    for (size_t i = 0; i < round_up(count, kPageTokens); i += kLanes) store_int16(whole + i, to_nearest(load(scores + i) * inverse));
    for (size_t i = round_up(count, kPageTokens); i < num_slots; ++i) whole[i] = 0;
    return heaviest / kWeightLimit;
}

// Each step for all queries, one after another, as sums of several queries hide each other's latency.
template <class T>
PACELINE_APART void weigh_queries(const AttentionSpan& span, const Pages<T>& pages) {
    const size_t num_slots = pages.count * kPageTokens;
    for (size_t r = 0; r < span.num_queries; ++r)
        span.tops[r] = top_score(span.scores + r * kSpan, num_hidden(span, r, pages.count), num_seen(span, r, pages.count));
    for (size_t r = 0; r < span.num_queries; ++r)
        span.units[r] = weigh(span.scores + r * kSpan, num_seen(span, r, pages.count), pages, span.head_dim, span.tops[r], span.totals + r);
    for (size_t r = 0; r < span.num_queries; ++r)
        span.units[r] = round_weights(span.scores + r * kSpan, num_hidden(span, r, pages.count),
                                      num_seen(span, r, pages.count), num_slots, span.units[r]);
}

void prepare(float* queries, size_t num_queries, size_t head_dim, float* units) {
    for (size_t r = 0; r < num_queries; ++r) {
        float* query = queries + r * kQueryStride;  // the integers take the first half of the query's floats
        units[r] = quantise(query, head_dim, kQueryLimit, reinterpret_cast<int16_t*>(query));
    }
}

template <class T>
void attend(const AttentionSpan& span) {
    const size_t head_dim = span.head_dim;
    const Pages<T> pages(span, page_bytes<T>(head_dim));
    for (size_t page = 0; page < pages.count; ++page)
        fetch_once(scales_of(pages.keys[page], head_dim)), fetch_once(scales_of(pages.values[page], head_dim));
    const int16_t* const queries = reinterpret_cast<const int16_t*>(span.queries);
    for (size_t first_page = 0; first_page < pages.count; first_page += kPagesAtOnce) {  // these pages stay in L1
        const size_t left = pages.count - first_page, count = left < kPagesAtOnce ? left : kPagesAtOnce;
        by_queries(span.num_queries, [&]<int R>(size_t first) {
            score_pages<R, T>(pages.keys + first_page, count, head_dim, queries + first * 2 * kQueryStride,
                              span.query_units + first, span.scores + first * kSpan + first_page * kPageTokens);
        });
    }
    cap_scores(span, pages.count);
    weigh_queries(span, pages);
    __builtin_memset(span.mixed, 0, span.num_queries * head_dim * sizeof(float));
    const int16_t* const weights = reinterpret_cast<const int16_t*>(span.scores);
    const size_t num_keys = span.end - first_slot(span);
    for (size_t start = 0; start < num_keys; start += kPagesAtOnce * kPageTokens) {
        const size_t left = num_keys - start, count = left < kPagesAtOnce * kPageTokens ? left : kPagesAtOnce * kPageTokens;
        const size_t first_page = start / kPageTokens;
        by_queries(span.num_queries, [&]<int R>(size_t first) {
            mix<R, T>(pages.values + first_page, count, head_dim, weights + first * 2 * kSpan + start,
                      span.units + first, span.mixed + first * head_dim);
        });
    }
}

// Quantise a head [size] to integers [head_dim], padded with zeros. Returns the value of one unit.
PACELINE_INLINE float whole_head(const float* x, size_t size, size_t head_dim, float limit, int16_t* to) {
    if (size == head_dim) return quantise(x, size, limit, to);
    alignas(64) float padded[kMaxDims];
    __builtin_memcpy(padded, x, size * sizeof(float));
    for (size_t d = size; d < head_dim; ++d) padded[d] = 0.0f;
    return quantise(padded, head_dim, limit, to);
}

template <class T>
void write(void* keys, void* values, size_t offset, size_t head_dim, size_t size, const float* key, const float* value) {
    alignas(64) int16_t whole[kMaxDims];
    T *k = static_cast<T*>(keys), *v = static_cast<T*>(values);
    float *key_scales = reinterpret_cast<float*>(k + head_dim * kPageTokens),
          *value_scales = reinterpret_cast<float*>(v + head_dim * kPageTokens);
    key_scales[offset] = whole_head(key, size, head_dim, kKeyLimit<T>, whole);
    for (size_t d = 0; d < head_dim; d += 2) {
        const T pair[2] = {static_cast<T>(whole[d]), static_cast<T>(whole[d + 1])};
        __builtin_memcpy(k + d * kPageTokens + offset * 2, pair, sizeof pair);
    }
    value_scales[offset] = whole_head(value, size, head_dim, kValueLimit<T>, whole);
    store_every_other(v + offset / 2 * 2 * head_dim, offset % 2, whole, head_dim);
}

}  // namespace

extern const KVKernels int16_kv_kernels, int8_kv_kernels;
const KVKernels int16_kv_kernels = {prepare, attend<int16_t>, write<int16_t>, page_bytes<int16_t>};
const KVKernels int8_kv_kernels = {prepare, attend<int8_t>, write<int8_t>, page_bytes<int8_t>};

}  // namespace paceline::PACELINE_ISA
