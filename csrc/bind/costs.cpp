// What steps cost and which drafts they should have, as Python sees it. Everything that comes in is checked here.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "bind/control.h"
#include "control/choice.h"
#include "control/costs.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Tally = Array<int64_t, 1>;
using Work = std::tuple<int64_t, int64_t, int64_t, int64_t>;

constexpr int64_t kMostTokens = int64_t{1} << 40;

PassWork work_of(const Work& work) {
    const auto [tokens, unscored, kv_tokens, pairs] = work;
    require(0 <= tokens && tokens < kMostTokens, "a pass has so many token rows as no machine can hold");
    return {tokens, unscored, kv_tokens, pairs};
}

// Prices, in arrays that Python keeps: see control/online.py.
class CostTables {
  public:
    CostTables(const std::tuple<State, Tally, Tally>& sizes, const std::tuple<Ids, Numbers, State>& passes,
               const std::tuple<Numbers, Numbers, bool>& curve, const std::tuple<double, double, double>& prices, const State& keys,
               const std::tuple<Prices, Prices, Prices>& drafting, const std::tuple<State, Tally>& drafters,
               const std::tuple<State, Tally>& host, const std::tuple<State, Tally>& hour, const Numbers& rates)
        : sizes_(sizes), passes_(passes), curve_(curve), drafting_(drafting), drafters_(drafters), host_(host), hour_(hour), keys_(keys) {
        const auto& [own, seen, last] = sizes_;
        const auto& [size, measured_s, pass_s] = passes_;
        const auto& [counts, seconds, stepped] = curve_;
        const auto& [added, deepening, whole] = drafting_;
        const auto& [factors, drafted] = drafters_;
        const auto& [host_s, host_seen] = host_;
        const auto& [hour_log, num_passes] = hour_;
        require(own.size() > 0 && seen.size() == own.size() && last.size() == own.size(), "tables of sizes differ");
        require(size.size() > 0 && measured_s.size() == size.size() && pass_s.size() == size.size(), "tables of passes differ");
        require(within(size, own.size()), "a size lies outside its table");
        require(counts.size() > 0 && seconds.size() == counts.size(), "no pass has a price");
        require(added.shape(0) == factors.size() && drafted.size() == factors.size(), "prices of drafting do not fit");
        for (size_t axis = 0; axis < 3; ++axis)
            require(deepening.shape(axis) == added.shape(axis) && whole.shape(axis) == added.shape(axis), "prices of drafting do not fit");
        require(added.shape(1) > 1 && added.shape(2) > 0, "prices of drafting do not fit");
        require(host_s.size() == 2 && host_seen.size() == 2, "the host has two kinds of steps");
        require(hour_log.size() == 1 && num_passes.size() == 1, "there is one hour, and one count of passes");
        require(keys.size() == 2, "of keys a price and a doubt");
        require(rates.size() == 9, "nine rates");
        const auto [pair_s, unscored_s, key_s] = prices;
        const double* r = rates.data();
        costs = {{own.data(), seen.data(), own.size(), size.data(), measured_s.data(), pass_s.data(), size.size()},
                 last.data(), num_passes.data(), hour_log.data(),
                 {counts.data(), seconds.data(), counts.size(), stepped},
                 pair_s, unscored_s, keys.data(), key_s,
                 added.data(), deepening.data(), whole.data(), factors.data(), drafted.data(),
                 added.shape(0), added.shape(1) - 1, added.shape(2),
                 host_s.data(), host_seen.data(),
                 {r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8]}};
    }

    StepRows step_rows(const Ids& ks, const Ids& drafters) const {
        require(ks.size() == drafters.size(), "a number for each row");
        for (size_t i = 0; i < ks.size(); ++i) priced(ks.data()[i], drafters.data()[i]);
        return {ks.data(), drafters.data(), ks.size()};
    }

    Best best(const Ladder& ladder, const Candidates& c) const {
        for (size_t i = 0; i < c.n && ladder.with_drafting && costs.drafters; ++i) priced(c.most[i], c.drafters[i]);
        return best_drafts(ladder, c);
    }

    Costs costs{};

  private:
    void priced(int64_t k, int64_t drafter) const {
        require(k <= 0 || (0 <= drafter && static_cast<size_t>(drafter) < costs.drafters), "a row's drafter has no price");
    }

    std::tuple<State, Tally, Tally> sizes_;  // these and the next: held as long as `costs` reads them
    std::tuple<Ids, Numbers, State> passes_;
    std::tuple<Numbers, Numbers, bool> curve_;
    std::tuple<Prices, Prices, Prices> drafting_;
    std::tuple<State, Tally> drafters_, host_, hour_;
    State keys_;
};

