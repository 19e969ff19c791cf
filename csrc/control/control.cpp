#include "control/control.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

double sigmoid(double z) { return 1 / (std::exp(-z) + 1); }

double within(double x, double most) { return std::min(std::max(x, -most), most); }

double logit(double p, double largest) {
    const double least = 1 / (1 + std::exp(largest));
    const double inside = std::min(std::max(p, least), 1 - least);
    return std::log(inside / (1 - inside));
}

void drift(const Habits& h, const Spread& spread, const Rates& rates) {
    for (size_t d = 0; d < h.depth; ++d) h.habit_var[d] += rates.habit_drift;
    for (size_t r = 0; r < h.num_rows; ++r)
        h.ease_var[r] = std::min(h.ease_var[r] + rates.row_drift * spread.rows, spread.rows);
}

// Learns what confidence is usual, and returns the surprise in each; 0 where nothing was said. [own rows, depth]
std::vector<double> learn_usual(const Habits& h, const Rates& rates, const Said& said, const std::vector<size_t>& own,
                                size_t depth) {
    std::vector<double> surprise(own.size() * depth);
    if (!said.confidence) return surprise;
    for (size_t d = 0; d < std::min(said.depth, h.depth); ++d) {
        double sum = 0, count = 0;
        for (size_t i : own) {
            const double c = said.confidence[i * said.depth + d];
            if (!std::isfinite(c)) continue;
            sum += logit(c, rates.largest_logit);
            count += 1;
        }
        h.num_usual[d] = std::min(h.num_usual[d] + count, rates.most_usual);
        h.usual[d] += (sum - count * h.usual[d]) / std::max(h.num_usual[d], 1.0);
        if (d >= depth) continue;
        for (size_t n = 0; n < own.size(); ++n) {
            const double c = said.confidence[own[n] * said.depth + d];
            if (std::isfinite(c)) surprise[n * depth + d] = logit(c, rates.largest_logit) - h.usual[d];
        }
    }
    return surprise;
}

}  // namespace

void alive(const Habits& h, double sureness, double largest_logit, size_t row, const double* confidence, size_t said_depth,
           const Question& q, double* out) {
    double chance = 1;
    for (size_t d = 0; d < q.depth; ++d) {
        const double c = confidence && d < said_depth ? confidence[d] : NAN;
        if (d >= h.depth || (std::isnan(c) && confidence && !q.usual)) {
            chance = 0;
        } else {
            double z = h.habit[d] + h.ease[row];
            if (!std::isnan(c)) z = (logit(c, largest_logit) - h.usual[d]) * sureness + h.habit[d] + h.ease[row];
            if (q.optimism > 0) z += q.optimism * std::sqrt(h.habit_var[d] + h.ease_var[row]);
            chance *= sigmoid(z);
        }
        out[d] = chance;
    }
}

size_t stops(const Habits& h, double sureness, size_t row, double bar, double* odds, double* least) {
    size_t furthest = h.depth;
    for (size_t d = h.depth; d-- > 0;) {
        const size_t after = std::min(d + 1, h.depth - 1);
        least[d] = bar / sigmoid(h.habit[after] + h.ease[row]);
        odds[d] = h.habit[d] + h.ease[row] - sureness * h.usual[d];
        if (least[d] >= 1) furthest = d + 1;
    }
    return furthest;
}

Spread observe(const Habits& h, Spread spread, const Rates& rates, const Said& said, const Kept& k) {
    drift(h, spread, rates);
    std::vector<size_t> own;
    int64_t deepest = 0;
    for (size_t i = 0; i < k.n; ++i) {
        if (k.drafters[i] != k.own) continue;
        own.push_back(i);
        deepest = std::max(deepest, k.num_verified[i]);
    }
    const size_t depth = std::min(static_cast<size_t>(deepest), h.depth);
    if (depth == 0) return spread;
    const std::vector<double> surprise = learn_usual(h, rates, said, own, depth);
    std::vector<double> habit_weight(depth), habit_error(depth);
    double seen = 0, sure_weight = 0, sure_error = 0;
    for (size_t n = 0; n < own.size(); ++n) {
        const size_t i = own[n], row = k.rows[i];
        const int64_t tested = std::min(k.num_accepted[i] + 1, k.num_verified[i]);
        const double old_ease = h.ease[row], old_var = h.ease_var[row];
        double row_weight = 0, row_error = 0;
        for (size_t d = 0; d < depth && static_cast<int64_t>(d) < tested; ++d) {
            const double s = surprise[n * depth + d];
            const double chance = sigmoid(h.habit[d] + old_ease + spread.sureness * s);
            const double error = (static_cast<int64_t>(d) < k.num_accepted[i] ? 1.0 : 0.0) - chance;
            const double weight = chance - chance * chance;
            const double for_row = 1 / (1 + weight * h.habit_var[d]);  // what an uncertain habit does not explain
            const double for_habit = 1 / (1 + weight * old_var);
            row_weight += weight * for_row;
            row_error += error * for_row;
            habit_weight[d] += weight * for_habit;
            habit_error[d] += error * for_habit;
            sure_weight += weight * s * s;
            sure_error += error * s;
        }
        const double var = 1 / (1 / old_var + row_weight), ease = old_ease + var * row_error;
        seen += ease * ease + var;
        h.ease_var[row] = var;
        h.ease[row] = within(ease, rates.largest_logit / 2);
    }
    for (size_t d = 0; d < depth; ++d) {
        h.habit_var[d] = 1 / (1 / h.habit_var[d] + habit_weight[d]);
        h.habit[d] = within(h.habit[d] + h.habit_var[d] * habit_error[d], rates.largest_logit);
    }
    const double least = rates.least_spread * rates.least_spread, most = rates.most_spread * rates.most_spread;
    const double mean = seen / static_cast<double>(own.size());
    spread.rows += rates.spread * (std::min(std::max(mean, least), most) - spread.rows);
    spread.sureness_var = 1 / (1 / (spread.sureness_var + rates.sureness_drift) + sure_weight);
    spread.sureness = std::max(0.0, spread.sureness + spread.sureness_var * sure_error);
    return spread;
}

}  // namespace paceline
