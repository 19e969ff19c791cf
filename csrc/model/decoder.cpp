#include "model/decoder.h"

#include <algorithm>
#include <cmath>

#include "model/scratch.h"

namespace paceline {

Decoder::Decoder(const Shape& shape, Weights weights, std::shared_ptr<ThreadPool> pool, std::shared_ptr<RankMemory> ranks)
    : shape_(shape), weights_(std::move(weights)), pool_(std::move(pool)), ranks_(std::move(ranks)),
      scratch_(new Scratch, [](Scratch* s) { delete s; }) {
    scratch_->threads.resize(pool_->size());
    const size_t inputs = std::max(2 * shape.hidden, shape.hidden + 2 * weights_.corrector.rank);
    const size_t width = round_up(std::max(inputs, shape.num_heads * shape.head_dim), kInt8Group);
    for (auto& own : scratch_->threads) own.normed.assign(width, 0.0f);
    for (Layer& layer : weights_.layers) {
        auto& found = scratch_->tilings;
        const auto alike = [&](const Tiling& tiling) { return tiling.heads == layer.heads; };
        layer.tiling = static_cast<size_t>(std::find_if(found.begin(), found.end(), alike) - found.begin());
        if (layer.tiling == found.size()) found.push_back({layer.heads});
    }
    auto& ids = weights_.token_ids;
    if (!ids.empty()) ids.resize(round_up(ids.size(), kHeadTile), ids.back());  // padded as tiles of logits are
}

size_t Decoder::weight_bytes() const {
    size_t total = weights_.head && weights_.head != weights_.embed ? weights_.head->bytes() : 0;
    for (const auto* m : {&weights_.embed, &weights_.inputs.embed, &weights_.inputs.project})
        if (*m) total += (*m)->bytes();
    if (weights_.fuse) total += weights_.fuse->bytes();
    for (const auto* m : {&weights_.corrector.before, &weights_.corrector.mix, &weights_.corrector.out})
        if (*m) total += (*m)->bytes();
    for (const Layer& layer : weights_.layers) {
        for (const auto* m : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down, &layer.input_gate, &layer.input_out})
            if (*m) total += (*m)->bytes();
        if (layer.mixture) total += layer.mixture->bytes();
    }
    return total;
}

void Decoder::forward(const Pass& pass, const KVStore& kv) {
    finish();
    plan(pass);
    pool_->run([&](size_t thread) { run(pass, kv, thread); });
    finish_choices(pass);
}

void Decoder::begin(Pass pass, const KVStore& kv) {
    finish();
    plan(pass);
    begun_ = std::move(pass);
    pool_->begin([this, &kv](size_t thread) { run(*begun_, kv, thread); });
}

void Decoder::finish() {
    if (!begun_) return;
    pool_->finish();
    finish_choices(*begun_);
    begun_.reset();
}

void Decoder::norm_last(float* state) const { norm(state, weights_.final_norm, shape_.hidden, shape_.norm_eps, state); }

void Decoder::plan(const Pass& pass) {
    Scratch& s = *scratch_;
    const size_t n = pass.num_tokens, q_size = shape_.num_heads * shape_.head_dim, kv_size = shape_.kv_size;
    const size_t whole_q = q_size * shape_.num_ranks, inner = shape_.intermediate * shape_.num_ranks;
    grow(s.hidden, n * shape_.hidden);
    grow(s.delta, n * round_up(shape_.hidden, kPanel));
    grow(s.cosines, n * num_angles());
    grow(s.sines, n * num_angles());
    grow(s.q, n * round_up(q_size, kPanel));
    grow(s.k, n * round_up(kv_size, kPanel));
    grow(s.v, n * round_up(kv_size, kPanel));
    grow(s.mixed, n * round_up(whole_q, kInt8Group));
    grow(s.gate, n * round_up(inner, kInt8Group));
    grow(s.up, n * round_up(inner, kInt8Group));
    s.hidden_q.reserve(std::max(n, pass.wanted.size()), (shape_.reads_features ? 2 : 1) * shape_.hidden);
    s.attn_q.reserve(n, whole_q);
    s.ffn_q.reserve(n, inner);
    plan_experts(pass);
    if (weights_.inputs.embed) plan_inputs(pass);
    plan_tiles(pass);
    plan_pages(pass);
    plan_choices(pass);
}

