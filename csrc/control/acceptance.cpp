#include "control/acceptance.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

double sigmoid(double z) { return 1 / (std::exp(-z) + 1); }

double within(double x, double limit) { return std::min(std::max(x, -limit), limit); }

double logit(double p, double largest) {
    const double lowest = 1 / (1 + std::exp(largest));
    const double inside = std::min(std::max(p, lowest), 1 - lowest);
    return std::log(inside / (1 - inside));
}

void drift(const LogitTables& t, const Spread& spread, const FilterRates& rates) {
    for (size_t d = 0; d < t.depth; ++d) t.depth_var[d] = std::min(t.depth_var[d] + rates.depth_drift, rates.max_depth_var);
    for (size_t r = 0; r < t.num_rows; ++r) t.row_var[r] = std::min(t.row_var[r] + rates.row_drift * spread.row_var, spread.row_var);
}

// Learn the usual confidence. Returns how much each confidence differs from it, 0 where unknown. [indices, depth]
std::vector<double> learn_usual(const LogitTables& t, const FilterRates& rates, const Confidence& confidence,
                                const std::vector<size_t>& indices, size_t depth) {
    std::vector<double> delta(indices.size() * depth);
    if (!confidence.values) return delta;
    for (size_t d = 0; d < std::min(confidence.depth, t.depth); ++d) {
        double sum = 0, count = 0;
        for (size_t i : indices) {
            const double c = confidence.line(i)[d];
            if (!std::isfinite(c)) continue;
            sum += logit(c, rates.largest_logit);
            count += 1;
        }
        t.num_usual[d] = std::min(t.num_usual[d] + count, rates.max_usual);
        t.usual_confidence[d] += (sum - count * t.usual_confidence[d]) / std::max(t.num_usual[d], 1.0);
        if (d >= depth) continue;
        for (size_t n = 0; n < indices.size(); ++n) {
            const double c = confidence.line(indices[n])[d];
            if (std::isfinite(c)) delta[n * depth + d] = logit(c, rates.largest_logit) - t.usual_confidence[d];
        }
    }
    return delta;
}

}  // namespace

void survival(const LogitTables& t, double confidence_weight, double largest_logit, size_t row, const double* confidence,
              size_t confidence_depth, const SurvivalQuery& query, double* out) {
    double chance = 1;
    for (size_t d = 0; d < query.depth; ++d) {
        const double c = confidence && d < confidence_depth ? confidence[d] : NAN;
        if (d >= t.depth || (std::isnan(c) && confidence && !query.assume_usual)) {
            chance = 0;
        } else {
            double z = t.depth_logit[d] + t.row_logit[row];
            if (!std::isnan(c)) z = (logit(c, largest_logit) - t.usual_confidence[d]) * confidence_weight + t.depth_logit[d] + t.row_logit[row];
            if (query.optimism > 0) z += query.optimism * std::sqrt(t.depth_var[d] + t.row_var[row]);
            chance *= sigmoid(z);
        }
        out[d] = chance;
    }
}

size_t find_stops(const LogitTables& t, double confidence_weight, size_t row, double min_survival, double* odds, double* least) {
    size_t reach = t.depth;
    for (size_t d = t.depth; d-- > 0;) {
        const size_t after = std::min(d + 1, t.depth - 1);
        least[d] = min_survival / sigmoid(t.depth_logit[after] + t.row_logit[row]);
        odds[d] = t.depth_logit[d] + t.row_logit[row] - confidence_weight * t.usual_confidence[d];
        if (least[d] >= 1) reach = d + 1;
    }
    return reach;
}

Spread observe(const LogitTables& t, Spread spread, const FilterRates& rates, const Confidence& confidence, const DraftOutcomes& o) {
    drift(t, spread, rates);
    std::vector<size_t> indices;  // indices of this drafter's outcomes
    int64_t deepest = 0;
    for (size_t i = 0; i < o.n; ++i) {
        if (o.drafters[i] != o.drafter) continue;
        indices.push_back(i);
        deepest = std::max(deepest, o.num_verified[i]);
    }
    const size_t depth = std::min(static_cast<size_t>(deepest), t.depth);
    if (depth == 0) return spread;
    const std::vector<double> delta = learn_usual(t, rates, confidence, indices, depth);
    std::vector<double> depth_weight(depth), depth_error(depth);
    double squares = 0, confidence_weight = 0, confidence_error = 0;
    for (size_t n = 0; n < indices.size(); ++n) {
        const size_t i = indices[n], row = o.rows[i];
        const int64_t tested = std::min(o.num_accepted[i] + 1, o.num_verified[i]);
        const double old_logit = t.row_logit[row], old_var = t.row_var[row];
        double row_weight = 0, row_error = 0;
        for (size_t d = 0; d < depth && static_cast<int64_t>(d) < tested; ++d) {
            const double s = delta[n * depth + d];
            const double chance = sigmoid(t.depth_logit[d] + old_logit + spread.confidence_weight * s);
            const double error = (static_cast<int64_t>(d) < o.num_accepted[i] ? 1.0 : 0.0) - chance;
            const double weight = chance - chance * chance;
            const double for_row = 1 / (1 + weight * t.depth_var[d]);  // the part of the error that the depth does not explain
            const double for_depth = 1 / (1 + weight * old_var);
            row_weight += weight * for_row;
            row_error += error * for_row;
            depth_weight[d] += weight * for_depth;
            depth_error[d] += error * for_depth;
            confidence_weight += weight * s * s;
            confidence_error += error * s;
        }
        const double var = 1 / (1 / old_var + row_weight), row_logit = old_logit + var * row_error;
        squares += row_logit * row_logit + var;
        t.row_var[row] = var;
        t.row_logit[row] = within(row_logit, rates.largest_logit / 2);
    }
    for (size_t d = 0; d < depth; ++d) {
        t.depth_var[d] = 1 / (1 / t.depth_var[d] + depth_weight[d]);
        t.depth_logit[d] = within(t.depth_logit[d] + t.depth_var[d] * depth_error[d], rates.largest_logit);
    }
    const double min_var = rates.min_spread * rates.min_spread, max_var = rates.max_spread * rates.max_spread;
    const double mean = squares / static_cast<double>(indices.size());
    spread.row_var += rates.spread * (std::min(std::max(mean, min_var), max_var) - spread.row_var);
    spread.confidence_weight_var = 1 / (1 / (spread.confidence_weight_var + rates.confidence_drift) + confidence_weight);
    spread.confidence_weight = std::max(0.0, spread.confidence_weight + spread.confidence_weight_var * confidence_error);
    return spread;
}

}  // namespace paceline
