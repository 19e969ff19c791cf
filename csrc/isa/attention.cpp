// Attention of a few queries to one span of a row's keys. Spans are cut at absolute positions, and a query's result does not depend on
// the queries beside it: so it does not depend on batch, chunk or thread. A page holds, for each KV head, keys as [head_dim][16]
// and values as [16][head_dim]: the scores of sixteen keys, and sums over sixteen values, take whole vectors.
#include "attention.h"
#include "quantise.h"

namespace paceline::PACELINE_ISA {
namespace {

PACELINE_INLINE f32v load_kv(const float* p) { return load(p); }
PACELINE_INLINE f32v load_kv(const uint16_t* p) { return load_half(p); }

// Scores of R queries and the sixteen keys of each of P pages. A score is one sum over dimensions in order. More pages at once only hide
// the latency of additions.
template <int R, int P, class T>
void score_rows(const T* const* pages, size_t head_dim, const float* queries, float* scores) {
    const size_t stride = query_stride(head_dim);
    f32v sums[P][R][kVectors];
    PACELINE_UNROLL for (int p = 0; p < P; ++p)
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[p][r][v] = splat(0.0f);
    for (size_t d = 0; d < head_dim; ++d) {
        f32v k[P][kVectors];
        PACELINE_UNROLL for (int p = 0; p < P; ++p) {
            fetch_once(pages[p + kPagesAtOnce] + d * kPageTokens);
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                k[p][v] = load_kv(pages[p] + d * kPageTokens + v * kLanes);
        }
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            const f32v q = splat(queries[r * stride + d]);
            PACELINE_UNROLL for (int p = 0; p < P; ++p)
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[p][r][v] = fma(q, k[p][v], sums[p][r][v]);
        }
    }
    PACELINE_UNROLL for (int p = 0; p < P; ++p)
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                store(scores + r * kSpan + p * kPageTokens + v * kLanes, sums[p][r][v]);
}

// mixed[r] += sum over j of weights[r][j] * values[j], for W vectors of the head and keys `hidden` to `count` of some pages; hidden < 16.
template <int R, int W, class T>
void mix_rows(const T* const* pages, size_t offset, size_t hidden, size_t count, size_t head_dim, const float* weights, float* mixed) {
    f32v sums[R][W];
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < W; ++v) sums[r][v] = load(mixed + r * head_dim + v * kLanes);
    for (size_t page = 0, first = hidden; page * kPageTokens < count; ++page, first = 0) {
        const T *values = pages[page] + first * head_dim + offset, *next = pages[page + kPagesAtOnce] + offset;
        const size_t left = count - page * kPageTokens, keys = left < kPageTokens ? left : kPageTokens;
        weights += first;
        for (size_t j = first; j < keys; ++j, values += head_dim, next += head_dim, ++weights) {
            f32v x[W];
            PACELINE_UNROLL for (int v = 0; v < W; ++v) {
                x[v] = load_kv(values + v * kLanes);
                fetch_once(next + v * kLanes);
            }
            PACELINE_UNROLL for (int r = 0; r < R; ++r) {
                const f32v w = splat(weights[r * kSpan]);
                PACELINE_UNROLL for (int v = 0; v < W; ++v) sums[r][v] = fma(w, x[v], sums[r][v]);
            }
        }
    }
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < W; ++v) store(mixed + r * head_dim + v * kLanes, sums[r][v]);
}

template <int R, class T>
PACELINE_INLINE void mix(const T* const* pages, size_t hidden, size_t count, size_t head_dim, const float* weights, float* mixed) {
    constexpr int wide = 2 * R <= kMaxQueries ? 4 : 2;
    size_t d = 0;
    for (; d + wide * kLanes <= head_dim; d += wide * kLanes)
        mix_rows<R, wide>(pages, d, hidden, count, head_dim, weights, mixed + d);
    for (; d < head_dim; d += kLanes) mix_rows<R, 1>(pages, d, hidden, count, head_dim, weights, mixed + d);
}

template <int R, class T>
PACELINE_INLINE void score_pages(const T* const* pages, size_t num_pages, size_t head_dim, const float* queries, float* scores) {
    constexpr int many = R <= 3 ? 4 : R <= 6 ? 2 : 1;  // enough for twelve independent sums, as far as registers allow
    constexpr int at_once = many * R <= kMaxQueries ? many : 1;
    size_t page = 0;
    for (; page + at_once <= num_pages; page += at_once)
        score_rows<R, at_once, T>(pages + page, head_dim, queries, scores + page * kPageTokens);
    for (; page < num_pages; ++page)
        score_rows<R, 1, T>(pages + page, head_dim, queries, scores + page * kPageTokens);
}

