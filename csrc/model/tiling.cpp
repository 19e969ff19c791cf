// How the attention of a pass is cut into tiles, and how tiles are dealt out to threads.
#include <algorithm>

#include "model/scratch.h"

namespace paceline {
namespace {

constexpr size_t kMinTilesPerThread = 4;  // with fewer tiles per thread, rows of few tokens are cut
constexpr size_t kPartsPerThread = 4;     // parts per thread into which long tiles are cut
constexpr size_t kManyTiles = 8;          // tiles per thread with which no order matters: threads that are done help the others

// Order tasks so that the ranges that threads start with take about as long: they are dealt out like cards, the longest first.
template <class Task, class Length>
void deal(std::vector<Task>& tasks, size_t num_threads, const Length& length) {
    std::vector<Task> longest_first = tasks;
    std::stable_sort(longest_first.begin(), longest_first.end(), [&](const Task& a, const Task& b) { return length(a) > length(b); });
    const auto begin_of = [&](size_t thread) { return tasks.size() * thread / num_threads; };
    size_t next = 0;
    for (size_t hand = 0; next < tasks.size(); ++hand)
        for (size_t thread = 0; thread < num_threads; ++thread)
            if (const size_t at = begin_of(thread) + hand; at < begin_of(thread + 1)) tasks[at] = longest_first[next++];
}

}  // namespace

void Decoder::plan_tiles(const Pass& pass) {
    Scratch& s = *scratch_;
    const size_t dim = round_up(shape_.head_dim, kPageTokens);
    size_t group = 0;
    for (Tiling& tiling : s.tilings) {
        plan_tiling(pass, tiling);
        group = std::max(group, shape_.num_heads / tiling.heads.num_kv);
    }
    const size_t max_queries = kQueryTokens * group;
    for (auto& own : s.threads) {
        for (auto* v : {&own.mixed, &own.mixed_so_far}) grow(*v, max_queries * dim);
        grow(own.queries, max_queries * query_stride(dim));
        for (auto* v : {&own.query_units, &own.units, &own.tops, &own.totals, &own.top_so_far, &own.total_so_far}) grow(*v, max_queries);
        grow(own.scores, max_queries * kSpan);
        own.starts.resize(max_queries);
        own.limits.resize(max_queries);
    }
}

void Decoder::plan_tiling(const Pass& pass, Tiling& tiling) {
    const size_t num_kv = tiling.heads.num_kv, group = shape_.num_heads / num_kv;
    tiling.tiles.clear();
    tiling.stores_itself = !pass.branched;  // a branch reads its row's keys, which must all be written before
    size_t num_queries = 0;
    const bool few = pool_->size() > 1 && pass.num_rows * num_kv < kMinTilesPerThread * pool_->size();
    for (size_t row = 0; row < pass.num_rows; ++row) {
        const size_t begin = pass.cu_len[row], end = pass.cu_len[row + 1];
        // Few tokens of a row are halved where there would hardly be a tile for each thread.
        const size_t at_once = few && end - begin <= kQueryTokens ? std::max<size_t>((end - begin + 1) / 2, 1) : kQueryTokens;
        tiling.stores_itself &= end - begin <= at_once;
        for (size_t first = begin; first < end; first += at_once) {
            const size_t count = std::min(at_once, end - first);
            const size_t num_spans = (pass.end_of_keys(row, first + count - 1) - 1) / kSpan + 1;
            for (size_t h = 0; h < num_kv; ++h) {
                tiling.tiles.push_back({row, first, count, h, num_spans, num_queries});
                num_queries += count * group * num_spans;
            }
        }
    }
    balance_tiles(pass, tiling, num_queries);
}

// Order few tiles so that no thread waits long. If one takes half of a thread's share or more, cut all into parts.
// num_queries: queries of all spans of the tiles.
void Decoder::balance_tiles(const Pass& pass, Tiling& s, size_t num_queries) {
    s.parts.clear();
    if (s.tiles.size() >= kManyTiles * pool_->size()) return;
    const auto end_of = [&](const Tile& tile) { return pass.end_of_keys(tile.row, tile.first + tile.count - 1); };
    const auto length = [&](const Tile& tile) { return tile.count * end_of(tile); };
    size_t num_spans = 0, total = 0, longest = 0;
    for (const Tile& tile : s.tiles)
        num_spans += tile.num_spans, total += length(tile), longest = std::max(longest, length(tile));
    if (num_spans == s.tiles.size() || 2 * longest * pool_->size() < total) return deal(s.tiles, pool_->size(), length);
    const size_t at_once = std::max<size_t>(num_spans / (kPartsPerThread * pool_->size()), 1);
    for (size_t t = 0; t < s.tiles.size(); ++t)
        for (size_t first = first_of_tile(pass, s.tiles[t], 0) / kSpan; first < s.tiles[t].num_spans; first += at_once)
            s.parts.push_back({t, first, std::min(first + at_once, s.tiles[t].num_spans)});
    grow(s.tops, num_queries);
    grow(s.totals, num_queries);
    grow(s.partials, num_queries * round_up(s.heads.dim, kPageTokens));
    deal(s.parts, pool_->size(), [&](const Part& part) {
        const Tile& tile = s.tiles[part.tile];
        return tile.count * (std::min(part.end * kSpan, end_of(tile)) - part.first * kSpan);
    });
}

// The first key that a token of a row attends to.
size_t Decoder::first_key(const Pass& pass, size_t row, size_t token, size_t window) {
    const auto first = static_cast<size_t>(pass.first_keys[row]), end = static_cast<size_t>(pass.positions[token]) + 1;
    return window && end > window ? std::max(first, end - window) : first;
}

// The key at which the attention of a tile begins. Behind the row's first key it moves in steps of `kKeysAtOnce`, the keys that a
// kernel sums up at once: these groups are then the same for every tile, and so for every prefill chunk.
size_t Decoder::first_of_tile(const Pass& pass, const Tile& tile, size_t window) {
    const auto first = static_cast<size_t>(pass.first_keys[tile.row]);
    const size_t key = first_key(pass, tile.row, tile.first, window), page = first / kPageTokens * kPageTokens;
    const size_t start = page + (key - page) / kKeysAtOnce * kKeysAtOnce;
    return std::max(first, start);
}

// The number of a tile's first tokens that attend to nothing of a span.
size_t Decoder::num_before(const Pass& pass, const Tile& tile, size_t span) {
    size_t count = 0;
    while (pass.end_of_keys(tile.row, tile.first + count) <= span * kSpan) ++count;
    return count;
}

}  // namespace paceline
