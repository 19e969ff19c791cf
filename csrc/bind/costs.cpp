// What steps cost, and which drafts they should have.
#include <numeric>

#include "bind/acceptance.h"
#include "control/allocation.h"
#include "control/costs.h"

namespace paceline {
namespace {

using Tally = OutArray<int64_t>;
using Prices = nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Work = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // `PassWork`
using StateTally = std::tuple<State, Tally>;
using PriceTables = std::tuple<Prices, Prices, Prices>;

constexpr int64_t kMaxLength = int64_t{1} << 48;  // longest sum of lengths over all rows

PassWork work_of(const Work& work) {
    const auto [tokens, unscored, kv_tokens, pairs] = work;
    require(0 <= tokens && tokens < int64_t{1} << 40, "a pass has more token rows than any machine can hold");
    return {tokens, unscored, kv_tokens, pairs};
}

// Lengths of some rows; 0 for a row that is not among `known_rows`.
std::vector<int64_t> lengths_of(const Ids& rows, const Ids& known_rows, const Ids& known_lengths) {
    require(known_rows.size() == known_lengths.size(), "a length for each row");
    std::vector<int64_t> lengths(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        const int64_t* const end = known_rows.data() + known_rows.size();
        const int64_t* const at = std::find(known_rows.data(), end, rows.data()[i]);
        if (at != end) lengths[i] = known_lengths.data()[at - known_rows.data()];
    }
    return lengths;
}

// Prices, in arrays that Python keeps: see `OnlineCost` in control/online_cost.py.
class CostTables {
  public:
    CostTables(const std::tuple<State, Tally, Tally>& sizes, const std::tuple<Ids, Numbers, State>& passes,
               const std::tuple<Numbers, Numbers, bool>& curve, const std::tuple<double, double, double>& prices, const State& keys,
               const PriceTables& drafting, const StateTally& drafters, const StateTally& host, const StateTally& drift, const Numbers& rates)
        : sizes_(sizes), passes_(passes), curve_(curve), drafting_(drafting), drafters_(drafters), host_(host), drift_(drift), keys_(keys) {
        const auto& [own, seen, last] = sizes_;
        const auto& [size, measured_s, pass_s] = passes_;
        const auto& [counts, seconds, stepped] = curve_;
        const auto& [added, deepening, whole] = drafting_;
        const auto& [factors, drafted] = drafters_;
        const auto& [host_s, host_seen] = host_;
        const auto& [drift_log, num_passes] = drift_;
        require(own.size() > 0 && seen.size() == own.size() && last.size() == own.size(), "tables of sizes differ");
        require(size.size() > 0 && measured_s.size() == size.size() && pass_s.size() == size.size(), "tables of passes differ");
        require(within(size, own.size()), "a size lies outside its table");
        require(counts.size() > 0 && seconds.size() == counts.size(), "no pass has a price");
        bool fits = added.shape(0) == factors.size() && drafted.size() == factors.size() && added.shape(1) > 1 && added.shape(2) > 0;
        for (size_t axis = 0; axis < 3; ++axis) fits &= deepening.shape(axis) == added.shape(axis) && whole.shape(axis) == added.shape(axis);
        require(fits, "prices of drafting do not fit");
        require(host_s.size() == 2 && host_seen.size() == 2, "the host has two kinds of steps");
        require(drift_log.size() == 1 && num_passes.size() == 1, "there is one drift, and one count of passes");
        require(keys.size() == 2, "keys have a price and a variance");
        require(rates.size() == 9, "nine rates");
        const auto [pair_s, unscored_s, key_s] = prices;
        const double* r = rates.data();
        costs = {{own.data(), seen.data(), own.size(), size.data(), measured_s.data(), pass_s.data(), size.size()},
                 last.data(), num_passes.data(), drift_log.data(),
                 {counts.data(), seconds.data(), counts.size(), stepped},
                 pair_s, unscored_s, keys.data(), key_s,
                 added.data(), deepening.data(), whole.data(), factors.data(), drafted.data(),
                 added.shape(0), added.shape(1) - 1, added.shape(2),
                 host_s.data(), host_seen.data(),
                 {r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8]}};
    }

