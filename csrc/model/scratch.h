// The memory that passes of a decoder reuse.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "model/decoder.h"

namespace paceline {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kQueryTokens = 8;  // tokens of a row whose attention is one tile
constexpr size_t kHeadPanels = 8;   // panels of one tile of the LM head
constexpr size_t kHeadTile = kHeadPanels * kPanel;
constexpr size_t kTokensAhead = 10;  // tokens per thread from which on pages are prefetched: smaller passes need all bandwidth for weights
constexpr size_t kHeadRows = 48;  // wanted tokens that are multiplied with a tile of the LM head at once

// The best token so far of one wanted token, as one thread has seen it, and the second.
struct Best {
    double score = -std::numeric_limits<double>::infinity();
    int64_t id = kBroken;
    double second = -std::numeric_limits<double>::infinity();
    int64_t second_id = kBroken;

    void offer(double other_score, int64_t other_id) {
        if (other_id == id) return;
        if (other_score > score || (other_score == score && other_id < id)) {
            second = score, second_id = id, score = other_score, id = other_id;
        } else if (other_score > second) {
            second = other_score, second_id = other_id;
        }
    }

    // The lowest score that can still matter.
    double floor(bool margins) const { return margins ? second : score; }
};

// Some tokens of a row, whose attention with one KV head is computed together.
struct Decoder::Tile {
    size_t row, first, count, kv_head;
    size_t num_spans;
    size_t partial;  // first query of its results in `Scratch::partials`, where spans are computed apart
};

// Some of a tile's spans.
struct Decoder::Part {
    size_t tile, first, end;
};

// How the attention of a pass is cut, in layers whose heads have one shape.
struct Decoder::Tiling {
    HeadShape heads;
    bool stores_itself = false;  // each row is one tile per KV head, so that a tile can store its own keys and values
    std::vector<Tile> tiles = {};
    std::vector<Part> parts = {};                           // of the tiles, where their spans are computed apart
    AlignedVector<float> tops = {}, totals = {}, partials = {};  // results of these spans, by query
};

// Sizes in comments are padded: "to 32" means rounded up to a multiple of 32.
struct Decoder::Scratch {
    AlignedVector<float> hidden;          // [num_tokens, hidden]
    AlignedVector<float> delta;           // [num_tokens, hidden to 32] what a block adds to `hidden`
    AlignedVector<float> cosines, sines;  // [num_tokens, num_ropes, head_dim / 2]
    AlignedVector<float> q, k, v;         // [num_tokens, each to 32]
    AlignedVector<float> mixed;           // [num_tokens, num_heads * head_dim to 64] output of attention
    AlignedVector<float> gate, up;        // [num_tokens, intermediate to 64]
    Activations hidden_q, attn_q, ffn_q;  // quantised: of the residual stream, of attention, of the feed-forward network
    ExpertScratch experts;
    AlignedVector<float> inputs;          // [num_tokens, num_layers * size to 32] own inputs to the layers
    std::vector<Tiling> tilings;          // one for each shape of heads
    std::vector<size_t> logit_row;                // [wanted]
    std::vector<Best> best;                       // [threads, wanted]

    struct ThreadScratch {
        AlignedVector<float> normed;                                               // a row that a product will read
        AlignedVector<float> table_row;                                            // of `LayerInputs::embed`
        AlignedVector<float> queries, query_units, scores, units;                  // of a tile, see `AttentionSpan`
        AlignedVector<float> tops, totals, mixed;                                  // results of one span
        AlignedVector<float> top_so_far, total_so_far, mixed_so_far;               // merged results of several
        std::vector<int64_t> starts, limits;                                       // keys that each query sees
        AlignedVector<float> logits, head_logits, scaled, bounds;                  // of a tile of the LM head
        AlignedVector<float> vocab_logits;                                         // a draft head's logits at the target's ids
        Sampler<float> sampler;
    };
    std::vector<ThreadScratch> threads;
    std::vector<int64_t> pages;  // pages that the pass reads; empty if it has too few tokens to prefetch them
};

inline void grow(AlignedVector<float>& v, size_t size) {
    if (v.size() < size) v.resize(size);
}

// Put zeros behind a row's numbers, as far as products read.
inline void pad(float* row, size_t size) { std::fill(row + size, row + round_up(size, kInt8Group), 0.0f); }

// Norm a token's numbers; an empty weight copies them.
inline void norm(const float* x, const std::vector<float>& weight, size_t size, float eps, float* to) {
    if (weight.empty())
        std::copy_n(x, size, to);
    else
        kernels().layer.rms_norm(x, weight.data(), size, eps, to);
}

}  // namespace paceline