std::vector<double> drafting_of(const CostTables& tables, const Ids& ks, const Ids& drafters) {
    const StepRows rows = tables.step_rows(ks, drafters);
    return tables.costs.drafting_s(rows);
}

Handed<double, 2> prices(const CostTables& tables, const Work& base, const Ids& lengths, size_t paying, size_t num_drafters, size_t depth) {
    require(paying <= lengths.size(), "more rows pay than there are");
    require(num_drafters <= tables.costs.drafters && depth <= kMostDepth, "so many drafters, or drafts, have no price");
    auto out = room_for<double>(num_drafters * (depth + 1));
    const int64_t sum = std::accumulate(lengths.data(), lengths.data() + lengths.size(), int64_t{0});
    tables.costs.prices(work_of(base), lengths.size(), sum, paying, num_drafters, depth, out.get());
    return handed(std::move(out), num_drafters, depth + 1);
}

nb::tuple choose_drafts(const CostTables& tables, const Work& base, bool drafted, const Table& alive, const Ids& most, const Ids& lengths,
                        const Ids& drafters, double plain_tokens, double unpaid_s) {
    const size_t n = alive.shape(0), depth = alive.shape(1);
    require(most.size() == n && lengths.size() == n && drafters.size() == n, "a number for each row");
    const Ladder ladder(tables.costs, work_of(base), n, drafted);
    const Best best = tables.best(ladder, {alive.data(), most.data(), lengths.data(), drafters.data(), n, depth, plain_tokens, unpaid_s});
    return nb::make_tuple(copied(best.ks), best.tokens, best.seconds, best.plain_seconds);
}

// What drafters offer.
struct Offers {
    std::vector<Said> of;  // [num_drafters]
    std::vector<bool> there;
    std::vector<Table> kept;  // which `of` points into

    Offers(const nb::tuple& offers, size_t n) : of(nb::len(offers)), there(nb::len(offers)) {
        for (size_t d = 0; d < of.size(); ++d) {
            there[d] = !offers[d].is_none();
            if (!there[d]) continue;
            kept.push_back(nb::cast<Table>(offers[d]));
            of[d] = said(kept.back(), n);
        }
    }
};

// How many tokens drafts of a row are worth: the most that any number of them brings, its time priced at `per_s`.
double worth(const double* alive, const double* prices, size_t depth, double per_s) {
    double most = 0, tokens = 0;
    for (size_t d = 0; d < depth; ++d) {
        tokens += alive[d];
        most = std::max(most, tokens - prices[d] * per_s);
    }
    return most;
}

