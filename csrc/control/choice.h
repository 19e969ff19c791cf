// Which drafts a step should have. The fast twin of control/choice.py's `best`, for prices that are sums.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "control/costs.h"

namespace paceline {

// The price of any number of drafts beside a pass.
struct Ladder {
    const Costs& costs;
    size_t first;      // token rows of the pass without drafts
    double besides_s;  // of it
    double scale, host_s, fee_s;  // of the host: of any step, and with any draft besides
    bool with_drafting;  // else drafting is paid

    Ladder(const Costs& costs, const PassWork& base, size_t rows, bool drafted)
        : costs(costs), first(static_cast<size_t>(base.tokens)), besides_s(costs.besides_s(base)), scale(std::exp(*costs.hour)),
          host_s(costs.host_s(rows, drafted)), fee_s(drafted ? 0.0 : costs.fee_s(rows)), with_drafting(!drafted) {}
};

struct Candidates {
    const double* alive;                        // [n, depth] not rising along a row
    const int64_t *most, *lengths, *drafters;   // [n]
    size_t n, depth;
    double plain_tokens, unpaid_s;
};

struct Best {
    std::vector<int64_t> ks;  // [n]
    double tokens, seconds, plain_seconds;
};

Best best_drafts(const Ladder& ladder, const Candidates& candidates);

}  // namespace paceline
