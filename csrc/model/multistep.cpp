#include "model/multistep.h"

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

// The rows that are still at it.
class Going {
  public:
    Going(const Pass& first, const Turns& turns) : turns_(turns) {
        for (size_t row = 0, at = 0; row < first.num_rows; at += static_cast<size_t>(turns.depths[row++]))
            rows_.push_back({row, at, first.positions[first.cu_len[row + 1] - 1], 1.0});
    }

    const std::vector<Row>& rows() const { return rows_; }

    // How the rows choose; what is pointed to is kept until it is asked again.
    std::vector<Choose> chooses(size_t turn) {
        std::vector<Choose> found;
        pointed_.clear();
        pointed_.reserve(rows_.size());
        for (const Row& row : rows_) found.push_back(choose(row, turn));
        return found;
    }

    // Hand out what a pass chose, and keep the rows that go on, as `go_on(place among them before)` is told.
    template <class GoOn>
    void take(size_t turn, const int64_t* chosen, const float* margins, const GoOn& go_on) {
        std::vector<Row> going_on;
        for (size_t i = 0; i < rows_.size(); ++i) {
            const Row& row = rows_[i];
            turns_.chosen[row.first + turn] = chosen[i];
            turns_.margins[row.first + turn] = margins[i];
            if (chosen[i] < 0 || turn + 1 >= static_cast<size_t>(turns_.depths[row.index])) continue;
            const double alive = alive_with(row, turn, margins[i]);
            if (stops(row, turn, alive)) continue;
            going_on.push_back({row.index, row.first, row.position + 1, alive});
            go_on(i);
        }
        rows_ = std::move(going_on);
    }

  private:
    Choose choose(const Row& row, size_t turn) {
        Choose how = turns_.chooses[row.first + turn];
        const Pointer* pointer = turns_.pointers[row.index];
        if (!pointer || how.edits.count) return how;
        const auto found = pointer->look(turns_.chosen + row.first, turn);
        if (!found || static_cast<size_t>(found->token_id) >= turns_.num_ids) return how;
        pointed_.push_back(*found);
        static constexpr float kUnscaled = 1.0f;
        how.edits = {&pointed_.back().token_id, &kUnscaled, &pointed_.back().add, 1};
        if (how.kind == Kind::argmax) how.kind = Kind::noisy;  // argmax looks at no edits
        return how;
    }

    double alive_with(const Row& row, size_t turn, double margin) const {
        if (!turns_.stops) return 1.0;
        const double* stop = turns_.stops + 3 * (row.first + turn);
        return row.alive / (1 + std::exp(-(stop[0] + stop[1] * (margin > kMostMargin ? kMostMargin : margin))));
    }

    bool stops(const Row& row, size_t turn, double alive) const {
        return turns_.stops && alive < turns_.stops[3 * (row.first + turn) + 2];  // not so if a margin is not known
    }

    const Turns& turns_;
    std::vector<Row> rows_;
    std::vector<Pointed> pointed_;
};

size_t num_logit_rows(const std::vector<Choose>& chooses) {
    return static_cast<size_t>(std::count_if(chooses.begin(), chooses.end(), [](const Choose& c) { return c.wants_logits(); }));
}

// Passes over one token of each row, and their memory.
class Round {
  public:
    Round(Decoder& decoder, const Pass& first, const Turns& turns)
        : decoder_(decoder), first_(first), going_(first, turns), pass_(first) {}

    bool over() const { return going_.rows().empty(); }

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

    void take(size_t turn) {
        newest_.clear(), features_.clear();
        going_.take(turn, chosen_.data(), margins_.data(), [&](size_t i) {
            newest_.push_back(chosen_[i]);
            if (reads_features()) feed_back(static_cast<size_t>(pass_.wanted[i]));
        });
    }

  private:
    size_t hidden() const { return decoder_.shape().hidden; }
    bool reads_features() const { return decoder_.shape().reads_features; }

    void choose(size_t turn) {
        pass_.chooses = going_.chooses(turn);
        logits_.resize(num_logit_rows(pass_.chooses) * pass_.vocab);
        chosen_.resize(pass_.chooses.size());
        margins_.assign(pass_.chooses.size(), NAN);
        pass_.chosen = chosen_.data(), pass_.margins = margins_.data(), pass_.logits = logits_.data();
    }

    void feed_back(size_t token) {
        float* state = &states_[token * hidden()];
        if (decoder_.shape().feeds_normed) decoder_.norm_last(state);
        features_.insert(features_.end(), state, state + hidden());
    }

