// Attention of a few queries to one span of a row's keys. Spans are cut at absolute positions, and a query's numbers do
// not depend on the queries beside it: so neither do they on the batch, the chunk or the thread.
//
// A page holds, for each KV head, keys as [head_dim][16] and values as [16][head_dim]: the scores of sixteen keys are
// sums of whole vectors, and so is the mixture of sixteen values.
#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMostQueries = 12;  // accumulators of as many queries, for one vector of scores or two of values
#else
constexpr int kMostQueries = 4;
#endif
constexpr size_t kPagesAtOnce = 4;              // of keys or values, whose page is 2 KiB at a head of 64 numbers
constexpr int kVectors = kPageTokens / kLanes;  // of one page's scores

#define PACELINE_UNROLL _Pragma("GCC unroll 16")

PACELINE_INLINE f32v load_kv(const float* p) { return load(p); }
PACELINE_INLINE f32v load_kv(const uint16_t* p) { return load_half(p); }

// Scores of R queries and the sixteen keys of each of P pages. A score is one sum over dimensions in order; more pages
// at once only keep the machine busy while it waits for a sum.
template <int R, int P, class T>
void score_rows(const T* const* pages, size_t head_dim, const float* queries, float* scores) {
    f32v sums[P][R][kVectors];
    PACELINE_UNROLL for (int p = 0; p < P; ++p)
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[p][r][v] = splat(0.0f);
    for (size_t d = 0; d < head_dim; ++d) {
        f32v k[P][kVectors];
        PACELINE_UNROLL for (int p = 0; p < P; ++p)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                k[p][v] = load_kv(pages[p] + d * kPageTokens + v * kLanes);
        PACELINE_UNROLL for (int r = 0; r < R; ++r) {
            const f32v q = splat(queries[r * head_dim + d]);
            PACELINE_UNROLL for (int p = 0; p < P; ++p)
                PACELINE_UNROLL for (int v = 0; v < kVectors; ++v) sums[p][r][v] = fma(q, k[p][v], sums[p][r][v]);
        }
    }
    PACELINE_UNROLL for (int p = 0; p < P; ++p)
        PACELINE_UNROLL for (int r = 0; r < R; ++r)
            PACELINE_UNROLL for (int v = 0; v < kVectors; ++v)
                store(scores + r * kSpan + p * kPageTokens + v * kLanes, sums[p][r][v]);
}