// Replace scores `hidden` to `count` by exp(score - largest), and the others up to `end` by 0.
PACELINE_INLINE void weigh_scores(float* scores, size_t hidden, size_t count, size_t end, float* top, float* total) {
    for (size_t i = 0; i < hidden; ++i) scores[i] = -__builtin_inff();
    for (size_t i = count; i < end; ++i) scores[i] = -__builtin_inff();
    f32v maxima = splat(-__builtin_inff());
    for (size_t i = 0; i < end; i += kLanes) maxima = larger(load(scores + i), maxima);
    *top = largest(maxima);
    f32v sums[kVectors];  // by slot of the page, for any width of vector
    for (int v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
    for (size_t i = 0; i < end; i += kPageTokens)
        for (int v = 0; v < kVectors; ++v) {
            const f32v w = exp(load(scores + i + v * kLanes) - *top);
            store(scores + i + v * kLanes, w);
            sums[v] += w;
        }
    for (int v = 1; v < kVectors; ++v) sums[0] += sums[v];
    *total = sum(sums[0]);
}

template <class T>
size_t page_bytes(size_t head_dim) {
    return head_dim * kPageTokens * sizeof(T);
}

// Mix the values of the keys that one query attends to, and read no others: a value that is not finite, times a weight of 0, is NaN.
template <class T>
PACELINE_APART void mix_alone(const AttentionSpan& span, const Pages<T>& pages, size_t query) {
    const size_t hidden = num_hidden(span, query, pages.count), seen = num_seen(span, query, pages.count), dim = span.head_dim;
    __builtin_memset(span.mixed + query * dim, 0, dim * sizeof(float));
    for (size_t page = hidden / kPageTokens; page * kPageTokens < seen; ++page) {
        const size_t start = page * kPageTokens, left = seen - start;
        mix<1, T>(pages.values + page, start < hidden ? hidden - start : 0, left < kPageTokens ? left : kPageTokens, dim,
                  span.scores + query * kSpan + start, span.mixed + query * dim);
    }
}

template <class T>
void attend(const AttentionSpan& span) {
    const size_t head_dim = span.head_dim;
    const Pages<T> pages(span, page_bytes<T>(head_dim));
    for (size_t first_page = 0; first_page < pages.count; first_page += kPagesAtOnce) {  // these pages stay in L1
        const size_t left = pages.count - first_page, count = left < kPagesAtOnce ? left : kPagesAtOnce;
        by_queries(span.num_queries, [&]<int R>(size_t first) {
            score_pages<R, T>(pages.keys + first_page, count, head_dim, span.queries + first * query_stride(head_dim),
                              span.scores + first * kSpan + first_page * kPageTokens);
        });
    }
    cap_scores(span, pages.count);
    const size_t hidden = span.start - first_slot(span);
    for (size_t r = 0; r < span.num_queries; ++r)
        weigh_scores(span.scores + r * kSpan, num_hidden(span, r, pages.count), num_seen(span, r, pages.count),
                     pages.count * kPageTokens, span.tops + r, span.totals + r);
    __builtin_memset(span.mixed, 0, span.num_queries * head_dim * sizeof(float));
    const size_t num_keys = span.end - first_slot(span);  // excludes slots behind the last key
    for (size_t start = 0; start < num_keys; start += kPagesAtOnce * kPageTokens) {
        const size_t left = num_keys - start, count = left < kPagesAtOnce * kPageTokens ? left : kPagesAtOnce * kPageTokens;
        const size_t first_page = start / kPageTokens;
        by_queries(span.num_queries, [&]<int R>(size_t first) {
            mix<R, T>(pages.values + first_page, start ? 0 : hidden, count, head_dim, span.scores + first * kSpan + start,
                      span.mixed + first * head_dim);
        });
    }
    for (size_t r = 0; r < span.num_queries; ++r)
        if (const float most = bound(span.mixed + r * head_dim, head_dim); most != most) mix_alone(span, pages, r);
}

void prepare(float*, size_t, size_t, float*) {}  // floating-point kernels read queries as they are

// Add the result of a span to that of earlier spans. top_so_far = -inf: there are no earlier spans.
void merge(float top, float total, const float* mixed, size_t head_dim, float* top_so_far, float* total_so_far, float* mixed_so_far) {
    if (top <= *top_so_far) {
        const f32v now = exp(splat(top - *top_so_far));
        *total_so_far += total * now[0];
        for (size_t d = 0; d < head_dim; d += kLanes)
            store(mixed_so_far + d, fma(load(mixed + d), now, load(mixed_so_far + d)));
        return;
    }
    const f32v old = exp(splat(*top_so_far - top));
    *total_so_far = *total_so_far * old[0] + total;
    *top_so_far = top;
    for (size_t d = 0; d < head_dim; d += kLanes)
        store(mixed_so_far + d, fma(load(mixed_so_far + d), old, load(mixed + d)));
}

PACELINE_INLINE void put(float* to, float x) { *to = x; }
PACELINE_INLINE void put(uint16_t* to, float x) { *to = to_half(x); }

template <class T>
void write(void* keys, void* values, size_t offset, size_t head_dim, size_t size, const float* key, const float* value) {
    T* k = static_cast<T*>(keys);
    T* v = static_cast<T*>(values) + offset * head_dim;
    for (size_t d = 0; d < head_dim; ++d) {
        put(k + d * kPageTokens + offset, d < size ? key[d] : 0.0f);
        put(v + d, d < size ? value[d] : 0.0f);
    }
}

}  // namespace

extern const KVKernels int16_kv_kernels, int8_kv_kernels;  // attention_int.cpp
extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {{prepare, attend<float>, write<float>, page_bytes<float>},
                                            {prepare, attend<uint16_t>, write<uint16_t>, page_bytes<uint16_t>},
                                            &int16_kv_kernels, &int8_kv_kernels, merge};

}  // namespace paceline::PACELINE_ISA