    StepRows step_rows(const Ids& ks, const Ids& drafters) const {
        require(ks.size() == drafters.size(), "a number for each row");
        for (size_t i = 0; i < ks.size(); ++i) require_price(ks.data()[i], drafters.data()[i]);
        return {ks.data(), drafters.data(), ks.size()};
    }

    Allocation best(const PriceLadder& ladder, const Candidates& c) const {
        for (size_t i = 0; i < c.n && ladder.with_drafting && costs.drafters; ++i) require_price(c.max_drafts[i], c.drafters[i]);
        return best_drafts(ladder, c);
    }

    Costs costs{};

  private:
    void require_price(int64_t k, int64_t drafter) const {
        require(k <= 0 || (0 <= drafter && static_cast<size_t>(drafter) < costs.drafters), "a row's drafter has no price");
    }

    // Arrays that `costs` reads.
    std::tuple<State, Tally, Tally> sizes_;
    std::tuple<Ids, Numbers, State> passes_;
    std::tuple<Numbers, Numbers, bool> curve_;
    PriceTables drafting_;
    StateTally drafters_, host_, drift_;
    State keys_;
};

std::vector<double> drafting_of(const CostTables& tables, const Ids& ks, const Ids& drafters) {
    return tables.costs.drafting_s(tables.step_rows(ks, drafters));
}

Returned<double, 2> prices(const CostTables& tables, const Work& base, const Ids& lengths, size_t paying, size_t num_drafters, size_t depth) {
    require(paying <= lengths.size(), "more rows pay than there are");
    require(num_drafters <= tables.costs.drafters && depth <= kMaxDepth, "not all of these drafters and depths have a price");
    auto out = new_array<double>(num_drafters * (depth + 1));
    int64_t sum = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
        require(0 <= lengths.data()[i] && lengths.data()[i] <= kMaxLength && sum <= kMaxLength, "rows are longer than any machine can hold");
        sum += lengths.data()[i];
    }
    tables.costs.prices(work_of(base), lengths.size(), sum, paying, num_drafters, depth, out.get());
    return returned(std::move(out), num_drafters, depth + 1);
}

nb::tuple choose_drafts(const CostTables& tables, const Work& base, bool drafted, const Table<double>& survival, const Ids& max_drafts,
                        const Ids& lengths, const Ids& drafters, double plain_tokens, double unpaid_s) {
    const size_t n = survival.shape(0), depth = survival.shape(1);
    require(max_drafts.size() == n && lengths.size() == n && drafters.size() == n, "a number for each row");
    const PriceLadder ladder(tables.costs, work_of(base), n, drafted);
    const Allocation best =
        tables.best(ladder, {survival.data(), max_drafts.data(), lengths.data(), drafters.data(), n, depth, plain_tokens, unpaid_s});
    return nb::make_tuple(copied(best.ks), best.tokens, best.seconds, best.plain_seconds);
}

// Confidence in drafts that lookup drafters would propose.
struct Previews {
    std::vector<Confidence> confidence;  // [num_drafters]
    std::vector<bool> exists;
    std::vector<Table<double>> tables;  // which `confidence` points into

    Previews(const nb::tuple& previews, size_t n) : confidence(nb::len(previews)), exists(nb::len(previews)) {
        for (size_t d = 0; d < confidence.size(); ++d) {
            exists[d] = !previews[d].is_none();
            if (!exists[d]) continue;
            tables.push_back(nb::cast<Table<double>>(previews[d]));
            confidence[d] = checked_confidence(tables.back(), n);
        }
    }
};

// What drafts of a row are worth, in tokens: the highest gain over all numbers of drafts, less the tokens that their time is worth.
double worth(const double* survival, const double* prices, size_t depth, double tokens_per_s) {
    double highest = 0, tokens = 0;
    for (size_t d = 0; d < depth; ++d) {
        tokens += survival[d];
        highest = std::max(highest, tokens - prices[d] * tokens_per_s);
    }
    return highest;
}