// mixed[r] += sum over j of weights[r][j] * values[j], for W vectors of the head, over `count` keys of some pages.
template <int R, int W, class T>
void mix_rows(const T* const* pages, size_t offset, size_t count, size_t head_dim, const float* weights, float* mixed) {
    f32v sums[R][W];
    PACELINE_UNROLL for (int r = 0; r < R; ++r)
        PACELINE_UNROLL for (int v = 0; v < W; ++v) sums[r][v] = load(mixed + r * head_dim + v * kLanes);
    for (size_t page = 0; page * kPageTokens < count; ++page) {
        const T* values = pages[page] + offset;
        const size_t left = count - page * kPageTokens, keys = left < kPageTokens ? left : kPageTokens;
        for (size_t j = 0; j < keys; ++j, values += head_dim, ++weights) {
            f32v x[W];
            PACELINE_UNROLL for (int v = 0; v < W; ++v) x[v] = load_kv(values + v * kLanes);
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
PACELINE_INLINE void mix(const T* const* pages, size_t count, size_t head_dim, const float* weights, float* mixed) {
    constexpr int wide = 2 * R <= kMostQueries ? 4 : 2;
    size_t d = 0;
    for (; d + wide * kLanes <= head_dim; d += wide * kLanes)
        mix_rows<R, wide>(pages, d, count, head_dim, weights, mixed + d);
    for (; d < head_dim; d += kLanes) mix_rows<R, 1>(pages, d, count, head_dim, weights, mixed + d);
}

template <int R, class Kernel>
PACELINE_INLINE void run_of(size_t num_queries, size_t& first, Kernel kernel) {
    if constexpr (R <= kMostQueries)
        for (; first + R <= num_queries; first += R) kernel.template operator()<R>(first);
}

template <class Kernel>
PACELINE_INLINE void by_queries(size_t num_queries, Kernel kernel) {
    size_t first = 0;
    run_of<12>(num_queries, first, kernel);
    run_of<6>(num_queries, first, kernel);
    run_of<4>(num_queries, first, kernel);
    run_of<3>(num_queries, first, kernel);
    run_of<2>(num_queries, first, kernel);
    run_of<1>(num_queries, first, kernel);
}

// Fetch what will be read next: pages lie anywhere, so the machine cannot guess it.
template <class T>
PACELINE_INLINE void fetch(const T* p, size_t count) {
    for (size_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 3);
}

template <int R, class T>
PACELINE_INLINE void score_pages(const T* const* pages, size_t num_pages, size_t head_dim, const float* queries,
                                 float* scores) {
    constexpr int many = R <= 3 ? 4 : R <= 6 ? 2 : 1;  // at least twelve sums under way, where there are registers
    constexpr int at_once = many * R <= kMostQueries ? many : 1;
    size_t page = 0;
    for (; page + at_once <= num_pages; page += at_once)
        score_rows<R, at_once, T>(pages + page, head_dim, queries, scores + page * kPageTokens);
    for (; page < num_pages; ++page)
        score_rows<R, 1, T>(pages + page, head_dim, queries, scores + page * kPageTokens);
}

// Turn the first `count` scores into exp(score - largest) and the others, up to `end`, into 0.
PACELINE_INLINE void weigh_scores(float* scores, size_t count, size_t end, float* top, float* total) {
    for (size_t i = count; i < end; ++i) scores[i] = -__builtin_inff();
    f32v most = splat(-__builtin_inff());
    for (size_t i = 0; i < end; i += kLanes) most = larger(load(scores + i), most);
    *top = largest(most);
    f32v sums[kVectors];  // by place in the page, whatever the width of a vector
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
void attend(const AttentionSpan& span) {
    const T* keys = static_cast<const T*>(span.keys);
    const T* values = static_cast<const T*>(span.values);
    const size_t head_dim = span.head_dim, head_size = head_dim * kPageTokens;
    const size_t num_pages = (span.end - span.start + kPageTokens - 1) / kPageTokens;
    const auto at = [&](size_t page) {
        const size_t id = static_cast<size_t>(span.pages[span.start / kPageTokens + page]);
        return (id * span.num_kv_heads + span.kv_head) * head_size;
    };
    const T *key_pages[kSpan / kPageTokens], *value_pages[kSpan / kPageTokens];
    for (size_t page = 0; page < num_pages; ++page) key_pages[page] = keys + at(page), value_pages[page] = values + at(page);
    for (size_t first_page = 0; first_page < num_pages; first_page += kPagesAtOnce) {  // they stay in the first cache
        const size_t left = num_pages - first_page, count = left < kPagesAtOnce ? left : kPagesAtOnce;
        for (size_t page = first_page + count; page < num_pages && page < first_page + 2 * count; ++page)
            fetch(key_pages[page], head_size);
        by_queries(span.num_queries, [&]<int R>(size_t first) {
            score_pages<R, T>(key_pages + first_page, count, head_dim, span.queries + first * head_dim,
                              span.scores + first * kSpan + first_page * kPageTokens);
        });
    }
    for (size_t r = 0; r < span.num_queries; ++r) {
        const size_t limit = static_cast<size_t>(span.limits[r]);
        const size_t count = limit <= span.start ? 0 : limit - span.start;
        weigh_scores(span.scores + r * kSpan, count < num_pages * kPageTokens ? count : num_pages * kPageTokens,
                     num_pages * kPageTokens, span.tops + r, span.totals + r);
    }
    for (size_t i = 0; i < span.num_queries * head_dim; ++i) span.mixed[i] = 0.0f;
    const size_t num_keys = span.end - span.start;  // slots behind the last key are never read
    for (size_t start = 0; start < num_keys; start += kPagesAtOnce * kPageTokens) {
        const size_t left = num_keys - start, count = left < kPagesAtOnce * kPageTokens ? left : kPagesAtOnce * kPageTokens;
        const size_t first_page = start / kPageTokens;
        for (size_t page = first_page + kPagesAtOnce; page < num_pages && page < first_page + 2 * kPagesAtOnce; ++page)
            fetch(value_pages[page], head_size);
        by_queries(span.num_queries, [&]<int R>(size_t first) {
            mix<R, T>(value_pages + first_page, count, head_dim, span.scores + first * kSpan + start,
                      span.mixed + first * head_dim);
        });
    }
}

// Add a span to what the spans before it gave. top = -inf stands for nothing yet.
void merge(float top, float total, const float* mixed, size_t head_dim, float* top_so_far, float* total_so_far,
           float* mixed_so_far) {
    const float most = top > *top_so_far ? top : *top_so_far;
    const f32v old = exp(splat(*top_so_far - most)), now = exp(splat(top - most));
    *total_so_far = *total_so_far * old[0] + total * now[0];
    *top_so_far = most;
    for (size_t d = 0; d < head_dim; d += kLanes)
        store(mixed_so_far + d, fma(load(mixed + d), now, load(mixed_so_far + d) * old));
}

template <class T>
PACELINE_INLINE void put(T* to, float x);
template <>
void put(float* to, float x) {
    *to = x;
}
template <>
void put(uint16_t* to, float x) {
    *to = to_half(x);
}

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

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    {attend<float>, write<float>, 4}, {attend<uint16_t>, write<uint16_t>, 2}, merge};

}  // namespace paceline::PACELINE_ISA
