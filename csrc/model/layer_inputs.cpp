// Layer inputs: numbers of a token that layers read beside the residual stream (Gemma 4).
#include <algorithm>
#include <cmath>

#include "model/scratch.h"

namespace paceline {

void Decoder::plan_inputs(const Pass& pass) {
    Scratch& s = *scratch_;
    const LayerInputs& in = weights_.inputs;
    const size_t n = pass.num_tokens, size = in.norm.size();
    grow(s.inputs, n * round_up(in.embed->in(), kPanel) + kPageTokens);  // activations read whole groups
    grow(s.gate, n * round_up(size, kInt8Group));
    s.ffn_q.reserve(n, std::max(shape_.intermediate, size));
    for (auto& own : s.threads) grow(own.table_row, in.embed->in());
}

// Make the inputs of all layers from the tokens and their embeddings: (normed projection + row of the table) / sqrt(2).
void Decoder::make_inputs(const Pass& pass, size_t thread) {
    Scratch& s = *scratch_;
    const LayerInputs& in = weights_.inputs;
    const auto& kernel = kernels().layer;
    const size_t n = pass.num_tokens, hidden = shape_.hidden, size = in.norm.size(), width = in.embed->in(), stride = round_up(width, kPanel);
    const float of_projection = 1.0f / std::sqrt(static_cast<float>(hidden)), of_row = std::sqrt(static_cast<float>(size));
    pool_->each(n, [&](size_t t) {
        float* const row = s.threads[thread].normed.data();
        std::copy_n(&s.hidden[t * hidden], hidden, row);
        pad(row, hidden);
        s.hidden_q.set(t, row, in.project->type(), hidden);
    });
    multiply_all(*pool_, {{in.project.get(), &s.hidden_q, s.inputs.data(), stride, nullptr}}, n);
    pool_->each(n, [&](size_t t) {
        float *const to = &s.inputs[t * stride], *const row = s.threads[thread].table_row.data();
        in.embed->row(static_cast<size_t>(pass.token_ids[t]), row);
        kernel.scale(to, width, of_projection, to);
        for (size_t at = 0; at < width; at += size) kernel.rms_norm(to + at, in.norm.data(), size, shape_.norm_eps, to + at);
        for (size_t i = 0; i < width; ++i) to[i] = (to[i] + of_row * row[i]) * static_cast<float>(M_SQRT1_2);
    });
}

// Read a layer's own input: what it adds to the residual stream goes to `delta`.
void Decoder::run_input(const Pass& pass, size_t index, size_t thread) {
    Scratch& s = *scratch_;
    const Layer& layer = weights_.layers[index];
    const size_t n = pass.num_tokens, hidden = shape_.hidden, size = weights_.inputs.norm.size();
    const size_t stride = round_up(size, kInt8Group), in_stride = round_up(weights_.inputs.embed->in(), kPanel);
    pool_->each(n, [&](size_t t) {
        float* const row = s.threads[thread].normed.data();
        add_delta(t, layer.mlp_post_norm);
        std::copy_n(&s.hidden[t * hidden], hidden, row);
        pad(row, hidden);
        s.hidden_q.set(t, row, layer.input_gate->type(), hidden);
    });
    multiply_all(*pool_, {{layer.input_gate.get(), &s.hidden_q, s.gate.data(), stride, nullptr}}, n);
    pool_->each(n, [&](size_t t) {
        float* const gate = &s.gate[t * stride];
        activate(gate, &s.inputs[t * in_stride + index * size], size, stride);
        s.ffn_q.set(t, gate, layer.input_out->type(), size);
    });
    multiply_all(*pool_, {{layer.input_out.get(), &s.ffn_q, s.delta.data(), round_up(hidden, kPanel), nullptr}}, n);
}

}  // namespace paceline
