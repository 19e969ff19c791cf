#include "turns.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr double kMostMargin = 6.0;  // as core/nouns.py

struct Row {
    size_t index;      // among the first pass's
    size_t first;      // of its choices
    int64_t position;  // of its newest token
    double alive;      // chance that all its choices so far are kept
};

// The rows that are still at it, and the memory of the pass over them.
class Round {
  public:
    Round(Decoder& decoder, const Pass& first, const Turns& turns)
        : decoder_(decoder), first_(first), turns_(turns), pass_(first) {
        for (size_t row = 0, at = 0; row < first.num_rows; at += static_cast<size_t>(turns.depths[row++]))
            rows_.push_back({row, at, first.positions[first.cu_len[row + 1] - 1], 1.0});
    }

    bool over() const { return rows_.empty(); }

    const Pass& pass(size_t turn) {
        if (turn > 0) read_newest();
        choose(turn);
        pass_.taps.clear();
        if (reads_features()) {
            states_.resize(pass_.num_tokens * hidden());
            pass_.taps.emplace_back(pass_.num_layers, states_.data());
        }
        return pass_;
    }

    // Hand out what the pass chose, and keep the rows that go on.
    void take(size_t turn) {
        newest_.clear(), features_.clear();
        std::vector<Row> going_on;
        for (size_t i = 0; i < rows_.size(); ++i) {
            const Row& row = rows_[i];
            turns_.chosen[row.first + turn] = chosen_[i];
            turns_.margins[row.first + turn] = margins_[i];
            if (chosen_[i] < 0 || turn + 1 >= static_cast<size_t>(turns_.depths[row.index])) continue;
            const double alive = alive_with(row, turn, margins_[i]);
            if (stops(row, turn, alive)) continue;
            going_on.push_back({row.index, row.first, row.position + 1, alive});
            newest_.push_back(chosen_[i]);
            if (reads_features()) feed_back(static_cast<size_t>(pass_.wanted[i]));
        }
        rows_ = std::move(going_on);
    }

  private:
    size_t hidden() const { return decoder_.shape().hidden; }
    bool reads_features() const { return decoder_.shape().reads_features; }

    double alive_with(const Row& row, size_t turn, double margin) const {
        if (!turns_.stops) return 1.0;
        const double* stop = turns_.stops + 3 * (row.first + turn);
        return row.alive / (1 + std::exp(-(stop[0] + stop[1] * (margin > kMostMargin ? kMostMargin : margin))));
    }

    bool stops(const Row& row, size_t turn, double alive) const {
        return turns_.stops && alive < turns_.stops[3 * (row.first + turn) + 2];  // not so if a margin is not known
    }

    void choose(size_t turn) {
        pass_.chooses.clear();
        for (const Row& row : rows_) pass_.chooses.push_back(turns_.chooses[row.first + turn]);
        const auto num_logit_rows = static_cast<size_t>(
            std::count_if(pass_.chooses.begin(), pass_.chooses.end(), [](const Choose& c) { return c.wants_logits(); }));
        logits_.resize(num_logit_rows * pass_.vocab);
        chosen_.resize(rows_.size());
        margins_.assign(rows_.size(), NAN);
        pass_.chosen = chosen_.data(), pass_.margins = margins_.data(), pass_.logits = logits_.data();
    }

    void feed_back(size_t token) {
        float* state = &states_[token * hidden()];
        if (decoder_.shape().feeds_normed) decoder_.norm_last(state);
        features_.insert(features_.end(), state, state + hidden());
    }

    void read_newest() {
        const size_t n = rows_.size(), max_pages = first_.max_pages;
        positions_.clear(), slots_.clear(), first_keys_.clear(), pages_.clear(), cu_len_.assign(1, 0), pass_.wanted.clear();
        for (const Row& row : rows_) {
            const int64_t* pages = first_.pages + row.index * max_pages;
            const auto place = static_cast<size_t>(row.position);
            positions_.push_back(row.position);
            slots_.push_back(pages[place / kPageTokens] * static_cast<int64_t>(kPageTokens) + static_cast<int64_t>(place % kPageTokens));
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
    const Turns& turns_;
    Pass pass_;
    std::vector<Row> rows_;
    std::vector<int64_t> chosen_, newest_, positions_, slots_, first_keys_, cu_len_, pages_;
    std::vector<float> margins_, logits_, states_, features_;
};

}  // namespace

void run_in_turn(Decoder& decoder, const Pass& first, const Turns& turns, const KVStore& kv) {
    Round round(decoder, first, turns);
    for (size_t turn = 0; !round.over(); ++turn) {
        decoder.forward(round.pass(turn), kv);
        round.take(turn);
    }
}

}  // namespace paceline
