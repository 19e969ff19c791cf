#include "model/experts.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "model/scratch.h"

namespace paceline {
namespace {

constexpr size_t kWordBits = 64;
constexpr float kTiny = 1e-20f;      // keeps the sum of sigmoids above 0
constexpr size_t kRowsAtOnce = 48;  // rows of an expert that are multiplied with some panels before the next rows
constexpr size_t kPanelsAtOnce = 2;  // panels at once for many rows, so that the weights stay in a cache
constexpr size_t kClaims = 4;        // a thread claims a quarter of what is left: experts have different numbers of rows

// The experts with the highest scores, best first; of equal scores the lower number.
void choose_experts(const Mixture& mixture, const float* scores, uint16_t* chosen) {
    const size_t num = mixture.experts.size();
    bool taken[kMaxExperts] = {};
    for (size_t i = 0; i < mixture.per_token; ++i) {
        size_t best = num;
        for (size_t e = 0; e < num; ++e)
            if (!taken[e] && (best == num || scores[e] > scores[best])) best = e;
        taken[best] = true;
        chosen[i] = static_cast<uint16_t>(best);
    }
}

// Shares are sigmoids; a correction that training found changes who is chosen.
void route_by_sigmoid(const Mixture& mixture, const float* scores, uint16_t* chosen, float* shares) {
    float sigmoids[kMaxExperts], corrected[kMaxExperts];
    for (size_t e = 0; e < mixture.experts.size(); ++e) {
        sigmoids[e] = 1.0f / (1.0f + std::exp(-scores[e]));
        corrected[e] = sigmoids[e] + (mixture.correction.empty() ? 0.0f : mixture.correction[e]);
    }
    choose_experts(mixture, corrected, chosen);
    float total = mixture.routing.normed ? kTiny : 1.0f;
    for (size_t i = 0; i < mixture.per_token; ++i) {
        shares[i] = sigmoids[chosen[i]];
        if (mixture.routing.normed) total += shares[i];
    }
    for (size_t i = 0; i < mixture.per_token; ++i) shares[i] = shares[i] / total * mixture.routing.scale;
}

// Shares are a softmax.
void route(const Mixture& mixture, const float* scores, uint16_t* chosen, float* shares) {
    if (mixture.routing.sigmoid) return route_by_sigmoid(mixture, scores, chosen, shares);
    const size_t num = mixture.experts.size();
    choose_experts(mixture, scores, chosen);
    const float top = scores[chosen[0]];
    float total = 0.0f;
    for (size_t i = 0; i < mixture.per_token; ++i) shares[i] = std::exp(scores[chosen[i]] - top);
    if (mixture.routing.normed)
        for (size_t i = 0; i < mixture.per_token; ++i) total += shares[i];
    else
        for (size_t e = 0; e < num; ++e) total += std::exp(scores[e] - top);
    for (size_t i = 0; i < mixture.per_token; ++i) shares[i] = shares[i] / total * mixture.routing.scale;
}

// Give every token a slot with each of its experts, the slots of an expert side by side in the order of tokens.
void group(const Mixture& mixture, size_t num_tokens, ExpertScratch& s) {
    const size_t num = mixture.experts.size(), k = mixture.per_token;
    s.first.assign(num + 1, 0);
    for (size_t i = 0; i < num_tokens * k; ++i) ++s.first[s.chosen[i] + 1];
    s.touched.clear();
    for (size_t e = 0; e < num; ++e) {
        if (s.first[e + 1]) s.touched.push_back(static_cast<uint16_t>(e));
        s.first[e + 1] += s.first[e];
    }
    std::vector<uint32_t> next(s.first.begin(), s.first.end() - 1);
    for (size_t i = 0; i < num_tokens * k; ++i) {
        const uint32_t slot = next[s.chosen[i]]++;
        s.slot_of[i] = slot, s.token_of[slot] = static_cast<uint32_t>(i / k);
    }
    s.num_touched.store(s.touched.size(), std::memory_order_relaxed);
}

// Add a layer to the counts: distinct experts of the pass, and the mean of 1, 2, 4, ... neighbouring tokens.
void count_windows(const Mixture& mixture, size_t num_tokens, ExpertScratch& s) {
    const size_t words = (mixture.experts.size() + kWordBits - 1) / kWordBits;
    s.masks.assign(num_tokens * words, 0);
    for (size_t i = 0; i < num_tokens * mixture.per_token; ++i)
        s.masks[i / mixture.per_token * words + s.chosen[i] / kWordBits] |= uint64_t{1} << s.chosen[i] % kWordBits;
    ++s.num_counted;
    s.counts[0] += static_cast<double>(s.touched.size());
    size_t level = 1;
    for (size_t windows = num_tokens; windows > 0; windows /= 2, ++level) {
        size_t total = 0;
        for (size_t i = 0; i < windows * words; ++i) total += static_cast<size_t>(std::popcount(s.masks[i]));
        if (level == s.counts.size()) s.counts.push_back(0.0);
        s.counts[level] += static_cast<double>(total) / static_cast<double>(windows);
        for (size_t i = 0; i < windows / 2 * words; ++i) {
            const size_t from = i / words * 2 * words + i % words;
            s.masks[i] = s.masks[from] | s.masks[from + words];
        }
    }
}

struct ExpertProduct {
    std::shared_ptr<const Matrix> Expert::*matrix;
    std::vector<float> Expert::*bias;
    float* out;
};

// Multiply the rows of every touched expert with its matrices, in one phase.
void multiply_touched(ThreadPool& pool, const Mixture& mixture, const ExpertScratch& s, const Activations& x, size_t stride,
                      std::initializer_list<ExpertProduct> products) {
    const size_t panels = (mixture.experts[0].*products.begin()->matrix)->num_panels(), of_expert = panels * products.size();
    const auto multiply_some = [&](size_t at, size_t end) {
        while (at < end) {
            const size_t index = s.touched[at / of_expert], panel = at % panels;
            const ExpertProduct& asked = products.begin()[at % of_expert / panels];
            const Expert& expert = mixture.experts[index];
            const Product product{(expert.*asked.matrix).get(), &x, asked.out, stride, &(expert.*asked.bias)};
            const size_t last = s.first[index + 1], num_rows = last - s.first[index];
            size_t count = std::min(panels - panel, end - at);
            if (num_rows > kRowsAtOnce) count = std::min(count, kPanelsAtOnce);
            for (size_t row = s.first[index]; row < last; row += kRowsAtOnce)
                multiply_panels(product, panel, count, row, std::min(row + kRowsAtOnce, last));
            at += count;
        }
    };
    pool.each_run(s.num_touched.load(std::memory_order_relaxed) * of_expert, multiply_some, kClaims);
}

}  // namespace

size_t Mixture::bytes() const {
    size_t total = router->bytes() + (shared_gate ? shared_gate->bytes() : 0);
    for (const Expert& expert : experts) total += expert.gate->bytes() + expert.up->bytes() + expert.down->bytes();
    return total;
}

void Decoder::plan_experts(const Pass& pass) {
    const auto& layers = weights_.layers;
    ExpertScratch& s = scratch_->experts;
    s.counts.assign(1, 0.0);
    s.num_counted = 0;
    const auto found = std::find_if(layers.begin(), layers.end(), [](const Layer& layer) { return layer.mixture != nullptr; });
    if (found == layers.end()) return;
    const Mixture& mixture = *found->mixture;
    const size_t n = pass.num_tokens, slots = n * mixture.per_token;
    grow(s.normed, n * round_up(shape_.hidden, kInt8Group));
    grow(s.scores, n * round_up(mixture.experts.size(), kPanel));
    grow(s.shared, n * kPanel);
    grow(s.gate, slots * round_up(mixture.size(), kInt8Group));
    grow(s.up, slots * round_up(mixture.size(), kInt8Group));
    grow(s.out, slots * round_up(shape_.hidden, kPanel));
    s.routed.reserve(n, shape_.hidden);
    s.inputs.reserve(slots, shape_.hidden);
    s.middle.reserve(slots, mixture.size());
    for (auto* places : {&s.slot_of, &s.token_of}) places->resize(std::max(places->size(), slots));
    s.chosen.resize(std::max(s.chosen.size(), slots));
    s.shares.resize(std::max(s.shares.size(), slots));
}

// Keep a token's normed numbers, which router and experts read.
void Decoder::route_token(const Mixture& mixture, size_t token, const float* normed) {
    ExpertScratch& s = scratch_->experts;
    const size_t padded = round_up(shape_.hidden, kInt8Group);
    std::copy_n(normed, padded, &s.normed[token * padded]);
    s.routed.set(token, normed, mixture.router->type(), shape_.hidden);
}

void Decoder::run_experts(const Pass& pass, size_t index) {
    Scratch& scratch = *scratch_;
    ExpertScratch& s = scratch.experts;
    const Layer& layer = weights_.layers[index];
    const Mixture& mixture = *layer.mixture;
    const size_t n = pass.num_tokens, k = mixture.per_token, num = mixture.experts.size(), size = mixture.size(), hidden = shape_.hidden;
    const size_t width = round_up(hidden, kInt8Group), stride = round_up(size, kInt8Group), out_stride = round_up(hidden, kPanel);
    const Product scores{mixture.router.get(), &s.routed, s.scores.data(), round_up(num, kPanel), &mixture.router_bias};
    if (mixture.shared_gate) {
        multiply_all(*pool_, {scores, {mixture.shared_gate.get(), &s.routed, s.shared.data(), kPanel, nullptr}}, n);
    } else {
        multiply_all(*pool_, {scores}, n);
    }
    if (layer.gate) run_dense(layer, n);  // the shared expert, to `delta`
    pool_->each(n, [&](size_t t) { route(mixture, &s.scores[t * round_up(num, kPanel)], &s.chosen[t * k], &s.shares[t * k]); });
    pool_->each(1, [&](size_t) {
        group(mixture, n, s);
        count_windows(mixture, n, s);
    });
    pool_->each(n * k, [&](size_t slot) {
        s.inputs.set(slot, &s.normed[s.token_of[slot] * width], mixture.experts[0].gate->type(), hidden);
    });
    multiply_touched(*pool_, mixture, s, s.inputs, stride,
                     {{&Expert::gate, &Expert::gate_bias, s.gate.data()}, {&Expert::up, &Expert::up_bias, s.up.data()}});
    pool_->each(n * k, [&](size_t slot) {
        float* const gate = &s.gate[slot * stride];
        activate(gate, &s.up[slot * stride], size, stride);
        s.middle.set(slot, gate, mixture.experts[0].down->type(), size);
    });
    multiply_touched(*pool_, mixture, s, s.middle, out_stride, {{&Expert::down, &Expert::down_bias, s.out.data()}});
    pool_->each(n, [&](size_t t) {
        float* const delta = &scratch.delta[t * out_stride];
        if (!layer.gate) std::fill_n(delta, hidden, 0.0f);
        if (mixture.shared_gate) {
            const float own = 1.0f / (1.0f + std::exp(-s.shared[t * kPanel]));
            for (size_t i = 0; i < hidden; ++i) delta[i] *= own;
        }
        for (size_t j = 0; j < k; ++j) {
            const float share = s.shares[t * k + j];
            const float* const from = &s.out[s.slot_of[t * k + j] * out_stride];
            for (size_t i = 0; i < hidden; ++i) delta[i] += share * from[i];
        }
    });
}

std::vector<double> Decoder::touched_experts() const {
    const ExpertScratch& s = scratch_->experts;
    std::vector<double> counts = s.counts;
    const auto& layers = weights_.layers;
    const auto all = std::count_if(layers.begin(), layers.end(), [](const Layer& layer) { return layer.mixture != nullptr; });
    const double scale = static_cast<double>(all) / static_cast<double>(std::max<size_t>(s.num_counted, 1));
    for (double& count : counts) count *= scale;
    return counts;
}

}  // namespace paceline
