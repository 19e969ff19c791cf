// Attention of a pass, tile by tile. The kernels of one span are in isa/attention.cpp.
#include <algorithm>
#include <cmath>

#include "model/scratch.h"

namespace paceline {
namespace {

// Results of one span for the queries of a tile, see `AttentionSpan`.
struct SpanResult {
    const float *tops, *totals, *mixed;
};

}  // namespace

void Decoder::attend(const Pass& pass, const KVStore& kv, size_t layer, size_t thread) {
    scratch_->tilings[weights_.layers[layer].tiling].parts.empty() ? attend_tiles(pass, kv, layer, thread) : attend_parts(pass, kv, layer, thread);
}

// Compute each tile as a whole, its spans one after another.
void Decoder::attend_tiles(const Pass& pass, const KVStore& kv, size_t layer, size_t thread) {
    Scratch& s = *scratch_;
    auto& own = s.threads[thread];
    const auto& tiles = s.tilings[weights_.layers[layer].tiling].tiles;
    pool_->each(tiles.size(), [&](size_t t) {
        const Tile& tile = tiles[t];
        gather_queries(pass, kv, layer, tile, 0, thread);
        if (const size_t span = first_of_tile(pass, tile, weights_.layers[layer].window) / kSpan; span + 1 == tile.num_spans) {
            attend_span(pass, kv, layer, tile, span, 0, thread, own.tops.data(), own.totals.data(), own.mixed.data());
            return finish_tile(tile, weights_.layers[layer], own.tops.data(), own.totals.data(), own.mixed.data());  // one span: nothing to merge
        }
        merge_spans(pass, kv, layer, tile, thread, [&](size_t span) {
            attend_span(pass, kv, layer, tile, span, num_before(pass, tile, span), thread, own.tops.data(), own.totals.data(), own.mixed.data());
            return SpanResult{own.tops.data(), own.totals.data(), own.mixed.data()};
        });
    });
}

// Compute the spans of few, long tiles apart, then merge their results.
void Decoder::attend_parts(const Pass& pass, const KVStore& kv, size_t layer, size_t thread) {
    const Layer& own = weights_.layers[layer];
    Tiling& s = scratch_->tilings[own.tiling];
    const size_t group = shape_.num_heads / own.heads.num_kv, dim = kv.padded_dim(own.kv);
    const auto partial = [&](const Tile& tile, size_t span) { return tile.partial + span * tile.count * group; };
    pool_->each(s.parts.size(), [&](size_t i) {
        const Part& part = s.parts[i];
        const Tile& tile = s.tiles[part.tile];
        const size_t begin = std::max(part.first, first_of_tile(pass, tile, own.window) / kSpan);
        if (begin >= part.end) return;
        gather_queries(pass, kv, layer, tile, num_before(pass, tile, begin), thread);
        for (size_t span = begin; span < part.end; ++span) {
            const size_t at = partial(tile, span);
            attend_span(pass, kv, layer, tile, span, num_before(pass, tile, span), thread, &s.tops[at], &s.totals[at], &s.partials[at * dim]);
        }
    });
    pool_->each(s.tiles.size(), [&](size_t t) {
        merge_spans(pass, kv, layer, s.tiles[t], thread, [&](size_t span) {
            const size_t at = partial(s.tiles[t], span);
            return SpanResult{&s.tops[at], &s.totals[at], &s.partials[at * dim]};
        });
    });
}

// Merge the results of a tile's spans in order, and finish the tile.
template <class ResultOf>
void Decoder::merge_spans(const Pass& pass, const KVStore& kv, size_t layer, const Tile& tile, size_t thread, const ResultOf& result_of) {
    auto& own = scratch_->threads[thread];
    const HeadShape& heads = weights_.layers[layer].heads;
    const size_t group = shape_.num_heads / heads.num_kv, dim = kv.padded_dim(weights_.layers[layer].kv), count = tile.count * group;
    const size_t window = weights_.layers[layer].window;
    const auto& merge = kernels().attention.merge;
    std::fill_n(own.top_so_far.begin(), count, -kInfinity);
    std::fill_n(own.total_so_far.begin(), count, 0.0f);
    std::fill_n(own.mixed_so_far.begin(), count * dim, 0.0f);
    for (size_t span = first_of_tile(pass, tile, window) / kSpan; span < tile.num_spans; ++span) {
        const SpanResult found = result_of(span);
        for (size_t i = 0; i < count; ++i) {
            const size_t token = tile.first + i / group, limit = pass.end_of_keys(tile.row, token);
            if (limit <= span * kSpan || first_key(pass, tile.row, token, window) >= (span + 1) * kSpan)
                continue;  // this query attends to nothing of the span
            merge(found.tops[i], found.totals[i], found.mixed + i * dim, dim, &own.top_so_far[i], &own.total_so_far[i],
                  &own.mixed_so_far[i * dim]);
        }
    }
    finish_tile(tile, weights_.layers[layer], own.top_so_far.data(), own.total_so_far.data(), own.mixed_so_far.data());
}

// Bring the queries of a tile's tokens, from token `from` on, into this thread's scratch: normed, rotated and scaled.
void Decoder::gather_queries(const Pass& pass, const KVStore& kv, size_t index, const Tile& tile, size_t from, size_t thread) {
    auto& own = scratch_->threads[thread];
    const Layer& layer = weights_.layers[index];
    const size_t group = shape_.num_heads / layer.heads.num_kv, dim = layer.heads.dim, padded = kv.padded_dim(layer.kv);
    const size_t stride = round_up(shape_.num_heads * dim, kPanel), first = from * group;
    for (size_t i = first; i < tile.count * group; ++i) {
        const size_t token = tile.first + i / group, head = tile.kv_head * group + i % group;
        float* to = &own.queries[i * query_stride(padded)];
        apply_rope(layer, &scratch_->q[token * stride + head * dim], layer.q_norm, token, query_scale(pass.positions[token]), to);
        std::fill(to + dim, to + padded, 0.0f);
        own.starts[i] = static_cast<int64_t>(first_key(pass, tile.row, token, layer.window));
        own.limits[i] = static_cast<int64_t>(pass.end_of_keys(tile.row, token));
    }
    kv.kernels().prepare(&own.queries[first * query_stride(padded)], tile.count * group - first, padded, &own.query_units[first]);
}

// Compute one span of a tile. Its queries from token `from` on are in this thread's scratch.
void Decoder::attend_span(const Pass& pass, const KVStore& kv, size_t index, const Tile& tile, size_t span, size_t from, size_t thread,
                          float* tops, float* totals, float* mixed) {
    auto& own = scratch_->threads[thread];
    const Layer& layer = weights_.layers[index];
    const size_t group = shape_.num_heads / layer.heads.num_kv, padded = kv.padded_dim(layer.kv), first = from * group;
    const bool stores = layer.k && scratch_->tilings[layer.tiling].stores_itself;
    for (size_t t = from; stores && t < tile.count; ++t)
        if (static_cast<size_t>(pass.positions[tile.first + t]) / kSpan == span) store(pass, kv, index, tile.first + t, tile.kv_head);
    const size_t last = pass.end_of_keys(tile.row, tile.first + tile.count - 1);
    kv.kernels().attend({kv.keys(layer.kv), kv.values(layer.kv), pass.pages + tile.row * pass.max_pages,
                         (last + kPageTokens - 1) / kPageTokens, kv.heads_per_page(layer.kv), tile.kv_head, padded, tile.count * group - first,
                         std::max(span * kSpan, first_of_tile(pass, tile, layer.window)),
                         std::min(last, (span + 1) * kSpan), &own.queries[first * query_stride(padded)], &own.query_units[first],
                         &own.starts[first], &own.limits[first], own.scores.data(), own.units.data(), tops + first, totals + first,
                         mixed + first * padded, shape_.score_cap});
}

void Decoder::finish_tile(const Tile& tile, const Layer& layer, const float* tops, const float* totals, const float* mixed) {
    const std::vector<float>& sinks = layer.sinks;
    const size_t group = shape_.num_heads / layer.heads.num_kv, dim = layer.heads.dim;
    const size_t padded = round_up(dim, kPageTokens), stride = round_up(layer.o->in(), kInt8Group);
    for (size_t i = 0; i < tile.count * group; ++i) {
        const size_t head = tile.kv_head * group + i % group;
        float* to = &scratch_->mixed[(tile.first + i / group) * stride + head * dim];
        const float total = sinks.empty() ? totals[i] : totals[i] + std::exp(sinks[head] - tops[i]);
        kernels().layer.scale(mixed + i * padded, dim, 1.0f / total, to);
    }
}

}  // namespace paceline
