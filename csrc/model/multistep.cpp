#include "model/multistep.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr double kMaxMargin = 6.0;  // as in core/nouns.py

struct ActiveRow {
    size_t index;      // index among the rows of the first pass
    size_t first;      // first of its steps
    int64_t position;  // position of its newest token
    double survival;   // probability that all its choices so far are accepted
};

// The rows that have not stopped.
class ActiveRows {
  public:
    ActiveRows(const Pass& first, const DraftSteps& steps) : steps_(steps) {
        for (size_t row = 0, at = 0; row < first.num_rows; at += static_cast<size_t>(steps.depths[row++]))
            rows_.push_back({row, at, first.positions[first.cu_len[row + 1] - 1], 1.0});
    }

    const std::vector<ActiveRow>& rows() const { return rows_; }

    // How the rows choose in a step. Edits point into `hints_`, valid until the next call.
    std::vector<SamplingSpec> specs(size_t step) {
        std::vector<SamplingSpec> found;
        hints_.clear();
        hints_.reserve(rows_.size());
        for (const ActiveRow& row : rows_) found.push_back(spec_of(row, step));
        return found;
    }

    // Hand out what a step chose and drop the rows that stop. on_kept(index among the rows of this step): for each other row.
    template <class OnKept>
    void advance(size_t step, const int64_t* chosen, const float* margins, const int64_t* second_ids, const OnKept& on_kept) {
        std::vector<ActiveRow> kept;
        for (size_t i = 0; i < rows_.size(); ++i) {
            const ActiveRow& row = rows_[i];
            steps_.chosen[row.first + step] = chosen[i];
            steps_.margins[row.first + step] = margins[i];
            if (steps_.second_ids && second_ids) steps_.second_ids[row.first + step] = second_ids[i];
            if (chosen[i] < 0 || step + 1 >= static_cast<size_t>(steps_.depths[row.index])) continue;
            const double survival = survival_with(row, step, margins[i]);
            if (stops(row, step, survival)) continue;
            kept.push_back({row.index, row.first, row.position + 1, survival});
            on_kept(i);
        }
        rows_ = std::move(kept);
    }

  private:
    SamplingSpec spec_of(const ActiveRow& row, size_t step) {
        static constexpr float kUnscaled = 1.0f;
        SamplingSpec spec = steps_.specs[row.first + step];
        const TokenHints* hints = steps_.hints[row.index];
        if (!hints || spec.edits.count) return spec;
        const auto hint = hints->next(steps_.chosen + row.first, step);
        if (!hint || static_cast<size_t>(hint->token_id) >= steps_.num_ids) return spec;
        hints_.push_back(*hint);
        spec.edits = {&hints_.back().token_id, &kUnscaled, &hints_.back().add, 1};
        if (spec.kind == SamplingKind::argmax) spec.kind = SamplingKind::noisy;  // argmax ignores edits
        return spec;
    }

    double survival_with(const ActiveRow& row, size_t step, double margin) const {
        if (!steps_.stops) return 1.0;
        const double* stop = steps_.stops + 3 * (row.first + step);
        return row.survival / (1 + std::exp(-(stop[0] + stop[1] * (margin > kMaxMargin ? kMaxMargin : margin))));
    }

    bool stops(const ActiveRow& row, size_t step, double survival) const {
        return steps_.stops && survival < steps_.stops[3 * (row.first + step) + 2];  // false if the margin is unknown: NaN
    }

    const DraftSteps& steps_;
    std::vector<ActiveRow> rows_;
    std::vector<Hint> hints_;
};

size_t num_logit_rows(const std::vector<SamplingSpec>& specs) {
    return static_cast<size_t>(std::count_if(specs.begin(), specs.end(), [](const SamplingSpec& s) { return s.wants_logits(); }));
}

// Passes over one token of each row, and their memory.
class SerialSteps {
  public:
    SerialSteps(Decoder& decoder, const Pass& first, const DraftSteps& steps)
        : decoder_(decoder), first_(first), active_(first, steps), pass_(first) {}

    bool done() const { return active_.rows().empty(); }

    const Pass& pass(size_t step) {
        if (step > 0) read_newest();
        plan_choices(step);
        pass_.taps.clear();
        if (reads_features()) {
            states_.resize(pass_.num_tokens * hidden());
            pass_.taps.emplace_back(pass_.num_layers, states_.data());
        }
        return pass_;
    }

    void advance(size_t step) {
        newest_.clear();
        features_.clear();
        active_.advance(step, chosen_.data(), margins_.data(), second_ids_.data(), [&](size_t i) {
            newest_.push_back(chosen_[i]);
            if (reads_features()) feed_back(static_cast<size_t>(pass_.wanted[i]));
        });
    }

  private:
    size_t hidden() const { return decoder_.shape().hidden; }
    bool reads_features() const { return decoder_.shape().reads_features; }

    void plan_choices(size_t step) {
        pass_.specs = active_.specs(step);
        logits_.resize(num_logit_rows(pass_.specs) * pass_.vocab);
        chosen_.resize(pass_.specs.size());
        margins_.assign(pass_.specs.size(), NAN);
        second_ids_.assign(pass_.specs.size(), kUnchosen);
        pass_.chosen = chosen_.data(), pass_.margins = margins_.data(), pass_.logits = logits_.data(), pass_.second_ids = second_ids_.data();
    }

    void feed_back(size_t token) {
        float* state = &states_[token * hidden()];
        if (decoder_.shape().feeds_normed) decoder_.norm_last(state);
        features_.insert(features_.end(), state, state + hidden());
    }

