// Number of drafts of each row of a step, for prices that are sums. control/allocation.py has the reasons, and
// tests/oracles/allocation.py is the same in Python.
#pragma once

#include <cmath>
#include <vector>

#include "control/costs.h"

namespace paceline {

// The price of any number of drafts beside a pass.
struct PriceLadder {
    const Costs& costs;
    size_t base_tokens;           // token rows of the pass without drafts
    double besides_s;             // seconds of the pass without drafts, see `Costs::besides_s`
    double scale;                 // factor of the machine's drift
    double host_s, draft_host_s;  // host time of any step, and what any draft adds to it
    bool with_drafting;           // false: drafting is done already, and is not priced

    PriceLadder(const Costs& costs, const PassWork& base, size_t rows, bool drafted)
        : costs(costs), base_tokens(static_cast<size_t>(base.tokens)), besides_s(costs.besides_s(base)), scale(std::exp(*costs.drift)),
          host_s(costs.host_s(rows, drafted)), draft_host_s(drafted ? 0.0 : costs.draft_host_s(rows)), with_drafting(!drafted) {}
};

struct Candidates {
    const double* survival;                         // [n, depth] not rising along a row
    const int64_t *max_drafts, *lengths, *drafters;  // [n]
    size_t n, depth;
    double plain_tokens;  // tokens of the step without drafts
    double unpaid_s;      // seconds of the step that goodput does not count
};

struct Allocation {
    std::vector<int64_t> ks;  // [n]
    double tokens, seconds, plain_seconds;
};

Allocation best_drafts(const PriceLadder& ladder, const Candidates& candidates);

}  // namespace paceline
