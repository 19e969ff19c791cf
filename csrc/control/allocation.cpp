#include "control/allocation.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr double kMinSeconds = 1e-9;

struct Candidate {
    double survival;
    size_t row, depth;  // depth from 1
};

// Candidates, the likeliest first; of equally likely ones the less deep, then the earlier row's.
std::vector<Candidate> in_order(const Candidates& c) {
    std::vector<Candidate> found;
    for (size_t d = 0; d < c.depth; ++d)
        for (size_t i = 0; i < c.n; ++i)
            if (const double p = c.survival[i * c.depth + d]; static_cast<int64_t>(d) < c.max_drafts[i] && p > 0)
                found.push_back({p, i, d + 1});
    std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.survival > b.survival; });
    return found;
}

}  // namespace

Allocation best_drafts(const PriceLadder& ladder, const Candidates& c) {
    const Costs& costs = ladder.costs;
    const auto pass_s = [&](size_t drafts) { return costs.table_s(ladder.base_tokens + drafts); };
    const auto seconds_of = [&](double pass, double drafting, double host_s) {
        return std::max((pass + drafting) * ladder.scale + host_s - c.unpaid_s, kMinSeconds);
    };
    std::vector<size_t> num_rows(costs.drafters * costs.width);  // [drafters, width] rows that a drafter drafts to each depth
    double pass = std::max(pass_s(0) + ladder.besides_s, 0.0), drafting = 0, tokens = c.plain_tokens, keys = 0;
    const double plain_s = seconds_of(pass, 0, ladder.host_s);
    Allocation best{std::vector<int64_t>(c.n), tokens, plain_s, plain_s};
    double highest = best.tokens / best.seconds;
    size_t count = 0;
    const std::vector<Candidate> drafts = in_order(c);
    for (size_t n = 0; n < drafts.size(); ++n) {
        const Candidate& draft = drafts[n];
        keys += static_cast<double>(c.lengths[draft.row]) + static_cast<double>(draft.depth);
        pass = std::max(pass, pass_s(n + 1) + costs.pair_s * keys + ladder.besides_s);
        if (ladder.with_drafting && costs.drafters) {
            const size_t drafter = c.drafters[draft.row], depth = std::min(draft.depth, costs.width - 1);
            const size_t rows = std::min(++num_rows[drafter * costs.width + depth], costs.max_rows);
            drafting += costs.added[(drafter * (costs.max_rows + 1) + rows) * costs.width + depth] * costs.factors[drafter];
        }
        tokens += draft.survival;
        const double seconds = seconds_of(pass, drafting, ladder.host_s + ladder.draft_host_s);
        if (tokens / seconds > highest) {
            highest = tokens / seconds;
            best.tokens = tokens;
            best.seconds = seconds;
            count = n + 1;
        }
    }
    for (size_t n = 0; n < count; ++n) ++best.ks[drafts[n].row];
    return best;
}

}  // namespace paceline