// Note the pages that a pass of many tokens reads. Neighbouring rows that share a beginning have its pages once.
void Decoder::plan_pages(const Pass& pass) {
    auto& found = scratch_->pages;
    found.clear();
    if (pass.num_tokens < kTokensAhead * pool_->size() * shape_.num_ranks) return;
    for (size_t row = 0; row < pass.num_rows; ++row) {
        const int64_t* const own = pass.pages + row * pass.max_pages;
        const size_t keys = pass.end_of_keys(row, static_cast<size_t>(pass.cu_len[row + 1]) - 1);
        for (size_t i = static_cast<size_t>(pass.first_keys[row]) / kPageTokens; i * kPageTokens < keys; ++i)
            if (row == 0 || own[i] != own[static_cast<ptrdiff_t>(i) - static_cast<ptrdiff_t>(pass.max_pages)]) found.push_back(own[i]);
    }
}

// Let a thread's products prefetch its share of a layer's pages, until the next call; nothing behind the last layer.
void Decoder::expect_pages(const Pass& pass, const KVStore& kv, size_t index, size_t thread) {
    const auto& pages = scratch_->pages;
    pages_ahead = {};
    if (index >= pass.num_layers || weights_.layers[index].window) return;
    const size_t layer = weights_.layers[index].kv;
    const auto share = [&](size_t t) { return pages.data() + pages.size() * t / pool_->size(); };
    pages_ahead = {static_cast<const uint8_t*>(kv.keys(layer)), static_cast<const uint8_t*>(kv.values(layer)), share(thread),
                   share(thread + 1), kv.heads_per_page(layer) * kv.kernels().page_bytes(kv.padded_dim(layer))};
}

void Decoder::run(const Pass& pass, const KVStore& kv, size_t thread) {
    Scratch& s = *scratch_;
    pool_->each(pass.num_tokens, [&](size_t t) { start_token(pass, t); });
    gather(s.hidden, shape_.hidden, shape_.hidden, pass.num_tokens, 1);
    if (weights_.fuse) fuse_features(pass, thread);
    if (weights_.inputs.embed) make_inputs(pass, thread);
    for (size_t layer = 0; layer < pass.num_layers; ++layer) {
        if (!run_attention(pass, kv, layer, thread)) return expect_pages(pass, kv, pass.num_layers, thread);
        run_ffn(pass, layer, thread);
        if (weights_.inputs.embed) run_input(pass, layer, thread);
    }
    if (follows()) return;
    pool_->each(pass.num_tokens, [&](size_t t) { begin_layer(pass, pass.num_layers, t); });
    choose(pass, thread);
}

// Give every rank the rows of all. Each rank has made `part` numbers of a row, which lie at its beginning. num_parts: 1 if only rank 0
// has made numbers.
void Decoder::gather(AlignedVector<float>& rows, size_t stride, size_t part, size_t count, size_t num_parts) {
    if (!ranks_) return;
    const size_t at_once = RankMemory::kRoom / stride, own = ranks_->rank() * part;
    for (size_t first = 0; first < count; first += at_once) {
        const size_t some = std::min(at_once, count - first);
        float* const found = &rows[first * stride];
        if (ranks_->rank() < num_parts)
            pool_->each(some, [&](size_t t) { std::copy_n(found + t * stride, part, ranks_->next() + t * stride + own); });
        pool_->each(1, [&](size_t) { ranks_->meet(); });
        pool_->each(some, [&](size_t t) { std::copy_n(ranks_->last() + t * stride, num_parts * part, found + t * stride); });
    }
}

// True if nobody reads the output of a layer, and layers behind it store nothing. Ranks other than 0 cannot tell.
bool Decoder::only_stores(const Pass& pass, size_t index) const {
    if (ranks_) return false;
    for (size_t i = index + 1; i < pass.num_layers; ++i)
        if (weights_.layers[i].k) return false;
    return pass.wanted.empty() && std::none_of(pass.taps.begin(), pass.taps.end(), [&](const auto& tap) { return tap.first > index; });
}

