#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

namespace paceline {
namespace {

constexpr size_t kQueryTokens = 8;     // tokens of a row whose attention is one tile
constexpr size_t kTilesPerThread = 4;  // with fewer, rows of few tokens are cut
constexpr size_t kPartsPerThread = 4;  // of the attention of few rows
constexpr size_t kManyTiles = 8;       // of each thread: who is done first then helps the others
constexpr size_t kHeadPanels = 8;      // panels of one tile of the head
constexpr size_t kHeadTile = kHeadPanels * kPanel;
constexpr size_t kHeadRows = 48;       // positions of one pass over such a tile
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The best token so far of one position, as one thread has seen it, and the score of the one behind it.
struct Best {
    double score = -std::numeric_limits<double>::infinity();
    int64_t id = kBroken;
    double second = -std::numeric_limits<double>::infinity();

    void offer(double other_score, int64_t other_id) {
        if (other_id == id) return;
        if (other_score > score || (other_score == score && other_id < id)) {
            second = score, score = other_score, id = other_id;
        } else if (other_score > second) {
            second = other_score;
        }
    }

    // What a score must reach to matter.
    double least(bool margins) const { return margins ? second : score; }
};

// The token ids of one tile of a head: consecutive, or as a map says.
struct TileIds {
    size_t start, count;
    const uint32_t* map;  // [count], or null

    uint32_t operator[](size_t i) const { return map ? map[i] : static_cast<uint32_t>(start + i); }
};

// Call act(place in the tile, place among the edits) for each token of a tile that is edited.
template <class Act>
void each_edited(const TileIds& ids, const Edits& edits, const Act& act) {
    const int64_t *const first = edits.ids, *const end = edits.ids + edits.count;
    if (!edits.count) return;
    if (!ids.map) {
        const auto last = static_cast<int64_t>(ids.start + ids.count);
        for (const int64_t* id = std::lower_bound(first, end, static_cast<int64_t>(ids.start)); id != end && *id < last; ++id)
            act(static_cast<size_t>(*id) - ids.start, static_cast<size_t>(id - first));
        return;
    }
    if (edits.count == 1) {  // a hint: the one place is sooner found by looking at all
        size_t found = 0;
        for (size_t i = 0; i < ids.count; ++i) found = ids.map[i] == static_cast<uint32_t>(*first) ? i + 1 : found;
        if (found) act(found - 1, 0);
        return;
    }
    for (size_t i = 0; i < ids.count; ++i) {
        const int64_t* id = std::lower_bound(first, end, static_cast<int64_t>(ids.map[i]));
        if (id != end && *id == static_cast<int64_t>(ids.map[i])) act(i, static_cast<size_t>(id - first));
    }
}

// Offer the best token of one tile of a row of logits [kHeadTile], padded with -inf: what `Sampler` does for a whole row.
// margins: the second best is looked for, too.
void choose_in_tile(const Choose& how, const float* logits, const TileIds& ids, float* z, float* bounds, bool margins, Best& best) {
    constexpr size_t blocks = kHeadTile / kBlock;
    const auto& kernel = kernels().vocabulary;
    const bool greedy = how.temperature <= 0.0;
    const float inverse = greedy ? 1.0f : inverse_temperature(how.temperature);
    float maxima[blocks];
    kernel.scale(logits, blocks, inverse, z, maxima);
    each_edited(ids, how.edits, [&](size_t i, size_t edit) { z[i] = edited(logits[i], how.edits, edit) * inverse; });
    if (greedy) {
        for (int place = 0; place < (margins ? 2 : 1); ++place) {
            const float top = kernel.maximum(z, kHeadTile);
            if (!(top >= best.least(margins) && top > -kInfinity)) break;
            const size_t i = static_cast<size_t>(std::find(z, z + kHeadTile, top) - z);
            best.offer(top, ids[i]);
            z[i] = -kInfinity;
        }
        return;
    }
    if (ids.map)
        kernel.bound_ids(z, blocks, how.key.k0, how.key.k1, ids.map, bounds, maxima);
    else
        kernel.bound(z, blocks, how.key.k0, how.key.k1, ids[0], bounds, maxima);
    const auto offer = [&](size_t i) {
        if (z[i] > -kInfinity) best.offer(z[i] + gumbel(how.key, ids[i]), ids[i]);
    };
    offer(static_cast<size_t>(std::max_element(bounds, bounds + kHeadTile) - bounds));  // others seldom reach it
    for (size_t b = 0; b < blocks; ++b) {
        if (maxima[b] < static_cast<float>(best.least(margins))) continue;
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; ++i)
            if (!(bounds[i] < static_cast<float>(best.least(margins)))) offer(i);
    }
}

void grow(Lines<float>& v, size_t size) {
    if (v.size() < size) v.resize(size);
}

// Bring tasks into such an order that the range each thread of a team begins with takes about as long: they are dealt out,
// the longest first.
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

// Put zeros behind a row's numbers, as far as products read.
void pad(float* row, size_t size) { std::fill(row + size, row + round_up(size, kInt8Group), 0.0f); }

// Norm a token's numbers, or copy them where there is no norm.
void norm(const float* x, const std::vector<float>& weight, size_t size, float eps, float* to) {
    if (weight.empty())
        std::copy_n(x, size, to);
    else
        kernels().layer.rms_norm(x, weight.data(), size, eps, to);
}

}  // namespace

