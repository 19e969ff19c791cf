// Chances of acceptance: the compiled filter of one drafter. control/acceptance.py has the model and its reasons.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Logits of acceptance, by depth and by row, with variances. The arrays are the caller's, and change as the filter learns.
struct LogitTables {
    double* depth_logit;       // [depth]
    double* depth_var;         // [depth]
    double* usual_confidence;  // [depth] mean logit of the drafter's confidence
    double* num_usual;         // [depth] confidences in that mean
    size_t depth;
    double* row_logit;  // [num_rows]
    double* row_var;    // [num_rows]
    size_t num_rows;
};

struct Spread {
    double row_var;  // variance between rows
    double confidence_weight, confidence_weight_var;
};

// Fields in the order in which Python hands them over: `FilterRates` in control/acceptance.py.
struct FilterRates {
    double depth_drift, row_drift, spread, min_spread, max_spread, confidence_drift, max_usual, largest_logit, max_depth_var;
};

struct Confidence {
    const double* values;  // [n, depth], NaN where unknown; null: nothing is known
    size_t depth;

    const double* line(size_t index) const { return values ? values + index * depth : nullptr; }
};

// Verified drafts of some rows; only one drafter's count.
struct DraftOutcomes {
    const int64_t *rows, *num_verified, *num_accepted, *drafters;  // [n]
    int64_t drafter;
    size_t n;
};

struct SurvivalQuery {
    size_t depth;
    double optimism;   // standard deviations that are added to a logit
    bool assume_usual;  // true: an unknown confidence counts as the usual one; false: it means that there is no draft
};

// Write the probability that a row's drafts are accepted up to each depth. confidence: [confidence_depth] of the row's drafts, NaN
// where unknown; null: all unknown. out: [query.depth]
void survival(const LogitTables& tables, double confidence_weight, double largest_logit, size_t row, const double* confidence,
              size_t confidence_depth, const SurvivalQuery& query, double* out);

Spread observe(const LogitTables& tables, Spread spread, const FilterRates& rates, const Confidence& confidence, const DraftOutcomes& outcomes);

// Write where drafting stops for a row: where the next draft is accepted with a probability below `min_survival`.
// odds, least: [tables.depth], see `Stop` in core/nouns.py. Returns the depth that it can reach: it ends where even a
// certain draft is not worth its time.
size_t find_stops(const LogitTables& tables, double confidence_weight, size_t row, double min_survival, double* odds, double* least);

}  // namespace paceline