// own: each row's drafter, of all rows there are; `asked`, where it is one, becomes that of the step's rows.
nb::tuple plan_drafts(const CostTables& tables, const All& all, double largest_logit, const nb::tuple& offers, const Table& prices,
                      double per_s, const Ids& rows, const Ids& lengths, const Ids& most, const Tally& own, int64_t asked,
                      const Work& prefill) {
    const size_t n = rows.size(), depth = prices.shape(1);
    require(nb::len(offers) == all.size() && prices.shape(0) == all.size(), "every drafter has its offer and its prices");
    require(lengths.size() == n && most.size() == n, "a number for each row");
    require(asked < static_cast<int64_t>(all.size()) && within(rows, own.size()), "a row's drafter is none");
    require_rows(rows, all);
    const Offers offered(offers, n);
    std::vector<double> chosen(n * depth), other(depth);
    std::vector<int64_t> drafters(n);
    const auto ask = [&](size_t drafter, size_t i, double* out) {
        if (!all[drafter]) return 0.0;
        const Said& known = offered.of[drafter];
        alive(all[drafter]->habits(), all[drafter]->sureness(), largest_logit, rows.data()[i],
              offered.there[drafter] ? line(known, i) : nullptr, known.depth, {depth, 0.0, false}, out);
        return worth(out, prices.data() + drafter * depth, depth, per_s);
    };
    for (size_t i = 0; i < n; ++i) {
        int64_t& kept = own.data()[rows.data()[i]];
        if (asked >= 0) kept = asked;
        require(0 <= kept && static_cast<size_t>(kept) < all.size(), "a row's drafter is none");
        drafters[i] = kept;
        double* mine = chosen.data() + i * depth;
        double most_worth = ask(drafters[i], i, mine);
        for (size_t d = 0; d < all.size(); ++d) {
            if (!offered.there[d] || !all[d]) continue;
            const double found = ask(d, i, other.data());
            if (found <= most_worth) continue;
            most_worth = found, drafters[i] = static_cast<int64_t>(d);
            std::copy(other.begin(), other.end(), mine);
        }
    }
    const int64_t keys = std::accumulate(lengths.data(), lengths.data() + n, int64_t{0});
    const PassWork rows_alone{static_cast<int64_t>(n), 0, keys, keys}, chunks = work_of(prefill), base = rows_alone + chunks;
    const double unpaid_s = chunks.tokens ? tables.costs.pass_s(base) - tables.costs.pass_s(rows_alone) : 0.0;
    const auto plain_tokens = static_cast<double>(n);
    const Ladder ladder(tables.costs, base, n, false);
    const Best best = tables.best(ladder, {chosen.data(), most.data(), lengths.data(), drafters.data(), n, depth, plain_tokens, unpaid_s});
    return nb::make_tuple(copied(drafters), copied(best.ks), best.tokens, best.seconds, best.plain_seconds, unpaid_s);
}

Counts trim_drafts(const CostTables& tables, const Work& base, const All& all, double largest_logit, const Ids& known_rows, const Ids& known_lengths,
                   const Ids& rows, const Ids& drafters, const Ids& ks, const Table& confidence, double unpaid_s, int64_t left_alone) {
    const size_t n = rows.size();
    require(drafters.size() == n && ks.size() == n && known_rows.size() == known_lengths.size(), "a number for each row");
    require_rows(rows, all);
    const Said known = said(confidence, n);
    const int64_t deepest = std::accumulate(ks.data(), ks.data() + n, int64_t{0}, [](int64_t a, int64_t b) { return std::max(a, b); });
    require(deepest <= static_cast<int64_t>(kMostDepth), "too deep");
    const auto depth = static_cast<size_t>(deepest);
    std::vector<double> chances(n * depth);
    std::vector<int64_t> lengths(n);
    for (size_t i = 0; i < n; ++i) {
        const int64_t* end = known_rows.data() + known_rows.size();
        const int64_t* at = std::find(known_rows.data(), end, rows.data()[i]);
        if (at != end) lengths[i] = known_lengths.data()[at - known_rows.data()];
        const int64_t d = drafters.data()[i];
        require(d < static_cast<int64_t>(all.size()), "a row's drafter is none");
        if (d >= 0 && all[d])
            alive(all[d]->habits(), all[d]->sureness(), largest_logit, rows.data()[i], line(known, i), depth, {depth, 0.0, true},
                  chances.data() + i * depth);
    }
    const Ladder ladder(tables.costs, work_of(base), n, true);
    Best best = tables.best(ladder, {chances.data(), ks.data(), lengths.data(), drafters.data(), n, depth, static_cast<double>(n), unpaid_s});
    for (size_t i = 0; i < n; ++i)
        if (rows.data()[i] == left_alone) best.ks[i] = ks.data()[i];
    return copied(best.ks);
}