// KV ---------------------------------------------------------------------------------------------

KVStore::KVStore(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim)
    : type_(type), num_pages_(num_pages), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {
    const size_t bytes = num_pages * num_kv_heads * kernels().page_bytes(padded_dim());
    for (size_t i = 0; i < num_layers; ++i) layers_.emplace_back(lazy_zeros(bytes), lazy_zeros(bytes));
}

bool KVStore::fits(KVType type, size_t num_layers, size_t num_pages, size_t num_kv_heads, size_t head_dim) {
    constexpr size_t kMostBytes = size_t{1} << 56;
    size_t bytes = kernels_of(type).page_bytes(round_up(head_dim, kPageTokens));
    for (size_t times : {num_kv_heads, num_pages, 2 * num_layers})
        if (__builtin_mul_overflow(bytes, times, &bytes) || bytes > kMostBytes) return false;
    return true;
}

size_t KVStore::bytes_per_token() const {
    return 2 * num_layers() * num_kv_heads_ * kernels().page_bytes(padded_dim()) / kPageTokens;
}

const KVKernels& KVStore::kernels_of(KVType type) {
    const AttentionKernels& all = paceline::kernels().attention;
    switch (type) {
        case KVType::i16: return *all.i16;
        case KVType::i8: return *all.i8;
        case KVType::f16: return all.f16;
        case KVType::f32: break;
    }
    return all.f32;
}

// Scratch ----------------------------------------------------------------------------------------

// Some tokens of a row, whose attention with one KV head is computed together.
struct Decoder::Tile {
    size_t row, first, count, kv_head;
    size_t num_spans;
    size_t partial;  // where its partial results begin, in queries, when spans are computed apart
};

// Some of a tile's spans.
struct Decoder::Part {
    size_t tile, first, end;
};

struct Decoder::Scratch {
    Lines<float> hidden;         // [num_tokens, hidden]
    Lines<float> delta;          // [num_tokens, hidden up to 32] what a block adds to it
    Lines<float> cosines, sines; // [num_tokens, num_ropes, head_dim / 2]
    Lines<float> q, k, v;        // [num_tokens, each up to 32]
    Lines<float> mixed;          // [num_tokens, num_heads * head_dim up to 64]
    Lines<float> gate, up;       // [num_tokens, intermediate up to 64]
    Activations wide, narrow, long_;   // of the residual stream, of attention, of the feed-forward network
    bool stores_itself;  // each row is one tile per head, which can store its own keys and values
    std::vector<Tile> tiles;
    std::vector<Part> parts;                    // of tiles, when their spans are computed apart
    Lines<float> tops, totals, partials;  // of these spans
    std::vector<size_t> row_of;                    // [num_tokens]
    std::vector<size_t> logit_row;                 // [wanted]
    std::vector<Best> best;                        // [threads, wanted]
    struct Own {                                   // of one thread
        Lines<float> normed, queries, query_units, scores, units, tops, totals, mixed, top_so_far, total_so_far, mixed_so_far;
        Lines<float> tile, also, z, bounds, spread;
        std::vector<int64_t> starts, limits;
        Sampler<float> sampler;
    };
    std::vector<Own> own;
};

Decoder::Decoder(const Shape& shape, Weights weights, std::shared_ptr<Team> team)
    : shape_(shape), weights_(std::move(weights)), team_(std::move(team)),
      scratch_(new Scratch, [](Scratch* s) { delete s; }) {
    scratch_->own.resize(team_->size());
    const size_t read = std::max(2 * shape.hidden, shape.hidden + weights_.relay.size);
    const size_t widest = std::max(round_up(std::max(read, shape.num_heads * shape.head_dim), kInt8Group),
                                   2 * round_up(weights_.relay.inner, kInt8Group));
    for (auto& own : scratch_->own) own.normed.assign(widest, 0.0f);
    auto& ids = weights_.token_ids;
    if (!ids.empty()) ids.resize(round_up(ids.size(), kHeadTile), ids.back());  // as tiles of logits are padded
}