// Run the attention block of a layer. Returns false if it `only_stores`: then it has stored its keys and values, and the pass is over.
bool Decoder::run_attention(const Pass& pass, const KVStore& kv, size_t index, size_t thread) {
    Scratch& s = *scratch_;
    const Layer& layer = weights_.layers[index];
    const size_t n = pass.num_tokens, q_size = shape_.num_heads * layer.heads.dim;
    const size_t q_stride = round_up(q_size, kPanel), kv_stride = round_up(layer.heads.kv_size(), kPanel);
    pool_->each(n, [&](size_t t) {
        begin_layer(pass, index, t);
        float* const normed = s.threads[thread].normed.data();
        norm(&s.hidden[t * shape_.hidden], layer.attn_norm, shape_.hidden, shape_.norm_eps, normed);
        if (!layer.feature_norm.empty()) read_feature(pass, t, normed + shape_.hidden);
        pad(normed, layer.q->in());
        s.hidden_q.set(t, normed, layer.q->type(), layer.q->in());
    });
    const Product keys{layer.k.get(), &s.hidden_q, s.k.data(), kv_stride, &layer.k_bias};
    const Product values{layer.v.get(), &s.hidden_q, s.v.data(), kv_stride, &layer.v_bias};
    const auto norm_all = [&](const std::vector<float>& weight, AlignedVector<float>& rows, size_t stride) {
        if (weight.empty()) return;
        pool_->each(n, [&](size_t t) { norm(&rows[t * stride], weight, weight.size(), shape_.norm_eps, &rows[t * stride]); });
    };
    if (only_stores(pass, index)) {
        if (!layer.k) return false;
        multiply_all(*pool_, {keys, values}, n);
        norm_all(layer.all_k_norm, s.k, kv_stride);
        store_all(pass, kv, index);
        return false;
    }
    const Product queries{layer.q.get(), &s.hidden_q, s.q.data(), q_stride, &layer.q_bias};
    layer.k ? multiply_all(*pool_, {queries, keys, values}, n) : multiply_all(*pool_, {queries}, n);
    norm_all(layer.all_q_norm, s.q, q_stride);
    norm_all(layer.all_k_norm, s.k, kv_stride);
    if (layer.k && !s.tilings[layer.tiling].stores_itself) store_all(pass, kv, index);
    attend(pass, kv, index, thread);
    expect_pages(pass, kv, index + 1, thread);
    const size_t mixed_size = layer.o->in(), mixed_stride = round_up(mixed_size, kInt8Group), delta_stride = round_up(shape_.hidden, kPanel);
    gather(s.mixed, mixed_stride, q_size, n, shape_.num_ranks);
    pool_->each(n, [&](size_t t) {
        float* const mixed = &s.mixed[t * mixed_stride];
        pad(mixed, mixed_size);  // layers with larger heads have written there
        s.attn_q.set(t, mixed, layer.o->type(), mixed_size);
    });
    multiply_all(*pool_, {{layer.o.get(), &s.attn_q, s.delta.data(), delta_stride, &layer.o_bias}}, n);
    gather(s.delta, delta_stride, layer.o->out(), n, shape_.num_ranks);
    return true;
}

void Decoder::run_ffn(const Pass& pass, size_t index, size_t thread) {
    Scratch& s = *scratch_;
    const Layer& layer = weights_.layers[index];
    const size_t n = pass.num_tokens;
    pool_->each(n, [&](size_t t) {
        float* const normed = s.threads[thread].normed.data();
        add_delta(t, layer.attn_post_norm);
        norm(&s.hidden[t * shape_.hidden], layer.mlp_norm, shape_.hidden, shape_.norm_eps, normed);
        pad(normed, shape_.hidden);
        s.hidden_q.set(t, normed, layer.feed_type(), shape_.hidden);
        if (layer.mixture) route_token(*layer.mixture, t, normed);
    });
    layer.mixture ? run_experts(pass, index) : run_dense(layer, n);
}