    void read_newest() {
        const size_t n = active_.rows().size(), max_pages = first_.max_pages;
        for (auto* v : {&positions_, &slots_, &first_keys_, &pages_, &cu_len_, &pass_.wanted}) v->clear();
        cu_len_.push_back(0);
        for (const ActiveRow& row : active_.rows()) {
            const int64_t* pages = first_.pages + row.index * max_pages;
            const auto position = static_cast<size_t>(row.position);
            positions_.push_back(row.position);
            slots_.push_back(pages[position / kPageTokens] * static_cast<int64_t>(kPageTokens) + static_cast<int64_t>(position % kPageTokens));
            first_keys_.push_back(first_.first_keys[row.index]);
            pages_.insert(pages_.end(), pages, pages + max_pages);
            pass_.wanted.push_back(cu_len_.back());
            cu_len_.push_back(cu_len_.back() + 1);
        }
        pass_.num_tokens = pass_.num_rows = n;
        pass_.token_ids = newest_.data(), pass_.positions = positions_.data(), pass_.slots = slots_.data();
        pass_.cu_len = cu_len_.data(), pass_.pages = pages_.data(), pass_.first_keys = first_keys_.data();
        pass_.features = features_.data();
    }

    Decoder& decoder_;
    const Pass& first_;
    ActiveRows active_;
    Pass pass_;
    std::vector<int64_t> chosen_, second_ids_, newest_, positions_, slots_, first_keys_, cu_len_, pages_;
    std::vector<float> margins_, logits_, states_, features_;
};

// One pass over a block of each row, then the choices of its guesses, one after another.
class BlockSteps {
  public:
    BlockSteps(Decoder& decoder, const Pass& first, const DraftSteps& steps, const KVStore& kv)
        : decoder_(decoder), active_(first, steps), pass_(first), state_(first.num_rows * decoder.corrector().state_size) {
        run_pass(kv);
        for (size_t row = 0; row < first.num_rows; ++row) newest_.push_back(first.token_ids[first.cu_len[row]]);
    }

    bool done() const { return active_.rows().empty(); }

    void run(size_t step) {
        const size_t n = active_.rows().size(), size = decoder_.corrector().state_size;
        std::vector<int64_t> chosen(n);
        std::vector<float> margins(n, NAN), logits, state(n * size), log_odds(n);
        pass_.specs = active_.specs(step);
        logits.resize(num_logit_rows(pass_.specs) * pass_.vocab);
        pass_.wanted.resize(n);
        pass_.chosen = chosen.data(), pass_.margins = margins.data(), pass_.logits = logits.data();
        BlockStep now{n, newest_.data(), state_.data(), {}, {}, state.data(), decoder_.corrector().confidence.empty() ? nullptr : log_odds.data()};
        for (const ActiveRow& row : active_.rows()) {
            const size_t at = row.first + step;
            now.states.push_back(&states_[static_cast<size_t>(tokens_[at]) * hidden()]);
            now.head_logits.push_back(&logits_[at * pass_.vocab]);
        }
        decoder_.correct_step(now, pass_);
        newest_.clear(), state_.clear();
        active_.advance(step, chosen.data(), margins.data(), nullptr, [&](size_t i) {
            newest_.push_back(chosen[i]);
            state_.insert(state_.end(), state.begin() + static_cast<ptrdiff_t>(i * size), state.begin() + static_cast<ptrdiff_t>((i + 1) * size));
        });
    }

  private:
    // Run the pass: it chooses nothing, and leaves states and logits of all guesses.
    void run_pass(const KVStore& kv) {
        const size_t n = pass_.wanted.size();
        std::vector<int64_t> chosen(n);
        states_.resize(pass_.num_tokens * hidden());
        logits_.resize(n * pass_.vocab);
        pass_.specs.assign(n, SamplingSpec{SamplingKind::logits, 0.0, {}, {}, {}});
        pass_.taps = {{pass_.num_layers, states_.data()}};
        pass_.chosen = chosen.data(), pass_.margins = nullptr, pass_.logits = logits_.data();
        decoder_.forward(pass_, kv);
        tokens_ = pass_.wanted;
        for (int64_t token : tokens_) decoder_.norm_last(&states_[static_cast<size_t>(token) * hidden()]);
    }

    size_t hidden() const { return decoder_.shape().hidden; }

    Decoder& decoder_;
    ActiveRows active_;
    Pass pass_;
    std::vector<int64_t> tokens_;  // [guesses] indices in the pass
    std::vector<float> states_;    // [tokens of the pass, hidden]
    std::vector<float> logits_;    // [guesses, vocab]
    std::vector<int64_t> newest_;  // [active rows] tokens before the next guesses
    std::vector<float> state_;     // [active rows, state_size] of the corrector
};

}  // namespace

void run_steps(Decoder& decoder, const Pass& first, const DraftSteps& steps, const KVStore& kv) {
    SerialSteps serial(decoder, first, steps);
    for (size_t step = 0; !serial.done(); ++step) {
        decoder.forward(serial.pass(step), kv);
        serial.advance(step);
    }
}

void run_block_steps(Decoder& decoder, const Pass& first, const DraftSteps& steps, const KVStore& kv) {
    if (first.num_rows == 0) return;
    BlockSteps blocks(decoder, first, steps, kv);
    for (size_t step = 0; !blocks.done(); ++step) blocks.run(step);
}

}  // namespace paceline