// assigned: the drafter of every row. requested: -1, or a drafter that is assigned to the rows of this step.
nb::tuple plan_drafts(const CostTables& tables, const AllEstimates& all, double largest_logit, const nb::tuple& previews,
                      const Table<double>& prices, double tokens_per_s, const Ids& rows, const Ids& lengths, const Ids& max_drafts,
                      const Tally& assigned, int64_t requested, const Work& prefill) {
    const size_t n = rows.size(), depth = prices.shape(1);
    require(nb::len(previews) == all.size() && prices.shape(0) == all.size(), "every drafter has its preview and its prices");
    require(lengths.size() == n && max_drafts.size() == n, "a number for each row");
    require(requested < static_cast<int64_t>(all.size()) && within(rows, assigned.size()), "a row's drafter is none");
    require_rows(rows, all);
    const Previews previewed(previews, n);
    std::vector<double> chosen(n * depth), other(depth);
    std::vector<int64_t> drafters(n);
    const auto worth_of = [&](size_t drafter, size_t i, double* out) {
        if (!all[drafter]) return 0.0;
        const Confidence& known = previewed.confidence[drafter];
        survival(all[drafter]->tables(), all[drafter]->confidence_weight(), largest_logit, rows.data()[i],
                 previewed.exists[drafter] ? known.line(i) : nullptr, known.depth, {depth, 0.0, false}, out);
        return worth(out, prices.data() + drafter * depth, depth, tokens_per_s);
    };
    for (size_t i = 0; i < n; ++i) {
        int64_t& own = assigned.data()[rows.data()[i]];
        if (requested >= 0) own = requested;
        require(0 <= own && static_cast<size_t>(own) < all.size(), "a row's drafter is none");
        drafters[i] = own;
        double* out = chosen.data() + i * depth;
        double highest = worth_of(drafters[i], i, out);
        for (size_t d = 0; d < all.size(); ++d) {
            if (!previewed.exists[d] || !all[d]) continue;
            const double found = worth_of(d, i, other.data());
            if (found <= highest) continue;
            highest = found, drafters[i] = static_cast<int64_t>(d);
            std::copy(other.begin(), other.end(), out);
        }
    }
    const int64_t keys = std::accumulate(lengths.data(), lengths.data() + n, int64_t{0});
    const PassWork rows_alone{static_cast<int64_t>(n), 0, keys, keys}, chunks = work_of(prefill), base = rows_alone + chunks;
    const double unpaid_s = chunks.tokens ? tables.costs.pass_s(base) - tables.costs.pass_s(rows_alone) : 0.0;
    const PriceLadder ladder(tables.costs, base, n, false);
    const Allocation best = tables.best(
        ladder, {chosen.data(), max_drafts.data(), lengths.data(), drafters.data(), n, depth, static_cast<double>(n), unpaid_s});
    return nb::make_tuple(copied(drafters), copied(best.ks), best.tokens, best.seconds, best.plain_seconds, unpaid_s);
}

Returned<int64_t, 1> trim_drafts(const CostTables& tables, const Work& base, const AllEstimates& all, double largest_logit,
                                 const Ids& known_rows, const Ids& known_lengths, const Ids& rows, const Ids& drafters, const Ids& ks,
                                 const Table<double>& confidence, double unpaid_s, int64_t left_alone) {
    const size_t n = rows.size();
    require(drafters.size() == n && ks.size() == n, "a number for each row");
    require_rows(rows, all);
    const Confidence known = checked_confidence(confidence, n);
    const int64_t deepest = std::accumulate(ks.data(), ks.data() + n, int64_t{0}, [](int64_t a, int64_t b) { return std::max(a, b); });
    require(deepest <= static_cast<int64_t>(kMaxDepth), "too deep");
    const auto depth = static_cast<size_t>(deepest);
    const std::vector<int64_t> lengths = lengths_of(rows, known_rows, known_lengths);
    std::vector<double> chances(n * depth);
    for (size_t i = 0; i < n; ++i) {
        const int64_t d = drafters.data()[i];
        require(d < static_cast<int64_t>(all.size()), "a row's drafter is none");
        if (d >= 0 && all[d])
            survival(all[d]->tables(), all[d]->confidence_weight(), largest_logit, rows.data()[i], known.line(i), known.depth, {depth, 0.0, true},
                     chances.data() + i * depth);
    }
    const PriceLadder ladder(tables.costs, work_of(base), n, true);
    Allocation best =
        tables.best(ladder, {chances.data(), ks.data(), lengths.data(), drafters.data(), n, depth, static_cast<double>(n), unpaid_s});
    for (size_t i = 0; i < n; ++i)
        if (rows.data()[i] == left_alone) best.ks[i] = ks.data()[i];
    return copied(best.ks);
}