// Run the feed-forward network that all tokens share, from `hidden_q` to `delta`.
void Decoder::run_dense(const Layer& layer, size_t n) {
    Scratch& s = *scratch_;
    const size_t size = layer.gate->out(), whole = layer.down->in();  // widths: of this rank, of all ranks
    const size_t stride = round_up(whole, kInt8Group), delta_stride = round_up(shape_.hidden, kPanel);
    const Product gates{layer.gate.get(), &s.hidden_q, s.gate.data(), stride, &layer.gate_bias};
    multiply_all(*pool_, {gates, {layer.up.get(), &s.hidden_q, s.up.data(), stride, &layer.up_bias}}, n);
    pool_->each(n, [&](size_t t) {
        float* gate = &s.gate[t * stride];
        activate(gate, &s.up[t * stride], size, stride);
        if (!ranks_) s.ffn_q.set(t, gate, layer.down->type(), size);
    });
    if (ranks_) {
        gather(s.gate, stride, size, n, shape_.num_ranks);
        pool_->each(n, [&](size_t t) { s.ffn_q.set(t, &s.gate[t * stride], layer.down->type(), whole); });
    }
    multiply_all(*pool_, {{layer.down.get(), &s.ffn_q, s.delta.data(), delta_stride, &layer.down_bias}}, n);
    gather(s.delta, delta_stride, layer.down->out(), n, shape_.num_ranks);
}

// Multiply a row of `up` by the activation of `gate`, in place; zeros follow as far as products read.
void Decoder::activate(float* gate, const float* up, size_t size, size_t stride) const {
    const auto& kernel = kernels().layer;
    switch (const size_t padded = round_up(size, kPageTokens); shape_.activation) {
        case Activation::silu: kernel.silu_mul(gate, up, padded); break;
        case Activation::gelu_tanh: kernel.gelu_mul(gate, up, padded); break;
        case Activation::clamped_silu: kernel.clamped_mul(gate, up, padded);
    }
    std::fill(gate + size, gate + stride, 0.0f);
}

void Decoder::start_token(const Pass& pass, size_t token) {
    Scratch& s = *scratch_;
    float* hidden = &s.hidden[token * shape_.hidden];
    if (weights_.embed) weights_.embed->row(static_cast<size_t>(pass.token_ids[token]), hidden);
    for (size_t i = 0; i < shape_.hidden; ++i) hidden[i] *= shape_.embed_scale;
    turn(pass, token);
}

// Compute the sines and cosines of a token's position.
void Decoder::turn(const Pass& pass, size_t token) {
    Scratch& s = *scratch_;
    for (size_t i = 0; i < num_angles(); ++i) {
        const float angle = static_cast<float>(pass.positions[token]) * weights_.inverse_frequencies[i];
        s.cosines[token * num_angles() + i] = std::cos(angle) * weights_.magnitudes[i];
        s.sines[token * num_angles() + i] = std::sin(angle) * weights_.magnitudes[i];
    }
}

// Add the output of the layer before to the residual stream, and copy the stream to the taps of this layer.
void Decoder::begin_layer(const Pass& pass, size_t layer, size_t token) {
    float* hidden = &scratch_->hidden[token * shape_.hidden];
    if (layer > 0) {
        const Layer& last = weights_.layers[layer - 1];
        add_delta(token, last.input_gate ? last.input_post_norm : last.mlp_post_norm);
        if (last.scale != 1.0f) kernels().layer.scale(hidden, shape_.hidden, last.scale, hidden);
    }
    for (const auto& [layers_before, to] : pass.taps)
        if (layers_before == layer) std::copy_n(hidden, shape_.hidden, to + token * shape_.hidden);
}

// Add a block's output for a token to the residual stream, after the block's own norm if it has one.
void Decoder::add_delta(size_t token, const std::vector<float>& norm) {
    float* delta = &scratch_->delta[token * round_up(shape_.hidden, kPanel)];
    const auto& kernel = kernels().layer;
    if (!norm.empty()) kernel.rms_norm(delta, norm.data(), shape_.hidden, shape_.norm_eps, delta);
    if (shape_.residual_scale != 1.0f) kernel.scale(delta, shape_.hidden, shape_.residual_scale, delta);
    kernel.add(&scratch_->hidden[token * shape_.hidden], delta, shape_.hidden);
}