size_t Decoder::weight_bytes() const {
    size_t total = weights_.embed->bytes() + (weights_.head == weights_.embed ? 0 : weights_.head->bytes());
    if (weights_.fuse) total += weights_.fuse->bytes();
    if (const Relay& relay = weights_.relay; relay.size)
        for (const auto* m : {&relay.place, &relay.known, &relay.tell, &relay.written}) total += (*m)->bytes();
    for (const Layer& layer : weights_.layers)
        for (const auto* m : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
            total += (*m)->bytes();
    return total;
}

void Decoder::plan(const Pass& pass, const KVStore& kv) {
    Scratch& s = *scratch_;
    const size_t n = pass.num_tokens, heads = shape_.num_heads, dim = kv.padded_dim();
    const size_t group = heads / shape_.num_kv_heads;
    grow(s.hidden, n * shape_.hidden);
    grow(s.delta, n * round_up(shape_.hidden, kPanel));
    grow(s.cosines, n * num_angles());
    grow(s.sines, n * num_angles());
    grow(s.q, n * round_up(heads * shape_.head_dim, kPanel));
    grow(s.k, n * round_up(shape_.num_kv_heads * shape_.head_dim, kPanel));
    grow(s.v, n * round_up(shape_.num_kv_heads * shape_.head_dim, kPanel));
    grow(s.mixed, n * round_up(heads * shape_.head_dim, kInt8Group));
    grow(s.gate, n * round_up(shape_.intermediate, kInt8Group));
    grow(s.up, n * round_up(shape_.intermediate, kInt8Group));
    s.wide.reserve(std::max(n, pass.wanted.size()), (shape_.reads_features ? 2 : 1) * shape_.hidden);
    s.narrow.reserve(n, heads * shape_.head_dim);
    s.long_.reserve(n, shape_.intermediate);

    s.tiles.clear();
    s.stores_itself = true;
    s.row_of.resize(n);
    size_t num_queries = 0;
    const bool few = team_->size() > 1 && pass.num_rows * shape_.num_kv_heads < kTilesPerThread * team_->size();
    for (size_t row = 0; row < pass.num_rows; ++row) {
        const size_t begin = pass.cu_len[row], end = pass.cu_len[row + 1];
        // A row's few tokens are shared out where else there would hardly be a tile for each thread.
        const size_t at_once = few && end - begin <= kQueryTokens ? std::max<size_t>((end - begin + 1) / 2, 1) : kQueryTokens;
        s.stores_itself &= end - begin <= at_once;
        for (size_t first = begin; first < end; first += at_once) {
            const size_t count = std::min(at_once, end - first);
            const size_t num_spans = pass.positions[first + count - 1] / kSpan + 1;
            for (size_t h = 0; h < shape_.num_kv_heads; ++h) {
                s.tiles.push_back({row, first, count, h, num_spans, num_queries});
                num_queries += count * group * num_spans;
            }
        }
        std::fill(s.row_of.begin() + begin, s.row_of.begin() + end, row);
    }
    share_out_tiles(pass, num_queries, dim);

    const size_t most = kQueryTokens * group;
    for (auto& own : s.own) {
        for (auto* v : {&own.mixed, &own.mixed_so_far}) grow(*v, most * dim);
        grow(own.queries, most * query_stride(dim));
        for (auto* v : {&own.query_units, &own.units, &own.tops, &own.totals, &own.top_so_far, &own.total_so_far}) grow(*v, most);
        grow(own.scores, most * kSpan);
        own.starts.resize(most);
        own.limits.resize(most);
    }
    plan_choices(pass);
}

// Put the attention's tiles, where they are few, in an order that leaves no thread waiting long; with tiles that take half of
// a thread's share and more, in parts. num_queries: of all their spans.
void Decoder::share_out_tiles(const Pass& pass, size_t num_queries, size_t dim) {
    Scratch& s = *scratch_;
    s.parts.clear();
    if (s.tiles.size() >= kManyTiles * team_->size()) return;
    const auto end_of = [&](const Tile& tile) { return static_cast<size_t>(pass.positions[tile.first + tile.count - 1]) + 1; };
    const auto length = [&](const Tile& tile) { return tile.count * end_of(tile); };
    size_t num_spans = 0, total = 0, longest = 0;
    for (const Tile& tile : s.tiles)
        num_spans += tile.num_spans, total += length(tile), longest = std::max(longest, length(tile));
    if (num_spans == s.tiles.size() || 2 * longest * team_->size() < total) return deal(s.tiles, team_->size(), length);
    const size_t at_once = std::max<size_t>(num_spans / (kPartsPerThread * team_->size()), 1);
    for (size_t t = 0; t < s.tiles.size(); ++t)
        for (size_t first = first_of_tile(pass, s.tiles[t], 0) / kSpan; first < s.tiles[t].num_spans; first += at_once)
            s.parts.push_back({t, first, std::min(first + at_once, s.tiles[t].num_spans)});
    grow(s.tops, num_queries);
    grow(s.totals, num_queries);
    grow(s.partials, num_queries * dim);
    deal(s.parts, team_->size(), [&](const Part& part) {
        const Tile& tile = s.tiles[part.tile];
        return tile.count * (std::min(part.end * kSpan, end_of(tile)) - part.first * kSpan);
    });
}

void Decoder::plan_choices(const Pass& pass) {
    Scratch& s = *scratch_;
    for (auto& own : s.own) {
        grow(own.tile, kHeadRows * kHeadTile);
        grow(own.z, kHeadTile);
        grow(own.bounds, kHeadTile);
    }
    s.best.assign(team_->size() * pass.wanted.size(), Best{});
    s.logit_row.resize(pass.wanted.size());
    size_t logit_rows = 0;
    for (size_t i = 0; i < pass.wanted.size(); ++i)
        s.logit_row[i] = pass.chooses[i].wants_logits() ? logit_rows++ : 0;
}

// The pass ---------------------------------------------------------------------------------------

void Decoder::forward(const Pass& pass, const KVStore& kv) {
    finish();
    plan(pass, kv);
    team_->run([&](size_t thread) { run(pass, kv, thread); });
    finish_choices(pass);
}

void Decoder::begin(Pass pass, const KVStore& kv) {
    finish();
    plan(pass, kv);
    begun_ = std::move(pass);
    team_->begin([this, &kv](size_t thread) { run(*begun_, kv, thread); });
}

void Decoder::finish() {
    if (!begun_) return;
    team_->finish();
    finish_choices(*begun_);
    begun_.reset();
}

// Put together what each thread found best.
void Decoder::finish_choices(const Pass& pass) {
    const size_t num_wanted = pass.wanted.size();
    for (size_t i = 0; i < num_wanted; ++i) {
        if (pass.chooses[i].kind == Kind::sampled) continue;
        Best best;
        for (size_t thread = 0; thread < team_->size(); ++thread) {
            const Best& own = scratch_->best[thread * num_wanted + i];
            if (own.id == kBroken) continue;
            best.offer(own.score, own.id);
            best.second = std::max(best.second, own.second);
        }
        const bool finite = best.id != kBroken && std::isfinite(best.score);
        const double ahead = margin(best.score - best.second, pass.chooses[i].temperature);
        if (pass.margins && finite) pass.margins[i] = static_cast<float>(ahead);
        pass.chosen[i] = pass.chooses[i].kind == Kind::logits ? kUnchosen : finite ? best.id : kBroken;
    }
}

void Decoder::run(const Pass& pass, const KVStore& kv, size_t thread) {
    Scratch& s = *scratch_;
    const size_t n = pass.num_tokens;
    const size_t q_size = shape_.num_heads * shape_.head_dim, kv_size = shape_.num_kv_heads * shape_.head_dim;
    const size_t q_stride = round_up(q_size, kPanel), kv_stride = round_up(kv_size, kPanel);
    const size_t wide_stride = round_up(shape_.hidden, kPanel), long_stride = round_up(shape_.intermediate, kInt8Group);
    const size_t mixed_stride = round_up(q_size, kInt8Group);
    const auto activate = shape_.activation == Activation::gelu ? kernels().layer.gelu_mul : kernels().layer.silu_mul;
    // Where nothing is read of what the last layer makes, it only leaves its keys and values behind.
    const bool only_keeps = pass.wanted.empty() && std::none_of(pass.taps.begin(), pass.taps.end(), [&](const auto& tap) {
        return tap.first == pass.num_layers;
    });
    const auto store_all = [&](size_t layer) {  // sixteen tokens by one thread, as those of a page share cache lines
        const size_t num_groups = (n + kPageTokens - 1) / kPageTokens;
        team_->each(num_groups * shape_.num_kv_heads, [&](size_t j) {
            const size_t first = j / shape_.num_kv_heads * kPageTokens, end = std::min(first + kPageTokens, n);
            for (size_t t = first; t < end; ++t) store(pass, kv, layer, t, j % shape_.num_kv_heads);
        });
    };
    team_->each(n, [&](size_t t) { start_token(pass, t); });
    if (weights_.fuse) fuse_features(pass, thread);
    for (size_t i = 0; i < pass.num_layers; ++i) {
        const Layer& layer = weights_.layers[i];
        team_->each(n, [&](size_t t) {
            next_layer(pass, i, t);
            float* const normed = s.own[thread].normed.data();
            norm(&s.hidden[t * shape_.hidden], layer.attn_norm, shape_.hidden, shape_.norm_eps, normed);
            if (!layer.feature_norm.empty()) read_feature(pass, t, normed + shape_.hidden);
            pad(normed, layer.q->in());
            s.wide.set(t, normed, layer.q->type(), layer.q->in());
        });
        const Product keys{layer.k.get(), &s.wide, s.k.data(), kv_stride, &layer.k_bias};
        const Product values{layer.v.get(), &s.wide, s.v.data(), kv_stride, &layer.v_bias};
        if (only_keeps && i + 1 == pass.num_layers) {
            multiply_all(*team_, {keys, values}, n);
            return store_all(i);
        }
        multiply_all(*team_, {{layer.q.get(), &s.wide, s.q.data(), q_stride, &layer.q_bias}, keys, values}, n);
        if (!s.stores_itself) store_all(i);
        attend(pass, kv, i, thread);
        team_->each(n, [&](size_t t) { s.narrow.set(t, &s.mixed[t * mixed_stride], layer.o->type(), q_size); });
        multiply_all(*team_, {{layer.o.get(), &s.narrow, s.delta.data(), wide_stride, &layer.o_bias}}, n);
        team_->each(n, [&](size_t t) {
            float* const normed = s.own[thread].normed.data();
            add_delta(t, layer.attn_post_norm);
            norm(&s.hidden[t * shape_.hidden], layer.mlp_norm, shape_.hidden, shape_.norm_eps, normed);
            pad(normed, shape_.hidden);
            s.wide.set(t, normed, layer.gate->type(), shape_.hidden);
        });
        multiply_all(*team_, {{layer.gate.get(), &s.wide, s.gate.data(), long_stride, &layer.gate_bias},
                  {layer.up.get(), &s.wide, s.up.data(), long_stride, &layer.up_bias}},
                 n);
        team_->each(n, [&](size_t t) {
            float* gate = &s.gate[t * long_stride];
            activate(gate, &s.up[t * long_stride], round_up(shape_.intermediate, kPageTokens));
            std::fill(gate + shape_.intermediate, gate + long_stride, 0.0f);
            s.long_.set(t, gate, layer.down->type(), shape_.intermediate);
        });
        multiply_all(*team_, {{layer.down.get(), &s.long_, s.delta.data(), wide_stride, &layer.down_bias}}, n);
    }
    team_->each(n, [&](size_t t) { next_layer(pass, pass.num_layers, t); });
    choose(pass, thread);
}

void Decoder::start_token(const Pass& pass, size_t token) {
    Scratch& s = *scratch_;
    float* hidden = &s.hidden[token * shape_.hidden];
    weights_.embed->row(static_cast<size_t>(pass.token_ids[token]), hidden);
    for (size_t i = 0; i < shape_.hidden; ++i) hidden[i] *= shape_.embed_scale;
    for (size_t i = 0; i < num_angles(); ++i) {
        const float angle = static_cast<float>(pass.positions[token]) * weights_.inverse_frequencies[i];
        s.cosines[token * num_angles() + i] = std::cos(angle);
        s.sines[token * num_angles() + i] = std::sin(angle);
    }
}

// Add what the layer before left over, and hand the residual stream to whoever taps it.
void Decoder::next_layer(const Pass& pass, size_t index, size_t token) {
    Scratch& s = *scratch_;
    float* hidden = &s.hidden[token * shape_.hidden];
    if (index > 0) add_delta(token, weights_.layers[index - 1].mlp_post_norm);
    for (const auto& [after, to] : pass.taps)
        if (after == index) std::copy_n(hidden, shape_.hidden, to + token * shape_.hidden);
}

// Add what a block made of a token to the residual stream, normed where the family does so.
void Decoder::add_delta(size_t token, const std::vector<float>& norm) {
    float* delta = &scratch_->delta[token * round_up(shape_.hidden, kPanel)];
    const auto& kernel = kernels().layer;
    if (!norm.empty()) kernel.rms_norm(delta, norm.data(), shape_.hidden, shape_.norm_eps, delta);
    kernel.add(&scratch_->hidden[token * shape_.hidden], delta, shape_.hidden);
}

// Bring a token's feature, normed, to where the first layer reads it; the residual stream goes on from the feature.
void Decoder::read_feature(const Pass& pass, size_t token, float* normed) {
    const float* feature = pass.features + token * shape_.hidden;
    kernels().layer.rms_norm(feature, weights_.layers[0].feature_norm.data(), shape_.hidden, shape_.norm_eps, normed);
    std::copy_n(shape_.norms_residual ? normed : feature, shape_.hidden, &scratch_->hidden[token * shape_.hidden]);
}

// Fuse each token's embedding with its feature: what the layers begin with.
void Decoder::fuse_features(const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    const size_t hidden = shape_.hidden, stride = round_up(hidden, kPanel);
    team_->each(pass.num_tokens, [&](size_t t) {
        auto& read = s.own[thread].normed;
        std::fill(read.begin(), read.end(), 0.0f);
        norm(&s.hidden[t * hidden], weights_.embed_norm, hidden, shape_.norm_eps, read.data());
        std::copy_n(pass.features + t * hidden, hidden, read.data() + hidden);
        s.wide.set(t, read.data(), weights_.fuse->type(), 2 * hidden);
    });
    multiply_all(*team_, {{weights_.fuse.get(), &s.wide, s.delta.data(), stride, &weights_.fuse_bias}}, pass.num_tokens);
    team_->each(pass.num_tokens, [&](size_t t) { std::copy_n(&s.delta[t * stride], hidden, &s.hidden[t * hidden]); });
}

// Norm one head where the family does so, rotate it to its token's position, and scale it. May work in place.
void Decoder::turn(const float* head, const std::vector<float>& norm, size_t rope, size_t token, float scale, float* to) const {
    const size_t dim = shape_.head_dim, at = token * num_angles() + rope * dim / 2;
    const auto& kernel = kernels().layer;
    if (!norm.empty()) kernel.rms_norm(head, norm.data(), dim, shape_.norm_eps, to);
    kernel.rotate(norm.empty() ? head : to, &scratch_->cosines[at], &scratch_->sines[at], dim, scale, to);
}

void Decoder::store(const Pass& pass, const KVStore& kv, size_t index, size_t token, size_t kv_head) {
    const size_t dim = shape_.head_dim, stride = round_up(shape_.num_kv_heads * dim, kPanel);
    const size_t slot = static_cast<size_t>(pass.slots[token]), place = kv.place(slot / kPageTokens, kv_head);
    float* key = &scratch_->k[token * stride + kv_head * dim];
    turn(key, weights_.layers[index].k_norm, weights_.layers[index].rope, token, 1.0f, key);
    kv.kernels().write(static_cast<uint8_t*>(kv.keys(index)) + place, static_cast<uint8_t*>(kv.values(index)) + place,
                       slot % kPageTokens, kv.padded_dim(), dim, key, &scratch_->v[token * stride + kv_head * dim]);
}

// Attention --------------------------------------------------------------------------------------

// The first key that a token of a row sees.
size_t Decoder::first_key(const Pass& pass, size_t row, size_t token, size_t window) {
    const auto first = static_cast<size_t>(pass.first_keys[row]), end = static_cast<size_t>(pass.positions[token]) + 1;
    return window && end > window ? std::max(first, end - window) : first;
}

// Where the attention of a tile begins. Behind the row's own first key it steps by as many keys as a kernel sums up at
// once: these groups then lie alike for every tile, and so for every chunk.
size_t Decoder::first_of_tile(const Pass& pass, const Tile& tile, size_t window) {
    const auto first = static_cast<size_t>(pass.first_keys[tile.row]);
    const size_t key = first_key(pass, tile.row, tile.first, window), page = first / kPageTokens * kPageTokens;
    const size_t start = page + (key - page) / kKeysAtOnce * kKeysAtOnce;
    return std::max(first, start);
}

// How many of a tile's tokens, its first ones, see nothing of a span.
size_t Decoder::num_before(const Pass& pass, const Tile& tile, size_t span) {
    size_t count = 0;
    while (static_cast<size_t>(pass.positions[tile.first + count]) < span * kSpan) ++count;
    return count;
}

void Decoder::attend(const Pass& pass, const KVStore& kv, size_t index, size_t thread) {
    Scratch& s = *scratch_;
    const size_t group = shape_.num_heads / shape_.num_kv_heads, dim = kv.padded_dim();
    const auto& merge = kernels().attention.merge;
    Scratch::Own& own = s.own[thread];
    const size_t window = weights_.layers[index].window;
    const auto first_span = [&](const Tile& tile) { return first_of_tile(pass, tile, window) / kSpan; };
    const auto gather = [&](const Tile& tile, auto&& span_of) {
        const size_t count = tile.count * group;
        std::fill_n(own.top_so_far.begin(), count, -kInfinity);
        std::fill_n(own.total_so_far.begin(), count, 0.0f);
        std::fill_n(own.mixed_so_far.begin(), count * dim, 0.0f);
        for (size_t span = first_span(tile); span < tile.num_spans; ++span) {
            const auto [tops, totals, mixed] = span_of(span);
            for (size_t i = 0; i < count; ++i) {
                const size_t token = tile.first + i / group, limit = static_cast<size_t>(pass.positions[token]) + 1;
                if (limit <= span * kSpan || first_key(pass, tile.row, token, window) >= (span + 1) * kSpan)
                    continue;  // this query sees nothing of the span
                merge(tops[i], totals[i], mixed + i * dim, dim, &own.top_so_far[i], &own.total_so_far[i],
                      &own.mixed_so_far[i * dim]);
            }
        }
        finish_tile(tile, own.total_so_far.data(), own.mixed_so_far.data());
    };
    struct Result {
        const float *tops, *totals, *mixed;
    };
    if (s.parts.empty()) {
        team_->each(s.tiles.size(), [&](size_t t) {
            gather_queries(pass, kv, index, s.tiles[t], 0, thread);
            if (const size_t span = first_span(s.tiles[t]); span + 1 == s.tiles[t].num_spans) {  // nothing to put together
                attend_span(pass, kv, index, s.tiles[t], span, 0, thread, own.tops.data(), own.totals.data(), own.mixed.data());
                return finish_tile(s.tiles[t], own.totals.data(), own.mixed.data());
            }
            gather(s.tiles[t], [&](size_t span) {
                attend_span(pass, kv, index, s.tiles[t], span, num_before(pass, s.tiles[t], span), thread,
                            own.tops.data(), own.totals.data(), own.mixed.data());
                return Result{own.tops.data(), own.totals.data(), own.mixed.data()};
            });
        });
        return;
    }
    const auto place = [&](const Tile& tile, size_t span) { return tile.partial + span * tile.count * group; };
    team_->each(s.parts.size(), [&](size_t i) {
        const Part& part = s.parts[i];
        const Tile& tile = s.tiles[part.tile];
        const size_t begin = std::max(part.first, first_span(tile));
        if (begin >= part.end) return;
        gather_queries(pass, kv, index, tile, num_before(pass, tile, begin), thread);
        for (size_t span = begin; span < part.end; ++span) {
            const size_t at = place(tile, span);
            attend_span(pass, kv, index, tile, span, num_before(pass, tile, span), thread, &s.tops[at], &s.totals[at],
                        &s.partials[at * dim]);
        }
    });
    team_->each(s.tiles.size(), [&](size_t t) {
        gather(s.tiles[t], [&](size_t span) {
            const size_t at = place(s.tiles[t], span);
            return Result{&s.tops[at], &s.totals[at], &s.partials[at * dim]};
        });
    });
}

// Bring the queries of a tile's tokens, from one on, into this thread's scratch: normed, rotated and scaled.
void Decoder::gather_queries(const Pass& pass, const KVStore& kv, size_t index, const Tile& tile, size_t from,
                             size_t thread) {
    Scratch::Own& own = scratch_->own[thread];
    const size_t group = shape_.num_heads / shape_.num_kv_heads, dim = shape_.head_dim, padded = kv.padded_dim();
    const size_t stride = round_up(shape_.num_heads * dim, kPanel), first = from * group;
    const Layer& layer = weights_.layers[index];
    for (size_t i = first; i < tile.count * group; ++i) {
        const size_t token = tile.first + i / group, head = tile.kv_head * group + i % group;
        float* to = &own.queries[i * query_stride(padded)];
        turn(&scratch_->q[token * stride + head * dim], layer.q_norm, layer.rope, token, shape_.query_scale, to);
        std::fill(to + dim, to + padded, 0.0f);
        own.starts[i] = static_cast<int64_t>(first_key(pass, tile.row, token, layer.window));
        own.limits[i] = pass.positions[token] + 1;
    }
    kv.kernels().prepare(&own.queries[first * query_stride(padded)], tile.count * group - first, padded, &own.query_units[first]);
}

// One span of a tile, whose queries from token `from` on are in this thread's scratch.
void Decoder::attend_span(const Pass& pass, const KVStore& kv, size_t index, const Tile& tile, size_t span, size_t from,
                          size_t thread, float* tops, float* totals, float* mixed) {
    Scratch& s = *scratch_;
    Scratch::Own& own = s.own[thread];
    const size_t group = shape_.num_heads / shape_.num_kv_heads, padded = kv.padded_dim(), first = from * group;
    for (size_t t = from; s.stores_itself && t < tile.count; ++t)
        if (static_cast<size_t>(pass.positions[tile.first + t]) / kSpan == span)
            store(pass, kv, index, tile.first + t, tile.kv_head);
    const size_t last = static_cast<size_t>(pass.positions[tile.first + tile.count - 1]) + 1;
    kv.kernels().attend({kv.keys(index), kv.values(index), pass.pages + tile.row * pass.max_pages,
                         (last + kPageTokens - 1) / kPageTokens, shape_.num_kv_heads, tile.kv_head, padded, tile.count * group - first,
                         std::max(span * kSpan, first_of_tile(pass, tile, weights_.layers[index].window)),
                         std::min(last, (span + 1) * kSpan), &own.queries[first * query_stride(padded)], &own.query_units[first],
                         &own.starts[first], &own.limits[first], own.scores.data(), own.units.data(), tops + first, totals + first,
                         mixed + first * padded});
}

void Decoder::finish_tile(const Tile& tile, const float* totals, const float* mixed) {
    const size_t group = shape_.num_heads / shape_.num_kv_heads, dim = shape_.head_dim;
    const size_t padded = round_up(dim, kPageTokens), stride = round_up(shape_.num_heads * dim, kInt8Group);
    for (size_t i = 0; i < tile.count * group; ++i) {
        float* to = &scratch_->mixed[(tile.first + i / group) * stride + (tile.kv_head * group + i % group) * dim];
        kernels().layer.scale(mixed + i * padded, dim, 1.0f / totals[i], to);
    }
}

// The head ---------------------------------------------------------------------------------------

void Decoder::norm_last(float* state) const {
    norm(state, weights_.final_norm, shape_.hidden, shape_.norm_eps, state);
}

void Decoder::choose(const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    if (pass.wanted.empty()) return;
    team_->each(pass.wanted.size(), [&](size_t i) {
        float* const normed = s.own[thread].normed.data();
        norm(&s.hidden[static_cast<size_t>(pass.wanted[i]) * shape_.hidden], weights_.final_norm, shape_.hidden,
             shape_.norm_eps, normed);
        pad(normed, shape_.hidden);
        s.wide.set(i, normed, weights_.head->type(), shape_.hidden);
    });
    const Matrix& head = *weights_.head;
    choose_tiles(pass, thread, [&](size_t panel, size_t num_panels, size_t first, size_t end, float* tile) {
        head.multiply(panel, num_panels, s.wide, first, end, tile, kHeadTile);
    });
}

// Choose for every wanted token. fill(panel, num_panels, first, end, tile): writes the logits of some of the head's panels
// for the wanted tokens first..end.
template <class Fill>
void Decoder::choose_tiles(const Pass& pass, size_t thread, const Fill& fill) {
    team_->each((pass.vocab + kHeadTile - 1) / kHeadTile, [&](size_t tile) { choose_tile(pass, tile, thread, fill); });
    if (std::none_of(pass.chooses.begin(), pass.chooses.end(), [](const Choose& c) { return c.kind == Kind::sampled; })) return;
    team_->each(pass.wanted.size(), [&](size_t i) { choose_sampled(pass, i, thread); });
}

// Choose from a whole row of logits; those of a head with ids of its own are spread to the row they stand for.
void Decoder::choose_sampled(const Pass& pass, size_t index, size_t thread) {
    const Choose& how = pass.chooses[index];
    if (how.kind != Kind::sampled) return;
    Scratch::Own& own = scratch_->own[thread];
    const float* row = pass.logits + scratch_->logit_row[index] * pass.vocab;
    size_t vocab = pass.vocab;
    if (!weights_.token_ids.empty()) {
        own.spread.assign(shape_.vocab, -kInfinity);
        for (size_t i = 0; i < pass.vocab; ++i) own.spread[weights_.token_ids[i]] = row[i];
        row = own.spread.data(), vocab = shape_.vocab;
    }
    Sampler<float>& sampler = own.sampler;
    sampler.load(row, vocab, how.temperature, how.edits);
    double ahead = 0.0;
    pass.chosen[index] = how.temperature > 0.0 ? sampler.choose(how.filters, how.key, pass.margins ? &ahead : nullptr) : sampler.argmax();
    if (pass.margins && pass.chosen[index] >= 0)
        pass.margins[index] =
            static_cast<float>(margin(how.temperature > 0.0 ? ahead : sampler.lead(), how.temperature));
}

template <class Fill>
void Decoder::choose_tile(const Pass& pass, size_t tile, size_t thread, const Fill& fill) {
    Scratch& s = *scratch_;
    Scratch::Own& own = s.own[thread];
    const size_t start = tile * kHeadTile, count = std::min(kHeadTile, pass.vocab - start);
    const TileIds ids{start, count, weights_.token_ids.empty() ? nullptr : &weights_.token_ids[start]};
    const size_t panel = tile * kHeadPanels, num_panels = std::min(kHeadPanels, weights_.head->num_panels() - panel);
    for (size_t first = 0; first < pass.wanted.size(); first += kHeadRows) {
        const size_t end = std::min(first + kHeadRows, pass.wanted.size());
        fill(panel, num_panels, first, end, own.tile.data());
        for (size_t i = first; i < end; ++i) {
            float* row = &own.tile[(i - first) * kHeadTile];
            std::fill(row + count, row + kHeadTile, -kInfinity);
            if (pass.chooses[i].wants_logits())
                std::copy_n(row, count, pass.logits + s.logit_row[i] * pass.vocab + start);
            else
                choose_in_tile(pass.chooses[i], row, ids, own.z.data(), own.bounds.data(), pass.margins != nullptr,
                               s.best[thread * pass.wanted.size() + i]);
        }
    }
}

// The relay --------------------------------------------------------------------------------------

void Decoder::relay_places(const std::vector<const float*>& first, const std::vector<const float*>& normed, Lines<float>& sums) {
    Scratch& s = *scratch_;
    const Relay& relay = weights_.relay;
    const size_t n = normed.size(), hidden = shape_.hidden, stride = round_up(2 * relay.inner, kPanel);
    finish();
    s.wide.reserve(n, 2 * hidden);
    grow(sums, n * stride);
    team_->run([&](size_t thread) {
        auto& row = s.own[thread].normed;
        team_->each(n, [&](size_t i) {
            std::fill(row.begin(), row.end(), 0.0f);
            std::copy_n(first[i], hidden, row.data());
            std::copy_n(normed[i], hidden, &row[hidden]);
            s.wide.set(i, row.data(), relay.place->type(), 2 * hidden);
        });
        multiply_all(*team_, {{relay.place.get(), &s.wide, sums.data(), stride, nullptr}}, n);
    });
}

void Decoder::relay(const Place& place, const Pass& pass) {
    Scratch& s = *scratch_;
    const Relay& relay = weights_.relay;
    const size_t n = place.num_rows;
    finish();
    s.wide.reserve(n, shape_.hidden + relay.size);
    s.long_.reserve(n, relay.inner);
    s.narrow.reserve(n, relay.size);
    grow(s.up, n * round_up(2 * relay.inner, kPanel));
    grow(s.delta, n * round_up(relay.size, kPanel));
    for (auto& own : s.own) grow(own.also, kHeadRows * kHeadTile);
    plan_choices(pass);
    team_->run([&](size_t thread) { run_relay(place, pass, thread); });
    if (place.token_ids) finish_choices(pass);
}

void Decoder::run_relay(const Place& place, const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    const Relay& relay = weights_.relay;
    const Matrix& head = *weights_.head;
    const auto& kernel = kernels().layer;
    const size_t n = place.num_rows, size = relay.size, inner = relay.inner, hidden = shape_.hidden;
    const size_t stride = round_up(2 * inner, kPanel), told_stride = round_up(size, kPanel);
    auto& row = s.own[thread].normed;
    if (place.token_ids) {
        team_->each(n, [&](size_t i) {
            std::fill(row.begin(), row.end(), 0.0f);
            weights_.embed->row(static_cast<size_t>(place.token_ids[i]), row.data());
            for (size_t j = 0; j < hidden; ++j) row[j] *= shape_.embed_scale;
            norm(row.data(), relay.embed_norm, hidden, shape_.norm_eps, row.data());
            std::copy_n(place.before + i * size, size, &row[hidden]);
            s.wide.set(i, row.data(), relay.known->type(), hidden + size);
        });
        multiply_all(*team_, {{relay.known.get(), &s.wide, s.up.data(), stride, nullptr}}, n);
    }
    team_->each(n, [&](size_t i) {
        const size_t padded = round_up(inner, kInt8Group);
        const float *sums = place.sums[i], *known = &s.up[i * stride];
        float *gate = row.data(), *value = gate + padded;
        std::fill(row.begin(), row.end(), 0.0f);
        std::copy_n(sums, inner, gate);
        std::copy_n(sums + inner, inner, value);
        if (place.token_ids) {
            kernel.add(gate, known, inner);
            kernel.add(value, known + inner, inner);
        }
        kernel.silu_mul(gate, value, padded);
        s.long_.set(i, gate, relay.tell->type(), inner);
    });
    multiply_all(*team_, {{relay.tell.get(), &s.long_, s.delta.data(), told_stride, nullptr}}, n);
    team_->each(n, [&](size_t i) {
        float* told = place.told + i * size;
        for (size_t j = 0; j < size; ++j) told[j] = std::tanh(s.delta[i * told_stride + j]);
        std::fill(row.begin(), row.end(), 0.0f);
        std::copy_n(told, size, row.data());
        s.narrow.set(i, row.data(), relay.written->type(), size);
        if (!place.logits.empty()) return;
        std::fill(row.begin(), row.end(), 0.0f);
        std::copy_n(place.normed[i], hidden, row.data());
        s.wide.set(i, row.data(), head.type(), hidden);
    });
    if (!place.token_ids) return;
    choose_tiles(pass, thread, [&](size_t panel, size_t num_panels, size_t first, size_t end, float* tile) {
        const size_t start = panel * kPanel, count = std::min(num_panels * kPanel, pass.vocab - start);
        float* also = s.own[thread].also.data();
        relay.written->multiply(panel, num_panels, s.narrow, first, end, tile, kHeadTile);
        if (place.logits.empty()) head.multiply(panel, num_panels, s.wide, first, end, also, kHeadTile);
        for (size_t i = first; i < end; ++i)
            kernels().layer.add(tile + (i - first) * kHeadTile,
                                place.logits.empty() ? also + (i - first) * kHeadTile : place.logits[i] + start, count);
    });
}

}  // namespace paceline