// Learn from a step, see control/online_cost.py. Returns the seconds that it took, that were predicted, and predicted without drafts.
std::tuple<double, double, double> learn_cost(const CostTables& tables, const Ids& known_rows, const Ids& known_lengths, const Ids& rows,
                                              const Ids& num_verified, const Ids& num_accepted, const Ids& num_drafted, const Ids& drafters,
                                              const Work& prefill, const std::tuple<double, double, double>& seconds, bool settled,
                                              bool observes_host) {
    const size_t n = rows.size();
    require(num_verified.size() == n && num_accepted.size() == n && num_drafted.size() == n, "a number for each row");
    const std::vector<int64_t> lengths = lengths_of(rows, known_rows, known_lengths);
    const auto [draft_s, target_s, host_s] = seconds;
    const StepAccount found =
        tables.costs.learn({lengths.data(), num_verified.data(), num_accepted.data(), tables.step_rows(num_drafted, drafters),
                            work_of(prefill), draft_s, target_s, host_s, settled, observes_host});
    return {found.measured_s, found.predicted_s, found.plain_s};
}

}  // namespace

void bind_costs(nb::module_& m) {
    nb::class_<CostTables>(m, "Costs")
        .def(nb::init<const std::tuple<State, Tally, Tally>&, const std::tuple<Ids, Numbers, State>&, const std::tuple<Numbers, Numbers, bool>&,
                      const std::tuple<double, double, double>&, const State&, const PriceTables&, const StateTally&, const StateTally&,
                      const StateTally&, const Numbers&>(), "sizes"_a.noconvert(), "passes"_a.noconvert(), "curve"_a, "prices"_a,
             "keys"_a.noconvert(), "drafting"_a, "drafters"_a.noconvert(), "host"_a.noconvert(), "drift"_a.noconvert(), "rates"_a)
        .def("drafting_of", &drafting_of, "ks"_a, "drafters"_a)
        .def("prices", &prices, "base"_a, "lengths"_a, "paying"_a, "num_drafters"_a, "depth"_a)
        .def("choose", &choose_drafts, "base"_a, "drafted"_a, "survival"_a, "max_drafts"_a, "lengths"_a, "drafters"_a, "plain_tokens"_a,
             "unpaid_s"_a)
        .def("plan", &plan_drafts, "estimates"_a, "largest_logit"_a, "previews"_a, "prices"_a, "tokens_per_s"_a, "rows"_a, "lengths"_a,
             "max_drafts"_a, "assigned"_a.noconvert(), "requested"_a, "prefill"_a)
        .def("trim", &trim_drafts, "base"_a, "estimates"_a, "largest_logit"_a, "known_rows"_a, "known_lengths"_a, "rows"_a, "drafters"_a,
             "ks"_a, "confidence"_a, "unpaid_s"_a, "left_alone"_a)
        .def("learn", &learn_cost, "known_rows"_a, "known_lengths"_a, "rows"_a, "num_verified"_a, "num_accepted"_a, "num_drafted"_a,
             "drafters"_a, "prefill"_a, "seconds"_a, "settled"_a, "observes_host"_a);
}

}  // namespace paceline
