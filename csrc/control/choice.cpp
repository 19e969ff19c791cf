#include "control/choice.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

constexpr double kLeastSeconds = 1e-9;

struct Rung {
    double alive;
    size_t row, depth;  // depth from 1
};

// The likeliest first; of equally likely ones the shallower, then the earlier row.
std::vector<Rung> in_order(const Candidates& c) {
    std::vector<Rung> rungs;
    for (size_t d = 0; d < c.depth; ++d)
        for (size_t i = 0; i < c.n; ++i)
            if (const double a = c.alive[i * c.depth + d]; static_cast<int64_t>(d) < c.most[i] && a > 0)
                rungs.push_back({a, i, d + 1});
    std::stable_sort(rungs.begin(), rungs.end(), [](const Rung& a, const Rung& b) { return a.alive > b.alive; });
    return rungs;
}

}  // namespace

Best best_drafts(const Ladder& ladder, const Candidates& c) {
    const Costs& costs = ladder.costs;
    const auto pass_s = [&](size_t drafts) { return costs.table_s(ladder.first + drafts); };
    const auto seconds_of = [&](double pass, double drafting, double host_s) {
        return std::max((pass + drafting) * ladder.scale + host_s - c.unpaid_s, kLeastSeconds);
    };
    std::vector<size_t> going(costs.drafters * costs.width);  // rows that go so deep with a drafter
    double pass = std::max(pass_s(0) + ladder.besides_s, 0.0), drafting = 0, tokens = c.plain_tokens, keys = 0;
    const double plain_s = seconds_of(pass, 0, ladder.host_s);
    Best best{std::vector<int64_t>(c.n), tokens, plain_s, plain_s};
    double highest = best.tokens / best.seconds;
    size_t count = 0;
    const std::vector<Rung> rungs = in_order(c);
    for (size_t n = 0; n < rungs.size(); ++n) {
        const Rung& rung = rungs[n];
        keys += static_cast<double>(c.lengths[rung.row]) + static_cast<double>(rung.depth);
        pass = std::max(pass, pass_s(n + 1) + costs.pair_s * keys + ladder.besides_s);
        if (ladder.with_drafting && costs.drafters) {
            const size_t drafter = c.drafters[rung.row], depth = std::min(rung.depth, costs.width - 1);
            const size_t nth = std::min(++going[drafter * costs.width + depth], costs.most_rows);
            drafting += costs.added[(drafter * (costs.most_rows + 1) + nth) * costs.width + depth] * costs.factors[drafter];
        }
        tokens += rung.alive;
        const double seconds = seconds_of(pass, drafting, ladder.host_s + ladder.fee_s);
        if (tokens / seconds > highest) {
            highest = tokens / seconds;
            best.tokens = tokens;
            best.seconds = seconds;
            count = n + 1;
        }
    }
    for (size_t n = 0; n < count; ++n) ++best.ks[rungs[n].row];
    return best;
}

}  // namespace paceline
