// Block heads: the context that their blocks read, and the choice of guesses one after another.
#include <algorithm>
#include <cmath>

#include "model/scratch.h"

namespace paceline {
namespace {

float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float dot(const float* a, const std::vector<float>& b, size_t first, size_t count) {
    float sum = 0.0f;
    for (size_t i = 0; i < count; ++i) sum += a[i] * b[first + i];
    return sum;
}

}  // namespace

// Every layer makes keys and values of the same features.
void Decoder::store_context(const Pass& pass, const KVStore& kv) {
    Scratch& s = *scratch_;
    const size_t n = pass.num_tokens, hidden = shape_.hidden, stride = round_up(shape_.kv_size, kPanel);
    finish();
    grow(s.cosines, n * num_angles());
    grow(s.sines, n * num_angles());
    grow(s.k, n * stride);
    grow(s.v, n * stride);
    s.hidden_q.reserve(n, hidden);
    pool_->run([&](size_t thread) {
        pool_->each(n, [&](size_t t) { turn(pass, t); });
        for (size_t index = 0; index < shape_.num_layers; ++index) {
            const Layer& layer = weights_.layers[index];
            pool_->each(n, [&](size_t t) {
                float* const row = s.threads[thread].normed.data();
                std::copy_n(pass.features + t * hidden, hidden, row);
                pad(row, hidden);
                s.hidden_q.set(t, row, layer.k->type(), hidden);
            });
            multiply_all(*pool_, {{layer.k.get(), &s.hidden_q, s.k.data(), stride, &layer.k_bias},
                                  {layer.v.get(), &s.hidden_q, s.v.data(), stride, &layer.v_bias}}, n);
            store_all(pass, kv, index);
        }
    });
}

void Decoder::correct_step(const BlockStep& step, const Pass& pass) {
    Scratch& s = *scratch_;
    const Corrector& corrector = weights_.corrector;
    const size_t n = step.num_rows, mixes = corrector.mix ? corrector.mix->out() : 0;
    finish();
    s.hidden_q.reserve(n, shape_.hidden + 2 * corrector.rank);
    s.attn_q.reserve(n, std::max<size_t>(corrector.rank, 1));
    grow(s.up, n * round_up(mixes, kPanel));
    grow(s.delta, n * corrector.rank);
    for (auto& own : s.threads) grow(own.head_logits, kHeadRows * kHeadTile);
    plan_choices(pass);
    pool_->run([&](size_t thread) { run_corrector(step, pass, thread); });
    finish_choices(pass);
    for (size_t i = 0; i < n && step.log_odds; ++i) pass.margins[i] = step.log_odds[i];
}

// Use of scratch: `delta` has the corrector's rows of the tokens before, `up` the mixing matrix' outputs, `hidden_q` first its inputs
// and then states, `attn_q` what is multiplied with `out`.
void Decoder::run_corrector(const BlockStep& step, const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    const Corrector& corrector = weights_.corrector;
    const Matrix& head = *weights_.head;
    const size_t n = step.num_rows, hidden = shape_.hidden, rank = corrector.rank;
    auto& row = s.threads[thread].normed;
    pool_->each(n, [&](size_t i) { read_previous(step, i, row.data()); });
    if (corrector.mix) {
        const size_t stride = round_up(corrector.mix->out(), kPanel);
        multiply_all(*pool_, {{corrector.mix.get(), &s.hidden_q, s.up.data(), stride, &corrector.mix_bias}}, n);
    }
    pool_->each(n, [&](size_t i) {
        if (rank) mix_previous(step, i, row.data());
        if (!step.head_logits.empty()) return;
        std::copy_n(step.states[i], hidden, row.data());
        pad(row.data(), hidden);
        s.hidden_q.set(i, row.data(), head.type(), hidden);
    });
    choose_in_tiles(pass, thread, [&](size_t panel, size_t num_panels, size_t first, size_t end, float* tile) {
        const size_t start = panel * kPanel, count = std::min(num_panels * kPanel, pass.vocab - start);
        float* computed = s.threads[thread].head_logits.data();
        if (rank)
            corrector.out->multiply(panel, num_panels, s.attn_q, first, end, tile, kHeadTile);
        else
            std::fill_n(tile, (end - first) * kHeadTile, 0.0f);
        if (step.head_logits.empty()) head.multiply(panel, num_panels, s.hidden_q, first, end, computed, kHeadTile);
        for (size_t i = first; i < end; ++i) {
            const float* logits = step.head_logits.empty() ? computed + (i - first) * kHeadTile : step.head_logits[i] + start;
            kernels().layer.add(tile + (i - first) * kHeadTile, logits, count);
        }
    });
}

// Read the corrector's row of the token before; quantise it beside the other inputs of the mix; state how likely the guess is kept.
// row: all of this thread's `normed`.
void Decoder::read_previous(const BlockStep& step, size_t index, float* row) {
    Scratch& s = *scratch_;
    const Corrector& corrector = weights_.corrector;
    const size_t hidden = shape_.hidden, rank = corrector.rank;
    float* const token = rank ? &s.delta[index * rank] : nullptr;
    if (rank) {
        corrector.before->row(static_cast<size_t>(step.previous_ids[index]), row);
        std::copy_n(row, rank, token);
    }
    if (step.log_odds) {
        const bool reads_token = corrector.confidence.size() > hidden;
        step.log_odds[index] = corrector.confidence_bias + dot(step.states[index], corrector.confidence, 0, hidden) +
                               (reads_token ? dot(token, corrector.confidence, hidden, rank) : 0.0f);
    }
    if (!corrector.mix) return;
    float* to = row;
    if (corrector.state_size) to = std::copy_n(step.previous_state + index * rank, rank, to);
    to = std::copy_n(corrector.state_size ? token : step.states[index], corrector.state_size ? rank : hidden, to);
    to = std::copy_n(corrector.state_size ? step.states[index] : token, corrector.state_size ? hidden : rank, to);
    pad(row, corrector.mix->in());
    s.hidden_q.set(index, row, corrector.mix->type(), corrector.mix->in());
}

// Quantise what is multiplied with `out`, and hand on the state. row: all of this thread's `normed`.
void Decoder::mix_previous(const BlockStep& step, size_t index, float* row) {
    Scratch& s = *scratch_;
    const Corrector& corrector = weights_.corrector;
    const size_t rank = corrector.rank;
    const float* const token = &s.delta[index * rank];
    const float* const mixed = corrector.mix ? &s.up[index * round_up(corrector.mix->out(), kPanel)] : nullptr;
    for (size_t j = 0; j < rank; ++j) {
        if (corrector.state_size) {
            const float gate = logistic(mixed[j]), before = step.previous_state[index * rank + j];
            step.state[index * rank + j] = gate * before + (1.0f - gate) * std::tanh(mixed[rank + j]);
            row[j] = std::tanh(mixed[2 * rank + j]);
        } else {
            row[j] = mixed ? logistic(mixed[j]) * token[j] : token[j];
        }
    }
    pad(row, rank);
    s.attn_q.set(index, row, corrector.out->type(), rank);
}

}  // namespace paceline
