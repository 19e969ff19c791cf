// Code that attention with floating-point and with integer keys and values shares.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_ISA {

#if defined(__AVX512F__)
constexpr int kMaxQueries = 12;  // most queries at once: registers hold their sums for one vector of scores or two of values
#else
constexpr int kMaxQueries = 4;
#endif
constexpr size_t kPagesAtOnce = kKeysAtOnce / kPageTokens;  // pages of keys or values; one has 2 KiB for a head of 64 numbers
constexpr int kVectors = kPageTokens / kLanes;  // vectors of one page's scores

template <int R, class Kernel>
PACELINE_INLINE void run_of(size_t num_queries, size_t& first, Kernel kernel) {
    if constexpr (R <= kMaxQueries)
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

// Addresses of the pages of a span, then of the pages that are read next. Pages lie anywhere, so hardware cannot predict them: while a
// kernel reads one page, it prefetches the page `kPagesAtOnce` further on.
template <class T>
struct Pages {
    size_t count;
    const T *keys[kSpan / kPageTokens + kPagesAtOnce], *values[kSpan / kPageTokens + kPagesAtOnce];

    Pages(const AttentionSpan& span, size_t page_bytes)
        : count((span.end + kPageTokens - 1) / kPageTokens - span.start / kPageTokens) {
        const int64_t* const ids = span.pages + span.start / kPageTokens;
        const size_t after = span.num_pages - span.start / kPageTokens;  // pages of the row, from this span on
        const auto at = [&](const void* store, size_t page) {
            const size_t offset = (static_cast<size_t>(ids[page]) * span.heads_per_page + span.kv_head) * page_bytes;
            return reinterpret_cast<const T*>(static_cast<const uint8_t*>(store) + offset);
        };
        for (size_t page = 0; page < count; ++page) keys[page] = at(span.keys, page), values[page] = at(span.values, page);
        for (size_t i = 0; i < kPagesAtOnce; ++i) {
            keys[count + i] = values[i < count ? i : 0];
            values[count + i] = at(span.keys, count + i < after ? count + i : 0);
        }
    }
};

// First slot of the page of a span's first key.
PACELINE_INLINE size_t first_slot(const AttentionSpan& span) { return span.start / kPageTokens * kPageTokens; }

// Cap the scores of all queries, if they have a cap.
PACELINE_INLINE void cap_scores(const AttentionSpan& span, size_t num_pages) {
    if (!(span.cap > 0.0f)) return;
    for (size_t r = 0; r < span.num_queries; ++r) cap_all(span.scores + r * kSpan, num_pages * kPageTokens, span.cap);
}

// Number of slots of a span's pages before the first key that a query attends to.
PACELINE_INLINE size_t num_hidden(const AttentionSpan& span, size_t query, size_t num_pages) {
    const size_t first = static_cast<size_t>(span.starts[query]), slots = num_pages * kPageTokens;
    const size_t count = (first < span.start ? span.start : first) - first_slot(span);
    return count < slots ? count : slots;
}

// Number of slots of a span's pages up to the last key that a query attends to, the hidden ones included.
PACELINE_INLINE size_t num_seen(const AttentionSpan& span, size_t query, size_t num_pages) {
    const size_t limit = static_cast<size_t>(span.limits[query]), slots = num_pages * kPageTokens;
    const size_t count = limit <= span.start ? 0 : limit - first_slot(span);
    return count < slots ? count : slots;
}

}  // namespace paceline::PACELINE_ISA