// What came of a step, see control/reckoning.py: seconds it took, was to take, and would have taken without drafts.
std::tuple<double, double, double> learn_cost(const CostTables& tables, const Ids& known_rows, const Ids& known_lengths, const Ids& rows,
                                              const Ids& num_verified, const Ids& num_accepted, const Ids& num_drafted, const Ids& drafters,
                                              const Work& prefill, const std::tuple<double, double, double>& seconds, bool settled,
                                              bool tells_of_host) {
    const size_t n = rows.size();
    require(num_verified.size() == n && num_accepted.size() == n && num_drafted.size() == n, "a number for each row");
    require(known_rows.size() == known_lengths.size(), "a length for each row");
    std::vector<int64_t> lengths(n);
    for (size_t i = 0; i < n; ++i) {
        const int64_t* const end = known_rows.data() + known_rows.size();
        const int64_t* const at = std::find(known_rows.data(), end, rows.data()[i]);
        if (at != end) lengths[i] = known_lengths.data()[at - known_rows.data()];
    }
    const auto [draft_s, target_s, host_s] = seconds;
    const Reckoned found = tables.costs.learn({lengths.data(), num_verified.data(), num_accepted.data(), tables.step_rows(num_drafted, drafters),
                                               work_of(prefill), draft_s, target_s, host_s, settled, tells_of_host});
    return {found.measured_s, found.predicted_s, found.plain_s};
}

}  // namespace

void bind_costs(nb::module_& m) {
    nb::class_<CostTables>(m, "Costs")
        .def(nb::init<const std::tuple<State, Tally, Tally>&, const std::tuple<Ids, Numbers, State>&, const std::tuple<Numbers, Numbers, bool>&,
                      const std::tuple<double, double, double>&, const State&, const std::tuple<Prices, Prices, Prices>&, const std::tuple<State, Tally>&,
                      const std::tuple<State, Tally>&, const std::tuple<State, Tally>&, const Numbers&>(),
             "sizes"_a.noconvert(), "passes"_a.noconvert(), "curve"_a, "prices"_a, "keys"_a.noconvert(), "drafting"_a, "drafters"_a.noconvert(),
             "host"_a.noconvert(), "hour"_a.noconvert(), "rates"_a)
        .def("drafting_of", &drafting_of, "ks"_a, "drafters"_a)
        .def("prices", &prices, "base"_a, "lengths"_a, "paying"_a, "num_drafters"_a, "depth"_a)
        .def("choose", &choose_drafts, "base"_a, "drafted"_a, "alive"_a, "most"_a, "lengths"_a, "drafters"_a, "plain_tokens"_a,
             "unpaid_s"_a)
        .def("plan", &plan_drafts, "estimates"_a, "largest_logit"_a, "offers"_a, "prices"_a, "per_s"_a, "rows"_a, "lengths"_a, "most"_a,
             "own"_a.noconvert(), "asked"_a, "prefill"_a)
        .def("trim", &trim_drafts, "base"_a, "estimates"_a, "largest_logit"_a, "known_rows"_a, "known_lengths"_a, "rows"_a,
             "drafters"_a, "ks"_a, "confidence"_a, "unpaid_s"_a, "left_alone"_a)
        .def("learn", &learn_cost, "known_rows"_a, "known_lengths"_a, "rows"_a, "num_verified"_a, "num_accepted"_a, "num_drafted"_a,
             "drafters"_a, "prefill"_a, "seconds"_a, "settled"_a, "tells_of_host"_a);
}

}  // namespace paceline