    void read_newest() {
        const size_t n = going_.rows().size(), max_pages = first_.max_pages;
        positions_.clear(), slots_.clear(), first_keys_.clear(), pages_.clear(), cu_len_.assign(1, 0), pass_.wanted.clear();
        for (const Row& row : going_.rows()) {
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
    Going going_;
    Pass pass_;
    std::vector<int64_t> chosen_, newest_, positions_, slots_, first_keys_, cu_len_, pages_;
    std::vector<float> margins_, logits_, states_, features_;
};

// One pass over all places of each row's guesses, and then their choices place by place, each told of those before.
class Relayed {
  public:
    Relayed(Decoder& decoder, const Pass& first, const Turns& turns, const KVStore& kv)
        : decoder_(decoder), going_(first, turns), pass_(first) {
        run_all(kv);
        std::vector<int64_t> chosen;
        std::vector<float> margins;
        for (const Row& row : going_.rows()) {
            chosen.push_back(chosen_[row.first]);
            margins.push_back(margins_[row.first]);
        }
        take(0, chosen, margins);
        if (over()) return;
        read_places(turns);
        tell(0, nullptr);
    }

    bool over() const { return going_.rows().empty(); }

    void run(size_t turn) {
        const std::vector<int64_t> before = std::move(newest_);
        std::vector<int64_t> chosen(before.size());
        std::vector<float> margins(before.size(), NAN), logits;
        pass_.chooses = going_.chooses(turn);
        logits.resize(num_logit_rows(pass_.chooses) * pass_.vocab);
        pass_.wanted.resize(before.size());
        pass_.chosen = chosen.data(), pass_.margins = margins.data(), pass_.logits = logits.data();
        tell(turn, before.data());
        take(turn, chosen, margins);
    }

  private:
    // The pass: chooses the first guesses, and leaves states and logits of all.
    void run_all(const KVStore& kv) {
        pass_.chooses.assign(pass_.wanted.size(), Choose{Kind::logits, 0.0, {}, {}, {}});
        const std::vector<Choose> first = going_.chooses(0);
        for (size_t i = 0; i < first.size(); ++i) pass_.chooses[going_.rows()[i].first] = first[i];
        for (const Choose& how : pass_.chooses) logit_row_.push_back(how.wants_logits() ? num_logits_++ : 0);
        states_.resize(pass_.num_tokens * hidden());
        logits_.resize(num_logits_ * pass_.vocab);
        chosen_.resize(pass_.wanted.size());
        margins_.assign(pass_.wanted.size(), NAN);
        pass_.taps = {{pass_.num_layers, states_.data()}};
        pass_.chosen = chosen_.data(), pass_.margins = margins_.data(), pass_.logits = logits_.data();
        decoder_.forward(pass_, kv);
        places_ = pass_.wanted;
        for (int64_t place : places_) decoder_.norm_last(&states_[static_cast<size_t>(place) * hidden()]);
    }

    void read_places(const Turns& turns) {
        std::vector<const float*> first, normed;
        sums_row_.resize(places_.size());
        for (const Row& row : going_.rows())
            for (size_t at = row.first; at < row.first + static_cast<size_t>(turns.depths[row.index]); ++at) {
                sums_row_[at] = normed.size();
                first.push_back(state(row.first));
                normed.push_back(state(at));
            }
        decoder_.relay_places(first, normed, sums_);
    }

    const float* state(size_t place) const { return &states_[static_cast<size_t>(places_[place]) * hidden()]; }

    void tell(size_t turn, const int64_t* before) {
        const size_t n = going_.rows().size();
        const size_t stride = round_up(2 * decoder_.relays().inner, kPanel);
        Place place{n, before, told_.data(), {}, {}, {}, nullptr};
        for (const Row& row : going_.rows()) {
            const size_t at = row.first + turn;
            place.normed.push_back(state(at));
            place.sums.push_back(&sums_[sums_row_[at] * stride]);
            if (before) place.logits.push_back(&logits_[logit_row_[at] * pass_.vocab]);
        }
        std::vector<float> told(n * decoder_.relays().size);
        place.told = told.data();
        decoder_.relay(place, pass_);
        told_ = std::move(told);
    }

    void take(size_t turn, const std::vector<int64_t>& chosen, const std::vector<float>& margins) {
        const size_t size = decoder_.relays().size;
        std::vector<float> told;
        newest_.clear();
        going_.take(turn, chosen.data(), margins.data(), [&](size_t i) {
            newest_.push_back(chosen[i]);
            if (turn > 0) told.insert(told.end(), &told_[i * size], &told_[i * size] + size);
        });
        told_ = std::move(told);
    }

    size_t hidden() const { return decoder_.shape().hidden; }

    Decoder& decoder_;
    Going going_;
    Pass pass_;
    size_t num_logits_ = 0;
    std::vector<size_t> logit_row_, sums_row_;   // [places]
    std::vector<int64_t> places_;                // tokens of the pass that guesses are made at
    std::vector<float> states_, logits_, told_;  // of the pass, of its places but the first, of the newest guesses
    Lines<float> sums_;                          // of the places of rows that go on, [places, stride]
    std::vector<int64_t> chosen_, newest_;
    std::vector<float> margins_;
};

}  // namespace

void run_relayed(Decoder& decoder, const Pass& first, const Turns& turns, const KVStore& kv) {
    if (first.num_rows == 0) return;
    Relayed relayed(decoder, first, turns, kv);
    for (size_t turn = 1; !relayed.over(); ++turn) relayed.run(turn);
}

void run_in_turn(Decoder& decoder, const Pass& first, const Turns& turns, const KVStore& kv) {
    Round round(decoder, first, turns);
    for (size_t turn = 0; !round.over(); ++turn) {
        decoder.forward(round.pass(turn), kv);
        round.take(turn);
    }
}

}  // namespace paceline
