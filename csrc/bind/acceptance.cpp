// The controller's estimates of acceptance.
#include <cmath>

#include "bind/acceptance.h"

namespace paceline {
namespace {

Returned<double, 2> survival_probs(const Estimates& estimates, double largest_logit, const Ids& rows, size_t depth,
                                   const std::optional<Table<double>>& confidence, bool assume_usual, double optimism) {
    require_rows(rows, {&estimates});
    require(depth <= kMaxDepth, "too deep");
    const size_t n = rows.size();
    const Confidence known = checked_confidence(confidence, n);
    auto out = new_array<double>(n * depth);
    for (size_t i = 0; i < n; ++i)
        survival(estimates.tables(), estimates.confidence_weight(), largest_logit, rows.data()[i], known.line(i), known.depth,
                 {depth, optimism, assume_usual}, out.get() + i * depth);
    return returned(std::move(out), n, depth);
}

// drafters: the drafter of each outcome. indices: of each of the estimates, its drafter's index.
void observe_drafts(const AllEstimates& all, const Numbers& rates, const Ids& rows, const Ids& num_verified, const Ids& num_accepted,
                    const Ids& drafters, const std::vector<int64_t>& indices, const std::optional<Table<double>>& confidence) {
    const size_t n = rows.size();
    require(rates.size() == 9, "nine rates");
    require(indices.size() == all.size(), "estimates are of drafters");
    require(num_verified.size() == n && num_accepted.size() == n && drafters.size() == n, "outcomes differ in number");
    require_rows(rows, all);
    const double* r = rates.data();
    const Confidence known = checked_confidence(confidence, n);
    for (size_t d = 0; d < all.size(); ++d)
        if (all[d])
            all[d]->observe({r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8]}, known,
                            {rows.data(), num_verified.data(), num_accepted.data(), drafters.data(), indices[d], n});
}

// Seconds of one more draft of a row, where rows have about `k` drafts, 1 or more, and half of them draft on: see `MarginalPrices` in
// control/allocation.py.
double one_more_s(const double* half_s, size_t depth, size_t k, size_t half) {
    const auto price = [&](size_t drafts) { return drafts ? half_s[drafts - 1] : 0.0; };
    const size_t high = std::min(k + 1, depth), low = std::max(std::min(k - 1, high - 1), std::min<size_t>(1, high - 1));
    return (price(high) - price(low)) / static_cast<double>(high - low) / static_cast<double>(half);
}

// How far rows may draft; each row's drafter, -1 where it drafts nothing; and stop rules of rows whose drafter takes stop rules.
// honours_stops: estimates of the drafters that take them. half_s: [drafters, depth] seconds of 1, 2, ... drafts of half of the rows.
nb::tuple stop_drafts(const AllEstimates& honours_stops, const Table<double>& half_s, size_t half, double tokens_per_s, const Ids& rows,
                      const Ids& max_drafts, const Ids& ks, const Ids& drafters, int64_t left_alone) {
    const size_t n = rows.size(), depth = half_s.shape(1);
    require(max_drafts.size() == n && ks.size() == n && drafters.size() == n, "a number for each row");
    require(half_s.shape(0) == honours_stops.size() && depth > 0 && half > 0, "every drafter has its prices");
    require_rows(rows, honours_stops);
    const auto heeds = [&](size_t i) {
        const int64_t d = drafters.data()[i];
        require(d < static_cast<int64_t>(honours_stops.size()), "a row's drafter is none");
        return ks.data()[i] > 0 && d >= 0 && honours_stops[d];
    };
    std::vector<double> planned(honours_stops.size()), count(honours_stops.size());
    for (size_t i = 0; i < n; ++i)
        if (heeds(i)) planned[drafters.data()[i]] += static_cast<double>(ks.data()[i]), ++count[drafters.data()[i]];
    std::vector<int64_t> reach(ks.data(), ks.data() + n), drafter_of(n, -1);
    nb::list stops;
    for (size_t i = 0; i < n; ++i) {
        const int64_t d = drafters.data()[i];
        if (heeds(i) && rows.data()[i] != left_alone) {
            const LogitTables tables = honours_stops[d]->tables();
            const double weight = honours_stops[d]->confidence_weight();
            const auto mean = static_cast<size_t>(std::nearbyint(planned[d] / count[d]));
            std::vector<double> odds(tables.depth), least(tables.depth);
            const double min_survival = one_more_s(half_s.data() + d * depth, depth, mean, half) * tokens_per_s;
            const size_t found = find_stops(tables, weight, rows.data()[i], min_survival, odds.data(), least.data());
            reach[i] = std::min(max_drafts.data()[i], static_cast<int64_t>(found));
            stops.append(nb::make_tuple(rows.data()[i], odds, weight, least));
        }
        if (reach[i] > 0) drafter_of[i] = d;
    }
    return nb::make_tuple(copied(reach), copied(drafter_of), stops);
}

}  // namespace

void bind_acceptance(nb::module_& m) {
    nb::class_<Estimates>(m, "Estimates")
        .def(nb::init<const State&, const State&, const State&, const State&, const State&, const State&, const State&>(),
             "depth_logit"_a.noconvert(), "depth_var"_a.noconvert(), "usual_confidence"_a.noconvert(), "num_usual"_a.noconvert(),
             "row_logit"_a.noconvert(), "row_var"_a.noconvert(), "spread"_a.noconvert());
    m.def("survival_probs", &survival_probs, "estimates"_a, "largest_logit"_a, "rows"_a, "depth"_a, "confidence"_a.none(),
          "assume_usual"_a, "optimism"_a);
    m.def("observe_drafts", &observe_drafts, "estimates"_a, "rates"_a, "rows"_a, "num_verified"_a, "num_accepted"_a, "drafters"_a,
          "indices"_a, "confidence"_a.none());
    m.def("stop_drafts", &stop_drafts, "honours_stops"_a, "half_s"_a, "half"_a, "tokens_per_s"_a, "rows"_a, "max_drafts"_a, "ks"_a,
          "drafters"_a, "left_alone"_a);
}

}  // namespace paceline
