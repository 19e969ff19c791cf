// The relay of a parallel draft head: messages from each guess to the next, and the choice of guesses that read them.
#include <algorithm>
#include <cmath>

#include "model/scratch.h"

namespace paceline {

void Decoder::relay_positions(const std::vector<const float*>& first, const std::vector<const float*>& states, AlignedVector<float>& sums) {
    Scratch& s = *scratch_;
    const Relay& relay = weights_.relay;
    const size_t n = states.size(), hidden = shape_.hidden, stride = round_up(2 * relay.inner, kPanel);
    finish();
    s.hidden_q.reserve(n, 2 * hidden);
    grow(sums, n * stride);
    pool_->run([&](size_t thread) {
        auto& row = s.threads[thread].normed;
        pool_->each(n, [&](size_t i) {
            std::fill(row.begin(), row.end(), 0.0f);
            std::copy_n(first[i], hidden, row.data());
            std::copy_n(states[i], hidden, &row[hidden]);
            s.hidden_q.set(i, row.data(), relay.position->type(), 2 * hidden);
        });
        multiply_all(*pool_, {{relay.position.get(), &s.hidden_q, sums.data(), stride, nullptr}}, n);
    });
}

void Decoder::relay_step(const RelayStep& step, const Pass& pass) {
    Scratch& s = *scratch_;
    const Relay& relay = weights_.relay;
    const size_t n = step.num_rows;
    finish();
    s.hidden_q.reserve(n, shape_.hidden + relay.size);
    s.ffn_q.reserve(n, relay.inner);
    s.attn_q.reserve(n, relay.size);
    grow(s.up, n * round_up(2 * relay.inner, kPanel));
    grow(s.delta, n * round_up(relay.size, kPanel));
    for (auto& own : s.threads) grow(own.head_logits, kHeadRows * kHeadTile);
    plan_choices(pass);
    pool_->run([&](size_t thread) { run_relay(step, pass, thread); });
    if (step.previous_ids) finish_choices(pass);
}

// Scratch here: `up` is what previous guesses add to the gates, `delta` the messages before their tanh. `hidden_q` has previous guesses,
// then states, `ffn_q` gates, and `attn_q` messages, all quantised.
void Decoder::run_relay(const RelayStep& step, const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    const Relay& relay = weights_.relay;
    const Matrix& head = *weights_.head;
    const size_t n = step.num_rows, size = relay.size, stride = round_up(size, kPanel);
    auto& row = s.threads[thread].normed;
    if (step.previous_ids) {
        pool_->each(n, [&](size_t i) { embed_previous(step, i, row.data()); });
        multiply_all(*pool_, {{relay.previous.get(), &s.hidden_q, s.up.data(), round_up(2 * relay.inner, kPanel), nullptr}}, n);
    }
    pool_->each(n, [&](size_t i) { gate_message(step, i, row.data()); });
    multiply_all(*pool_, {{relay.message.get(), &s.ffn_q, s.delta.data(), stride, nullptr}}, n);
    pool_->each(n, [&](size_t i) {
        float* message = step.messages + i * size;
        for (size_t j = 0; j < size; ++j) message[j] = std::tanh(s.delta[i * stride + j]);
        std::fill(row.begin(), row.end(), 0.0f);
        std::copy_n(message, size, row.data());
        s.attn_q.set(i, row.data(), relay.message_head->type(), size);
        if (!step.head_logits.empty()) return;
        std::fill(row.begin(), row.end(), 0.0f);
        std::copy_n(step.states[i], shape_.hidden, row.data());
        s.hidden_q.set(i, row.data(), head.type(), shape_.hidden);
    });
    if (!step.previous_ids) return;
    choose_in_tiles(pass, thread, [&](size_t panel, size_t num_panels, size_t first, size_t end, float* tile) {
        const size_t start = panel * kPanel, count = std::min(num_panels * kPanel, pass.vocab - start);
        float* computed = s.threads[thread].head_logits.data();
        relay.message_head->multiply(panel, num_panels, s.attn_q, first, end, tile, kHeadTile);
        if (step.head_logits.empty()) head.multiply(panel, num_panels, s.hidden_q, first, end, computed, kHeadTile);
        for (size_t i = first; i < end; ++i) {
            const float* logits = step.head_logits.empty() ? computed + (i - first) * kHeadTile : step.head_logits[i] + start;
            kernels().layer.add(tile + (i - first) * kHeadTile, logits, count);
        }
    });
}

// Quantise a previous guess, its normed embedding beside its message. row: all of this thread's `normed`.
void Decoder::embed_previous(const RelayStep& step, size_t index, float* row) {
    const Relay& relay = weights_.relay;
    const size_t hidden = shape_.hidden;
    std::fill_n(row, scratch_->threads[0].normed.size(), 0.0f);
    weights_.embed->row(static_cast<size_t>(step.previous_ids[index]), row);
    for (size_t j = 0; j < hidden; ++j) row[j] *= shape_.embed_scale;
    norm(row, relay.embed_norm, hidden, shape_.norm_eps, row);
    std::copy_n(step.previous_messages + index * relay.size, relay.size, row + hidden);
    scratch_->hidden_q.set(index, row, relay.previous->type(), hidden + relay.size);
}

// Quantise silu(gate) * value, both sums over the position and the previous guess. row: all of this thread's `normed`.
void Decoder::gate_message(const RelayStep& step, size_t index, float* row) {
    const Relay& relay = weights_.relay;
    const auto& kernel = kernels().layer;
    const size_t inner = relay.inner, padded = round_up(inner, kInt8Group);
    const float *sums = step.position_sums[index], *previous = &scratch_->up[index * round_up(2 * inner, kPanel)];
    float *gate = row, *value = gate + padded;
    std::fill_n(row, scratch_->threads[0].normed.size(), 0.0f);
    std::copy_n(sums, inner, gate);
    std::copy_n(sums + inner, inner, value);
    if (step.previous_ids) {
        kernel.add(gate, previous, inner);
        kernel.add(value, previous + inner, inner);
    }
    kernel.silu_mul(gate, value, padded);
    scratch_->ffn_q.set(index, gate, relay.message->type(), inner);
}

}  // namespace paceline
