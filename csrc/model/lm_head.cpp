// The LM head and the choice of tokens, tile by tile: a row of logits is written only where a spec asks for it.
#include <algorithm>
#include <cmath>

#include "model/scratch.h"

namespace paceline {
namespace {

// The token ids of one tile: consecutive, or those of a map.
struct TileIds {
    size_t start, count;
    const uint32_t* map;  // [count], or null

    uint32_t operator[](size_t i) const { return map ? map[i] : static_cast<uint32_t>(start + i); }
};

// Call act(index in the tile, index of the edit) for each edited token of a tile.
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
    if (edits.count == 1) {  // a hint: a plain pass over the map is faster than searches
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

constexpr size_t kWordBits = 32;
static_assert(kHeadTile % kWordBits == 0);

// True if a mask allows a token of a tile; null allows all.
bool allows_some(const uint32_t* allowed, size_t start, size_t count) {
    if (!allowed) return true;
    const uint32_t* const words = allowed + start / kWordBits;
    return std::any_of(words, words + (count + kWordBits - 1) / kWordBits, [](uint32_t word) { return word != 0; });
}

// Offer the best token of one tile of logits [kHeadTile], padded with -inf: the same choice as `Sampler` makes for a whole row.
// z, bounds: scratch [kHeadTile]. margins: the second best is offered, too. allowed: a row's mask.
void offer_tile(const SamplingSpec& spec, const float* logits, const TileIds& ids, const uint32_t* allowed, float* z, float* bounds,
                bool margins, Best& best) {
    constexpr size_t blocks = kHeadTile / kBlock;
    const auto& kernel = kernels().vocabulary;
    const bool greedy = spec.temperature <= 0.0;
    const float inverse = greedy ? 1.0f : inverse_temperature(spec.temperature);
    float maxima[blocks];
    kernel.scale(logits, blocks, inverse, z, maxima);
    each_edited(ids, spec.edits, [&](size_t i, size_t edit) { z[i] = edited(logits[i], spec.edits, edit) * inverse; });
    if (allowed)
        for (size_t i = 0; i < ids.count; ++i)
            if (!(allowed[(ids.start + i) / kWordBits] >> (ids.start + i) % kWordBits & 1)) z[i] = -kInfinity;
    if (greedy) {
        for (int rank = 0; rank < (margins ? 2 : 1); ++rank) {
            const float top = kernel.maximum(z, kHeadTile);
            if (!(top >= best.floor(margins) && top > -kInfinity)) break;
            const size_t i = static_cast<size_t>(std::find(z, z + kHeadTile, top) - z);
            best.offer(top, ids[i]);
            z[i] = -kInfinity;
        }
        return;
    }
    if (ids.map)
        kernel.bound_ids(z, blocks, spec.key.k0, spec.key.k1, ids.map, bounds, maxima);
    else
        kernel.bound(z, blocks, spec.key.k0, spec.key.k1, ids[0], bounds, maxima);
    const auto offer = [&](size_t i) {
        if (z[i] > -kInfinity) best.offer(z[i] + gumbel(spec.key, ids[i]), ids[i]);
    };
    offer(static_cast<size_t>(std::max_element(bounds, bounds + kHeadTile) - bounds));  // few other bounds reach its score
    for (size_t b = 0; b < blocks; ++b) {
        if (maxima[b] < static_cast<float>(best.floor(margins))) continue;
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; ++i)
            if (!(bounds[i] < static_cast<float>(best.floor(margins)))) offer(i);
    }
}

}  // namespace

void Decoder::plan_choices(const Pass& pass) {
    Scratch& s = *scratch_;
    for (auto& own : s.threads) {
        grow(own.logits, kHeadRows * kHeadTile);
        grow(own.scaled, kHeadTile);
        grow(own.bounds, kHeadTile);
    }
    s.best.assign(pool_->size() * pass.wanted.size(), Best{});
    s.logit_row.resize(pass.wanted.size());
    size_t num_logit_rows = 0;
    for (size_t i = 0; i < pass.wanted.size(); ++i) s.logit_row[i] = pass.specs[i].wants_logits() ? num_logit_rows++ : 0;
}

void Decoder::choose(const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    if (pass.wanted.empty()) return;
    if (pass.masks.gate) pass.masks.gate->wait(false, std::memory_order_acquire);
    pool_->each(pass.wanted.size(), [&](size_t i) {
        float* const normed = s.threads[thread].normed.data();
        const float* hidden = &s.hidden[static_cast<size_t>(pass.wanted[i]) * shape_.hidden];
        norm(hidden, weights_.final_norm, shape_.hidden, shape_.norm_eps, normed);
        pad(normed, shape_.hidden);
        s.hidden_q.set(i, normed, weights_.head->type(), shape_.hidden);
    });
    choose_in_tiles(pass, thread, [&](size_t panel, size_t num_panels, size_t first, size_t end, float* tile) {
        weights_.head->multiply(panel, num_panels, s.hidden_q, first, end, tile, kHeadTile);
    });
}

void Decoder::choose_in_tiles(const Pass& pass, size_t thread, const FillTile& fill) {
    pool_->each((pass.vocab + kHeadTile - 1) / kHeadTile, [&](size_t tile) { choose_in_tile(pass, tile, thread, fill); });
    const auto is_sampled = [](const SamplingSpec& spec) { return spec.kind == SamplingKind::sampled; };
    if (std::none_of(pass.specs.begin(), pass.specs.end(), is_sampled)) return;
    pool_->each(pass.wanted.size(), [&](size_t i) { choose_sampled(pass, i, thread); });
}

// A tile in which no row may choose a token is not multiplied: where a grammar fixes the syntax, few tokens are allowed.
void Decoder::choose_in_tile(const Pass& pass, size_t tile, size_t thread, const FillTile& fill) {
    Scratch& s = *scratch_;
    auto& own = s.threads[thread];
    const size_t start = tile * kHeadTile, count = std::min(kHeadTile, pass.vocab - start);
    const TileIds ids{start, count, weights_.token_ids.empty() ? nullptr : &weights_.token_ids[start]};
    const size_t panel = tile * kHeadPanels, num_panels = std::min(kHeadPanels, weights_.head->num_panels() - panel);
    for (size_t first = 0; first < pass.wanted.size(); first += kHeadRows) {
        const size_t end = std::min(first + kHeadRows, pass.wanted.size());
        bool any = false;
        for (size_t i = first; i < end && !any; ++i) any = allows_some(pass.masks.of(i), start, count);
        if (any) fill(panel, num_panels, first, end, own.logits.data());
        for (size_t i = first; i < end; ++i) {
            float* row = &own.logits[(i - first) * kHeadTile];
            const uint32_t* allowed = pass.masks.of(i);
            const bool chooses = any && allows_some(allowed, start, count);
            if (chooses && shape_.logit_cap > 0.0f) kernels().layer.cap(row, kHeadTile, shape_.logit_cap);
            std::fill(chooses ? row + count : row, row + kHeadTile, -kInfinity);
            if (pass.specs[i].wants_logits())
                std::copy_n(row, count, pass.logits + s.logit_row[i] * pass.vocab + start);
            else if (chooses)
                offer_tile(pass.specs[i], row, ids, allowed, own.scaled.data(), own.bounds.data(), pass.margins != nullptr,
                           s.best[thread * pass.wanted.size() + i]);
        }
    }
}

// Choose from a whole row of logits. A draft vocabulary's logits are first spread over the target's ids.
void Decoder::choose_sampled(const Pass& pass, size_t index, size_t thread) {
    const SamplingSpec& spec = pass.specs[index];
    if (spec.kind != SamplingKind::sampled) return;
    auto& own = scratch_->threads[thread];
    const float* row = pass.logits + scratch_->logit_row[index] * pass.vocab;
    size_t vocab = pass.vocab;
    if (!weights_.token_ids.empty()) {
        own.vocab_logits.assign(shape_.vocab, -kInfinity);
        for (size_t i = 0; i < pass.vocab; ++i) own.vocab_logits[weights_.token_ids[i]] = row[i];
        row = own.vocab_logits.data(), vocab = shape_.vocab;
    }
    Sampler<float>& sampler = own.sampler;
    sampler.load(row, vocab, spec.temperature, spec.edits, pass.masks.of(index));
    const bool greedy = !(spec.temperature > 0.0);
    double ahead = 0.0;
    pass.chosen[index] = greedy ? sampler.argmax() : sampler.choose(spec.filters, spec.key, pass.margins ? &ahead : nullptr);
    if (pass.margins && pass.chosen[index] >= 0)
        pass.margins[index] = static_cast<float>(margin(greedy ? sampler.lead() : ahead, spec.temperature));
}

// Combine the best tokens that each thread found.
void Decoder::finish_choices(const Pass& pass) {
    const size_t num_wanted = pass.wanted.size();
    for (size_t i = 0; i < num_wanted; ++i) {
        if (pass.specs[i].kind == SamplingKind::sampled) continue;
        Best best;
        for (size_t thread = 0; thread < pool_->size(); ++thread) {
            const Best& own = scratch_->best[thread * num_wanted + i];
            if (own.id == kBroken) continue;
            best.offer(own.score, own.id);
            if (own.second_id != kBroken) best.offer(own.second, own.second_id);
        }
        const bool finite = best.id != kBroken && std::isfinite(best.score);
        const double ahead = margin(best.score - best.second, pass.specs[i].temperature);
        if (pass.margins && finite) pass.margins[i] = static_cast<float>(ahead);
        if (pass.second_ids && finite && best.second_id != kBroken) pass.second_ids[i] = best.second_id;
        pass.chosen[i] = pass.specs[i].kind == SamplingKind::logits ? kUnchosen : finite ? best.id : kBroken;
    }
}

}  // namespace paceline