// Write a token's normed feature to `normed`. The residual stream starts from the feature.
void Decoder::read_feature(const Pass& pass, size_t token, float* normed) {
    const float* feature = pass.features + token * shape_.hidden;
    kernels().layer.rms_norm(feature, weights_.layers[0].feature_norm.data(), shape_.hidden, shape_.norm_eps, normed);
    std::copy_n(shape_.norms_residual ? normed : feature, shape_.hidden, &scratch_->hidden[token * shape_.hidden]);
}

// Fuse each token's embedding with its feature, to the first layer's input.
void Decoder::fuse_features(const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    const size_t hidden = shape_.hidden, stride = round_up(hidden, kPanel);
    pool_->each(pass.num_tokens, [&](size_t t) {
        auto& row = s.threads[thread].normed;
        std::fill(row.begin(), row.end(), 0.0f);
        norm(&s.hidden[t * hidden], weights_.embed_norm, hidden, shape_.norm_eps, row.data());
        norm(pass.features + t * hidden, weights_.feature_norm, hidden, shape_.norm_eps, row.data() + hidden);
        s.hidden_q.set(t, row.data(), weights_.fuse->type(), 2 * hidden);
    });
    multiply_all(*pool_, {{weights_.fuse.get(), &s.hidden_q, s.delta.data(), stride, &weights_.fuse_bias}}, pass.num_tokens);
    pool_->each(pass.num_tokens, [&](size_t t) { std::copy_n(&s.delta[t * stride], hidden, &s.hidden[t * hidden]); });
}

// Norm one head if the layer has such a norm, rotate it to its token's position, and scale it. May work in place.
void Decoder::apply_rope(const Layer& layer, const float* head, const std::vector<float>& norm, size_t token, float scale, float* to) const {
    const size_t dim = layer.heads.dim, at = token * num_angles() + layer.rope * shape_.head_dim / 2;
    const auto& kernel = kernels().layer;
    if (!norm.empty()) kernel.rms_norm(head, norm.data(), dim, shape_.norm_eps, to);
    kernel.rotate(norm.empty() ? head : to, &scratch_->cosines[at], &scratch_->sines[at], dim, scale, to);
}

// The factor of the queries of a token.
float Decoder::query_scale(int64_t position) const {
    if (shape_.query_growth == 0.0f) return shape_.query_scale;
    const float contexts = std::floor(static_cast<float>(position) / shape_.query_context);
    return shape_.query_scale * (1.0f + shape_.query_growth * std::log(1.0f + contexts));
}

void Decoder::store(const Pass& pass, const KVStore& kv, size_t index, size_t token, size_t kv_head) {
    const Layer& layer = weights_.layers[index];
    const size_t dim = layer.heads.dim, stride = round_up(layer.heads.kv_size(), kPanel);
    float* key = &scratch_->k[token * stride + kv_head * dim];
    float* value = &scratch_->v[token * stride + kv_head * dim];
    apply_rope(layer, key, layer.k_norm, token, 1.0f, key);
    if (!layer.v_norm.empty()) norm(value, layer.v_norm, dim, shape_.norm_eps, value);
    const auto write = [&](size_t slot) {
        const size_t offset = kv.offset(layer.kv, slot / kPageTokens, kv_head);
        kv.kernels().write(static_cast<uint8_t*>(kv.keys(layer.kv)) + offset, static_cast<uint8_t*>(kv.values(layer.kv)) + offset,
                           slot % kPageTokens, kv.padded_dim(layer.kv), dim, key, value);
    };
    write(static_cast<size_t>(pass.slots[token]));
    for (size_t i = 0; i < pass.num_copies; ++i)
        if (static_cast<size_t>(pass.copies[2 * i]) == token) write(static_cast<size_t>(pass.copies[2 * i + 1]));
}

// Store the keys and values of all tokens. One thread takes sixteen tokens, as the tokens of a page share cache lines.
void Decoder::store_all(const Pass& pass, const KVStore& kv, size_t layer) {
    const size_t n = pass.num_tokens, num_groups = (n + kPageTokens - 1) / kPageTokens, num_kv = weights_.layers[layer].heads.num_kv;
    pool_->each(num_groups * num_kv, [&](size_t j) {
        const size_t first = j / num_kv * kPageTokens, end = std::min(first + kPageTokens, n);
        for (size_t t = first; t < end; ++t) store(pass, kv, layer, t, j % num_kv);
    });
}

}  // namespace paceline
